"""Which class of a file is its model: the outermost one, chosen as a person would where several are."""

from __future__ import annotations

import dis
import functools
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import nn

from attn_fuse.errors import ExplainError

# Classes around a model, or for a special use of it: taken only where there is no other.
AROUND = re.compile(r"wrapper|trainer|loss|criterion|optimi|lightning|pipeline|scheduler|ema$|distill|superres", re.I)
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

    Before all comes the class that uses the most others; among equals, one named as the file or as a model is, one that
    is not named as a part is, and one with more code.
    Raises ExplainError where the file defines no nn.Module class.
    """
    classes = list(dict.fromkeys(value for value in vars(module).values() if _is_module_class(value, module)))
    if not classes:
        raise ExplainError(
            f"{module.__file__}: it defines no nn.Module class; pass --entry EXPR, which gives a model or a function"
        )
    reached = {cls: _reachable(cls, module).intersection(classes) - {cls} for cls in classes}
    # Two classes that use each other are both outermost: neither is a part of the other.
    outer = [c for c in classes if not any(c in reached[other] and other not in reached[c] for other in classes)]
    # A class that only varies another is a second choice: the plain one is what the file is about.
    bases = {base for cls in outer for base in cls.__mro__[1:] if base in classes}
    outer += [base for base in classes if base in bases and base not in outer and len(reached[base]) > 0]
    stem = re.sub(r"[^a-z0-9]", "", Path(module.__file__ or "").stem.lower())

    def rank(cls: type[nn.Module]) -> tuple[bool, bool, bool, bool, int, int]:
        name = cls.__name__.lower()
        return (
            "forward" not in vars(cls) and not any("forward" in vars(base) for base in cls.__mro__ if base in classes),
            bool(AROUND.search(name)),
            bool(INSIDE.search(name)),
            name.replace("_", "") != stem,
            -len(reached[cls]),
            -_length(cls),
        )

    return sorted(outer, key=rank)


def _length(cls: type) -> int:
    try:
        return len(inspect.getsource(cls))
    except (OSError, TypeError):
        return 0


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
                # A constructor that is handed an encoder uses the class Encoder.
                taken = {name.replace("_", "") for name in inspect.signature(value).parameters} - {"self"}
                yield from (v for v in vars(module).values() if isinstance(v, type) and v.__name__.lower() in taken)
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
