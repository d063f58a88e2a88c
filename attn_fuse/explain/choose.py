"""Chooses the model: the file of a folder that likeliest has it, and the outermost class of a file that attends."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import types
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.roots import is_users, repository_of
from attn_fuse.explain.opening.sources import Say
from attn_fuse.explain.opening.stand_ins import refuse
from attn_fuse.explain.spelled import python_files

_PASSED_OVER = {"tests", "test", "venv", "env", "build", "dist", "docs"}
_USUAL = re.compile(r"(^|_)(models?|modeling|transformer|gpt|vit|bert|net|network|unet)(_|$)")
_MOST_BYTES, _MOST_FILES, _COUNTED = 1_000_000, 300, 5
# Classes around a model, or for a special use of it: taken only where there is no other.
_AROUND = re.compile(r"wrapper|trainer|loss|criterion|optimi|lightning|pipeline|scheduler|ema$|distill", re.I)
_ATTENDS = re.compile(r"(?<!fl)atte?n|softmax|transformer(?!_dim)|einsum|scaled_dot", re.I)
# Classes inside a model.
_INSIDE = re.compile(
    r"(block|layer|attention|attn|mlp|feedforward|ffn|norm|embed(ding|der)?s?|head|pool\w*|linear|projection)\d*d?$",
    re.I,
)


def file_in(folder: Path, say: Say = lambda note: None) -> Path:
    """The file below `folder` that likeliest defines its model, by its classes and its name; `say` is told which.

    Files are read, not run. Raises ExplainError where none defines an nn.Module.
    """
    found: list[tuple[tuple[object, ...], Path]] = []
    for file in python_files(folder):
        below = file.relative_to(folder)
        if _PASSED_OVER & set(below.parts) or file.name.startswith(("test_", "setup.py", "conftest")):
            continue
        text = file.read_text(encoding="utf-8", errors="replace") if file.stat().st_size < _MOST_BYTES else ""
        classes = re.findall(r"^class (\w+)\(.*\bModule\b", text, re.M)
        if classes:
            is_around = all(map(_AROUND.search, classes))
            rank = (is_around, not _USUAL.search(file.stem.lower()), not re.search("softmax|attention", text, re.I))
            found.append(((*rank, len(below.parts), -len(classes), str(below)), file))
    if not found:
        raise ExplainError(
            f"{folder}: no Python file in it defines an nn.Module class; pass the file that builds the model"
        )
    best, *others = [file for _, file in sorted(found, key=lambda one: one[0])]
    if others:
        names = ", ".join(str(other.relative_to(folder)) for other in others[:3])
        say(f"of {len(found)} files with models, {best.relative_to(folder)} is taken; others: {names}")
    return best


def candidates(module: types.ModuleType) -> list[type[nn.Module]]:
    """The nn.Module classes of the file that no other class uses, the likeliest model first.

    First come those that run an attention. Of these, one named as the file is, one that more of the repository's other
    files name, one that uses more other classes, and one with more code.
    Raises ExplainError where the file defines none.
    """
    classes = _classes(module, own=True)
    if not classes:
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                refuse(value)
        classes = _classes(module, own=False)
    if not classes:
        raise ExplainError(
            f"{module.__file__}: it defines no nn.Module class; pass --entry EXPR, which gives a model or a function"
        )
    reached = {cls: _reached(cls, module).intersection(classes) - {cls} for cls in classes}
    # Two classes that use each other are both outermost: neither is a part of the other.
    outer = [c for c in classes if not any(c in reached[other] and other not in reached[c] for other in classes)]
    # A class that only varies another is a second choice: the plain one is what the file is about.
    bases = {base for cls in outer for base in cls.__mro__[1:] if base in classes}
    outer += [base for base in classes if base in bases and base not in outer]
    named = _files_that_name([cls.__name__ for cls in outer], module)
    stem = re.sub(r"[^a-z0-9]", "", Path(module.__file__ or "").stem.lower())
    stem = re.sub(r"(py)?torch$|^model(ing|s)?|(?<=.)model(s|ing)?$", "", stem) or stem

    def attends(cls: type[nn.Module]) -> bool:
        return any(_ATTENDS.search(_source(one)) for one in {cls, *reached[cls]})

    def rank(cls: type[nn.Module]) -> tuple[object, ...]:
        name = cls.__name__.lower()
        return (
            cls.forward is nn.Module.forward,
            bool(_AROUND.search(name)),
            bool(_INSIDE.search(name)),
            not attends(cls),
            name.replace("_", "") != stem,
            -named[cls.__name__],
            -len(reached[cls]),
            -len(_source(cls)),
        )

    ranked = sorted(outer, key=rank)
    best = ranked[0]
    # A part in place of a model would be a report on something else: see `parts`.
    return [
        cls
        for cls in ranked
        if (_INSIDE.search(best.__name__) or not _INSIDE.search(cls.__name__)) and (attends(cls) or not attends(best))
    ]


def parts(module: types.ModuleType) -> list[type[nn.Module]]:
    """The classes that attend and that `candidates` leaves out, for where no whole model runs: the largest first."""
    whole = candidates(module)
    found = [
        cls
        for cls in _classes(module, own=False)
        if cls not in whole and cls.forward is not nn.Module.forward and _ATTENDS.search(_source(cls))
    ]
    return sorted(
        found, key=lambda cls: (len(_reached(cls, sys.modules[cls.__module__])), len(_source(cls))), reverse=True
    )


def _classes(module: types.ModuleType, own: bool) -> list[type[nn.Module]]:
    # The module classes among the names of the file that it, or where not `own` another of the repository, defines.
    root = (repository_of(Path(module.__file__ or "")),)
    held = dict.fromkeys(value for value in list(vars(module).values()) if isinstance(value, type))
    return [
        cls
        for cls in held
        if issubclass(cls, nn.Module)
        and (
            cls.__module__ == module.__name__
            or (not own and is_users(str(getattr(sys.modules.get(cls.__module__), "__file__", None)), root))
        )
    ]


def _reached(cls: type, module: types.ModuleType) -> set[type]:
    # The classes that the code of `cls` names, and the code of what it names, of the file's own definitions.
    found: dict[Any, None] = {}
    waiting: list[Any] = [cls]
    while waiting:
        value = waiting.pop()
        for word in _words(value) | _handed_to(str(getattr(value, "__name__", "")), module.__file__ or ""):
            named = vars(module).get(word)
            is_own = isinstance(named, (type, types.FunctionType)) and named.__module__ == module.__name__
            if is_own and named not in found:
                found[named] = None
                waiting.append(named)
    return {value for value in found if isinstance(value, type)}


@functools.lru_cache(maxsize=4096)
def _handed_to(name: str, file: str) -> frozenset[str]:
    # The names that calls of a name in a file pass: `ResNet(Bottleneck, [3, 4, 6, 3])`.
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    passed = (call.args for call in calls if isinstance(call.func, ast.Name) and call.func.id == name)
    return frozenset(arg.id for args in passed for arg in args if isinstance(arg, ast.Name))


@functools.lru_cache(maxsize=4096)
def _words(value: Hashable) -> frozenset[str]:
    # The names that the code of a class or a function loads.
    try:
        tree = ast.parse(inspect.cleandoc("\n" + _source(value)))
    except SyntaxError:
        return frozenset(re.findall(r"\w+", _source(value)))
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def _source(value: Any) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        return ""


def _files_that_name(names: list[str], module: types.ModuleType) -> Counter[str]:
    # In how many other files of the repository each of the names stands, up to _COUNTED: more say nothing more.
    path = Path(module.__file__ or "")
    counts: Counter[str] = Counter()
    for text in _texts(path) if len(names) > 1 else ():
        counts.update(name for name in names if name in text and re.search(rf"\b{re.escape(name)}\b", text))
    return Counter({name: min(count, _COUNTED) for name, count in counts.items()})


def _texts(path: Path) -> Iterator[str]:
    root = repository_of(path)
    for file in [*python_files(root)[:_MOST_FILES], *root.glob("*.md")]:
        if file != path and file.stat().st_size < _MOST_BYTES:
            yield file.read_text(encoding="utf-8", errors="replace")
