"""Flash attention forward for Hopper in Gluon, designed like FlashAttention-3 (arXiv 2407.08608).

One warp has the bulk copy engine copy blocks of keys and values, and two groups of four warps take 64 queries each. A
group's product with the next keys overlaps with the product of the last weights and values, and its softmax with the
products of the other group. No warp ever waits for all warps of the program.

A barrier counts phases. On a new barrier, a wait for phase 0 lasts until the phase is complete, and a wait for phase 1
does not block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_fuse.kernels.triton.flash import configs
from attn_fuse.kernels.triton.flash.forward import CHANGING, key_phases, weighted
from attn_fuse.kernels.triton.flash.tiles import head_base, place, span

# The queries of a warp group, and the number of groups.
ROWS, GROUPS = gl.constexpr(configs.GROUP_ROWS), gl.constexpr(configs.GROUPS)


@gluon.jit
def begun(COUNT: gl.constexpr, BY: gl.constexpr):
    """COUNT barriers, each of which completes a phase after BY arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(barriers.index(n), count=BY)
    return barriers


@gluon.jit(do_not_specialize=CHANGING)
def bulk_forward(
    query, key, value, out, row_max, row_sum, seed, spans, reads, numbers,
    lower, upper, heads, groups, q_len, kv_len,
    SCORE: gl.constexpr, SCORE_INSIDE: gl.constexpr, SLOPE: gl.constexpr, SINK: gl.constexpr,
    TO_LOG2: gl.constexpr, INNER: gl.constexpr, RESCALED: gl.constexpr, VALUE_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Like `forward.forward`, without dropout (seed is None) or a factor.

    query, key, value: descriptors of [B, H or Hkv, len, dim], of blocks [1, 1, ROWS, BLOCK_D], [1, 1, BLOCK_N, BLOCK_D]
    and [1, 1, BLOCK_N, BLOCK_V]. STAGES: the number of blocks of keys, and of values, in shared memory.
    """
    reads = (reads[0], reads[1], numbers)
    blocks = gl.cdiv(q_len, GROUPS * ROWS)
    block, h, b = place(blocks, heads, False)
    start = (blocks - 1 - block) * (GROUPS * ROWS)
    found = span(spans, b, h, start, q_len, GROUPS * ROWS, kv_len, INNER)
    phases = key_phases(found, start, lower, upper, q_len, kv_len, GROUPS * ROWS, BLOCK_N)
    # The loop below needs a first block even if the queries see none.
    begin, end = phases[0], gl.maximum(phases[3], phases[0] + 1)
    q = gl.allocate_shared_memory(query.dtype, [GROUPS, 1, 1, ROWS, BLOCK_D], query.layout)
    k = gl.allocate_shared_memory(key.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], key.layout)
    v = gl.allocate_shared_memory(value.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_V], value.layout)
    # Barriers for: queries have arrived; keys have arrived, and may be replaced; values have, and may be.
    barriers = begun(GROUPS, 1), begun(STAGES, 1), begun(STAGES, GROUPS), begun(STAGES, 1), begun(STAGES, GROUPS)
    fence_async_shared()
    results = out, row_max, row_sum
    gl.warp_specialize(
        [
            (consumer, (
                q, k, v, barriers, results, reads, b, h, heads, start, phases, begin, end, q_len, kv_len,
                0, SCORE, SCORE_INSIDE, SLOPE, SINK, TO_LOG2, INNER or lower is not None, RESCALED, VALUE_DIM,
                BLOCK_V, BLOCK_N, STAGES,
            )),
            (consumer, (
                q, k, v, barriers, results, reads, b, h, heads, start, phases, begin, end, q_len, kv_len,
                1, SCORE, SCORE_INSIDE, SLOPE, SINK, TO_LOG2, INNER or lower is not None, RESCALED, VALUE_DIM,
                BLOCK_V, BLOCK_N, STAGES,
            )),
            (producer, (query, key, value, q, k, v, barriers, b, h, groups, start, begin, end, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def producer(
    query, key, value, q, k, v, barriers, b, h, groups, start, begin, end, BLOCK_N: gl.constexpr, STAGES: gl.constexpr
):
    """Copies the queries of both groups, then each block of keys and of values into the next free place."""
    q_there, k_there, k_free, v_there, v_free = barriers
    of_keys = h // groups
    for group in gl.static_range(GROUPS):
        mbarrier.expect(q_there.index(group), query.block_type.nbytes)
        tma.async_copy_global_to_shared(query, [b, h, start + group * ROWS, 0], q_there.index(group), q.index(group))
    for n in range(begin, end):
        stage, turn = (n - begin) % STAGES, ((n - begin) // STAGES) & 1
        mbarrier.wait(k_free.index(stage), turn ^ 1)
        mbarrier.expect(k_there.index(stage), key.block_type.nbytes)
        tma.async_copy_global_to_shared(key, [b, of_keys, n * BLOCK_N, 0], k_there.index(stage), k.index(stage))
        mbarrier.wait(v_free.index(stage), turn ^ 1)
        mbarrier.expect(v_there.index(stage), value.block_type.nbytes)
        tma.async_copy_global_to_shared(value, [b, of_keys, n * BLOCK_N, 0], v_there.index(stage), v.index(stage))


@gluon.jit
def rows_of(tile):
    """A tile of four dimensions, as a descriptor has it, as a matrix."""
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def store_rows(tensor, b, h, first, length, sums, WIDTH: gl.constexpr, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Store ROWS rows from `first` on of a tensor [B, H, len, WIDTH]."""
    at = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    to = at.to(gl.int64)[:, None] * tensor[1][2] + d.to(gl.int64)[None, :] * tensor[1][3]
    there = (at < length)[:, None] & (d < WIDTH)[None, :]
    gl.store(head_base(tensor, b, h) + to, sums.to(tensor[0].dtype.element_ty), mask=there)


@gluon.jit
def consumer(
    q, k, v, barriers, results, reads, b, h, heads, start, phases, begin, end, q_len, kv_len,
    GROUP: gl.constexpr, SCORE: gl.constexpr, SCORE_INSIDE: gl.constexpr, SLOPE: gl.constexpr, SINK: gl.constexpr,
    TO_LOG2: gl.constexpr, BEFORE: gl.constexpr, RESCALED: gl.constexpr, VALUE_DIM: gl.constexpr,
    BLOCK_V: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Computes the rows of one group. BEFORE: whether blocks that the mask cuts may precede the whole blocks."""
    q_there, k_there, k_free, v_there, v_free = barriers
    out, row_max, row_sum = results
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_V, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=of_sums, k_width=2)
    of_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    of_columns: gl.constexpr = gl.SliceLayout(0, of_scores)
    rows = start + GROUP * ROWS + gl.arange(0, ROWS, of_rows)
    i = rows[:, None]
    if SINK is None:
        greatest = gl.full([ROWS], float("-inf"), gl.float32, of_rows)
        total = gl.zeros([ROWS], gl.float32, of_rows)
    else:
        greatest = SINK(b, h, rows, q_len, kv_len, reads)
        total = gl.where(greatest == float("-inf"), 0.0, 1.0)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, of_scores)
    acc = gl.zeros([ROWS, BLOCK_V], gl.float32, of_sums)
    mbarrier.wait(q_there.index(GROUP), 0)
    queries = rows_of(q.index(GROUP))
    mbarrier.wait(k_there.index(0), 0)
    raw = warpgroup_mma(queries, rows_of(k.index(0)).permute((1, 0)), nothing, use_acc=False, is_async=True)
    raw = warpgroup_mma_wait(0, deps=(raw,))
    mbarrier.arrive(k_free.index(0), count=1)
    j = (begin * BLOCK_N + gl.arange(0, BLOCK_N, of_columns))[None, :]
    weights, _, greatest, total = weighted(
        raw, b, h, i, j, q_len, kv_len, reads, greatest, total,
        False, SCORE, SCORE_INSIDE, SLOPE, TO_LOG2, RESCALED,
    )  # fmt: skip
    used = gl.convert_layout(weights.to(q.dtype), of_weights)
    for phase in gl.static_range(3):
        first, last = phases[phase], phases[phase + 1]
        if phase > 0 or BEFORE:
            for n in range(gl.maximum(first, begin + 1), last):
                count = n - begin
                stage, before = count % STAGES, (count - 1) % STAGES
                mbarrier.wait(k_there.index(stage), (count // STAGES) & 1)
                keys = rows_of(k.index(stage)).permute((1, 0))
                scored = warpgroup_mma(queries, keys, nothing, use_acc=False, is_async=True)
                mbarrier.wait(v_there.index(before), ((count - 1) // STAGES) & 1)
                summed = warpgroup_mma(used, rows_of(v.index(before)), acc, is_async=True)
                raw = warpgroup_mma_wait(1, deps=(scored,))
                mbarrier.arrive(k_free.index(stage), count=1)
                j = (n * BLOCK_N + gl.arange(0, BLOCK_N, of_columns))[None, :]
                weights, shrink, greatest, total = weighted(
                    raw, b, h, i, j, q_len, kv_len, reads, greatest, total,
                    phase == 1, SCORE, SCORE_INSIDE, SLOPE, TO_LOG2, RESCALED,
                )  # fmt: skip
                following = gl.convert_layout(weights.to(q.dtype), of_weights)
                # ptxas moves this wait before the exponentials. An H200 is no faster if a barrier keeps it after them,
                # because the other group multiplies meanwhile.
                acc, used = warpgroup_mma_wait(0, deps=(summed, following))
                mbarrier.arrive(v_free.index(before), count=1)
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, of_sums))[:, None]
    count = end - begin - 1
    mbarrier.wait(v_there.index(count % STAGES), (count // STAGES) & 1)
    acc = warpgroup_mma(used, rows_of(v.index(count % STAGES)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    acc = acc / gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, of_sums))[:, None]
    store_rows(out, b, h, start + GROUP * ROWS, q_len, acc, VALUE_DIM, BLOCK_V, of_sums)
    row = (b.to(gl.int64) * heads + h) * q_len + rows
    gl.store(row_max + row, greatest, mask=rows < q_len)
    gl.store(row_sum + row, total, mask=rows < q_len)
