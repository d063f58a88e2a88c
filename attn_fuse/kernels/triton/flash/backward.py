"""Flash attention backward (FlashAttention-2, arXiv 2307.08691) in three kernels without atomic additions.

Each kernel computes the scores of its blocks again. One gives the gradient of query, and one those of key and value,
over all query heads that share them. The third gives the gradient of a tensor that the score function reads, summed
over the dimensions that the tensor broadcasts over. Every sum has a fixed order, so results do not change between runs.

The arguments are those of `forward.forward`, and these:

saved: the results of `statistics`, fp32 [B, H, 4, stride].
BACKWARD, BACKWARD_INSIDE, TIMES: score_backward, backward_whole and backward_factor of a `ScoreCode`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_fuse.kernels.triton.flash.forward import CHANGING, key_phases
from attn_fuse.kernels.triton.flash.tiles import (
    draws,
    dropped,
    head_base,
    load_rows,
    odd_numbers,
    place,
    rounded,
    span,
    store_rows,
)


@triton.jit(do_not_specialize=CHANGING)
def statistics(
    grad_out, out, row_max, row_sum, saved, stride, reads, numbers, heads, q_len, kv_len, dropout_scale,
    SINK: tl.constexpr, TO_LOG2: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Save four statistics of each query for the other kernels.

    They are shift, the max score or 0; over, dropout_scale / sum; delta, sum(grad_out * out) / dropout_scale; and the
    gradient of the sink's logit, unless SINK is None. With these no kernel has to multiply weights by dropout_scale.
    """
    reads = (reads[0], reads[1], numbers)
    block, h, b = place(tl.cdiv(q_len, BLOCK_M), heads, False)
    start = block * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    x = load_rows(grad_out, head_base(grad_out, b, h), start, q_len, BLOCK_M, VALUE_DIM, BLOCK_V, True)
    y = load_rows(out, head_base(out, b, h), start, q_len, BLOCK_M, VALUE_DIM, BLOCK_V, True)
    plane_of = tl.cast(b, tl.int64) * heads + h
    row, to = plane_of * q_len + rows, saved + plane_of * 4 * stride + rows
    there = rows < q_len
    most = tl.load(row_max + row, mask=there, other=0.0)
    total = tl.load(row_sum + row, mask=there, other=0.0)
    shift = tl.where(most == float("-inf"), 0.0, most)
    over = dropout_scale / tl.where(total == 0.0, float("inf"), total)
    found = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    delta = tl.where(dropout_scale == 0.0, 0.0, found / dropout_scale)
    tl.store(to, shift, mask=there)
    tl.store(to + stride, over, mask=there)
    tl.store(to + 2 * stride, delta, mask=there)
    if SINK is not None:
        sink = SINK(b, h, rows, q_len, kv_len, reads)
        tl.store(to + 3 * stride, -tl.exp2((sink - shift) * TO_LOG2) * over * delta, mask=there)


@triton.jit
def load_statistic(
    saved, b, h, heads, stride, first, q_len, WHICH: tl.constexpr, ROWS: tl.constexpr, CHECKED: tl.constexpr
):
    """Statistic WHICH of ROWS queries from `first` on, with 0 beyond q_len if CHECKED."""
    r = tl.arange(0, ROWS)
    at = saved + ((tl.cast(b, tl.int64) * heads + h) * 4 + WHICH) * stride + first + r
    found = tl.load(at, mask=first + r < q_len, other=0.0) if CHECKED else tl.load(at)
    return found


@triton.jit
def load_statistics(
    saved, b, h, heads, stride, first, q_len,
    WHICH: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Like `load_statistic`, but COUNT statistics from WHICH on in one load: 2, or 4 without the last."""
    r = tl.arange(0, ROWS)
    start = saved + ((tl.cast(b, tl.int64) * heads + h) * 4 + WHICH) * stride + first
    at = start + tl.arange(0, COUNT)[None, :] * stride + r[:, None]
    found = tl.load(at, mask=(first + r < q_len)[:, None], other=0.0) if CHECKED else tl.load(at)
    if COUNT == 2:
        result = tl.split(found)
    else:
        even, odd = tl.split(found.reshape(ROWS, 2, 2))
        x, z = tl.split(even)
        y, _ = tl.split(odd)
        result = x, y, z
    return result


@triton.jit
def weights_again(
    raw, b, h, i, j, q_len, kv_len, reads, shift, over,
    WHOLE: tl.constexpr, SCORE: tl.constexpr, SCORE_INSIDE: tl.constexpr, TO_LOG2: tl.constexpr, RESCALED: tl.constexpr,
):  # fmt: skip
    """The weights of a block of queries and keys. WHOLE: whether every query sees every key of the block."""
    if WHOLE:
        scores = SCORE_INSIDE(raw, b, h, i, j, q_len, None, reads)
    else:
        scores = SCORE(raw, b, h, i, j, q_len, kv_len, reads)
        scores = tl.where(j < kv_len, scores, float("-inf"))
    if WHOLE and RESCALED:
        weights = tl.exp2(scores - shift * TO_LOG2) * over
    else:
        weights = tl.exp2((scores - shift) * TO_LOG2) * over
    return weights


@triton.jit
def gradient_of_raw(
    draw, raw, b, h, i, j, q_len, kv_len, reads,
    WHOLE: tl.constexpr, BACKWARD: tl.constexpr, BACKWARD_INSIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of the product of query and key, without TIMES, from that of the score."""
    if WHOLE and BACKWARD_INSIDE is not None:
        draw = BACKWARD_INSIDE(draw, raw, b, h, i, j, q_len, None, reads)
    elif not WHOLE and BACKWARD is not None:
        draw = BACKWARD(draw, raw, b, h, i, j, q_len, kv_len, reads)
        draw = tl.where(j < kv_len, draw, 0.0)
    return draw


@triton.jit(do_not_specialize=CHANGING)
def backward_query(
    grad_out, query, key, value, dquery, dinput, saved, stride, seed, spans, reads, numbers,
    lower, upper, heads, groups, q_len, kv_len, dropout,
    SCORE: tl.constexpr, SCORE_INSIDE: tl.constexpr, FACTOR: tl.constexpr, BACKWARD: tl.constexpr,
    BACKWARD_INSIDE: tl.constexpr, TIMES: tl.constexpr, TO_LOG2: tl.constexpr, INNER: tl.constexpr,
    RESCALED: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """The gradient of query, and with GRADIENT also that of a tensor with an element for each score.

    dinput: zeros [B, H, Lq, Lk] for the second gradient, or None.
    """
    reads = (reads[0], reads[1], numbers)
    kv_len = rounded(kv_len, EVEN)
    blocks = tl.cdiv(q_len, BLOCK_M)
    block, h, b = place(blocks, heads, SHARED)
    start = (blocks - 1 - block) * BLOCK_M
    rows = start + tl.arange(0, BLOCK_M)
    i = rows[:, None]
    key_start, value_start = head_base(key, b, h // groups), head_base(value, b, h // groups)
    q = load_rows(query, head_base(query, b, h), start, q_len, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    do = load_rows(grad_out, head_base(grad_out, b, h), start, q_len, BLOCK_M, VALUE_DIM, BLOCK_V, True)
    row_shift = load_statistic(saved, b, h, heads, stride, start, q_len, 0, BLOCK_M, True)
    row_over = load_statistic(saved, b, h, heads, stride, start, q_len, 1, BLOCK_M, True)
    row_delta = load_statistic(saved, b, h, heads, stride, start, q_len, 2, BLOCK_M, True)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
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
                v = load_rows(value, value_start, n, kv_len, BLOCK_N, VALUE_DIM, BLOCK_V, phase != 1)
                raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                weights = weights_again(
                    raw, b, h, i, j, q_len, kv_len, reads, row_shift[:, None], row_over[:, None],
                    phase == 1, SCORE, SCORE_INSIDE, TO_LOG2, RESCALED,
                )  # fmt: skip
                dweights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                if seed is not None:
                    dweights = dropped(dweights, of_queries, for_keys, n, dropout)
                dfactor = weights * dweights
                if FACTOR is not None:
                    dweights = dweights * FACTOR(raw, b, h, i, j, q_len, None if phase == 1 else kv_len, reads)
                draw = weights * (dweights - row_delta[:, None])
                if dinput is not None:
                    if phase == 1:
                        of_input = GRADIENT(draw, dfactor, raw, b, h, i, j, q_len, None, reads)
                    else:
                        of_input = GRADIENT(draw, dfactor, raw, b, h, i, j, q_len, kv_len, reads)
                    to = dinput[0] + tl.cast(b, tl.int64) * dinput[1][0] + tl.cast(h, tl.int64) * dinput[1][1]
                    to = to + tl.cast(i, tl.int64) * dinput[1][2] + j
                    there = i < q_len if phase == 1 else (i < q_len) & (j < kv_len)
                    tl.store(to, of_input.to(dinput[0].dtype.element_ty), mask=there)
                draw = gradient_of_raw(
                    draw, raw, b, h, i, j, q_len, kv_len, reads, phase == 1, BACKWARD, BACKWARD_INSIDE
                )
                dq = tl.dot(draw.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(dquery, head_base(dquery, b, h), rows, q_len, dq * TIMES, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=CHANGING)
def backward_key_value(
    grad_out, query, key, value, dkey, dvalue, saved, stride, seed, spans, reads, numbers,
    lower, upper, heads, groups, q_len, kv_len, dropout,
    SCORE: tl.constexpr, SCORE_INSIDE: tl.constexpr, FACTOR: tl.constexpr, BACKWARD: tl.constexpr,
    BACKWARD_INSIDE: tl.constexpr, TIMES: tl.constexpr, TO_LOG2: tl.constexpr, INNER: tl.constexpr,
    RESCALED: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, STATISTICS: tl.constexpr,
    GROUPED: tl.constexpr,
):  # fmt: skip
    """The gradients of key and value, or of one of them, because registers do not hold both sums of wide rows.

    Scores are [keys, queries] here, and so stay in registers for the products with grad_out and query.
    dkey, dvalue: None for a gradient that is not wanted. STATISTICS: `statistics` of a `Config`. GROUPED: whether
    several query heads share a key head.
    """
    reads = (reads[0], reads[1], numbers)
    kv_len = rounded(kv_len, EVEN)
    block, kv_head, b = place(tl.cdiv(kv_len, BLOCK_N), heads // groups, SHARED)
    start = block * BLOCK_N
    columns = start + tl.arange(0, BLOCK_N)
    j = columns[:, None]
    k = load_rows(key, head_base(key, b, kv_head), start, kv_len, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    if dkey is not None:
        v = load_rows(value, head_base(value, b, kv_head), start, kv_len, BLOCK_N, VALUE_DIM, BLOCK_V, True)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if dvalue is not None:
        dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    first, last, inner_first, inner_last = q_len, 0, 0, q_len
    for group in range(groups):
        of_head = span(spans, b, kv_head * groups + group, start, kv_len, BLOCK_N, q_len, INNER)
        first, last = tl.minimum(first, of_head[0]), tl.maximum(last, of_head[1])
        inner_first, inner_last = tl.maximum(inner_first, of_head[2]), tl.minimum(inner_last, of_head[3])
    found = first, last, inner_first, inner_last
    # i - j lies between -upper and -lower.
    least, most = None if upper is None else -upper, None if lower is None else -lower
    phases = key_phases(found, start, least, most, kv_len, q_len, BLOCK_N, BLOCK_M)
    for phase in tl.static_range(3):
        begin, end = phases[phase], phases[phase + 1]
        if phase > 0 or upper is not None or INNER:
            # One loop covers the query heads and their blocks, because two nested loops take many more registers. It
            # counts blocks, because with queries ptxas waits for each product before the next (C7515).
            count = end - begin
            for step in tl.range(0 if GROUPED else begin, groups * count if GROUPED else end):
                h = kv_head * groups + step // count if GROUPED else kv_head
                m = (begin + step % count if GROUPED else step) * BLOCK_M
                rows = m + tl.arange(0, BLOCK_M)
                i = rows[None, :]
                q = load_rows(query, head_base(query, b, h), m, q_len, BLOCK_M, HEAD_DIM, BLOCK_D, phase != 1)
                raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                if phase == 1:
                    scores = SCORE_INSIDE(raw, b, h, i, j, None, kv_len, reads)
                else:
                    scores = SCORE(raw, b, h, i, j, q_len, kv_len, reads)
                    scores = tl.where(i < q_len, scores, float("-inf"))
                if STATISTICS == 4:
                    row_shift, row_over, row_delta = load_statistics(
                        saved, b, h, heads, stride, m, q_len, 0, 4, BLOCK_M, phase != 1
                    )  # fmt: skip
                elif STATISTICS == 2:
                    row_shift, row_over = load_statistics(
                        saved, b, h, heads, stride, m, q_len, 0, 2, BLOCK_M, phase != 1
                    )
                else:
                    row_shift = load_statistic(saved, b, h, heads, stride, m, q_len, 0, BLOCK_M, phase != 1)
                    row_over = load_statistic(saved, b, h, heads, stride, m, q_len, 1, BLOCK_M, phase != 1)
                if phase == 1 and RESCALED:
                    weights = tl.exp2(scores - (row_shift * TO_LOG2)[None, :]) * row_over[None, :]
                else:
                    weights = tl.exp2((scores - row_shift[None, :]) * TO_LOG2) * row_over[None, :]
                do = load_rows(grad_out, head_base(grad_out, b, h), m, q_len, BLOCK_M, VALUE_DIM, BLOCK_V, phase != 1)
                used = weights
                if seed is not None:
                    for_queries, for_keys = draws(seed, b, h, heads)
                    of_keys = odd_numbers(for_keys, columns)
                    keep = dropped(tl.full(weights.shape, 1.0, tl.float32), of_keys, for_queries, m, dropout)
                    used = used * keep
                if FACTOR is not None:
                    factor = FACTOR(raw, b, h, i, j, None if phase == 1 else q_len, kv_len, reads)
                    if phase != 1:
                        factor = tl.where(i < q_len, factor, 0.0)
                    used = used * factor
                if dvalue is not None:
                    dv = tl.dot(used.to(do.dtype), do, dv, input_precision=PRECISION)
                if dkey is not None:
                    dweights = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                    if seed is not None:
                        dweights = dweights * keep
                    if FACTOR is not None:
                        dweights = dweights * factor
                    # Loaded late, because it takes as many registers as a row of scores.
                    if STATISTICS == 2:
                        row_delta, _ = load_statistics(saved, b, h, heads, stride, m, q_len, 2, 2, BLOCK_M, phase != 1)
                    elif STATISTICS == 1:
                        row_delta = load_statistic(saved, b, h, heads, stride, m, q_len, 2, BLOCK_M, phase != 1)
                    draw = weights * (dweights - row_delta[None, :])
                    if phase != 1 and BACKWARD is not None:
                        draw = BACKWARD(draw, raw, b, h, i, j, q_len, kv_len, reads)
                        draw = tl.where(i < q_len, draw, 0.0)
                    elif phase == 1 and BACKWARD_INSIDE is not None:
                        draw = BACKWARD_INSIDE(draw, raw, b, h, i, j, None, kv_len, reads)
                    dk = tl.dot(draw.to(q.dtype), q, dk, input_precision=PRECISION)
    if dkey is not None:
        store_rows(dkey, head_base(dkey, b, kv_head), columns, kv_len, dk * TIMES, HEAD_DIM, BLOCK_D)
    if dvalue is not None:
        store_rows(dvalue, head_base(dvalue, b, kv_head), columns, kv_len, dv, VALUE_DIM, BLOCK_V)


@triton.jit
def in_reach(row, column, lower, upper, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether the bounds let any query of the tile at (row, column) see any key of it."""
    reach = True
    if upper is not None:
        reach = reach & (column - (row + BLOCK_M - 1) <= upper)
    if lower is not None:
        reach = reach & (column + BLOCK_N - 1 - row >= lower)
    return reach


@triton.jit
def digit(number, base, known, IS_KNOWN: tl.constexpr):
    """The last digit of `number` in `base`, and the other digits. IS_KNOWN: the digit is `known`, not in `number`."""
    return (known, number) if IS_KNOWN else (number % base, number // base)


@triton.jit(do_not_specialize=CHANGING)
def backward_input(
    grad_out, query, key, value, dinput, saved, stride, seed, reads, numbers, first_row,
    lower, upper, heads, groups, q_len, kv_len, dropout, batch, row_count, parts,
    SCORE: tl.constexpr, FACTOR: tl.constexpr, GRADIENT: tl.constexpr, TO_LOG2: tl.constexpr,
    ALONG_B: tl.constexpr, ALONG_H: tl.constexpr, ALONG_I: tl.constexpr, ALONG_J: tl.constexpr, EVEN: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a node that reads an input, for queries [first_row, first_row + row_count).

    dinput: contiguous [parts, batch, heads, row_count, kv_len], with size 1 for each dimension whose ALONG is False.
    The gradient is summed over these dimensions, in `parts` parts.
    """
    reads = (reads[0], reads[1], numbers)
    kv_len = rounded(kv_len, EVEN)
    row_blocks, column_blocks = tl.cdiv(row_count, BLOCK_M), tl.cdiv(kv_len, BLOCK_N)
    # The element this program writes and the summand are numbers whose digits are positions in tiles.
    own_n, number = digit(tl.program_id(0), column_blocks, 0, not ALONG_J)
    own_m, number = digit(number, row_blocks, 0, not ALONG_I)
    own_h, number = digit(number, heads, 0, not ALONG_H)
    own_b, number = digit(number, batch, 0, not ALONG_B)
    count = (1 if ALONG_J else column_blocks) * (1 if ALONG_I else row_blocks)
    count = count * (1 if ALONG_H else heads) * (1 if ALONG_B else batch)
    if ALONG_I and ALONG_J:
        # All summands belong to this tile, and a branch in the loop would keep Triton from copying ahead.
        row, column = first_row + own_m * BLOCK_M, own_n * BLOCK_N
        count = count if in_reach(row, column, lower, upper, BLOCK_M, BLOCK_N) else 0
    each = tl.cdiv(count, parts)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for summand in range(number * each, tl.minimum(number * each + each, count)):
        n, left = digit(summand, column_blocks, own_n, ALONG_J)
        m, left = digit(left, row_blocks, own_m, ALONG_I)
        h, left = digit(left, heads, own_h, ALONG_H)
        b = own_b if ALONG_B else left
        row, column = first_row + m * BLOCK_M, n * BLOCK_N
        if (ALONG_I and ALONG_J) or in_reach(row, column, lower, upper, BLOCK_M, BLOCK_N):
            rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
            i, j = rows[:, None], columns[None, :]
            q = load_rows(query, head_base(query, b, h), row, q_len, BLOCK_M, HEAD_DIM, BLOCK_D, True)
            k = load_rows(key, head_base(key, b, h // groups), column, kv_len, BLOCK_N, HEAD_DIM, BLOCK_D, True)
            v = load_rows(value, head_base(value, b, h // groups), column, kv_len, BLOCK_N, VALUE_DIM, BLOCK_V, True)
            do = load_rows(grad_out, head_base(grad_out, b, h), row, q_len, BLOCK_M, VALUE_DIM, BLOCK_V, True)
            row_shift = load_statistic(saved, b, h, heads, stride, row, q_len, 0, BLOCK_M, True)
            row_over = load_statistic(saved, b, h, heads, stride, row, q_len, 1, BLOCK_M, True)
            row_delta = load_statistic(saved, b, h, heads, stride, row, q_len, 2, BLOCK_M, True)
            raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scores = SCORE(raw, b, h, i, j, q_len, kv_len, reads)
            weights = tl.exp2((scores - row_shift[:, None]) * TO_LOG2) * row_over[:, None]
            dweights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            if seed is not None:
                for_queries, for_keys = draws(seed, b, h, heads)
                of_queries = odd_numbers(for_queries, rows)
                dweights = dropped(dweights, of_queries, for_keys, column, dropout)
            dfactor = weights * dweights
            if FACTOR is not None:
                dweights = dweights * FACTOR(raw, b, h, i, j, q_len, kv_len, reads)
            dscores = weights * (dweights - row_delta[:, None])
            found = GRADIENT(dscores, dfactor, raw, b, h, i, j, q_len, kv_len, reads)
            total += tl.where((i < first_row + row_count) & (j < kv_len), found, 0.0)
    own_rows = own_m * BLOCK_M + tl.arange(0, BLOCK_M)
    own_columns = own_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # How many elements of the gradient precede this program's.
    before = tl.cast(number, tl.int64)
    if ALONG_B:
        before = before * batch + own_b
    if ALONG_H:
        before = before * heads + own_h
    if ALONG_I and ALONG_J:
        at = (before * row_count + own_rows[:, None]) * kv_len + own_columns[None, :]
        mask = (own_rows < row_count)[:, None] & (own_columns < kv_len)[None, :]
        tl.store(dinput + at, total.to(dinput.dtype.element_ty), mask=mask)
    elif ALONG_I:
        summed = tl.sum(total, 1)
        tl.store(dinput + before * row_count + own_rows, summed.to(dinput.dtype.element_ty), mask=own_rows < row_count)
    elif ALONG_J:
        summed = tl.sum(total, 0)
        tl.store(dinput + before * kv_len + own_columns, summed.to(dinput.dtype.element_ty), mask=own_columns < kv_len)
    else:
        tl.store(dinput + before, tl.sum(total).to(dinput.dtype.element_ty))
