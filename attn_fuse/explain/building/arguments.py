"""A call of a class or a function, with arguments made for it: configs, parts that are modules, and small sizes."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building.built_with import class_called, entries_asked, value_built_with
from attn_fuse.explain.building.config_classes import as_assigned, config_class, config_of
from attn_fuse.explain.building.config_reads import is_read_as_config, reads_of
from attn_fuse.explain.building.configs import config_without_class, is_config_name
from attn_fuse.explain.building.sizes import BY_KIND, DEPTH, WIDTH, guess_for, in_words, may_be_none, value_for
from attn_fuse.explain.opening.open_file import Say
from attn_fuse.explain.reading.signatures import defaults_of, hints_of, without_default

# How many modules deep an argument may be a module that is built of arguments itself.
DEEPEST = 3
# Arguments that are a class of layers, and no number of them.
LAYER_CLASS = re.compile(r"(norm|act|embed|mlp|attn|block)_?layer$")

# Parts that are told by the last word of their class, as a MeshedDecoder is a decoder.
PART_KIND = re.compile(r"encoder|decoder|backbone|generator")

# Arguments whose names say nothing get one of these in turn, by their annotation.
_GUESSES: dict[Any, tuple[Any, ...]] = {
    int: (2, 8, WIDTH, 1, 4, BY_KIND), float: (0.1, 1.0, 0.0, 0.5, 2.0, 0.1),
    bool: (False, True, False, True, False, False), None: (2, 8, False, WIDTH, 0.1, BY_KIND),
}  # fmt: skip
GUESSES = len(_GUESSES[None])
# In place of a guess: an argument that is kept and never used.
HELD = -1
_SEQUENCES = (tuple, list, Sequence)

# A call that is ready to be made, and what says its sizes: the configs and the arguments.
Call = tuple[Callable[[], Any], tuple[object, ...]]


class UnknownArgument(ExplainError):
    """An argument has no default, and nothing says what it is."""


class Held:
    """An argument that a constructor may keep, as a tokenizer; to use it raises UnknownArgument."""

    def __init__(self, function: str, name: str) -> None:
        self._of = function, name

    def _used(self, *others: object) -> NoReturn:
        function, name = self._of
        raise UnknownArgument(f"cannot build {function}: it uses {name}; pass --entry '{function}({name}=...)'")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._used()

    __call__ = __iter__ = __len__ = __bool__ = __index__ = __getitem__ = __contains__ = __enter__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _used
    __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __mod__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _used
    __eq__ = __ne__ = _used
    __hash__ = object.__hash__


def call_of(
    function: Callable[..., Any],
    namespace: Mapping[str, Any],
    path: Path,
    say: Say,
    depth: int = 0,
    with_none: bool = False,
    given: Mapping[str, Any] = MappingProxyType({}),
    given_parts: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
    guess: int | None = None,
    config_rank: int = 0,
    needed: Collection[str] = (),
) -> Call:
    """A call of `function`, a class or a function, and what says its sizes. What was made up is said.

    namespace: the names among which classes of configs and parts are sought. path: the file whose repository is asked.
    depth: of how many modules this one is a part. with_none: whether arguments whose default is None get a value, too,
    where their names say one. given: arguments that are known; given_parts: those that are built with each call.
    guess: which guess, below GUESSES, an argument gets whose name says nothing; HELD for one that raises an error when
    it is used; None for none.
    config_rank: which of the file's values a config without a class is, 0 for the one that fits best. needed: arguments
    that get a value though they have a default.
    Raises UnknownArgument where an argument is not known, and ExplainError where there is no config of that rank.
    """
    arguments: dict[str, Any] = copy.deepcopy(dict(given))
    parts: dict[str, Callable[[], Any]] = dict(given_parts)
    configs: list[object] = []
    sizes: dict[str, Any] = {}
    needs = without_default(function)
    needs |= {name: hints_of(function).get(name) for name in needed}
    if with_none:
        hints, defaults = hints_of(function), defaults_of(function)
        absent = {
            n: hints.get(n)
            for n, value in defaults.items()
            if value is None and not LAYER_CLASS.search(n) and not _is_module(hints.get(n))
        }
        # An option that is off by None is not on by False, which 0 is not.
        values = {n: value_for(n, h, defaults) for n, h in absent.items()}
        needs |= {
            n: h for n, h in absent.items() if is_config_name(n) or (values[n] is not None and values[n] is not False)
        }
    for name, hint in ((name, hint) for name, hint in needs.items() if name not in {*arguments, *parts}):
        of = config_class(function, name, hint, namespace)
        is_part = _is_module(hint) or value_for(name, hint) is None
        part = _part(name, hint, namespace) if is_part and depth < DEEPEST else None
        if part is not None and part is not function:
            parts[name] = call_of(part, namespace, path, say, depth + 1)[0]
            continue
        if of is not None:
            entry = None if guess in (None, HELD) else _GUESSES[int][guess]
            arguments[name] = _of_class(function, name, of, path, say, with_none, entry)
        # One letter says less than the attributes that the constructor reads.
        elif is_config_name(name) or (
            hint in (None, Any) and (value_for(name) is None or len(name) == 1) and is_read_as_config(function, name)
        ):
            entry = None if guess in (None, HELD) else _GUESSES[int][guess]
            arguments[name] = config_without_class(function, name, namespace, path, say, entry, config_rank)
        else:
            sizes[name] = hint
            continue
        configs.append(arguments[name])
    if config_rank and not configs:
        raise ExplainError(f"cannot build {function.__name__}: it takes no config")
    if sizes:
        values, guessed = _sizes(function, sizes, given, guess)
        arguments.update(values, **guessed)
        if values:
            say(f"sizes by name: {function.__name__}({in_words(values)})")
        if guess == HELD:
            say(f"held and never used, so that it may be missing: {', '.join(guessed)}")
        elif guessed:
            say(f"guesses, for names that say nothing: {function.__name__}({in_words(guessed)})")

    def make() -> Any:
        bound = inspect.signature(function).bind(**arguments, **{name: build() for name, build in parts.items()})
        return function(*bound.args, **bound.kwargs)

    return make, (*configs, {**defaults_of(function), **arguments})


def _of_class(
    function: Callable[..., Any], name: str, of: type, path: Path, say: Say, with_none: bool, entry: Any
) -> object:
    try:
        return config_of(function, of, path, say, with_none, entry)
    except ExplainError:
        made = as_assigned(of, name, reads_of(function, name, path))
        if made is None:
            raise
        say(f"{name}: what {of.__name__} assigns, and small numbers by name for the rest")
        return made


def _is_module(hint: object) -> bool:
    options = typing.get_args(hint) or (hint,)
    return any(isinstance(option, type) and issubclass(option, nn.Module) for option in options)


def _takes_any_module(hint: object) -> bool:
    options = typing.get_args(hint) or (hint,)
    return nn.Module in options or (_is_module(hint) and any(typing.get_origin(o) is Callable for o in options))


def _sizes(
    function: Callable[..., Any], needs: Mapping[str, Any], others: Mapping[str, Any], guess: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    # A small value for each of `needs` beside the `others`: those by name or use, and the guesses for the rest. Raises
    # UnknownArgument without one.
    name = function.__name__
    given = {**{key: value for key, value in defaults_of(function).items() if key not in needs}, **others}
    values: dict[str, Any] = {}
    for key, hint in needs.items():
        values[key] = value_for(key, hint, {**given, **values})
        if values[key] is None and isinstance(function, type) and hint in (None, Any, int, float, bool, str):
            values[key] = value_built_with(function, key, {**given, **values})
        values[key] = _in_sequence(function, key, hint, values[key])
        values[key] = values[key] if values[key] is not None else _called_class(function, key, hint)
    unknown = [key for key, value in values.items() if value is None]
    guesses: dict[str, Any] = {}
    if guess is not None:
        # What takes any module takes one that does nothing.
        any_module = [key for key in unknown if _takes_any_module(needs[key]) and not may_be_none(needs[key])]
        guesses = {key: nn.Identity() for key in any_module}
        unknown = [key for key in unknown if key not in guesses]
    if guess == HELD:
        guesses |= {key: None if may_be_none(needs[key]) else Held(name, key) for key in unknown}
        unknown = []
    elif guess is not None:
        kinds = {key: needs[key] if needs[key] in _GUESSES else None for key in unknown if needs[key] is not str}
        guesses |= {
            key: None
            if may_be_none(needs[key])
            else _in_sequence(function, key, needs[key], guess_for(key, _GUESSES[kind][guess]))
            for key, kind in kinds.items()
        }
        unknown = [key for key in unknown if key not in guesses]
    if unknown:
        example = ", ".join(f"{key}={'...' if value is None else repr(value)}" for key, value in values.items())
        subject = "its constructor" if isinstance(function, type) else "it"
        raise UnknownArgument(
            f"cannot build {name}: {subject} needs {', '.join(unknown)}; pass --entry '{name}({example})'"
        )
    return {key: value for key, value in values.items() if value is not None}, guesses


def _called_class(function: Callable[..., Any], name: str, hint: Any) -> type[nn.Module] | None:
    is_open = hint in (None, Any, type, Callable) or typing.get_origin(hint) in (type, Callable)
    return class_called(function, name) if is_open and isinstance(function, type) else None


def _in_sequence(function: Callable[..., Any], name: str, hint: Any, value: Any) -> Any:
    # A number, or where the annotation or the constructor takes a sequence of them, as many as it says or reads.
    if type(value) not in (int, float):
        return value
    asked = entries_asked(function, name) if isinstance(function, type) else 0
    if typing.get_origin(hint) in _SEQUENCES:
        entries = typing.get_args(hint)
        many = len(entries) if typing.get_origin(hint) is tuple and ... not in entries else asked or DEPTH
        return [value] * many if typing.get_origin(hint) is list else (value,) * many
    many = asked if hint in (None, Any) else 0
    return (value,) * many if many else value


def _part(name: str, hint: Any, namespace: Mapping[str, Any]) -> type[nn.Module] | None:
    # The class of a module that the constructor takes as an argument: `encoder` takes an Encoder.
    if isinstance(hint, type) and issubclass(hint, nn.Module) and hint is not nn.Module:
        return hint if hint.__module__.partition(".")[0] != "torch" or hint is nn.Embedding else None
    wanted = name.replace("_", "").lower()
    if hint not in (None, nn.Module):
        return None
    classes = [value for value in namespace.values() if isinstance(value, type) and issubclass(value, nn.Module)]
    exact = re.compile(re.escape(wanted))
    kinds = [exact, re.compile(rf".*{exact.pattern}")] if PART_KIND.fullmatch(wanted) else [exact]
    for kind in kinds:
        found = next((c for c in classes if kind.fullmatch(c.__name__.lower())), None) or _part_beside(kind, namespace)
        if found is not None:
            return found
    return None


def _part_beside(kind: re.Pattern[str], namespace: Mapping[str, Any]) -> type[nn.Module] | None:
    # The first class of such a name, in lower case, in a file beside this one.
    path, package = Path(str(namespace.get("__file__", ""))), str(namespace.get("__package__") or "")
    for file in sorted(path.parent.glob("*.py")) if path.is_file() else ():
        text = file.read_text(encoding="utf-8", errors="replace")
        names = [name for name in re.findall(r"^class (\w+)\(", text, re.M) if kind.fullmatch(name.lower())]
        if not names or file == path:
            continue
        # A file that cannot be imported holds no part.
        with contextlib.suppress(Exception):
            module = importlib.import_module(f"{package}.{file.stem}" if package else file.stem)
            found = getattr(module, names[0], None)
            if isinstance(found, type) and issubclass(found, nn.Module):
                return found
    return None
