"""Choose the model: the likeliest file of a folder, and the outermost class of a file that attends."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import types
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.roots import files_of, is_own
from attn_fuse.explain.opening.sources import Say
from attn_fuse.explain.opening.stand_ins import refuse

_PASSED_OVER = {"tests", "test", "venv", "env", "build", "dist", "docs"}
_USUAL = re.compile(r"(^|_)(models?|modeling|transformer|gpt|vit|bert|net|network|unet)(_|$)")
_MOST_BYTES = 1_000_000
# Classes around a model, or for a special use of it, taken only if there is no other.
_AROUND = re.compile(r"wrapper|trainer|loss|criterion|optimi|lightning|pipeline|scheduler|ema$|distill", re.I)
_ATTENDS = re.compile(r"(?<!fl)atte?n|softmax|transformer(?!_dim)|einsum|scaled_dot", re.I)
# Classes inside a model.
_INSIDE = re.compile(
    r"(block|layer|attention|attn|mlp|feedforward|ffn|norm|embed(ding|der)?s?|head|pool\w*|linear|projection)\d*d?$",
    re.I,
)


def file_in(folder: Path, say: Say = lambda note: None) -> Path:
    """The file below `folder` that most likely defines its model, by its classes and its name.

    Files are read, not run. say: is told the choice. Raises ExplainError if no file defines an nn.Module.
    """
    found: list[tuple[tuple[object, ...], Path]] = []
    for file in files_of(folder, ".py"):
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

    In order of weight: whether it attends, has the file's name, uses many classes, and has much code.
    Raises ExplainError if the file defines none.
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
    # Two classes that use each other are both outermost.
    outer = [c for c in classes if not any(c in reached[other] and other not in reached[c] for other in classes)]
    # A variant of another class is only a second choice.
    bases = {base for cls in outer for base in cls.__mro__[1:] if base in classes}
    outer += [base for base in classes if base in bases and base not in outer]
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
            -len(reached[cls]),
            -len(_source(cls)),
        )

    ranked = sorted(outer, key=rank)
    best = ranked[0]
    # A report on a part must say that it is one: see `parts`.
    return [
        cls
        for cls in ranked
        if (_INSIDE.search(best.__name__) or not _INSIDE.search(cls.__name__)) and (attends(cls) or not attends(best))
    ]


def parts(module: types.ModuleType) -> list[type[nn.Module]]:
    """The attending classes that `candidates` leaves out, the largest first, for when no whole model runs."""
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
    # The module classes that the file defines or, unless `own`, imports from its repository.
    held = dict.fromkeys(v for v in vars(module).values() if isinstance(v, type) and issubclass(v, nn.Module))
    return [cls for cls in held if cls.__module__ == module.__name__ or (not own and is_own(cls, module))]


def _reached(cls: type, module: types.ModuleType) -> set[type]:
    # The file's classes that the code of `cls` names, directly or through others.
    found: dict[Any, None] = {}
    waiting: list[Any] = [cls]
    while waiting:
        value = waiting.pop()
        for word in _words(value):
            named = vars(module).get(word)
            is_own = isinstance(named, (type, types.FunctionType)) and named.__module__ == module.__name__
            if is_own and named not in found:
                found[named] = None
                waiting.append(named)
    return {value for value in found if isinstance(value, type)}


@functools.lru_cache(maxsize=4096)
def _words(value: Hashable) -> frozenset[str]:
    # The names in the code of a class or function.
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
