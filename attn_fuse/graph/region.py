"""Regions: the part of Dynamo's graph that one attention is written in.

A region is anchored on a softmax, or on an exponential that may be half of one. Forward it reaches to the product of
weights and value. Backward it reaches to the product of query and key, from there through layout operations to query
and key themselves, and on the mask side through element-wise, index-making and layout operations to graph inputs.
Everything else is a leaf. The names (names.py) only say how far to walk; what an operation *means* is decided later, on
its normal form. So a missing name costs structure, never correctness.

A site has several candidates where only the meaning tells which product is that of query and key.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from attn_fuse.attention.attention import Refusal
from attn_fuse.graph.hidden import hidden, why_hidden
from attn_fuse.graph.modes import Mode
from attn_fuse.graph.names import (
    CASTS,
    DROPOUT,
    FUSED,
    IN_THE_SHAPE_OF,
    LAYOUT,
    PRODUCTS,
    REDUCTIONS,
    SCATTERS,
    SIZE_QUERIES,
    SOFTMAX,
    called,
    is_between,
    is_elementwise,
    is_exponential,
    op_name,
    requires_grad,
    value_of,
)  # fmt: skip
from attn_fuse.graph.reach import reach
from attn_fuse.graph.scopes import Scope, StillWritten
from attn_fuse.graph.walk import Walk, is_product, is_tuple, reached_from

# At most so many score products are tried in turn: a graph that joins more is something else.
_MOST_CANDIDATES = 4


@dataclass(frozen=True, eq=False)
class Region:
    """One softmax between two products.

    output: the product with the value, or the division by a sum or the addition that follows it.
    nodes: the operations of the region, in graph order; the last is `output`.
    leaves: the tensors and Python scalars that the region reads, in graph order; nodes cut by `cut_at` come last.
    operands: the leaves that query, key and value are made of.
    weights_used: an operation outside that reads the scores or weights; None without one.
    dropped_weights_used: the same for weights after dropout.
    whole: whether partly written operands are leaves, or the region holds no partial write at all.
    """

    scope: Scope
    softmax: Node
    output: Node
    nodes: tuple[Node, ...]
    leaves: tuple[Node, ...]
    operands: frozenset[Node]
    weights_used: Node | None = None
    dropped_weights_used: Node | None = None
    whole: bool = True

    @functools.cached_property
    def detached(self) -> frozenset[Node]:
        """The leaves that require a gradient but get none from `output`: behind a comparison or a `detach`, say."""
        reached = {self.output}
        for node in reversed(self.nodes):
            if node in reached and requires_grad(node):
                reached.update(node.all_input_nodes)
        # Only Dynamo records requires_grad: make_fx traces below autograd.
        candidates = self.leaves if self.mode.grad and "example_value" in self.output.meta else ()
        return frozenset(leaf for leaf in candidates if requires_grad(leaf) and leaf not in reached)

    @property
    def mode(self) -> Mode:
        """The grad mode and autocast of `output`."""
        return self.scope.modes[self.output]

    def reading(self, replaced: Mapping[Node, Node]) -> Region:
        """The region with each leaf that `replaced` names exchanged for the node that it gives."""
        return replace(
            self,
            leaves=tuple(replaced.get(leaf, leaf) for leaf in self.leaves),
            operands=frozenset(replaced.get(leaf, leaf) for leaf in self.operands),
        )


@dataclass(frozen=True, eq=False)
class RefusedRegion:
    """A candidate that is refused before its expression is read."""

    scope: Scope
    softmax: Node
    refusal: Refusal


@dataclass(frozen=True, eq=False)
class Site:
    """A place where an attention may be written.

    softmax: the anchor: a softmax, an exponential or a call of SDPA. candidates: its possible regions, likeliest first.
    unsure: whether the place counts as a site only where a candidate is recognised.
    """

    softmax: Node
    candidates: tuple[Region | RefusedRegion, ...]
    unsure: bool = False

    @property
    def is_fused_already(self) -> bool:
        """Whether the program calls `F.scaled_dot_product_attention` here."""
        return op_name(self.softmax) in FUSED


def find_sites(scope: Scope, written: StillWritten | None = None) -> Iterator[Site]:
    """The sites in the graph of `scope`, in graph order, then those of exponentials, then those that no walk follows.

    written: the memory that the graph still writes; a candidate that touches it is `RefusedRegion`.
    """
    graph = scope.module.graph
    anchors = [n for n in graph.nodes if n.op.startswith("call_") and _is_anchor(n)]
    position = {node: i for i, node in enumerate(graph.nodes)}
    outputs: set[Node] = set()
    followed: set[Node] = set()
    # Exponentials come last: one may lie in the region of another anchor.
    for anchor in sorted(anchors, key=is_exponential):
        for output in [anchor] if op_name(anchor) in FUSED else _outputs(anchor):
            if output not in outputs:
                site = _site(scope, anchor, output, position)
                if site is not None:
                    outputs.add(output)
                    followed.add(anchor)
                    followed.update(n for c in site.candidates if isinstance(c, Region) for n in c.nodes)
                    if written is not None:
                        site = replace(site, candidates=tuple(_unless(written, c) for c in site.candidates))
                    yield site
    for anchor, refusal in hidden(scope, followed):
        yield Site(anchor, (RefusedRegion(scope, anchor, refusal),))


def _unless(written: StillWritten, candidate: Region | RefusedRegion) -> Region | RefusedRegion:
    if isinstance(candidate, Region) and not written.holds((*candidate.nodes, *candidate.leaves)):
        return candidate
    return RefusedRegion(candidate.scope, candidate.softmax, written.refusal)


def cut_at(region: Region, node: Node) -> Region | None:
    """The region with `node` (of a tuple, its parts) read as a leaf; None where the scores pass through it."""
    nodes = set(region.nodes)
    places = {node} if not is_tuple(node) else {user for user in node.users if user in nodes}
    if places & _dependents_of_products(region) or not places <= nodes:
        return None
    stays = nodes - places
    read = list(reach([region.output], lambda n: n.all_input_nodes if n in stays else ()))
    inside, leaves = stays & {*read}, {n for n in read if n not in stays}
    if any(is_tuple(leaf) for leaf in leaves):
        return None
    order = {n: i for i, n in enumerate((*region.leaves, *region.nodes))}
    return replace(
        region,
        nodes=tuple(n for n in region.nodes if n in inside),
        leaves=tuple(sorted(leaves, key=order.__getitem__)),
    )


def _is_anchor(node: Node) -> bool:
    if is_exponential(node):
        # exp of a scalar is a learned temperature (CLIP), not a softmax.
        return any(not isinstance(n, int) or n != 1 for n in getattr(value_of(node), "shape", ()))
    return op_name(node) in SOFTMAX | FUSED


def _site(scope: Scope, anchor: Node, output: Node, position: dict[Node, int]) -> Site | None:
    walk = Walk(anchor, scope.modes)
    walk.from_output(output)
    unsure = is_exponential(anchor) and not any(op_name(n) in REDUCTIONS for n in walk.inside)
    unsure = unsure or op_name(output) == "sum"
    if op_name(anchor) in FUSED:
        return Site(anchor, (_region(scope, anchor, output, walk, position),))
    if not walk.scores:
        refusal = next((found for leaf in walk.leaves - walk.operands if (found := _why_unread(walk, leaf))), None)
        return None if refusal is None else Site(anchor, (RefusedRegion(scope, anchor, refusal),), unsure)
    walks = [walk]
    several = _written_again(walk.scores)
    if len(several) > 1:
        # Together they may be one score matrix, over cached and new keys.
        walks = walks if op_name(output) == "add" else []
        for products in several[:_MOST_CANDIDATES]:
            walks.append(Walk(anchor, scope.modes, only=products))
            walks[-1].from_output(output)
    tried = [other for walk in walks for other in _ways(walk, output)]
    firsts = [products[0] for products in several]
    apart = [not any(_may_equal(one, other) for other in firsts if other is not one) for one in firsts]
    disjoint = (
        {one for products in itertools.compress(several, apart) for one in products} if len(several) > 1 else set()
    )
    return Site(anchor, tuple(_region(scope, anchor, output, w, position, disjoint) for w in tried), unsure)


def _ways(walk: Walk, output: Node) -> Iterator[Walk]:
    """`walk`; and where it met a partial write, a second walk that takes partly written operands as leaves."""
    yield walk
    if any(op_name(node) in SCATTERS for node in walk.inside if node.op.startswith("call_")):
        whole = Walk(walk.softmax, walk.modes, walk.only, whole=True)
        whole.from_output(output)
        yield whole


_RETURNED = "the scores are compared or joined with what is computed from them"


def _computed_again(walk: Walk, position: Mapping[Node, int], disjoint: AbstractSet[Node]) -> Node | None:
    """Another product of query and key that a leaf beside the scores is computed from; None without one.

    disjoint: products that are other parts of the scores.
    """
    first = min((position[node] for node in walk.operands if node in position), default=0)
    known = walk.operands | disjoint

    def is_new(node: Node) -> bool:
        return not (node in known or node.op == "placeholder" or position.get(node, first) < first)

    def above(node: Node) -> Iterable[Node]:
        return node.all_input_nodes if is_new(node) and called(node) not in IN_THE_SHAPE_OF | SIZE_QUERIES else ()

    for node in reach(walk.leaves & walk.beside, above):
        if is_new(node) and called(node) in PRODUCTS:
            sides = [side for side in node.all_input_nodes if _comes_from(side, walk.operands)]
            if len(sides) > 1 or sides == node.all_input_nodes:
                return node
    return None


def _comes_from(node: Node, operands: Container[Node]) -> bool:
    """Whether `node` is computed from one of `operands` by layout and element-wise operations."""

    def above(n: Node) -> Iterable[Node]:
        return n.all_input_nodes if n not in operands and _keeps_elements(n) else ()

    return any(n in operands for n in reach([node], above))


def _written_again(products: Iterable[Node]) -> list[list[Node]]:
    """`products` in groups, each the same product written more than once."""
    groups: list[list[Node]] = []
    for product in products:
        group = next((group for group in groups if _alike(group[0], product)), None)
        if group is None:
            groups.append([product])
        else:
            group.append(product)
    return groups


def _may_equal(a: Node, b: Node) -> bool:
    """Whether two products may be equal: one operation on alike inputs, or two operations with results of one shape."""
    if a.target == b.target:
        return _alike(a, b)
    return str(getattr(value_of(a), "shape", None)) == str(getattr(value_of(b), "shape", None))


def _alike(one: Any, other: Any) -> bool:
    """Whether both apply the same products, layout and element-wise operations to the same tensors."""
    todo, seen = [(one, other)], set()
    while todo:
        a, b = todo.pop()
        if a is b:
            continue
        if type(a) is not type(b):
            return False
        if isinstance(a, Node):
            if not (called(a) in PRODUCTS or _keeps_elements(a)) or a.target != b.target:
                return False
            if (a, b) not in seen:
                seen.add((a, b))
                todo += [(a.args, b.args), (a.kwargs, b.kwargs)]
        elif isinstance(a, dict):
            todo += [(list(a), list(b)), (list(a.values()), list(b.values()))]
        elif isinstance(a, (list, tuple)):
            if len(a) != len(b):
                return False
            todo += zip(a, b, strict=True)
        elif not bool(a == b):
            return False
    return True


def _region(
    scope: Scope,
    softmax: Node,
    output: Node,
    walk: Walk,
    position: dict[Node, int],
    disjoint: AbstractSet[Node] = frozenset(),
) -> Region | RefusedRegion:
    def refused(reason: str, node: Node) -> RefusedRegion:
        return RefusedRegion(scope, softmax, Refusal(reason, node))

    several = next((n for n in walk.leaves if is_tuple(n)), None)
    if several is not None:
        return refused("several tensors are read at once", several)
    open_level = next((n for n in walk.inside if scope.modes[n].levels > 0), None)
    if open_level is not None:
        return refused("a vmap or a derivative of torch.func is open here", open_level)
    nested = next((n for n in walk.leaves if getattr(value_of(n), "is_nested", False)), None)
    if nested is not None:
        return refused("nested tensors are passed through untouched", nested)
    walk.close()
    nodes = tuple(sorted(walk.inside, key=position.__getitem__))
    leaves = tuple(sorted(walk.leaves, key=position.__getitem__))
    between = set().union(*(_dependents(scores, walk.inside) for scores in walk.scores)) if walk.scores else {output}
    dropped = set().union(*(_dependents(n, walk.inside) for n in between if op_name(n) in DROPOUT))
    used: list[Node] = []
    dropped_used: list[Node] = []
    for node in nodes:
        if node in between and node is not output:
            for user in node.users:
                if user not in walk.inside and op_name(user) not in SIZE_QUERIES and not _is_dead(user):
                    used.append(user)
                    if node in dropped:
                        dropped_used.append(user)
    seen = [user for user in used if op_name(user) not in IN_THE_SHAPE_OF]
    returned = next((n for n in leaves if n in walk.beside & _reached_from(seen, output)), None) if seen else None
    if returned is not None:
        # A kernel rounds the scores otherwise, so a comparison with scores computed outside it may flip.
        return refused(_RETURNED, returned)
    if (again := _computed_again(walk, position, disjoint)) is not None:
        return refused(_RETURNED, again)
    return Region(
        scope, softmax, output, nodes, leaves, frozenset(walk.operands),
        used[0] if used else None, dropped_used[0] if dropped_used else None,
        walk.whole or not any(n.op.startswith("call_") and op_name(n) in SCATTERS for n in nodes),
    )  # fmt: skip


def _is_dead(node: Node) -> bool:
    """Whether nothing uses `node` in the end: a model may compute more than its caller asks for."""
    return node.op.startswith("call_") and is_between(op_name(node)) and all(_is_dead(user) for user in node.users)


def _outputs(anchor: Node) -> list[Node]:
    """The products with the value behind `anchor`, or the addition or division by a sum that follows them."""
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
            if is_between(name):
                todo.append(user)
    # A sum that normalises the weights looks like a product too, but then a real product exists as well.
    real = [product for product in products if op_name(product) in PRODUCTS] or products
    # Cached and new keys under one softmax: the program adds their products with the values.
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
    """Whether `product` takes a slice of the weights, for some of the keys."""
    between = reached_from(anchor, product) - {product, anchor}
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


def _why_unread(walk: Walk, leaf: Node) -> Refusal | None:
    """Why `leaf` may hide the product of query and key from the walk; None where it does not."""
    if walk.is_cut_off(leaf):
        return Refusal("computed without gradients, though the output has one", leaf)
    return Refusal(why_hidden(leaf), leaf) if _hides_a_product(leaf) else None


def _hides_a_product(leaf: Node) -> bool:
    """Whether `leaf`, no product itself, reads one, directly or through element-wise and layout operations."""
    if not leaf.op.startswith("call_") or op_name(leaf) in PRODUCTS:
        return False

    def above(node: Node) -> Iterable[Node]:
        return node.all_input_nodes if _keeps_elements(node) else ()

    return any(called(node) in PRODUCTS for node in reach(leaf.all_input_nodes[:1], above))


def _keeps_elements(node: Node) -> bool:
    """Whether `node` is a layout or element-wise operation."""
    return called(node) in LAYOUT or is_elementwise(called(node))


def _reached_from(nodes: list[Node], last: Node) -> set[Node]:
    return set().union(*(reached_from(node, last) for node in nodes if node < last))


def _dependents(source: Node, within: set[Node]) -> set[Node]:
    return {*reach([source], lambda node: node.users.keys() & within)}


def _dependents_of_products(region: Region) -> set[Node]:
    within = set(region.nodes)
    products = [n for n in region.nodes if is_product(n)]
    return set().union(*(_dependents(p, within) for p in products))
