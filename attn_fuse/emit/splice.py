"""Emit: splice the chosen kernel's call into Dynamo's graph and remove the operations that it replaces."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.emit.builder import NotEmitted
from attn_fuse.emit.call import Call
from attn_fuse.emit.operators import operator
from attn_fuse.errors import first_line
from attn_fuse.graph.modes import uncast
from attn_fuse.graph.names import CASTS, IN_THE_SHAPE_OF, LAYOUT, called, op_name, requires_grad, storages
from attn_fuse.graph.reach import reach
from attn_fuse.graph.region import Region
from attn_fuse.torch_internals import FakeTensorMode


def emit(
    region: Region,
    attention: Attention,
    facts: Facts,
    build: Callable[[Call], Node],
    mode: FakeTensorMode,
) -> Node:
    """Replace the region by the call that `build` makes, and return the new node of its output.

    Raises NotEmitted, with the graph unchanged, where the call cannot be written.
    """
    graph = region.scope.module.graph
    call = Call(region, attention, facts, mode)
    try:
        # The attention's expressions already include the casts of autocast.
        with graph.inserting_before(region.output), uncast(graph, region.mode):
            result = call.as_written(build(call))
        if region.mode.grad and (lost := _lost(region, result)) is not None:
            raise NotEmitted(f"{lost.name} gets a gradient of zeros as written, and would get none")
    except Exception as problem:
        call.undo()
        raise NotEmitted(first_line(problem) or type(problem).__name__) from problem
    region.output.replace_all_uses_with(result)
    call.tidy(keep=result)
    if region.mode.grad:
        _as_kernels_may_read(call, region)
        result = _as_the_program_may_write(call, region, result)
    for node in reversed(region.nodes):
        if not node.users:
            graph.erase_node(node)
    return result


def _lost(region: Region, result: Node) -> Node | None:
    """A leaf with a gradient as written on which `result` does not depend, such as one times zero or never chosen.

    A leaf behind another leaf gets its gradient through that one: a mask may take its sizes from the input.
    """
    wanted = {leaf for leaf in region.leaves if requires_grad(leaf) and leaf not in region.detached}
    first = min(wanted, default=result)
    wanted -= {*reach([result], lambda node: [n for n in node.all_input_nodes if not n < first])}
    return next((leaf for leaf in region.leaves if leaf in wanted and _shows_gradient(leaf)), None)


def _shows_gradient(leaf: Node) -> bool:
    """Whether the program can tell a zero gradient of `leaf` from none, because it reaches an input or a parameter.

    A cache allocated in the graph may be recorded as requiring a gradient only because of later writes.
    """

    def behind(node: Node) -> list[Node]:
        passes = op_name(node) not in IN_THE_SHAPE_OF and op_name(node) != "detach"
        return [source for source in node.all_input_nodes if requires_grad(source)] if passes else []

    return any(
        node.op in ("placeholder", "get_attr") or node.kwargs.get("requires_grad") or called(node) == "requires_grad"
        for node in reach([leaf], behind)
    )


def _as_kernels_may_read(call: Call, region: Region) -> None:
    """Detach or copy tensors that the call must not read as they are.

    A kernel gives a gradient to each tensor that it reads, so tensors without one as written are detached. It also
    keeps them for its backward, which the program may not do, so tensors that are written later are copied.
    """
    made = dict.fromkeys(node for node in call.made if node.users)
    read = dict.fromkeys(source for node in made for source in node.all_input_nodes if source not in made)
    keeps = _has_backward(call)
    for source in read:
        other = source
        with source.graph.inserting_before(next(iter(made))):
            if source in region.detached:
                other = call.node("detach", other)
            if keeps and _is_written_later(source):
                other = call.node(kept, other)
        for node in made if other is not source else ():
            node.replace_input_with(source, other)


def _as_the_program_may_write(call: Call, region: Region, result: Node) -> Node:
    """`result`, or a copy where the graph returns its memory.

    A kernel keeps its output for its backward. The product as written does not, so the caller may write into it. torch
    notices such a write in some graphs and raises, but not in some of Inductor's (torch 2.13).
    """
    returned = {storage for node in result.graph.output_node().all_input_nodes for storage in storages(node)}
    # Views of the output are still recorded in its memory as written.
    if not _has_backward(call) or returned.isdisjoint(storages(result) | storages(region.output)):
        return result
    with result.graph.inserting_after(result):
        copy = call.node(kept, result)
    result.replace_all_uses_with(copy, lambda user: user is not copy)
    return copy


def _cloned(x: Tensor) -> Tensor:
    return x.clone()


# A copy that Inductor neither removes nor repeats. It may replace `x.clone()` by x, or clone x only in the backward,
# even where the program writes into x in between (torch 2.13: wrong gradients, without a warning).
kept = operator("kept(Tensor x) -> Tensor", _cloned, _cloned, lambda ctx, grad: grad)


def _has_backward(call: Call) -> bool:
    return call.facts.training or call.facts.bias_needs_grad


def _is_written_later(node: Node) -> bool:
    """Whether `node` shares memory with an input that the graph writes at its end."""
    if any(user.target == "copy_" and user.args[0] is node for user in node.users):
        return True
    return _may_be_a_view(node) and any(map(_is_written_later, node.all_input_nodes))


def _may_be_a_view(node: Node) -> bool:
    declares = isinstance(node.target, torch._ops.OpOverload) and any(
        returned.alias_info is not None for returned in node.target._schema.returns
    )
    # A reshape or cast with nothing to do returns its input, which its schema does not say.
    return declares or op_name(node) in LAYOUT | CASTS
