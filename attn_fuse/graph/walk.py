"""Walk: collect the nodes of one attention, from the product with the value back to what it reads.

`inner` walks through the weights, the scores and the mask side: element-wise, index-making and layout operations.
`operand` walks from a product to query, key or value: layout, casts, a scale and partial writes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from attn_fuse.graph.modes import Mode
from attn_fuse.graph.names import (
    CASTS,
    CREATION,
    FUSED,
    LAYOUT,
    PRODUCTS,
    SCATTERS,
    is_between,
    is_tensor,
    op_name,
    requires_grad,
    value_of,
)  # fmt: skip
from attn_fuse.graph.reach import reach


@dataclass(eq=False)
class Walk:
    """The walk backward from the product with the value.

    softmax: the anchor. modes: the mode of each node of the graph.
    only: the products that may be that of query and key: one, also where it is written again; None allows any.
    whole: whether a partly written operand is a leaf; otherwise the walk goes through its writes.
    inside: the region's operations. leaves: what they read. scores: the products of query and key.
    operands: the leaves behind query, key and value. beside: the leaves that scores and weights meet, such as masks.
    """

    softmax: Node
    modes: Mapping[Node, Mode]
    only: Container[Node] | None = None
    whole: bool = False
    inside: set[Node] = field(default_factory=set)
    leaves: set[Node] = field(default_factory=set)
    operands: set[Node] = field(default_factory=set)
    beside: set[Node] = field(default_factory=set)
    scores: list[Node] = field(default_factory=list)
    _gradients: bool = True
    _behind: dict[Node, bool] = field(default_factory=dict)

    def from_output(self, output: Node) -> None:
        """Walk back from `output`: SDPA, a sum of two products, or a product and the division or cast after it."""
        self._gradients = self.modes[output].grad
        self.inside.add(output)
        if op_name(output) in FUSED:
            named = dict(zip(("query", "key", "value"), output.args, strict=False)) | dict(output.kwargs)
            for operand in (named["query"], named["key"], named["value"]):
                self.operand(operand)
            for other in output.all_input_nodes:
                self.inner(other)
            return
        weights = reached_from(self.softmax, output)
        if op_name(output) == "add":
            for product in output.all_input_nodes:
                self.from_product(product, weights)
            return
        while not is_product(output):
            # The division by the sum stands after the product.
            product = next(n for n in output.all_input_nodes if n in weights and _leads_to_product(n))
            for operand in output.all_input_nodes:
                if operand is not product:
                    self.inner(operand)
            output = product
        self.from_product(output, weights)

    def from_product(self, output: Node, weights: set[Node]) -> None:
        """Walk back from `output`, a product with the value. weights: the softmax and what is computed from it."""
        self.inside.add(output)
        if op_name(output) == "sum":
            output = output.all_input_nodes[0]
            self.inside.add(output)
        for operand in output.all_input_nodes:
            if operand in weights:
                self.inner(operand)
            else:
                self.operand(operand)

    def leaf(self, node: Node) -> None:
        """Take `node` as a leaf. A tuple, such as a shape, joins the region instead: it is asked for there."""
        (self.inside if is_tuple(node) else self.leaves).add(node)

    def close(self) -> None:
        """Take what the region reads and the walk did not reach as leaves, such as a tensor asked for its shape."""
        while missing := {a for n in self.inside for a in n.all_input_nodes} - self.inside - self.leaves:
            for node in missing:
                self.leaf(node)

    def inner(self, node: Node) -> None:
        """Walk through `node`, on the way from the weights to the scores or on the mask side."""
        self._inner(node)
        if node in self.leaves:
            self.beside.add(node)

    def _inner(self, node: Node) -> None:
        if node in self.inside or node in self.leaves:
            return
        name = op_name(node) if node.op.startswith("call_") else node.op
        if self.is_cut_off(node) or (not is_tensor(node) and not is_tuple(node) and name not in LAYOUT):
            self.leaf(node)
        elif is_product(node) and not self._is_behind_softmax(node):
            if self.only is not None and node not in self.only:
                self.leaf(node)
                return
            self.inside.add(node)
            self.scores.append(node)
            factors = node
            if name == "sum":
                factors = node.all_input_nodes[0]
                self.inside.add(factors)
            for arg in factors.all_input_nodes:
                self.operand(arg)
        # A product behind the softmax may sum the weights, multiplied by ones.
        elif node is self.softmax or is_between(name) or is_product(node):
            if (name == "getitem" and not (_is_slicing(node) or _is_lookup(node))) or _is_one_of_several(node):
                self.leaf(node)
                return
            self.inside.add(node)
            for arg in node.all_input_nodes:
                self.inner(arg)
        else:
            self.leaf(node)

    def operand(self, node: Node) -> None:
        """Walk through `node`, on the way from a product back to its query, key or value."""
        if node in self.inside or node in self.leaves:
            return
        name = op_name(node) if node.op.startswith("call_") else node.op
        tensors = [n for n in node.all_input_nodes if is_tensor(n) or is_tuple(n)]
        scaling = name in ("mul", "div") and len(tensors) == 1
        if not self.is_cut_off(node) and (
            (name in CREATION and name in ("empty", "zeros"))
            or scaling
            or name in CASTS
            or (name in SCATTERS and not self.whole)
            or (name in LAYOUT and (name != "getitem" or _is_slicing(node)) and not _is_one_of_several(node))
        ):
            self.inside.add(node)
            for number, arg in enumerate(node.all_input_nodes):
                if arg in tensors and (number == 0 or scaling or name in SCATTERS):
                    self.operand(arg)
                elif arg not in self.inside:
                    self.leaf(arg)
        else:
            self.leaf(node)
            self.operands.add(node)

    def is_cut_off(self, node: Node) -> bool:
        """Whether `node` runs without gradients on inputs that require one, though the output records a backward."""
        if not self._gradients or self.modes[node].grad:
            return False
        return any(map(requires_grad, node.all_input_nodes))

    def _is_behind_softmax(self, node: Node) -> bool:
        if node not in self._behind:
            self._behind[node] = node in reached_from(self.softmax, node)
        return self._behind[node]


def is_product(node: Node) -> bool:
    """Whether `node` is a matrix product, or one written as `(a * b).sum()`."""
    if not node.op.startswith("call_"):
        return False
    if op_name(node) != "sum" or not node.all_input_nodes:
        return op_name(node) in PRODUCTS
    factors = node.all_input_nodes[0]
    return (
        factors.op.startswith("call_")
        and op_name(factors) == "mul"
        and len(factors.all_input_nodes) == 2
        and all(is_tensor(n) for n in factors.all_input_nodes)
    )


def batch_dimensions(product: Node) -> frozenset[int]:
    """The dimensions of a product's result along which it multiplies other matrices; none where that is not plain."""
    ndim = getattr(value_of(product), "ndim", 0)
    if op_name(product) in ("matmul", "bmm", "baddbmm"):
        return frozenset(range(ndim - 2))
    equation = product.args[0] if op_name(product) == "einsum" else None
    if not isinstance(equation, str) or not re.fullmatch(r"[a-zA-Z]+,[a-zA-Z]+->[a-zA-Z]+", equation.replace(" ", "")):
        return frozenset()
    first, second, out = re.split(",|->", equation.replace(" ", ""))
    return frozenset(n for n, letter in enumerate(out) if letter in first and letter in second)


def reached_from(start: Node, last: Node) -> set[Node]:
    """`start` and the nodes computed from it that stand no later in the graph than `last`."""

    def below(node: Node) -> Iterable[Node]:
        return [user for user in node.users if user is last or user < last] if node is not last else ()

    return {*reach([start], below)}


def is_tuple(node: Node) -> bool:
    """Whether the value of `node` is a tuple or list, as a torch.Size is."""
    return isinstance(value_of(node), (tuple, list))


def _is_one_of_several(node: Node) -> bool:
    """Whether `node` is a part of a tuple result, other than a size, a max or min, or a piece of a cut tensor."""
    source = node.all_input_nodes[0] if op_name(node) == "getitem" and node.all_input_nodes else None
    return source is not None and is_tuple(source) and op_name(source) not in LAYOUT | {"max", "min", "size", "shape"}


def _is_slicing(node: Node) -> bool:
    """Whether a getitem takes slices, single positions and new axes only, no list or tensor of positions."""
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return not any(isinstance(p, list) or (isinstance(p, Node) and is_tensor(p)) for p in parts)


def _is_lookup(node: Node) -> bool:
    """Whether every tensor that a getitem takes holds whole-number positions; a list rules it out."""
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    tensors = [value_of(p) for p in parts if isinstance(p, Node)]
    return not any(isinstance(p, list) for p in parts) and all(
        not isinstance(t, torch.Tensor) or t.dtype in (torch.int64, torch.int32) for t in tensors
    )


def _leads_to_product(node: Node) -> bool:
    """Whether `node` is a product, or a cast of one."""
    while op_name(node) in CASTS:
        node = node.all_input_nodes[0]
    return is_product(node)
