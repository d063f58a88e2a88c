"""What the benchmarks share: interleaved timing, peak memory, the machine, and result files."""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median and the quartiles of `runs` measurements."""

    median: float
    lower: float
    upper: float
    runs: int

    def __str__(self) -> str:
        return f"{seconds_in_words(self.median)} ({seconds_in_words(self.lower)}-{seconds_in_words(self.upper)})"


def interleaved(
    callables: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int = 30,
    seconds: float = 60.0,
    shortest: float = 0.0,
) -> dict[str, Timing]:
    """The time of each callable; every round runs each of them once, in a new order, so that drift hits all alike.

    A first call of each is not counted. Rounds stop early once `seconds` have passed, but not before the third. A round
    of 0.3 s or more during which other programs took a tenth of the cores is run again, at most `rounds` times in all.
    shortest: a measurement repeats a faster callable until about this many seconds are filled, and divides.
    """
    repeats = {}
    for name, call in callables.items():
        call()
        repeats[name] = max(1, round(shortest / max(_timed(call, 1, device), 1e-9)))
    order, kept, again = list(callables), [], rounds  # type: tuple[list[str], list[dict[str, float]], int]
    shuffle = random.Random(0).shuffle
    end = time.perf_counter() + seconds
    while len(kept) < rounds and (time.perf_counter() < end or len(kept) < 3):
        shuffle(order)
        started, load = time.perf_counter(), OtherLoad()
        times = {name: _timed(callables[name], repeats[name], device) for name in order}
        if again and time.perf_counter() - started > 0.3 and load.share() > 0.1:
            again -= 1
        else:
            kept.append(times)
    return {name: summary([times[name] for times in kept]) for name in callables}


def summary(times: list[float]) -> Timing:
    """Median and quartiles of `times`."""
    if len(times) < 2:
        return Timing(times[0], times[0], times[0], len(times))
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median, lower, upper, len(times))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    synchronize(device)
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        synchronize(device)
        return begin.elapsed_time(end) / 1e3 / repeats
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats


class OtherLoad:
    """The share of the machine's cores that other programs took since this was made; 0 where the system cannot say."""

    def __init__(self) -> None:
        self._others, self._wall = _cpu_seconds_of_others(), time.perf_counter()

    def share(self) -> float:
        cores = os.cpu_count() or 1
        taken = _cpu_seconds_of_others() - self._others
        return max(0.0, taken / (cores * (time.perf_counter() - self._wall)))


def _cpu_seconds_of_others() -> float:
    try:
        ticks = [int(count) for count in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK") - time.process_time()


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors alive at once during `call`, above what was alive before it.

    On CUDA it is `max_memory_allocated`; on the CPU the same figure, summed up from the profiler's record of every
    allocation and release by torch. Memory that libraries take behind torch's back is in neither.
    """
    synchronize(device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler reports its own start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on, for the head of a result file."""
    facts = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "capability": f"sm_{properties.major}{properties.minor}",
            "gpu_memory": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return facts


def commit() -> str:
    """The commit checked out, with "+changes" where the package differs from it; "uncommitted" without one."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "attn_fuse", "benchmarks", "examples") else "")
    except (OSError, subprocess.CalledProcessError):
        return "uncommitted"


def store(name: str, device: torch.device, results: Mapping[str, Any]) -> Path:
    """Write `results` below the machine's facts to results/NAME-DEVICE.json."""
    label = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device).lower().replace(" ", "-")
    path = RESULTS / f"{name}-{label}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": machine(device), **results}, indent=1, default=_plain) + "\n")
    return path


def table(head: list[str], rows: list[list[str]]) -> str:
    """Rows in aligned columns; the first column to the left, the others to the right."""
    widths = [max(len(line[column]) for line in [head, *rows]) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, *rows]
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def seconds_in_words(seconds: float) -> str:
    """`seconds` with three digits, in µs, ms or s."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.2f} s"


def bytes_in_words(count: int) -> str:
    """`count` bytes in MiB."""
    return f"{count / 2**20:.1f} MiB"


def _plain(value: object) -> object:
    if isinstance(value, Timing):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} does not go into a result file")


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
