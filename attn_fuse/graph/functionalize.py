"""Functionalize: turn in-place writes into values, and give each written input its final value by one copy at the end.

torch's own functionalization, run before autograd, traces the views and writes of written memory to pure operations.
All other nodes stay as Dynamo made them and read the memory's current value, which keeps source lines, checkpoints,
autocast and gradient-mode blocks, random numbers and custom operations.

Memory near no attention keeps its writes. A graph stays as written, with the reason, where autograd would treat a value
differently from the write, such as a write under no_grad, or through a detached alias, into a tensor that requires a
gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.utils import _pytree as pytree

from attn_fuse.attention.attention import Refusal
from attn_fuse.errors import named
from attn_fuse.graph.in_place_views import pure_views
from attn_fuse.graph.memory import Memory, NotFunctional, relevant, written_memory
from attn_fuse.graph.modes import uncast
from attn_fuse.graph.names import is_tensor, requires_grad, value_of
from attn_fuse.graph.scopes import Scope, StillWritten, scopes
from attn_fuse.graph.trace import added, call, constant, fresh, made_for, origin_of, put_back, traced
from attn_fuse.report import log
from attn_fuse.torch_internals import current_value, functionalized

aten = torch.ops.aten
# Writing out a call may later bring memory near an attention.
_BESIDE = Refusal("memory that is written in place, and was near no attention before a call was written out")


def functionalize(module: GraphModule) -> dict[str, StillWritten]:
    """Turn the writes of `module` and its subgraphs into values, where possible.

    Returns what is still written in place, by the path of the subgraph.
    """
    return {s.path: found for s in list(scopes(module)) if (found := make_functional(s)) is not None}


def make_functional(scope: Scope, only: Set[int] | None = None) -> StillWritten | None:
    """Turn the writes in the graph of `scope`, not in its subgraphs, into values, or leave the graph unchanged.

    Returns what is still written in place, or None.
    only: the storages to consider; None for all.
    """
    module = scope.module
    every = written_memory(module.graph)
    every = every if only is None else every & only
    written = relevant(module.graph, every)
    beside = frozenset(every - written)
    rest = StillWritten(_BESIDE, beside, functional=True) if beside else None
    if not written:
        return rest
    kept = Graph()
    kept.output(kept.graph_copy(module.graph, {}))
    try:
        pure_views(module.graph, scope.modes)
        memory = Memory(module, written, scope.modes)
        written = set().union(*memory.writes.values())
        if not written:
            return rest
        memory = Memory(module, written, scope.modes)
        memory.assert_private()
        _splice(memory, *_values(memory))
        return rest
    except NotFunctional as problem:
        reason, blocker = f"memory that is written in place: {problem}", problem.node
    except Exception as problem:  # rule 5: torch could not make it functional
        log.debug("a graph stays as written", exc_info=True)
        reason, blocker = f"memory that is written in place, and cannot be made values: {named(problem)}", None
    module.graph = kept
    blocking = next((node for node in kept.nodes if blocker is not None and node.name == blocker.name), None)
    return StillWritten(Refusal(reason, blocking), frozenset(every))


# By (reader, node read), the traced value at that point; several values for a tuple.
_Reads = dict[tuple[Node, Node], Any]


def _values(memory: Memory) -> tuple[GraphModule, tuple[Node, ...], _Reads]:
    """(The trace of `memory.inside`, the nodes that its placeholders stand for, its values).

    The nodes are those read from outside, then the in-place dropouts, which stand for their results.
    """
    graph = memory.module.graph
    end = graph.output_node()
    bases = list(dict.fromkeys(memory.bases.values()))
    inputs = dict.fromkeys(bases)
    for node in memory.inside:
        inputs |= dict.fromkeys(source for source in node.all_input_nodes if source not in memory.inside)
    dropouts = memory.dropouts
    events = sorted((*memory.inside, *memory.reads))
    wanted: list[tuple[Node, Node]] = []

    def run(*values: Any) -> list[Any]:
        given = dict(zip((*inputs, *dropouts), values, strict=True))
        env: dict[Node, Any] = {node: given[node] for node in inputs}
        taken: list[Any] = []

        def take(reader: Node, source: Node) -> None:
            wanted.append((reader, source))
            taken.append(pytree.tree_map_only(torch.Tensor, current_value, env[source]))

        for node in events:
            with made_for(node):
                if node in dropouts:
                    source = _arguments(node)["input"]
                    take(node, source)
                    env[node] = env[source].copy_(given[node])
                elif node in memory.inside:
                    env[node] = call(node, *map_arg((node.args, node.kwargs), env.__getitem__))
                else:
                    for source in memory.reads[node]:
                        take(node, source)
        with made_for(end):
            for base in bases:
                take(end, base)
        return taken

    with memory.tracing():
        fakes = [fresh(value_of(node)) for node in (*inputs, *dropouts)]
        trace = traced(functionalized(run, pre_dispatch=True), fakes, pre_dispatch=True)
        trace.graph.eliminate_dead_code()
        _make_differentiable(trace.graph)
        results = trace.graph.output_node().args[0]
        assert isinstance(results, (list, tuple))
        reads = {
            (reader, source): _as_it_was(made, source, reader) if isinstance(made, Node) and is_tensor(source) else made
            for (reader, source), made in zip(wanted, results, strict=True)
        }
    return trace, (*inputs, *dropouts), reads


def _as_it_was(made: Node, source: Node, reader: Node) -> Node:
    """`made` in the strides of `source`, the node it replaces, since `reader` may depend on them."""
    like = value_of(source)
    assert isinstance(like, torch.Tensor)
    if _lie_alike(made.meta["val"], like):
        return made
    with made.graph.inserting_before(made.graph.output_node()):
        made = _laid(made, like, reader.name)
    if not _lie_alike(made.meta["val"], like):
        raise TypeError(f"the value of {source.name} would have other strides")
    return made


def _laid(made: Node, like: Any, origin: str) -> Node:
    """A copy of `made` in the memory order of `like`."""
    strides = like.stride()
    order = sorted(range(len(strides)), key=lambda d: strides[d], reverse=True)
    made = added(made.graph, origin, aten.permute.default, made, order)
    made = added(made.graph, origin, aten.clone.default, made, memory_format=torch.contiguous_format)
    return added(made.graph, origin, aten.permute.default, made, [order.index(d) for d in range(len(order))])


def _make_differentiable(graph: Graph) -> None:
    """Replace each `aten.copy`, which has no derivative, by operations that have one."""
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        written, source = node.args[:2]
        assert isinstance(written, Node) and isinstance(source, Node)
        origin, like = origin_of(node), written.meta["val"]
        with graph.inserting_before(node):
            made = source
            if not _equal(source.meta["val"].size(), like.size()):
                made = added(graph, origin, aten.expand_as.default, made, written)
            made = added(graph, origin, aten._to_copy.default, made, dtype=like.dtype, device=like.device)
            if not _lie_alike(made.meta["val"], node.meta["val"]):
                made = _laid(made, node.meta["val"], origin)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _arguments(dropout: Node) -> dict[str, Any]:
    return dict(zip(("input", "p", "training"), dropout.args, strict=False)) | dict(dropout.kwargs)


def _splice(memory: Memory, trace: GraphModule, inputs: Sequence[Node], reads: _Reads) -> None:
    """Replace the views and writes of the graph by the values of the trace."""
    graph, modes = memory.module.graph, memory.modes
    holders = trace.graph.find_nodes(op="placeholder")
    given = [part for node in inputs for part in _parts(node)]
    env: dict[Node, Any] = dict(zip(holders, given, strict=True))
    dropouts = {holder: node for holder, node in env.items() if node in memory.inside}
    pieces: dict[Node, list[Node]] = {}
    for made, origin in _origins(trace.graph, graph).items():
        pieces.setdefault(origin, []).append(made)

    def value(of: Any) -> Any:
        return map_arg(of, env.__getitem__)

    def put(made: Node, origin: Node) -> None:
        for source in made.all_input_nodes:
            if dropouts.get(source) is origin:
                env[source] = _drop(graph, origin, value(reads[origin, _arguments(origin)["input"]]))
            elif source.op == "get_attr" and source not in env:
                env[source] = constant(memory.module, trace, source, memory.mode)
        put_back(graph, made, env, origin, modes[origin].grad)
        draws = torch.Tag.nondeterministic_seeded in getattr(made.target, "tags", ())
        if draws and any(map(requires_grad, env[made].all_input_nodes)):
            raise NotFunctional("random numbers are drawn into a tensor that requires a gradient", origin)

    for node in list(graph.nodes):
        if node in pieces:
            # Autocast does not cast in-place operations, so it must not cast their replacements.
            with graph.inserting_before(node), uncast(graph, modes[node]):
                for made in pieces[node]:
                    put(made, node)
        if node.op == "output":
            _write_back(memory, reads, value)
        elif node in memory.reads:
            _replace_inputs(node, {source: value(reads[node, source]) for source in memory.reads[node]})
    unused = [part for part in given if part not in inputs and not part.users]
    for node in (*unused, *reversed(memory.inside)):
        graph.erase_node(node)


def _parts(node: Node) -> list[Node]:
    """`node`, or a node for each size of a torch.Size, since a trace has a placeholder for each."""
    sizes = value_of(node)
    if not isinstance(sizes, torch.Size):
        return [node]
    with node.graph.inserting_after(node):
        parts = [node.graph.call_function(operator.getitem, (node, place)) for place in range(len(sizes))]
    for part, size in zip(parts, sizes, strict=True):
        part.meta["example_value"] = size
    return parts


def _origins(trace: Graph, graph: Graph) -> dict[Node, Node]:
    """The node of `graph` behind each operation of `trace`, in order."""
    by_name = {node.name: node for node in graph.nodes}
    origins: dict[Node, Node] = {}
    for made in reversed(trace.nodes):
        if made.op == "call_function":
            # torch does not annotate computations of sizes: they go to the first node that needs the size.
            noted = by_name.get(origin_of(made))
            origins[made] = noted or min(origins[user] for user in made.users if user in origins)
    return dict(reversed(origins.items()))


def _replace_inputs(node: Node, now: Mapping[Node, Any]) -> None:
    node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: now.get(n, n))


def _drop(graph: Graph, node: Node, source: Node) -> Node:
    """A dropout of `source` with the arguments of the in-place dropout `node`."""
    given = _arguments(node)
    training = given.get("training", given.get("train", True))
    made = graph.call_function(torch.nn.functional.dropout, (source, given.get("p", 0.5), training))
    made.meta = dict(node.meta)
    return made


def _write_back(memory: Memory, reads: _Reads, value: Callable[[Any], Any]) -> None:
    """Copy final values into written inputs, and let returned tensors share memory as before."""
    graph = memory.module.graph
    end = graph.output_node()
    last = {base: value(reads[end, base]) for base in memory.bases.values()}
    given = {base for base in last if base.op in ("placeholder", "get_attr")}
    returned: dict[Node, Any] = {}
    for source in memory.reads.get(end, ()):
        base = memory.base_of(source)
        siblings = [n for n in memory.reads[end] if n is not base and memory.base_of(n) is base]
        if source is base and source in given:
            returned[source] = source
        elif (base in given and last[base] is not base) or (len(siblings) > 1 and source in siblings):
            returned[source] = base
        else:
            returned[source] = value(reads[end, source])
    with graph.inserting_before(end):
        for base in given:
            if last[base] is not base:
                graph.call_method("copy_", (base, last[base]))
        for source, now in returned.items():
            if now is not source and now is memory.base_of(source):
                returned[source] = _as_it_lay(graph, source, now if now in given else last[now], now)
    _replace_inputs(end, returned)


def _as_it_lay(graph: Graph, node: Node, memory: Node, base: Node) -> Node:
    """The view of `memory`, which is `base` or its final value, that `node` was of `base`."""
    like, whole = value_of(node), value_of(base)
    assert isinstance(like, torch.Tensor) and isinstance(whole, torch.Tensor)
    if like.dtype != whole.dtype or like.is_conj() or like.is_neg():
        raise TypeError(f"{node.name} is returned as a view of another dtype")
    lies = [size if isinstance(size, int) else _size_node(graph, base, size) for size in (*like.size(), *like.stride())]
    offset = like.storage_offset() - (0 if memory is base else whole.storage_offset())
    if not isinstance(offset, int):
        raise TypeError(f"{node.name} is returned as a view from an unknown position")
    if requires_grad(memory) and not like.requires_grad:
        detached = graph.call_method("detach", (memory,))
        detached.meta = dict(node.meta)
        memory = detached
    made = graph.call_function(torch.as_strided, (memory, lies[: like.dim()], lies[like.dim() :], offset))
    made.meta = dict(node.meta)
    return made


def _size_node(graph: Graph, base: Node, size: torch.SymInt) -> Node:
    """A node with the symbolic `size`, else read off a tensor that has it. Raises TypeError without one."""
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, torch.SymInt) and value.node.expr == size.node.expr:
            return node
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, torch.Tensor) and node.op != "output":
            for place, number in enumerate((*value.size(), *value.stride())):
                if isinstance(number, torch.SymInt) and number.node.expr == size.node.expr:
                    method = "size" if place < value.dim() else "stride"
                    return graph.call_method(method, (node, place % value.dim()))
    raise TypeError(f"a returned view of {base.name} has a size that no tensor has")


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtypes, sizes and strides agree, except strides of dimensions of size 1."""
    if one.dtype != other.dtype or not _equal(one.size(), other.size()):
        return False
    strides = ((n, m) for size, n, m in zip(one.size(), one.stride(), other.stride(), strict=True) if size != 1)
    return all(_equal([n], [m]) for n, m in strides)


def _equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether all sizes agree; torch compares different symbols by their values on this call, and adds a guard."""
    return len(some) == len(others) and all(str(n) == str(m) or bool(n == m) for n, m in zip(some, others, strict=True))
