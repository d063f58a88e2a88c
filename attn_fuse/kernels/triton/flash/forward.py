"""Flash attention forward (FlashAttention-2, arXiv 2307.08691), one program for each block of queries.

The score function is a compile-time constant. The max and the sum of a query stay separate instead of forming an lse.
An lse would lose the sum beside a huge score, and a row in which a finite fill hides every key must give the mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_fuse.kernels.triton.flash.tiles import (
    draws,
    dropped,
    head_base,
    in_blocks,
    load_rows,
    odd_numbers,
    place,
    rounded,
    span,
    store_rows,
)

# Triton compiles again for a number that is 1 or a multiple of 16, except for these. They change with the length of a
# sequence, and the addresses of query, key and value do not depend on them.
CHANGING = (
    "numbers", "lower", "upper", "heads", "q_len", "kv_len", "dropout", "batch", "first_row", "row_count", "parts",
)  # fmt: skip


@triton.jit
def key_phases(
    found, start, lower, upper, q_len, kv_len, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The four ends of three stretches of key blocks for the queries from `start` on.

    In the middle stretch every query sees every key according to bounds and spans, and no block is cut by the end of
    the sequence. found: the result of `span`. The ends count blocks, because a loop over blocks tells Triton that each
    starts at a multiple of its size. Without that it would read a bias one element at a time.
    """
    first, last, inner_first, inner_last = found
    stop = tl.minimum(start + BLOCK_M, q_len)
    last = tl.minimum(last, kv_len)
    if upper is not None:
        last = tl.minimum(last, stop + upper)
        inner_last = tl.minimum(inner_last, start + upper + 1)
    if lower is not None:
        first = tl.maximum(first, start + lower)
        inner_first = tl.maximum(inner_first, stop - 1 + lower)
    return in_blocks(first, inner_first, inner_last, last, BLOCK_N)


@triton.jit
def weighted(
    raw, b, h, i, j, q_len, kv_len, reads, greatest, total,
    WHOLE: tl.constexpr, SCORE: tl.constexpr, SCORE_INSIDE: tl.constexpr, SLOPE: tl.constexpr, TO_LOG2: tl.constexpr,
    RESCALED: tl.constexpr,
):  # fmt: skip
    """The weights of a block, the factor for everything summed before, and the new max and sum of each query.

    WHOLE: whether every query sees every key of the block. The other constants are those of `forward`.
    """
    if not WHOLE:
        scores = SCORE(raw, b, h, i, j, q_len, kv_len, reads)
        scores = tl.where(j < kv_len, scores, float("-inf"))
        most = tl.max(scores, 1)
    elif SLOPE is not None:
        # Rounding keeps the order, so the max can be multiplied after the reduction.
        scores = raw * SLOPE
        most = tl.max(raw, 1) * SLOPE
    else:
        scores = SCORE_INSIDE(raw, b, h, i, j, q_len, None, reads)
        most = tl.max(scores, 1)
    if WHOLE and RESCALED:
        most = most / TO_LOG2
    new = tl.maximum(greatest, most)
    # -inf - -inf would be NaN, but a query that sees no key must have the weight exp(-inf) = 0 for each.
    shift = tl.where(new == float("-inf"), 0.0, new)
    if WHOLE and RESCALED:
        weights = tl.exp2(scores - (shift * TO_LOG2)[:, None])
    else:
        weights = tl.exp2((scores - shift[:, None]) * TO_LOG2)
    shrink = tl.exp2((greatest - shift) * TO_LOG2)
    return weights, shrink, new, total * shrink + tl.sum(weights, 1)


@triton.jit(do_not_specialize=CHANGING)
def forward(
    query, key, value, out, row_max, row_sum, seed, spans, reads, numbers,
    lower, upper, heads, groups, q_len, kv_len, dropout, dropout_scale,
    SCORE: tl.constexpr, SCORE_INSIDE: tl.constexpr, SLOPE: tl.constexpr, FACTOR: tl.constexpr, SINK: tl.constexpr,
    TO_LOG2: tl.constexpr, INNER: tl.constexpr, RESCALED: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """query, key, value, out: (tensor [B, H or Hkv, len, dim], its strides). row_max, row_sum: fp32 [B, H, Lq].

    seed: int64, one element, or None without dropout. dropout: the threshold of `dropped`. spans: as in `span`.
    lower, upper: bounds of j - i, or None.
    SCORE, SCORE_INSIDE: the score, and the score in blocks where every query sees every key. SLOPE: the number > 0 by
        which SCORE_INSIDE multiplies, if it does nothing else. RESCALED: whether SCORE_INSIDE gives the score times
        log2(e) while SCORE gives the score.
    TO_LOG2: turns a difference of scores into an exponent of 2.
    INNER: whether the spans say where every query sees every key. SHARED: as in `place`.
    EVEN: whether kv_len is a multiple of 16. Triton then reads a bias in units of 16 bytes even where it masks keys.
    """
    reads = (reads[0], reads[1], numbers)
    kv_len = rounded(kv_len, EVEN)
    blocks = tl.cdiv(q_len, BLOCK_M)
    # Under a causal mask the queries that see the most keys come first.
    block, h, b = place(blocks, heads, SHARED)
    start = (blocks - 1 - block) * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    i = rows[:, None]
    key_start, value_start = head_base(key, b, h // groups), head_base(value, b, h // groups)
    q = load_rows(query, head_base(query, b, h), start, q_len, BLOCK_M, HEAD_DIM, BLOCK_D, True)

    if SINK is None:
        greatest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    else:
        greatest = SINK(b, h, rows, q_len, kv_len, reads)
        total = tl.where(greatest == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if seed is not None:
        for_queries, for_keys = draws(seed, b, h, heads)
        of_queries = odd_numbers(for_queries, rows)
    found = span(spans, b, h, start, q_len, BLOCK_M, kv_len, INNER)
    phases = key_phases(found, start, lower, upper, q_len, kv_len, BLOCK_M, BLOCK_N)
    for phase in tl.static_range(3):
        begin, end = phases[phase], phases[phase + 1]
        if phase > 0 or lower is not None or INNER:
            for n in tl.range(begin * BLOCK_N, end * BLOCK_N, BLOCK_N):
                columns = n + tl.arange(0, BLOCK_N)
                j = columns[None, :]
                k = load_rows(key, key_start, n, kv_len, BLOCK_N, HEAD_DIM, BLOCK_D, phase != 1)
                raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                weights, shrink, greatest, total = weighted(
                    raw, b, h, i, j, q_len, kv_len, reads, greatest, total,
                    phase == 1, SCORE, SCORE_INSIDE, SLOPE, TO_LOG2, RESCALED,
                )  # fmt: skip
                if FACTOR is not None:
                    weights = weights * FACTOR(raw, b, h, i, j, q_len, None if phase == 1 else kv_len, reads)
                if seed is not None:
                    weights = dropped(weights, of_queries, for_keys, n, dropout)
                v = load_rows(value, value_start, n, kv_len, BLOCK_N, VALUE_DIM, BLOCK_V, phase != 1)
                acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    if seed is not None:
        acc = acc * dropout_scale
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store_rows(out, head_base(out, b, h), rows, q_len, acc, VALUE_DIM, BLOCK_V)
    row = (tl.cast(b, tl.int64) * heads + h) * q_len + rows
    tl.store(row_max + row, greatest, mask=rows < q_len)
    tl.store(row_sum + row, total, mask=rows < q_len)
