"""Model: one model measured in every way to run it: time, memory, first call, what is fused, whether it is right."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from attn_fuse.bench import profile
from attn_fuse.bench.compare import Reference, drop_gradients
from attn_fuse.bench.memory import peak_memory
from attn_fuse.bench.profile import Profile
from attn_fuse.bench.progress import Progress
from attn_fuse.bench.ways import EAGER, FUSED, INDUCTOR, PICKED, Way, ways_on
from attn_fuse.errors import BenchError, named
from attn_fuse.explain import explanation_of
from attn_fuse.explain.explanation import Explanation
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.steps import TimeUp, limited
from attn_fuse.explain.subject import Subject
from attn_fuse.picker.timing import OtherLoad, Timing, interleaved, synchronize

_ROUNDS, _SHORTEST = 30, 2e-3
# How many times the limit of another step compiling may take.
_COMPILING = 5
DIFFERS = "WRONG: it differs from eager by more than rounding allows"


@dataclass(frozen=True)
class Row:
    """One program, and the ways that come down to it.

    fused, sites: how many attentions it runs on a fused kernel, of how many; those that the program itself calls
        fused count. by_kernel: how many each kernel has.
    first_call: seconds of the first call, with compiling. difference: the max from eager's outputs and gradients, over
        the max of the tensor. peak: bytes of a call above what was there before. problem: why there is no time.
    """

    names: tuple[str, ...]
    fused: int = 0
    sites: int = 0
    by_kernel: Mapping[str, int] = field(default_factory=dict)
    first_call: float | None = None
    difference: float | None = None
    timing: Timing | None = None
    peak: int | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        """The names of its ways, joined."""
        return " = ".join(self.names)


@dataclass(frozen=True)
class Measured:
    """A model in one mode, "inference" or "training". device: where it runs, as "cpu".

    subject: the model and its inputs in words. said: what was made up to run it. left_out: why a way is no row.
    random: whether the model draws random numbers. load: the share of the cores that other programs took meanwhile.
    profiles: by the name of a row. explanation: what the picker makes of the model.
    """

    mode: str
    subject: str
    said: tuple[str, ...]
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]
    random: bool
    load: float
    device: str = "cpu"
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    explanation: Explanation | None = None

    def row(self, way: str) -> Row | None:
        """The row that the way of this name came down to."""
        return next((row for row in self.rows if way in row.names), None)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain dictionaries and lists; a difference that is infinite is None, as JSON has none."""
        rows = [
            {**asdict(row), "difference": row.difference if row.difference != math.inf else None} for row in self.rows
        ]
        profiles = {name: {**asdict(found), "share": found.share} for name, found in self.profiles.items()}
        return {**asdict(replace(self, explanation=None)), "rows": rows, "profiles": profiles}


@dataclass(frozen=True)
class _Plan:
    row: Row
    way: Way


def device_of(subject: Subject) -> torch.device:
    """The device that the subject's model runs on: that of its first parameter or input."""
    held = [*subject.model.parameters()] if isinstance(subject.model, nn.Module) else []
    given = [x for x in (*subject.inputs.args, *subject.inputs.kwargs.values()) if isinstance(x, torch.Tensor)]
    return next((x.device for x in (*held, *given)), torch.device("cpu"))


def measure(subject: Subject, kernels: Sequence[str], seconds: float, operators: bool, progress: Progress) -> Measured:
    """Measure `subject` in every way, the ways in turn.

    kernels: names of those that may be forced. seconds: of measuring, max, for each row. operators: whether to profile.
    Raises BenchError where the model does not run under eager twice.
    """
    device, load = device_of(subject), OtherLoad()
    with _kept(subject):
        progress.step("running eager")
        reference = Reference(subject)
        plans, left_out, explanation = _plans(subject, ways_on(device, kernels), progress)
        rows, runs = [], {}  # type: list[Row], dict[str, Callable[[], Any]]
        for plan in plans:
            progress.step(f"compiling {plan.row.name}" if plan.way.name != EAGER else "running eager")
            row, run = _prepared(subject, plan, reference, device)
            rows.append(row)
            runs |= {} if run is None else {row.name: run}
            progress.advance()
        reference.put_back()
        rows, profiles = _measured(subject, rows, runs, device, seconds, operators, progress)
    return Measured(
        mode="training" if subject.train else "inference",
        subject=explanation.subject,
        said=subject.said,
        rows=tuple(rows),
        left_out=left_out,
        random=reference.random,
        load=load.share(),
        device=str(device),
        profiles=profiles,
        explanation=explanation,
    )


def steps_of(device: torch.device, kernels: Sequence[str]) -> int:
    """About how many steps of a Progress one `measure` takes."""
    return 3 * len(ways_on(device, kernels))


def _plans(
    subject: Subject, ways: Sequence[Way], progress: Progress
) -> tuple[list[_Plan], dict[str, str], Explanation]:
    """The programs that the ways come down to, why a way is none, and what the picker makes of the model."""
    plans: dict[Any, _Plan] = {}
    left_out: dict[str, str] = {}
    picked = None
    for way in ways:
        if way.options is None:
            plans[way.name] = _Plan(Row((way.name,)), way)
            continue
        progress.step(f"asking what {way.name} fuses")
        explanation = explanation_of(subject.model, subject.inputs, subject.call, way.options)
        picked = picked or explanation
        own, others = explanation.already_fused, explanation.fused
        is_held = way.held_to is not None and any(
            site.status == "already fused" and not site.fused_by for site in explanation.sites
        )
        if way.name != PICKED and not others and not is_held:
            left_out[way.name] = _why_none(explanation, way)
            continue
        # A kernel holds its own calls to its backend: only those of the program itself are left to hold.
        if way.held_to is not None and not is_held and way.held_to.name != "MATH":
            way = replace(way, held_to=None)
        key = (way.held_to, tuple((str(site.location), site.kernel) for site in explanation.sites))
        if (known := plans.get(key)) is not None:
            plans[key] = replace(known, row=replace(known.row, names=(*known.row.names, way.name)))
            continue
        names = [site.kernel for site in explanation.sites if site.kernel]
        by_kernel = {name: names.count(name) for name in dict.fromkeys(names)}
        plans[key] = _Plan(Row((way.name,), own + others, len(explanation.sites), by_kernel), way)
    assert picked is not None
    sites, own = len(picked.sites), picked.already_fused
    found = [
        replace(plan, row=replace(plan.row, sites=sites, fused=own)) if plan.way.options is None else plan
        for plan in plans.values()
    ]
    return found, left_out, picked


def _why_none(explanation: Explanation, way: Way) -> str:
    if not explanation.sites:
        return "no attention was found"
    named_by = (way.options or {}).get("kernels") or []
    reasons = [
        reason for site in explanation.sites for kernel in named_by for reason in site.why_not.get(kernel, ())
    ] or [site.blocker.reason for site in explanation.sites if site.blocker is not None]
    return f"fuses none of {len(explanation.sites)}: {reasons[0] if reasons else 'the program fuses all itself'}"


def _prepared(
    subject: Subject, plan: _Plan, reference: Reference, device: torch.device
) -> tuple[Row, Callable[[], Any] | None]:
    """The row with all but time and memory, and a call of the program; None where the row gets no time."""
    run = plan.way.compiled(subject.model)

    def call() -> None:
        drop_gradients(subject)
        subject.call(run)

    row, limit, started = plan.row, _COMPILING * subject.limit, time.perf_counter()
    try:
        with limited(limit):
            reference.put_back()
            call()
            synchronize(device)
            first = time.perf_counter() - started
            found = reference.of(run)
    except TimeUp:
        return replace(row, problem=f"its first calls take more than {limit:g} s"), None
    except Exception as error:
        if plan.way.name == EAGER:
            raise BenchError(f"{subject} raises {in_one_line(error)} when it is called again") from error
        return replace(row, problem=named(error)), None
    row = replace(row, first_call=first, difference=reference.difference(found))
    if not reference.agrees(found):
        return replace(row, problem=DIFFERS), None
    return row, call


def _measured(
    subject: Subject,
    rows: Sequence[Row],
    runs: Mapping[str, Callable[[], Any]],
    device: torch.device,
    seconds: float,
    operators: bool,
    progress: Progress,
) -> tuple[list[Row], dict[str, Profile]]:
    """The rows with time and memory, and the profiles."""
    progress.step(f"timing {len(runs)} programs in turn")
    done = progress.within(len(runs))
    timings = interleaved(runs, device, _ROUNDS, seconds * len(runs), _SHORTEST, done, whole_programs=True)
    finished = []
    for row in rows:
        if row.name in runs:
            progress.step(f"memory of {row.name}")
            drop_gradients(subject)
            row = replace(row, timing=timings[row.name], peak=peak_memory(runs[row.name], device))
        progress.advance()
        finished.append(row)
    profiles: dict[str, Profile] = {}
    if operators:
        progress.step("profiling")

        def use(run: Callable[..., Any]) -> None:
            drop_gradients(subject)
            subject.call(run)

        profiles[EAGER] = profile.as_written(subject.model, use, device)
        for row in finished:
            if row.name in runs and {INDUCTOR, PICKED, FUSED} & {*row.names}:
                # On the CPU flex is one of Inductor's kernels, whose names say nothing.
                told = row.fused == row.sites > 0 and (device.type == "cuda" or "flex" not in row.by_kernel)
                profiles[row.name] = profile.fused(runs[row.name], device, told and INDUCTOR not in row.names)
    return finished, profiles


@contextlib.contextmanager
def _kept(subject: Subject) -> Iterator[None]:
    """Put the random state back after the block, and drop what it compiled and its gradients."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        drop_gradients(subject)
        torch.compiler.reset()
