"""Flash attention forward (FlashAttention-2, arXiv 2307.08691), one program for each block of queries.

The score function is a compile-time constant. Max and sum of a query are kept apart, not joined in an lse: where all
scores are one huge number, as a finite fill makes them, out is then still the mean of the values.
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
    stretch,
)

# Triton compiles again for a number that is 1 or a multiple of 16. These change with the length of a sequence, and the
# addresses of query, key and value do not depend on them.
CHANGING = (
    "numbers", "lower", "upper", "heads", "q_len", "kv_len", "dropout", "batch", "first_row", "row_count", "parts",
)  # fmt: skip


@triton.jit
def key_phases(
    found, start, lower, upper, q_len, kv_len, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The three stretches of blocks of keys for the queries from `start` on. In the middle one every query sees every
    key, by the bounds and spans, and each block is whole. found: what `span` gave.

    Gives numbers of blocks. A loop over them tells Triton that each block begins at a multiple of its size, without
    which it reads a bias an element at a time.
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
    """The weights of a block of scores; what those before it, and their sum, are to be multiplied by; the greatest
    score of each query and the sum of its weights, this block among them.

    WHOLE: whether every query sees every key of the block. The others as in `forward`.
    """
    if not WHOLE:
        scores = SCORE(raw, b, h, i, j, q_len, kv_len, reads)
        scores = tl.where(j < kv_len, scores, float("-inf"))
        most = tl.max(scores, 1)
    elif SLOPE is not None:
        # Rounding keeps the order: so the maximum is multiplied, and each score but in its difference.
        scores = raw * SLOPE
        most = tl.max(raw, 1) * SLOPE
    else:
        scores = SCORE_INSIDE(raw, b, h, i, j, q_len, None, reads)
        most = tl.max(scores, 1)
    if WHOLE and RESCALED:
        most = most / TO_LOG2
    new = tl.maximum(greatest, most)
    # -inf less -inf is NaN, and a query that sees no key has a weight of exp(-inf) for each.
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

    seed: int64 of one element, or None for no dropout. dropout: its threshold, see `dropped`. spans: see `span`. lower,
    upper: of j - i, or None.
    INNER: whether the spans say where every query sees every key; SCORE_INSIDE may take it that they do. RESCALED:
    whether it gives the score times log2(e), while SCORE gives the score.
    SHARED: see `place`. EVEN: whether kv_len is a multiple of 16, so that a bias is read by 16 bytes where a mask of
    the keys cuts it.
    TO_LOG2: what a difference of scores is multiplied by for a power of 2. SLOPE: where SCORE_INSIDE only multiplies by
    a number above 0, that number.
    """
    reads = (reads[0], reads[1], numbers)
    kv_len = rounded(kv_len, EVEN)
    blocks = tl.cdiv(q_len, BLOCK_M)
    # Those that see most keys come first under a causal mask.
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
    first, inner_first, inner_last, last = key_phases(found, start, lower, upper, q_len, kv_len, BLOCK_M, BLOCK_N)
    for phase in tl.static_range(3):
        begin, end = stretch(phase, first, inner_first, inner_last, last)
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
