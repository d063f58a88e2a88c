"""The command line: ``python -m attn_fuse.explain model.py``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_fuse.errors import ExplainError, OptionError, nearest
from attn_fuse.explain import explanation_of, name_of
from attn_fuse.explain.explanation import Explanation
from attn_fuse.explain.find_model import Inputs, built, evaluated, imported, in_one_line, inputs_for, outermost
from attn_fuse.options import PICKS, parse_options

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code: 0, or 2 after one line on stderr that says what to pass."""
    args = _parser().parse_args(argv)
    try:
        # What the model's own code prints stays out of the report.
        with contextlib.redirect_stdout(sys.stderr):
            explanation = _explain_file(args)
    except (ExplainError, OptionError) as error:
        print(f"attn_fuse.explain: {error}", file=sys.stderr)
        return 2
    if args.html is not None and (problem := _written(args.html, explanation.html())):
        print(f"attn_fuse.explain: {problem}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(explanation.as_json(args.graph), indent=2))
        return 0
    print(explanation.text(args.expression))
    if args.graph:
        print(f"\n{explanation.graphs()}")
    return 0


def _written(path: Path, text: str) -> str:
    """Write `text` to `path`; what went wrong, in words, else ""."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"--html {str(path)!r} cannot be written: {error.strerror}; name a file in a folder that exists"
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attn_fuse.explain",
        description="Say what attn_fuse makes of every attention of the model in a Python file.",
    )
    parser.add_argument("file", type=Path, help="a Python file that defines the model")
    parser.add_argument(
        "--entry", metavar="EXPR", help="what to run, in the file's names: a class, a model, a function"
    )
    parser.add_argument("--inputs", metavar="EXPR", help="its inputs: a tensor, a tuple of arguments, a dict by name")
    parser.add_argument("--train", action="store_true", help="in training mode, with a backward pass")
    parser.add_argument("--device", help="where to run (default: where the model is)")
    parser.add_argument("--dtype", help=f"of weights and inputs: {', '.join(DTYPES)}")
    parser.add_argument("--dynamic", action="store_true", help="compile with dynamic shapes")
    parser.add_argument("--pick", help=f"{' or '.join(PICKS)}; fused: every site that some kernel can run")
    parser.add_argument("--kernels", help="names of the only kernels to use, with commas between")
    parser.add_argument("--json", action="store_true", help="print JSON, with every site by itself")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page, with pictures of masks")
    parser.add_argument("--expression", action="store_true", help="print each attention as mathematics, too")
    parser.add_argument("--graph", action="store_true", help="print each graph's code, before and after")
    return parser


def _explain_file(args: argparse.Namespace) -> Explanation:
    options = {"pick": args.pick, "kernels": args.kernels and [name.strip() for name in args.kernels.split(",")]}
    options = {name: value for name, value in options.items() if value is not None}
    parse_options(options)
    device, dtype = _device(args.device), _dtype(args.dtype)
    with imported(args.file) as module:
        namespace = vars(module)
        entry = evaluated("--entry", args.entry, namespace) if args.entry else outermost(module)
        model, configs = _model(args.entry, entry, namespace)
        inputs = _inputs(args, model, configs, namespace)
        if isinstance(model, nn.Module):
            model = model.to(device=device, dtype=dtype).train(args.train)
        inputs = Inputs(_moved(inputs.args, device, dtype), _moved(inputs.kwargs, device, dtype))
        run = functools.partial(_run, inputs=inputs, train=args.train)
        if args.inputs or device or dtype:
            _run_as_written(model, inputs, run)
        try:
            return explanation_of(model, inputs, run, options, args.dynamic)
        except (ExplainError, OptionError):
            raise
        except Exception as error:
            _run_as_written(model, inputs, run)
            raise ExplainError(
                f"{name_of(model)}({inputs}) runs as written, but torch.compile fails on it: {in_one_line(error)}"
            ) from error


def _model(
    expression: str | None, entry: object, namespace: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[object, ...]]:
    """The model or function to run, and the configs it was built from."""
    if isinstance(entry, type) and issubclass(entry, nn.Module):
        return built(entry, namespace)
    if isinstance(entry, type) or not callable(entry):
        given = f"the class {entry.__name__}" if isinstance(entry, type) else f"a value of type {type(entry).__name__}"
        raise ExplainError(f"--entry {expression!r} gives {given}; it must give an nn.Module, or a function")
    return entry, ()


def _inputs(
    args: argparse.Namespace, model: Callable[..., Any], configs: Sequence[object], namespace: Mapping[str, Any]
) -> Inputs:
    if args.inputs is None:
        if not isinstance(model, nn.Module):
            raise ExplainError(f"no inputs can be guessed for the function {name_of(model)}; pass them with --inputs")
        return inputs_for(model.eval(), configs, targets=args.train)
    match evaluated("--inputs", args.inputs, namespace):
        case tuple() as values:
            return Inputs(values)
        case dict() as values if all(isinstance(name, str) for name in values):
            return Inputs((), values)
        case Tensor() as value:
            return Inputs((value,))
        case other:
            raise ExplainError(
                f"--inputs {args.inputs!r} gives a {type(other).__name__}; "
                f"it must give a tensor, a tuple of arguments, or a dict of arguments by name"
            )


def _run(model: Callable[..., Any], *, inputs: Inputs, train: bool) -> None:
    with torch.set_grad_enabled(train):
        out = model(*inputs.args, **inputs.kwargs)
        if train:
            _backward(out)


def _run_as_written(model: Callable[..., Any], inputs: Inputs, run: Callable[..., None]) -> None:
    """Raise ExplainError where the model itself raises, uncompiled: Dynamo would log a traceback."""
    try:
        run(model)
    except ExplainError:
        raise
    except Exception as error:
        raise ExplainError(
            f"{name_of(model)}({inputs}) raises {in_one_line(error)}; pass inputs that it takes with --inputs"
        ) from error


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
