"""triton_flash: our flash attention in Triton, forward and backward, with the score function compiled into it.

Takes every recognised mask, bias, function of the scores, sink, factor and dropout, all gradients, grouped heads, and
any strides. Declines rows wider than 256, float64, and GPUs before Ampere. Skips blocks hidden by the mask's structure.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.emit.builder import tensor
from attn_fuse.expression.nodes import TRUE, And, Expr, Gather, Input, Position, Score, distinct
from attn_fuse.kernels.centring import gains, restored, sums_to_one
from attn_fuse.kernels.elsewhere import capability
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.kernels.score.apart import lookups_apart
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
    """The reasons other than device type and dtype: wide rows, no Triton, a GPU before Ampere."""
    for name in ("head_dim", "value_dim"):
        if name in facts.symbolic:
            yield f"takes a {name} of at most {WIDEST}, and it may change from call to call"
        elif getattr(facts, name) > WIDEST:
            yield f"takes a {name} of at most {WIDEST}, not {getattr(facts, name)}"
    if not is_installed():
        yield "Triton is not installed"
    if facts.device.type == "cuda" and (has := capability(facts.device)) is not None and has < _AMPERE:
        yield f"needs compute capability 8.0, this device has {'.'.join(map(str, has))}"


def emit(call: Call) -> Node:
    """Build the call of `triton_flash` and return its output, [batch, heads, q_len, value_dim]."""
    score = lookups_apart(call, score_call(call))
    drops = call.attention.dropout_p is not None
    seed = call.node(torch.randint, 2**62, [1], dtype=torch.int64, device=call.facts.device) if drops else None
    of_queries, of_keys = _spans(call, score)
    # In half precision, centring gains too little to be worth a copy of the values.
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
    """The spans of queries and of keys as nodes, or None if the mask has no structure besides its bounds."""
    visible, is_whole = _structure(score)
    if visible is None:
        return None, None
    only = score.program.hides_only_if_others_seen
    part = score.part(ScoreProgram(Score(), visible=visible, hides_only_if_others_seen=only))
    a = call.attention
    sizes = [call.size(a.length(axes)) for axes in (a.axes.batch, a.head_axes, a.axes.query, a.axes.key)]
    tensors = [call.node_once(torch.Tensor.detach, x) for x in part.inputs]
    found = call.node_once(spans, tensors, part.numbers, *sizes, part.program.dumps(), call.facts.device, is_whole)
    return call.node_once(operator.getitem, found, 0), call.node_once(operator.getitem, found, 1)


def _structure(score: ScoreCall) -> tuple[Expr | None, bool]:
    """The conditions of the mask besides its bounds, and whether they and the bounds are the whole mask.

    Conditions that read an element for every head, query and key are left out: to evaluate a mask for every query and
    key is cheap only beside an attention of several heads. None if no condition is left.
    """
    program = score.program
    if program.visible is None:
        return None, False
    # Which rows are fully masked depends on all conditions together.
    only = program.hides_only_if_others_seen
    whole = [program.visible] if only else _conjuncts(inside(program.visible, program))
    parts = [part for part in whole if part != TRUE]
    shared = [part for part in parts if _is_shared(part, score.inputs)]
    return functools.reduce(And, shared) if shared else None, len(shared) == len(parts)


def _conjuncts(expr: Expr) -> Iterator[Expr]:
    if isinstance(expr, And):
        yield from _conjuncts(expr.a)
        yield from _conjuncts(expr.b)
    else:
        yield expr


def _is_shared(expr: Expr, inputs: Sequence[Node]) -> bool:
    """Whether `expr` reads no tensor that has an element for each head, query and key."""
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
