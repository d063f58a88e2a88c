"""Peak: the share of a step's peak memory that attention takes as written, estimated from the graph.

Inductor stores what matrix products and other operations that it cannot fuse give and read. A softmax overwrites the
scores. In inference a tensor is stored until it was read last. In training it stays until the backward, which needs one
more tensor of an attention's size, and a gradient for each parameter.
"""

from __future__ import annotations

from collections.abc import Container

from torch.fx import GraphModule, Node

from attn_fuse.graph.names import (
    LAYOUT,
    SOFTMAX,
    called,
    elements,
    is_between,
    is_elementwise,
    requires_grad,
    tensors_of,
    value_of,
)
from attn_fuse.graph.reach import reach
from attn_fuse.graph.walk import is_product


def attention_share(module: GraphModule, training: bool) -> float:
    """The share of the peak that fusing all attention of the top graph saves, from 0 to 1."""
    nodes = list(module.graph.nodes)
    weights = [node for node in nodes if called(node) in SOFTMAX]
    scores = {*reach(weights, _scores_around)}
    if not training:
        whole = _most_alive(nodes, ())
        return 1 - _most_alive(nodes, scores) / max(whole, 1)
    gradients = sum(_bytes(node) for node in nodes if node.op == "placeholder" and requires_grad(node))
    rest = gradients + sum(_bytes(node) for node in nodes if node not in scores and _is_stored(node))
    taken = sum(map(_bytes, weights)) + max(map(_bytes, weights), default=0)
    return taken / max(taken + rest, 1)


def _scores_around(node: Node) -> list[Node]:
    """The neighbours of a score tensor that have its size, up to the products on both sides."""
    above = [] if is_product(node) else node.all_input_nodes
    below = [user for user in node.users if not is_product(user)]
    return [x for x in (*above, *below) if _bytes(x) == _bytes(node) and (is_product(x) or is_between(called(x)))]


def _most_alive(nodes: list[Node], without: Container[Node]) -> int:
    """The most bytes that are stored at one time in inference, apart from the tensors in `without`."""
    last: dict[Node, int] = {}
    owners: dict[Node, Node] = {}
    for number, node in enumerate(nodes):
        first = node.all_input_nodes[0] if node.all_input_nodes else node
        overwrites = called(node) in LAYOUT | SOFTMAX or is_elementwise(called(node))
        owners[node] = owners[first] if overwrites and _bytes(first) == _bytes(node) else node
        last |= {owners[read]: number for read in (node, *node.all_input_nodes)}
    held = [node for node in nodes if node.op in ("placeholder", "get_attr")]
    alive = most = sum(map(_bytes, held))
    ends: dict[int, int] = {}
    for number, node in enumerate(nodes):
        if owners[node] is node and node not in held and node not in without and _is_stored(node):
            alive += _bytes(node)
            ends[last[node]] = ends.get(last[node], 0) + _bytes(node)
        most = max(most, alive)
        alive -= ends.get(number, 0)
    return most


def _is_stored(node: Node) -> bool:
    if called(node) in LAYOUT or node.op == "output":
        return False
    if not is_elementwise(called(node)):
        return True
    views = {*reach([node], lambda n: [user for user in n.users if called(user) in LAYOUT])}
    return any(not is_elementwise(called(user)) for view in views for user in view.users if user not in views)


def _bytes(node: Node) -> int:
    return sum(elements(x) * x.itemsize for x in tensors_of(value_of(node)))
