"""The subject of a command: the model in a file, and inputs for it, given by flags or found."""

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
from torch.utils import _pytree as pytree

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
from attn_fuse.graph.names import tensors_of

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and inputs for it.

    model: in its final mode and dtype, on its final device. train: whether a call has a backward pass.
    said: notes on what was made up to build and run the model. limit: seconds for each step.
    """

    model: Callable[..., Any]
    inputs: Inputs
    train: bool
    said: tuple[str, ...]
    limit: float

    def __str__(self) -> str:
        return f"{name_of(self.model)}({self.inputs})"

    def call(self, model: Callable[..., Any]) -> Any:
        """The output of `model`, the subject's or its compiled form, after a backward pass if the subject trains.

        Raises ExplainError where a training step has no output that needs a gradient.
        """
        with torch.set_grad_enabled(self.train):
            out = model(*self.inputs.args, **self.inputs.kwargs)
            if self.train:
                _backward(out)
        return out

    def call_as_written(self) -> None:
        """Run the model uncompiled. Raises ExplainError where the model raises."""
        try:
            self.call(self.model)
        except ExplainError:
            raise
        except Exception as error:
            raise ExplainError(f"{self} raises {in_one_line(error)}; pass other inputs with --inputs") from error


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add PATH and the flags that choose the subject to the parser of a command."""
    parser.add_argument("path", type=Path, help="a Python file, package or directory that defines the model")
    parser.add_argument("--entry", metavar="EXPR", help="a class, model or function of the file to run")
    parser.add_argument("--inputs", metavar="EXPR", help="its inputs: a tensor, a tuple of arguments, a dict by name")
    setup = "a Python file that defines `model`, `inputs`, or names for both flags"
    parser.add_argument("--setup", metavar="FILE", type=Path, help=setup)
    parser.add_argument("--length", metavar="N", type=count, help="sequence length of made-up inputs")
    parser.add_argument("--batch", metavar="N", type=count, default=1, help="batch size of made-up inputs (1)")
    most = f"largest number of parameters to build ({MOST_PARAMETERS:g})"
    parser.add_argument("--parameters", metavar="N", type=count, default=MOST_PARAMETERS, help=most)
    limit = f"for each step ({LIMIT:g}; importing {IMPORT_LIMIT:g})"
    parser.add_argument("--time-limit", metavar="SECONDS", type=count, help=limit)
    parser.add_argument("--train", action="store_true", help="in training mode, with a backward pass")
    parser.add_argument("--device", help="where to run (default: where the model is)")
    parser.add_argument("--dtype", help=f"of weights and inputs: {', '.join(DTYPES)}")


@contextlib.contextmanager
def subject_of(args: argparse.Namespace) -> Iterator[Subject]:
    """The subject that the flags of `add_flags` choose; its module stays importable within the block.

    Raises ExplainError where there is none.
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

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        inputs = Inputs(*pytree.tree_map_only(Tensor, moved, (inputs.args, inputs.kwargs)))
        subject = Subject(model, inputs, args.train, tuple(notes), limit)
        if args.inputs or args.setup or device or dtype:
            with step(f"running {subject}", limit, "pass smaller --inputs"):
                subject.call_as_written()
        yield subject


def _with_setup(setup: Path | None, namespace: Mapping[str, Any], limit: float) -> Mapping[str, Any]:
    # The file's names, and those that the file of --setup defines with them.
    if setup is None:
        return namespace
    scope = dict(namespace)
    try:
        with step(f"running --setup {setup.name}", limit, "shorten it"):
            exec(compile(setup.read_bytes(), str(setup), "exec"), scope)
    except ExplainError:
        raise
    except (Exception, SystemExit) as error:
        raise ExplainError(f"--setup {setup}: {in_one_line(error)}") from error
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
        return finding.of_classes([entry])
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
                f"--inputs {expression!r} gives a {type(other).__name__}; it must give a tensor, a tuple of arguments, "
                "or a dict of arguments by name"
            )


def evaluated(flag: str, expression: str, namespace: Mapping[str, Any]) -> Any:
    """The value of the Python expression given to `flag`, in which `namespace` and `torch` are names.

    Raises ExplainError where it does not evaluate.
    """
    try:
        return eval(compile(expression.strip(), f"<{flag}>", "eval"), {"torch": torch, **namespace})
    except ExplainError:
        raise
    except Exception as error:
        raise ExplainError(f"{flag} {expression!r} does not evaluate: {in_one_line(error)}") from error


def _backward(out: object) -> None:
    outputs = vars(out) if dataclasses.is_dataclass(out) else out
    losses = [tensor.float().sum() for tensor in tensors_of(outputs) if tensor.requires_grad]
    if not losses:
        raise ExplainError("--train: no output needs a gradient; pass --inputs that do, or leave --train out")
    sum(losses[1:], losses[0]).backward()


def _device(name: str | None) -> torch.device | None:
    if name is None:
        return None
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ExplainError(f"--device {name!r} cannot be used: {in_one_line(error)}; pass another") from error
    return device


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None or name in DTYPES:
        return DTYPES.get(name or "")
    raise ExplainError(f"--dtype {name!r} is no dtype to run a model in.{nearest(name, DTYPES)}")


def count(text: str) -> int:
    """A whole number above 0, for `type=` of a flag."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
