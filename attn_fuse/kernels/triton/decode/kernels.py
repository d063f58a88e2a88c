"""The two Triton kernels of `decode`: one attends over a share of the keys, the other joins the shares."""

from __future__ import annotations

import triton
import triton.language as tl

# These change from call to call, and to compile a kernel for each of their values would gain nothing.
_CHANGING = ["numbers", "kv_len", "first_key", "last_key", "splits", "stride_kb", "stride_kh", "stride_vb", "stride_vh"]


@triton.jit(do_not_specialize=_CHANGING)
def attend_split(
    query, key, value, out, statistics, reads, numbers,
    stride_qb, stride_qh, stride_qi, stride_qd,
    stride_kb, stride_kh, stride_kj, stride_kd,
    stride_vb, stride_vh, stride_vj, stride_vd,
    kv_heads, q_len, kv_len, first_key, last_key, splits,
    GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
    SCORE: tl.constexpr, FACTOR: tl.constexpr, SINK: tl.constexpr, VISIBLE: tl.constexpr,
    UNLESS_EMPTY: tl.constexpr, STEP: tl.constexpr, TO_LOG2: tl.constexpr, SCAN: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Keys [first_key, last_key) of one batch entry and key head, every `splits`-th block of them.

    A row is a query of one of the GROUPS heads: row = group * q_len + i. out, and statistics (maximum of the scores and
    sum of the weights): contiguous [batch, kv_heads, GROUPS, q_len, splits, VALUE_DIM or 2]. WHOLE: there is one split,
    out is final, and statistics are not written.
    SCORE, FACTOR, SINK, VISIBLE, reads: as `scores` gives them; TO_LOG2: a difference of scores times this is one of
    base 2. The strides of key and value but those of d are in units of STEP, by which they are known to be aligned.
    UNLESS_EMPTY: a query that sees no key of all there are has weights for all of them.
    SCAN: blocks that are searched at a time for visible keys.
    """
    reads = (reads[0], reads[1], numbers)
    tiles = tl.cdiv(GROUPS * q_len, ROWS)
    plane = tl.program_id(0) // tiles
    split = tl.program_id(1)
    b = plane // kv_heads
    kv_head = plane % kv_heads
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    used = row < GROUPS * q_len
    # Rows to fill the tile repeat one: of a head that is not there nothing could be read.
    row = tl.where(used, row, 0)
    h = (kv_head * GROUPS + row // q_len)[:, None]
    i = (row % q_len)[:, None]
    n = tl.arange(0, KEYS)
    d = tl.arange(0, INNER).to(tl.int64)
    e = tl.arange(0, WIDTH).to(tl.int64)

    offset = b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + i.to(tl.int64) * stride_qi
    q = tl.load(query + offset + d[None, :] * stride_qd, mask=d[None, :] < HEAD_DIM, other=0.0)
    key += (b.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh) * STEP
    value += (b.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh) * STEP

    blocks = tl.cdiv(last_key - first_key, KEYS)
    own = (blocks - split + splits - 1) // splits
    start = 0
    stop = own
    if VISIBLE is not None:
        start = own
        stop = 0
        sees = tl.zeros([ROWS], tl.int32)
        for scanned in range(0, own, SCAN):
            block = scanned + tl.arange(0, SCAN * KEYS) // KEYS
            j = (first_key + (block * splits + split) * KEYS + tl.arange(0, SCAN * KEYS) % KEYS)[None, :]
            seen = (VISIBLE(b, h, i, j, q_len, kv_len, reads) & (j < last_key)).to(tl.int32)
            if UNLESS_EMPTY:
                sees = tl.maximum(sees, tl.max(seen, 1))
            seen = tl.max(seen, 0) > 0
            start = tl.minimum(start, tl.min(tl.where(seen, block, own), 0))
            stop = tl.maximum(stop, tl.max(tl.where(seen, block + 1, 0), 0))
        if UNLESS_EMPTY:
            # What a query does not see among the keys of this program it may see among the others'.
            scanned = first_key
            while (tl.min(sees, 0) == 0) & (scanned < last_key):
                j = (scanned + tl.arange(0, SCAN * KEYS))[None, :]
                seen = (VISIBLE(b, h, i, j, q_len, kv_len, reads) & (j < last_key)).to(tl.int32)
                sees = tl.maximum(sees, tl.max(seen, 1))
                scanned += SCAN * KEYS
            if tl.min(sees, 0) == 0:
                start = 0
                stop = own

    most = tl.full([ROWS], float("-inf"), tl.float32)
    if SINK is not None:
        # It is one more key of the first program.
        most = tl.where(split == 0, tl.reshape(SINK(b, h, i, q_len, kv_len, reads), [ROWS]), most)
    total = tl.exp2((most - _shift(most)) * TO_LOG2)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for block in tl.range(start, stop, num_stages=STAGES):
        first = first_key + (block * splits + split) * KEYS
        j = (first + n)[None, :]
        at_key = (first + n).to(tl.int64)[None, :] * stride_kj * STEP + d[:, None] * stride_kd
        k = tl.load(key + at_key, mask=(j < last_key) & (d[:, None] < HEAD_DIM), other=0.0)
        at_value = (first + n).to(tl.int64)[:, None] * stride_vj * STEP + e[None, :] * stride_vd
        v = tl.load(value + at_value, mask=(first + n < last_key)[:, None] & (e[None, :] < VALUE_DIM), other=0.0)
        raw = tl.dot(q, k, input_precision="ieee")
        scores = SCORE(raw, b, h, i, j, q_len, kv_len, reads)
        scores = tl.where(j < last_key, scores, float("-inf"))
        last = most
        most = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2((scores - _shift(most)[:, None]) * TO_LOG2)
        shrink = tl.exp2((last - _shift(most)) * TO_LOG2)
        total = total * shrink + tl.sum(weights, 1)
        if FACTOR is not None:
            weights *= FACTOR(raw, b, h, i, j, q_len, kv_len, reads)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")

    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    at = (plane.to(tl.int64) * (GROUPS * q_len) + row) * splits + split
    if WHOLE:
        acc = tl.where(total[:, None] == 0.0, 0.0, acc / total[:, None])
    else:
        tl.store(statistics + at * 2, most, mask=used)
        tl.store(statistics + at * 2 + 1, total, mask=used)
    tl.store(out + at[:, None] * VALUE_DIM + e[None, :], acc, mask=used[:, None] & (e[None, :] < VALUE_DIM))


@triton.jit(do_not_specialize=["splits"])
def join_splits(
    out, part, statistics, splits,
    VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, TO_LOG2: tl.constexpr,
):  # fmt: skip
    """One row of out [rows, VALUE_DIM] from what `attend_split` has left in part and statistics."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    n = tl.arange(0, SPLITS)
    statistics += row * splits * 2
    part += row * splits * VALUE_DIM
    most = tl.full([SPLITS], float("-inf"), tl.float32)
    for first in range(0, splits, SPLITS):
        most = tl.maximum(most, tl.load(statistics + (first + n) * 2, mask=first + n < splits, other=float("-inf")))
    most = _shift(tl.max(most, 0))
    total = tl.zeros([SPLITS], tl.float32)
    acc = tl.zeros([SPLITS, WIDTH], tl.float32)
    for first in range(0, splits, SPLITS):
        some = first + n < splits
        shrink = tl.load(statistics + (first + n) * 2, mask=some, other=float("-inf")) - most
        shrink = tl.exp2(shrink * TO_LOG2)
        total += shrink * tl.load(statistics + (first + n) * 2 + 1, mask=some, other=0.0)
        at = (first + n)[:, None] * VALUE_DIM + e[None, :]
        acc += shrink[:, None] * tl.load(part + at, mask=some[:, None] & (e[None, :] < VALUE_DIM), other=0.0)
    total = tl.sum(total, 0)
    joined = tl.where(total == 0.0, 0.0, tl.sum(acc, 0) / total)
    tl.store(out + row * VALUE_DIM + e, joined, mask=e < VALUE_DIM)


@triton.jit
def _shift(most):
    # -inf less -inf is NaN, and a query that sees no key has a weight of exp(-inf) for each.
    return tl.where(most == float("-inf"), 0.0, most)
