"""Alone: one region as a graph of its own, whose inputs are the region's leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from attn_fuse.graph.modes import mode_now, switched
from attn_fuse.graph.region import Region
from attn_fuse.graph.scopes import Scope


def alone(region: Region) -> tuple[GraphModule, Region]:
    """A graph of the region alone, its nodes named by their number, and the region in that graph."""
    graph = Graph()
    copy: dict[Node, Node] = {}
    modes = region.scope.modes
    mode, opened = mode_now(), list[Node]()
    for number, leaf in enumerate(region.leaves):
        copy[leaf] = graph.placeholder(f"leaf_{number}")
    for number, node in enumerate(region.nodes):
        if modes[node].autocast != mode.autocast:
            opened, mode = switched(graph, opened, modes[node]), modes[node]
        args, kwargs = (torch.fx.map_arg(x, copy.__getitem__) for x in (node.args, node.kwargs))
        copy[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"node_{number}")
    for original, made in copy.items():
        made.meta = dict(original.meta)
    switched(graph, opened, mode_now())
    graph.output((copy[region.output],))
    module = GraphModule({}, graph)
    inside = replace(
        region,
        # A node that replaced a site has no mode of its own.
        scope=Scope(module, {}, {made: modes.get(original, region.mode) for original, made in copy.items()}),
        softmax=copy.get(region.softmax, copy[region.output]),
        output=copy[region.output],
        nodes=tuple(copy[node] for node in region.nodes),
        leaves=tuple(copy[leaf] for leaf in region.leaves),
        operands=frozenset(copy[leaf] for leaf in region.operands),
        weights_used=None,
        dropped_weights_used=None,
    )
    return module, inside


def number_of(value: Any) -> Any:
    """`value` as a number; a symbolic one as on the first call."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat)) else value
