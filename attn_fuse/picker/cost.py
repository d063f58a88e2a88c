"""Cost: a roofline estimate of an attention's time, for cases far from every measured one. It only ranks kernels.

The time is that of the floating-point operations, plus that of the memory traffic, plus that of launches. The peak
rates come from what torch says of the device; the share of a peak that a kernel reaches is estimated, from the sources
named beside it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from attn_fuse.kernels.kernel import Kernel, Reach
from attn_fuse.kernels.switches import float32_precision
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import Comparison


@dataclass(frozen=True)
class Peaks:
    """The peak rates of a device.

    flops16, flops32: floating-point operations a second in 16 and 32 bits. flops_sm80: in 16 bits, of code for sm_80.
    bandwidth: bytes a second of memory, freshly allocated on a CPU. cached: bytes a second of the last-level cache.
    cache: bytes of that cache. launch: seconds of one launch. units: multiprocessors, among which programs are spread.
    tf32: whether float32 products may be computed in TF32. product: seconds that a float32 product of two blocks takes
    beside its operations.
    """

    flops16: float
    flops32: float
    flops_sm80: float
    bandwidth: float
    cached: float
    cache: float
    launch: float
    units: int = 1
    tf32: bool = False
    product: float = 0.0


# CUDA, shares of the dense peak; products as written run at the rate of matmuls of this size, the rest is memory. CPU,
# shares of the peak of fused multiply-adds, fitted to the shipped table (fp32, head_dim 64, two cores; at length 2048,
# causal, Inductor takes 112 ms forward and 329 in training). Each kernel has its own figures in its file.
AS_WRITTEN_REACH = {
    "cuda": Reach(0.55, 0.55, skips="none", passes=(5, 14), launches=5, splits=True),
    "cpu": Reach(0.6, 0.6, skips="none", passes=(3.2, 7), launches=4),
}
_BLOCK = 512 * 512
# Queries of one program of a fused kernel.
_ROWS = 128
# The share of the scores within the documents of `workloads`, among those that the other mask parts leave.
_SEEN_OF_DOCUMENTS = 0.28
# The number of calls that we assume for a shape, to spread over them what building a plan for it takes.
_CALLS_OF_A_SHAPE = 100

# Assumed of a CPU, since nothing says: the clock in Hz; bytes a second of a thread to fresh memory (which the system
# has to clear first) and to the last-level cache; bytes of that cache; seconds of a launch. A cycle has the
# floating-point operations of two vector units of that width.
_CLOCK, _FRESH, _CACHED, _CPU_CACHE, _CPU_LAUNCH = 2.5e9, 2.5e9, 8e9, 32e6, 8e-6
# Where float32 products may be of bfloat16 numbers, as float32_matmul_precision("medium") has it, torch calls oneDNN
# for each: measured with 256 windows of 49 keys.
_ONEDNN_CALL = 2.4e-5
_PER_CYCLE = {"AVX512": 64, "AVX2": 32}
_CUDA_LAUNCH = 4e-6
# Dense 16-bit floating-point operations of an SM in a cycle, by major capability; sm_80 code reaches at most 2048.
_PER_SM = {7: 1024, 8: 2048, 9: 4096, 10: 8192, 12: 2048}
_FORWARD, _BACKWARD, _BACKWARD_AS_WRITTEN = 2, 5, 4  # matrix products, each 2 * scores * head_dim operations


def estimated(kernel: Kernel, case: Case, device: torch.device) -> Comparison | None:
    """The model's ratio of `kernel` to the program as written; None for a kernel without figures on such a device."""
    if device.type not in kernel.reach:
        return None
    here = peaks(device)
    ratio = seconds(kernel.reach[device.type], case, here) / seconds(AS_WRITTEN_REACH[device.type], case, here)
    return Comparison(ratio, "estimated, not measured", is_estimate=True)


def seconds(reach: Reach, case: Case, here: Peaks) -> float:
    """The estimated seconds of one call."""
    seen = case.visible if reach.skips in ("any", case.mask) else 1.0
    if case.mask == "documents" and reach.skips == "any":
        seen *= _SEEN_OF_DOCUMENTS
    operations = case.scores * seen * (case.head_dim + case.value_dim)
    forward, backward = _rates(reach, case, here)
    time = _FORWARD * operations / forward
    if case.training:
        products = _BACKWARD_AS_WRITTEN if reach.skips == "none" else _BACKWARD
        time += products * operations / backward
    time *= reach.dropout if case.dropout else 1.0
    moved = case.scores * seen * case.itemsize
    # All batch entries share a stored bias or mask, which each pass over the scores reads about once.
    with_gradient = case.bias in ("gradient", "indexed")
    whole = (case.mask in ("dense", "documents") or case.bias != "none") + case.dropout + with_gradient
    sharing = 1 if case.bias_by_entry else max(case.batch, 1)
    passes = reach.passes[case.training] + whole * (2 if case.training else 1) / sharing
    time += passes * moved / (here.cached if moved < here.cache or reach.per_block else here.bandwidth)
    # As written, keys that several query heads share are copied in memory: read once, then each copy written and read.
    repeated = 1 + 2 * case.copies if case.copies > 1 and reach.skips == "none" else 1
    operands = case.batch * case.itemsize * (case.head_dim + case.value_dim)
    operands *= case.heads * case.q_len + case.kv_heads * case.kv_len * repeated
    time += operands * (4 if case.training else 1) / (here.cached if operands < here.cache else here.bandwidth)
    time /= 1.0 if reach.splits else min(1.0, case.batch * case.heads * math.ceil(case.q_len / _ROWS) / here.units)
    if case.training and (case.table or with_gradient):
        time += reach.summed[case.table or case.bias == "indexed"] * case.heads * case.q_len * case.kv_len
    blocks = reach.per_block * max(1.0, case.q_len * case.kv_len * seen / _BLOCK)
    return time + here.launch * (reach.launches + blocks) * (3 if case.training else 1)


def plans(kernel: Kernel, case: Case, changing: bool, device: torch.device) -> float:
    """The ratio that building plans adds to that of `kernel`.

    changing: whether sizes change from call to call.
    """
    if not kernel.plan_seconds or not changing:
        return 0.0
    each_call = sum(kernel.plan_seconds[: 1 + case.training]) / _CALLS_OF_A_SHAPE
    return each_call / seconds(AS_WRITTEN_REACH[device.type], case, peaks(device))


def calls(kernel: Kernel, case: Case, device: torch.device) -> float:
    """The ratio that a slower library for float32 products, which torch's settings choose, adds to that of `kernel`."""
    reach, here = kernel.reach.get(device.type), peaks(device)
    if reach is None or reach.block is None or case.itemsize != 4 or not here.product:
        return 0.0
    rows, keys = reach.block
    blocks = case.batch * case.heads * math.ceil(case.q_len / rows) * math.ceil(case.kv_len / keys)
    products = _FORWARD + (_BACKWARD if case.training else 0)
    return here.product * blocks * products / seconds(AS_WRITTEN_REACH[device.type], case, here)


def _rates(reach: Reach, case: Case, here: Peaks) -> tuple[float, float]:
    """Floating-point operations a second, forward and backward."""
    dense = min(here.flops16, here.flops_sm80) if reach.sm80 else here.flops16
    if case.itemsize == 2:
        return dense * reach.forward, dense * reach.backward
    peak = here.flops32 * (0.5 if case.itemsize > 4 else 1.0)
    if case.itemsize == 4 and max(case.head_dim, case.value_dim) <= reach.splits32 and (reach.fixed32 or not here.tf32):
        peak = dense / 2 / 3
    elif case.itemsize == 4 and here.tf32:
        peak = dense / 2
    return (
        peak * (reach.forward if reach.forward32 is None else reach.forward32),
        peak * (reach.backward if reach.backward32 is None else reach.backward32),
    )


def peaks(device: torch.device) -> Peaks:
    """The peak rates of `device` as torch reports them, with typical figures for what torch does not report."""
    if device.type == "cuda":
        return _cuda_peaks(device, float32_precision(device))
    return _cpu_peaks(torch.get_num_threads(), float32_precision(device))


@functools.cache
def _cuda_peaks(device: torch.device, precision: str) -> Peaks:
    it = torch.cuda.get_device_properties(device)
    cycles = it.multi_processor_count * getattr(it, "clock_rate", 1.7e6) * 1e3
    dense = cycles * _PER_SM.get(it.major, 1024)
    bandwidth = 2 * getattr(it, "memory_clock_rate", 0) * 1e3 * getattr(it, "memory_bus_width", 0) / 8 or 1e12
    return Peaks(
        flops16=dense,
        # TF32 runs at half the 16-bit rate; without it, an SM has 128 float32 fused multiply-adds in a cycle.
        flops32=cycles * 256 if precision == "ieee" else dense / 2,
        flops_sm80=cycles * 2048,
        bandwidth=0.9 * bandwidth,
        cached=3 * bandwidth,
        cache=getattr(it, "L2_cache_size", 40e6),
        launch=_CUDA_LAUNCH,
        units=it.multi_processor_count,
        tf32=precision != "ieee",
    )


def _cpu_peaks(threads: int, precision: str) -> Peaks:
    capability = torch.backends.cpu.get_cpu_capability()
    flops = threads * _CLOCK * _PER_CYCLE.get(capability.partition(" ")[0], 16)
    return Peaks(
        flops,
        flops,
        flops,
        bandwidth=threads * _FRESH,
        cached=threads * _CACHED,
        cache=_CPU_CACHE,
        launch=_CPU_LAUNCH,
        product=_ONEDNN_CALL / threads if precision == "bf16" else 0.0,
    )
