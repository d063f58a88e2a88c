"""The sections of benchmarks/gpu.py's six calls: each yields rows, made in workers, and ends by its time."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import gpu_attention
import gpu_cases
import gpu_sweep
import gpu_tasks
from attn_fuse.bench.measure import Effort, Measuring, kernels_on
from attn_fuse.bench.ways import EAGER
from attn_fuse.picker import evidence
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.picker.timing import Device, seconds_in_words
from attn_fuse.picker.workers import Worker, spared
from gpu_attention import BEYOND_PLAIN, Bench, Row
from gpu_ncu import ncu
from harness import ROOT
from nanogpt import programs_of
from pool import Pool

# Seconds that a row of the grid may take, a shape, a trial of the sweep, a case, a compilation; and a kernel before the
# others had theirs.
CHECK, SHAPE, TRIAL, CASE, COMPILE, FIRST = 40.0, 45.0, 15.0, 40.0, 100.0, 20.0
# Processes that compile side by side, at most: all have programs in memory.
COMPILING = 10
# So many processes that a kernel broke are enough.
MAX_LOST = 12
# Batch and length of the caches that are decoded from.
CACHES_READ = ((32, 4096), (1, 32768), (8, 16384), (64, 1024))
# Seconds that `bench nanogpt` takes beside what it is told to stay within: the program that it is at, and memory.
_ENDING = 25.0
# The one that most waits for comes first.
ORDER = ("triton_flash", "chunked")


@dataclass
class Run:
    """One call: where it runs and writes. end: by `time.perf_counter`. earlier: what earlier calls left."""

    device: torch.device
    results: Path
    caches: Path
    end: float
    number: int
    about: dict[str, Any] = field(default_factory=dict)
    earlier: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)

    @property
    def tiny(self) -> bool:
        return self.device.type == "cpu"

    @property
    def bench(self) -> Bench:
        return Bench(self.device, self.tiny)

    @property
    def label(self) -> str:
        if self.device.type == "cpu":
            return "cpu"
        return re.sub(r"[^a-z0-9]+", "-", self.about["machine"]["gpu"].lower().removeprefix("nvidia ")).strip("-")

    @property
    def left(self) -> float:
        return self.end - time.perf_counter()

    def patience(self, seconds: float) -> float:
        """A deadline: on a CPU, where Inductor's first program takes a minute to compile, a longer one."""
        return seconds * (4 if self.tiny else 1)

    def until(self, share: float) -> float:
        """When a section ends that may take this share of what is left."""
        return time.perf_counter() + share * max(0.0, self.left)

    @property
    def own(self) -> list[str]:
        """Our operators here that are not known to be wrong; the one in plain torch where there are no others."""
        wrong = self.earlier.get("wrong kernels", {})
        names = [name for name in ORDER if name in self.about["operators"] and name not in wrong]
        return [name for name in names if name != "chunked"] or names

    def workers(self) -> int:
        return 2 if self.tiny else max(2, gpu_tasks.cores() - 2)

    def path(self, name: str) -> Path:
        return self.results / f"gpu-{self.number}-{name}-{self.label}.json"


Section = Callable[[Run, float], Iterator[Row]]


# ---- 1: what is right


def ceilings(run: Run, end: float) -> Iterator[Row]:
    """What a large matrix product and a large copy reach."""
    with Worker() as worker:
        answer = worker.call(min(60.0, end - time.perf_counter()), gpu_attention.ceilings, run.bench)
    yield from answer.value or [{"failed": answer.problem}]


def correctness(run: Run, end: float) -> Iterator[Row]:
    """Our operators on the shared grid: 20 s for each, so that none takes the time of the others; then the rest."""
    kernels = run.own
    with Worker() as worker:
        asked = {name: worker.call(60.0, gpu_tasks.grid_rows, name, run.device, run.tiny) for name in kernels}
    waiting = {name: list(answer.value or ()) for name, answer in asked.items()}
    seen = {name: {"right": 0, "wrong": 0, "lost": 0, "not run": 0} for name in kernels}
    with Pool(run.workers(), gpu_tasks.environment()) as pool:
        for first in (True, False):
            for number, name in enumerate(kernels):
                share = (end - time.perf_counter()) / (len(kernels) - number)
                begin = time.perf_counter() + (min(FIRST, share) if first else share)
                if seen[name]["lost"] >= MAX_LOST:
                    continue
                yield from _checked(run, pool, name, waiting[name], seen[name], begin, end)
    for name in kernels:
        seen[name]["not run"] = len(waiting[name])
    wrong = {
        name: f"{counts['wrong']} rows wrong, {counts['lost']} lost, {counts['right']} right"
        for name, counts in seen.items()
        if counts["lost"] >= MAX_LOST or counts["wrong"] > gpu_tasks.MAX_WRONG * max(1, counts["right"])
    }
    run.earlier["wrong kernels"] = wrong
    yield {"checked": seen, "wrong kernels": wrong}


def _checked(
    run: Run, pool: Pool, name: str, waiting: list[Any], seen: dict[str, int], begin: float, end: float
) -> Iterator[Row]:
    """Rows of what is wrong; those that were answered leave `waiting`."""
    asked = list(waiting)
    calls = [(gpu_tasks.checked, name, c, run.device) for c in asked]
    with contextlib.closing(pool.answers(calls, run.patience(CHECK), end, begin)) as answers:
        for number, answer in answers:
            c, said = asked[number], answer.problem or answer.value
            if answer.lost and time.perf_counter() >= end:
                continue  # it was not its fault
            waiting.remove(c)
            seen["lost" if answer.lost else "wrong" if said else "right"] += 1
            if said:
                yield {"kernel": name, "case": str(c), "lost" if answer.lost else "wrong": said}
            if seen["lost"] >= MAX_LOST:
                return


def _turned(run: Run, rows: Sequence[Any]) -> list[Any]:
    """`rows` from the place on that the commit gives: where time ends early, each commit's run sees others."""
    start = int(hashlib.sha256(str(run.about.get("commit")).encode()).hexdigest(), 16) % max(1, len(rows))
    return [*rows[start:], *rows[:start]]


def backend(run: Run, end: float) -> Iterator[Row]:
    """Every kernel through the backend on its grids, in turn: rows of what is wrong, and of what each grid declines."""
    with Worker() as worker:
        names = worker.call(60.0, gpu_tasks.grid_names, run.device).value or []
        asked = {
            name: worker.call(60.0, gpu_tasks.backend_rows, name, run.device, run.tiny).value or [] for name in names
        }
    turns = itertools.zip_longest(*([(name, row) for row in _turned(run, asked[name])] for name in names))
    calls = [call for turn in turns for call in turn if call]
    seen = {name: dict.fromkeys(("right", "wrong", "declined", "lost"), 0) for name in names}
    with Pool(run.workers(), gpu_tasks.environment()) as pool:
        tasks = [(gpu_tasks.answered, name, row, run.device) for name, row in calls]
        for number, answer in pool.answers(tasks, run.patience(CHECK), end):
            if answer.lost and time.perf_counter() >= end:
                continue
            name, row = calls[number]
            wrong, declined = answer.value or (answer.problem, "")
            how = "lost" if answer.lost else "wrong" if wrong else "declined" if declined else "right"
            seen[name][how] += 1
            if how != "right":
                yield {"grid": name, "row": str(row), how: (wrong or declined)[:300]}
    left = {name: len(rows) - sum(seen[name].values()) for name, rows in asked.items()}
    yield {"through the backend": seen, "not run": left}


def published(run: Run, end: float) -> Iterator[Row]:
    """Tiny models of transformers against eager, in inference and training: rows of those that are wrong or fail."""
    if not gpu_tasks.installed("transformers"):
        yield {"left out": "transformers is not installed"}
        return
    with Worker() as worker:
        answer = worker.call(60.0, gpu_tasks.published_cases)
    if answer.problem:
        yield {"failed": answer.problem}
        return
    names = answer.value[:2] if run.tiny else _turned(run, answer.value)
    asked = [(name, mode, order) for name in names for mode in ("inference", "training") for order in gpu_tasks.ORDERS]
    counted = ("models", "training", "sites", "fused", "wrong", "failed", "broken")
    seen = {order: dict.fromkeys(counted, 0) for order in gpu_tasks.ORDERS}
    environment = gpu_tasks.environment() | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with Pool(run.workers(), environment) as pool:
        calls = [(gpu_tasks.published, *one, run.device) for one in asked]
        for number, answer in pool.answers(calls, run.patience(CASE), end):
            if answer.lost and time.perf_counter() >= end:
                continue
            name, mode, order = asked[number]
            found = answer.value or {"failed": answer.problem}
            counts = seen[order]
            if found.get("broken"):
                counts["broken"] += 1
                yield {"model": name, "mode": mode, "order": order, "broken": found["broken"]}
                continue
            counts["models"] += 1
            counts["training"] += mode == "training"
            for what in ("sites", "fused", "wrong"):
                counts[what] += int(found.get(what, 0))
            counts["failed"] += bool(found["failed"])
            if found["failed"] or found["wrong"] or found["fused"] < found["sites"]:
                keys = ("sites", "fused", "far", "float64", "wrong", "kinked", "failed", "left")
                yield {"model": name, "mode": mode, "order": order} | {k: v for k in keys if (v := found.get(k))}
    yield {"published": seen, "asked": len(asked)}


# ---- 2: what the others time, compiled


def everything(run: Run, end: float) -> Iterator[Row]:
    """What the later calls run, once, side by side, so that the caches on disk have it."""
    dry, known = Bench(run.device, run.tiny, dry=True), _cases(run)
    cases = [(gpu_tasks.compiled, _kernels(run), case, run.device) for _, case in known]
    timed = [
        (function, [name], dry, *shape)
        for function, names, shape in _to_time(run)
        for name in names
        if name in run.own or name == "flex"
    ]
    programs = programs_of(run.device, gpu_tasks.sizes(run.tiny))
    steps = [(gpu_tasks.first_step, p.name, run.device, run.tiny) for p in programs if p.way.name != EAGER]
    # Each holds up to 4 GiB, a training step 10 to 20: three of them at first, then one after every few cases.
    calls, rest = list[tuple[Any, ...]](steps[:3]), steps[3:]
    few = -(-len(cases) // len(rest))
    for number, step in enumerate(rest):
        calls += [*cases[number * few : (number + 1) * few], step]
    calls += timed
    workers = min(run.workers(), COMPILING)
    with Pool(workers, gpu_tasks.environment() | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}) as pool:
        yield from _compiled(run, pool, calls, end)


def _compiled(run: Run, pool: Pool, calls: Sequence[tuple[Any, ...]], end: float) -> Iterator[Row]:
    """Run each call once, so that the caches on disk have it; a row says how many did."""
    started, done, failed = time.perf_counter(), 0, {}
    for number, answer in pool.answers(calls, run.patience(COMPILE), end):
        if answer.problem and len(failed) < 20:
            failed[" ".join(map(str, calls[number][1:]))[:200]] = answer.problem
        done += not answer.problem
    seconds = round(time.perf_counter() - started, 1)
    yield {"compiled": done, "of": len(calls), "seconds": seconds, "failed": failed}


# ---- 3: how fast


def shapes(tiny: bool) -> list[tuple[int, int, bool]]:
    """(length, head_dim, causal), the most telling first."""
    if tiny:
        return [(64, 16, True), (64, 16, False)]
    plain = [(length, dim, True) for length in (4096, 16384, 512) for dim in (64, 128, 256)]
    more = [(2048, 128, True), (2048, 64, True), (4096, 80, True), (4096, 96, True)]
    full = [(length, dim, False) for length in (4096, 16384, 512) for dim in (64, 128, 256)]
    return plain + more + full


def _to_time(run: Run) -> list[tuple[Callable[..., Any], list[str], tuple[Any, ...]]]:
    """What `speed` calls, the most telling first: a function, the names of what it times, and a shape."""
    own = run.own
    torchs = ["sdpa"] if run.tiny else ["sdpa", "cudnn", "flash", "efficient"]
    sizes = ((2, 65),) if run.tiny else CACHES_READ
    plain = [(gpu_attention.plain, [*torchs, *own], shape) for shape in shapes(run.tiny)]
    decoding = [(gpu_attention.decoding, ["sdpa", *own], size) for size in sizes]
    features = [(gpu_attention.features, ["flex", "sdpa", *own], (feature,)) for feature in BEYOND_PLAIN]
    return [*plain[:6], *decoding[:2], *features, *plain[6:], *decoding[2:]]


def speed(run: Run, end: float) -> Iterator[Row]:
    """Plain attention, what torch has no kernel for, and decoding."""
    tasks = _to_time(run)
    with Worker() as worker:
        for function, names, shape in tasks:
            if time.perf_counter() >= end:
                yield {"not run": f"{function.__name__} {shape}"}
                continue
            answer, broke = spared(worker, run.patience(SHAPE), end, function, names, run.bench, *shape)
            for row in answer.value or [{"what": f"{function.__name__} {shape}", "failed": answer.problem}]:
                yield {"section": function.__name__, **row} | ({"broke": broke} if broke else {})
                if row.get("not_captured"):
                    worker.close()


# ---- 6: in which configs


def sweep(run: Run, end: float) -> Iterator[Row]:
    """Our kernels in other configs than they ship with; last, which is the fastest of each trial."""
    why = "Triton is not installed" if not gpu_tasks.installed("triton") else ""
    why = why or run.earlier.get("wrong kernels", {}).get("triton_flash", "")
    if why:
        yield {"left out": why}
        return
    fastest = {}
    with gpu_sweep.interpreting(run.tiny), Worker() as worker:
        for trial in gpu_sweep.trials(run.tiny):
            if time.perf_counter() >= end:
                yield {"not run": str(trial)}
                continue
            seconds = run.patience(TRIAL)
            arguments = gpu_sweep.swept, trial.names, run.bench, trial, seconds / 2
            answer, broke = spared(worker, seconds, end, *arguments)
            for row in answer.value or [{"failed": answer.problem}]:
                fastest[str(trial)] = gpu_sweep.in_words(row)
                yield {"what": str(trial), **row} | ({"broke": broke} if broke else {})
    yield {"fastest": fastest}


# ---- 4: evidence


def gathered(run: Run, end: float) -> Iterator[Row]:
    """Evidence: each case as written under Inductor and on every kernel, one by one; the GPU's times and the host's."""
    kernels, known = _kernels(run), _cases(run)
    rows: list[evidence.Row] = []
    effort = Effort(2, 0.1, 0.0) if run.tiny else Effort(rounds=9, seconds=0.8)
    with Measuring(run.device, effort, seconds=run.patience(CASE)) as measuring:
        for what, case in known:
            if time.perf_counter() >= end:
                yield {"what": what, "case": str(case), "left out": "no time was left"}
                continue
            seen = measuring.observation(case, end, kernels)
            head = {"what": what, "case": str(case if seen.row is None else seen.row.case)}
            if seen.row is None or (seen.busy and not run.tiny):
                yield head | {"left out": seen.problem or seen.busy, "why_not": dict(seen.why_not)}
                continue
            rows.append(seen.row)
            _write_evidence(run, rows)
            host = {name: round(t.host * 1e6, 2) for name, t in seen.timings.items() if t.host is not None}
            times = {"us": dict(seen.row.times), "host_us": host}
            yield head | times | {"why_not": dict(seen.why_not)}


def _kernels(run: Run) -> list[str]:
    # In plain torch it is measured where there is time; here it would take the time of the others.
    found = ["chunked", "cpu_flash"] if run.tiny else [n for n in kernels_on(run.device) if n != "chunked"]
    return [name for name in found if name not in run.earlier.get("wrong kernels", {})]


def _cases(run: Run) -> list[tuple[str, Case]]:
    """The cases to measure; those first that no evidence of this device has yet."""
    if run.tiny:
        return _small(gpu_cases.cases())
    here = Device.of_machine(run.about["machine"])
    known = {row.case for table in evidence.tables() if table.device == here for row in table.rows}
    return sorted(gpu_cases.cases(), key=lambda one: one[1] in known)


def _small(cases: Iterator[tuple[str, Case]]) -> list[tuple[str, Case]]:
    small = {"dtype": "float32", "batch": 1, "heads": 4, "kv_len": 32, "head_dim": 8, "value_dim": 8}
    return [
        (what, replace(case, **small, q_len=min(case.q_len, 32), kv_heads=max(1, 4 * case.kv_heads // case.heads)))
        for what, case in cases
    ][:3]


def _write_evidence(run: Run, rows: Sequence[evidence.Row]) -> None:
    head = run.about["machine"]
    evidence.write_table(run.results / f"evidence_{run.device.type}_{run.label}.json", head, rows)
    evidence.write_table(evidence.own_path(Device.of_machine(head), torch.__version__), head, rows)


def choices(run: Run, end: float) -> Iterator[Row]:
    """What the picker chooses by this evidence, and what that takes over the best there was."""
    found = run.sections.get("evidence", {}).get("rows", [])
    measured = {row["case"]: row["us"] for row in found if "us" in row}
    with Worker() as worker:
        for what, case in _cases(run):
            times = measured.get(str(case))
            if times is None or time.perf_counter() >= end:
                continue
            answer = worker.call(min(20.0, end - time.perf_counter()), gpu_tasks.picked, case, run.device)
            if answer.problem:
                yield {"what": what, "failed": answer.problem}
                continue
            name, why = answer.value
            row = {"what": what, "case": str(case), "picked": name, "because": why}
            if name in times:
                row |= {"over the best": round(times[name] / min(times.values()), 3)}
                row |= {"over as written": round(times[name] / times[AS_WRITTEN], 3)}
            yield row


# ---- 5: models


def nanogpt(run: Run, end: float) -> Iterator[Row]:
    """`python -m attn_fuse.bench nanogpt`: a row for each program that trains a GPT; its own file lies beside."""
    left, sizes = max(1.0, end - time.perf_counter()), gpu_tasks.sizes(run.tiny)
    path = run.results / f"bench-nanogpt-{run.label}.json"
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {**vars(sizes), "device": run.device.type, "seconds": 0.2 if run.tiny else 3.0, "json": path}
    options["within"] = max(1.0, left - _ENDING)
    command = [sys.executable, "-m", "attn_fuse.bench", "nanogpt"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        yield {"failed": f"stopped after {seconds_in_words(left)}"}
        return
    if done.returncode or not path.exists():
        yield {"failed": f"exit code {done.returncode}: {done.stderr[-1000:]}"}
        return
    found = json.loads(path.read_text())
    yield {"what": "sizes", **found["sizes"], "load": found["load"]}
    for row in found["rows"]:
        head = {"what": row["name"], "vocabulary": row["vocabulary"], "fused": f"{row['fused']} of {row['sites']}"}
        if row["timing"] is None:
            yield head | {"failed": row["problem"]}
            continue
        times = {"seconds": row["timing"]["median"], "peak_bytes": row["peak"], "loss": row["loss"]}
        yield head | times | {"first_call_s": row["first_call"]}


def tests(run: Run, end: float) -> Iterator[Row]:
    """tests/gpu/test_cuda.py, by pytest where it is installed, on several processes where pytest-xdist is."""
    if not gpu_tasks.installed("pytest"):
        yield {"left out": "pytest is not installed"}
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_cuda.py"]
    command += ["-n", str(run.workers())] if gpu_tasks.installed("xdist") else []
    left = max(1.0, end - time.perf_counter())
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=left, check=False, start_new_session=False
        )
        yield {"exit": done.returncode, "said": done.stdout[-4000:] + done.stderr[-1000:]}
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        yield {"failed": f"stopped after {seconds_in_words(left)}", "said": said[-4000:]}


# ---- the six calls

# Seconds of a call that are left for writing and ending.
SPARE = 6.0


@dataclass(frozen=True)
class Call:
    """number: that its results are named by. minutes: that it takes at most. sections: each with the share of what is
    then left that it may take."""

    number: int
    minutes: float
    sections: Mapping[str, tuple[Section, float]]

    def planned(self) -> dict[str, float]:
        """Seconds of each section, where each takes all that it may."""
        left, found = 60 * self.minutes - SPARE, {}
        for name, (_, share) in self.sections.items():
            found[name] = share * left
            left -= found[name]
        return found


# In the order in which they are made: the last section has all the time that others leave.
CALLS = {
    "correct": Call(
        1,
        1.6,
        {
            "ceilings": (ceilings, 0.12), "correctness": (correctness, 0.5), "backend": (backend, 0.5),
            "published": (published, 1.0),
        },
    ),
    "compile": Call(2, 1.9, {"compile": (everything, 1.0)}),
    "sweep": Call(6, 1.35, {"sweep": (sweep, 0.62), "ncu": (ncu, 1.0)}),
    "speed": Call(3, 0.8, {"speed": (speed, 1.0)}),
    "evidence": Call(4, 1.8, {"evidence": (gathered, 0.85), "choices": (choices, 1.0)}),
    "models": Call(5, 1.5, {"nanogpt": (nanogpt, 0.93), "tests": (tests, 1.0)}),
}  # fmt: skip
