"""Reuse an identical earlier node, so layers share it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from attn_fuse.graph.names import LAYOUT, op_name, requires_grad, value_of


def earlier(graph: Graph, before: Node, target: Any, args: tuple[Any, ...]) -> Node | None:
    """The node in front of `before` that calls `target` on the same `args`; None without one.

    target: a function without effects. Arguments are the same if they are equal numbers or sizes, the same tensors, or
    the same views of them; if one requires a gradient, only of a node that has one: not in a block without gradients.
    """
    for node in graph.find_nodes(op="call_function", target=target):
        alike = node < before and not node.kwargs and _same(node.args, args)
        if alike and (requires_grad(node) or not _has_gradient(args)):
            return node
    return None


def _has_gradient(args: tuple[Any, ...]) -> bool:
    found: list[Node] = []
    torch.fx.map_arg(args, found.append)
    return any(map(requires_grad, found))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Node) and isinstance(b, Node):
        if a is b:
            return True
        first, second = value_of(a), value_of(b)
        if isinstance(first, torch.SymInt) and isinstance(second, torch.SymInt):
            return bool(first.node.expr == second.node.expr)
        alike = a.op == b.op and a.target == b.target and op_name(a) in LAYOUT
        return alike and _same(a.args, b.args) and _same(a.kwargs, b.kwargs)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)
