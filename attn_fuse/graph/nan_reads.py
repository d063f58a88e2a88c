"""NaN reads: the operations behind an attention that tell a NaN from a number.

A fully masked row is NaN under minus infinity, and 0 in torch's kernels. Most operations pass a NaN on to the program's
outputs. The exceptions are operations without fractions in their result, such as comparisons, `isnan` and `argmax`, a
few that return a fraction for NaN, and possibly any operation outside torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from attn_fuse.graph.location import locate
from attn_fuse.graph.names import CASTS, IN_THE_SHAPE_OF, LAYOUT, SIZE_QUERIES, op_name, tensors_of, value_of
from attn_fuse.graph.scopes import bodies, operands_of

# These return fractions, but no NaN for some or all NaNs.
_TAKES_NAN = frozenset(
    "nan_to_num nanmean nansum nanmedian nanquantile fmax fmin sign sgn softshrink heaviside item tolist".split()
)
_SHAPES = SIZE_QUERIES | IN_THE_SHAPE_OF | {"is_floating_point", "is_complex", "is_contiguous", "storage_offset"}


def nan_reads(graph: GraphModule) -> dict[Node, str]:
    """By node, subgraphs included, an operation that could tell a NaN in its result from 0, in words."""
    reads = _Reads()
    reads.collect(graph, {})
    return reads.of_zero


class _Reads:
    """By node, an operation that tells a NaN from any number, `of_any`, or from 0, `of_zero`."""

    def __init__(self) -> None:
        self.of_any: dict[Node, str] = {}
        self.of_zero: dict[Node, str] = {}

    def collect(self, graph: GraphModule, outside: Mapping[int, str]) -> None:
        """Read `graph` backward, each subgraph after its readers. outside: the reader of each output, by its place."""
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
        # A value that the graph writes into an input at its end is an output too.
        is_written = op_name(user) == "copy" and user.args[0] is not node and _is_fractions(node)
        if user.op == "output" or is_written or op_name(user) in _SHAPES:
            return ""
        run = bodies(user, graph)
        if len(run) == 1 and (given := operands_of(user, run[0], graph)):
            return next(filter(None, (self.of_any.get(h, "") for h, a in given.items() if a is node)), "")
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
