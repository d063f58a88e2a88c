"""A program with the code of its attentions in place, as a person would edit it."""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attn_fuse.advice import proof
from attn_fuse.backend import analyze_only
from attn_fuse.report import Code, SiteReport, collecting

_GIVEN: dict[str, Any] = {
    "torch": torch, "F": F, "flex_attention": flex_attention, "create_block_mask": create_block_mask,
}  # fmt: skip
# FlexAttention written out: torch has no gradients of it on the CPU.
_WRITTEN_OUT = {"flex_attention": proof.flex_attention, "create_block_mask": lambda mask, *_, **__: mask}


def analysed(program: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> list[SiteReport]:
    """The sites of a program, each with its code."""
    look = functools.partial(analyze_only, options={"pick": "fused"}, codes=True)
    with collecting() as graphs:
        torch.compile(program, backend=look, dynamic=dynamic)(*args)
    return [site for graph in graphs for site in graph.sites]


@contextlib.contextmanager
def edited(codes: Sequence[Code], training: bool) -> Iterator[None]:
    """A block in which the functions of the program run with `codes` in place of the lines that they replace."""
    changed: list[tuple[FunctionType, CodeType]] = []
    given = [(f.__globals__, dict(f.__globals__)) for f in _functions(codes)]
    try:
        for file in {code.file for code in codes}:
            text = _text(file, {code.lines: code for code in codes if code.file == file}.values())
            compiled = {code.co_qualname: code for code in _codes(compile(text, file, "exec"))}
            for function in _functions(code for code in codes if code.file == file):
                changed.append((function, function.__code__))
                function.__code__ = compiled[function.__code__.co_qualname]
                function.__globals__.update(_GIVEN | (_WRITTEN_OUT if training else {}))
        if not changed:
            pytest.skip("its function has no name in its module")
        yield
    finally:
        for function, code in changed:
            function.__code__ = code
        for names, before in given:
            names.update({name: before[name] for name in _GIVEN.keys() & before.keys()})


def _text(file: str, codes: Iterable[Code]) -> str:
    lines: list[str | None] = list(linecache.getlines(file))
    for code in codes:
        place = code.lines[-1][0] - 1
        written = str(lines[place])
        indent = written[: len(written) - len(written.lstrip())]
        for first, last in code.lines:
            lines[first - 1 : last] = [None] * (last - first + 1)
        lines[place] = "".join(f"{indent}{line}\n" for line in code.text)
    return "".join(line for line in lines if line is not None)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _functions(codes: Iterable[Code]) -> list[FunctionType]:
    """The functions and methods of modules that `codes` stand in."""
    places = {(code.file, code.function) for code in codes}
    modules = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) in {file for file, _ in places}]
    owners = [*modules, *(x for m in modules for x in vars(m).values() if isinstance(x, type))]
    found = {id(x): x for owner in owners for x in list(vars(owner).values()) if isinstance(x, FunctionType)}
    return [f for f in found.values() if (f.__code__.co_filename, f.__code__.co_name) in places]
