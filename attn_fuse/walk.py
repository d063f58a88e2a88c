"""Walk: what one attention is made of, from the product with the value back to what it reads.

Through the weights and scores and on the mask side it goes by `inner`, through element-wise, index-making and layout
operations; from the product of query and key by `operand`, through the layout and a scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from attn_fuse.names import (
    CASTS,
    CREATION,
    DROPOUT,
    ELEMENTWISE,
    FUSED,
    JOINS,
    LAYOUT,
    LOOKUPS,
    PRODUCTS,
    REDUCTIONS,
    SOFTMAX,
    op_name,
    value_of,
)  # fmt: skip

# What may stand between the weights and the scores.
BETWEEN = ELEMENTWISE | LAYOUT | CREATION | DROPOUT | REDUCTIONS | JOINS | LOOKUPS | SOFTMAX


@dataclass(eq=False)
class Walk:
    """The walk backward from the product with the value. only: the one product that may be that of query and key."""

    softmax: Node
    only: Node | None = None
    inside: set[Node] = field(default_factory=set)
    leaves: set[Node] = field(default_factory=set)
    operands: set[Node] = field(default_factory=set)
    scores: list[Node] = field(default_factory=list)

    def from_output(self, output: Node) -> None:
        self.inside.add(output)
        if op_name(output) in FUSED:
            named = dict(zip(("query", "key", "value"), output.args, strict=False)) | dict(output.kwargs)
            for operand in (named["query"], named["key"], named["value"]):
                self.operand(operand)
            for other in output.all_input_nodes:
                self.inner(other)
            return
        weights = ancestors_within(output, self.softmax)
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
        """Read `node` as it is. A shape is not read but asked for, where it is used."""
        (self.inside if is_tuple(node) else self.leaves).add(node)

    def close(self) -> None:
        """Read what is still missing: that of which a shape is asked, unless it is in the region."""
        while missing := {a for n in self.inside for a in n.all_input_nodes} - self.inside - self.leaves:
            for node in missing:
                self.leaf(node)

    def inner(self, node: Node) -> None:
        """On the way from the weights to the scores, or on the mask side of it."""
        if node in self.inside or node in self.leaves:
            return
        name = op_name(node) if node.op.startswith("call_") else node.op
        if not _is_tensor(node) and not is_tuple(node) and name not in LAYOUT:
            self.leaf(node)
        elif is_product(node) and (name in PRODUCTS or self.softmax not in _ancestors(node)):
            if self.only is not None and node is not self.only:
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
        elif node is self.softmax or name in BETWEEN:
            if (name == "getitem" and not (_is_slicing(node) or _is_lookup(node))) or _is_one_of_several(node):
                self.leaf(node)
                return
            self.inside.add(node)
            for arg in node.all_input_nodes:
                self.inner(arg)
        else:
            self.leaf(node)

    def operand(self, node: Node) -> None:
        """From a product back to its query, key or value, through the layout and a scale."""
        if node in self.inside or node in self.leaves:
            return
        name = op_name(node) if node.op.startswith("call_") else node.op
        tensors = [n for n in node.all_input_nodes if _is_tensor(n) or is_tuple(n)]
        scaling = name in ("mul", "div") and len(tensors) == 1
        if (
            (name in CREATION and name in ("empty", "zeros"))
            or scaling
            or name in CASTS
            or (name in LAYOUT and (name != "getitem" or _is_slicing(node)) and not _is_one_of_several(node))
        ):
            self.inside.add(node)
            for number, arg in enumerate(node.all_input_nodes):
                if (number == 0 and arg in tensors) or (arg in tensors and scaling):
                    self.operand(arg)
                elif arg not in self.inside:
                    self.leaf(arg)
        else:
            self.leaf(node)
            self.operands.add(node)


def is_product(node: Node) -> bool:
    """Whether `node` is a matrix product, or one written out as a sum over products of two tensors' elements."""
    if not node.op.startswith("call_"):
        return False
    if op_name(node) != "sum" or not node.all_input_nodes:
        return op_name(node) in PRODUCTS
    factors = node.all_input_nodes[0]
    return (
        factors.op.startswith("call_")
        and op_name(factors) == "mul"
        and len(factors.all_input_nodes) == 2
        and all(_is_tensor(n) for n in factors.all_input_nodes)
    )


def ancestors_within(output: Node, softmax: Node) -> set[Node]:
    """The nodes from `softmax` to `output`, both included."""
    reached = {softmax}
    todo = [softmax]
    while todo:
        for user in todo.pop().users:
            if user not in reached:
                reached.add(user)
                if user is not output:
                    todo.append(user)
    return reached


def _is_tensor(node: Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def is_tuple(node: Node) -> bool:
    return isinstance(value_of(node), (tuple, list))


def _is_one_of_several(node: Node) -> bool:
    """Whether `node` is one of the tensors that an operation gives at once, other than by cutting one up."""
    source = node.all_input_nodes[0] if op_name(node) == "getitem" and node.all_input_nodes else None
    return source is not None and is_tuple(source) and op_name(source) not in LAYOUT | {"max", "min", "size", "shape"}


def _is_slicing(node: Node) -> bool:
    """Whether a getitem takes slices, positions and new axes only, not a tensor of positions."""
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return not any(isinstance(p, list) or (isinstance(p, Node) and _is_tensor(p)) for p in parts)


def _is_lookup(node: Node) -> bool:
    """Whether a getitem takes tensors of whole-number positions."""
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    tensors = [value_of(p) for p in parts if isinstance(p, Node)]
    return not any(isinstance(p, list) for p in parts) and all(
        not isinstance(t, torch.Tensor) or t.dtype in (torch.int64, torch.int32) for t in tensors
    )


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    todo = [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                todo.append(source)
    return found


def _leads_to_product(node: Node) -> bool:
    """Whether `node` is a product of what the softmax gives, or a cast of one."""
    while op_name(node) in CASTS:
        node = node.all_input_nodes[0]
    return is_product(node)
