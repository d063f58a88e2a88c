"""Measure: the times of an attention as written and on each kernel, compiled, compared and interleaved.

Another process measures. It is replaced if a kernel kills it, hangs or breaks the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attn_fuse.backend import attn_fuse
from attn_fuse.bench.compare import in_dtype
from attn_fuse.bench.memory import peak_memory
from attn_fuse.bench.workloads import program, runner, tensors
from attn_fuse.kernels import KERNELS
from attn_fuse.picker.case import SCORES_ALIVE, Case
from attn_fuse.picker.evidence import AS_WRITTEN, Row
from attn_fuse.picker.site_run import forced, runs_on
from attn_fuse.picker.timing import OtherLoad, Timing, free_memory, interleaved
from attn_fuse.picker.workers import Worker, spared
from attn_fuse.report import bytes_in_words

_TOLERANCE = {"float64": 1e-6, "float32": 1e-3}
# Max measurements beside other load, and seconds between them.
_TRIES, _WAIT = 3, 2.0
# Max share of the cores for other programs. The system does not report the other load of a GPU: there, the max ratio of
# the upper quartile of a kernel's times to the lower.
_QUIET, _STEADY = 0.1, 1.5
# Max seconds of a case, most of them for compiling.
DEADLINE = 120.0


@dataclass(frozen=True)
class Effort:
    """How long a case is measured. rounds, seconds: max of a case. shortest: min seconds of one measurement.

    whole: measure memory, too, and the case once: at no smaller size, and not again beside other load.
    """

    rounds: int = 15
    seconds: float = 3.0
    shortest: float = 2e-3
    whole: bool = False


QUICK = Effort(rounds=5, seconds=0.5)


@dataclass(frozen=True)
class Observation:
    """The outcome of measuring a case.

    row: None if the case was not measured. problem: why it was not. why_not: why a kernel has no time.
    busy: the other load meanwhile, in words, beside which a row is not kept; "" for none.
    timings: by the name of a kernel or AS_WRITTEN. peaks: bytes of a call above its operands, by the same names, if the
        effort asks for them.
    """

    row: Row | None = None
    why_not: Mapping[str, str] = field(default_factory=dict)
    busy: str = ""
    problem: str = ""
    timings: Mapping[str, Timing] = field(default_factory=dict)
    peaks: Mapping[str, int] = field(default_factory=dict)


Observe = Callable[[Sequence[str], Case, torch.device, Effort], Observation]


def row_of(case: Case, timings: Mapping[str, Timing]) -> Row:
    """`timings` of `case` as evidence, in microseconds."""
    return Row(case, {name: round(timing.median * 1e6, 2) for name, timing in timings.items()})


def timed(case: Case, device: torch.device, effort: Effort, kernels: Sequence[str] | None = None) -> dict[str, Timing]:
    """The timings of `case` as written and on each of `kernels` (None: all) that can run it."""
    runs, _ = prepared(case, device, kernels)
    return interleaved(runs, device, effort.rounds, effort.seconds, effort.shortest)


def prepared(
    case: Case, device: torch.device, kernels: Sequence[str] | None = None
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """A call of `case` as written and on each kernel, compiled and run once, and why a kernel has none.

    kernels: their names; None for all that can run on `device`.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    written, values = program(case), tensors(case, device)
    wide = torch.float32 if case.itemsize < 4 else torch.float64

    def on(name: str) -> Callable[[], Any]:
        compiled = torch.compile(written, backend=attn_fuse, dynamic=False, options=forced(name))
        return runner(compiled, case, values)

    def wrong(found: Any, expected: Any) -> str:
        agrees = case.dropout or _agree(found, expected, case, lambda: runner(written, case, in_dtype(values, wide))())
        return "" if agrees else "its result differs from that as written"

    names = kernels_on(device) if kernels is None else kernels
    return runs_on(AS_WRITTEN, names, on, device, wrong=wrong)


def observed(kernels: Sequence[str], case: Case, device: torch.device, effort: Effort) -> Observation:
    """The outcome of measuring `case`, in this process.

    Unless `effort.whole`, a case that does not fit the memory is measured at a smaller batch or with fewer heads, and
    beside other load it is measured again, up to three times in all.
    """
    smaller = fitting(case, free_memory(device))
    if smaller is None or (effort.whole and smaller != case):
        needed = bytes_in_words(bytes_as_written(case))
        return Observation(problem=f"as written it takes {needed} and more; too little is free")
    runs, why_not = prepared(smaller, device, kernels)
    for left in reversed(range(1 if effort.whole else _TRIES)):
        load = OtherLoad()
        timings = interleaved(runs, device, effort.rounds, effort.seconds, effort.shortest)
        busy = other_load(load.share(), timings, device)
        if not busy:
            break
        if left:
            time.sleep(_WAIT)
    peaks = {name: peak_memory(run, device) for name, run in runs.items()} if effort.whole else {}
    return Observation(row_of(smaller, timings), why_not, busy, timings=timings, peaks=peaks)


class Measuring:
    """A worker that measures cases one after another, without kernels that broke it twice.

    seconds: max of a case. broken: what happened to such kernels, by name.
    """

    def __init__(
        self, device: torch.device, effort: Effort, observe: Observe = observed, seconds: float = DEADLINE
    ) -> None:
        self._device, self._effort, self._observe, self._seconds = device, effort, observe, seconds
        self._worker, self._once = Worker(), set[str]()
        self.broken: dict[str, str] = {}

    def observation(self, case: Case, end: float, kernels: Sequence[str] | None = None) -> Observation:
        """The outcome of measuring `case`, again without each kernel that broke the process.

        end: of all, by `time.perf_counter`. kernels: their names; None for all of the device.
        """
        asked = kernels_on(self._device) if kernels is None else kernels
        names = [name for name in asked if name not in self.broken]
        how = case, self._device, self._effort
        answer, broke = spared(self._worker, self._seconds, end, self._observe, names, *how)
        for name, problem in broke.items():
            if name in self._once:
                self.broken[name] = f"{problem}, twice; not used any more"
            self._once.add(name)
        if answer.problem:
            return Observation(why_not=broke, problem=answer.problem)
        seen: Observation = answer.value
        return replace(seen, why_not={**self.broken, **seen.why_not, **broke})

    def __enter__(self) -> Measuring:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()


def other_load(share: float, timings: Mapping[str, Timing], device: torch.device) -> str:
    """The other load while `timings` were measured, in words; "" for none. share: of the cores, by other programs."""
    if share > _QUIET:
        return f"other programs took {share:.0%} of the cores"
    unsteady = max(timing.upper / timing.lower for timing in timings.values())
    if device.type == "cuda" and unsteady > _STEADY:
        return f"the same call took {unsteady:.1f} times as long at times"
    return ""


def fitting(case: Case, free: int | None) -> Case | None:
    """`case` with its batch, then its heads, halved until it fits half of the `free` bytes; None if never.

    Bytes are those of the program as written. Halving changes the number of (batch, head) pairs and nothing else that a
    kernel's time depends on.
    """
    while free is not None and bytes_as_written(case) > free / 2:
        if case.batch > 1:
            case = replace(case, batch=case.batch // 2)
        elif case.heads % 2 == case.kv_heads % 2 == 0:
            case = replace(case, heads=case.heads // 2, kv_heads=case.kv_heads // 2)
        else:
            return None
    return case


def bytes_as_written(case: Case) -> int:
    """Roughly the bytes that the program as written holds at once."""
    alive = SCORES_ALIVE[case.training] + 2 * (case.bias != "none")
    lengths = case.q_len * case.heads * case.head_dim, 2 * case.kv_len * case.heads * case.head_dim
    return case.itemsize * (alive * case.scores + 2 * case.batch * sum(lengths))


def kernels_on(device: torch.device) -> list[str]:
    """The names of the kernels for devices of this type."""
    return [kernel.name for kernel in KERNELS if device.type in kernel.devices]


def _agree(found: Any, expected: Any, case: Case, exact: Callable[[], Any]) -> bool:
    """Whether each result is near that as written, or at least as near to the exact one.

    As written, the gradient of a broadcast tensor is summed in 16 bits, and a more exact kernel is right, too.
    """
    tolerance = _TOLERANCE.get(case.dtype, 6e-2)
    pairs = list(zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True))
    near = [torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True) for a, b in pairs]
    return all(near) or all(
        is_near or bool((a - c).norm() <= (b - c).norm())
        for is_near, (a, b), c in zip(near, pairs, pytree.tree_leaves(exact()), strict=True)
    )
