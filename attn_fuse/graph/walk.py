"""Walk: collect the nodes of one attention, from the product with the value back to its inputs.

`inner` walks through the weights, the scores and the mask side: element-wise, index-making and layout operations.
`operand` walks from a product to query, key or value: layout, casts, a scale and partial writes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from attn_fuse.graph.modes import Mode
from attn_fuse.graph.names import (
    CASTS,
    FUSED,
    LAYOUT,
    PRODUCTS,
    SCATTERS,
    called,
    is_between,
    is_tensor,
    op_name,
    requires_grad,
    tensors_of,
    value_of,
)
from attn_fuse.graph.reach import reach

_WHOLE = (torch.int64, torch.int32)


@dataclass(eq=False)
class Walk:
    """The walk backward from the product with the value.

    softmax: the anchor. output: SDPA, a sum of two products, or a product, perhaps with a division or cast after it.
    modes: the mode of each node of the graph.
    only: the product of query and key, in every place where it is written; None allows any product.
    whole: whether a partly written operand is a leaf; otherwise the walk goes through its writes.
    inside: the region's operations. leaves: their inputs. scores: the products of query and key.
    operands: the leaves behind query, key and value. beside: leaves that scores and weights meet, such as masks.
    """

    softmax: Node
    output: Node
    modes: Mapping[Node, Mode]
    only: Container[Node] | None = None
    whole: bool = False
    inside: set[Node] = field(default_factory=set)
    leaves: set[Node] = field(default_factory=set)
    operands: set[Node] = field(default_factory=set)
    beside: set[Node] = field(default_factory=set)
    scores: list[Node] = field(default_factory=list)
    _behind: dict[Node, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        output = self.output
        self.inside.add(output)
        if op_name(output) in FUSED:
            named = dict(zip(("query", "key", "value"), output.args, strict=False)) | dict(output.kwargs)
            for operand in (named["query"], named["key"], named["value"]):
                self.operand(operand)
            for other in output.all_input_nodes:
                self.inner(other)
            return
        weights = reached_from([self.softmax], output)
        if op_name(output) == "add":
            for product in output.all_input_nodes:
                self.from_product(product, weights)
            return
        while not is_product(output):
            # The division by the sum follows the product.
            product = next(n for n in output.all_input_nodes if n in weights and _leads_to_product(n))
            for operand in output.all_input_nodes:
                if operand is not product:
                    self.inner(operand)
            output = product
        self.from_product(output, weights)

    def from_product(self, output: Node, weights: set[Node]) -> None:
        """Walk back from `output`, a product with the value. weights: the softmax and everything computed from it."""
        for factor in self._factors(output):
            if factor in weights:
                self.inner(factor)
            else:
                self.operand(factor)

    def _factors(self, product: Node) -> list[Node]:
        self.inside.add(product)
        if op_name(product) == "sum":
            product = product.all_input_nodes[0]
            self.inside.add(product)
        factors: list[Node] = product.all_input_nodes
        return factors

    def leaf(self, node: Node) -> None:
        """Take `node` as a leaf; a tuple, such as a shape, joins the region instead."""
        (self.inside if is_tuple(node) else self.leaves).add(node)

    def close(self) -> None:
        """Take inputs that the walk did not reach as leaves, such as a tensor whose shape is read."""
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
        name = called(node)
        is_score = is_product(node) and not self._is_behind_softmax(node)
        is_part = _is_one_of_several(node) or (name == "getitem" and not _is_slicing(node, _WHOLE))
        if self.is_cut_off(node) or (not is_tensor(node) and not is_tuple(node) and name not in LAYOUT):
            self.leaf(node)
        elif is_score and (self.only is None or node in self.only):
            self.scores.append(node)
            for factor in self._factors(node):
                self.operand(factor)
        # A product behind the softmax may sum the weights by a product with ones.
        elif not is_score and not is_part and (node is self.softmax or is_between(name) or is_product(node)):
            self.inside.add(node)
            for arg in node.all_input_nodes:
                self.inner(arg)
        else:
            self.leaf(node)

    def operand(self, node: Node) -> None:
        """Walk through `node`, on the way from a product back to its query, key or value."""
        if node in self.inside or node in self.leaves:
            return
        name = called(node)
        tensors = [n for n in node.all_input_nodes if is_tensor(n) or is_tuple(n)]
        scaling = name in ("mul", "div") and len(tensors) == 1
        if not self.is_cut_off(node) and (
            scaling
            or name in CASTS | {"empty", "zeros"}
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
        lacks = self.modes[self.output].grad and not self.modes[node].grad
        return lacks and any(map(requires_grad, node.all_input_nodes))

    def _is_behind_softmax(self, node: Node) -> bool:
        if node not in self._behind:
            self._behind[node] = node in reached_from([self.softmax], node)
        return self._behind[node]


def is_product(node: Node) -> bool:
    """Whether `node` is a matrix product, or one written as `(a * b).sum()`."""
    if called(node) != "sum" or not node.all_input_nodes:
        return called(node) in PRODUCTS
    factors = node.all_input_nodes[0]
    return (
        called(factors) == "mul" and len(factors.all_input_nodes) == 2 and all(map(is_tensor, factors.all_input_nodes))
    )


def batch_dimensions(product: Node) -> frozenset[int]:
    """The batch dimensions of a product's result; none where they are not plain."""
    ndim = getattr(value_of(product), "ndim", 0)
    if op_name(product) in ("matmul", "bmm", "baddbmm"):
        return frozenset(range(ndim - 2))
    equation = product.args[0] if op_name(product) == "einsum" else None
    if not isinstance(equation, str) or not re.fullmatch(r"[a-zA-Z]+,[a-zA-Z]+->[a-zA-Z]+", equation.replace(" ", "")):
        return frozenset()
    first, second, out = re.split(",|->", equation.replace(" ", ""))
    return frozenset(n for n, letter in enumerate(out) if letter in first and letter in second)


def reached_from(starts: Iterable[Node], last: Node) -> set[Node]:
    """`starts` and the nodes computed from them that stand no later in the graph than `last`."""

    def below(node: Node) -> Iterable[Node]:
        return [user for user in node.users if user is last or user < last] if node is not last else ()

    return {*reach(starts, below)}


def is_tuple(node: Node) -> bool:
    """Whether the value of `node` is a tuple or list, as a torch.Size is."""
    return isinstance(value_of(node), (tuple, list))


def _is_one_of_several(node: Node) -> bool:
    """Whether `node` is one of several results, unless these are sizes, pieces of a tensor, or a max with its index."""
    source = node.all_input_nodes[0] if op_name(node) == "getitem" and node.all_input_nodes else None
    return source is not None and is_tuple(source) and op_name(source) not in LAYOUT | {"max", "min", "size", "shape"}


def _is_slicing(node: Node, positions: Sequence[torch.dtype] = ()) -> bool:
    """Whether a getitem takes only slices, single positions, new axes, or tensors of the dtypes `positions`."""
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    dtypes = [tensor.dtype for p in parts if isinstance(p, Node) for tensor in tensors_of(value_of(p))]
    return not any(isinstance(p, list) for p in parts) and all(dtype in positions for dtype in dtypes)


def _leads_to_product(node: Node) -> bool:
    """Whether `node` is a product, or a cast of one."""
    while op_name(node) in CASTS:
        node = node.all_input_nodes[0]
    return is_product(node)
