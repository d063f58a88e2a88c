"""The subject of a command: the model in a user's file and inputs that it runs on, as the flags say or as guessed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_fuse.errors import ExplainError, nearest
from attn_fuse.explain import name_of
from attn_fuse.explain.building import MOST_PARAMETERS
from attn_fuse.explain.choose import file_in
from attn_fuse.explain.feeding import Wish
from attn_fuse.explain.finding import OF_A_PART as OF_A_PART
from attn_fuse.explain.finding import Finding, Found
from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.opening.open_file import IMPORT_LIMIT, imported
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.steps import LIMIT, step

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


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
        found = _found(args, module, namespace, limit)
        notes += found.notes
        model, inputs = found.model, found.inputs
        if isinstance(model, nn.Module):
            model.to(device=device, dtype=dtype)
            model.train(args.train)
        inputs = Inputs(_moved(inputs.args, device, dtype), _moved(inputs.kwargs, device, dtype))
        subject = Subject(model, inputs, args.train, tuple(notes), limit)
        if args.inputs or args.setup or device or dtype:
            with step(f"running {subject}", limit, "pass smaller --inputs"):
                subject.call_as_written()
        yield subject


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


def _found(args: argparse.Namespace, module: types.ModuleType, namespace: Mapping[str, Any], limit: float) -> Found:
    inputs = args.inputs or ("inputs" if args.setup and "inputs" in namespace else None)
    given = None if inputs is None else _given_inputs(inputs, namespace)
    finding = Finding(module, Wish(args.length, args.batch, args.train), given, args.parameters, limit)
    expression = args.entry or ("model" if args.setup and "model" in namespace else None)
    if expression is None:
        return finding.of_file()
    with step(f"building {expression}", limit, "pass a smaller model with --entry"):
        entry = evaluated("--entry", expression, namespace)
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        return finding.of_class(entry)
    if isinstance(entry, type) or not callable(entry):
        kind = f"the class {entry.__name__}" if isinstance(entry, type) else f"a value of type {type(entry).__name__}"
        raise ExplainError(f"--entry {expression!r} gives {kind}; it must give an nn.Module, or a function")
    return finding.of_model(entry, {}, limit)


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
