"""triton_decode: our split-KV attention for few queries and a long key and value cache, inference only.

Taken: at most 16 queries, or 128 of all heads that share a key; any score function, generated into the kernel from its
score program. Declined: gradients, dropout, a symbolic q_len, rows wider than 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.kernels.kernel import Kernel, Reach
from attn_fuse.kernels.score.write import score_call
from attn_fuse.kernels.triton import DEVICES, common_limits

if TYPE_CHECKING:
    from attn_fuse.emit.call import Call

MOST_QUERIES = 16
# Max rows for one key head: the queries of all heads that share it.
MOST_ROWS = 128


def limits(attention: Attention, facts: Facts) -> Iterator[str]:
    """The reasons beside device type and dtype: gradients, dropout, many queries, wide rows, no Triton."""
    if facts.training or facts.bias_needs_grad:
        yield "gives no gradient"
    if attention.dropout_p is not None:
        yield "has no dropout"
    if "q_len" in facts.symbolic:
        yield f"takes at most {MOST_QUERIES} queries, and their number may change from call to call"
    elif facts.q_len > MOST_QUERIES and facts.q_len * facts.heads > MOST_ROWS * facts.kv_heads:
        yield f"takes at most {MOST_QUERIES} queries, not {facts.q_len}"
    yield from common_limits(facts)


def emit(call: Call) -> Node:
    """Build the call of `decode`, and return the node of [batch, heads, q_len, value_dim]."""
    from attn_fuse.kernels.triton.decode.op import decode

    score = score_call(call)
    return call.node(
        decode,
        call.query(scaled=False),
        call.key(),
        call.value(),
        score.inputs,
        score.numbers,
        program=score.program.dumps(),
    )


TRITON_DECODE = Kernel(
    name="triton_decode",
    devices=DEVICES,
    dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
    limits=limits,
    emit=emit,
    needs_evidence=True,
    # As triton_flash's.
    reach={"cuda": Reach(0.42, 0.33, launches=3, splits=True, forward32=0.25, splits32=64)},
    declines={"always": {"dropout": ("0.25",), "lengths": ("251, 127", "257, 515")}},
    trains=frozenset(),
)
