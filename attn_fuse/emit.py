"""Emit: splice the chosen kernel's call into Dynamo's graph and take out what it replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Node

from attn_fuse.attention import Attention
from attn_fuse.builder import NotEmitted
from attn_fuse.call import Call
from attn_fuse.facts import Facts
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.region import Region
from attn_fuse.torch_internals import FakeTensorMode

# Given the new operations and the one that gives the output: a reason why it must not replace the region, or None.
Verify = Callable[[Sequence[Node], Node], str | None]


def emit(
    region: Region,
    attention: Attention,
    facts: Facts,
    kernel: Kernel,
    mode: FakeTensorMode,
    verify: Verify | None = None,
) -> Node:
    """Replace the region by a call of `kernel` and return the node that now stands for its output.

    Raises NotEmitted, with the graph as it was.
    """
    graph = region.scope.module.graph
    call = Call(region, attention, facts, mode)
    try:
        with graph.inserting_before(region.output):
            result = call.as_written(kernel.emit(call))
        objection = verify(call.made, result) if verify is not None else None
    except Exception as problem:
        call.undo()
        raise NotEmitted(str(problem).partition("\n")[0] or type(problem).__name__) from problem
    if objection is not None:
        call.undo()
        raise NotEmitted(objection)
    region.output.replace_all_uses_with(result)
    call.tidy(keep=result)
    for node in reversed(region.nodes):
        if not node.users:
            graph.erase_node(node)
    return result
