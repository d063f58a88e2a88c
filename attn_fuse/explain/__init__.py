"""Explain a model: ``python -m attn_fuse.explain model.py``, or ``attn_fuse.explain(model, *inputs)``.

The model runs once under torch.compile with the attn_fuse backend and no compiler behind it. For each attention the
report names its place, what was recognised, the kernel and why not the others, or what blocks it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from attn_fuse import backend
from attn_fuse.errors import ExplainError as ExplainError
from attn_fuse.errors import OptionError as OptionError
from attn_fuse.errors import nearest as nearest
from attn_fuse.explain.explanation import Explanation
from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.torchs_own import torch_code_left
from attn_fuse.graph.breaks import functions_left_alone
from attn_fuse.options import PICKS as PICKS
from attn_fuse.options import parse_options as parse_options
from attn_fuse.report import GraphReport as GraphReport
from attn_fuse.report import SiteReport as SiteReport
from attn_fuse.report import as_json as as_json
from attn_fuse.report import as_text as as_text
from attn_fuse.report import bytes_in_words as bytes_in_words
from attn_fuse.report import collecting
from attn_fuse.torch_internals import left_by_dynamo

# Separates our compilations of code after graph breaks from the user's. Not in torch 2.11.
_ISOLATED: dict[str, Any] = {
    name: True for name in ("isolate_recompiles",) if name in inspect.signature(torch.compile).parameters
}


def explain(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """The explanation of ``model(*args, **kwargs)``, from one run.

    The model keeps its training mode, and the current grad mode applies. The random state is restored, and earlier
    compilations stay.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        return explanation_of(model, Inputs(args, kwargs), lambda run: run(*args, **kwargs))


def explanation_of(
    model: Callable[..., Any],
    inputs: Inputs,
    use: Callable[[Callable[..., Any]], object],
    options: Mapping[str, Any] | None = None,
    dynamic: bool = False,
    codes: bool = False,
) -> Explanation:
    """The explanation of `model` from the graphs that Dynamo hands to the backend.

    inputs: as named in the explanation. use: calls the compiled model. options, dynamic: those of torch.compile.
    codes: whether to write the code for each attention.
    """
    recording: list[bool] = []
    reports: list[GraphReport] = []
    torchs_own: list[str] = []

    def analyzed(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        recording.append(torch.is_grad_enabled())
        torchs_own.extend(torch_code_left(graph))
        with collecting() as found:
            run = backend.analyze_only(graph, example_inputs, options=options, codes=codes)
        reports.extend(found)
        return run

    # A new partial each time: for the same backend Dynamo would reuse an earlier compilation and report nothing.
    compiled = compiled_apart(model, functools.partial(analyzed), dynamic)
    started = time.time()
    use(compiled)
    left = left_by_dynamo(started)
    subject = in_words(model, inputs, any(recording))
    not_compiled = (*functions_left_alone(left), *dict.fromkeys(torchs_own))
    return Explanation(subject, tuple(reports), not_compiled=not_compiled)


def compiled_apart(
    model: Callable[..., Any],
    backend: str | Callable[..., Any],
    dynamic: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """`model` under torch.compile, separate from all its other compilations.

    backend: a registered name or a callable. dynamic: torch.compile's. options: the backend's.
    """
    return functools.partial(compiled_call(backend, dynamic, options), model)


def compiled_call(
    backend: str | Callable[..., Any],
    dynamic: bool | None,
    options: Mapping[str, Any] | None = None,
    calls_forward: bool = False,
) -> Callable[..., Any]:
    """A compiled function that calls its first argument, a model, with the others; see `compiled_apart`.

    calls_forward: call the `forward` of the model's class instead, bypassing the model's hooks.
    """
    # A new code object each time: Dynamo stores its compilations, and what it learns of shapes, by code object.
    call = types.FunctionType((_call_forward if calls_forward else _call).__code__.replace(), globals())
    given: dict[str, Any] = {**_ISOLATED, **({} if options is None else {"options": dict(options)})}
    return torch.compile(call, backend=backend, dynamic=dynamic, **given)


def _call(self: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    # Dynamo compiles this in place of the model's forward. The name `self` makes module paths start at the model.
    return self(*args, **kwargs)


def _call_forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


def in_words(model: Callable[..., Any], inputs: Inputs, recording: bool) -> str:
    """The model, its inputs and its mode. recording: whether gradients were enabled."""
    if not isinstance(model, nn.Module):
        return f"{name_of(model)}({inputs})"
    tensors = (*model.parameters(), *inputs.args, *inputs.kwargs.values())
    trains = recording and any(getattr(tensor, "requires_grad", False) for tensor in tensors)
    mode = "training" if model.training else "inference"
    if trains != model.training:
        mode = "train() without gradients" if model.training else "eval() with gradients, as in training"
    subject = f"{name_of(model)}({inputs}), {mode}"
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    return subject if weight is None else f"{subject}, {str(weight.dtype).removeprefix('torch.')} on {weight.device}"


def name_of(model: Callable[..., Any]) -> str:
    """The class name of a module or callable object, or a function's own name."""
    return type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", type(model).__name__)


class _Callable(types.ModuleType):
    """Makes the module callable: once imported, it hides the function `attn_fuse.explain`."""

    def __call__(self, model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
        return explain(model, *args, **kwargs)


sys.modules[__name__].__class__ = _Callable
