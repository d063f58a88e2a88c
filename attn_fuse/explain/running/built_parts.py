"""Parts of a model that was built and does not run: those that ran before it raised, and its largest modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.steps import TimeUp, trying

# Of how many inputs that failed the runs are repeated, and for how many seconds and bytes each.
MOST_RUNS, RUN_SECONDS, RUN_BYTES = 3, 30.0, 6 << 30
# How many modules are offered, and what share of the parameters each has to have.
MOST_MODULES, SHARE = 4, 0.05


def parts_that_ran(model: nn.Module, failed: Sequence[Inputs]) -> Iterator[tuple[str, nn.Module, Inputs]]:
    """Of runs of `model` on inputs that it fails on: the outermost modules that ran to their end and hold a share of
    its parameters, with the name and the inputs of each, the largest first."""
    for inputs in failed[:MOST_RUNS]:
        ran: dict[str, tuple[nn.Module, Inputs]] = {}
        names = {module: name for name, module in model.named_modules() if name}
        hooks = [
            module.register_forward_hook(_recording(name, ran), with_kwargs=True) for module, name in names.items()
        ]
        try:
            with contextlib.suppress(Exception, TimeUp), trying(RUN_SECONDS, RUN_BYTES):
                model(*inputs.args, **inputs.kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        outermost = [name for name in ran if not any(name.startswith(f"{other}.") for other in ran)]
        for name in sorted(outermost, key=lambda name: -_size(ran[name][0])):
            if _size(ran[name][0]) >= SHARE * _size(model):
                yield name, *ran[name]


def _recording(name: str, ran: dict[str, tuple[nn.Module, Inputs]]) -> Callable[..., None]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        ran[name] = module, Inputs(args, kwargs)

    return record


def largest_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, None]]:
    """The outermost modules of `model` that can be called and hold a share of its parameters, the largest first; None
    for their inputs, which are not known."""
    found: list[tuple[str, nn.Module]] = []
    waiting = [*model.named_children()]
    while waiting:
        name, module = waiting.pop(0)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or type(module).forward is nn.Module.forward:
            waiting += [(f"{name}.{inner}", child) for inner, child in module.named_children()]
        elif _size(module) >= SHARE * _size(model) and any(True for _ in module.children()):
            found.append((name, module))
    # Of layers that are alike the first says it all.
    kinds = {type(module): (name, module) for name, module in reversed(found)}
    largest = sorted(kinds.values(), key=lambda one: -_size(one[1]))[:MOST_MODULES]
    yield from ((name, module, None) for name, module in largest)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
