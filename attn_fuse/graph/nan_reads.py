"""NaN reads: the operations that tell a NaN from a number, behind an attention.

A fully masked row is NaN under minus infinity, and 0 on torch's kernels. Most operations carry a NaN on to what they
give, so that it shows in the program's outputs. Those that do not: an operation with a result that holds no fractions,
as a comparison, `isnan` or `argmax`, and the few that give a fraction for NaN. An operation that is not torch's may.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from attn_fuse.graph.location import locate
from attn_fuse.graph.names import (
    CASTS,
    IN_THE_SHAPE_OF,
    INLINE_SUBGRAPHS,
    LAYOUT,
    SIZE_QUERIES,
    op_name,
    tensors_of,
    value_of,
)  # fmt: skip
from attn_fuse.graph.scopes import bodies

# The result is a fraction, and none for NaN, or not for every NaN.
_TAKES_NAN = frozenset(
    "nan_to_num nanmean nansum nanmedian nanquantile fmax fmin sign sgn softshrink heaviside item tolist".split()
)
_SHAPES = SIZE_QUERIES | IN_THE_SHAPE_OF | {"is_floating_point", "is_complex", "is_contiguous", "storage_offset"}


def nan_reads(graph: GraphModule) -> dict[Node, str]:
    """For each node, what could tell a NaN among its elements from 0, in words; a node without such is left out.

    Nodes of subgraphs are among them.
    """
    reads = _Reads()
    reads.collect(graph, {})
    return reads.of_zero


class _Reads:
    """What tells a NaN from any other number, `of_any`, and what tells it from 0, `of_zero`, by node."""

    def __init__(self) -> None:
        self.of_any: dict[Node, str] = {}
        self.of_zero: dict[Node, str] = {}

    def collect(self, graph: GraphModule, outside: Mapping[int, str]) -> None:
        """Read `graph`, a subgraph after the graph around it. outside: what reads each output, by its place."""
        outputs = _outputs(graph)
        for node in reversed(graph.graph.nodes):
            if node.op == "output":
                continue
            for body in bodies(node, graph):
                self.collect(body, self._of_outputs(node, body))
            said = [self._said(user, node, graph) for user in node.users]
            said += [outside.get(n, "") for n, output in enumerate(outputs) if output is node]
            if any(said):
                self.of_any[node] = next(filter(None, said))
            said = [*map(self._said_of_zero, node.users, said), *said[len(node.users) :]]
            if any(said):
                self.of_zero[node] = next(filter(None, said))

    def _said_of_zero(self, user: Node, said: str) -> str:
        if _makes_zero(user):
            return ""
        moves = user.op.startswith("call_") and op_name(user) in LAYOUT | CASTS
        return self.of_zero.get(user, "") if moves and _is_fractions(user) else said

    def _said(self, user: Node, node: Node, graph: GraphModule) -> str:
        # What the graph writes into its inputs at its end is an output, too.
        is_written = op_name(user) == "copy" and user.args[0] is not node and _is_fractions(node)
        if user.op == "output" or is_written or op_name(user) in _SHAPES:
            return ""
        run = bodies(user, graph)
        if len(run) == 1 and op_name(user) in INLINE_SUBGRAPHS:
            holders = [n for n in run[0].graph.nodes if n.op == "placeholder"]
            operands = [a for a in user.args if not (isinstance(a, str) or getattr(a, "op", "") == "get_attr")]
            if len(holders) == len(operands):
                said = (self.of_any.get(h, "") for h, a in zip(holders, operands, strict=True) if a is node)
                return next(filter(None, said), "")
        is_foreign = "." in op_name(user) or "::" in op_name(user)
        if run or is_foreign or op_name(user) in _TAKES_NAN or not _is_fractions(user):
            return f"{op_name(user)} (line {locate(user).line})"
        return self.of_any.get(user, "")

    def _of_outputs(self, call: Node, body: GraphModule) -> dict[int, str]:
        told: dict[int, str] = {}
        for user in call.users:
            one = op_name(user) == "getitem" and isinstance(user.args[1], int)
            said = self.of_any.get(user if one else call, "")
            told |= {n: said for n in ([user.args[1]] if one else range(len(_outputs(body)))) if said}
        return told


def _is_fractions(node: Node) -> bool:
    tensors = tensors_of(value_of(node))
    return bool(tensors) and all(t.is_floating_point() or t.is_complex() for t in tensors)


def _makes_zero(node: Node) -> bool:
    if op_name(node) != "nan_to_num":
        return False
    nan = node.args[1] if len(node.args) > 1 else node.kwargs.get("nan")
    return nan is None or (isinstance(nan, int | float) and nan == 0)


def _outputs(graph: GraphModule) -> list[object]:
    return pytree.tree_leaves(graph.graph.output_node().args[0], is_leaf=lambda x: x is None)
