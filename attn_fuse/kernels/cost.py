"""Cost: what an attention would take where nothing like it was measured, estimated as a roofline. It only ranks.

The time is that of the floating-point operations, plus that of the scores and weights that go through memory, plus
that of starting operations. The peaks come from what torch says of the device; the share of them that a kernel reaches
is a figure of its class, an estimate from the sources named beside it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from attn_fuse.kernels.case import MASKS, Case
from attn_fuse.kernels.evidence import AS_WRITTEN, Comparison
from attn_fuse.kernels.switches import float32_precision


@dataclass(frozen=True)
class Peaks:
    """What a device could do. flops: a second, in 16 and 32 bits; flops_sm80: of code written for sm_80 in 16 bits.

    bandwidth: bytes a second of memory, taken anew; cached: of the last cache, of `cache` bytes. launch: seconds.
    """

    flops16: float
    flops32: float
    flops_sm80: float
    bandwidth: float
    cached: float
    cache: float
    launch: float


@dataclass(frozen=True)
class Reach:
    """The share of the peak that a kernel reaches, forward and backward.

    sm80: whether its code was written for sm_80. skips: the masks of which it passes over what they hide. passes: how
    often each score goes through memory, forward and in training. launches: operations of a call; per_block: of a
    block of scores, for a kernel that goes from block to block outside of the device, each staying in cache.
    """

    forward: float
    backward: float
    sm80: bool = False
    skips: tuple[str, ...] = MASKS
    passes: tuple[float, float] = (0.0, 0.0)
    launches: float = 1.0
    per_block: float = 0.0


# torch's SDPA kernels are given any other mask as a tensor.
_CAUSAL = ("causal",)
# CUDA, shares of the dense peak. cudnn: NVIDIA's cudnn-frontend benchmarks, H200, D 128: 484-702 TFLOP/s forward,
# 370-612 backward, of 989. FA2: 300-370 and 290-320, that is about 0.65 of what sm_80 code can reach on these SMs.
# FlexAttention: 0.85-0.90 of FA2. Triton: its tutorial kernel reaches 0.6-0.7 of cuDNN. Efficient: older
# CUTLASS code for sm_80, about half of FA2. As written and chunked: products at the rate of matmuls of this size, the
# rest memory.
_CUDA = {
    AS_WRITTEN: Reach(0.55, 0.55, skips=(), passes=(5, 14), launches=5),
    "cudnn": Reach(0.65, 0.54, skips=_CAUSAL, launches=2),
    "cuda_flash": Reach(0.65, 0.6, sm80=True, skips=_CAUSAL, launches=2),
    "cuda_efficient": Reach(0.35, 0.25, sm80=True, skips=_CAUSAL, launches=2),
    "flex": Reach(0.56, 0.5, sm80=True, launches=3),
    "triton_flash": Reach(0.42, 0.33, launches=2),
    "triton_flash_hopper": Reach(0.47, 0.38, launches=2),
    "triton_decode": Reach(0.42, 0.33, launches=3),
    "chunked": Reach(0.4, 0.4, passes=(10, 24), launches=10, per_block=40),
}
# CPU, shares of the peak of fused multiply-adds. As written and flash: fitted to the shipped table (fp32, D 64, two
# cores: at T 2048, causal, Inductor 112 ms forward and 329 in training, flash 35 and 126). FlexAttention: 0.65-0.75 of
# flash's time with a causal mask, 0.7-1.3 without. Chunked: the products as written, its blocks passing through cache.
# What each takes before it computes anything is that of the shipped rows with a single query.
_CPU = {
    AS_WRITTEN: Reach(0.6, 0.6, skips=(), passes=(3.2, 7), launches=4),
    "cpu_flash": Reach(0.38, 0.37, skips=_CAUSAL, launches=6),
    "flex": Reach(0.5, 0.4, launches=25),
    "chunked": Reach(0.5, 0.5, passes=(6, 16), launches=90, per_block=20),
}
_BLOCK = 512 * 512

# Nothing says these of a CPU: a clock, and bytes a second of a thread to fresh memory (which the system has to clear
# first) and to the last cache. The floating-point operations in a cycle are those of two units of that width.
_CLOCK, _FRESH, _CACHED, _CPU_CACHE, _CPU_LAUNCH = 2.5e9, 2.5e9, 8e9, 32e6, 8e-6
_PER_CYCLE = {"AVX512": 64, "AVX2": 32}
_CUDA_LAUNCH = 4e-6
# Floating-point operations of an SM in a cycle, dense 16-bit, by major capability; sm_80 code gets 2048 at most.
_PER_SM = {7: 1024, 8: 2048, 9: 4096, 10: 8192, 12: 2048}
_FORWARD, _BACKWARD, _BACKWARD_AS_WRITTEN = 2, 5, 4  # matrix products, each 2 * scores * head_dim operations


def estimated(kernel: str, case: Case, device: torch.device) -> Comparison | None:
    """The ratio of `kernel` on `case`, by the model; None for a kernel that it does not know on such a device."""
    classes = _CUDA if device.type == "cuda" else _CPU
    if kernel not in classes:
        return None
    here = peaks(device)
    ratio = seconds(classes[kernel], case, here) / seconds(classes[AS_WRITTEN], case, here)
    return Comparison(ratio, "estimated, not measured", is_estimate=True)


def seconds(reach: Reach, case: Case, here: Peaks) -> float:
    """What a call takes, about."""
    seen = case.visible if case.mask in reach.skips else 1.0
    if case.itemsize > 2:
        peak = here.flops32 * (0.5 if case.itemsize > 4 else 1.0)
    else:
        peak = min(here.flops16, here.flops_sm80) if reach.sm80 else here.flops16
    operations = 2 * case.scores * seen * (case.head_dim + case.value_dim) / 2
    time = _FORWARD * operations / (peak * reach.forward)
    if case.training:
        products = _BACKWARD_AS_WRITTEN if not reach.skips else _BACKWARD
        time += products * operations / (peak * reach.backward)
    moved = case.scores * seen * case.itemsize
    # A bias or a mask kept as a tensor is read by all alike, about once for each pass over the scores.
    whole = (case.mask in ("dense", "documents") or case.bias != "none") + case.dropout + (case.bias == "gradient")
    passes = reach.passes[case.training] + whole * (2 if case.training else 1) / max(case.batch, 1)
    time += passes * moved / (here.cached if moved < here.cache or reach.per_block else here.bandwidth)
    operands = case.batch * case.itemsize * (case.head_dim + case.value_dim)
    operands *= case.heads * case.q_len + case.kv_heads * case.kv_len
    time += operands * (4 if case.training else 1) / (here.cached if operands < here.cache else here.bandwidth)
    blocks = reach.per_block * max(1.0, case.q_len * case.kv_len * seen / _BLOCK)
    return time + here.launch * (reach.launches + blocks) * (3 if case.training else 1)


def peaks(device: torch.device) -> Peaks:
    """What torch says that `device` could do, with a usual figure for what it does not say."""
    if device.type == "cuda":
        return _cuda_peaks(device, float32_precision(device))
    return _cpu_peaks(torch.get_num_threads())


@functools.cache
def _cuda_peaks(device: torch.device, precision: str) -> Peaks:
    it = torch.cuda.get_device_properties(device)
    cycles = it.multi_processor_count * getattr(it, "clock_rate", 1.7e6) * 1e3
    dense = cycles * _PER_SM.get(it.major, 1024)
    bandwidth = 2 * getattr(it, "memory_clock_rate", 0) * 1e3 * getattr(it, "memory_bus_width", 0) / 8 or 1e12
    return Peaks(
        flops16=dense,
        # TF32 runs at half the rate; else fp32 has 128 fused multiply-adds in an SM.
        flops32=cycles * 256 if precision == "ieee" else dense / 2,
        flops_sm80=cycles * 2048,
        bandwidth=0.9 * bandwidth,
        cached=3 * bandwidth,
        cache=getattr(it, "L2_cache_size", 40e6),
        launch=_CUDA_LAUNCH,
    )


def _cpu_peaks(threads: int) -> Peaks:
    capability = torch.backends.cpu.get_cpu_capability()
    flops = threads * _CLOCK * _PER_CYCLE.get(capability.partition(" ")[0], 16)
    return Peaks(flops, flops, flops, threads * _FRESH, threads * _CACHED, _CPU_CACHE, _CPU_LAUNCH)
