"""The values that a repository's files give to names: YAML, JSON, TOML, options of command lines, assignments."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attn_fuse.explain.opening.roots import repository_of
from attn_fuse.explain.spelled import python_files

_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
_MOST_BYTES, _MOST_FILES = 100_000, 400
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


@dataclass(frozen=True)
class Settings:
    """The values that one file, or one class of it, gives to names, at any depth, dicts to groups; and its name."""

    source: str
    values: Mapping[str, Any]


def settings_for(names: Set[str], path: Path) -> Settings | None:
    """The settings of the repository of `path` that know most of `names`, and at least half of them; None without.

    Of several the nearest to `path` is taken.
    """

    def rank(one: tuple[Path, Settings]) -> tuple[int, int, int]:
        return len(names & one[1].values.keys()), len(os.path.commonpath([one[0], path])), -len(str(one[0]))

    wanted = {name for name in names if not name.startswith("_")}
    best = max(_settings(repository_of(path)), key=rank, default=None) if wanted else None
    return best[1] if best is not None and 2 * len(wanted & best[1].values.keys()) >= len(wanted) else None


@functools.lru_cache(maxsize=4)
def _settings(root: Path) -> tuple[tuple[Path, Settings], ...]:
    found: list[tuple[Path, Settings]] = []
    for place, folders, files in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in ("site-packages", "node_modules")]
        for name in sorted(files):
            file = Path(place) / name
            if name.endswith(_SUFFIXES) and file.stat().st_size < _MOST_BYTES and len(found) < _MOST_FILES:
                with contextlib.suppress(Exception):  # a template, or another use of the suffix
                    found.append((file, Settings(name, dict(_flat(_loaded(file))))))
    for file in python_files(root)[:_MOST_FILES]:
        with contextlib.suppress(SyntaxError, ValueError, OSError):
            tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
            found += [(file, Settings(file.name, values)) for values in _assigned(tree) if len(values) > 1]
    return tuple(found)


def _loaded(file: Path) -> Any:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        return json.loads(text)
    if file.suffix == ".toml":
        return tomllib.loads(text)
    return importlib.import_module("yaml").safe_load(text)  # PyYAML, of the extra `explain`


def _flat(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            # As some tools write it: {"lr": {"value": 0.1}}.
            inner = inner["value"] if isinstance(inner, dict) and inner.keys() <= {"value", "desc"} and inner else inner
            if isinstance(key, str):
                yield key, _on_this_machine(inner)
            yield from _flat(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _flat(inner)


def _assigned(tree: ast.Module) -> Iterator[dict[str, Any]]:
    # What a file's command line, its assignments, and each of its classes, dicts and calls of `dict` give to names.
    options: dict[str, Any] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(_, "add_argument"), [ast.Constant(str()), *_] as flags, keywords):
                words = {k.arg: k.value for k in keywords if k.arg}
                names = [str(flag.value) for flag in flags if isinstance(flag, ast.Constant)]
                named = words.get("dest")
                long = next((one for one in names if one.startswith("--")), names[0]).lstrip("-").replace("-", "_")
                name = str(named.value) if isinstance(named, ast.Constant) else long
                if "default" in words:
                    options |= _constant(name, words["default"])
                elif isinstance(action := words.get("action"), ast.Constant) and str(action.value).startswith("store_"):
                    options[name] = action.value == "store_false"
                else:
                    options[name] = None
            case ast.ClassDef(_, _, _, body) | ast.Module(body):
                yield {key: value for one in body for key, value in _bound(one).items()}
            case ast.FunctionDef(_, _, body) if "config" in node.name or "args" in node.name or node.name == "__init__":
                yield {key: value for one in ast.walk(node) for key, value in _bound(one).items()}
            case ast.Dict(keys, values):
                pairs = zip(keys, values, strict=True)
                yield {
                    k: v
                    for key, given in pairs
                    if isinstance(key, ast.Constant)
                    for k, v in _constant(str(key.value), given).items()
                }
            case ast.Call(ast.Name("dict"), _, keywords):
                yield {k: v for word in keywords if word.arg for k, v in _constant(word.arg, word.value).items()}
    yield {name: value for name, value in options.items() if value is not None}


def _bound(node: ast.AST) -> dict[str, Any]:
    match node:
        case ast.Assign([ast.Attribute(ast.Attribute(_, group), name)], value):
            return {group: {}, **_constant(name, value)}
        case ast.Assign([ast.Name(name) | ast.Attribute(_, name)], value) | ast.AnnAssign(
            ast.Name(name), _, value, _
        ) if value is not None:
            return _constant(name, value)
    return {}


def _constant(name: str, node: ast.expr) -> dict[str, Any]:
    with contextlib.suppress(ValueError, SyntaxError, TypeError):
        return {name: _on_this_machine(ast.literal_eval(node))}
    return {}


def _on_this_machine(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda") and not torch.cuda.is_available():
        return "cpu"
    # YAML reads 1e-3 as a text.
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value
