"""Sweep: attentions of many sizes, masks and dtypes, each as written under Inductor and on every kernel."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from attn_fuse.bench.calibrate import Measuring
from attn_fuse.bench.measure import Effort, Observation, bytes_as_written, in_gib, other_load, prepared
from attn_fuse.bench.memory import peak_memory
from attn_fuse.bench.progress import Progress
from attn_fuse.picker.case import Case, visible_share
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.picker.timing import OtherLoad, Timing, free_memory, interleaved

MASKS = ("none", "causal", "window", "documents", "dense")
# Max seconds of a case, most of them for compiling, and those beside what is asked for timing.
_COMPILING = 240.0


@dataclass(frozen=True, kw_only=True)
class Swept(Observation):
    """The outcome of measuring a case, by kernel, and as written under AS_WRITTEN.

    peaks: bytes of a call above its operands.
    """

    case: Case
    timings: Mapping[str, Timing] = field(default_factory=dict)
    peaks: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain dictionaries and lists."""
        return {
            "case": self.case.as_json(),
            "seconds": {name: asdict(timing) for name, timing in self.timings.items()},
            "peak_bytes": dict(self.peaks),
            "why_not": dict(self.why_not),
            "busy": self.busy,
            "problem": self.problem,
        }


def cases(
    lengths: Iterable[int],
    head_dims: Iterable[int],
    batches: Iterable[int],
    heads: int,
    masks: Iterable[str],
    dtypes: Iterable[str],
    modes: Iterable[bool],
    window: int | None = None,
) -> list[Case]:
    """The cases of a sweep, short ones first. modes: whether they train. window: keys that a window sees.

    A window of None is an eighth of the length.
    """
    return [
        _case(Case(dtype, training, batch, heads, length, length, head_dim), mask, window)
        for length, dtype, training, batch, head_dim, mask in itertools.product(
            sorted(lengths), dtypes, modes, batches, head_dims, masks
        )
    ]


def _case(case: Case, mask: str, window: int | None) -> Case:
    length = case.q_len
    if mask == "causal":
        return replace(case, mask=mask, visible=visible_share(length, length, 0, None))
    if mask == "window":
        reach = min(length, window or max(2, length // 8)) - 1
        return replace(case, mask=mask, visible=visible_share(length, length, 0, reach))
    return replace(case, mask=mask)


def sweep(
    cases: Sequence[Case], device: torch.device, kernels: Sequence[str], seconds: float, progress: Progress
) -> Iterator[Swept]:
    """Measure `cases` one after another, in another process. seconds: of timing, max, for each program of a case."""
    effort = Effort(rounds=30, seconds=seconds * (len(kernels) + 1))
    limit = _COMPILING + 3 * effort.seconds
    with Measuring(device, effort, swept, limit) as measuring:
        for case in cases:
            progress.step(str(case))
            seen = measuring.observation(case, time.perf_counter() + 3 * limit, kernels)
            progress.advance()
            yield seen if isinstance(seen, Swept) else Swept(case=case, why_not=seen.why_not, problem=seen.problem)


def swept(kernels: Sequence[str], case: Case, device: torch.device, effort: Effort) -> Swept:
    """The outcome of measuring `case` once, in this process; a busy machine is told and not waited for."""
    free = free_memory(device)
    if free is not None and bytes_as_written(case) > free / 2:
        return Swept(case=case, problem=f"as written it takes {in_gib(bytes_as_written(case))}; too little is free")
    runs, why_not = prepared(case, device, kernels)
    load = OtherLoad()
    timings = interleaved(runs, device, effort.rounds, effort.seconds, effort.shortest)
    busy = other_load(load.share(), timings, device)
    peaks = {name: peak_memory(run, device) for name, run in runs.items()}
    return Swept(why_not=why_not, busy=busy, case=case, timings=timings, peaks=peaks)


def as_csv(found: Iterable[Swept]) -> list[dict[str, Any]]:
    """A dictionary for each kernel of each case: the case, seconds, bytes, and the ratios to it as written."""
    rows = []
    for seen in found:
        case = seen.case
        for name, timing in seen.timings.items():
            rows.append(
                {
                    "mask": case.mask,
                    "dtype": case.dtype,
                    "training": case.training,
                    "batch": case.batch,
                    "heads": case.heads,
                    "head_dim": case.head_dim,
                    "length": case.q_len,
                    "kernel": name,
                    "seconds": timing.median,
                    "lower_quartile": timing.lower,
                    "upper_quartile": timing.upper,
                    "over_as_written": timing.median / seen.timings[AS_WRITTEN].median,
                    "peak_bytes": seen.peaks[name],
                    "busy": seen.busy,
                }
            )
    return rows
