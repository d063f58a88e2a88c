"""The gradient of query for Hopper in Gluon. One warp copies and two groups multiply, as in `hopper.bulk_forward`.

Each product of a group waits for the one before it, while the other group's products run. The gradients of key and
value have no such kernel: on an H200 it was as slow as `backward.backward_key_value`, because two sums leave too few
registers.
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

from attn_fuse.kernels.triton.flash.backward import gradient_of_raw, weights_again
from attn_fuse.kernels.triton.flash.forward import CHANGING, key_phases
from attn_fuse.kernels.triton.flash.hopper import GROUPS, ROWS, begun, rows_of, store_rows
from attn_fuse.kernels.triton.flash.tiles import place, span


@gluon.jit(do_not_specialize=CHANGING)
def bulk_query(
    grad_out, query, key, value, dquery, dinput, saved, stride, seed, spans, reads, numbers,
    lower, upper, heads, groups, q_len, kv_len,
    SCORE: gl.constexpr, SCORE_INSIDE: gl.constexpr, BACKWARD: gl.constexpr, BACKWARD_INSIDE: gl.constexpr,
    TIMES: gl.constexpr, TO_LOG2: gl.constexpr, INNER: gl.constexpr, RESCALED: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Like `backward.backward_query`, without dropout, a factor, or a gradient of an input: dinput and seed are None.

    grad_out, query, key, value: descriptors of blocks of ROWS queries and of BLOCK_N keys.
    """
    reads = (reads[0], reads[1], numbers)
    blocks = gl.cdiv(q_len, GROUPS * ROWS)
    block, h, b = place(blocks, heads, False)
    start = (blocks - 1 - block) * (GROUPS * ROWS)
    found = span(spans, b, h, start, q_len, GROUPS * ROWS, kv_len, INNER)
    phases = key_phases(found, start, lower, upper, q_len, kv_len, GROUPS * ROWS, BLOCK_N)
    q = gl.allocate_shared_memory(query.dtype, [GROUPS, 1, 1, ROWS, BLOCK_D], query.layout)
    do = gl.allocate_shared_memory(grad_out.dtype, [GROUPS, 1, 1, ROWS, BLOCK_V], grad_out.layout)
    k = gl.allocate_shared_memory(key.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], key.layout)
    v = gl.allocate_shared_memory(value.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_V], value.layout)
    barriers = begun(GROUPS, 1), begun(STAGES, 1), begun(STAGES, 1), begun(STAGES, GROUPS)
    fence_async_shared()
    tiles = q, do, k, v
    given = dquery, saved, stride, reads, b, h, heads, start, phases, q_len, kv_len
    gl.warp_specialize(
        [
            (of_queries, (
                tiles, barriers, given, 0, SCORE, SCORE_INSIDE, BACKWARD, BACKWARD_INSIDE, TIMES, TO_LOG2,
                INNER or lower is not None, RESCALED, HEAD_DIM, BLOCK_D, BLOCK_N, STAGES,
            )),
            (of_queries, (
                tiles, barriers, given, 1, SCORE, SCORE_INSIDE, BACKWARD, BACKWARD_INSIDE, TIMES, TO_LOG2,
                INNER or lower is not None, RESCALED, HEAD_DIM, BLOCK_D, BLOCK_N, STAGES,
            )),
            (copy_keys, (
                grad_out, query, key, value, tiles, barriers, b, h, groups, start, phases[0], phases[3], BLOCK_N,
                STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def copy_keys(
    grad_out, query, key, value, tiles, barriers, b, h, groups, start, begin, end,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q, do, k, v = tiles
    q_there, k_there, v_there, free = barriers
    for group in gl.static_range(GROUPS):
        first = start + group * ROWS
        mbarrier.expect(q_there.index(group), query.block_type.nbytes + grad_out.block_type.nbytes)
        tma.async_copy_global_to_shared(query, [b, h, first, 0], q_there.index(group), q.index(group))
        tma.async_copy_global_to_shared(grad_out, [b, h, first, 0], q_there.index(group), do.index(group))
    for n in range(begin, end):
        stage, turn = (n - begin) % STAGES, ((n - begin) // STAGES) & 1
        mbarrier.wait(free.index(stage), turn ^ 1)
        mbarrier.expect(k_there.index(stage), key.block_type.nbytes)
        tma.async_copy_global_to_shared(key, [b, h // groups, n * BLOCK_N, 0], k_there.index(stage), k.index(stage))
        mbarrier.expect(v_there.index(stage), value.block_type.nbytes)
        tma.async_copy_global_to_shared(value, [b, h // groups, n * BLOCK_N, 0], v_there.index(stage), v.index(stage))


@gluon.jit
def of_queries(
    tiles, barriers, given, GROUP: gl.constexpr, SCORE: gl.constexpr, SCORE_INSIDE: gl.constexpr,
    BACKWARD: gl.constexpr, BACKWARD_INSIDE: gl.constexpr, TIMES: gl.constexpr, TO_LOG2: gl.constexpr,
    BEFORE: gl.constexpr, RESCALED: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Computes the gradient of one group's queries. BEFORE: as in `hopper.consumer`."""
    q, do, k, v = tiles
    q_there, k_there, v_there, free = barriers
    dquery, saved, stride, reads, b, h, heads, start, phases, q_len, kv_len = given
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_D, 16])
    of_gradients: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=of_sums, k_width=2)
    first = start + GROUP * ROWS
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, of_scores))
    i, there = rows[:, None], rows < q_len
    statistics = saved + (b.to(gl.int64) * heads + h) * 4 * stride + rows
    shift = gl.load(statistics, mask=there, other=0.0)[:, None]
    over = gl.load(statistics + stride, mask=there, other=0.0)[:, None]
    delta = gl.load(statistics + 2 * stride, mask=there, other=0.0)[:, None]
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, of_scores)
    dq = gl.zeros([ROWS, BLOCK_D], gl.float32, of_sums)
    mbarrier.wait(q_there.index(GROUP), 0)
    queries, pulled = rows_of(q.index(GROUP)), rows_of(do.index(GROUP))
    for phase in gl.static_range(3):
        begin, end = phases[phase], phases[phase + 1]
        if phase > 0 or BEFORE:
            for n in range(begin, end):
                stage, turn = (n - phases[0]) % STAGES, ((n - phases[0]) // STAGES) & 1
                keys = rows_of(k.index(stage))
                mbarrier.wait(k_there.index(stage), turn)
                scored = warpgroup_mma(queries, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)
                mbarrier.wait(v_there.index(stage), turn)
                values = rows_of(v.index(stage)).permute((1, 0))
                valued = warpgroup_mma(pulled, values, nothing, use_acc=False, is_async=True)
                raw = warpgroup_mma_wait(1, deps=(scored,))
                j = (n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, of_scores)))[None, :]
                weights = weights_again(
                    raw, b, h, i, j, q_len, kv_len, reads, shift, over,
                    phase == 1, SCORE, SCORE_INSIDE, TO_LOG2, RESCALED,
                )  # fmt: skip
                dweights = warpgroup_mma_wait(0, deps=(valued,))
                draw = gradient_of_raw(
                    weights * (dweights - delta), raw, b, h, i, j, q_len, kv_len, reads,
                    phase == 1, BACKWARD, BACKWARD_INSIDE,
                )  # fmt: skip
                used = gl.convert_layout(draw.to(q.dtype), of_gradients)
                dq = warpgroup_mma(used, keys, dq, is_async=True)
                dq = warpgroup_mma_wait(0, deps=(dq,))
                mbarrier.arrive(free.index(stage), count=1)
    store_rows(dquery, b, h, first, q_len, dq * TIMES, HEAD_DIM, BLOCK_D, of_sums)
