"""Faults that the emulator of Gluon kernels names, in a kernel whose first partition hands numbers to its second.

test_hopper.py tests what the emulator computes, and that it notices faults in the shipped kernels.
"""

from __future__ import annotations

import pytest
import torch

from tests.triton.interpreted import interpreted

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.triton.gluon_emulator import emulate
from tests.triton.gluon_machine import Fault

pytestmark = pytest.mark.thorough


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
    layout = gl.NVMMASharedLayout.get_default_for([128], gl.float16)
    emulate(hand_over, 1, TensorDescriptor.from_tensor(source, [128], layout), out, FAULT=fault, seed=seed)
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
