"""chunked: our memory-efficient attention in plain torch operations, on CPU and CUDA.

Taken: every recognised attention; the call carries its score function as a score program. Declined: nothing.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from attn_fuse.kernels.centring import gains, restored
from attn_fuse.kernels.chunked import op as chunked_op
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.kernels.score.write import score_call

if TYPE_CHECKING:
    from attn_fuse.emit.call import Call


def emit(call: Call) -> Node:
    """Build the call of `chunked`, and return the node of [batch, heads, q_len, value_dim]."""
    score = score_call(call)
    drops = call.attention.dropout_p is not None
    seed = call.node(torch.randint, 2**62, [1], dtype=torch.int64, device=call.facts.device) if drops else None
    results = call.node(
        chunked_op.chunked,
        call.query(scaled=False),
        call.key(),
        call.value(),
        score.inputs,
        score.numbers,
        seed,
        dropout_p=call.dropout_p(),
        program=score.program.dumps(),
        centred=gains(call),
    )
    out = call.node(operator.getitem, results, 0)
    if not gains(call):
        return out
    # A function of ours instead of torch's operations would keep the graph out of torch's caches.
    centre, share = (call.node(operator.getitem, results, n) for n in (3, 4))
    whole: Node = restored(out, share, centre, call.node)
    return whole


CHUNKED = Kernel(
    name="chunked",
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
    limits=lambda attention, facts: iter(()),
    emit=emit,
    keeps_nan=True,
    skips_hidden=True,
)
