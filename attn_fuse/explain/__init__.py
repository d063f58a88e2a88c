"""What attn_fuse makes of a model: ``python -m attn_fuse.explain model.py``, or ``attn_fuse.explain(model, *inputs)``.

The model runs once under torch.compile with the attn_fuse backend and no compiler behind it. The report says for each
attention where it stands, what was recognised, on which kernel it runs and why not on the others; or what blocks it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_fuse import backend
from attn_fuse.errors import ExplainError, OptionError, nearest
from attn_fuse.explain.find_model import Inputs, built, evaluated, imported, in_one_line, inputs_for, outermost
from attn_fuse.options import PICKS, parse_options
from attn_fuse.report import GraphReport, SiteReport, as_json, as_text, bytes_in_words, collecting

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}

# Keeps what graph breaks make of the model's own code apart from what the user compiles; torch 2.11 has no such flag.
_ISOLATED: dict[str, Any] = {
    name: True for name in ("isolate_recompiles",) if name in inspect.signature(torch.compile).parameters
}


@dataclass(frozen=True)
class Explanation:
    """What became of every attention of a model; as text, `str(explanation)`.

    subject: the model and what it ran on, in words.
    reports: one for each graph that torch.compile made of it.
    """

    subject: str
    reports: tuple[GraphReport, ...]

    @property
    def sites(self) -> tuple[SiteReport, ...]:
        return tuple(site for report in self.reports for site in report.sites)

    @property
    def fused(self) -> int:
        return sum(site.fused for site in self.sites)

    @property
    def already_fused(self) -> int:
        """How many call `F.scaled_dot_product_attention` themselves."""
        return sum(site.status == "already fused" for site in self.sites)

    @property
    def left_as_written(self) -> int:
        return len(self.sites) - self.fused - self.already_fused

    @property
    def score_bytes(self) -> int:
        """Bytes of score matrices that are no longer stored."""
        return sum(site.score_bytes for site in self.sites)

    def __str__(self) -> str:
        """The report in words; attentions that differ only in their module stand in one block."""
        notes = tuple(dict.fromkeys(note for report in self.reports for note in report.notes))
        text = as_text(GraphReport(tuple(_grouped(self.sites)), 0.0, notes)).strip()
        return "\n\n".join(part for part in (self.subject, text, self._summary()) if part)

    def as_json(self, graphs: bool = False) -> dict[str, Any]:
        """Everything as plain dictionaries and lists; `graphs` puts in the graphs' code before and after."""
        code = [{"before": r.before, "after": r.after} if graphs else {} for r in self.reports]
        return {
            "subject": self.subject,
            "attentions": len(self.sites),
            "fused": self.fused,
            "left_as_written": self.left_as_written,
            "already_fused": self.already_fused,
            "score_bytes": self.score_bytes,
            "graphs": [{**as_json(report), **both} for report, both in zip(self.reports, code, strict=True)],
        }

    def graphs(self) -> str:
        """The code of each graph, before and after."""
        parts = [
            f"graph {number}, {when}:\n{code.strip()}"
            for number, report in enumerate(self.reports, 1)
            for when, code in (("before", report.before), ("after", report.after))
        ]
        return "\n\n".join(parts)

    def _summary(self) -> str:
        if not self.reports:
            return "no attention found: torch.compile made no graph of it"
        count = len(self.reports)
        graphs = f" in {count} graphs" if count > 1 else ""
        if not self.sites:
            return f"no attention found{graphs}: there is no softmax between two products"
        attentions = f"{len(self.sites)} attention{'s' if len(self.sites) > 1 else ''}"
        summary = f"{attentions}{graphs}: {self.fused} fused, {self.left_as_written} left as written"
        if self.already_fused:
            summary += f", {self.already_fused} fused already in the program (F.scaled_dot_product_attention)"
        if self.score_bytes:
            summary += f"\n{bytes_in_words(self.score_bytes)} of scores no longer stored"
        return summary


def explain(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """What attn_fuse makes of ``model(*args, **kwargs)``, which runs once for it.

    The model keeps its mode, gradients are recorded or not as around the call, and the random state is put back.
    What is compiled already stays compiled.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        return _explanation(model, Inputs(args, kwargs), lambda run: run(*args, **kwargs))


def _explanation(
    model: Callable[..., Any],
    inputs: Inputs,
    use: Callable[[Callable[..., Any]], object],
    options: Mapping[str, Any] | None = None,
    dynamic: bool = False,
) -> Explanation:
    # A new code object each time: Dynamo keeps what it compiled, and what it learns of shapes, by code object.
    call = types.FunctionType(_call.__code__.replace(), globals())
    compiled = torch.compile(
        types.MethodType(call, model),
        # A new function each time: Dynamo never takes an earlier compilation, which reports nothing, for this one.
        backend=functools.partial(backend.looked_at, options=options),
        dynamic=dynamic,
        **_ISOLATED,
    )
    with collecting() as reports:
        use(compiled)
    return Explanation(_subject(model, inputs), tuple(reports))


def _call(self: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    # What Dynamo compiles instead of the model's own forward. The name `self` makes module paths start at the model.
    return self(*args, **kwargs)


def _subject(model: Callable[..., Any], inputs: Inputs) -> str:
    if not isinstance(model, nn.Module):
        return f"{_name(model)}({inputs})"
    subject = f"{_name(model)}({inputs}), {'training' if model.training else 'inference'}"
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    return subject if weight is None else f"{subject}, {str(weight.dtype).removeprefix('torch.')} on {weight.device}"


def _name(model: Callable[..., Any]) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", type(model).__name__)


def _grouped(sites: Iterable[SiteReport]) -> Iterator[SiteReport]:
    """One site for all that differ only in their module: it names the modules and has the bytes of all."""
    groups: list[tuple[SiteReport, list[SiteReport]]] = []
    for site in sites:
        anywhere = _anywhere(site)
        for known, members in groups:
            if known == anywhere:
                members.append(site)
                break
        else:
            groups.append((anywhere, [site]))
    for anywhere, members in groups:
        shown = anywhere if len(members) > 1 else members[0]
        modules = _modules_in_words([site.location.module for site in members])
        yield replace(
            shown,
            location=replace(shown.location, module=modules),
            score_bytes=sum(site.score_bytes for site in members),
        )


def _anywhere(site: SiteReport) -> SiteReport:
    """`site` without what tells it from the same line run by another module: "self.bias" for "h.3.attn.bias"."""
    module, blocker = site.location.module, site.blocker
    layer = re.match(r"(.*\.)?\d+(?=\.|$)", module)

    def words(text: str) -> str:
        if module:
            text = text.replace(f"{module}.", "self.")
        if layer is not None:
            text = re.sub(rf"\b{re.escape(layer[0])}\b", f"{layer[1] or ''}*", text)
        return text

    if blocker is not None:
        where = blocker.location and replace(blocker.location, module="")
        blocker = replace(blocker, reason=words(blocker.reason), op=words(blocker.op), location=where)
    return replace(
        site,
        location=replace(site.location, module=""),
        attention={name: words(text) for name, text in site.attention.items()},
        why_not={name: tuple(words(reason) for reason in reasons) for name, reasons in site.why_not.items()},
        blocker=blocker,
    )


def _modules_in_words(modules: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(module for module in modules if module))
    if len(distinct) < 3 and len(distinct) == len(modules):
        return ", ".join(distinct)
    named = ", ".join(distinct) if len(distinct) < 3 else f"{distinct[0]} ... {distinct[-1]}"
    times = f"{len(modules)} times" if len(modules) > 1 else ""
    return ", ".join(part for part in (named, times) if part)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, or 2 after one line on stderr that says what to pass."""
    args = _parser().parse_args(argv)
    try:
        # What the model's own code prints stays out of the report.
        with contextlib.redirect_stdout(sys.stderr):
            explanation = _explain_file(args)
    except (ExplainError, OptionError) as error:
        print(f"attn_fuse.explain: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(explanation.as_json(args.graph), indent=2))
        return 0
    print(explanation)
    if args.graph:
        print(f"\n{explanation.graphs()}")
    return 0


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
            return _explanation(model, inputs, run, options, args.dynamic)
        except (ExplainError, OptionError):
            raise
        except Exception as error:
            _run_as_written(model, inputs, run)
            raise ExplainError(
                f"{_name(model)}({inputs}) runs as written, but torch.compile fails on it: {in_one_line(error)}"
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
            raise ExplainError(f"no inputs can be guessed for the function {_name(model)}; pass them with --inputs")
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
    """Tells a model that raises from one that cannot be compiled; Dynamo would log a traceback of the former."""
    try:
        run(model)
    except ExplainError:
        raise
    except Exception as error:
        raise ExplainError(
            f"{_name(model)}({inputs}) raises {in_one_line(error)}; pass inputs that it takes with --inputs"
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
    """`value` with its tensors on `device`, those of floats in `dtype`."""
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


class _Callable(types.ModuleType):
    """This module, which can be called: importing it hides a function of its name in the package."""

    def __call__(self, model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
        return explain(model, *args, **kwargs)


sys.modules[__name__].__class__ = _Callable
