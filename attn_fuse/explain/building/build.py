"""An instance of a class: from its defaults and configs, as its repository builds it, by a factory, or small.

It is first built on the meta device, where parameters take no memory, and refused there above a limit.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
import time
import types
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building.arguments import GUESSES, HELD, UnknownArgument, call_of
from attn_fuse.explain.building.built_with import class_called
from attn_fuse.explain.building.config_classes import config_class
from attn_fuse.explain.building.config_reads import entry_for
from attn_fuse.explain.building.configs import UnknownEntry, is_config_name
from attn_fuse.explain.building.fewer_layers import fewer_by_default, shrunk
from attn_fuse.explain.building.other_arguments import Arguments, other_arguments
from attn_fuse.explain.building.sizes import in_words, value_for
from attn_fuse.explain.building.targets import targets_of
from attn_fuse.explain.building.weights import RANDOM, random_weights
from attn_fuse.explain.opening.absent_values import MissingPackage, held_by_models
from attn_fuse.explain.opening.older import imported_part, older_models, without_argument
from attn_fuse.explain.opening.open_file import Say, moved_to_its_files, same_folder_after
from attn_fuse.explain.problems import in_one_line, without_frames
from attn_fuse.explain.reading.config_files import arguments_in
from attn_fuse.explain.reading.factories import factories_of
from attn_fuse.explain.reading.signatures import defaults_of, without_default
from attn_fuse.explain.reading.snippets import calls_of, made_by_methods, parts_of_calls
from attn_fuse.explain.reading.stages import staged, stages_of
from attn_fuse.explain.reading.written_options import options_with
from attn_fuse.explain.repairing.asked import asked_by
from attn_fuse.explain.repairing.repairs import Failed, searched
from attn_fuse.explain.roots import is_users, repository_of
from attn_fuse.explain.steps import within_memory

# Parameters above which a model is not built unasked: 4 GB of float32.
MOST_PARAMETERS = 1_000_000_000
# How many problems of a build that older code has with the libraries of today are mended.
MOST_MENDS = 4
# How many configs of a file are tried.
MOST_CONFIGS = 4
# How many changes of the arguments that failed are tried as errors ask, and for how many seconds.
MOST_CHANGES, SEARCH_SECONDS = 32, 20.0
# How many entries that a config lacks are made up.
MOST_ENTRIES = 20
# How many layers a model that is too large gets in place of its own, in turn, and whether few experts and words, too.
FEWER = ((2, False), (1, False), (2, True), (1, True))


class TooLarge(ExplainError):
    """A model of more parameters than the limit."""


@dataclass(frozen=True)
class Built:
    """A model, what says its sizes: the configs and the arguments that it was built from, and what was made up.

    doubt: what is missing, where plain guesses stand in for it: the problem to tell of a model that then does not run.
    again: builds the model from other arguments, and may raise whatever its class does; None where a text or a factory
    built it. arguments: those that it was built from.
    """

    model: nn.Module
    holders: tuple[object, ...]
    notes: tuple[str, ...] = ()
    doubt: ExplainError | None = None
    again: Callable[[Arguments], Built] | None = None
    arguments: Arguments = field(default_factory=Arguments)


# What builds a model, and what says its sizes.
_Made = tuple[Callable[[], nn.Module], tuple[object, ...]]


@dataclass(frozen=True)
class _Way:
    # A way to build a model: what to say of it, what builds it from a sink for notes, and the arguments of its class,
    # where it calls that.
    note: str | None
    make: Callable[[Say], _Made]
    arguments: Arguments | None = None


def built(
    cls: type[nn.Module],
    namespace: Mapping[str, Any],
    say: Say = lambda note: None,
    most: int = MOST_PARAMETERS,
) -> Built:
    """An instance of `cls` of at most `most` parameters, built in the first of these ways that works: from its defaults
    and those of its config; as a text of its repository spells it out; as a config that names it says; by a factory
    without arguments; from small sizes by name, and as the errors ask; by a factory from small sizes; from its defaults
    with fewer layers; with what a text spells out of it; with plain guesses for arguments whose names say nothing.
    `say` is told of all but the first.

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
    path = Path(str(namespace.get("__file__", "")))

    def again(arguments: Arguments) -> Built:
        return _built_by(_Attempt(cls, namespace, path, arguments).way(), cls, most, path, again)

    for way in _ways(cls, namespace, failures):
        try:
            made = _built_by(way, cls, most, path, again)
        except ExplainError as error:
            failures.append(without_frames(error))
            continue
        except (Exception, SystemExit) as error:
            failures.append(
                ExplainError(
                    f"cannot build {cls.__name__}: {in_one_line(error)}; build it with other arguments: "
                    f"--entry '{_example(cls)}'"
                )
            )
            # What the search asks of its calls it asks at once.
            failures[-1].__cause__ = error if way.arguments is not None else without_frames(error)
            continue
        works = True
        guesses = way.arguments is not None and way.arguments.guess is not None
        yield replace(made, doubt=next(filter(_lacks_a_value, failures), None) if guesses else None)
    if not works:
        raise next((f for f in failures if isinstance(f, (MissingPackage, TooLarge))), failures[0])


def _built_by(way: _Way, cls: type[nn.Module], most: int, path: Path, again: Callable[[Arguments], Built]) -> Built:
    notes: list[str] = []
    try:
        return _built_once(way, cls, most, path, again, notes, named=False)
    except Exception:
        # Code that takes weights apart by their names needs them.
        if not any(note.startswith(RANDOM) for note in notes):
            raise
    return _built_once(way, cls, most, path, again, [], named=True)


def _built_once(
    way: _Way,
    cls: type[nn.Module],
    most: int,
    path: Path,
    again: Callable[[Arguments], Built],
    notes: list[str],
    named: bool,
) -> Built:
    # named: whether weights that are not there have names.
    notes += [way.note] if way.note else []
    older_models()
    # The weights twice, and as much again for what the constructor makes beside them: masks of a guessed size.
    bytes_of = 4 * most * 4
    with (
        random_weights(notes.append, named),
        same_folder_after(),
        held_by_models(notes.append),
        within_memory(bytes_of),
    ):
        model, holders = _mended(way, cls, most, notes.append, path)
    if not isinstance(model, nn.Module):
        raise ExplainError(f"cannot build {cls.__name__}: it comes out as a {type(model).__name__}")
    if stages := stages_of(type(model)):
        notes.append(f"no forward: in its place {', then '.join(stages)}")
    said = tuple(dict.fromkeys(notes))
    if way.arguments is None:
        return Built(staged(model), holders, said)
    return Built(staged(model), holders, said, again=again, arguments=way.arguments)


def _made(way: _Way, cls: type[nn.Module], most: int, say: Say, path: Path) -> tuple[nn.Module, tuple[object, ...]]:
    # The model that a way gives, and what says its sizes. Raises TooLarge above `most` parameters.
    _refuse_large(way, most, cls.__name__)
    make, holders = way.make(say)
    with _at_most(most, cls.__name__):
        return _with_entries(make, holders, cls, say, path), holders


def _example(cls: type[nn.Module]) -> str:
    # A call of `cls` to start from: what it needs by name, else its first defaults; "..." for what is not known.
    needs, defaults = without_default(cls), defaults_of(cls)
    values = {name: value_for(name, hint, defaults) for name, hint in needs.items()} or dict([*defaults.items()][:4])
    known = {name for name, value in values.items() if value is not None or name in defaults}
    return f"{cls.__name__}({', '.join(f'{n}={v!r}' if n in known else f'{n}=...' for n, v in values.items())})"


def _with_entries(
    make: Callable[[], nn.Module], holders: Sequence[object], cls: type[nn.Module], say: Say, path: Path
) -> nn.Module:
    # What `make` gives; a config that lacks what the code reads gets it: by the code's comparisons, by its name, or as
    # a command line of the repository has it.
    added: dict[str, Any] = {}
    for _ in range(MOST_ENTRIES):
        try:
            model = make()
        except AttributeError as error:
            name = str(error.name)
            value = entry_for(cls, name)
            value = options_with({name}, path).values.get(name) if value is None and path.is_file() else value
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
    with contextlib.suppress(Exception, SystemExit), torch.device("meta"):
        count = parameters_of(way.make(lambda note: None)[0]())
    if count > most:
        raise _too_large(name, count, most)


@contextlib.contextmanager
def _at_most(most: int, name: str) -> Iterator[None]:
    # Raises TooLarge as soon as the modules that are made within the block hold more than `most` parameters: a model
    # that cannot be built on the meta device must not take all memory.
    held: dict[int, weakref.ref[nn.Parameter]] = {}
    count = 0

    def registered(module: nn.Module, key: str, parameter: nn.Parameter | None) -> None:
        nonlocal count
        known = held.get(id(parameter))
        if parameter is None or is_lazy(parameter) or (known is not None and known() is parameter):
            return
        held[id(parameter)] = weakref.ref(parameter)
        count += parameter.numel()
        if count > most:
            # Some of them may be gone by now.
            count = sum(one.numel() for reference in held.values() if (one := reference()) is not None)
        if count > most:
            raise _too_large(name, count, most)

    hook = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()


def _too_large(name: str, count: int, most: int) -> TooLarge:
    return TooLarge(
        f"{name} has {count:.3g} parameters, more than {most:.3g}; build a smaller one with "
        f"--entry '{name}(...)', or allow it with --parameters {10 ** len(str(count))}"
    )


def _ways(cls: type[nn.Module], namespace: Mapping[str, Any], failures: Sequence[ExplainError]) -> Iterator[_Way]:
    # The ways in their order; the last ones only where one of the others has failed for want of an argument.
    needs = without_default(cls)
    modules = [name for name, hint in needs.items() if isinstance(hint, type) and issubclass(hint, nn.Module)]
    sized = [
        name for name in needs if not is_config_name(name) and config_class(cls, name, needs[name], namespace) is None
    ]
    path = Path(str(namespace.get("__file__", "")))
    direct = _Attempt(cls, namespace, path, Arguments())
    failed: list[Failed[_Attempt] | None] = []
    if not sized:
        failed.append((yield from _tried(direct, failures)))
    if path.is_file():
        for snippet in calls_of(cls, namespace, path):
            yield _Way(f"as in {snippet.source}: {_shortened(snippet.text)}", _by_text(snippet.text, snippet.names))
        for snippet in made_by_methods(cls, namespace, path):
            yield _Way(f"as in {snippet.source}: {_shortened(snippet.text)}", _by_text(snippet.text, snippet.names))
    for target in targets_of(cls, path) if path.is_file() else ():
        yield _Way(f"as in {target.source}", functools.partial(target.call, namespace, path))
    if path.is_file() and sized:
        is_open = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(cls).parameters.values())
        taken = None if is_open else needs.keys() | defaults_of(cls).keys()
        if (found := arguments_in(needs.keys(), taken, cls.__name__, path)) is not None:
            given = found.values
            yield _Way(f"as in {found.source}", lambda say: call_of(cls, namespace, path, say, given=given))
    factories = list(factories_of(cls, namespace, path)) if path.is_file() else []
    for factory in factories:
        if not without_default(factory):
            yield _Way(f"built by {factory.__name__}()", _by_factory(cls, factory, namespace, path))
    if sized and not modules:
        failed.append((yield from _tried(direct, failures)))
    for factory in factories:
        if without_default(factory):
            yield _Way(f"built by {factory.__name__}", _by_factory(cls, factory, namespace, path))
    if sized and modules:
        failed.append((yield from _tried(direct, failures)))
    takes_none = any("NoneType" in str(failure) for failure in failures)
    if takes_none or any(value is None for value in defaults_of(cls).values()):
        yield _Way(None, lambda say: call_of(cls, namespace, path, say, with_none=True))
    # One of several configs may be asked for, and not two.
    configs = [name for name, value in defaults_of(cls).items() if value is None and is_config_name(name)]
    empty = [name for name, value in defaults_of(cls).items() if value == {} and is_config_name(name)]
    for name in (*(configs if len(configs) > 1 else ()), *empty):
        failed.append((yield from _tried(_Attempt(cls, namespace, path, Arguments(), needed=(name,)), failures)))
    for rank in range(1, MOST_CONFIGS) if path.is_file() else ():
        yield _Way(None, _Attempt(cls, namespace, path, Arguments(), rank).make)
    yield from _as_errors_ask(cls, namespace, path, failed, failures)
    is_large = any(isinstance(failure, TooLarge) for failure in failures)
    why = "since its defaults are too large" if is_large else "since it does not run with its defaults"
    fewer = [_Way(None, functools.partial(shrunk, cls, namespace, path, n, few, why)) for n, few in FEWER]
    lacks = any(map(_lacks_a_value, failures))
    if is_large:
        # Its own arguments first, which may be changed further where only a run shows what is wrong.
        layers = fewer_by_default(cls, FEWER[0][0])
        shallow = _Attempt(cls, namespace, path, Arguments(layers), words=f"fewer layers, {why}")
        failed = [(yield from _tried(shallow, failures))] if layers else []
        yield from fewer
        yield from _as_errors_ask(cls, namespace, path, failed, failures)
    elif not lacks:
        yield from fewer
    if not lacks:
        return
    for source, given in parts_of_calls(cls, namespace, path) if path.is_file() else ():
        words = f"{', '.join(given)} as in {source}"
        yield _Way(words, _Attempt(cls, namespace, path, Arguments(given)).make)
    failed = []
    for guess in (HELD, *range(GUESSES)):
        failed.append((yield from _tried(_Attempt(cls, namespace, path, Arguments(guess=guess)), failures)))
    yield from _as_errors_ask(cls, namespace, path, failed, failures)


class _Attempt:
    # A build of a class from some arguments; `holders` is what the last call of `make` built from. words: why there are
    # arguments.

    def __init__(
        self,
        cls: type[nn.Module],
        namespace: Mapping[str, Any],
        path: Path,
        arguments: Arguments,
        rank: int = 0,
        needed: Sequence[str] = (),
        words: str = "as its errors ask",
    ) -> None:
        self.arguments, self.holders, self.needed = arguments, cast("tuple[object, ...]", ()), needed
        self.words = words
        given, guess = arguments.given, arguments.guess
        self._call = functools.partial(
            call_of, cls, namespace, path, given=given, guess=guess, config_rank=rank, needed=needed
        )

    def make(self, say: Say) -> _Made:
        make, self.holders = self._call(say=say)
        self.arguments.with_entries(self.holders[:-1])
        return make, self.holders

    def way(self) -> _Way:
        changed = self.arguments.changed
        return _Way(f"{self.words}: {in_words(changed)}" if changed else None, self.make, self.arguments)


def _tried(attempt: _Attempt, failures: Sequence[ExplainError]) -> Generator[_Way, None, Failed[_Attempt] | None]:
    # The way of an attempt; gives what its constructor raised, None where it raised nothing.
    count = len(failures)
    yield attempt.way()
    error = failures[-1].__cause__ if len(failures) > count else None
    asked = None if error is None else asked_by(error)
    if error is not None:
        without_frames(error)
    return None if asked is None else Failed(attempt, asked, asked.lines)


def _as_errors_ask(
    cls: type[nn.Module],
    namespace: Mapping[str, Any],
    path: Path,
    starts: Sequence[Failed[_Attempt] | None],
    failures: Sequence[ExplainError],
) -> Iterator[_Way]:
    # The class with one argument after another as its errors ask, from what came furthest.
    def others(failed: Failed[_Attempt]) -> Iterator[_Attempt]:
        attempt, asked = failed.tried, failed.asked
        for arguments in other_arguments(attempt.arguments, asked, attempt.holders):
            yield _Attempt(cls, namespace, path, arguments, needed=attempt.needed)
        if asked.none and "not callable" in asked.kind:
            for name in (name for name, value in defaults_of(cls).items() if value is None):
                if (part := class_called(cls, name)) is not None:
                    given = {**attempt.arguments.given, name: part}
                    with_part = replace(attempt.arguments, given=given)
                    yield _Attempt(cls, namespace, path, with_part, needed=attempt.needed)

    end = time.monotonic() + SEARCH_SECONDS
    search = searched([start for start in starts if start is not None], others, end, MOST_CHANGES)
    candidate = next(search, None)
    while candidate is not None:
        failed = yield from _tried(candidate, failures)
        try:
            candidate = search.send(failed)
        except StopIteration:
            return


def _lacks_a_value(failure: ExplainError) -> bool:
    return isinstance(failure, (UnknownArgument, UnknownEntry))


def _mended(way: _Way, cls: type[nn.Module], most: int, say: Say, path: Path) -> tuple[nn.Module, tuple[object, ...]]:
    # What `_made` gives. It is called again where what it raised while the model was built need not be raised again.
    is_own = functools.partial(is_users, roots=(repository_of(path),))
    with contextlib.ExitStack() as mends:
        for _ in range(MOST_MENDS):
            try:
                return _made(way, cls, most, say, path)
            except FileNotFoundError as error:
                if not moved_to_its_files(error, path):
                    raise
            except AttributeError as error:
                if not imported_part(error):
                    raise
            except TypeError as error:
                if not mends.enter_context(without_argument(error, is_own, say)):
                    raise
        return _made(way, cls, most, say, path)


def _shortened(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:157]}..."


def _by_text(text: str, names: Mapping[str, Any]) -> Callable[[Say], _Made]:
    def make(say: Say) -> _Made:
        scope = {name: value if _is_code(value) else copy.deepcopy(value) for name, value in names.items()}
        given = [value for value in scope.values() if not _is_code(value)]
        return lambda: eval(text, dict(scope)), (_constants(text), *given)

    return make


def _is_code(value: object) -> bool:
    return isinstance(value, (type, types.ModuleType)) or callable(value)


def _constants(text: str) -> dict[str, Any]:
    # The keyword arguments of a call that are whole numbers.
    return {name: int(value) for name, value in re.findall(r"(\w+)\s*=\s*(\d+)\b(?![.\w])", text)}


def _by_factory(
    cls: type[nn.Module], factory: Callable[..., Any], namespace: Mapping[str, Any], path: Path
) -> Callable[[Say], _Made]:
    def make(say: Say) -> _Made:
        scope = {**namespace, **getattr(factory, "__globals__", {})}
        build, holders = call_of(factory, scope, path, say)

        def model() -> nn.Module:
            made = build()
            several = made if isinstance(made, tuple) else (made,)
            found: nn.Module = next((one for one in several if _is_a(one, cls)), made)
            if isinstance(found, nn.Module) and not any(_is_a(one, cls) for one in found.modules()):
                # A factory may build one of several by its options.
                raise ExplainError(f"{factory.__name__} builds a {type(found).__name__}")
            return found

        return model, holders

    return make


def _is_a(value: object, cls: type) -> bool:
    # A file that is imported under two names has two classes.
    return isinstance(value, cls) or any(base.__qualname__ == cls.__qualname__ for base in type(value).__mro__)
