"""Hidden attentions: softmaxes between two products of which a call that nobody can look into hides a part.

Such a call is a user's operator, an `autograd.Function` in training, a tensor hook, or a checkpoint around one half. No
walk goes through it, so without this search the report would say that there is no attention.

A softmax that is seen is enough, with a product on either side. Where the call may hold the softmax itself, the
products must be those of an attention: of two activations each, and the second over the last axis of what the call
gives. Then an activation, a norm or a product of a model's own stands between two layers unreported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

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
from attn_fuse.graph.scopes import Scope
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
    nodes = [node for node in scope.module.graph.nodes if node.op.startswith("call_")]
    if not any(map(is_opaque, nodes)):
        return
    looking = _Looking(scope)
    known = {*followed}
    reported: set[Node] = set()
    # What is seen to be a softmax comes first: the call beside it is then not a second one.
    for certain in (True, False):
        for anchor in nodes:
            if anchor in known or anchor in reported or looking.is_softmax(anchor) is not certain:
                continue
            found = looking.around(anchor, certain)
            if found is not None:
                blocking, part_of_it = found
                reported |= part_of_it
                yield anchor, Refusal(why_hidden(blocking), blocking)


def why_hidden(node: Node) -> str:
    """Why an attention stays as written whose scores or weights pass through the call of `node`."""
    return _WHY.get(called(node), f"the scores pass through {called(node)}")


def cut_off(scope: Scope) -> Iterator[Node]:
    """The softmaxes and products of two activations that leave the graph and may be half of an attention.

    Neither a softmax nor a product reads them here, and no product takes them from a softmax.
    """
    looking = _Looking(scope)
    returned = [n for n in scope.module.graph.output_node().all_input_nodes if isinstance(value_of(n), torch.Tensor)]
    for node in scope.module.graph.nodes:
        if called(node) in SOFTMAX:
            if not any(looking.of_activations(n) for n in looking.way(node, _sources) if is_product(n)):
                continue
        elif not is_product(node) or not looking.of_activations(node) or looking.is_behind_softmax(node):
            continue
        below = looking.way(node, lambda n: n.users)
        leaves = any(n in below and _as_large(n, node) for n in returned)
        if leaves and not any(looking.is_factor(n) or called(n) in SOFTMAX for n in below[1:]):
            yield node


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


class _Looking:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def is_softmax(self, node: Node) -> bool | None:
        """Whether `node` is seen to be or to hold a softmax; False where it may hold one, None where it does not."""
        if op_name(node) in SOFTMAX:
            return True
        if is_exponential(node):
            return True if any(op_name(user) in REDUCTIONS for user in node.users) else None
        if not is_opaque(node) or called(node) == _HOOK:
            return None
        bodies = self.bodies(node)
        if not bodies:
            return False
        # A body with products is a graph with attentions of its own, except for what has a backward of its own.
        held = (called(node) == _FUNCTION or not self.is_factor(node)) and any(map(_holds_softmax, bodies))
        return True if held else None

    def bodies(self, node: Node) -> list[GraphModule]:
        """The graphs that `node` runs forward."""
        given = [a for a in node.args if isinstance(a, Node) and a.op == "get_attr"]
        found = [getattr(self.scope.module, str(a.target), None) for a in given]
        graphs = [body for body in found if isinstance(body, GraphModule)]
        return graphs[:1] if called(node) == _FUNCTION else graphs

    def around(self, anchor: Node, certain: bool) -> tuple[Node, set[Node]] | None:
        """The call that hides a part of the attention around `anchor`, and all between its products; None without."""
        if is_opaque(anchor) and any(map(_is_whole, self.bodies(anchor))):
            return anchor, set()
        above, below = self.way(anchor, _sources), self.way(anchor, lambda node: node.users)
        before = [n for n in above[1:] if is_product(n) or any(map(_ends_in_product, self.bodies(n)))]
        after = [n for n in below[1:] if is_product(n) or any(map(_begins_in_product, self.bodies(n)))]
        if not certain:
            before = [n for n in before if is_product(n) and self.of_activations(n)]
            after = [n for n in after if self.of_activations(n) and _takes_rows(n, below)]
        between = {n for n in (*above, *below) if n is anchor or not self.is_factor(n)}
        calls = [n for n in (*before, *between, *after) if is_opaque(n)]
        if not before or not after or not calls:
            return None
        return min(calls), between

    def way(self, anchor: Node, following: Callable[[Node], Iterable[Node]]) -> list[Node]:
        """The nodes met from `anchor` up to products, through what may stand between two of them."""

        def more(node: Node) -> Iterable[Node]:
            if node is not anchor and (self.is_factor(node) or not self.is_between(node)):
                return ()
            return [n for n in following(node) if n.op.startswith("call_") and self.goes_on(node, n)]

        return [n for n in reach([anchor], more) if n is anchor or self.is_factor(n) or self.is_between(n)]

    def goes_on(self, node: Node, other: Node) -> bool:
        """Whether the one of two neighbours that is opaque keeps the shape of the scores that it is given."""
        first, second = (node, other) if other in node.users else (other, node)
        return not is_opaque(second) or self.is_factor(second) or bool(_shapes(first) & _shapes(second))

    def is_behind_softmax(self, node: Node) -> bool:
        above = filter(called, self.way(node, _sources)[1:])
        return any(called(n) in SOFTMAX or is_exponential(n) for n in above)

    def is_between(self, node: Node) -> bool:
        return (is_between(op_name(node)) and op_name(node) not in SIZE_QUERIES) or is_opaque(node)

    def is_factor(self, node: Node) -> bool:
        """Whether `node` is a product, or runs a graph with one."""
        return is_product(node) or (
            is_opaque(node) and any(is_product(n) for body in self.bodies(node) for n in body.graph.nodes)
        )

    def of_activations(self, product: Node) -> bool:
        """Whether every factor of `product` depends on what the program is called with, and none has fewer axes."""
        factors = [n for n in product.all_input_nodes if isinstance(value_of(n), torch.Tensor)]
        axes = {len(shape) for n in factors for shape in _shapes(n)}
        return len(factors) > 1 and len(axes) == 1 and all(n in self.activations for n in factors)

    @functools.cached_property
    def activations(self) -> set[Node]:
        found: set[Node] = set()
        for node in self.scope.module.graph.nodes:
            if node.op == "placeholder":
                top = self.scope.top(node)
                if not isinstance(value_of(node if top is None else top), torch.nn.Parameter):
                    found.add(node)
            elif any(source in found for source in node.all_input_nodes):
                found.add(node)
        return found


def _sources(node: Node) -> list[Node]:
    return list(node.all_input_nodes)


def _shapes(node: Node) -> set[tuple[str, ...]]:
    # As text: a comparison of symbols would become a guard.
    return {tuple(map(str, tensor.shape)) for tensor in tensors_of(value_of(node))}


def _as_large(one: Node, other: Node) -> bool:
    return [*map(elements, tensors_of(value_of(one)))] == [*map(elements, tensors_of(value_of(other)))]


def _holds_softmax(body: GraphModule) -> bool:
    nodes = [n for graph in body.modules() if isinstance(graph, GraphModule) for n in graph.graph.nodes]
    names = {called(n) for n in nodes}
    return bool(names & SOFTMAX) or (bool(names & REDUCTIONS) and any(is_exponential(n) for n in nodes))


def _is_whole(body: GraphModule) -> bool:
    """Whether a product leads to a softmax of `body`, and the softmax to another product."""
    softmaxes = [n for n in body.graph.nodes if called(n) in SOFTMAX or (called(n) and is_exponential(n))]
    return any(
        any(map(is_product, reach(n.all_input_nodes, lambda n: n.all_input_nodes)))
        and any(map(is_product, reach(n.users, lambda n: n.users)))
        for n in softmaxes
    )


def _ends_in_product(body: GraphModule) -> bool:
    """Whether a product leads to the result of `body`, with nothing between them that parts two sites."""
    last = body.graph.output_node().all_input_nodes
    return any(map(is_product, reach(last, lambda n: n.all_input_nodes if is_between(called(n)) else ())))


def _begins_in_product(body: GraphModule) -> bool:
    """Whether what `body` is given leads to a product, with nothing between them that parts two sites."""
    first = [user for n in body.graph.find_nodes(op="placeholder") for user in n.users]
    return any(map(is_product, reach(first, lambda n: n.users if is_between(called(n)) else ())))


def _takes_rows(product: Node, weights: Iterable[Node]) -> bool:
    """Whether `product` sums over the last axis of its factor among `weights`."""
    factors = product.all_input_nodes
    if called(product) == "einsum" and isinstance(product.args[0], str) and len(factors) == 2:
        given, _, out = product.args[0].replace(" ", "").partition("->")
        return any(n in weights and names[-1:] not in out for n, names in zip(factors, given.split(","), strict=True))
    return called(product) in ("matmul", "bmm", "mm") and factors[0] in weights and factors[0] not in factors[1:]
