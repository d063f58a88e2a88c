"""Flash attention for Hopper (sm_90): forward, dK/dV and dQ over tensor descriptors, which the copy engine reads.

FlashAttention-2 (arXiv 2307.08691). Every operand is loaded through a descriptor of as many dimensions as the tensor
has, and what a block reads beyond a tensor's end is 0. Warps are not specialised as in FlashAttention-3 (arXiv
2407.08608): Triton 3.6 then halves the rows that are held, and reads them through the descriptor of the whole.

Nothing is visible unless lower <= j - i <= upper. Where SCORE is None the score is scale * (query . key), scale > 0,
and those bounds are the mask, if there is one; otherwise SCORE and SCORE_BACKWARD are functions as `scores` makes them,
mask included, and TO_LOG2 times a difference of scores is one in base 2. `lse` is log2(sum_j exp(score_j)), 0 in a row
that sees no key.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

# Triton compiles again for a number that is 1 or a multiple of 16; lengths and bounds may change with each call.
_CHANGING = ("q_len", "kv_len", "rows", "lower", "upper")


@triton.jit(do_not_specialize=_CHANGING)
def forward_kernel(
    query, key, value, out_ptr, lse_ptr,
    heads, groups, q_len, kv_len, rows, out_b, out_h, out_i, lower, upper, scale, reads,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, SCORE: tl.constexpr, TO_LOG2: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    b, h, block = _placed(tl.cdiv(q_len, BLOCK_M), heads)
    # The last queries see the most keys under a causal mask; a long block started last would run alone.
    start_m = (tl.cdiv(q_len, BLOCK_M) - 1 - block) * BLOCK_M
    kv_h = h // groups
    i = start_m + tl.arange(0, BLOCK_M)
    q = query.load([b, h, start_m, 0]).reshape([BLOCK_M, HEAD_BLOCK])
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    to_log2 = scale * LOG2E if SCORE is None else TO_LOG2
    first = tl.maximum(start_m + lower, 0) // BLOCK_N * BLOCK_N
    last = tl.minimum(start_m + BLOCK_M + upper, kv_len)
    for start_n in tl.range(first, last, BLOCK_N):
        k = key.load([b, kv_h, start_n, 0]).reshape([BLOCK_N, HEAD_BLOCK])
        score = tl.dot(q, k.T)
        j = start_n + tl.arange(0, BLOCK_N)
        if SCORE is not None:
            score = SCORE(score, b, h, i[:, None], j[None, :], q_len, kv_len, reads)
        elif MASKED:
            apart = j[None, :] - i[:, None]
            score = tl.where((apart >= lower) & (apart <= upper), score, -float("inf"))
        if RAGGED:
            score = tl.where(j[None, :] < kv_len, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        # -inf less -inf is NaN, in a row that has seen no key so far.
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        if SCORE is None:
            # One multiplication and addition an element.
            weight = tl.exp2(score * to_log2 - (shift * to_log2)[:, None])
        else:
            weight = tl.exp2((score - shift[:, None]) * to_log2)
        shrink = tl.exp2((top - shift) * to_log2)
        total = total * shrink + tl.sum(weight, 1)
        out = out * shrink[:, None]
        v = value.load([b, kv_h, start_n, 0]).reshape([BLOCK_N, VALUE_BLOCK])
        out = tl.dot(weight.to(v.dtype), v, out)
        top = new_top
    seen = total != 0.0
    out = out / tl.where(seen, total, 1.0)[:, None]
    d = tl.arange(0, VALUE_BLOCK)
    place = out_ptr + b.to(tl.int64) * out_b + h.to(tl.int64) * out_h + i.to(tl.int64)[:, None] * out_i + d[None, :]
    inside = i[:, None] < q_len
    if VALUE_DIM != VALUE_BLOCK:
        inside = inside & (d[None, :] < VALUE_DIM)
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside)
    lse = tl.where(seen & (i < q_len), top * to_log2 + tl.log2(tl.where(seen, total, 1.0)), 0.0)
    tl.store(lse_ptr + (b * heads + h).to(tl.int64) * rows + i, lse, mask=i < rows)


@triton.jit(do_not_specialize=_CHANGING)
def delta_kernel(
    out_ptr, grad_ptr, delta_ptr,
    heads, q_len, rows, out_b, out_h, out_i, grad_b, grad_h, grad_i, grad_d,
    VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = sum over value_dim of grad_out * out, 0 in the rows that are not."""
    b, h, block = _placed(tl.cdiv(rows, BLOCK_M), heads)
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    b, h = b.to(tl.int64), h.to(tl.int64)
    d = tl.arange(0, VALUE_BLOCK)
    far = i.to(tl.int64)[:, None]
    inside = (i[:, None] < q_len) & (d[None, :] < VALUE_DIM)
    out = tl.load(out_ptr + b * out_b + h * out_h + far * out_i + d[None, :], mask=inside, other=0.0)
    grad = tl.load(grad_ptr + b * grad_b + h * grad_h + far * grad_i + d[None, :] * grad_d, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + (b * heads + h) * rows + i, delta, mask=i < rows)


@triton.jit(do_not_specialize=_CHANGING)
def key_value_kernel(
    query, key, value, grad_out, lse, delta, dkey_ptr, dvalue_ptr,
    kv_heads, groups, q_len, kv_len, dkey_b, dkey_h, dkey_j, dvalue_b, dvalue_h, dvalue_j, lower, upper, scale, reads,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, SCORE: tl.constexpr, TO_LOG2: tl.constexpr,
    SCORE_BACKWARD: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of keys and values, summed over the query heads in their order.

    Scores are transposed, keys by queries, so that weights and their gradients go into the next product from registers.
    Queries beyond the end have score 0, lse 0, grad_out 0 and delta 0: they add nothing.
    """
    b, kv_h, block = _placed(tl.cdiv(kv_len, BLOCK_N), kv_heads)
    start_n = block * BLOCK_N
    j = start_n + tl.arange(0, BLOCK_N)
    k = key.load([b, kv_h, start_n, 0]).reshape([BLOCK_N, HEAD_BLOCK])
    v = value.load([b, kv_h, start_n, 0]).reshape([BLOCK_N, VALUE_BLOCK])
    dk = tl.zeros([BLOCK_N, HEAD_BLOCK], tl.float32)
    dv = tl.zeros([BLOCK_N, VALUE_BLOCK], tl.float32)
    to_log2 = scale * LOG2E if SCORE is None else TO_LOG2
    first = tl.maximum(start_n - upper, 0) // BLOCK_M
    last = tl.cdiv(tl.maximum(tl.minimum(start_n + BLOCK_N - lower, q_len), 0), BLOCK_M)
    count = tl.maximum(last - first, 0)
    for step in tl.range(0, count * groups):
        h = kv_h * groups + step // count
        start_m = (first + step % count) * BLOCK_M
        q = query.load([b, h, start_m, 0]).reshape([BLOCK_M, HEAD_BLOCK])
        raw = tl.dot(k, q.T)
        i = start_m + tl.arange(0, BLOCK_M)
        score = raw if SCORE is None else SCORE(raw, b, h, i[None, :], j[:, None], q_len, kv_len, reads)
        row_lse = lse.load([b, h, start_m]).reshape([BLOCK_M])
        weight = tl.exp2(score * to_log2 - row_lse[None, :])
        if SCORE is None and MASKED:
            apart = j[:, None] - i[None, :]
            weight = tl.where((apart >= lower) & (apart <= upper), weight, 0.0)
        if SCORE is not None and RAGGED:
            weight = tl.where(i[None, :] < q_len, weight, 0.0)
        grad = grad_out.load([b, h, start_m, 0]).reshape([BLOCK_M, VALUE_BLOCK])
        dv = tl.dot(weight.to(grad.dtype), grad, dv)
        dweight = tl.dot(v, grad.T)
        row_delta = delta.load([b, h, start_m]).reshape([BLOCK_M])
        dscore = weight * (dweight - row_delta[None, :])
        if SCORE is not None:
            dscore = SCORE_BACKWARD(dscore, raw, b, h, i[None, :], j[:, None], q_len, kv_len, reads)
        dk = tl.dot(dscore.to(q.dtype), q, dk)
    d = tl.arange(0, HEAD_BLOCK)
    far = j.to(tl.int64)[:, None]
    place = dkey_ptr + b.to(tl.int64) * dkey_b + kv_h.to(tl.int64) * dkey_h + far * dkey_j + d[None, :]
    inside = j[:, None] < kv_len
    if HEAD_DIM != HEAD_BLOCK:
        inside = inside & (d[None, :] < HEAD_DIM)
    tl.store(place, (dk * (scale if SCORE is None else 1.0)).to(dkey_ptr.dtype.element_ty), mask=inside)
    d = tl.arange(0, VALUE_BLOCK)
    place = dvalue_ptr + b.to(tl.int64) * dvalue_b + kv_h.to(tl.int64) * dvalue_h + far * dvalue_j + d[None, :]
    inside = j[:, None] < kv_len
    if VALUE_DIM != VALUE_BLOCK:
        inside = inside & (d[None, :] < VALUE_DIM)
    tl.store(place, dv.to(dvalue_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_CHANGING)
def query_kernel(
    query, key, value, grad_out, lse, delta, dquery_ptr,
    heads, groups, q_len, kv_len, dquery_b, dquery_h, dquery_i, lower, upper, scale, reads,
    HEAD_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, SCORE: tl.constexpr, TO_LOG2: tl.constexpr,
    SCORE_BACKWARD: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of queries."""
    b, h, block = _placed(tl.cdiv(q_len, BLOCK_M), heads)
    start_m = (tl.cdiv(q_len, BLOCK_M) - 1 - block) * BLOCK_M
    kv_h = h // groups
    i = start_m + tl.arange(0, BLOCK_M)
    q = query.load([b, h, start_m, 0]).reshape([BLOCK_M, HEAD_BLOCK])
    grad = grad_out.load([b, h, start_m, 0]).reshape([BLOCK_M, VALUE_BLOCK])
    row_lse = lse.load([b, h, start_m]).reshape([BLOCK_M])
    row_delta = delta.load([b, h, start_m]).reshape([BLOCK_M])
    dq = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
    to_log2 = scale * LOG2E if SCORE is None else TO_LOG2
    first = tl.maximum(start_m + lower, 0) // BLOCK_N * BLOCK_N
    last = tl.minimum(start_m + BLOCK_M + upper, kv_len)
    for start_n in tl.range(first, last, BLOCK_N):
        k = key.load([b, kv_h, start_n, 0]).reshape([BLOCK_N, HEAD_BLOCK])
        v = value.load([b, kv_h, start_n, 0]).reshape([BLOCK_N, VALUE_BLOCK])
        raw = tl.dot(q, k.T)
        j = start_n + tl.arange(0, BLOCK_N)
        score = raw if SCORE is None else SCORE(raw, b, h, i[:, None], j[None, :], q_len, kv_len, reads)
        weight = tl.exp2(score * to_log2 - row_lse[:, None])
        if SCORE is None and MASKED:
            apart = j[None, :] - i[:, None]
            weight = tl.where((apart >= lower) & (apart <= upper), weight, 0.0)
        if RAGGED:
            # exp2(0 - lse) may be inf, and inf * 0 is NaN.
            weight = tl.where(j[None, :] < kv_len, weight, 0.0)
        dweight = tl.dot(grad, v.T)
        dscore = weight * (dweight - row_delta[:, None])
        if SCORE is not None:
            dscore = SCORE_BACKWARD(dscore, raw, b, h, i[:, None], j[None, :], q_len, kv_len, reads)
        dq = tl.dot(dscore.to(k.dtype), k, dq)
    d = tl.arange(0, HEAD_BLOCK)
    far = i.to(tl.int64)[:, None]
    place = dquery_ptr + b.to(tl.int64) * dquery_b + h.to(tl.int64) * dquery_h + far * dquery_i + d[None, :]
    inside = i[:, None] < q_len
    if HEAD_DIM != HEAD_BLOCK:
        inside = inside & (d[None, :] < HEAD_DIM)
    tl.store(place, (dq * (scale if SCORE is None else 1.0)).to(dquery_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _placed(blocks, heads):
    """Batch entry, head and block of this program. One line of programs: a grid is short in its other directions."""
    program = tl.program_id(0)
    return program // blocks // heads, program // blocks % heads, program % blocks
