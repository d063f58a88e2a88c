"""Which class of a file is its model: the outermost one, chosen as a person would where several are."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import itertools
import os
import re
import sys
import textwrap
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building.arguments import PART_KIND
from attn_fuse.explain.opening.absent_values import refuse
from attn_fuse.explain.reading.factories import chains_in, factories_in
from attn_fuse.explain.reading.stages import stages_of
from attn_fuse.explain.roots import repository_of

# Classes around a model, or for a special use of it: taken only where there is no other.
AROUND = re.compile(r"wrapper|trainer|loss|criterion|optimi|lightning|pipeline|scheduler|ema$|distill|superres", re.I)
ATTENDS = re.compile(r"(?<!fl)atte?n|softmax|transformer(?!_dim)|einsum|scaled_dot", re.I)
MOST_FILES, MOST_BYTES, COUNTED = 300, 200_000, 5
# Classes inside a model.
INSIDE = re.compile(
    r"(block|layer|attention|attn|mlp|feedforward|ffn|norm|embed(ding|der)?s?|head|pool\w*|linear|projection)\d*d?$",
    re.I,
)


def outermost(module: types.ModuleType) -> type[nn.Module]:
    """The first of `candidates`. Raises ExplainError where the file defines no nn.Module class."""
    return candidates(module)[0]


def candidates(module: types.ModuleType) -> list[type[nn.Module]]:
    """The nn.Module classes of the file that no other class uses, the likeliest model first.

    First come those that run an attention. Of these, one named as the file is, one that more of the repository's other
    files name, one that uses more other classes, and one with more code.
    Where the file has none, those that it imports from its repository and that one of its functions gives. A function
    that gives an `nn.Sequential` of the file's classes is as a class.
    Raises ExplainError where there is none of these, either.
    """
    classes = list(dict.fromkeys(value for value in vars(module).values() if _is_module_class(value, module)))
    # A file of factories only: what they build.
    classes = classes or [cls for cls in _imported_by(module) if factories_in(cls, vars(module))]
    # Or of a library's models, by name.
    classes = classes or chains_in(module, made_by={"create_model"})
    if not classes:
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                refuse(value)
        raise ExplainError(
            f"{module.__file__}: it defines no nn.Module class; pass --entry EXPR, which gives a model or a function"
        )
    classes += [chain for chain in chains_in(module) if _attends(_reachable(chain, module))]
    reached = {cls: _reachable(cls, module).intersection(classes) - {cls} for cls in classes}
    # Two classes that use each other are both outermost: neither is a part of the other.
    outer = [c for c in classes if not any(c in reached[other] and other not in reached[c] for other in classes)]
    # A class that only varies another is a second choice: the plain one is what the file is about.
    bases = {base for cls in outer for base in cls.__mro__[1:] if base in classes}
    outer += [base for base in classes if base in bases and base not in outer and (reached[base] or _attends([base]))]
    named = _files_that_name([cls.__name__ for cls in outer], module)
    stem = re.sub(r"[^a-z0-9]", "", Path(module.__file__ or "").stem.lower())
    stem = re.sub(r"(py)?torch$|^model(ing|s)?|(?<=.)model(s|ing)?$", "", stem) or stem

    def rank(cls: type[nn.Module]) -> tuple[bool, bool, bool, bool, bool, int, int, int]:
        name = cls.__name__.lower()
        return (
            not _can_run(cls),
            bool(AROUND.search(name)),
            bool(INSIDE.search(name)),
            not _attends({cls, *reached[cls]}),
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
        if (INSIDE.search(best.__name__) or not INSIDE.search(cls.__name__))
        and (_attends({cls, *reached[cls]}) or not _attends({best, *reached[best]}))
    ]


def parts(module: types.ModuleType) -> list[type[nn.Module]]:
    """The classes that attend and that `candidates` leaves out, for where no whole model runs: the largest first.

    Those of the file, and those of its repository that it imports.
    """
    whole = candidates(module)
    found: list[tuple[int, int, type[nn.Module]]] = []
    for cls in _imported_by(module):
        if cls not in whole and _can_run(cls) and ATTENDS.search(_code(cls)):
            found.append((len(_reachable(cls, sys.modules[cls.__module__])), len(_source(cls)), cls))
    return [cls for _, _, cls in sorted(found, key=lambda one: one[:2], reverse=True)]


def _imported_by(module: types.ModuleType) -> list[type[nn.Module]]:
    # The module classes among the names of the file that it or a file of its repository defines.
    root = str(repository_of(Path(module.__file__ or "")))
    held = dict.fromkeys(value for value in vars(module).values() if isinstance(value, type))
    files = {cls: str(getattr(sys.modules.get(cls.__module__), "__file__", None)) for cls in held}
    return [cls for cls, file in files.items() if issubclass(cls, nn.Module) and file.startswith(root)]


def _can_run(cls: type[nn.Module]) -> bool:
    # Whether it has a forward of its own, or methods that take its place.
    has_forward = any("forward" in vars(base) for base in cls.__mro__ if base.__module__ != nn.Module.__module__)
    return has_forward or bool(stages_of(cls))


def _attends(classes: Iterable[type]) -> bool:
    # Whether the code of one of the classes names an attention, as one that it imports.
    return any(ATTENDS.search(_source(cls)) for cls in classes)


def _code(cls: type) -> str:
    # The statements of the class, without its name, comments and docstrings, which may speak of the whole model.
    try:
        tree = ast.parse(textwrap.dedent(_source(cls)))
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        match node:
            case (
                ast.ClassDef(body=[ast.Expr(ast.Constant(str())), *rest])
                | ast.FunctionDef(body=[ast.Expr(ast.Constant(str())), *rest])
            ):
                node.body = rest
    return "\n".join(ast.unparse(statement) for held in tree.body for statement in getattr(held, "body", ()))


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


def _files_that_name(names: Sequence[str], module: types.ModuleType) -> Counter[str]:
    # In how many other files of the repository each of the names stands, up to COUNTED: more say nothing more.
    counts: Counter[str] = Counter()
    path = Path(module.__file__ or "")
    if len(names) < 2:
        return counts
    patterns = {name: re.compile(rf"\b{re.escape(name)}\b") for name in names}
    for file in itertools.islice(_texts(repository_of(path)), MOST_FILES):
        if file == path:
            continue
        with contextlib.suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace") if file.stat().st_size < MOST_BYTES else ""
            counts.update(name for name, pattern in patterns.items() if name in text and pattern.search(text))
    return Counter({name: min(count, COUNTED) for name, count in counts.items()})


def _texts(root: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in ("node_modules", "site-packages"))
        yield from (Path(place) / name for name in sorted(names) if name.endswith((".py", ".md", ".yaml", ".yml")))


def _is_module_class(value: object, module: types.ModuleType) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__


def _reachable(cls: type, module: types.ModuleType) -> set[type]:
    # The classes that the code of `cls` names, and the code of what it names, through the file's own definitions.
    classes: set[type] = set()
    seen: set[int] = set()
    waiting: list[object] = list(_named_by(cls, module))
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, type):
            classes.add(value)
        waiting += _named_by(value, module)
    return classes


def _named_by(value: object, module: types.ModuleType) -> Iterator[object]:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if callable(value):
        value = inspect.unwrap(value)
    if isinstance(value, type):
        if value.__module__ == module.__name__:
            yield from value.__bases__
            yield from vars(value).values()
    elif isinstance(value, types.FunctionType):
        if value.__globals__ is vars(module):
            if value.__name__ == "__init__":
                # A constructor that is handed an encoder uses the class Encoder, or MeshedEncoder.
                taken = {name.replace("_", "") for name in inspect.signature(value).parameters} - {"self"}
                kinds = tuple(filter(PART_KIND.fullmatch, taken))
                held = (v for v in vars(module).values() if isinstance(v, type))
                yield from (v for v in held if (name := v.__name__.lower()) in taken or name.endswith(kinds))
            yield from (vars(module)[name] for name in _global_names(value.__code__) if name in vars(module))
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, functools.partial):
        yield value.func
        yield from value.args
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> frozenset[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return frozenset(names)
