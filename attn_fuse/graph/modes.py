"""Modes: the grad mode and the autocast in which each node of a graph runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, Node

from attn_fuse.graph.names import op_name

_DEVICES = ("cpu", "cuda")
_OPENS_LEVEL = ("_increment_nesting", "_enter_dual_level")
_CLOSES_LEVEL = ("_decrement_nesting", "_exit_dual_level")


@dataclass(frozen=True)
class Autocast:
    """The autocast of one device type. dtype: the target of its casts while enabled."""

    device: str
    dtype: torch.dtype
    enabled: bool


@dataclass(frozen=True)
class Mode:
    """The mode that a node runs in.

    grad: whether gradients are on. autocast: one entry for each device type.
    levels: the number of open levels of torch.func (vmap, grad, jvp).
    """

    grad: bool
    autocast: tuple[Autocast, ...]
    levels: int = 0

    @property
    def casts(self) -> bool:
        """Whether autocast may change the dtype of a product."""
        return any(cast.enabled for cast in self.autocast)


def mode_now() -> Mode:
    """The mode of the caller; inference mode counts as `grad=False`."""
    grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return Mode(grad, tuple(map(_autocast_now, _DEVICES)))


def _autocast_now(device: str) -> Autocast:
    return Autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))


def modes_of(graph: Graph, start: Mode) -> dict[Node, Mode]:
    """The mode of each node of `graph`, which starts in the mode `start`."""
    found: dict[Node, Mode] = {}
    mode = start
    before: dict[Node, Mode] = {}
    for node in graph.nodes:
        found[node] = mode
        name = op_name(node) if node.op == "call_function" else ""
        if name.endswith(_OPENS_LEVEL):
            # A level includes its opening and closing nodes.
            mode = found[node] = replace(mode, levels=mode.levels + 1)
        elif name.endswith(_CLOSES_LEVEL):
            mode = replace(mode, levels=mode.levels - 1)
        match name:
            case "_set_grad_enabled":
                mode = replace(mode, grad=bool(node.args[0]))
            case "_enter_inference_mode":
                before[node] = mode
                mode = replace(mode, grad=mode.grad and not node.args[0])
            case "_enter_autocast":
                before[node] = mode
                mode = replace(mode, autocast=_entered(mode.autocast, *node.args))
            case "_exit_inference_mode":
                mode = replace(mode, grad=before[node.args[0]].grad)
            case "_exit_autocast":
                mode = replace(mode, autocast=before[node.args[0]].autocast)
    return found


@contextlib.contextmanager
def cast_as(graph: Graph, casts: Iterable[Autocast]) -> Iterator[None]:
    """A block whose new nodes run under `casts`: the graph enters them before and exits them after."""
    entered = [graph.call_function(_enter_autocast, (cast.device, cast.dtype, cast.enabled, None)) for cast in casts]
    try:
        yield
    except BaseException:
        for node in entered:
            graph.erase_node(node)
        raise
    for node in reversed(entered):
        graph.call_function(_exit_autocast, (node,))


def uncast(graph: Graph, mode: Mode) -> contextlib.AbstractContextManager[None]:
    """A block whose new nodes run without autocast: the graph disables that of `mode` around them."""
    return cast_as(graph, [replace(cast, enabled=False) for cast in mode.autocast if cast.enabled])


@contextlib.contextmanager
def autocast_of(mode: Mode) -> Iterator[None]:
    """A block under the autocast of `mode`."""
    with contextlib.ExitStack() as stack:
        for cast in mode.autocast:
            if cast != _autocast_now(cast.device):
                stack.enter_context(torch.autocast(cast.device, dtype=cast.dtype, enabled=cast.enabled))
        yield


def _entered(
    casts: tuple[Autocast, ...], device: str, dtype: Any = None, enabled: bool = True, cache: Any = None
) -> tuple[Autocast, ...]:
    dtype = torch.get_autocast_dtype(device) if dtype is None else dtype
    others = tuple(cast for cast in casts if cast.device != device)
    return tuple(sorted((*others, Autocast(device, dtype, bool(enabled))), key=lambda cast: cast.device))
