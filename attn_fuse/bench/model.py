"""Model: one model measured in every way to run it: time, memory, first call, fused attentions, differences."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from attn_fuse.bench import rows as of_rows
from attn_fuse.bench.compare import Reference, drop_gradients
from attn_fuse.bench.flags import tell
from attn_fuse.bench.rows import Row
from attn_fuse.bench.ways import EAGER, PICKED, Way, ways_on
from attn_fuse.errors import BenchError, named
from attn_fuse.explain import explanation_of
from attn_fuse.explain.explanation import Explanation
from attn_fuse.explain.problems import in_one_line
from attn_fuse.explain.steps import TimeUp, limited
from attn_fuse.explain.subject import Subject
from attn_fuse.picker.timing import OtherLoad, synchronize

# Compiling may take this many times the limit of another step.
_COMPILING = 5
DIFFERS = "WRONG: it differs from eager by more than rounding allows"


@dataclass(frozen=True)
class Measured:
    """A model in one mode, "inference" or "training". device: such as "cpu".

    subject: the model and its inputs in words. said: what was made up to run it. left_out: why a way is no row.
    random: whether the model draws random numbers. load: the share of the cores that other programs took meanwhile.
    explanation: the picker's choices for the model.
    """

    mode: str
    subject: str
    said: tuple[str, ...]
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]
    random: bool
    load: float
    device: str = "cpu"
    explanation: Explanation | None = None

    def as_json(self) -> dict[str, Any]:
        """Everything as plain dictionaries and lists."""
        return {**asdict(replace(self, explanation=None)), "rows": [row.as_json() for row in self.rows]}


def device_of(subject: Subject) -> torch.device:
    """The device that the subject's model runs on: that of its first parameter or input."""
    held = [*subject.model.parameters()] if isinstance(subject.model, nn.Module) else []
    given = [x for x in (*subject.inputs.args, *subject.inputs.kwargs.values()) if isinstance(x, torch.Tensor)]
    return next((x.device for x in (*held, *given)), torch.device("cpu"))


def measure(subject: Subject, kernels: Sequence[str], seconds: float) -> Measured:
    """Measure `subject` in every way, in turn.

    kernels: the names of kernels to force. seconds: of measuring, max, for each row.
    Raises BenchError if the model does not run under eager twice.
    """
    device, load = device_of(subject), OtherLoad()
    with _kept(subject):
        tell("running eager")
        reference = Reference(subject)
        plans, left_out, explanation = _plans(subject, ways_on(device, kernels))
        rows, runs = list[Row](), dict[str, Callable[[], Any]]()
        for plan, way in plans:
            tell(f"compiling {plan.name}" if way.name != EAGER else "running eager")
            row, run = _prepared(subject, plan, way, reference, device)
            rows.append(row)
            runs |= {} if run is None else {row.name: run}
        reference.put_back()
        rows = of_rows.measured(rows, runs, device, seconds * len(runs), lambda: drop_gradients(subject))
    return Measured(
        mode="training" if subject.train else "inference",
        subject=explanation.subject,
        said=subject.said,
        rows=tuple(rows),
        left_out=left_out,
        random=reference.random,
        load=load.share(),
        device=str(device),
        explanation=explanation,
    )


def _plans(subject: Subject, ways: Sequence[Way]) -> tuple[list[tuple[Row, Way]], dict[str, str], Explanation]:
    """The programs that result from the ways, why a way gives none, and the picker's choices for the model."""
    plans: dict[Any, tuple[Row, Way]] = {}
    left_out: dict[str, str] = {}
    picked = None
    for way in ways:
        if way.options is None:
            plans[way.name] = Row((way.name,)), way
            continue
        tell(f"asking what {way.name} fuses")
        explanation = explanation_of(subject.model, subject.inputs, subject.call, way.options)
        picked = picked or explanation
        own, others = explanation.already_fused, explanation.fused
        is_held = way.held_to is not None and any(
            site.status == "already fused" and not site.fused_by for site in explanation.sites
        )
        if way.name != PICKED and not others and not is_held:
            left_out[way.name] = _why_none(explanation, way)
            continue
        # A kernel holds its own calls to its backend, which leaves the program's own calls to hold.
        if way.held_to is not None and not is_held and way.held_to.name != "MATH":
            way = replace(way, held_to=None)
        key = (way.held_to, tuple((str(site.location), site.kernel) for site in explanation.sites))
        if (known := plans.get(key)) is not None:
            plans[key] = replace(known[0], names=(*known[0].names, way.name)), known[1]
            continue
        names = [site.kernel for site in explanation.sites if site.kernel]
        by_kernel = {name: names.count(name) for name in dict.fromkeys(names)}
        plans[key] = Row((way.name,), own + others, len(explanation.sites), by_kernel), way
    assert picked is not None
    sites, own = len(picked.sites), picked.already_fused
    found = [(replace(row, sites=sites, fused=own) if way.options is None else row, way) for row, way in plans.values()]
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
    subject: Subject, row: Row, way: Way, reference: Reference, device: torch.device
) -> tuple[Row, Callable[[], Any] | None]:
    """The row without time and memory, and a call of the program; None if the row gets no time."""
    run = way.compiled(subject.model)

    def call() -> None:
        drop_gradients(subject)
        subject.call(run)

    limit, started = _COMPILING * subject.limit, time.perf_counter()
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
        if way.name == EAGER:
            raise BenchError(f"{subject} raises {in_one_line(error)} when it is called again") from error
        return replace(row, problem=named(error)), None
    row = replace(row, first_call=first, difference=reference.difference(found))
    if not reference.agrees(found):
        return replace(row, problem=DIFFERS), None
    return row, call


@contextlib.contextmanager
def _kept(subject: Subject) -> Iterator[None]:
    """Put the random state back after the block, and drop its compiled programs and gradients."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        drop_gradients(subject)
        torch.compiler.reset()
