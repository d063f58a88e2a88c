"""Regions: the part of Dynamo's graph that one attention is written in.

A region is anchored on a softmax. Forward it reaches to the product of weights and value; backward to the product of
query and key, from there through layout operations to query and key themselves, and on the mask side through
element-wise, index-making and layout operations to graph inputs. Everything else is a leaf. What an operation *means*
is decided later, on its normal form; the names here only say how far to walk, and an unknown name is a leaf, so a
name that is missing costs structure, never correctness.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from attn_fuse.attention import Refusal

SOFTMAX = frozenset({"softmax", "_softmax", "log_softmax", "_log_softmax"})
PRODUCTS = frozenset({"matmul", "bmm", "mm", "einsum", "baddbmm"})
DROPOUT = frozenset({"dropout"})
LAYOUT = frozenset(
    "view reshape transpose permute t mT T H mH contiguous clone expand expand_as repeat repeat_interleave unsqueeze "
    "squeeze flatten unflatten movedim moveaxis swapaxes swapdims split split_with_sizes chunk unbind tensor_split "
    "select narrow getitem view_as reshape_as broadcast_to adjoint".split()
)
CASTS = frozenset("to float half bfloat16 double type type_as".split())
ELEMENTWISE = CASTS | frozenset(
    "add sub mul div rsub neg eq ne lt le gt ge where masked_fill logical_not logical_and logical_or logical_xor "
    "and or not xor invert bitwise_and bitwise_or bitwise_not exp log sqrt rsqrt pow tanh clamp clip maximum minimum "
    "max min abs reciprocal bool int long nan_to_num true_divide divide multiply subtract floordiv floor_divide "
    "remainder square exp2 sigmoid setitem fill zero isnan isinf copy index_fill".split()
)
CREATION = frozenset(
    "ones zeros full empty arange tril triu ones_like zeros_like full_like tensor scalar_tensor new_ones new_zeros "
    "new_full new_tensor linspace eye as_tensor".split()
)
# Asking for a size does not need the values.
SIZE_QUERIES = frozenset({"size", "dim", "numel", "stride", "shape", "sym_size", "getattr"})
# In these the subgraph computes what it says, once, on the operands given.
INLINE_SUBGRAPHS = frozenset({"tag_activation_checkpoint", "invoke_subgraph", "wrap"})


@dataclass(frozen=True, eq=False)
class Scope:
    """A graph, and for each of its placeholders the node of the top graph it stands for (None: not one node).

    path: the names of the subgraphs that lead to it, joined by dots; "" for the top graph.
    """

    module: GraphModule
    outer: dict[Node, Node | None]
    path: str = ""

    def top(self, node: Node) -> Node | None:
        return self.outer.get(node, node if not self.outer else None)


@dataclass(frozen=True, eq=False)
class Region:
    """One softmax between two products.

    nodes: the operations of the region, in graph order, the last of them `output`, the product with the value.
    leaves: what the region reads, in order of first use; tensors and Python scalars.
    operands: those of the leaves that query, key or value are made of.
    mutates: whether an operation in it writes in place.
    context: nodes of the graph that open an autocast still open here.
    """

    scope: Scope
    softmax: Node
    output: Node
    nodes: tuple[Node, ...]
    leaves: tuple[Node, ...]
    operands: frozenset[Node]
    mutates: bool
    context: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Unread:
    """A softmax between two products that is refused before its expression is read."""

    scope: Scope
    softmax: Node
    refusal: Refusal


def find_regions(module: GraphModule) -> list[Region | Unread]:
    """Every softmax between two products in `module` and in the subgraphs that it runs once, in graph order."""
    return [found for scope in scopes(module) for found in _in_scope(scope)]


def scopes(module: GraphModule) -> Iterator[Scope]:
    """`module` and the subgraphs of its activation checkpoints and the like, outermost first."""
    yield from _scopes(Scope(module, {}))


def _scopes(scope: Scope) -> Iterator[Scope]:
    yield scope
    calls: dict[str, list[Node]] = {}
    for node in scope.module.graph.nodes:
        if node.op == "call_function" and op_name(node) in INLINE_SUBGRAPHS:
            for arg in node.args:
                if isinstance(arg, Node) and arg.op == "get_attr":
                    calls.setdefault(str(arg.target), []).append(node)
    for target, users in calls.items():
        body = getattr(scope.module, target, None)
        if not isinstance(body, GraphModule):
            continue
        holders = [n for n in body.graph.nodes if n.op == "placeholder"]
        operands = [a for a in users[0].args if not (isinstance(a, Node) and a.op == "get_attr" and a.target == target)]
        operands = [a for a in operands if not isinstance(a, str)]
        single = len(users) == 1 and len(operands) == len(holders)
        outer = {
            h: scope.top(o) if single and isinstance(o, Node) else None
            for h, o in zip(holders, operands if single else holders, strict=True)
        }
        yield from _scopes(Scope(body, outer, f"{scope.path}.{target}".lstrip(".")))


def cut_at(region: Region, node: Node) -> Region | None:
    """The region with `node` read as a leaf; None if the scores pass through it."""
    if node in _dependents_of_products(region) or node not in region.nodes:
        return None
    inside: set[Node] = set()
    leaves: set[Node] = set()
    todo = [region.output]
    while todo:
        current = todo.pop()
        if current is node or current not in region.nodes:
            leaves.add(current)
        elif current not in inside:
            inside.add(current)
            todo += current.all_input_nodes
    order = {n: i for i, n in enumerate((*region.leaves, *region.nodes))}
    return replace(
        region,
        nodes=tuple(n for n in region.nodes if n in inside),
        leaves=tuple(sorted(leaves, key=order.__getitem__)),
    )


def op_name(node: Node) -> str:
    """The operation's name, the same for the function, the method, the operator and the in-place form."""
    target = node.target
    if node.op == "call_method":
        name = str(target)
    elif isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[-1]
    else:
        name = getattr(target, "__name__", str(target))
    if name == "getattr" and len(node.args) > 1:
        return str(node.args[1])
    bare = name.strip("_") if name.startswith("__") else name.rstrip("_")
    return _OPERATORS.get(bare, bare)


_OPERATORS = {
    "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "truediv": "div", "iand": "and", "ior": "or",
    "ipow": "pow", "imatmul": "matmul", "radd": "add", "rmul": "mul", "multiply": "mul", "divide": "div",
    "true_divide": "div", "subtract": "sub", "invert": "logical_not",
}  # fmt: skip


def value_of(node: Node) -> object:
    """The fake tensor, number or symbol that Dynamo recorded for `node`."""
    return node.meta.get("example_value", node.meta.get("val"))


def storages(node: Node) -> set[int]:
    """Identities of the memory that `node`'s value lives in; views share it."""
    value = value_of(node)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)}


def written_storages(module: GraphModule) -> set[int]:
    """Memory that some operation of `module` writes in place."""
    return {s for scope in scopes(module) for _, s in _writes(scope.module.graph)}


def _in_scope(scope: Scope) -> Iterator[Region | Unread]:
    graph = scope.module.graph
    anchors = [n for n in graph.nodes if n.op != "placeholder" and op_name(n) in SOFTMAX]
    if not anchors:
        return
    position = {node: i for i, node in enumerate(graph.nodes)}
    writes = list(_writes(graph))
    for anchor in anchors:
        found = _trace(scope, anchor, position, writes)
        if found is not None:
            yield found


def _trace(
    scope: Scope, softmax: Node, position: dict[Node, int], writes: list[tuple[Node, int]]
) -> Region | Unread | None:
    products, strangers = _forward(softmax)
    if not products:
        return None
    walk = _Walk(softmax)
    walk.from_output(products[0])
    if not walk.scores:
        hidden = next((leaf for leaf in walk.leaves - walk.operands if _hides_a_product(leaf)), None)
        if hidden is None:
            return None
        return Unread(scope, softmax, Refusal(f"the scores pass through {op_name(hidden)}", hidden))

    def refused(reason: str, node: Node) -> Unread:
        return Unread(scope, softmax, Refusal(reason, node))

    if len(products) > 1:
        return refused("the weights are multiplied with more than one value", products[1])
    if strangers:
        return refused("the weights are also used outside the attention", strangers[0])
    if len(walk.scores) > 1:
        return refused("the scores join more than one matrix product", walk.scores[1])

    output, scores = products[0], walk.scores[0]
    mutates = _include_writes(walk, output, position, writes)
    if isinstance(mutates, Refusal):
        return Unread(scope, softmax, mutates)
    nodes = tuple(sorted(walk.inside, key=position.__getitem__))
    leaves = tuple(sorted(walk.leaves, key=position.__getitem__))

    between = _dependents(scores, walk.inside)
    for node in nodes:
        if node in between and node is not output:
            for user in node.users:
                if user not in walk.inside and op_name(user) not in SIZE_QUERIES:
                    what = "weights" if position[node] >= position[softmax] else "scores"
                    return refused(f"the {what} are also used outside the attention", user)
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
    return Region(scope, softmax, output, nodes, leaves, frozenset(walk.operands), mutates, tuple(opened))


def _forward(softmax: Node) -> tuple[list[Node], list[Node]]:
    """The products that the weights reach, and the other uses of the weights."""
    products: list[Node] = []
    strangers: list[Node] = []
    seen, todo = {softmax}, [softmax]
    while todo:
        for user in todo.pop().users:
            if user in seen:
                continue
            seen.add(user)
            name = op_name(user) if user.op.startswith("call_") else user.op
            if name in PRODUCTS:
                products.append(user)
            elif name in ELEMENTWISE or name in LAYOUT or name in DROPOUT:
                todo.append(user)
            elif name not in SIZE_QUERIES:
                strangers.append(user)
    return products, strangers


class _Walk:
    """The walk backward from the product with the value."""

    def __init__(self, softmax: Node) -> None:
        self.softmax = softmax
        self.inside: set[Node] = set()
        self.leaves: set[Node] = set()
        self.operands: set[Node] = set()
        self.scores: list[Node] = []

    def from_output(self, output: Node) -> None:
        self.inside.add(output)
        weights = _ancestors_within(output, self.softmax)
        for operand in output.all_input_nodes:
            if operand in weights:
                self.inner(operand)
            else:
                self.operand(operand)

    def inner(self, node: Node) -> None:
        """On the way from the weights to the scores, or on the mask side of it."""
        if node in self.inside or node in self.leaves:
            return
        name = op_name(node) if node.op.startswith("call_") else node.op
        if not _is_tensor(node) and name not in LAYOUT:
            self.leaves.add(node)
        elif name in PRODUCTS:
            self.inside.add(node)
            self.scores.append(node)
            for arg in node.all_input_nodes:
                self.operand(arg)
        elif node is self.softmax or name in ELEMENTWISE or name in LAYOUT or name in CREATION or name in DROPOUT:
            if name == "getitem" and not _is_slicing(node):
                self.leaves.add(node)
                return
            self.inside.add(node)
            for arg in node.all_input_nodes:
                self.inner(arg)
        else:
            self.leaves.add(node)

    def operand(self, node: Node) -> None:
        """From a product back to its query, key or value, through the layout and a scale."""
        if node in self.inside or node in self.leaves:
            return
        name = op_name(node) if node.op.startswith("call_") else node.op
        tensors = [n for n in node.all_input_nodes if _is_tensor(n) or _is_tuple(n)]
        scaling = name in ("mul", "div") and len(tensors) == 1
        if (
            (name in CREATION and name in ("empty", "zeros"))
            or scaling
            or name in CASTS
            or (name in LAYOUT and (name != "getitem" or _is_slicing(node)))
        ):
            self.inside.add(node)
            for number, arg in enumerate(node.all_input_nodes):
                if (number == 0 and arg in tensors) or (arg in tensors and scaling):
                    self.operand(arg)
                elif arg not in self.inside:
                    self.leaves.add(arg)
        else:
            self.leaves.add(node)
            self.operands.add(node)


def _include_writes(
    walk: _Walk, output: Node, position: dict[Node, int], writes: list[tuple[Node, int]]
) -> bool | Refusal:
    """Bring into the region what writes in place to its own tensors; refuse where that reaches beyond them."""
    while True:
        own = set().union(*(storages(n) for n in walk.inside)) if walk.inside else set()
        read = set().union(*(storages(n) for n in walk.leaves)) if walk.leaves else set()
        first = min(position[n] for n in walk.inside)
        added = False
        for node, storage in writes:
            if position[node] >= position[output] or position[node] < first or storage not in own | read:
                continue
            if storage in read:
                return Refusal("a tensor that the attention reads is written in place meanwhile", node)
            if node not in walk.inside:
                if op_name(node) not in ELEMENTWISE | DROPOUT | SOFTMAX:
                    return Refusal("the scores or weights are written in place", node)
                walk.inside.add(node)
                for arg in node.all_input_nodes:
                    walk.inner(arg)
                added = True
        if not added:
            break
    written = {storage for node, storage in writes if node in walk.inside}
    for node in sorted(walk.inside, key=position.__getitem__):
        if node is not output and storages(node) & written:
            for user in node.users:
                if user not in walk.inside and op_name(user) not in SIZE_QUERIES:
                    return Refusal("a tensor written in place in the attention is also used outside it", user)
    return bool(written)


def _writes(graph: Graph) -> Iterator[tuple[Node, int]]:
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
    found = [target] if target is not None and _is_in_place(node, target) else []
    out = node.kwargs.get("out")
    return [*found, out] if isinstance(out, Node) else found


def _is_in_place(node: Node, target: Node) -> bool:
    raw = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if raw in ("setitem", "__setitem__"):
        return True
    if node.target in _IN_PLACE_OPERATORS or (raw.startswith("__i") and raw.strip("_") in _OPERATORS):
        return True
    if raw.endswith("_") and not raw.endswith("__") and getattr(operator, raw, None) is None:
        return True
    if node.kwargs.get("inplace") is True:
        return True
    # A result in the same memory that is no view came from an in-place flag given by position.
    return op_name(node) not in LAYOUT | CASTS and bool(storages(node) & storages(target)) and True in node.args


_IN_PLACE_OPERATORS = frozenset(
    {
        operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
        operator.iand, operator.ior, operator.ixor, operator.ipow, operator.imatmul,
    }
)  # fmt: skip


def _is_tensor(node: Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def _is_tuple(node: Node) -> bool:
    return isinstance(value_of(node), (tuple, list))


def _is_slicing(node: Node) -> bool:
    """Whether a getitem takes slices, positions and new axes only, not a tensor of positions."""
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return not any(isinstance(p, list) or (isinstance(p, Node) and _is_tensor(p)) for p in parts)


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


def _ancestors_within(output: Node, softmax: Node) -> set[Node]:
    """The nodes from `softmax` to `output`, both included."""
    reached = {softmax}
    todo = [softmax]
    while todo:
        for user in todo.pop().users:
            if user not in reached:
                reached.add(user)
                if user is not output:
                    todo.append(user)
    return reached


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
    products = [n for n in region.nodes if op_name(n) in PRODUCTS]
    return set().union(*(_dependents(p, within) for p in products))
