"""Emit: splice the chosen kernel's call into Dynamo's graph and take out what it replaces."""

from __future__ import annotations

from torch.fx import Node

from attn_fuse.attention import Attention
from attn_fuse.builder import NotEmitted
from attn_fuse.call import Call
from attn_fuse.facts import Facts
from attn_fuse.kept import kept
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.modes import uncast
from attn_fuse.names import CASTS, LAYOUT, op_name
from attn_fuse.region import Region
from attn_fuse.torch_internals import FakeTensorMode


def emit(
    region: Region,
    attention: Attention,
    facts: Facts,
    kernel: Kernel,
    mode: FakeTensorMode,
) -> Node:
    """Replace the region by a call of `kernel` and return the node that now stands for its output.

    Raises NotEmitted, with the graph as it was.
    """
    graph = region.scope.module.graph
    call = Call(region, attention, facts, mode)
    try:
        # Casts are among what the attention was read with.
        with graph.inserting_before(region.output), uncast(graph, region.mode):
            result = call.as_written(kernel.emit(call))
    except Exception as problem:
        call.undo()
        raise NotEmitted(str(problem).partition("\n")[0] or type(problem).__name__) from problem
    region.output.replace_all_uses_with(result)
    call.tidy(keep=result)
    if facts.training or facts.bias_needs_grad:
        _copy_what_is_written_later(call)
    for node in reversed(region.nodes):
        if not node.users:
            graph.erase_node(node)
    return result


def _copy_what_is_written_later(call: Call) -> None:
    """A kernel keeps what it reads for its backward; the program that it stands for may have kept something else."""
    made = dict.fromkeys(node for node in call.made if node.users)
    read = dict.fromkeys(source for node in made for source in node.all_input_nodes if source not in made)
    for source in filter(_is_written_later, read):
        with source.graph.inserting_before(next(iter(made))):
            copy = call.node(kept, source)
        for node in made:
            node.replace_input_with(source, copy)


def _is_written_later(node: Node) -> bool:
    """Whether `node` lies in the memory of an input that the program has written into at its end."""
    if any(user.target == "copy_" and user.args[0] is node for user in node.users):
        return True
    return op_name(node) in LAYOUT | CASTS and any(map(_is_written_later, node.all_input_nodes))
