"""Parts of a model that was built and does not run: those that ran before it raised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.search import Calls
from attn_fuse.explain.steps import TimeUp, trying

# Of how many inputs that failed the runs are repeated, and for how many seconds and bytes each.
_MOST_RUNS, _RUN_SECONDS, _RUN_BYTES = 3, 20.0, 6 << 30
# What share of the parameters a part has to have.
_SHARE = 0.05


def parts_that_ran(model: nn.Module, failed: Sequence[Inputs]) -> Iterator[tuple[str, nn.Module, Inputs]]:
    """Of runs of `model` on inputs that it fails on: the outermost modules that attend, ran to their end and hold a
    share of its parameters, with the name and the inputs of each, the largest first."""
    for inputs in failed[:_MOST_RUNS]:
        ran: dict[str, tuple[nn.Module, Inputs]] = {}
        hooks = [
            module.register_forward_hook(_recording(name, ran), with_kwargs=True)
            for name, module in model.named_modules()
            if name
        ]
        try:
            with contextlib.suppress(Exception, TimeUp), trying(_RUN_SECONDS, _RUN_BYTES):
                model(*inputs.args, **inputs.kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        outermost = [name for name in ran if not any(name.startswith(f"{other}.") for other in ran)]
        for name in sorted(outermost, key=lambda name: -_size(ran[name][0])):
            module, given = ran[name]
            if _size(module) >= _SHARE * _size(model) and _attends(module, given):
                yield name, module, given


def _recording(name: str, ran: dict[str, tuple[nn.Module, Inputs]]) -> Callable[..., None]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        ran[name] = module, Inputs(args, kwargs)

    return record


def _attends(module: nn.Module, inputs: Inputs) -> bool:
    # What wrote into its inputs, or into itself, may not run again.
    calls = Calls()
    with contextlib.suppress(Exception, TimeUp), trying(_RUN_SECONDS, _RUN_BYTES), calls:
        module(*inputs.args, **inputs.kwargs)
        return calls.attends
    return False


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
