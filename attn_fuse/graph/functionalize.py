"""Functionalize: turn writes in place into values; a written input gets its final value by one copy at the end.

Torch's own functionalization, run before autograd, traces the views of written memory and the writes into it to pure
operations. Every other node stays as Dynamo made it and reads the value that the memory holds at that point. So source
lines, checkpoints, autocast and gradient-mode blocks, random numbers and custom operations are kept.

Memory that is near no attention keeps its writes. A graph stays as written, with the reason, where autograd would treat
a value otherwise than the write: a write under no_grad, or through a detached alias, into a tensor that requires a
gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.utils import _pytree as pytree

from attn_fuse.attention.attention import Refusal
from attn_fuse.errors import named
from attn_fuse.graph.in_place_views import pure_views
from attn_fuse.graph.memory import (
    Memory,
    NotFunctional,
    relevant,
    requiring,
    written_memory,
)
from attn_fuse.graph.modes import uncast
from attn_fuse.graph.names import is_tensor, value_of
from attn_fuse.graph.scopes import Scope, StillWritten, scopes
from attn_fuse.graph.trace import added, call, constant, fresh, made_for, origin_of, put_back, traced
from attn_fuse.report import log
from attn_fuse.torch_internals import current_value, functionalized

aten = torch.ops.aten


def functionalize(module: GraphModule) -> dict[str, StillWritten]:
    """Turn the writes of `module` and its subgraphs into values, where possible.

    Gives the memory that a subgraph still writes in place, and why, by the path of the subgraph.
    """
    return {s.path: found for s in list(scopes(module)) if (found := make_functional(s)) is not None}


def make_functional(scope: Scope, only: Set[int] | None = None) -> StillWritten | None:
    """Turn the writes of the graph of `scope`, without its subgraphs, into values, or leave the graph as it was.

    Gives the memory that the graph still writes; None where it writes no more.
    only: the storages to consider; None for all.
    """
    module = scope.module
    every = written_memory(module.graph)
    every = every if only is None else every & only
    written = relevant(module.graph, every)
    rest = _beside(every - written)
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
        _splice(memory, _values(memory))
        return rest
    except NotFunctional as problem:
        reason, blocker = f"memory that is written in place: {problem}", problem.node
    except Exception as problem:  # rule 5: torch could not make it functional
        log.debug("a graph stays as written", exc_info=True)
        reason, blocker = f"memory that is written in place, and cannot be made values: {named(problem)}", None
    where = None if blocker is None else blocker.name
    module.graph = kept
    blocking = next((node for node in module.graph.nodes if node.name == where), None)
    return StillWritten(Refusal(reason, blocking), frozenset(every))


def _beside(memory: set[int]) -> StillWritten | None:
    # A call that is written out later may bring this memory near an attention.
    reason = Refusal("memory that is written in place, and was near no attention before a call was written out")
    return StillWritten(reason, frozenset(memory), functional=True) if memory else None


# ---- values in place of writes


@dataclass(frozen=True, eq=False)
class _Values:
    """The trace of `Memory.inside`.

    graph: the trace; its placeholders stand for `inputs`.
    inputs: the nodes outside that it reads, then the in-place dropouts, each for its result.
    reads: by (reader, node read) the traced value at that point; for a tuple its values.
    """

    graph: GraphModule
    inputs: tuple[Node, ...]
    reads: dict[tuple[Node, Node], Any]


def _values(memory: Memory) -> _Values:
    graph = memory.module.graph
    end = graph.output_node()
    bases = list(dict.fromkeys(memory.bases.values()))
    inputs = dict.fromkeys(bases)
    for node in memory.inside:
        inputs |= dict.fromkeys(source for source in node.all_input_nodes if source not in memory.inside)
    dropouts = memory.dropouts
    order = {node: place for place, node in enumerate(graph.nodes)}
    events = sorted((*memory.inside, *memory.reads), key=order.__getitem__)
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
                    source = _dropped(node)
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
    return _Values(trace, (*inputs, *dropouts), reads)


def _as_it_was(made: Node, source: Node, reader: Node) -> Node:
    """The value `made` with the strides of `source`, the node it stands for: `reader` may depend on them."""
    like = value_of(source)
    assert isinstance(like, torch.Tensor)
    if _lie_alike(made.meta["val"], like):
        return made
    with made.graph.inserting_before(made.graph.output_node()):
        made = _laid(made, like, reader.name)
    if not _lie_alike(made.meta["val"], like):
        raise TypeError(f"the value of {source.name} would lie in memory otherwise")
    return made


def _laid(made: Node, like: Any, origin: str) -> Node:
    """A copy of `made` with its dimensions in the memory order of `like`."""
    strides = like.stride()
    order = sorted(range(len(strides)), key=lambda d: strides[d], reverse=True)
    made = added(made.graph, origin, aten.permute.default, made, order)
    made = added(made.graph, origin, aten.clone.default, made, memory_format=torch.contiguous_format)
    return added(made.graph, origin, aten.permute.default, made, [order.index(d) for d in range(len(order))])


def _make_differentiable(graph: Graph) -> None:
    """Write each `aten.copy` in operations that have a derivative: `aten.copy` itself has none."""
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


def _dropped(dropout: Node) -> Node:
    source = dropout.args[0] if dropout.args else dropout.kwargs["input"]
    assert isinstance(source, Node)
    return source


def _splice(memory: Memory, values: _Values) -> None:
    """Replace the views and writes of the graph by `values`."""
    graph, modes = memory.module.graph, memory.modes
    by_name = {node.name: node for node in graph.nodes}
    holders = [node for node in values.graph.graph.nodes if node.op == "placeholder"]
    given = [part for node in values.inputs for part in _parts(node)]
    env: dict[Node, Any] = dict(zip(holders, given, strict=True))
    dropouts = {holder: node for holder, node in env.items() if node in memory.inside}
    pieces: dict[Node, list[Node]] = {}
    for made, origin in _origins(values.graph.graph, [node.name for node in graph.nodes]).items():
        pieces.setdefault(by_name[origin], []).append(made)

    def value(of: Any) -> Any:
        return map_arg(of, env.__getitem__)

    def put(made: Node, origin: Node) -> None:
        for source in made.all_input_nodes:
            if dropouts.get(source) is origin:
                env[source] = _drop(graph, origin, value(values.reads[origin, _dropped(origin)]))
            elif source.op == "get_attr" and source not in env:
                env[source] = constant(memory.module, values.graph, source, memory.mode)
        put_back(graph, made, env, origin, modes[origin].grad)
        if _is_random(made) and any(requiring(source) for source in env[made].all_input_nodes):
            raise NotFunctional("random numbers are drawn into what requires a gradient", origin)

    for node in list(graph.nodes):
        if node in pieces:
            # Autocast leaves operations in place alone, so it must leave their replacements alone.
            with graph.inserting_before(node), uncast(graph, modes[node]):
                for made in pieces[node]:
                    put(made, node)
        if node.op == "output":
            _write_back(memory, values, value)
        elif node in memory.reads:
            now = {source: value(values.reads[node, source]) for source in memory.reads[node]}
            _replace_inputs(node, now)
    unused = [part for part in given if part not in values.inputs and not part.users]
    for node in (*unused, *reversed(memory.inside)):
        graph.erase_node(node)


def _parts(node: Node) -> list[Node]:
    """`node`, or for a torch.Size a node for each size: a trace has a placeholder for each."""
    sizes = value_of(node)
    if not isinstance(sizes, torch.Size):
        return [node]
    with node.graph.inserting_after(node):
        parts = [node.graph.call_function(operator.getitem, (node, place)) for place in range(len(sizes))]
    for part, size in zip(parts, sizes, strict=True):
        part.meta["example_value"] = size
    return parts


def _origins(trace: Graph, names: Sequence[str]) -> dict[Node, str]:
    """By operation of `trace`, the name of the node that it comes from. names: the graph's nodes, in order."""
    place = {name: number for number, name in enumerate(names)}
    origins: dict[Node, str] = {}
    operations = [node for node in trace.nodes if node.op == "call_function"]
    for made in reversed(operations):
        # torch annotates no computation of a size: we place it at the first node that needs the size.
        noted = origin_of(made)
        origins[made] = noted or min((origins[user] for user in made.users if user in origins), key=place.__getitem__)
    return {made: origins[made] for made in operations}


def _replace_inputs(node: Node, now: Mapping[Node, Any]) -> None:
    node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: now.get(n, n))


def _is_random(made: Node) -> bool:
    return isinstance(made.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in made.target.tags


def _drop(graph: Graph, node: Node, source: Node) -> Node:
    """A dropout of the value `source`, with the arguments of the in-place dropout `node`."""
    named = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(node.kwargs)
    training = named.get("training", named.get("train", True))
    made = graph.call_function(torch.nn.functional.dropout, (source, named.get("p", 0.5), training))
    made.meta = dict(node.meta)
    return made


# ---- written memory at the end of the graph


def _write_back(memory: Memory, values: _Values, value: Callable[[Any], Any]) -> None:
    """Copy final values into written inputs, and let returned tensors share memory as they did."""
    graph = memory.module.graph
    end = graph.output_node()
    last = {base: value(values.reads[end, base]) for base in memory.bases.values()}
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
            returned[source] = value(values.reads[end, source])
    with graph.inserting_before(end):
        for base in given:
            if last[base] is not base:
                graph.call_method("copy_", (base, last[base]))
        for source, now in returned.items():
            if now is not source and now is memory.base_of(source):
                returned[source] = _as_it_lay(graph, source, now if now in given else last[now], now)
    _replace_inputs(end, returned)


def _as_it_lay(graph: Graph, node: Node, memory: Node, base: Node) -> Node:
    """The view of `memory` that `node` was of `base`. memory: `base`, or its final value."""
    like, whole = value_of(node), value_of(base)
    assert isinstance(like, torch.Tensor) and isinstance(whole, torch.Tensor)
    if like.dtype != whole.dtype or like.is_conj() or like.is_neg():
        raise TypeError(f"{node.name} is returned as a view of another dtype")
    lies = [size if isinstance(size, int) else _size_node(graph, base, size) for size in (*like.size(), *like.stride())]
    offset = like.storage_offset() - (0 if memory is base else whole.storage_offset())
    if not isinstance(offset, int):
        raise TypeError(f"{node.name} is returned as a view from an unknown position")
    if requiring(memory) and not like.requires_grad:
        detached = graph.call_method("detach", (memory,))
        detached.meta = dict(node.meta)
        memory = detached
    made = graph.call_function(torch.as_strided, (memory, lies[: like.dim()], lies[like.dim() :], offset))
    made.meta = dict(node.meta)
    return made


def _size_node(graph: Graph, base: Node, size: torch.SymInt) -> Node:
    """A node for the symbolic `size`, made from a tensor that has it if need be. Raises TypeError without one."""
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
    raise TypeError(f"a returned view of {base.name} has a size that nothing else has")


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtypes, sizes and strides agree; the stride of a dimension of size 1 does not count."""
    if one.dtype != other.dtype or not _equal(one.size(), other.size()):
        return False
    strides = ((n, m) for size, n, m in zip(one.size(), one.stride(), other.stride(), strict=True) if size != 1)
    return all(_equal([n], [m]) for n, m in strides)


def _equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether all sizes agree. torch compares differing symbolic sizes by their values on this call, under a guard."""
    return len(some) == len(others) and all(str(n) == str(m) or bool(n == m) for n, m in zip(some, others, strict=True))
