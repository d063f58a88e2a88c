"""Expand: replace calls and vmaps that may hide an attention by the operations that they run.

Dynamo keeps `F.multi_head_attention_forward`, the fast path of `nn.TransformerEncoderLayer`, `baddbmm` of weights and
values, and each function under `allow_in_graph` (einx uses it) as one call, and a `torch.vmap` as operations between
markers. Each such stretch is traced once on fake tensors and replaced by its trace, unless it writes in place, changes
the mode, takes a derivative or lies within an open one. Graphs that could not be made functional keep all stretches,
because nobody would know which memory the traced values share.

`allow_in_graph` promises that a trace is the same program, and Inductor runs nothing else. A trace does not show custom
gradients, so functions that define their own stay as written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from attn_fuse.graph.encoder_layer import encoder_layer
from attn_fuse.graph.functionalize import make_functional
from attn_fuse.graph.memory import may_write
from attn_fuse.graph.modes import Mode, autocast_of
from attn_fuse.graph.names import (
    CALLS,
    DROPOUT,
    LAYOUT,
    SOFTMAX,
    called,
    is_elementwise,
    is_others_function,
    op_name,
    storages,
    tensors_of,
    value_of,
)
from attn_fuse.graph.scopes import Scope, StillWritten, scopes
from attn_fuse.graph.trace import call, constant, fake_mode, fresh, made_for, origin_of, put_back, traced, with_gradient
from attn_fuse.report import log
from attn_fuse.torch_internals import decompositions, functorch_levels_kept, innermost, on_fake_tensors, plain_gradients

# Single operators, whose insides no trace shows, with functions that compute the same.
_OPERATORS = {"_transformer_encoder_layer_fwd": encoder_layer}
_OPENS, _CLOSES = "_vmap_increment_nesting", "_vmap_decrement_nesting"


def expand(module: GraphModule, written: Mapping[str, StillWritten]) -> dict[str, StillWritten]:
    """Write out the calls and vmaps of `module` and its subgraphs, where possible.

    Returns what is still written in place, by the path of the subgraph. Traces may add writes, since torch fills masks
    in place; these become values here.
    written: what `functionalize` left written.
    """
    still = dict(written)
    for scope in list(scopes(module)):
        before = still.get(scope.path)
        if before is not None and not before.functional:
            continue
        made: set[int] = set()
        for stretch in list(_stretches(scope)):
            if _is_plain(stretch, scope.modes):
                try:
                    made |= _write_out(scope.module, stretch, scope.modes[stretch[0]])
                except Exception:  # rule 5: a stretch that cannot be written out stays
                    log.debug("%s is not looked into", stretch[0].name, exc_info=True)
        if made:
            now = next(s for s in scopes(module) if s.path == scope.path)
            if (found := make_functional(now, made)) is not None:
                still[scope.path] = replace(found, memory=found.memory | (before.memory if before else frozenset()))
    return still


def _stretches(scope: Scope) -> Iterator[list[Node]]:
    """The nodes of each call, and of each outermost vmap, in graph order."""
    stretch: list[Node] = []
    for node in scope.module.graph.nodes:
        name = called(node)
        levels = scope.modes[node].levels
        if levels > 0:
            stretch.append(node)
        if levels == 1 and name == _CLOSES:
            yield stretch
        if levels == 0 or (levels == 1 and name.endswith("_decrement_nesting")):
            stretch = []
        if levels == 0 and (_is_call(node) or (name == "baddbmm" and _takes_weights(node))):
            yield [node]


def _is_call(node: Node) -> bool:
    """Whether `node` calls a function of many operations, which a pre-dispatch trace shows as written."""
    return called(node) in CALLS or is_others_function(node)


def _takes_weights(node: Node) -> bool:
    """Whether the `baddbmm` `node` multiplies weights and values: its first factor comes from a softmax."""
    _, *given = node.all_input_nodes
    factor: Any = node.kwargs.get("batch1", given[0] if given else None)
    while isinstance(factor, Node) and called(factor) not in SOFTMAX:
        passes = called(factor) in LAYOUT | DROPOUT or is_elementwise(called(factor))
        factor = factor.all_input_nodes[0] if passes and factor.all_input_nodes else None
    return factor is not None


def _is_plain(stretch: Sequence[Node], modes: Mapping[Node, Mode]) -> bool:
    """Whether `stretch` keeps one mode and takes no derivative; under autocast, only calls may return floats."""
    mode = modes[stretch[0]]
    for node in stretch:
        name = called(node)
        tensors = tensors_of(value_of(node))
        if name.endswith("_increment_nesting") and name != _OPENS:
            return False
        if replace(modes[node], levels=0) != replace(mode, levels=0):
            return False
        by_operator = name in _OPERATORS
        if mode.casts and (by_operator or (not _is_call(node) and any(t.is_floating_point() for t in tensors))):
            return False
    return True


def _write_out(module: GraphModule, stretch: Sequence[Node], now: Mode) -> set[int]:
    """Replace `stretch` by its trace and return the storages that the trace writes. Raises where the trace differs.

    now: the mode that the stretch runs in.
    """
    inside = set(stretch)
    inputs = list(dict.fromkeys(a for node in stretch for a in node.all_input_nodes if a not in inside))
    results = [node for node in stretch if any(user not in inside for user in node.users)]
    mode = fake_mode(inputs)

    def run(*values: Any) -> Any:
        env: dict[Node, Any] = dict(zip(inputs, values, strict=True))
        for node in stretch:
            with made_for(node):
                args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
                by_hand = _OPERATORS.get(called(node))
                env[node] = call(node, args, kwargs) if by_hand is None else by_hand(*args, **kwargs)
        if any(innermost(tensor)._version > 0 for value in env.values() for tensor in tensors_of(value)):
            raise TypeError("it writes in place")
        return [env[node] for node in results]

    values, table = [value_of(n) for n in inputs], decompositions([torch.ops.aten.baddbmm])
    with on_fake_tensors(mode), functorch_levels_kept(), torch.set_grad_enabled(now.grad):
        if is_others_function(stretch[0]):
            trace = _traced_with_gradients(run, values, now)
        else:
            # A pre-dispatch trace keeps dropout and SDPA whole, but records the insides of a vmap as constants.
            with torch.no_grad():
                trace = traced(run, [*map(fresh, values)], table, pre_dispatch=called(stretch[0]) in CALLS)
    trace.graph.eliminate_dead_code()
    env: dict[Node, Any] = dict(zip(trace.graph.find_nodes(op="placeholder"), inputs, strict=True))
    by_name = {node.name: node for node in stretch}
    (made,) = trace.graph.output_node().args
    try:
        with module.graph.inserting_before(stretch[0]):
            for node in trace.graph.nodes:
                if node.op == "get_attr":
                    env[node] = constant(module, trace, node, mode)
                elif node.op == "call_function":
                    put_back(module.graph, node, env, by_name.get(origin_of(node), stretch[0]), now.grad)
        new = [map_arg(value, env.__getitem__) for value in made]
        pairs = [pair for node, value in zip(results, new, strict=True) for pair in _pairs(node, value)]
        for old, value in pairs:
            _assert_as_recorded(value, old)
    except TypeError:
        # Replace all of the stretch or nothing: half a stretch would draw random numbers twice.
        for node in reversed([n for n in env.values() if n not in inputs]):
            module.graph.erase_node(node)
        raise
    for old, value in pairs:
        old.replace_all_uses_with(value)
    # The users left are getitems of tuples, which were replaced one by one.
    parts = [user for node in results for user in node.users]
    for node in dict.fromkeys((*parts, *reversed(stretch))):
        module.graph.erase_node(node)
    # Some results have no users, often the weights of nn.MultiheadAttention.
    written = {storage for n in env.values() for source in may_write(n) for storage in storages(source)}
    for node in reversed([n for n in env.values() if n not in inputs]):
        if not node.users and not may_write(node):
            module.graph.erase_node(node)
    return written


def _traced_with_gradients(run: Callable[..., Any], values: Sequence[Any], now: Mode) -> GraphModule:
    """The trace of `run` in the mode `now`. Raises TypeError where it changes the mode or defines its own gradients."""
    given = [with_gradient(fresh(v)) if getattr(v, "requires_grad", False) else fresh(v) for v in values]
    with autocast_of(now), plain_gradients() as all_plain:
        trace = traced(lambda *args: all_plain(run(*args)), given, pre_dispatch=True)
    for node in trace.graph.nodes:
        if node.op == "call_function" and _is_mode_or_opaque(node):
            raise TypeError(f"it calls {op_name(node)}")
    for node in trace.graph.find_nodes(op="call_function", target=torch.ops.aten.detach_.default):
        # `torch.tensor` detaches its copy.
        if node.args[0].target == torch.ops.aten.lift_fresh_copy.default:
            node.replace_all_uses_with(node.args[0])
            trace.graph.erase_node(node)
    return trace


def _is_mode_or_opaque(node: Node) -> bool:
    of_an_operation = isinstance(node.target, torch._ops.OpOverload) or op_name(node) == "getitem"
    return not (of_an_operation or isinstance(node.meta.get("val"), torch.SymInt))


def _pairs(node: Node, new: Any) -> Iterator[tuple[Node, Node]]:
    """(Old node, replacement) pairs: `node` itself, or its getitems where `new` is a tuple."""
    if isinstance(new, Node):
        yield node, new
        return
    for user in node.users:
        if op_name(user) != "getitem":
            raise TypeError(f"{user.name} takes all that {node.name} gives")
        if isinstance(new[user.args[1]], Node):
            yield user, new[user.args[1]]
        elif user.users:
            raise TypeError(f"{user.name} is not made")


def _assert_as_recorded(new: Node, old: Node) -> None:
    """Raise TypeError where shape, dtype or requires_grad of `new` differ from Dynamo's record of `old`."""

    def facts(node: Node) -> Any:
        return [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_of(value_of(node))]

    if str(facts(new)) != str(facts(old)):
        raise TypeError(f"{old.name} is {facts(old)} to Dynamo, and {facts(new)} written out")
