"""Regions: the part of Dynamo's graph that one attention is written in.

A region is anchored on a softmax, or on an exponential that may be half of one. Forward it reaches to the product of
weights and value; backward to the product of query and key, from there through layout operations to query and key
themselves, and on the mask side through element-wise, index-making and layout operations to graph inputs. Everything
else is a leaf. What an operation *means* is decided later, on its normal form; the names only say how far to walk
(names.py), and a name that is missing costs structure, never correctness.

Where it takes knowledge of the meaning to say which product is the one of query and key, there are several candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from attn_fuse.attention import Refusal
from attn_fuse.names import (
    CASTS,
    DROPOUT,
    ELEMENTWISE,
    FUSED,
    IN_THE_SHAPE_OF,
    LAYOUT,
    PRODUCTS,
    REDUCTIONS,
    SIZE_QUERIES,
    SOFTMAX,
    op_name,
    storages,
    value_of,
)  # fmt: skip
from attn_fuse.scopes import Scope, scopes
from attn_fuse.walk import BETWEEN, Walk, ancestors_within, is_product, is_tuple
from attn_fuse.writes import include_writes, is_dead, writes_of

# More score products than this are tried in turn; a graph that joins so many is something else.
_MOST_CANDIDATES = 4


@dataclass(frozen=True, eq=False)
class Region:
    """One softmax between two products.

    nodes: the operations of the region, in graph order, the last of them `output`, the product with the value.
    leaves: what the region reads, in order of first use; tensors and Python scalars.
    operands: those of the leaves that query, key or value are made of.
    mutates: whether an operation in it writes in place.
    context: nodes of the graph that open an autocast still open here.
    weights_used: an operation outside that reads the scores or weights, if there is one.
    dropped_weights_used: the same for weights after dropout.
    output_written: whether the program writes into the output in place later.
    """

    scope: Scope
    softmax: Node
    output: Node
    nodes: tuple[Node, ...]
    leaves: tuple[Node, ...]
    operands: frozenset[Node]
    mutates: bool
    context: tuple[Node, ...]
    weights_used: Node | None = None
    dropped_weights_used: Node | None = None
    output_written: bool = False

    def reading(self, replaced: Mapping[Node, Node]) -> Region:
        """The region with some of its leaves replaced."""
        return replace(
            self,
            leaves=tuple(replaced.get(leaf, leaf) for leaf in self.leaves),
            operands=frozenset(replaced.get(leaf, leaf) for leaf in self.operands),
        )


@dataclass(frozen=True, eq=False)
class Unread:
    """A softmax between two products that is refused before its expression is read."""

    scope: Scope
    softmax: Node
    refusal: Refusal


@dataclass(frozen=True, eq=False)
class Site:
    """A place where an attention may be written. candidates: what it may be, the likeliest first.

    unsure: whether only a candidate that is recognised shows that there is an attention at all.
    """

    softmax: Node
    candidates: tuple[Region | Unread, ...]
    unsure: bool = False

    @property
    def is_fused_already(self) -> bool:
        """Whether the program calls `F.scaled_dot_product_attention` here."""
        return op_name(self.softmax) in FUSED


def find_sites(module: GraphModule) -> list[Site]:
    """Every site in `module` and in the subgraphs that it runs once, in graph order."""
    return [found for scope in scopes(module) for found in _in_scope(scope)]


def cut_at(region: Region, node: Node) -> Region | None:
    """The region with `node` read as a leaf; None if the scores pass through it, or if it is written in place."""
    nodes = set(region.nodes)
    places = {node} if not is_tuple(node) else {user for user in node.users if user in nodes}
    if places & _dependents_of_products(region) or not places <= nodes:
        return None
    writes = [(n, s) for n, s in writes_of(region.scope.module.graph) if n in nodes] if region.mutates else []
    if any(storage in storages(place) for place in places for _, storage in writes):
        return None
    inside: set[Node] = set()
    leaves: set[Node] = set()
    todo = [region.output]
    while todo:
        current = todo.pop()
        if current in places or current not in nodes:
            leaves.add(current)
        elif current not in inside:
            inside.add(current)
            todo += current.all_input_nodes
        if not todo and writes:
            own = set().union(*(storages(n) for n in inside))
            todo = [n for n, storage in writes if storage in own and n not in inside]
    kept = {storage for n, storage in writes if n in inside}
    # What was cut off stays in the program, and with it what is written for it: twice, if it is written into a leaf.
    if any(is_tuple(leaf) or storages(leaf) & kept for leaf in leaves):
        return None
    order = {n: i for i, n in enumerate((*region.leaves, *region.nodes))}
    return replace(
        region,
        nodes=tuple(n for n in region.nodes if n in inside),
        leaves=tuple(sorted(leaves, key=order.__getitem__)),
        mutates=any(n in inside for n, _ in writes),
    )


def _in_scope(scope: Scope) -> Iterator[Site]:
    graph = scope.module.graph
    anchors = [n for n in graph.nodes if n.op.startswith("call_") and _is_anchor(n)]
    if not anchors:
        return
    position = {node: i for i, node in enumerate(graph.nodes)}
    writes = list(writes_of(graph))
    outputs: set[Node] = set()
    # An exponential is looked at last: it may be a part of what another anchor has found.
    for anchor in sorted(anchors, key=lambda n: op_name(n) in ("exp", "exp2")):
        for output in [anchor] if op_name(anchor) in FUSED else _outputs(anchor):
            if output not in outputs:
                site = _site(scope, anchor, output, position, writes)
                if site is not None:
                    outputs.add(output)
                    yield site


def _is_anchor(node: Node) -> bool:
    if op_name(node) in ("exp", "exp2"):
        # The exponential of one number is a temperature, as contrastive losses have it.
        return any(not isinstance(n, int) or n != 1 for n in getattr(value_of(node), "shape", ()))
    return op_name(node) in SOFTMAX | FUSED


def _site(
    scope: Scope, anchor: Node, output: Node, position: dict[Node, int], writes: list[tuple[Node, int]]
) -> Site | None:
    walk = Walk(anchor)
    walk.from_output(output)
    unsure = op_name(anchor) in ("exp", "exp2") and not any(op_name(n) in REDUCTIONS for n in walk.inside)
    unsure = unsure or op_name(output) == "sum"
    if op_name(anchor) in FUSED:
        return Site(anchor, (_region(scope, anchor, output, walk, position, writes),))
    if not walk.scores:
        hidden = next((leaf for leaf in walk.leaves - walk.operands if _hides_a_product(leaf)), None)
        if hidden is None:
            return None
        return Site(
            anchor, (Unread(scope, anchor, Refusal(f"the scores pass through {op_name(hidden)}", hidden)),), unsure
        )
    walks = [walk]
    # What is written into the scores in place may be another product.
    if len(walk.scores) == 1:
        walk.only = walk.scores[0]
    else:
        # Together they may be one product over cached and new keys.
        walks = walks if op_name(output) == "add" else []
        for product in walk.scores[:_MOST_CANDIDATES]:
            walks.append(Walk(anchor, only=product))
            walks[-1].from_output(output)
    return Site(anchor, tuple(_region(scope, anchor, output, w, position, writes) for w in walks), unsure)


def _region(
    scope: Scope, softmax: Node, output: Node, walk: Walk, position: dict[Node, int], writes: list[tuple[Node, int]]
) -> Region | Unread:
    def refused(reason: str, node: Node) -> Unread:
        return Unread(scope, softmax, Refusal(reason, node))

    several = next((n for n in walk.leaves if is_tuple(n)), None)
    if several is not None:
        return refused("several tensors are read at once", several)
    nested = next((n for n in walk.leaves if getattr(value_of(n), "is_nested", False)), None)
    if nested is not None:
        return refused("nested tensors are passed through untouched", nested)
    walk.close()
    mutates = include_writes(walk, output, position, writes)
    walk.close()
    if isinstance(mutates, Refusal):
        return Unread(scope, softmax, mutates)
    nodes = tuple(sorted(walk.inside, key=position.__getitem__))
    leaves = tuple(sorted(walk.leaves, key=position.__getitem__))
    between = set().union(*(_dependents(scores, walk.inside) for scores in walk.scores)) if walk.scores else {output}
    dropped = set().union(*(_dependents(n, walk.inside) for n in between if op_name(n) in DROPOUT))
    written = {storage for node, storage in writes if node in walk.inside}
    used: list[Node] = []
    dropped_used: list[Node] = []
    for node in nodes:
        if node in between and node is not output:
            for user in node.users:
                if user not in walk.inside and op_name(user) not in SIZE_QUERIES and not is_dead(user, writes):
                    if written and any(storages(n) & written for n in _ancestors_inside(node, walk.inside)):
                        what = "weights" if position[node] >= position[softmax] else "scores"
                        return refused(f"the {what} are written in place and also used outside the attention", user)
                    used.append(user)
                    if node in dropped:
                        dropped_used.append(user)
    seen = [user for user in used if op_name(user) not in IN_THE_SHAPE_OF]
    returned = next((n for n in leaves if n in _reached_from(seen)), None) if seen else None
    if returned is not None:
        # Computed once more, a score is another number by a rounding, and a comparison with its like turns over.
        return refused("the scores are compared or joined with what is computed from them", returned)
    first = min(position[n] for n in between)
    opened: list[Node] = []
    for node in scope.module.graph.nodes:
        if position[node] >= position[output]:
            break
        name = op_name(node) if node.op == "call_function" else ""
        if name in ("_enter_autocast", "_exit_autocast", "_set_grad_enabled"):
            if position[node] > first:
                return refused("autocast or the gradient mode changes inside the attention", node)
            if name == "_enter_autocast":
                opened.append(node)
            elif name == "_exit_autocast":
                opened = [n for n in opened if n is not node.args[0]]
    return Region(
        scope, softmax, output, nodes, leaves, frozenset(walk.operands), mutates, tuple(opened),
        used[0] if used else None, dropped_used[0] if dropped_used else None,
        any(storage in storages(output) and position[node] > position[output] for node, storage in writes),
    )  # fmt: skip


def _outputs(anchor: Node) -> list[Node]:
    """The products that what `anchor` gives reaches, each with the division by a sum that follows it, if one does."""
    products: list[Node] = []
    reached, todo = {anchor}, [anchor]
    while todo:
        node = todo.pop()
        for user in node.users:
            if user in reached:
                continue
            reached.add(user)
            name = op_name(user) if user.op.startswith("call_") else user.op
            if is_product(user):
                products.append(user)
            if name in BETWEEN:
                todo.append(user)
    # A sum that normalises the weights looks like a product too, but then there is a real one as well.
    real = [product for product in products if op_name(product) in PRODUCTS] or products
    # Cached and new keys under one softmax: their products with the values are added.
    sums = [
        user
        for p in real
        for user in p.users
        if op_name(user) == "add" and set(user.all_input_nodes) <= set(real) and _is_of_parts(p, anchor)
    ]
    joined = {p for node in sums for p in node.all_input_nodes if len(node.all_input_nodes) == 2}
    pairs = [node for node in dict.fromkeys(sums) if set(node.all_input_nodes) <= joined]
    return pairs + [_with_division(product, reached) for product in real if product not in joined]


def _is_of_parts(product: Node, anchor: Node) -> bool:
    """Whether what `product` takes of the weights is some of their keys only."""
    between = ancestors_within(product, anchor) - {product, anchor}
    return any(n in between and op_name(n) in ("getitem", "narrow", "select") for n in product.all_input_nodes)


def _with_division(product: Node, reached: set[Node]) -> Node:
    node = product
    while len(node.users) == 1:
        (user,) = node.users
        name = op_name(user) if user.op.startswith("call_") else user.op
        if name in CASTS:
            node = user
        elif name == "div" and user.args and user.args[0] is node:
            return user if any(n is not node and n in reached for n in user.all_input_nodes) else product
        else:
            break
    return product


def _hides_a_product(leaf: Node) -> bool:
    """Whether `leaf` is an operation on what a product gives, with nothing but element-wise operations between."""
    if not leaf.op.startswith("call_") or op_name(leaf) in PRODUCTS:
        return False
    seen: set[Node] = set()
    todo = leaf.all_input_nodes[:1]
    while todo:
        node = todo.pop()
        name = op_name(node) if node.op.startswith("call_") else ""
        if name in PRODUCTS:
            return True
        if node not in seen and (name in ELEMENTWISE or name in LAYOUT):
            seen.add(node)
            todo += node.all_input_nodes
    return False


def _reached_from(nodes: list[Node]) -> set[Node]:
    reached, todo = set(nodes), list(nodes)
    while todo:
        for user in todo.pop().users:
            if user not in reached:
                reached.add(user)
                todo.append(user)
    return reached


def _ancestors_inside(node: Node, inside: set[Node]) -> set[Node]:
    """`node`, and what it is computed from within `inside`."""
    found, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source in inside and source not in found:
                found.add(source)
                todo.append(source)
    return found


def _dependents(source: Node, within: set[Node]) -> set[Node]:
    reached, todo = {source}, [source]
    while todo:
        for user in todo.pop().users:
            if user in within and user not in reached:
                reached.add(user)
                todo.append(user)
    return reached


def _dependents_of_products(region: Region) -> set[Node]:
    within = set(region.nodes)
    products = [n for n in region.nodes if is_product(n)]
    return set().union(*(_dependents(p, within) for p in products))
