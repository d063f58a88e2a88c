"""triton_flash: our flash attention in Triton, forward and backward, with the score function generated into it.

Taken: every mask, bias, function of the scores, sink, factor and dropout that is recognised, with the gradients of all
that is learned; grouped heads, any strides. Declined: rows wider than 256, float64, devices before Ampere. Blocks that
the structure of the mask hides are not computed.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.emit.builder import tensor
from attn_fuse.expression.nodes import TRUE, And, Expr, Gather, Input, Position, Score, distinct
from attn_fuse.kernels.centring import gains, restored, sums_to_one
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.kernels.score.apart import lookups_apart
from attn_fuse.kernels.score.part import part_of
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.score.simplify import inside
from attn_fuse.kernels.score.write import ScoreCall, score_call
from attn_fuse.kernels.triton import DEVICES, WIDEST, is_installed
from attn_fuse.kernels.triton.flash.op import triton_flash
from attn_fuse.kernels.triton.flash.spans import spans

if TYPE_CHECKING:
    from attn_fuse.emit.call import Call

_AMPERE = (8, 0)


def limits(attention: Attention, facts: Facts) -> Iterator[str]:
    """The reasons beside device type and dtype: wide rows, no Triton, a GPU before Ampere."""
    for name in ("head_dim", "value_dim"):
        if name in facts.symbolic:
            yield f"takes a {name} of at most {WIDEST}, and it may change from call to call"
        elif getattr(facts, name) > WIDEST:
            yield f"takes a {name} of at most {WIDEST}, not {getattr(facts, name)}"
    if not is_installed():
        yield "Triton is not installed"
    if facts.device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(facts.device)
        if capability < _AMPERE:
            yield f"needs compute capability 8.0, this device has {'.'.join(map(str, capability))}"


def emit(call: Call) -> Node:
    """Build the call of `triton_flash`, and return the node of [batch, heads, q_len, value_dim]."""
    score = lookups_apart(call, score_call(call))
    drops = call.attention.dropout_p is not None
    seed = call.node(torch.randint, 2**62, [1], dtype=torch.int64, device=call.facts.device) if drops else None
    of_queries, of_keys = _spans(call, score)
    # In half precision, centring gains too little for a copy of the values.
    centred = gains(call) and sums_to_one(call.attention) and call.facts.dtype.itemsize > 2
    results = call.node(
        triton_flash,
        call.query(scaled=False),
        call.key(),
        call.value(),
        score.inputs,
        score.numbers,
        seed,
        of_queries,
        of_keys,
        call.dropout_p(),
        score.program.dumps(),
        centred,
    )
    out, row_sum, centre = (call.node(operator.getitem, results, n) for n in (0, 2, 3))
    if call.empty_is_nan:
        hidden = call.node(torch.unsqueeze, call.node(torch.eq, row_sum, 0), -1)
        out = call.node(torch.masked_fill, out, hidden, math.nan)
    if not centred:
        return out
    whole: Node = restored(out, call.node(torch.ne, row_sum, 0), centre, call.node)
    return whole


def _spans(call: Call, score: ScoreCall) -> tuple[Node | None, Node | None]:
    """The spans of queries and of keys, as nodes; None where the mask's structure says no more than its bounds."""
    program, is_whole = _structure(score)
    if program is None:
        return None, None
    part = part_of(Score(), program.hides_only_if_others_seen, visible=program.visible)
    a = call.attention
    sizes = [call.size(a.length(axes)) for axes in (a.batch_axes, a.head_axes, a.axes.query, a.axes.key)]
    tensors = [call.node_once(torch.Tensor.detach, score.inputs[n]) for n in part.inputs]
    numbers, device = [score.numbers[n] for n in part.numbers], call.facts.device
    found = call.node_once(spans, tensors, numbers, *sizes, part.program.dumps(), device, is_whole)
    return call.node_once(operator.getitem, found, 0), call.node_once(operator.getitem, found, 1)


def _structure(score: ScoreCall) -> tuple[ScoreProgram | None, bool]:
    """The mask parts that say more than the bounds, and are the same for all heads if they are large.

    None without one. And whether these are, with the bounds, all of the mask. To ask a mask about each pair of
    positions costs little beside an attention of several heads.
    """
    program = score.program
    if program.visible is None:
        return None, False
    if program.hides_only_if_others_seen:
        # Some of the parts alone would not say which rows are fully masked.
        shared = _is_shared(program.visible, score.inputs)
        found = ScoreProgram(Score(), visible=program.visible, hides_only_if_others_seen=True)
        return (found, True) if shared else (None, False)
    parts = [part for part in _conjuncts(inside(program.visible, program)) if part != TRUE]
    shared_parts = [part for part in parts if _is_shared(part, score.inputs)]
    if not shared_parts:
        return None, False
    return ScoreProgram(Score(), visible=functools.reduce(And, shared_parts)), len(shared_parts) == len(parts)


def _conjuncts(expr: Expr) -> Iterator[Expr]:
    if isinstance(expr, And):
        yield from _conjuncts(expr.a)
        yield from _conjuncts(expr.b)
    else:
        yield expr


def _is_shared(expr: Expr, inputs: list[Node]) -> bool:
    """Whether all heads share what is read for each query and key."""
    shapes = [tensor(x).shape for x in inputs]
    for node in distinct(expr):
        if isinstance(node, Input) and 1 not in shapes[node.leaf][1:]:
            return False
        if isinstance(node, Gather) and {Position(name) for name in "hij"} <= set(distinct(node)):
            return False
    return True


TRITON_FLASH = Kernel(
    name="triton_flash",
    devices=DEVICES,
    dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
    limits=limits,
    emit=emit,
    needs_evidence=True,
    keeps_nan=True,
    skips_hidden=True,
)
