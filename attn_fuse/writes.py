"""Writes: what a graph writes in place, and whether a region stays what it is in spite of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from attn_fuse.attention import Refusal
from attn_fuse.names import (
    DROPOUT,
    ELEMENTWISE,
    INLINE_SUBGRAPHS,
    SIZE_QUERIES,
    SOFTMAX,
    is_in_place,
    op_name,
    storages,
)
from attn_fuse.scopes import scopes
from attn_fuse.walk import BETWEEN, Walk


def written_storages(module: GraphModule) -> set[int]:
    """Memory that some operation of `module` writes in place."""
    return {s for scope in scopes(module) for _, s in writes_of(scope.module.graph)}


def include_writes(
    walk: Walk, output: Node, position: dict[Node, int], writes: list[tuple[Node, int]]
) -> bool | Refusal:
    """Bring into the region what writes in place to its own tensors; refuse where that reaches beyond them."""
    while True:
        own = set().union(*(storages(n) for n in walk.inside)) if walk.inside else set()
        read = set().union(*(storages(n) for n in walk.leaves)) if walk.leaves else set()
        first = min(position[n] for n in walk.inside)
        added = False
        for node, storage in writes:
            if position[node] >= position[output] or node in walk.inside or storage not in own | read:
                continue
            if storage in read:
                # What is written before it is first read is what the call will read as well.
                if position[node] > _first_read(walk, storage, position, output):
                    return Refusal("a tensor that the attention reads is written in place meanwhile", node)
                continue
            if position[node] < first:
                continue
            if op_name(node) not in ELEMENTWISE | DROPOUT | SOFTMAX:
                return Refusal("the scores or weights are written in place", node)
            walk.inside.add(node)
            for arg in node.all_input_nodes:
                walk.inner(arg)
            added = True
        if not added:
            break
    written = {storage: position[node] for node, storage in reversed(writes) if node in walk.inside}
    for node in output.graph.nodes if written else ():
        held = [written[storage] for storage in storages(node) if storage in written]
        if not held or node is output:
            continue
        if node.op in ("placeholder", "get_attr"):
            return Refusal("an input or a parameter is written in place in the attention", node)
        for user in node.users:
            # A view taken before is one of what is written.
            before = position[user] < min(held) and not storages(user) & written.keys()
            ignored = before or op_name(user) in SIZE_QUERIES or is_dead(user, writes)
            if user not in walk.inside and not ignored:
                return Refusal("a tensor written in place in the attention is also used outside it", user)
    # What is computed of memory that is not the region's own would find it written once more.
    foreign = {storage for leaf in walk.leaves for storage in storages(leaf)} & written.keys()
    tainted: set[Node] = set()
    for node in sorted(walk.inside, key=position.__getitem__) if foreign else ():
        if storages(node) & foreign or tainted & set(node.all_input_nodes):
            tainted.add(node)
            for user in node.users:
                if user not in walk.inside and node is not output and not is_dead(user, writes):
                    return Refusal("a tensor written in place in the attention is also used outside it", user)
    return bool(written)


def _first_read(walk: Walk, storage: int, position: dict[Node, int], output: Node) -> int:
    """Where the region first takes elements from that memory; a view takes none."""
    readers = (
        position[n]
        for n in walk.inside
        if storage not in storages(n) and any(storage in storages(arg) for arg in n.all_input_nodes)
    )
    return min(readers, default=position[output])


def is_dead(node: Node, writes: list[tuple[Node, int]]) -> bool:
    """Whether nothing comes of `node`: what a model computes for those who ask for it, and nobody does."""
    if not node.op.startswith("call_") or op_name(node) not in BETWEEN or any(node is writer for writer, _ in writes):
        return False
    return all(is_dead(user, writes) for user in node.users)


def writes_of(graph: Graph) -> Iterator[tuple[Node, int]]:
    """Each (operation, memory it writes in place)."""
    for node in graph.nodes:
        if node.op.startswith("call_"):
            for tensor in _written(node):
                for storage in storages(tensor):
                    yield node, storage


def _written(node: Node) -> list[Node]:
    """The arguments that `node` writes in place."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        # Those that run a subgraph once are looked into; what another one writes is not known.
        return [] if op_name(node) in INLINE_SUBGRAPHS else list(node.all_input_nodes)
    if isinstance(node.target, torch._ops.OpOverload):
        arguments = node.target._schema.arguments
        given = dict(zip((a.name for a in arguments), node.args, strict=False)) | dict(node.kwargs)
        written = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        return [
            n
            for value in written
            for n in (value if isinstance(value, (list, tuple)) else [value])
            if isinstance(n, Node)
        ]
    target = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    found = [target] if target is not None and is_in_place(node, target) else []
    out = node.kwargs.get("out")
    return [*found, out] if isinstance(out, Node) else found
