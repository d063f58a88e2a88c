"""Emit: splice the chosen kernel's call into Dynamo's graph and take out what it replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Node

from attn_fuse.attention import Attention
from attn_fuse.builder import NotEmitted
from attn_fuse.call import Call
from attn_fuse.facts import Facts
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.names import storages
from attn_fuse.region import Region
from attn_fuse.torch_internals import FakeTensorMode
from attn_fuse.writes import writes_of

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
    writes = list(writes_of(graph)) if region.mutates else []
    for node in reversed(region.nodes):
        if not node.users and not _is_read_later(node, {s for writer, s in writes if writer is node}):
            graph.erase_node(node)
    return result


def _is_read_later(write: Node, written: set[int]) -> bool:
    """Whether what `write` writes in place is read by what is left of the program behind it."""
    reading = write.next if written else write
    while reading.op != "root" and reading is not write:
        if any(storages(source) & written for source in reading.all_input_nodes):
            return True
        reading = reading.next
    return False
