"""The arguments of a call: those given, what the repository's settings say, and small values by name for the rest."""

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
from pathlib import Path
from typing import Any

from torch import nn

from attn_fuse.explain.names import value_for
from attn_fuse.explain.opening.roots import is_users, repository_of
from attn_fuse.explain.opening.stand_ins import StandIn
from attn_fuse.explain.settings import settings_for

# How many modules deep an argument may be a module that is built of arguments itself.
_DEEPEST = 3
_CONFIG = re.compile(
    r"^(model_?)?(config|configs|configuration|cfg|conf|args|params|hparams|hp|options?|settings|opts?)$"
    r"|_(config|cfg|args|params|hparams)$"
)
# What an argument may be of which nothing is known.
GUESSES: tuple[Any, ...] = (2, 64, None, False, True, 0.1, 8, 1, 256)


@dataclass
class Making:
    """The making of the arguments of one call.

    module: the file, among whose names and in whose repository values are sought. given: values by slot.
    slots: the values of all; configs: the slots of those that have entries. made_up: those by name; guessed: those of
    which nothing says what they are; sources: the
    files that others are from.
    """

    module: types.ModuleType
    given: Mapping[str, Any]
    slots: dict[str, Any] = field(default_factory=dict)
    configs: dict[str, None] = field(default_factory=dict)
    made_up: dict[str, Any] = field(default_factory=dict)
    guessed: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, None] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.module.__file__ or "")

    def below(self, slot: str) -> dict[str, Any]:
        """The given values of the slots directly below one, by their last names."""
        prefix = f"{slot}." if slot else ""
        names = {key[len(prefix) :]: value for key, value in self.given.items() if key.startswith(prefix)}
        return {name: value for name, value in names.items() if "." not in name}


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function or a class that have names; none of one written in C."""
    try:
        own = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return []
    return [p for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the parameters of a function or a class; none where one cannot be resolved."""
    # A NamedTuple has no constructor of its own.
    is_class = isinstance(function, type) and not issubclass(function, tuple)
    made_by = getattr(function, "__init__") if is_class else function  # noqa: B009 - mypy forbids the attribute
    with contextlib.suppress(Exception):
        return {name: hint for name, hint in typing.get_type_hints(made_by).items() if not isinstance(hint, StandIn)}
    return {}


def arguments_of(
    function: Callable[..., Any], making: Making, slot: str = "", depth: int = 0
) -> inspect.BoundArguments:
    """Arguments for a call of `function`: those given, and values for those that have no default.

    slot: that of the argument that the call gives a value for; "" for the model itself. depth: how many such calls this
    one is within.
    """
    given = making.below(slot)
    signature, parameters, hints = inspect.signature(function), parameters_of(function), hints_of(function)
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    prefix = f"{slot}." if slot else ""
    is_open = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if is_open:
        making.configs[slot] = None
    needs = [p.name for p in parameters if p.name not in defaults and p.name not in given]
    inner = {key[len(prefix) :].partition(".")[0] for key in making.given if key.startswith(prefix)} - given.keys()
    values: dict[str, Any] = {
        name: value if isinstance(value, (type, types.ModuleType)) else copy.deepcopy(value)
        for name, value in given.items()
        if is_open or name in signature.parameters
    }
    sized = {name for name in needs if not _CONFIG.search(name)}
    settings = settings_for(sized, making.path) if len(sized) > 1 else None
    known = {n: v for n, v in settings.values.items() if n in sized and not isinstance(v, dict)} if settings else {}
    if settings is not None and known:
        making.sources[settings.source] = None
        values |= known
    making.slots |= {f"{prefix}{name}": value for name, value in values.items()}
    for name in [p.name for p in parameters if (p.name in needs or p.name in inner) and p.name not in values]:
        beside = {**defaults, **values}
        values[name] = _argument(function, name, f"{prefix}{name}", hints.get(name), beside, making, depth)
    return signature.bind(**values)


def _argument(
    function: Callable[..., Any],
    name: str,
    slot: str,
    hint: Any,
    beside: Mapping[str, Any],
    making: Making,
    depth: int,
) -> Any:
    # A value for an argument that has none: a config, a part that is a module, or a small one by its name.
    options = [one for one in (typing.get_args(hint) or (hint,)) if isinstance(one, type)]
    by_name = value_for(name, hint, beside)
    reads = _reads_of(function, name)
    is_config = _CONFIG.search(name) or len(reads) > 1
    users = (one for one in options if not issubclass(one, enum.Enum))
    own = next((one for one in users if is_users(_file(one), (repository_of(making.path),))), None)
    if own is None and is_config:
        # As transformers' models say it.
        own = getattr(function, "config_class", None) or _config_class(reads, making)
    if own is None and by_name is None and not is_config:
        own = _part(name, hint, making.module)
    if own is not None and depth < _DEEPEST and own is not function:
        made = arguments_of(own, making, slot, depth + 1)
        value = own(*made.args, **made.kwargs)
        # Entries that the class has of its own are slots, too, so that errors can change them.
        if not isinstance(value, nn.Module):
            making.configs[slot] = None
            _write_entries(value, slot, making)
        return value
    if is_config:
        making.configs[slot] = None
        return _Entries(slot, making, reads)
    if by_name is not None:
        making.slots[slot] = making.made_up[slot] = by_name
        return by_name
    value = None if type(None) in typing.get_args(hint) else nn.Identity() if nn.Module in options else GUESSES[0]
    making.slots[slot] = making.guessed[slot] = value
    return value


def _write_entries(config: Any, slot: str, making: Making) -> None:
    # Note the entries of a config as slots, and write those that are given.
    entries = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    for key, value in making.below(slot).items():
        with contextlib.suppress(AttributeError, TypeError):
            if isinstance(config, dict):
                config[key] = value
            else:
                object.__setattr__(config, key, value)
    for key, value in [*entries.items()]:
        if isinstance(key, str) and not key.startswith("_"):
            making.slots[f"{slot}.{key}"] = value


def _file(cls: type) -> str:
    return str(getattr(sys.modules.get(cls.__module__), "__file__", None))


def _reads_of(function: Callable[..., Any], name: str) -> set[str]:
    # The entries that the file of a class reads of its argument `name`.
    with contextlib.suppress(OSError, TypeError):
        of = f"(?:self\\.)?{re.escape(name)}"
        text = inspect.getsource(function)
        if not re.search(rf"\b{of}(\.\w|\[['\"])", text):
            return set()
        if _CONFIG.search(name):
            text = Path(inspect.getsourcefile(function) or "").read_text(encoding="utf-8", errors="replace")
        chains = re.findall(rf"\b{of}((?:\.\w+(?!\w*\()|\[['\"]\w+['\"]\])+)", text)
        return {name for chain in chains for name in re.findall(r"\w+", chain)}
    return set()


def _config_class(reads: set[str], making: Making) -> type | None:
    # The class of the repository's, other than a module's, that has most of the entries, and at least half.
    best: tuple[int, type] | None = None
    root = (repository_of(making.path),)
    for value in list(vars(making.module).values()):
        if not isinstance(value, type) or issubclass(value, nn.Module) or not is_users(_file(value), root):
            continue
        has = {p.name for p in parameters_of(value)} | set(dir(value))
        count = len(reads & has)
        if 2 * count >= len(reads) > 0 and (best is None or count > best[0]):
            best = count, value
    return best[1] if best else None


def _part(name: str, hint: Any, module: types.ModuleType) -> type[nn.Module] | None:
    # The class of a module that an argument is called after: `encoder` takes an Encoder.
    if hint not in (None, nn.Module):
        return None
    wanted = name.replace("_", "").lower()
    classes = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, nn.Module)]
    exact = [c for c in classes if c.__name__.lower() == wanted]
    return next(iter(exact or [c for c in classes if len(wanted) > 5 and c.__name__.lower().endswith(wanted)]), None)


class _Entries(dict[str, Any]):
    # A config without a class: an entry comes into being when it is asked for, as an attribute or by key, with the
    # value that the repository's settings or its name give.

    def __init__(self, slot: str, making: Making, reads: set[str]) -> None:
        super().__init__()
        settings = settings_for(reads, making.path)
        known = dict(settings.values) if settings is not None else {}
        if settings is not None:
            making.sources[settings.source] = None
        self.__dict__.update(_slot=slot, _making=making, _known=known, _is_unknown=False)
        for key, value in {**{k: v for k, v in known.items() if k in reads}, **making.below(slot)}.items():
            self._put(key, value)

    def _put(self, key: str, value: Any) -> Any:
        slot, making, known = (self.__dict__[name] for name in ("_slot", "_making", "_known"))
        if type(value) is dict:
            group = _Entries(f"{slot}.{key}", making, set())
            group.__dict__["_known"] = {**known, **value}
            for name, inner in value.items():
                group._put(name, inner)
            value = group
        else:
            making.slots[f"{slot}.{key}"] = value
        self[key] = value
        return value

    def __missing__(self, key: str) -> Any:
        slot, making, known = (self.__dict__[name] for name in ("_slot", "_making", "_known"))
        inner = any(given.startswith(f"{slot}.{key}.") for given in making.given)
        value = known.get(key)
        if key not in known and not inner:
            value = value_for(key, None, self)
            if value is not None:
                making.made_up[f"{slot}.{key}"] = value
        if value is not None or key in known:
            return self._put(key, value)
        self[key] = value = _Entries(f"{slot}.{key}", making, set())
        value.__dict__.update(_known=known, _is_unknown=True)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (name not in self and _has_default(sys._getframe(1))):
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __deepcopy__(self, memo: object) -> _Entries:
        return self

    # An entry that nothing is known of, and that is used as what it is not: an error that names it.
    def _used(self, *others: object) -> Any:
        raise TypeError(f"{self.__dict__['_slot']!r} is not known")

    __call__ = __index__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = _used
    __truediv__ = __rtruediv__ = __mod__ = __pow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _used

    def __iter__(self) -> Iterator[str]:
        return self._used() if self.__dict__["_is_unknown"] and not len(self) else super().__iter__()

    def __bool__(self) -> bool:
        return self._used() if self.__dict__["_is_unknown"] and not len(self) else bool(len(self))


def _has_default(frame: types.FrameType) -> bool:
    # Whether the code asks with `getattr` or `hasattr`, which may have another answer.
    code = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return not code.startswith("LOAD_")
