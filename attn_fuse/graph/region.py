"""Regions: the part of Dynamo's graph that one attention is written in.

A region is anchored on a softmax, or on an exponential that may be half of one. Forward it reaches to the product of
weights and value. Backward it reaches to the product of query and key, from there through layout operations to query
and key themselves, and on the mask side through element-wise, index-making and layout operations to graph inputs.
Everything else is a leaf. The names in names.py only say how far to walk; the normal form decides later what an
operation *means*. So a missing name costs structure, never correctness.

A site has several candidates where only the meaning tells which product is that of query and key.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from attn_fuse.attention.attention import Refusal
from attn_fuse.attention.facts import is_learned
from attn_fuse.graph.hidden import hidden, why_hidden
from attn_fuse.graph.modes import Mode, cast_as, mode_now
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
)
from attn_fuse.graph.reach import reach, same
from attn_fuse.graph.scopes import Scope, StillWritten
from attn_fuse.graph.walk import Walk, is_product, is_tuple, reached_from

# The max number of score products to try: a graph that joins more is something else.
_MOST_CANDIDATES = 4


@dataclass(frozen=True, eq=False)
class Region:
    """One softmax between two products.

    output: the product with the value, or a division by a sum or an addition after it.
    nodes: the operations in graph order, `output` last.
    leaves: the tensors and Python scalars that the region reads, in graph order; nodes cut by `cut_at` come last.
    operands: the leaves behind query, key and value.
    weights_used: an operation outside that reads the scores or weights; None without one.
    dropped_weights_used: the same for weights after dropout.
    whole: whether no operand is written in part inside the region.
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
        """The leaves that require a gradient but get none from `output`, such as those behind a `detach`."""
        reached = {self.output}
        for node in reversed(self.nodes):
            if node in reached and requires_grad(node):
                reached.update(node.all_input_nodes)
        # Only Dynamo records requires_grad; make_fx traces below autograd.
        candidates = self.leaves if self.mode.grad and "example_value" in self.output.meta else ()
        return frozenset(leaf for leaf in candidates if requires_grad(leaf) and leaf not in reached)

    @property
    def mode(self) -> Mode:
        """The grad mode and autocast of `output`."""
        return self.scope.modes[self.output]

    def reading(self, replaced: Mapping[Node, Node]) -> Region:
        """The region with its leaves replaced as `replaced` says."""
        return replace(
            self,
            leaves=tuple(replaced.get(leaf, leaf) for leaf in self.leaves),
            operands=frozenset(replaced.get(leaf, leaf) for leaf in self.operands),
        )


@dataclass(frozen=True, eq=False)
class Site:
    """A place where an attention may be written.

    softmax: the anchor: a softmax, an exponential or a call of SDPA.
    candidates: its possible regions, likeliest first; one refused before its expression is read is a `Refusal`.
    unsure: whether this is a site only if a candidate is recognised.
    """

    softmax: Node
    candidates: tuple[Region | Refusal, ...]
    unsure: bool = False

    @property
    def is_fused_already(self) -> bool:
        """Whether the program calls `F.scaled_dot_product_attention` here."""
        return op_name(self.softmax) in FUSED


def find_sites(scope: Scope, written: StillWritten | None = None) -> Iterator[Site]:
    """The sites of `scope`: softmaxes in graph order, then exponentials, then those that no walk can follow.

    written: the memory that the graph still writes. Candidates that touch it are refused.
    """
    outputs: set[Node] = set()
    followed: set[Node] = set()
    # Exponentials come last because they may lie in the region of another anchor.
    for anchor in sorted(filter(_is_anchor, scope.module.graph.nodes), key=is_exponential):
        for output in [anchor] if op_name(anchor) in FUSED else _outputs(anchor):
            if output in outputs or (site := _site(scope, anchor, output)) is None:
                continue
            outputs.add(output)
            followed |= {anchor, *(n for c in site.candidates if isinstance(c, Region) for n in c.nodes)}
            if written is not None:
                site = replace(site, candidates=tuple(_unless(written, c) for c in site.candidates))
            yield site
    for anchor, refusal in hidden(scope, followed):
        yield Site(anchor, (refusal,))


def _unless(written: StillWritten, candidate: Region | Refusal) -> Region | Refusal:
    if isinstance(candidate, Region) and not written.holds((*candidate.nodes, *candidate.leaves)):
        return candidate
    return written.refusal


def cut_at(region: Region, node: Node) -> Region | None:
    """The region with `node`, or the parts of a tuple, as leaves; None where the scores pass through it."""
    nodes = set(region.nodes)
    places = {node} if not is_tuple(node) else {user for user in node.users if user in nodes}
    if places & _dependents(filter(is_product, region.nodes), nodes) or not places <= nodes:
        return None
    stays = nodes - places
    read = list(reach([region.output], lambda n: n.all_input_nodes if n in stays else ()))
    inside, leaves = stays & {*read}, {n for n in read if n not in stays}
    if any(is_tuple(leaf) for leaf in leaves):
        return None
    order = {n: i for i, n in enumerate((*region.leaves, *region.nodes))}
    behind = reach(places, lambda n: n.all_input_nodes if n in nodes else ())
    return replace(
        region,
        nodes=tuple(n for n in region.nodes if n in inside),
        leaves=tuple(sorted(leaves, key=order.__getitem__)),
        operands=frozenset(leaves & (region.operands | (places if region.operands & {*behind} else set()))),
    )


def _is_anchor(node: Node) -> bool:
    if called(node) and is_exponential(node):
        # exp of a scalar is a learned temperature (CLIP), not a softmax.
        return any(not isinstance(n, int) or n != 1 for n in getattr(value_of(node), "shape", ()))
    return called(node) in SOFTMAX | FUSED


def _site(scope: Scope, anchor: Node, output: Node) -> Site | None:
    walk = Walk(anchor, output, scope.modes)
    if op_name(anchor) in FUSED:
        return Site(anchor, (_region(scope, walk),))
    unsure = is_exponential(anchor) and not any(op_name(n) in REDUCTIONS for n in walk.inside)
    unsure = unsure or op_name(output) == "sum"
    if not walk.scores:
        for leaf in walk.leaves - walk.operands:
            if walk.is_cut_off(leaf):
                return Site(anchor, (Refusal("computed without gradients, though the output has one", leaf),), unsure)
            if _hides_a_product(leaf):
                return Site(anchor, (Refusal(why_hidden(leaf), leaf),), unsure)
        return None
    walks, disjoint = [walk], set[Node]()
    several = _written_again(walk.scores)
    if len(several) > 1:
        # Together they may be one score matrix over cached and new keys.
        walks = walks if op_name(output) == "add" else []
        walks += [Walk(anchor, output, scope.modes, only=products) for products in several[:_MOST_CANDIDATES]]
        for products in several:
            if not any(_may_equal(products[0], others[0]) for others in several if others is not products):
                disjoint.update(products)
    tried = [other for walk in walks for other in _ways(walk)]
    return Site(anchor, tuple(_region(scope, walk, disjoint) for walk in tried), unsure)


def _ways(walk: Walk) -> Iterator[Walk]:
    """`walk`, and if it met a partial write, a second walk that takes partly written operands as leaves."""
    yield walk
    if any(called(node) in SCATTERS for node in walk.inside):
        yield Walk(walk.softmax, walk.output, walk.modes, walk.only, whole=True)


def _computed_again(walk: Walk, disjoint: AbstractSet[Node]) -> Node | None:
    """A second product of query and key, behind a leaf beside the scores; None without one.

    disjoint: products that are other parts of the scores.
    """
    first = min(walk.operands, default=None)
    known = walk.operands | disjoint

    def is_new(node: Node) -> bool:
        return not (node in known or node.op == "placeholder" or (first is not None and node < first))

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
    """`products`, grouped into spellings of the same product."""
    groups: list[list[Node]] = []
    for product in products:
        group = next((group for group in groups if same(group[0], product, _is_followed)), None)
        if group is None:
            groups.append([product])
        else:
            group.append(product)
    return groups


def _may_equal(a: Node, b: Node) -> bool:
    """Whether two products may be equal: the same call on the same inputs, or different calls with equal shapes."""
    if a.target == b.target:
        return same(a, b, _is_followed)
    return str(getattr(value_of(a), "shape", None)) == str(getattr(value_of(b), "shape", None))


def _is_followed(node: Node) -> bool:
    return called(node) in PRODUCTS or _keeps_elements(node)


def _region(scope: Scope, walk: Walk, disjoint: AbstractSet[Node] = frozenset()) -> Region | Refusal:
    if several := next(filter(is_tuple, walk.leaves), None):
        return Refusal("several tensors are read at once", several)
    if open_level := next((n for n in walk.inside if scope.modes[n].levels > 0), None):
        return Refusal("a vmap or a derivative of torch.func is open here", open_level)
    if nested := next((n for n in walk.leaves if getattr(value_of(n), "is_nested", False)), None):
        return Refusal("nested tensors are passed through untouched", nested)
    walk.close()
    nodes, leaves = tuple(sorted(walk.inside)), tuple(sorted(walk.leaves))
    between = _dependents(walk.scores or [walk.output], walk.inside)
    dropped = _dependents((n for n in between if op_name(n) in DROPOUT), walk.inside)
    used = [
        (node, user)
        for node in nodes
        if node in between and node is not walk.output
        for user in node.users
        if user not in walk.inside and op_name(user) not in SIZE_QUERIES and not _is_dead(user)
    ]
    reading = [user for _, user in used if op_name(user) not in IN_THE_SHAPE_OF and user < walk.output]
    back = walk.beside & reached_from(reading, walk.output)
    again = next((n for n in leaves if n in back), None) or _computed_again(walk, disjoint)
    if again is not None:
        # A kernel rounds the scores differently, so a comparison with scores computed outside may flip.
        return Refusal("the scores are compared or joined with what is computed from them", again)
    return Region(
        scope,
        walk.softmax,
        walk.output,
        nodes,
        leaves,
        frozenset(walk.operands),
        next((user for _, user in used), None),
        next((user for node, user in used if node in dropped), None),
        walk.whole or not any(called(n) in SCATTERS for n in nodes),
    )


def _is_dead(node: Node) -> bool:
    """Whether nothing uses `node` in the end: models compute more than their callers ask for."""
    return is_between(called(node)) and all(map(_is_dead, node.users))


def _outputs(anchor: Node) -> list[Node]:
    """The products of `anchor` with the value, or the addition or division by a sum after them."""
    reached = {*reach([anchor], lambda n: n.users if n is anchor or is_between(called(n)) else ())}
    products = [node for node in sorted(reached) if is_product(node)]
    # A sum that normalises the weights looks like a product, but then a real product exists too.
    real = [product for product in products if op_name(product) in PRODUCTS] or products
    # With cached and new keys under one softmax, the program adds their products with the values.
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
    """Whether `product` takes a slice of the weights."""
    between = reached_from([anchor], product) - {product, anchor}
    return any(n in between and op_name(n) in ("getitem", "narrow", "select") for n in product.all_input_nodes)


def _with_division(product: Node, reached: set[Node]) -> Node:
    node = product
    while len(node.users) == 1:
        (user,) = node.users
        if called(user) in CASTS:
            node = user
        elif called(user) == "div" and user.args and user.args[0] is node:
            return user if any(n is not node and n in reached for n in user.all_input_nodes) else product
        else:
            break
    return product


def _hides_a_product(leaf: Node) -> bool:
    """Whether `leaf` is no product but reads one, directly or through element-wise and layout operations."""
    if not called(leaf) or called(leaf) in PRODUCTS:
        return False

    def above(node: Node) -> Iterable[Node]:
        return node.all_input_nodes if _keeps_elements(node) else ()

    return any(called(node) in PRODUCTS for node in reach(leaf.all_input_nodes[:1], above))


def _keeps_elements(node: Node) -> bool:
    """Whether `node` is a layout or element-wise operation."""
    return called(node) in LAYOUT or is_elementwise(called(node))


def _dependents(sources: Iterable[Node], within: set[Node]) -> set[Node]:
    return {*reach(sources, lambda node: node.users.keys() & within)}


# ---- what becomes of a region


def fingerprint(region: Region, forms: Mapping[Node, object]) -> Any:
    """A value that is equal for regions with the same operations on leaves of the same kind.

    forms: the proved contents of leaves.
    """
    number = {node: i for i, node in enumerate((*region.leaves, *region.nodes))}

    def written(args: Any) -> str:
        return repr(map_arg(args, lambda n: {number[n]}))  # no argument is a set

    leaves = []
    for leaf in region.leaves:
        value = value_of(leaf)
        if isinstance(value, torch.Tensor):
            kind: Any = (str(value.shape), str(value.stride()), value.dtype, value.device, value.requires_grad)
            kind += (is_learned(value),)
        else:
            kind = (type(value), str(value))
        leaves.append((kind, forms.get(leaf), leaf in region.operands))
    nodes = tuple((n.op, n.target, written((n.args, n.kwargs))) for n in region.nodes)
    modes = region.scope.modes
    return tuple(leaves), nodes, tuple(modes[n].autocast for n in region.nodes), region.mode.grad


def alone(region: Region) -> tuple[GraphModule, Region]:
    """A graph of the region alone, with numbered nodes, and the region in that graph."""
    graph = Graph()
    copy: dict[Node, Node] = {}
    modes = region.scope.modes
    now = mode_now().autocast
    for number, leaf in enumerate(region.leaves):
        copy[leaf] = graph.placeholder(f"leaf_{number}")
    for casts, numbered in itertools.groupby(enumerate(region.nodes), lambda pair: modes[pair[1]].autocast):
        with cast_as(graph, [cast for cast in casts if cast not in now]):
            for number, node in numbered:
                args, kwargs = map_arg((node.args, node.kwargs), copy.__getitem__)
                copy[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"node_{number}")
    for original, made in copy.items():
        made.meta = dict(original.meta)
    graph.output((copy[region.output],))
    module = GraphModule({}, graph)
    inside = replace(
        region,
        # A node that replaced a site has no recorded mode.
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
    """`value` as a number: for a symbol, its value on the first call."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
