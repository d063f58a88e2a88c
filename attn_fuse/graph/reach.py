"""Reach: the nodes that a walk through a graph meets, up to what a node reads or down to what reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch.fx import Node


def reach(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """`starts` and the nodes met from them, each once. following: the nodes to go on to from one."""
    seen: set[Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += following(node)
