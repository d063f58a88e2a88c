"""Modes: the grad mode and the autocast under which each node of a graph runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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
    """The autocast of one device type. dtype: what it casts to while it is enabled."""

    device: str
    dtype: torch.dtype
    enabled: bool


@dataclass(frozen=True)
class Mode:
    """The mode that a node runs in.

    grad: whether operations record a backward. autocast: one entry for each device type.
    levels: how many levels of torch.func (vmap, grad, jvp) are open.
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
    """The mode of each node of `graph`. start: the mode in which the graph starts."""
    found: dict[Node, Mode] = {}
    mode = start
    before: dict[Node, Mode] = {}
    for node in graph.nodes:
        found[node] = mode
        name = op_name(node) if node.op == "call_function" else ""
        if name.endswith(_OPENS_LEVEL):
            # A level includes the nodes that open and close it.
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
def uncast(graph: Graph, mode: Mode) -> Iterator[None]:
    """A block whose new nodes run uncast: the graph switches the autocasts of `mode` off before them and on after."""
    entered = [
        graph.call_function(_enter_autocast, (cast.device, cast.dtype, False, None))
        for cast in mode.autocast
        if cast.enabled
    ]
    try:
        yield
    except BaseException:
        for node in entered:
            graph.erase_node(node)
        raise
    for node in reversed(entered):
        graph.call_function(_exit_autocast, (node,))


def switched(graph: Graph, opened: Sequence[Node], mode: Mode) -> list[Node]:
    """Write nodes that exit the autocasts `opened` and enter those of `mode` that do not hold now; gives the latter."""
    for node in reversed(opened):
        graph.call_function(_exit_autocast, (node,))
    return [
        graph.call_function(_enter_autocast, (cast.device, cast.dtype, cast.enabled, None))
        for cast in mode.autocast
        if cast not in mode_now().autocast
    ]


@contextlib.contextmanager
def autocast_of(mode: Mode) -> Iterator[None]:
    """A block whose operations are cast as in `mode`."""
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
