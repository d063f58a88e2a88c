"""Read the names of arguments by the table names.toml: small values that fit each other, and kinds of inputs."""

from __future__ import annotations

import enum
import functools
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH, HEAD, PICTURE, PATCH = 256, 64, 64, 16


@functools.cache
def _table(part: str) -> list[tuple[re.Pattern[str], Any]]:
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[part]
    return [(re.compile(pattern), value) for pattern, value in rows]


def kinds_of(name: str) -> list[str]:
    """The kinds of input that the name of a forward's argument suggests, the likeliest first."""
    known = (kinds for pattern, kinds in _table("forward") if pattern.search(name.lower().strip("_")))
    return list(next(known, []))


def value_for(name: str, hint: Any = None, beside: Mapping[str, Any] | None = None) -> Any:
    """A small value for a constructor's argument, or None if neither its name nor its annotation suggests one.

    hint: the annotation, if any. beside: the other arguments, which the value has to fit.
    """
    options = typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(iter(hint), None)
    if typing.get_origin(hint) is typing.Literal:
        return options[0]
    if hint is bool:
        return False
    expression = _expression(name)
    if expression is None or (isinstance(hint, type) and issubclass(hint, nn.Module)):
        return None
    value = eval(expression, {"torch": torch, "nn": nn, **_fitting({} if beside is None else beside)})
    if hint is str and not isinstance(value, str):
        return None
    if hint is float and isinstance(value, int):
        return float(value)
    if typing.get_origin(hint) in (tuple, list) and type(value) in (int, float):
        many = len(options) if typing.get_origin(hint) is tuple and ... not in options else 2
        return typing.get_origin(hint)((value,) * many)
    return value


def says(name: str, what: str) -> bool:
    """Whether the table gives the expression `what` for a name: "128" for a length."""
    return _expression(name) == what


@functools.lru_cache(maxsize=4096)
def _expression(name: str) -> str | None:
    name = name.lower().strip("_")
    return next((expression for pattern, expression in _table("constructor") if pattern.search(name)), None)


def _fitting(beside: Mapping[str, Any]) -> dict[str, int]:
    # The sizes that expressions use, fixed by the other arguments where possible.
    def found(expression: str) -> int | None:
        values = (v for name, v in beside.items() if type(v) is int and v > 0 and _expression(name) == expression)
        return next(values, None)

    heads, head, width = found("heads"), found("head"), found("width")
    width = width or (heads * (head or HEAD) if heads else WIDTH)
    head = head or (width // heads if heads else HEAD if width % HEAD == 0 else 0)
    heads = heads or (width // head if head and width % head == 0 else next(n for n in (4, 3, 2, 1) if width % n == 0))
    patch, picture = found("patch"), found("picture")
    picture = picture or (PICTURE if PICTURE % (patch or 1) == 0 else 8 * (patch or 1))
    patch = patch or next(n for n in (PATCH, 14, 8, 7, 4, 2, 1) if picture % n == 0)
    return {"heads": heads, "head": head or width // heads, "width": width, "patch": patch, "picture": picture}
