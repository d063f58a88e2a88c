"""The subject of a command: the model in a user's file and inputs that it runs on, as the flags say or as guessed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_fuse.errors import ExplainError, nearest
from attn_fuse.explain import name_of
from attn_fuse.explain.building.build import MOST_PARAMETERS, Built, all_built, built
from attn_fuse.explain.building.choose_entry import candidates, parts
from attn_fuse.explain.building.find_file import file_in
from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.opening.absent_values import MissingPackage
from attn_fuse.explain.opening.open_file import IMPORT_LIMIT, LEFT_OUT, imported
from attn_fuse.explain.problems import in_one_line, without_frames
from attn_fuse.explain.reading.snippets import inputs_of
from attn_fuse.explain.repairing.repairs import Calls
from attn_fuse.explain.running.both import both_for, with_fewer_layers
from attn_fuse.explain.running.built_parts import largest_parts, parts_that_ran
from attn_fuse.explain.running.guess_inputs import NoInputs, inputs_for, trial_of
from attn_fuse.explain.running.try_inputs import RUN_BYTES, RUN_SECONDS, Trial
from attn_fuse.explain.steps import LIMIT, TimeUp, step, trying

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
# How many outermost classes are tried before the first one's problem is told.
MOST_CANDIDATES = 3
# How many classes inside a model are tried where the model itself is not built or does not run.
MOST_PARTS = 4
# How the note on such a class begins.
OF_A_PART = "of a part only,"
# How many ways to build a class are tried until one runs.
MOST_WAYS = 3


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and inputs that it runs on.

    model: in the mode, dtype and on the device that it is used in. train: whether a call has a backward pass.
    said: what was made up to build and run the model, one line each. limit: seconds of a step.
    """

    model: Callable[..., Any]
    inputs: Inputs
    train: bool
    said: tuple[str, ...]
    limit: float

    def __str__(self) -> str:
        return f"{name_of(self.model)}({self.inputs})"

    def call(self, model: Callable[..., Any]) -> Any:
        """Run `model`, the subject's or what was compiled of it, forward and in training backward; gives the output.

        Raises ExplainError where a training step has no output that needs a gradient.
        """
        with torch.set_grad_enabled(self.train):
            out = model(*self.inputs.args, **self.inputs.kwargs)
            if self.train:
                _backward(out)
        return out

    def call_as_written(self) -> None:
        """Run the model uncompiled, where Dynamo would log a traceback; raises ExplainError where the model raises."""
        try:
            self.call(self.model)
        except ExplainError:
            raise
        except Exception as error:
            raise ExplainError(
                f"{self} raises {in_one_line(error)}; pass inputs that it takes with --inputs"
            ) from error


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what the subject is, and PATH, to the parser of a command."""
    parser.add_argument(
        "path", type=Path, help="a Python file that defines the model, or a package or directory with one"
    )
    parser.add_argument(
        "--entry", metavar="EXPR", help="what to run, in the file's names: a class, a model, a function"
    )
    parser.add_argument("--inputs", metavar="EXPR", help="its inputs: a tensor, a tuple of arguments, a dict by name")
    parser.add_argument(
        "--setup",
        metavar="FILE",
        type=Path,
        help="a Python file that defines `model`, `inputs`, or names for both flags",
    )
    parser.add_argument("--length", metavar="N", type=_count, help="length of the sequences that are guessed")
    parser.add_argument(
        "--batch", metavar="N", type=_count, default=1, help="batch size of the inputs that are guessed (1)"
    )
    parser.add_argument(
        "--parameters",
        metavar="N",
        type=_count,
        default=MOST_PARAMETERS,
        help=f"how many a model that is built here may have ({MOST_PARAMETERS:g})",
    )
    parser.add_argument(
        "--time-limit", metavar="SECONDS", type=_count, help=f"of each step ({LIMIT:g}; importing {IMPORT_LIMIT:g})"
    )
    parser.add_argument("--train", action="store_true", help="in training mode, with a backward pass")
    parser.add_argument("--device", help="where to run (default: where the model is)")
    parser.add_argument("--dtype", help=f"of weights and inputs: {', '.join(DTYPES)}")


@contextlib.contextmanager
def subject_of(args: argparse.Namespace) -> Iterator[Subject]:
    """The subject that the flags of `add_flags` ask for; its module can be imported from within the block.

    Raises ExplainError, in one line that says what to pass, where there is none.
    """
    device, dtype = _device(args.device), _dtype(args.dtype)
    notes: list[str] = []
    path = file_in(args.path, notes.append) if args.path.is_dir() else args.path
    limit = args.time_limit or LIMIT
    with imported(path, notes.append, args.time_limit or IMPORT_LIMIT) as module:
        namespace = _with_setup(args.setup, vars(module), limit)
        found = _found(args, module, namespace, notes, limit)
        notes += found.notes
        model, inputs = found.model, found.inputs
        if isinstance(model, nn.Module):
            model.to(device=device, dtype=dtype)
            model.train(args.train or found.trains)
        inputs = Inputs(_moved(inputs.args, device, dtype), _moved(inputs.kwargs, device, dtype))
        subject = Subject(model, inputs, args.train or found.trains, tuple(notes), limit)
        if found.is_given or device or dtype:
            with step(f"running {subject}", limit, "pass smaller --inputs"):
                subject.call_as_written()
        yield subject


@dataclasses.dataclass(frozen=True)
class _Found:
    # attends: whether a run calls what an attention calls. is_given: whether the user gave the inputs. notes: what was
    # changed so that they run. trains: whether they run in training mode alone.
    model: Callable[..., Any]
    inputs: Inputs
    is_given: bool
    notes: tuple[str, ...] = ()
    trains: bool = False

    @functools.cached_property
    def attends(self) -> bool:
        calls = Calls()
        # What is slow, or raises only now, is explained as it is.
        try:
            with trying(RUN_SECONDS, RUN_BYTES), calls:
                self.model(*self.inputs.args, **self.inputs.kwargs)
        except (Exception, TimeUp):
            return True
        return calls.attends


def _with_setup(setup: Path | None, namespace: Mapping[str, Any], limit: float) -> Mapping[str, Any]:
    # The file's names, and those that the file of --setup defines from them.
    if setup is None:
        return namespace
    try:
        code = compile(setup.read_bytes(), str(setup), "exec")
    except OSError as error:
        raise ExplainError(f"--setup {setup}: it cannot be read: {error.strerror}; pass a Python file") from error
    except (SyntaxError, ValueError) as error:
        raise ExplainError(f"--setup {setup}: {in_one_line(error)}") from error
    scope = dict(namespace)
    try:
        with step(f"running --setup {setup.name}", limit, "leave out what it does not need"):
            exec(code, scope)
    except (Exception, SystemExit) as error:
        if isinstance(error, ExplainError):
            raise
        raise ExplainError(f"--setup {setup}: it raises {in_one_line(error)}") from error
    return scope


def _found(
    args: argparse.Namespace, module: types.ModuleType, namespace: Mapping[str, Any], notes: list[str], limit: float
) -> _Found:
    expression = args.entry or ("model" if args.setup and "model" in namespace else None)
    if expression is not None:
        with step(f"building {expression}", limit, "pass a smaller model with --entry"):
            entry = evaluated("--entry", expression, namespace)
            model, holders = _model(expression, entry, namespace, notes, args.parameters)
        return _with_inputs(args, model, holders, namespace, limit)
    failures: list[ExplainError] = []
    classes, start = candidates(module), time.monotonic()
    unrun: list[tuple[Built, NoInputs]] = []
    # What runs and attends to nothing is the subject only where nothing else runs.
    idle: tuple[_Found, list[str]] | None = None
    for cls in classes:
        # A class that needs a package says nothing of the others.
        if sum(not isinstance(failure, MissingPackage) for failure in failures) >= MOST_CANDIDATES:
            break
        if (failures or idle) and time.monotonic() - start > limit / 2:
            break
        try:
            found, built_with = _built_and_run(cls, args, namespace, limit, unrun)
        except ExplainError as error:
            failures.append(without_frames(error))
            continue
        said = list(built_with)
        if len(classes) > 1:
            others = [other.__name__ for other in classes if other is not cls]
            said.insert(0, f"of several outermost classes, {cls.__name__}; with --entry: {', '.join(others[:4])}")
        if failures:
            said.insert(0, f"in place of {classes[0].__name__}: {failures[0]}")
        if found.attends:
            notes += said
            return found
        idle = idle or (found, said)
    if idle is not None and not failures:
        notes += idle[1]
        return idle[0]
    left_out = [note for note in notes if note.startswith(LEFT_OUT)]
    problem = failures[0]
    if left_out and "NameError" in str(problem):
        problem = ExplainError(f"{problem}; {left_out[0]}")
    if (built_part := _of_built(*unrun[0], args, namespace, limit) if unrun else None) is not None:
        found, name, built_with = built_part
        notes += [f"{OF_A_PART} {name}, since of the whole: {problem}", *built_with]
        return found
    # The whole may have taken all of its time.
    start = time.monotonic()
    for cls in parts(module)[:MOST_PARTS]:
        if time.monotonic() - start > limit / 2:
            break
        try:
            found, built_with = _built_and_run(cls, args, vars(sys.modules[cls.__module__]), limit / 2, [])
        except ExplainError:
            continue
        if found.attends:
            notes += [f"{OF_A_PART} {cls.__name__}, since of the whole: {problem}", *built_with]
            return found
    if idle is None:
        raise problem
    notes += idle[1]
    return idle[0]


def _built_and_run(
    cls: type[nn.Module],
    args: argparse.Namespace,
    namespace: Mapping[str, Any],
    limit: float,
    unrun: list[tuple[Built, NoInputs]],
) -> tuple[_Found, tuple[str, ...]]:
    # The first of the ways to build `cls` whose model runs on some inputs, and what was made up for it. `unrun` gets a
    # model that does not run.
    ways = all_built(cls, namespace, args.parameters)
    failures: list[ExplainError] = []
    idle: tuple[_Found, tuple[str, ...]] | None = None
    left: list[tuple[Built, NoInputs]] = []
    start = time.monotonic()
    for _ in range(MOST_WAYS):
        if (failures or idle) and time.monotonic() - start > limit / 2:
            break
        with step(f"building {cls.__name__}", limit, f"build a smaller one with --entry '{cls.__name__}(...)'"):
            try:
                made = next(ways, None)
            except ExplainError:
                if idle is None:
                    raise
                made = None
        if made is None:
            break
        try:
            found, said = _sooner(made, args, namespace, limit) or (
                _with_inputs(args, made.model, made.holders, namespace, limit),
                made.notes,
            )
            if found.attends:
                return found, said
            idle = idle or (found, said)
        except ExplainError as error:
            failures.append(made.doubt or without_frames(error))
            # Several models may take all memory.
            if isinstance(error, NoInputs) and not left:
                left.append((made, error))
    if idle is not None:
        return idle
    for made, problem in left:
        if time.monotonic() - start > limit:
            break
        with step(f"finding arguments and inputs for {cls.__name__}", limit / 2, "pass them with --entry and --inputs"):
            both = both_for(made, problem.failed, functools.partial(_trial_of, args))
        if both is not None:
            made, inputs = both
            return _Found(made.model, inputs, is_given=False), made.notes
    unrun += left
    raise failures[0]


def _sooner(
    made: Built, args: argparse.Namespace, namespace: Mapping[str, Any], limit: float
) -> tuple[_Found, tuple[str, ...]] | None:
    # A large model on inputs that it runs on with fewer layers, or else that one; None where neither runs. Inputs that
    # the user gives are for the whole.
    fewer = None if args.inputs or args.setup else with_fewer_layers(made)
    if fewer is None:
        return None
    with contextlib.suppress(ExplainError):
        found = _with_inputs(args, fewer.model, fewer.holders, namespace, limit / 2)
        made.model.train(fewer.model.training)
        whole = dataclasses.replace(found, model=made.model)
        return (whole, made.notes) if _runs(whole) else (found, fewer.notes)
    return None


def _of_built(
    made: Built, problem: NoInputs, args: argparse.Namespace, namespace: Mapping[str, Any], limit: float
) -> tuple[_Found, str, tuple[str, ...]] | None:
    # A part that attends of a model that was built and does not run, its name, and what was made up for the model.
    failed = [one.tried for one in sorted(problem.failed, key=lambda one: -one.reached)]
    start = time.monotonic()
    for name, part, inputs in (*parts_that_ran(made.model, failed), *largest_parts(made.model)):
        if time.monotonic() - start > limit / 2:
            break
        with contextlib.suppress(ExplainError):
            if inputs is None:
                found = _with_inputs(args, part, made.holders, namespace, limit / 2)
            else:
                found = _Found(part, inputs, is_given=False)
            if (inputs is None or _runs(found)) and found.attends:
                return found, f"{name} ({name_of(part)})", made.notes
    return None


def _runs(found: _Found) -> bool:
    # What wrote into its inputs, or into itself, may not run again.
    try:
        with trying(RUN_SECONDS, RUN_BYTES):
            found.model(*found.inputs.args, **found.inputs.kwargs)
    except (Exception, TimeUp):
        return False
    return True


def _trial_of(args: argparse.Namespace, made: Built) -> Trial:
    made.model.eval()
    return trial_of(made.model, made.holders, args.train, args.length, args.batch)


def _with_inputs(
    args: argparse.Namespace,
    model: Callable[..., Any],
    holders: Sequence[object],
    namespace: Mapping[str, Any],
    limit: float,
) -> _Found:
    expression = args.inputs or ("inputs" if args.setup and "inputs" in namespace else None)
    if expression is None:
        if not isinstance(model, nn.Module):
            raise ExplainError(f"no inputs can be guessed for the function {name_of(model)}; pass them with --inputs")
        with step(f"finding inputs for {name_of(model)}", limit, "pass them with --inputs"):
            path = Path(str(namespace.get("__file__", "")))
            model.eval()  # what it gives may be nothing, where a model overrides `train`
            asked = (holders, args.train, args.length, args.batch)

            def spelled() -> Iterator[Inputs]:
                yield from (Inputs(*one) for one in (inputs_of(type(model), namespace, path) if path.is_file() else ()))

            try:
                guessed = inputs_for(model, *asked, spelled())
            except ExplainError as error:
                if isinstance(error, NoInputs) and (found := _in_training(args, model, holders, error)) is not None:
                    return found
                # Weights of several dtypes wait for a script that sets a default dtype.
                if len({weight.dtype for weight in model.parameters() if weight.is_floating_point()}) < 2:
                    raise
                guessed = inputs_for(model.float(), *asked, spelled())
                return _Found(model, guessed, False, ("weights of several dtypes, all made float32",))
        return _Found(model, guessed, is_given=False)
    return _Found(model, _given_inputs(expression, namespace), is_given=True)


def _in_training(
    args: argparse.Namespace, model: nn.Module, holders: Sequence[object], error: NoInputs
) -> _Found | None:
    # Inputs that failed in evaluation, where the model asks for its mode, and that run in training: for its loss.
    trial = trial_of(model, holders, True, args.length, args.batch)
    model.train()
    for failed in error.failed:
        if "training" in failed.asked.near and trial.on(failed.tried) is not None:
            return _Found(model, failed.tried, False, ("in training mode: it does not run otherwise",), trains=True)
    model.eval()
    return None


def _model(
    expression: str, entry: object, namespace: Mapping[str, Any], notes: list[str], most: int
) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """The model or function to run, and the configs and arguments it was built from."""
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        made = built(entry, namespace, notes.append, most)
        return made.model, made.holders
    if isinstance(entry, type) or not callable(entry):
        given = f"the class {entry.__name__}" if isinstance(entry, type) else f"a value of type {type(entry).__name__}"
        raise ExplainError(f"--entry {expression!r} gives {given}; it must give an nn.Module, or a function")
    return entry, ()


def _given_inputs(expression: str, namespace: Mapping[str, Any]) -> Inputs:
    match evaluated("--inputs", expression, namespace):
        case tuple() as values:
            return Inputs(values)
        case dict() as values if all(isinstance(name, str) for name in values):
            return Inputs((), values)
        case Tensor() as value:
            return Inputs((value,))
        case other:
            raise ExplainError(
                f"--inputs {expression!r} gives a {type(other).__name__}; "
                f"it must give a tensor, a tuple of arguments, or a dict of arguments by name"
            )


def evaluated(flag: str, expression: str, namespace: Mapping[str, Any]) -> Any:
    """The value of the Python expression that `flag` was given; `namespace` and `torch` are its names.

    Raises ExplainError where it does not evaluate.
    """
    try:
        return eval(compile(expression.strip(), f"<{flag}>", "eval"), {"torch": torch, **namespace})
    except ExplainError:
        raise
    except Exception as error:
        raise ExplainError(f"{flag} {expression!r} does not evaluate: {in_one_line(error)}") from error


def _backward(out: object) -> None:
    losses = [tensor.float().sum() for tensor in _tensors(out) if tensor.requires_grad]
    if not losses:
        raise ExplainError("--train: no output needs a gradient; pass --inputs that do, or leave --train out")
    sum(losses[1:], losses[0]).backward()


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        yield from _tensors(vars(value))


def _moved(value: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """`value` with its tensors on `device`, the floating-point ones in `dtype`."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)
    if type(value) in (tuple, list):
        return type(value)(_moved(item, device, dtype) for item in value)
    if type(value) is dict:
        return {name: _moved(item, device, dtype) for name, item in value.items()}
    return value


def _device(name: str | None) -> torch.device | None:
    if name is None:
        return None
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ExplainError(
            f"--device {name!r} cannot be used: {in_one_line(error)}; pass one that can, as in cpu"
        ) from error
    return device


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None or name in DTYPES:
        return DTYPES.get(name or "")
    raise ExplainError(f"--dtype {name!r} is no dtype to run a model in.{nearest(name, DTYPES)}")


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
