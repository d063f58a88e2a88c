"""Hidden attentions: softmaxes between two products, partly hidden in a call that nobody can look into.

Such a call is a user's operator, an `autograd.Function` in training, a tensor hook, or a checkpoint around one half. No
walk goes through it, so without this search the report would say that there is no attention.

A visible softmax with a product on either side is enough. Where the call may hold the softmax itself, both products
must multiply two activations, and the second must sum over the last axis of the call's result. So activations, norms
and a model's own products between two layers are not reported.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from attn_fuse.attention.attention import Refusal
from attn_fuse.graph.kernel_calls import NAME, is_attention
from attn_fuse.graph.names import (
    CALLS,
    FUSED,
    INLINE_SUBGRAPHS,
    REDUCTIONS,
    SIZE_QUERIES,
    SOFTMAX,
    called,
    elements,
    is_between,
    is_exponential,
    is_others_function,
    op_name,
    tensors_of,
    value_of,
)
from attn_fuse.graph.reach import reach
from attn_fuse.graph.scopes import Scope, bodies
from attn_fuse.graph.walk import is_product

_HOOK = "register_hook"
_FUNCTION = "autograd_function_apply"
_WHY = {
    _HOOK: "a hook watches the gradient of its scores or weights, which a fused kernel never makes",
    _FUNCTION: "it is written in an autograd.Function, whose backward is its own",
    **dict.fromkeys(INLINE_SUBGRAPHS, "a checkpoint holds a part of the attention, and computes that part again"),
}


def is_opaque(node: Node) -> bool:
    """Whether `node` is a call that is neither torch's operation nor looked into."""
    if node.op != "call_function" or is_attention(node):
        return False
    is_users = "::" in op_name(node) and not op_name(node).startswith("attn_fuse::")
    return is_users or is_others_function(node) or isinstance(node.target, torch._ops.HigherOrderOperator)


def hidden(scope: Scope, followed: Iterable[Node]) -> Iterator[tuple[Node, Refusal]]:
    """The softmax, or the call that may hold it, of each attention that no walk can follow, with the reason.

    followed: the nodes of attentions that were found.
    """
    flat = _Flat(scope)
    if not any(map(is_opaque, flat.nodes)):
        return
    known = {*followed}
    # Visible softmaxes come first, so the call beside one does not count as a second.
    for certain in (True, False):
        for anchor in flat.nodes:
            if flat.shown(anchor) in known or not (flat.is_softmax(anchor) if certain else flat.may_hold_one(anchor)):
                continue
            found = flat.around(anchor, certain)
            if found is not None:
                blocking, between = found
                known |= between
                yield flat.shown(anchor), Refusal(why_hidden(blocking), blocking)


def why_hidden(node: Node) -> str:
    """The reason to refuse an attention whose scores or weights pass through `node`."""
    return _WHY.get(called(node), f"the scores pass through {called(node)}")


def cut_off(scope: Scope) -> Iterator[Node]:
    """The softmaxes and products of two activations that leave the graph as half of an attention.

    No softmax or product in the graph reads them, and the products do not take weights.
    """
    flat = _Flat(scope)
    returned = [n for n in scope.module.graph.output_node().all_input_nodes if isinstance(value_of(n), torch.Tensor)]

    def is_half(node: Node) -> bool:
        if called(node) in SOFTMAX:
            return any(is_product(n) and flat.of_activations(n) for n in flat.way(node, flat.sources))
        multiplies = is_product(node) and flat.of_activations(node)
        return multiplies and not any(map(_is_of_weights, flat.way(node, flat.sources)))

    for node in filter(is_half, scope.module.graph.nodes):
        below = flat.way(node, flat.users)
        leaves = any(n in below and _as_large(n, node) for n in returned)
        if leaves and not any(is_product(n) or called(n) in SOFTMAX for n in below[1:]):
            yield node


def _is_of_weights(node: Node) -> bool:
    return called(node) in SOFTMAX or (bool(called(node)) and is_exponential(node))


def may_hold_attention(module: GraphModule) -> bool:
    """Whether a call in `module` or its subgraphs is, or may hold, a softmax, an exponential or an attention.

    Without one there is nothing to fuse or report.
    """
    seen: set[object] = set()
    for graph in module.modules():
        for node in graph.graph.nodes if isinstance(graph, GraphModule) else ():
            if not node.op.startswith("call_") or node.target in seen:
                continue
            name, is_hidden = op_name(node), is_opaque(node) and not bodies(node, graph)
            if is_hidden or name in SOFTMAX | FUSED | CALLS or is_exponential(node) or NAME.search(name):
                return True
            # One call of each operation is enough, except for powers, whose base decides.
            if name != "pow":
                seen.add(node.target)
    return False


class _Flat:
    """A graph with the bodies of its opaque calls inlined: a call reads the outputs of its bodies.

    nodes: the calls, each after those in its bodies.
    sources, users: the nodes that each node is computed from, in graph order, and the nodes computed from it.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.nodes: list[Node] = []
        self.sources: dict[Node, list[Node]] = {}
        self.users: dict[Node, list[Node]] = defaultdict(list)
        # By node in a body, the call in the scope's own graph; and the calls without a visible body.
        self._call: dict[Node, Node] = {}
        self._unseen: set[Node] = set()
        for node in scope.module.graph.nodes:
            self._add(node, scope.module, None)
        for node, sources in self.sources.items():
            for source in sources:
                self.users[source].append(node)

    def _add(self, node: Node, module: GraphModule, call: Node | None) -> None:
        sources = list(node.all_input_nodes)
        run = bodies(node, module) if is_opaque(node) else []
        run = run[:1] if called(node) == _FUNCTION else run  # the second body is the backward
        for body, part in [(one, part) for one in run for part in one.graph.nodes]:
            self._call[part] = call or node
            if part.op == "placeholder":  # any operand
                self.sources[part] = sources
            elif part.op != "output":
                self._add(part, body, call or node)
        if is_opaque(node) and not run:
            self._unseen.add(node)
        self.sources[node] = [n for one in run for n in one.graph.output_node().all_input_nodes] or sources
        if node.op.startswith("call_"):
            self.nodes.append(node)

    def shown(self, node: Node) -> Node:
        """`node`, or the call in whose body it lies."""
        return self._call.get(node, node)

    def is_softmax(self, node: Node) -> bool:
        is_one = is_exponential(node) and any(called(user) in REDUCTIONS for user in self.users[node])
        return is_one or op_name(node) in SOFTMAX

    def may_hold_one(self, node: Node) -> bool:
        return node in self._unseen and called(node) != _HOOK

    def around(self, anchor: Node, certain: bool) -> tuple[Node, set[Node]] | None:
        """The call that hides part of the attention around `anchor`, and the nodes between its products, or None."""
        above, below = self.way(anchor, self.sources), self.way(anchor, self.users)
        before, after = ([n for n in way[1:] if is_product(n)] for way in (above, below))
        if not certain:
            before = [n for n in before if self.of_activations(n)]
            after = [n for n in after if self.of_activations(n) and _takes_rows(n, below)]
        between = {n for n in (*above, *below) if not is_product(n)}
        call = self._call.get(anchor)
        is_whole = all(any(self._call.get(n) is call for n in side) for side in (before, after))
        if call is not None and is_whole and called(call) != _FUNCTION:
            return None  # the body holds the whole attention
        parts = {*before, *between, *after}
        calls = {self.shown(n) for n in parts if n in self._call or is_opaque(n)}
        if not before or not after or not calls:
            return None
        return min(calls), {*map(self.shown, between)}

    def way(self, anchor: Node, following: Mapping[Node, Sequence[Node]]) -> list[Node]:
        """The nodes from `anchor` to the nearest products, through all that may stand between two products."""

        def passes(node: Node) -> bool:
            between = is_between(called(node)) and called(node) not in SIZE_QUERIES
            return between or is_opaque(node) or (node.op == "placeholder" and node in self._call)

        def goes_on(first: Node, second: Node) -> bool:
            # A call without a visible body is followed only if it keeps the shape of the scores.
            return second not in self._unseen or bool(_shapes(first) & _shapes(second))

        def more(node: Node) -> Iterable[Node]:
            if node is not anchor and (is_product(node) or not passes(node)):
                return ()
            up = following is self.sources
            return [n for n in following.get(node, ()) if (goes_on(n, node) if up else goes_on(node, n))]

        return [n for n in reach([anchor], more) if n is anchor or is_product(n) or passes(n)]

    def of_activations(self, product: Node) -> bool:
        """Whether all factors of `product` depend on the program's inputs and have the same number of axes."""
        factors = [n for n in product.all_input_nodes if isinstance(value_of(n), torch.Tensor)]
        axes = {len(shape) for n in factors for shape in _shapes(n)}
        return len(factors) > 1 and len(axes) == 1 and all(n in self.activations for n in factors)

    @functools.cached_property
    def activations(self) -> set[Node]:
        found: set[Node] = set()
        for node in self.sources:
            if node.op == "placeholder" and node not in self._call:
                top = self.scope.top(node)
                if not isinstance(value_of(node if top is None else top), torch.nn.Parameter):
                    found.add(node)
            elif found.intersection(self.sources[node]):
                found.add(node)
        return found


def _shapes(node: Node) -> set[tuple[str, ...]]:
    # As text, because comparing symbols would add a guard.
    return {tuple(map(str, tensor.shape)) for tensor in tensors_of(value_of(node))}


def _as_large(one: Node, other: Node) -> bool:
    return [*map(elements, tensors_of(value_of(one)))] == [*map(elements, tensors_of(value_of(other)))]


def _takes_rows(product: Node, weights: Iterable[Node]) -> bool:
    """Whether `product` sums over the last axis of its factor among `weights`."""
    factors = product.all_input_nodes
    if called(product) == "einsum" and isinstance(product.args[0], str) and len(factors) == 2:
        given, _, out = product.args[0].replace(" ", "").partition("->")
        return any(n in weights and names[-1:] not in out for n, names in zip(factors, given.split(","), strict=True))
    return called(product) in ("matmul", "bmm", "mm") and factors[0] in weights and factors[0] not in factors[1:]
