"""Timing: interleaved medians, the load of other programs, and the device that a time was measured on.

A kernel's time on a GPU is the GPU's own. The GPU sleeps while the host issues the calls, so that it never waits for
the host between them; how long the host takes to issue a call is measured apart.
"""

from __future__ import annotations

import datetime
import functools
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from attn_fuse.torch_internals import cuda_sleep

# Max seconds for which the host issues calls to a sleeping GPU. The driver's queue takes about 1,000 launches, each of
# 4 µs or more on the host, and makes the host wait beyond that.
_ISSUING = 4e-3
# A GPU sleeps for so many times the seconds that the host needs, and for no longer than this.
_AHEAD, _LONGEST_SLEEP = 2.0, 0.2


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median and the quartiles of `runs` measurements.

    host: the median of the seconds in which the host issues a call to a GPU; None where they are not measured apart.
    """

    median: float
    lower: float
    upper: float
    runs: int
    host: float | None = None

    def __str__(self) -> str:
        return f"{seconds_in_words(self.median)} ({seconds_in_words(self.lower)}-{seconds_in_words(self.upper)})"


@dataclass(frozen=True)
class Device:
    """The device that times belong to. name: from the driver or the system. threads: those of torch, on a CPU."""

    type: str
    name: str
    threads: int = 0

    def __str__(self) -> str:
        return f"{self.name}, {self.threads} thread{'s' * (self.threads != 1)}" if self.threads else self.name

    @staticmethod
    def of_machine(facts: Mapping[str, Any]) -> Device:
        """The device of a table of times. facts: the table's head, as `machine` gave it."""
        if "gpu" in facts:
            return Device("cuda", str(facts["gpu"]))
        return Device("cpu", str(facts["cpu"]), int(facts["threads"]))


def this_device(device: torch.device) -> Device:
    """The device behind `device`, with the threads that torch uses now."""
    if device.type == "cuda":
        return Device("cuda", torch.cuda.get_device_name(device))
    return Device(device.type, cpu_name(), torch.get_num_threads())


def interleaved(
    callables: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int = 30,
    seconds: float = 60.0,
    shortest: float = 0.0,
    whole_programs: bool = False,
) -> dict[str, Timing]:
    """The time of each callable. Each round measures all of them in a new order, so that drift hits all alike.

    The first call of each does not count. Rounds stop once `seconds` have passed, but not before the third. A round of
    0.3 s or more during which other programs took a tenth of the cores is run again, at most `rounds` times in all and
    while there is time.
    shortest: min seconds of a measurement, about: a faster callable is repeated, and its time divided.
    whole_programs: on a GPU, count what it waits for the host as well, as users of a whole program do.
    """
    apart = device.type == "cuda" and not whole_programs
    repeats = {}
    for name, call in callables.items():
        call()
        time_once, host = _measured(call, 1, device, apart)
        repeats[name] = max(1, round(shortest / max(time_once, 1e-9)))
        if host is not None:
            repeats[name] = max(1, min(repeats[name], int(_ISSUING / max(host, 1e-9))))
    order, kept, again = list(callables), [], rounds  # type: tuple[list[str], list[dict[str, _Measured]], int]
    shuffle = random.Random(0).shuffle
    end = time.perf_counter() + seconds
    while len(kept) < rounds and (time.perf_counter() < end or len(kept) < 3):
        shuffle(order)
        started, load = time.perf_counter(), OtherLoad()
        times = {name: _measured(callables[name], repeats[name], device, apart) for name in order}
        now = time.perf_counter()
        if again and now < end and now - started > 0.3 and load.share() > 0.1:
            again -= 1
        else:
            kept.append(times)
    found = {}
    for name in callables:
        hosts = [host for times in kept if (host := times[name][1]) is not None]
        timing = summary([times[name][0] for times in kept])
        found[name] = replace(timing, host=statistics.median(hosts)) if hosts else timing
    return found


def summary(times: list[float]) -> Timing:
    """The median and quartiles of `times`."""
    if len(times) < 2:
        return Timing(times[0], times[0], times[0], len(times))
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median, lower, upper, len(times))


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Seconds of a call, and of the host to issue it where that is measured apart.
_Measured: TypeAlias = tuple[float, float | None]


def _measured(call: Callable[[], object], repeats: int, device: torch.device, apart: bool) -> _Measured:
    """The time of `call`, the mean of `repeats`. apart: measure the host's time apart from the GPU's."""
    synchronize(device)
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - started) / repeats, None
    host = None
    if apart:
        started = time.perf_counter()
        call()
        host = time.perf_counter() - started
        synchronize(device)
        cuda_sleep(round(min(_AHEAD * host * repeats, _LONGEST_SLEEP) * _cycles_in_a_second(device)))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    synchronize(device)
    return begin.elapsed_time(end) / 1e3 / repeats, host


@functools.cache
def _cycles_in_a_second(device: torch.device) -> float:
    """The clock of a GPU, the fastest of three measurements: an idle GPU speeds up during the first."""
    rates: list[float] = []
    cycles = 10_000_000
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        cuda_sleep(cycles)
        end.record()
        synchronize(device)
        rates.append(cycles / begin.elapsed_time(end) * 1e3)
    return max(rates)


class OtherLoad:
    """The load of other programs on the machine, from the creation of this object on."""

    def __init__(self) -> None:
        self._others, self._wall = _cpu_seconds_of_others(), time.perf_counter()

    def share(self) -> float:
        """The share of the machine's cores that other programs took; 0 where the system does not say."""
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


def machine(device: torch.device) -> dict[str, Any]:
    """What times depend on in the machine and its software, as the head of a table of times."""
    facts = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
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


@functools.cache
def cpu_name() -> str:
    """The model of the CPU, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None


def seconds_in_words(seconds: float) -> str:
    """`seconds` as text, in µs or ms with three digits or in s with two decimals."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.2f} s"


def table(head: list[str], rows: list[list[str]]) -> str:
    """`rows` under `head` in aligned columns; the first column to the left, the others to the right."""
    widths = [max(len(line[column]) for line in [head, *rows]) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [head, *rows]
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
