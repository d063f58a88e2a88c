"""The emulator of Gluon kernels: right kernels compute what torch does, and each fault in one is found.

The kernels are written as those that run on a Hopper GPU: one producer of copies, two consumers of 64 rows each.
"""

from __future__ import annotations

import pytest
import torch

from tests.triton.interpreted import interpreted, run_interpreted

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: E402
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

from tests.triton.gluon_emulator import Deadlock, Fault, emulate  # noqa: E402

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
