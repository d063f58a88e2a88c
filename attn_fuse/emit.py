"""Emit: splice the chosen kernel's call into Dynamo's graph and take out what it replaces."""

from __future__ import annotations

from torch.fx import Node

from attn_fuse.attention import Attention
from attn_fuse.builder import NotEmitted
from attn_fuse.call import Call
from attn_fuse.facts import Facts
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.modes import uncast
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
    for node in reversed(region.nodes):
        if not node.users:
            graph.erase_node(node)
    return result
