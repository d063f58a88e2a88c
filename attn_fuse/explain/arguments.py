"""Arguments for a constructor: given values, and small values by name for the rest."""

from __future__ import annotations

import contextlib
import copy
import dis
import enum
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from attn_fuse.explain.names import value_for
from attn_fuse.explain.opening.roots import is_own
from attn_fuse.explain.opening.stand_ins import StandIn

# How deep arguments may be nested that need arguments themselves.
_DEEPEST = 3
_CONFIG = re.compile(
    r"^(model_?)?(config|configs|configuration|cfg|conf|args|params|hparams|hp|options?|settings|opts?)$"
    r"|_(config|cfg|args|params|hparams)$"
)
# Values for an argument of which nothing is known.
GUESSES: tuple[Any, ...] = (64, 2, None, False, True, 0.1, 8, 1, 256)


@dataclass
class Making:
    """The arguments of one call in the making.

    module: the file, whose classes may be arguments. given: values by slot. slots: all values by slot.
    configs: the slots that have entries. made_up: values chosen by name. guessed: values of which nothing is known.
    """

    module: types.ModuleType
    given: Mapping[str, Any]
    slots: dict[str, Any] = field(default_factory=dict)
    configs: dict[str, None] = field(default_factory=dict)
    made_up: dict[str, Any] = field(default_factory=dict)
    guessed: dict[str, Any] = field(default_factory=dict)

    def below(self, slot: str) -> dict[str, Any]:
        """The given values directly below a slot, by their last names."""
        prefix = f"{slot}." if slot else ""
        names = {key[len(prefix) :]: value for key, value in self.given.items() if key.startswith(prefix)}
        return {name: value for name, value in names.items() if "." not in name}


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The named parameters of a function or class; none if it is written in C."""
    try:
        own = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return []
    return [p for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the parameters of a function or class; none if one cannot be resolved."""
    # A NamedTuple has no constructor of its own.
    is_class = isinstance(function, type) and not issubclass(function, tuple)
    made_by = getattr(function, "__init__") if is_class else function  # noqa: B009 - mypy forbids the attribute
    with contextlib.suppress(Exception):
        return {name: hint for name, hint in typing.get_type_hints(made_by).items() if not isinstance(hint, StandIn)}
    return {}


def arguments_of(function: Callable[..., Any], making: Making, slot: str = "") -> inspect.BoundArguments:
    """Arguments for a call of `function`: given values, and values for parameters without a default.

    slot: the argument that the call makes; "" for the model itself.
    """
    given = making.below(slot)
    signature, parameters, hints = inspect.signature(function), parameters_of(function), hints_of(function)
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    prefix = f"{slot}." if slot else ""
    is_open = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if is_open:
        making.configs[slot] = None
    values: dict[str, Any] = {
        name: copy.deepcopy(value) for name, value in given.items() if is_open or name in signature.parameters
    }
    making.slots |= {f"{prefix}{name}": value for name, value in values.items()}
    for name in [p.name for p in parameters if p.name not in {**defaults, **values}]:
        values[name] = _argument(function, f"{prefix}{name}", hints.get(name), {**defaults, **values}, making)
    return signature.bind(**values)


def _argument(function: Callable[..., Any], slot: str, hint: Any, beside: Mapping[str, Any], making: Making) -> Any:
    # A config, an object of an annotated class, or a small value by name.
    name = slot.rpartition(".")[2]
    options = [one for one in (typing.get_args(hint) or (hint,)) if isinstance(one, type)]
    is_config = _CONFIG.search(name)
    own = next((one for one in options if is_own(one, making.module) and not issubclass(one, enum.Enum)), None)
    if own is None and is_config:
        # Models of transformers name it.
        own = getattr(function, "config_class", None) or _config_class(name, making)
    if own is not None and slot.count(".") < _DEEPEST and own is not function:
        made = arguments_of(own, making, slot)
        value = own(*made.args, **made.kwargs)
        if not isinstance(value, nn.Module):
            making.configs[slot] = None
            _write_entries(value, slot, making)
        return value
    if is_config:
        making.configs[slot] = None
        return _Entries(slot, making)
    value = value_for(name, hint, beside)
    if value is not None:
        making.made_up[slot] = value
    else:
        value = None if type(None) in typing.get_args(hint) else nn.Identity() if nn.Module in options else GUESSES[0]
        making.guessed[slot] = value
    making.slots[slot] = value
    return value


def _write_entries(config: Any, slot: str, making: Making) -> None:
    # Writes the given entries of a config, and notes all as slots: an error may ask to change one that the class adds.
    for key, value in making.below(slot).items():
        with contextlib.suppress(AttributeError, TypeError):
            object.__setattr__(config, key, value)
    entries = getattr(config, "__dict__", {})
    making.slots |= {f"{slot}.{key}": value for key, value in entries.items() if not key.startswith("_")}


def _config_class(name: str, making: Making) -> type | None:
    # The file's class, no module, with most of the attributes that the file reads from `name`, and at least half.
    reads = set(re.findall(rf"\b{name}\.(\w+)", inspect.getsource(making.module)))
    held = [value for value in vars(making.module).values() if isinstance(value, type)]
    own = [cls for cls in held if is_own(cls, making.module) and not issubclass(cls, nn.Module)]
    has = {cls: len(reads & {*dir(cls), *(p.name for p in parameters_of(cls))}) for cls in own}
    best = max(own, key=has.__getitem__, default=None)
    return best if best is not None and 2 * has[best] >= len(reads) > 0 else None


class _Entries(dict[str, Any]):
    # A config without a class, or a group of its entries. Reading an entry, as an attribute or by key, creates it: with
    # a value by its name, or as a group.
    _slot: str
    _making: Making

    def __init__(self, slot: str, making: Making) -> None:
        super().__init__(making.below(slot))
        making.slots |= {f"{slot}.{key}": value for key, value in self.items()}
        vars(self).update(_slot=slot, _making=making)

    def __missing__(self, key: str) -> Any:
        slot, making = f"{self._slot}.{key}", self._making
        is_group = any(given.startswith(f"{slot}.") for given in making.given)
        value = None if is_group else value_for(key, None, self)
        if value is None:
            self[key] = value = _Entries(slot, making)
        else:
            self[key] = making.slots[slot] = making.made_up[slot] = value
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (name not in self and _has_default(sys._getframe(1))):
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __deepcopy__(self, memo: object) -> _Entries:
        return self

    # An entry of which nothing is known raises an error that names it when used as a number, function or sequence.
    def _used(self, *others: object) -> Any:
        raise TypeError(f"{self._slot!r} is not known")

    __call__ = __index__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = _used
    __truediv__ = __rtruediv__ = __mod__ = __pow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _used

    def __iter__(self) -> Iterator[str]:
        return super().__iter__() if len(self) else self._used()

    def __bool__(self) -> bool:
        return bool(len(self)) or ("." in self._slot and self._used())


def _has_default(frame: types.FrameType) -> bool:
    # Whether the code asks with `getattr` or `hasattr`, which allow for a missing entry.
    code = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return not code.startswith("LOAD_")
