"""Timing: interleaved medians, the load of other programs, and the device that a time belongs to.

A kernel's time on a GPU is the GPU's own. The GPU sleeps while the host issues the calls, and then runs them without
waiting for the host. The host's time to issue a call is measured separately.
"""

from __future__ import annotations

import datetime
import functools
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from attn_fuse.kernels.elsewhere import elsewhere
from attn_fuse.torch_internals import cuda_sleep

# Max seconds in which the host issues calls to a sleeping GPU. The driver's queue holds about 1,000 launches, each of
# 4 µs or more on the host; then the host has to wait.
_ISSUING = 4e-3
# The GPU sleeps about this many times as long as the host needs, up to a max in seconds: cycles of a clock of 2 GHz.
_AHEAD, _LONGEST_SLEEP, _CLOCK = 2.0, 0.2, 2e9


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median and the quartiles of `runs` measurements.

    host: the median seconds in which the host issues a call to a GPU; None if not measured separately.
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
        """The device in the head of a table of times, which `machine` made."""
        if "gpu" in facts:
            return Device("cuda", str(facts["gpu"]))
        return Device("cpu", str(facts["cpu"]), int(facts["threads"]))


def this_device(device: torch.device) -> Device:
    """The device behind `device`, with the threads that torch uses now."""
    if device.type == "cuda":
        other = elsewhere()
        return Device("cuda", torch.cuda.get_device_name(device) if other is None else other.name)
    return Device(device.type, cpu_name(), torch.get_num_threads())


def interleaved(
    callables: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int = 30,
    seconds: float = 60.0,
    shortest: float = 0.0,
    whole_programs: bool = False,
) -> dict[str, Timing]:
    """The time of each callable. Each round measures all of them in a new order, to spread drift evenly.

    The first call of each does not count. Rounds stop after `seconds`, but not before the third.
    shortest: roughly the min seconds of a measurement, for which a fast callable is repeated.
    whole_programs: on a GPU, include its waits for the host, which users of a whole program see.
    """
    apart = device.type == "cuda" and not whole_programs
    repeats = {}
    for name, call in callables.items():
        call()
        once, host = _measured(call, 1, device, apart)
        repeats[name] = max(1, round(shortest / max(once, 1e-9)))
        if host is not None:
            repeats[name] = max(1, min(repeats[name], int(_ISSUING / max(host, 1e-9))))
    measured: dict[str, list[_Measured]] = {name: [] for name in callables}
    order, shuffle, end = list(callables), random.Random(0).shuffle, time.perf_counter() + seconds
    for number in range(rounds):
        if number >= 3 and time.perf_counter() >= end:
            break
        shuffle(order)
        for name in order:
            measured[name].append(_measured(callables[name], repeats[name], device, apart))
    found = {}
    for name, times in measured.items():
        of_device, of_host = zip(*times, strict=True)
        host = None if None in of_host else statistics.median(of_host)
        found[name] = replace(summary(of_device), host=host)
    return found


def summary(times: Sequence[float]) -> Timing:
    """The median and quartiles of `times`."""
    if len(times) < 2:
        return Timing(times[0], times[0], times[0], len(times))
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median, lower, upper, len(times))


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Seconds of a call, and of the host to issue it if that is measured separately.
_Measured: TypeAlias = tuple[float, float | None]


def _measured(call: Callable[[], object], repeats: int, device: torch.device, apart: bool) -> _Measured:
    """The time of `call`, the mean of `repeats`. apart: measure the host's time separately from the GPU's."""
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
        cuda_sleep(round(min(_AHEAD * host * repeats, _LONGEST_SLEEP) * _CLOCK))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    synchronize(device)
    return begin.elapsed_time(end) / 1e3 / repeats, host


class OtherLoad:
    """The load of other programs on the machine since this object was made."""

    def __init__(self) -> None:
        self._others, self._wall = _cpu_seconds_of_others(), time.perf_counter()

    def share(self) -> float:
        """The share of the machine's cores that other programs took; 0 if the system does not say."""
        taken = _cpu_seconds_of_others() - self._others
        return max(0.0, taken / ((os.cpu_count() or 1) * (time.perf_counter() - self._wall)))


def _cpu_seconds_of_others() -> float:
    try:
        ticks = [int(count) for count in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK") - time.process_time()


def machine(device: torch.device) -> dict[str, Any]:
    """The head of a table of times: what they depend on in the machine and its software."""
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
    """The system's name for the model of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`; None if the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None


def seconds_in_words(seconds: float) -> str:
    """`seconds` as text: in µs or ms with three digits, or in s with two decimals."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.2f} s"


def table(head: list[str], rows: list[list[str]]) -> str:
    """`rows` under `head` in aligned columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    form = "  ".join(f"{{:{'>' if n else '<'}{width}}}" for n, width in enumerate(widths))
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(form.format(*line).rstrip() for line in lines)
