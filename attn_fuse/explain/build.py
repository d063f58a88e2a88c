"""An instance of a class: from its defaults and configs, as its repository builds it, by a factory, or small.

It is first built on the meta device, where parameters take no memory, and refused there above a limit.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.built_with import value_built_with
from attn_fuse.explain.config_files import arguments_in
from attn_fuse.explain.configs import (
    config_class,
    config_of,
    config_without_class,
    defaults_of,
    entry_for,
    hints_of,
    is_config_name,
    without_default,
)
from attn_fuse.explain.open_file import Say
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.sizes import DEPTH_NAME, in_words, value_for
from attn_fuse.explain.snippets import calls_of
from attn_fuse.explain.stages import staged
from attn_fuse.explain.stand_ins import MissingPackage
from attn_fuse.explain.weights import random_weights

# Parameters above which a model is not built unasked: 4 GB of float32.
MOST_PARAMETERS = 1_000_000_000
# How many modules deep an argument may be a module that is built of arguments itself.
DEEPEST = 3
# How many entries that a config lacks are made up.
MOST_ENTRIES = 20
FACTORY = re.compile(r"^(build|make|create|get|new)_|(^|_)(tiny|small|mini|base|s|b|nano|xs)(_|\d|$)", re.I)
SMALL = re.compile(r"tiny|nano|mini|small|(^|_)(xs|s)(_|$)|base", re.I)
# Arguments that are a class of layers, and no number of them.
LAYER_CLASS = re.compile(r"(norm|act|embed|mlp|attn|block)_?layer$")
LOADS = re.compile(r"load|pretrained|download|checkpoint|weights|main|train|test|eval|demo", re.I)


class TooLarge(ExplainError):
    """A model of more parameters than the limit."""


@dataclass(frozen=True)
class Built:
    """A model, what says its sizes: the configs and the arguments that it was built from, and what was made up."""

    model: nn.Module
    holders: tuple[object, ...]
    notes: tuple[str, ...] = ()


# What builds a model, and what says its sizes.
_Made = tuple[Callable[[], nn.Module], tuple[object, ...]]


@dataclass(frozen=True)
class _Way:
    # A way to build a model: what to say of it, and what builds it from a sink for notes.
    note: str | None
    make: Callable[[Say], _Made]


def built(
    cls: type[nn.Module],
    namespace: Mapping[str, Any],
    say: Say = lambda note: None,
    most: int = MOST_PARAMETERS,
) -> Built:
    """An instance of `cls` of at most `most` parameters, built in the first of these ways that works: from its defaults
    and those of its config; as a text of its repository spells it out; by a factory without arguments; from small sizes
    by name; by a factory from small sizes; from its defaults with fewer layers. `say` is told of all but the first.

    namespace: the names of the file, among which configs and factories are sought.
    Raises ExplainError where no way works.
    """
    made = next(all_built(cls, namespace, most))
    for note in made.notes:
        say(note)
    return made


def all_built(cls: type[nn.Module], namespace: Mapping[str, Any], most: int = MOST_PARAMETERS) -> Iterator[Built]:
    """What each way of `built` that works gives, in its order. Raises ExplainError where none does."""
    failures: list[ExplainError] = []
    works = False
    for way in _ways(cls, namespace):
        notes: list[str] = [way.note] if way.note else []
        try:
            with random_weights(notes.append):
                _refuse_large(way, most, cls.__name__)
                make, holders = way.make(notes.append)
                model = _with_entries(make, holders, cls, notes.append)
        except ExplainError as error:
            failures.append(error)
            continue
        except Exception as error:
            failures.append(
                ExplainError(
                    f"cannot build {cls.__name__}: {in_one_line(error)}; build it with other arguments: "
                    f"--entry '{_example(cls)}'"
                )
            )
            failures[-1].__cause__ = error
            continue
        if not isinstance(model, nn.Module):
            failures.append(ExplainError(f"cannot build {cls.__name__}: it comes out as a {type(model).__name__}"))
            continue
        works = True
        yield Built(staged(model), holders, tuple(dict.fromkeys(notes)))
    if not works:
        raise next((f for f in failures if isinstance(f, (MissingPackage, TooLarge))), failures[0])


def _example(cls: type[nn.Module]) -> str:
    # A call of `cls` to start from: what it needs by name, else its first defaults; "..." for what is not known.
    needs, defaults = without_default(cls), defaults_of(cls)
    values = {name: value_for(name, hint, defaults) for name, hint in needs.items()} or dict([*defaults.items()][:4])
    known = {name for name, value in values.items() if value is not None or name in defaults}
    return f"{cls.__name__}({', '.join(f'{n}={v!r}' if n in known else f'{n}=...' for n, v in values.items())})"


def _with_entries(
    make: Callable[[], nn.Module], holders: Sequence[object], cls: type[nn.Module], say: Say
) -> nn.Module:
    # What `make` gives; a config that lacks what the code reads gets it, by the code's comparisons or by its name.
    added: dict[str, Any] = {}
    for _ in range(MOST_ENTRIES):
        try:
            model = make()
        except AttributeError as error:
            name, value = str(error.name), entry_for(cls, str(error.name))
            if value is None or name in added or not any(error.obj is holder for holder in holders):
                raise
            setattr(error.obj, name, value)
            added[name] = value
            continue
        if added:
            say(f"entries that the config lacks: {in_words(added)}")
        return model
    return make()


def parameters_of(model: nn.Module) -> int:
    """How many numbers the parameters of `model` hold."""
    return sum(parameter.numel() for parameter in model.parameters())


def _refuse_large(way: _Way, most: int, name: str) -> None:
    # Raises TooLarge, before the memory is taken, where the model can be built on the meta device. The arguments are
    # made for it alone: a constructor may write into its config.
    count = 0
    # A constructor that reads the numbers of its tensors, as of a schedule, cannot be run on the meta device.
    with contextlib.suppress(Exception), torch.device("meta"):
        count = parameters_of(way.make(lambda note: None)[0]())
    if count > most:
        raise _too_large(name, count, most)


def _too_large(name: str, count: int, most: int) -> TooLarge:
    return TooLarge(
        f"{name} has {count:.3g} parameters, more than {most:.3g}; build a smaller one with "
        f"--entry '{name}(...)', or allow it with --parameters {10 ** len(str(count))}"
    )


def _ways(cls: type[nn.Module], namespace: Mapping[str, Any]) -> Iterator[_Way]:
    needs = without_default(cls)
    modules = [name for name, hint in needs.items() if isinstance(hint, type) and issubclass(hint, nn.Module)]
    sized = [
        name for name in needs if not is_config_name(name) and config_class(cls, name, needs[name], namespace) is None
    ]
    path = Path(str(namespace.get("__file__", "")))
    direct = _Way(None, lambda say: _direct(cls, namespace, path, say))
    if not sized:
        yield direct
    if path.is_file() and needs:
        for snippet in calls_of(cls, namespace, path):
            yield _Way(f"as in {snippet.source}: {_shortened(snippet.text)}", _by_text(snippet.text, snippet.names))
    if path.is_file() and sized:
        taken = needs.keys() | defaults_of(cls).keys()
        if (found := arguments_in(needs.keys(), taken, cls.__name__, path)) is not None:
            yield _Way(f"as in {found.source}", _by_arguments(cls, found.values))
    factories = _factories(cls, namespace)
    for factory in factories:
        if not without_default(factory):
            yield _Way(f"built by {factory.__name__}()", _by_call(factory))
    if sized and not modules:
        yield direct
    for factory in factories:
        if needs_of := without_default(factory):
            yield _Way(None, _by_sizes(factory, needs_of))
    if sized and modules:
        yield direct
    if any(value is None for value in defaults_of(cls).values()):
        yield _Way(None, lambda say: _direct(cls, namespace, path, say, with_none=True))
    yield _Way(None, lambda say: _shrunk(cls, namespace, path, say))


def _shortened(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:157]}..."


def _by_text(text: str, names: Mapping[str, Any]) -> Callable[[Say], _Made]:
    def make(say: Say) -> _Made:
        scope = {name: value if _is_code(value) else copy.deepcopy(value) for name, value in names.items()}
        given = [value for value in scope.values() if not _is_code(value)]
        return lambda: eval(text, dict(scope)), (_constants(text), *given)

    return make


def _by_arguments(cls: type[nn.Module], values: Mapping[str, Any]) -> Callable[[Say], _Made]:
    return lambda say: (lambda: cls(**copy.deepcopy(dict(values))), (values, defaults_of(cls)))


def _is_code(value: object) -> bool:
    return isinstance(value, (type, types.ModuleType)) or callable(value)


def _constants(text: str) -> dict[str, Any]:
    # The keyword arguments of a call that are whole numbers.
    return {name: int(value) for name, value in re.findall(r"(\w+)\s*=\s*(\d+)\b(?![.\w])", text)}


def _by_call(factory: Callable[..., Any]) -> Callable[[Say], _Made]:
    return lambda say: (factory, (defaults_of(factory),))


def _by_sizes(factory: Callable[..., Any], needs: Mapping[str, Any]) -> Callable[[Say], _Made]:
    def make(say: Say) -> _Made:
        values = _sizes(factory, needs, factory.__name__)
        say(f"sizes by name: {factory.__name__}({in_words(values)})")
        return lambda: factory(**values), (values, defaults_of(factory))

    return make


def _sizes(function: Callable[..., Any], needs: Mapping[str, Any], name: str) -> dict[str, Any]:
    # A small value for each of `needs`. Raises ExplainError for those whose names say nothing.
    given = {key: value for key, value in defaults_of(function).items() if key not in needs}
    values: dict[str, Any] = {}
    for key, hint in needs.items():
        values[key] = value_for(key, hint, {**given, **values})
        if values[key] is None and isinstance(function, type) and hint in (None, Any, int, float, bool):
            values[key] = value_built_with(function, key, {**given, **values})
    if unknown := [key for key, value in values.items() if value is None]:
        example = ", ".join(f"{key}={'...' if value is None else repr(value)}" for key, value in values.items())
        raise ExplainError(
            f"cannot build {name}: its constructor needs {', '.join(unknown)}; pass --entry '{name}({example})'"
        )
    return values


def _part(name: str, hint: Any, namespace: Mapping[str, Any]) -> type[nn.Module] | None:
    # The class of a module that the constructor takes as an argument: `encoder` takes an Encoder.
    if isinstance(hint, type) and issubclass(hint, nn.Module) and hint is not nn.Module:
        return hint if hint.__module__.partition(".")[0] != "torch" else None
    wanted = name.replace("_", "").lower()
    classes = (value for value in namespace.values() if isinstance(value, type) and issubclass(value, nn.Module))
    found = next((c for c in classes if c.__name__.lower() == wanted and hint in (None, nn.Module)), None)
    return found or (_part_beside(wanted, namespace) if hint in (None, nn.Module) else None)


def _part_beside(wanted: str, namespace: Mapping[str, Any]) -> type[nn.Module] | None:
    # The class of that name, in lower case, in a file beside this one.
    path, package = Path(str(namespace.get("__file__", ""))), str(namespace.get("__package__") or "")
    for file in sorted(path.parent.glob("*.py")) if path.is_file() else ():
        text = file.read_text(encoding="utf-8", errors="replace")
        names = [name for name in re.findall(r"^class (\w+)\(", text, re.M) if name.lower() == wanted]
        if not names or file == path:
            continue
        # A file that cannot be imported holds no part.
        with contextlib.suppress(Exception):
            module = importlib.import_module(f"{package}.{file.stem}" if package else file.stem)
            found = getattr(module, names[0], None)
            if isinstance(found, type) and issubclass(found, nn.Module):
                return found
    return None


def _direct(
    cls: type[nn.Module],
    namespace: Mapping[str, Any],
    path: Path,
    say: Say,
    depth: int = 0,
    with_none: bool = False,
) -> _Made:
    # with_none: whether arguments whose default is None get a value, too, where their names say one.
    arguments: dict[str, Any] = {}
    parts: dict[str, Callable[[], nn.Module]] = {}
    configs: list[object] = []
    sizes: dict[str, Any] = {}
    needs = without_default(cls)
    if with_none:
        hints, given = hints_of(cls), defaults_of(cls)
        absent = {n: hints.get(n) for n, value in given.items() if value is None and not LAYER_CLASS.search(n)}
        needs |= {n: h for n, h in absent.items() if is_config_name(n) or value_for(n, h, given) is not None}
    for name, hint in needs.items():
        of = config_class(cls, name, hint, namespace)
        part = _part(name, hint, namespace) if value_for(name, hint) is None and depth < DEEPEST else None
        if part is not None and part is not cls:
            parts[name] = _direct(part, namespace, path, say, depth + 1)[0]
            continue
        if of is not None:
            arguments[name] = config_of(cls, of, path, say)
        elif is_config_name(name):
            arguments[name] = config_without_class(cls, name, namespace, path, say)
        else:
            sizes[name] = hint
            continue
        configs.append(arguments[name])
    if sizes:
        values = _sizes(cls, sizes, cls.__name__)
        arguments.update(values)
        say(f"sizes by name: {cls.__name__}({in_words(values)})")

    def make() -> nn.Module:
        bound = inspect.signature(cls).bind(**arguments, **{name: build() for name, build in parts.items()})
        return cls(*bound.args, **bound.kwargs)

    return make, (*configs, {**defaults_of(cls), **arguments})


def _shrunk(cls: type[nn.Module], namespace: Mapping[str, Any], path: Path, say: Say) -> _Made:
    # With two layers where a default says more.
    silent: list[str] = []
    _, holders = _direct(cls, namespace, path, silent.append)
    fewer = {name: 2 for name, value in defaults_of(cls).items() if _is_depth(name, value)}
    for config in holders:
        if not dataclasses.is_dataclass(config) or isinstance(config, type):
            continue
        for field in dataclasses.fields(config):
            if _is_depth(field.name, getattr(config, field.name, None)):
                setattr(config, field.name, 2)
                fewer[field.name] = 2
    if not fewer:
        raise ExplainError(f"cannot build {cls.__name__}: no default says how many layers it has")
    for note in silent:
        say(note)
    say(f"fewer layers, since its defaults are too large: {in_words(fewer)}")
    own = {name: value for name, value in fewer.items() if name in defaults_of(cls)}
    given = holders[-1]
    arguments = {k: v for k, v in given.items() if k in without_default(cls)} if isinstance(given, dict) else {}
    return lambda: cls(**{**arguments, **own}), holders


def _is_depth(name: str, value: object) -> bool:
    return re.search(DEPTH_NAME, name.lower()) is not None and isinstance(value, int) and value > 2


def _factories(cls: type, namespace: Mapping[str, Any]) -> list[Callable[..., Any]]:
    # The functions of the file that give a `cls`, by annotation or by a call of it, small ones first.
    found: list[types.FunctionType] = []
    for value in namespace.values():
        if not isinstance(value, types.FunctionType) or value.__module__ != namespace.get("__name__"):
            continue
        if LOADS.search(value.__name__) or defaults_of(value).get("pretrained"):
            continue
        annotated = hints_of(value).get("return") is cls
        if annotated or (cls.__name__ in value.__code__.co_names and _is_named_so(value.__name__, cls)):
            found.append(value)
    return sorted(found, key=lambda f: (SMALL.search(f.__name__) is None, len(without_default(f))))


def _is_named_so(name: str, cls: type) -> bool:
    return FACTORY.search(name) is not None or cls.__name__.lower() in name.lower()
