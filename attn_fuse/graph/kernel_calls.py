"""Fused attentions that a program calls itself: FlexAttention, and operators of flash_attn, xFormers and others.

They stay as they are. `F.scaled_dot_product_attention` is a site like any other, which the backend may improve.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from attn_fuse.graph.location import locate
from attn_fuse.graph.names import CALLS, FUSED, called, value_of
from attn_fuse.report import SiteReport

NAME = re.compile(r"attn|attention|fmha", re.IGNORECASE)


def calls_in(graph: GraphModule) -> Iterator[SiteReport]:
    """A report on each call of a fused attention in `graph` and its subgraphs, with its name as `fused_by`."""
    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if is_attention(node):
                    yield SiteReport(locate(node), "already fused", fused_by=called(node))


def is_attention(node: Node) -> bool:
    """Whether `node` calls a fused attention that is neither torch's SDPA nor ours."""
    # Its name tells, and the shapes of its first three tensors: query, key and value are [..., len, heads, head_dim] or
    # [..., heads, len, head_dim], with any value_dim.
    name = called(node)
    if not NAME.search(name) or name in FUSED | CALLS:
        return False
    # As text, because comparing symbols would add a guard.
    shapes = [[*map(str, getattr(value_of(n), "shape", ()))] for n in node.all_input_nodes[:3]]
    if len(shapes) < 3 or not all(len(shape) >= 3 for shape in shapes):
        return False
    query, key, value = shapes
    return query[-1] == key[-1] and key[:-1] == value[:-1]
