"""Reach: the nodes that a walk through a graph meets, and nodes that compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from attn_fuse.graph.names import LAYOUT, called, requires_grad, value_of


def reach(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """`starts` and the nodes met from them, each once. following: the next nodes after a given one."""
    seen: set[Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += following(node)


def same(one: Any, other: Any, through: Callable[[Node], bool]) -> bool:
    """Whether two arguments are equal: the same node, equal numbers or sizes, or lists or dicts of equal arguments.

    through: whether a node equals another that calls the same operation on equal arguments.
    """
    todo, seen = [(one, other)], set()
    while todo:
        a, b = todo.pop()
        if isinstance(a, Node) and isinstance(b, Node):
            if a is b or (a, b) in seen:
                continue
            seen.add((a, b))
            m, n = value_of(a), value_of(b)
            if isinstance(m, torch.SymInt) and isinstance(n, torch.SymInt) and m.node.expr == n.node.expr:
                continue
            if a.op != b.op or a.target != b.target or not through(a):
                return False
            todo += [(a.args, b.args), (a.kwargs, b.kwargs)]
        elif any(isinstance(a, kind) and isinstance(b, kind) for kind in (list, tuple)):
            if len(a) != len(b):
                return False
            todo += zip(a, b, strict=True)
        elif isinstance(a, dict) and isinstance(b, dict):
            if a.keys() != b.keys():
                return False
            todo += [(a[key], b[key]) for key in a]
        elif type(a) is not type(b) or not bool(a == b):
            return False
    return True


def earlier(graph: Graph, before: Node, target: Any, args: tuple[Any, ...]) -> Node | None:
    """A node in front of `before` that calls `target`, a function without effects, on the same `args`, or None.

    Arguments are the same if they are equal numbers or sizes, the same tensors, or the same views of them. If one
    requires a gradient, the node must record one too, so it must not lie in a block without gradients.
    """
    read: list[Node] = []
    map_arg(args, read.append)
    for node in graph.find_nodes(op="call_function", target=target):
        alike = node < before and not node.kwargs and same(node.args, args, lambda n: called(n) in LAYOUT)
        if alike and (requires_grad(node) or not any(map(requires_grad, read))):
            return node
    return None
