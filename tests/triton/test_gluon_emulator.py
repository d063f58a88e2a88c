"""The emulator of Gluon kernels: right kernels compute what torch does, and each fault in one is found.

The kernels are written as those that run on a Hopper GPU: one producer of copies, two consumers of 64 rows each.
"""

from __future__ import annotations

import pytest
import torch

from tests.triton.interpreted import interpreted, run_interpreted

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_fuse.kernels.triton.flash.tiles import head_base
from tests.triton.gluon_emulator import emulate
from tests.triton.gluon_machine import Deadlock, Fault

ROWS = gl.constexpr(64)
STAGES = gl.constexpr(2)
LOG2E = gl.constexpr(1.4426950408889634)


def test_in_a_process_that_interprets() -> None:
    run_interpreted(__file__)


# ---- out = left @ right, with the blocks of right in a ring


@gluon.jit
def load_blocks(left, right, a, b, a_full, full, empty, blocks, FAULT: gl.constexpr):
    for c in gl.static_range(2):
        mbarrier.expect(a_full.index(c), left.block_type.nbytes)
        tma.async_copy_global_to_shared(left, [c * ROWS, 0], a_full.index(c), a.index(c))
    for n in range(blocks):
        s, phase = n % STAGES, n // STAGES & 1
        if FAULT == "empty in the wrong phase":
            mbarrier.wait(empty.index(s), phase)
        elif FAULT != "no wait for empty":
            mbarrier.wait(empty.index(s), phase ^ 1)
        if FAULT == "expects too much":
            mbarrier.expect(full.index(s), right.block_type.nbytes + 2)
        elif FAULT == "expects too little":
            mbarrier.expect(full.index(s), right.block_type.nbytes - 2)
        else:
            mbarrier.expect(full.index(s), right.block_type.nbytes)
        tma.async_copy_global_to_shared(right, [0, n * right.block_shape[1]], full.index(s), b.index(s))


@gluon.jit
def multiply(a, b, a_full, full, empty, out, out_stride, columns, blocks, C: gl.constexpr, FAULT: gl.constexpr):
    N: gl.constexpr = b.shape[2]
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    zero = gl.zeros([ROWS, N], gl.float32, WIDE)
    i = (C * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE)))[:, None]
    mbarrier.wait(a_full.index(C), 0)
    for n in range(blocks):
        s = n % STAGES
        if FAULT == "full in the wrong phase":
            mbarrier.wait(full.index(s), n // STAGES & 1 ^ 1)
        elif FAULT != "no wait for full":
            mbarrier.wait(full.index(s), n // STAGES & 1)
        x = warpgroup_mma(a.index(C), b.index(s), zero, use_acc=False, is_async=True)
        if FAULT == "arrives before the wait":
            mbarrier.arrive(empty.index(s), count=1)
        if FAULT == "waits for too few":
            x = warpgroup_mma_wait(1, deps=(x,))
        elif FAULT != "no wait for the product":
            x = warpgroup_mma_wait(0, deps=(x,))
        if FAULT != "arrives before the wait":
            mbarrier.arrive(empty.index(s), count=2 if FAULT == "arrives twice" else 1)
        j = (n * N + gl.arange(0, N, gl.SliceLayout(0, WIDE)))[None, :]
        gl.store(out + i.to(gl.int64) * out_stride + j, x.to(out.dtype.element_ty), mask=j < columns)


@gluon.jit
def product(left, right, out, columns, FAULT: gl.constexpr = "none"):
    N: gl.constexpr = right.block_shape[1]
    a = gl.allocate_shared_memory(left.dtype, [2, ROWS, left.block_shape[1]], left.layout)
    b = gl.allocate_shared_memory(right.dtype, [STAGES, right.block_shape[0], N], right.layout)
    a_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    consumers: gl.constexpr = 1 if FAULT == "too small a count" else 3 if FAULT == "too large a count" else 2
    for n in gl.static_range(2):
        mbarrier.init(a_full.index(n), count=1)
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=consumers)
    fence_async_shared()
    blocks = gl.cdiv(columns, N)
    gl.warp_specialize(
        [
            (multiply, (a, b, a_full, full, empty, out[0], out[1][0], columns, blocks, 0, FAULT)),
            (multiply, (a, b, a_full, full, empty, out[0], out[1][0], columns, blocks, 1, FAULT)),
            (load_blocks, (left, right, a, b, a_full, full, empty, blocks, FAULT)),
        ],
        [4, 1],
        [240, 24],
    )


def described(x: torch.Tensor, *block: int) -> TensorDescriptor:
    kind = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[x.dtype]
    return TensorDescriptor.from_tensor(x, list(block), gl.NVMMASharedLayout.get_default_for(list(block), kind))


def multiplied(seed: int, fault: str = "none", columns: int = 200, dtype: torch.dtype = torch.float16) -> None:
    """Run `product` and compare what it computes."""
    torch.manual_seed(seed)
    left, right = torch.randn(128, 64, dtype=dtype), torch.randn(64, columns, dtype=dtype)
    out = torch.full((128, columns), float("nan"))
    emulate(
        product, 1, described(left, 64, 64), described(right, 64, 32), (out, out.stride()), columns,
        FAULT=fault, seed=seed,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), left.double() @ right.double(), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("seed", range(10))
def test_a_product(seed: int) -> None:
    multiplied(seed, columns=(200, 8, 256)[seed % 3], dtype=(torch.float16, torch.bfloat16)[seed % 2])


ALWAYS = {
    "no wait for full": r"product in [01] \(multiply\): b\[[01]\] has a copy in 2 .* that it has not waited for",
    "no wait for empty": r"copy in 2 .*: b\[[01]\] has a (copy|product) in .* not waited for|1 more arrivals at full",
    "empty in the wrong phase": r"2 \(load_blocks\) waits for parity 0 of empty\[0\] \(in phase 0, to which 2 of 2",
    "full in the wrong phase": r"has a copy in 2 \(load_blocks\) that it has not waited for|waits for parity",
    "expects too much": r"0 \(multiply\) waits for parity 0 of full\[0\] \(.* and 2 bytes are still to come",
    "expects too little": r"0 \(multiply\) waits for parity 0 of full\[0\] \(.* and -2 bytes are still to come",
    "arrives before the wait": r"copy in 2 \(load_blocks\): b\[[01]\] has a product in [01] \(multiply\)",
    "no wait for the product": "'UnfinishedProduct'",
    "waits for too few": "'UnfinishedProduct'",
    "too large a count": r"2 \(load_blocks\) waits for parity 0 of empty\[0\] \(in phase 0, to which 1 of 3",
}


@interpreted
@pytest.mark.parametrize("fault", ALWAYS)
@pytest.mark.parametrize("seed", range(3))
def test_a_fault_is_found_in_every_order(fault: str, seed: int) -> None:
    with pytest.raises((Fault, AttributeError), match=ALWAYS[fault]) as found:
        multiplied(seed, fault)
    assert isinstance(found.value, Deadlock) == (" waits for parity" in str(found.value))


@interpreted
@pytest.mark.parametrize("fault", ["too small a count", "arrives twice"])
def test_a_fault_is_found_in_some_order(fault: str) -> None:
    found = 0
    for seed in range(6):
        try:
            multiplied(seed, fault)
        except (Fault, AssertionError):
            found += 1
    assert found >= 3


# ---- numbers from one partition to another


@gluon.jit
def give(x, y, given, source, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    x.store(gl.arange(0, 64, layout).to(gl.float16))
    if FAULT == "too many arrivals":
        mbarrier.arrive(given, count=3)
    elif FAULT == "a copy without a wait":
        tma.async_copy_global_to_shared(source, [0], given, y)
        mbarrier.expect(given, source.block_type.nbytes)
    elif FAULT == "a copy of another size":
        tma.async_copy_global_to_shared(source, [0], given, x)
    else:
        mbarrier.arrive(given, count=1)


@gluon.jit
def take(x, given, out, FAULT: gl.constexpr):
    if FAULT == "no wait":
        pass
    elif FAULT == "parity 2":
        mbarrier.wait(given, 2)
    elif FAULT != "a copy without a wait":
        mbarrier.wait(given, 0)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, 64, layout)
    if FAULT == "a store outside":
        at += 1
    if FAULT != "a copy without a wait":
        gl.store(out + at, x.load(layout).to(gl.float32))


@gluon.jit
def hand_over(source, out, FAULT: gl.constexpr):
    x = gl.allocate_shared_memory(gl.float16, [1, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    y = gl.allocate_shared_memory(gl.float16, source.block_shape, source.layout)
    given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if FAULT != "no barrier":
        mbarrier.init(given, count=1)
    at = 1 if FAULT == "an index outside" else 0
    gl.warp_specialize(
        [(give, (x.index(0), y, given, source, FAULT)), (take, (x.index(at), given, out, FAULT))], [4], [24]
    )


def handed_over(fault: str, seed: int) -> None:
    out, source = torch.full((64,), float("nan")), torch.zeros(128, dtype=torch.float16)
    emulate(hand_over, 1, described(source, 128), out, FAULT=fault, seed=seed)
    assert torch.equal(out, torch.arange(64.0))


@interpreted
def test_a_hand_over() -> None:
    for seed in range(5):
        handed_over("none", seed)


HANDED_OVER = {
    "no wait": r"x\[0\] has a (load|store) in . \((take|give)\) that it has not waited for",
    "parity 2": "a wait for parity 2 of given",
    "too many arrivals": "3 more arrivals at given",
    "no barrier": "given is no barrier yet",
    "a copy without a wait": "nothing waits for the copy into y before the program ends",
    "a copy of another size": r"a copy of fp16 \[128\] at 1 coordinates into x\[0\], fp16 \[64\]",
    "an index outside": "x has no index 1",
    "a store outside": "1 of 64 elements are outside",
}


@interpreted
@pytest.mark.parametrize("fault", HANDED_OVER)
@pytest.mark.parametrize("seed", range(3))
def test_a_fault_of_a_hand_over(fault: str, seed: int) -> None:
    with pytest.raises((Fault, IndexError), match=HANDED_OVER[fault]):
        handed_over(fault, seed)


# ---- attention: keys and values take turns in one ring, and the weights of a block meet its values a block later


@triton.jit
def causal(raw, i, j, kv_len, scale):
    return tl.where((j <= i) & (j < kv_len), raw * scale, float("-inf"))


@gluon.jit
def load_keys_and_values(query, key, value, q, ring, q_full, full, empty, plane, first_row, blocks):
    for c in gl.static_range(2):
        mbarrier.expect(q_full.index(c), query.block_type.nbytes)
        tma.async_copy_global_to_shared(query, [0, plane, first_row + c * ROWS, 0], q_full.index(c), q.index(c))
    SLOTS: gl.constexpr = ring.shape[0]
    for n in range(blocks):
        for which in gl.static_range(2):
            turn = 2 * n + which
            slot = turn % SLOTS
            mbarrier.wait(empty.index(slot), turn // SLOTS & 1 ^ 1)
            mbarrier.expect(full.index(slot), key.block_type.nbytes)
            at = [0, plane, n * key.block_shape[2], 0]
            if which == 0:
                tma.async_copy_global_to_shared(key, at, full.index(slot), ring.index(slot))
            else:
                tma.async_copy_global_to_shared(value, at, full.index(slot), ring.index(slot))


@gluon.jit
def arrived(ring, full, turn):
    """The block of keys or values that arrives at `turn`."""
    SLOTS: gl.constexpr = ring.shape[0]
    mbarrier.wait(full.index(turn % SLOTS), turn // SLOTS & 1)
    return ring.index(turn % SLOTS).reshape((ring.shape[3], ring.shape[4]))


@gluon.jit
def weigh(raw, n, i, greatest, total, kv_len, scale, SCORE: gl.constexpr, N: gl.constexpr, WIDE: gl.constexpr):
    j = (n * N + gl.arange(0, N, gl.SliceLayout(0, WIDE)))[None, :]
    scores = SCORE(raw, i, j, kv_len, scale)
    new = gl.maximum(greatest, gl.max(scores, 1))
    weights = gl.exp2((scores - new[:, None]) * LOG2E)
    shrink = gl.exp2((greatest - new) * LOG2E)
    return weights, shrink, new, total * shrink + gl.sum(weights, 1)


@gluon.jit
def attend(
    q, ring, q_full, full, empty, out, plane, first_row, length, blocks, scale, C: gl.constexpr, SCORE: gl.constexpr
):
    SLOTS: gl.constexpr = ring.shape[0]
    N: gl.constexpr = ring.shape[3]
    D: gl.constexpr = ring.shape[4]
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    rows = first_row + C * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    greatest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, WIDE))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, WIDE))
    zero = gl.zeros([ROWS, N], gl.float32, WIDE)
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    mbarrier.wait(q_full.index(C), 0)
    mine = q.index(C).reshape((ROWS, D))
    raw = warpgroup_mma(mine, arrived(ring, full, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
    raw = warpgroup_mma_wait(0, deps=(raw,))
    mbarrier.arrive(empty.index(0), count=1)
    weights, shrink, greatest, total = weigh(raw, 0, rows[:, None], greatest, total, length, scale, SCORE, N, WIDE)
    left = gl.convert_layout(weights.to(q.dtype), LEFT)
    for n in range(1, blocks):
        scores = warpgroup_mma(mine, arrived(ring, full, 2 * n).permute((1, 0)), zero, use_acc=False, is_async=True)
        mixed = warpgroup_mma(left, arrived(ring, full, 2 * n - 1), acc, is_async=True)
        raw = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(empty.index(2 * n % SLOTS), count=1)
        weights, shrink, greatest, total = weigh(raw, n, rows[:, None], greatest, total, length, scale, SCORE, N, WIDE)
        acc, weights = warpgroup_mma_wait(0, deps=(mixed, weights))
        mbarrier.arrive(empty.index((2 * n - 1) % SLOTS), count=1)
        left = gl.convert_layout(weights.to(q.dtype), LEFT)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    acc = warpgroup_mma(left, arrived(ring, full, 2 * blocks - 1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, OUT))[:, None]
    rows = gl.convert_layout(rows, gl.SliceLayout(1, OUT))[:, None]
    columns = gl.arange(0, D, gl.SliceLayout(0, OUT))[None, :]
    gl.store(head_base(out, 0, plane) + rows.to(gl.int64) * out[1][2] + columns, acc.to(q.dtype), mask=rows < length)


@gluon.jit
def attention(query, key, value, out, length, scale, SLOTS: gl.constexpr, SCORE: gl.constexpr):
    D: gl.constexpr = query.block_shape[3]
    N: gl.constexpr = key.block_shape[2]
    q = gl.allocate_shared_memory(query.dtype, [2, 1, 1, ROWS, D], query.layout)
    ring = gl.allocate_shared_memory(key.dtype, [SLOTS, 1, 1, N, D], key.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(2):
        mbarrier.init(q_full.index(c), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    first_row = gl.program_id(0) * 2 * ROWS
    plane = gl.program_id(1)
    blocks = gl.minimum(gl.cdiv(length, N), gl.cdiv(first_row + 2 * ROWS, N))
    gl.warp_specialize(
        [
            (attend, (q, ring, q_full, full, empty, out, plane, first_row, length, blocks, scale, 0, SCORE)),
            (attend, (q, ring, q_full, full, empty, out, plane, first_row, length, blocks, scale, 1, SCORE)),
            (load_keys_and_values, (query, key, value, q, ring, q_full, full, empty, plane, first_row, blocks)),
        ],
        [4, 1],
        [240, 24],
    )


@interpreted
@pytest.mark.parametrize(("length", "slots", "seed"), [(256, 3, 0), (256, 4, 1), (200, 3, 2), (24, 3, 3), (129, 5, 4)])
def test_attention(length: int, slots: int, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 1, 2, length, 64, dtype=torch.float16)
    out = torch.full_like(q, float("nan"))
    emulate(
        attention, ((length + 127) // 128, 2), described(q, 1, 1, 64, 64), described(k, 1, 1, 32, 64),
        described(v, 1, 1, 32, 64), (out, out.stride()), length, 0.125, seed=seed, SLOTS=slots, SCORE=causal,
    )  # fmt: skip
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    eager = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    budget = 2 * (eager - expected).abs().max() + torch.finfo(torch.float16).eps * expected.abs().max()
    assert (out - expected).abs().max() <= budget
