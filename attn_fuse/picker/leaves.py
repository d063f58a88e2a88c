"""Leaves: a region and what it reads, in a form from which another process can make and run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.graph import PythonCode

from attn_fuse.graph.modes import autocast_of
from attn_fuse.graph.names import value_of
from attn_fuse.graph.region import Region, alone, number_of

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Leaf:
    """One leaf of a region, from which a tensor or a number is made.

    number: the value of a leaf that is no tensor. A tensor has a size, stride and dtype instead.
    held: whether the program has it as an attribute, by which a parameter, or a proof of contents, is known again.
    learned: whether it is a parameter. proved: what the program relies on about the contents, "" for nothing.
    contents: the elements, if they matter and are at hand.
    spread: of random elements, the mean and standard deviation; for integers the min and max, for booleans the share of
        True; () for elements that suit any program.
    """

    number: Any = None
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device = _CPU
    requires_grad: bool = False
    held: bool = False
    learned: bool = False
    proved: str = ""
    contents: Tensor | None = field(default=None, repr=False)
    spread: tuple[float, ...] = ()


def leaf_of(node: Node, region: Region, held: bool, number: Callable[[Any], Any] = number_of) -> Leaf:
    """The leaf `node` of `region`, without contents. number: turns a size into a number."""
    like = value_of(node)
    if not isinstance(like, Tensor):
        return Leaf(number(like))
    size, stride = (tuple(map(number, ns)) for ns in (like.size(), like.stride()))
    learns = region.mode.grad and like.requires_grad and node not in region.detached
    return Leaf(None, size, stride, like.dtype, like.device, learns, held, held and isinstance(like, nn.Parameter))


def program_of(region: Region, leaves: Sequence[Leaf]) -> PythonCode:
    """The text of a method `forward` that returns a tuple of one tensor.

    It takes the `leaves` in order, except those held, which are attributes named `leaf_<number>`.
    """
    with autocast_of(region.mode):
        module, _ = alone(region)
    graph = module.graph
    for node, leaf in zip(list(graph.find_nodes(op="placeholder")), leaves, strict=True):
        if leaf.held:
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.create_node("get_attr", node.name))
            graph.erase_node(node)
    return graph.python_code("self")


def with_leaves(module: nn.Module, leaves: Sequence[Leaf], values: Sequence[Any]) -> tuple[nn.Module, list[Any]]:
    """`module` with the `values` of the leaves held as attributes, and the other values, which are its arguments."""
    for n, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
        if leaf.held:
            register = module.register_parameter if leaf.learned else module.register_buffer
            register(f"leaf_{n}", value)
    return module, [value for leaf, value in zip(leaves, values, strict=True) if not leaf.held]


def made(leaf: Leaf) -> Any:
    """A tensor or number for `leaf`: its contents, or what an operand, a mask or a position may contain."""
    if leaf.dtype is None:
        return leaf.number
    tensor = torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype, device=leaf.device)
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    if leaf.contents is not None:
        tensor = leaf.contents.to(leaf.device) if 0 in leaf.stride else tensor.copy_(leaf.contents)
    elif leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        mean, std = leaf.spread or (0.0, 1.0)
        wide = torch.complex64 if leaf.dtype.is_complex else torch.float32
        whole.copy_(torch.randn(whole.shape, dtype=wide, device=leaf.device) * std + mean)
    elif leaf.dtype == torch.bool:
        whole.bernoulli_(*(leaf.spread or (0.8,)))
        if not leaf.spread and leaf.size:
            tensor[..., 0] = True
    elif leaf.spread:
        low, high = map(int, leaf.spread)
        whole.random_(low, high + 1)
    else:
        whole.zero_()
        if leaf.size and 0 not in leaf.stride:
            tensor[..., : -(-leaf.size[-1] * 3 // 4)] = 1  # words before padding; one of two documents
    if leaf.learned:
        return nn.Parameter(tensor, requires_grad=leaf.requires_grad)
    return tensor.requires_grad_(leaf.requires_grad)
