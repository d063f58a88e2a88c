"""Hidden attentions: softmaxes between two products of which a call that nobody can look into hides a part.

Such a call is a user's operator, an `autograd.Function` in training, a tensor hook, or a checkpoint around one half. No
walk goes through it, so without this search the report would say that there is no attention.

A softmax that is seen is enough, with a product on either side. Where the call may hold the softmax itself, the
products must be those of an attention: of two activations each, and the second over the last axis of what the call
gives. Then an activation, a norm or a product of a model's own stands between two layers unreported.
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
    """Whether `node` calls what is neither an operation of torch nor looked into: see above."""
    if node.op == "call_module":
        return True
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return not is_attention(node)
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return "::" in op_name(node) and not op_name(node).startswith("attn_fuse::") and not is_attention(node)
    return is_others_function(node) and not is_attention(node)


def hidden(scope: Scope, followed: Iterable[Node]) -> Iterator[tuple[Node, Refusal]]:
    """The softmaxes, or the calls that may hold one, of attentions that no walk can follow, each with the reason.

    followed: the softmaxes whose attention is found.
    """
    flat = _Flat(scope)
    if not any(map(is_opaque, flat.nodes)):
        return
    known = {*followed}
    # What is seen to be a softmax comes first: the call beside it is then not a second one.
    for certain in (True, False):
        for anchor in flat.nodes:
            if flat.shown(anchor) in known or not (flat.is_softmax(anchor) if certain else flat.may_hold_one(anchor)):
                continue
            found = flat.around(anchor, certain)
            if found is not None:
                blocking, part_of_it = found
                known |= part_of_it
                yield flat.shown(anchor), Refusal(why_hidden(blocking), blocking)


def why_hidden(node: Node) -> str:
    """Why an attention stays as written whose scores or weights pass through the call of `node`."""
    return _WHY.get(called(node), f"the scores pass through {called(node)}")


def cut_off(scope: Scope) -> Iterator[Node]:
    """The softmaxes and products of two activations that leave the graph and may be half of an attention.

    Neither a softmax nor a product reads them here, and no product takes them from a softmax.
    """
    flat = _Flat(scope)
    returned = [n for n in scope.module.graph.output_node().all_input_nodes if isinstance(value_of(n), torch.Tensor)]
    for node in scope.module.graph.nodes:
        above = flat.way(node, flat.sources)[1:] if called(node) in SOFTMAX or is_product(node) else []
        if called(node) in SOFTMAX:
            if not any(is_product(n) and flat.of_activations(n) for n in above):
                continue
        elif not is_product(node) or not flat.of_activations(node) or any(map(_is_of_weights, above)):
            continue
        below = flat.way(node, flat.users)
        leaves = any(n in below and _as_large(n, node) for n in returned)
        if leaves and not any(is_product(n) or called(n) in SOFTMAX for n in below[1:]):
            yield node


def _is_of_weights(node: Node) -> bool:
    return called(node) in SOFTMAX or (bool(called(node)) and is_exponential(node))


def may_hold_attention(module: GraphModule) -> bool:
    """Whether some call in `module` or in a graph within is a softmax, an exponential or attention, or may hold one.

    Where none is, there is nothing to fuse and nothing to report.
    """
    seen: set[object] = set()
    for graph in module.modules():
        for node in graph.graph.nodes if isinstance(graph, GraphModule) else ():
            # Calls of one operation are alike, but for powers: what they raise says whether they are exponentials.
            if node.op.startswith("call_") and (node.target not in seen or node.op == "call_module"):
                name = op_name(node)
                if name in SOFTMAX | FUSED | CALLS or is_exponential(node) or NAME.search(name):
                    return True
                if is_opaque(node) and not _runs_a_graph(node):
                    return True
                if name != "pow":
                    seen.add(node.target)
    return False


def _runs_a_graph(node: Node) -> bool:
    """Whether `node` runs a graph of the module, in which all that it computes is seen."""
    of_torch = isinstance(node.target, torch._ops.HigherOrderOperator)
    return of_torch and any(isinstance(a, Node) and a.op == "get_attr" for a in node.args)


class _Flat:
    """A graph with the bodies of its opaque calls in their place: a call is read as what its bodies give.

    nodes: the calls, each behind those in its bodies. A product in a body counts like any other.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.nodes: list[Node] = []
        # What each node is computed from, in graph order, and what is computed from it.
        self.sources: dict[Node, list[Node]] = {}
        self.users: dict[Node, list[Node]] = defaultdict(list)
        # The call of the scope's own graph in whose body a node lies, and the calls that show no body.
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
        run = run[:1] if called(node) == _FUNCTION else run  # the second is its backward
        for body, part in [(one, part) for one in run for part in one.graph.nodes]:
            self._call[part] = call or node
            if part.op == "placeholder":  # it may be any operand
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
        """The call that hides a part of the attention around `anchor`, and all between its products; None without."""
        above, below = self.way(anchor, self.sources), self.way(anchor, self.users)
        before, after = ([n for n in way[1:] if is_product(n)] for way in (above, below))
        if not certain:
            before = [n for n in before if self.of_activations(n)]
            after = [n for n in after if self.of_activations(n) and _takes_rows(n, below)]
        between = {n for n in (*above, *below) if not is_product(n)}
        call = self._call.get(anchor)
        is_whole = all(any(self._call.get(n) is call for n in side) for side in (before, after))
        if call is not None and is_whole and called(call) != _FUNCTION:
            return None  # a graph with attentions of its own
        parts = {*before, *between, *after}
        calls = {self._call[n] for n in parts if n in self._call} | {
            n for n in parts if is_opaque(n)
        } - self._call.keys()
        if not before or not after or not calls:
            return None
        return min(calls), {*map(self.shown, between)}

    def way(self, anchor: Node, following: Mapping[Node, Sequence[Node]]) -> list[Node]:
        """The nodes met from `anchor` up to products, through what may stand between two of them."""

        def passes(node: Node) -> bool:
            between = is_between(called(node)) and called(node) not in SIZE_QUERIES
            return between or is_opaque(node) or (node.op == "placeholder" and node in self._call)

        def goes_on(first: Node, second: Node) -> bool:
            # What nobody sees into keeps the shape of the scores that it is given.
            return second not in self._unseen or bool(_shapes(first) & _shapes(second))

        def more(node: Node) -> Iterable[Node]:
            if node is not anchor and (is_product(node) or not passes(node)):
                return ()
            up = following is self.sources
            return [n for n in following.get(node, ()) if (goes_on(n, node) if up else goes_on(node, n))]

        return [n for n in reach([anchor], more) if n is anchor or is_product(n) or passes(n)]

    def of_activations(self, product: Node) -> bool:
        """Whether every factor of `product` depends on what the program is called with, and none has fewer axes."""
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
    # As text: a comparison of symbols would become a guard.
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
