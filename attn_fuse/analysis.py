"""Analysis: one region through its normal form and its expression to an attention, or to a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from attn_fuse.attention.attention import Attention, Refusal
from attn_fuse.attention.describe import plain, printed
from attn_fuse.expression import nodes as ex
from attn_fuse.graph.location import locate
from attn_fuse.graph.names import value_of
from attn_fuse.graph.region import Region, cut_at
from attn_fuse.guard import Proof
from attn_fuse.lift.lift import NotLifted, lift
from attn_fuse.lift.normalize import Normal, NotNormal, normalize
from attn_fuse.patterns.recognize import recognize
from attn_fuse.report import log
from attn_fuse.torch_internals import FakeTensorMode, source_name

_MOST_CUTS = 8


@dataclass(frozen=True, eq=False)
class Analysis:
    """The attention read from one region, or a Refusal.

    cuts: operations that became leaves, each by its number in the region that it was cut from. element: an element of
    the output; None if nothing was read.
    """

    region: Region
    result: Attention | Refusal
    mode: FakeTensorMode
    cuts: tuple[int, ...]
    element: ex.Expr | None

    @property
    def expression(self) -> str:
        """The mathematics that was read, in the names of this region; "" if it is too large or cannot be printed."""
        if self.element is None:
            return ""
        try:
            names = {n: _leaf_name(leaf, self.region) for n, leaf in enumerate(self.region.leaves)}
            return printed(self.result, self.element, names)
        except Exception:  # a report must not cost a fusion
            log.warning("%s: its mathematics cannot be printed", locate(self.region.softmax), exc_info=True)
            return ""

    def moved_to(self, region: Region) -> Analysis:
        """The same analysis for a `region` of the same operations."""
        for number in self.cuts:
            cut = cut_at(region, region.nodes[number])
            assert cut is not None
            region = cut
        at = dict(zip(self.region.nodes, region.nodes, strict=True))
        result = _with_node(self.result, lambda node: at.get(node, node))
        return replace(self, region=region, result=result)


def analyse(region: Region, proofs: Mapping[Node, Proof]) -> Analysis:
    """The attention that `region` computes, or why it computes none. proofs: the proved contents of its leaves."""
    cuts: list[int] = []
    while True:
        mode, element = FakeTensorMode(), None
        result: Attention | Refusal
        try:
            normal = normalize(region)
            mode = normal.mode
            result, element = _read(region, normal, proofs)
        except NotNormal as problem:
            result = Refusal(str(problem), problem.node)
        except NotLifted as problem:
            cut = cut_at(region, problem.node) if problem.node is not None and len(cuts) < _MOST_CUTS else None
            if cut is not None:
                cuts.append(region.nodes.index(problem.node))
                region = cut
                continue
            result = Refusal(str(problem), problem.node)
        return Analysis(region, result, mode, tuple(cuts), element)


def _read(region: Region, normal: Normal, proofs: Mapping[Node, Proof]) -> tuple[Attention | Refusal, ex.Expr | None]:
    """(the attention that the region computes, an element of the region's output)"""
    original: Any = value_of(region.output)
    made = normal.graph.graph.output_node().all_input_nodes[0].meta["val"]
    if original.dtype != made.dtype or len(original.shape) != len(made.shape):
        refusal = Refusal("the dtype of its products depends on an autocast that is not visible here", region.output)
        return refusal, None
    lifted = lift(normal, {n: proofs[leaf].form for n, leaf in enumerate(region.leaves) if leaf in proofs})
    # A Refusal names a part of an expression; the user needs the operation that made it.
    placed = _with_node(recognize(lifted), lambda part: None if part is None else normal.origin.get(ex.origin_of(part)))
    return placed, lifted.element


def _with_node(result: Attention | Refusal, moved: Callable[[Any], Any]) -> Attention | Refusal:
    """`result` with `moved` applied to the node of its Refusal."""
    if isinstance(result, Refusal):
        return replace(result, node=moved(result.node))
    unread = result.unread
    return result if unread is None else replace(result, unread=replace(unread, node=moved(unread.node)))


def _leaf_name(leaf: Node, region: Region) -> str:
    top = region.scope.top(leaf)
    source = source_name(top) if top is not None and top.op == "placeholder" else ""
    return re.sub(r"^L\['([^']+)'\]", r"\1", plain(source)) if source else leaf.name
