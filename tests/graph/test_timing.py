"""The clock on a GPU, on one that is computed: a queue that the host fills and that runs its launches in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import pytest
import torch

from attn_fuse.picker import timing
from attn_fuse.picker.timing import interleaved

GPU = torch.device("cuda")
CLOCK = 1.5e9


class Computed:
    """A GPU with its host's clock. waited: seconds in which the host waited for a place in the queue."""

    def __init__(self) -> None:
        self.now = self.idle_from = 100.0
        self.pending: deque[float] = deque()
        self.waited = self.slept = 0.0

    def launch(self, gpu: float, host: float) -> None:
        self.now += host
        while self.pending and self.pending[0] <= self.now:
            self.pending.popleft()
        if len(self.pending) >= 1024:
            free = self.pending.popleft()
            self.waited += free - self.now
            self.now = free
        self.idle_from = max(self.idle_from, self.now) + gpu
        self.pending.append(self.idle_from)

    def sleep(self, cycles: int) -> None:
        self.slept += cycles / CLOCK
        self.launch(cycles / CLOCK, 4e-6)

    def synchronize(self, device: object = None) -> None:
        self.now = max(self.now, self.idle_from)

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    def call(self, gpu: float, host: float, launches: int = 1) -> Callable[[], None]:
        def run() -> None:
            for _ in range(launches):
                self.launch(gpu / launches, host / launches)

        return run


class Event:
    def __init__(self, gpu: Computed) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.gpu.launch(0.0, 0.0)
        self.at = self.gpu.idle_from

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Computed:
    made = Computed()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(timing, "cuda_sleep", made.sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


def test_a_time_on_a_gpu_is_its_own_and_the_hosts_stands_apart(gpu: Computed) -> None:
    calls = {"fast": gpu.call(20e-6, 200e-6, 4), "slow": gpu.call(2e-3, 50e-6), "even": gpu.call(60e-6, 60e-6, 15)}
    found = interleaved(calls, GPU, rounds=9, seconds=0.8, shortest=2e-3)
    assert {name: t.median for name, t in found.items()} == pytest.approx({"fast": 20e-6, "slow": 2e-3, "even": 60e-6})
    assert {name: t.host for name, t in found.items()} == pytest.approx({"fast": 2e-4, "slow": 5e-5, "even": 6e-5})


def test_the_queue_is_not_filled_beyond_what_it_takes(gpu: Computed) -> None:
    """Where the host has to wait for a place, the GPU is awake before all calls are issued."""
    found = interleaved({"many": gpu.call(1e-6, 4e-6)}, GPU, rounds=3, seconds=1.0, shortest=10.0)
    assert gpu.waited == 0 and found["many"].median == pytest.approx(1e-6)


def test_a_whole_program_is_timed_with_what_the_gpu_waits_for(gpu: Computed) -> None:
    found = interleaved({"step": gpu.call(1e-3, 5e-3, 50)}, GPU, rounds=3, seconds=1.0, whole_programs=True)
    assert found["step"].median == pytest.approx(5.02e-3) and found["step"].host is None and not gpu.slept


def test_a_host_that_hangs_once_lets_the_gpu_sleep_for_a_moment_only(gpu: Computed) -> None:
    times = iter([1e-4, 30.0])
    interleaved({"a": lambda: gpu.launch(1e-4, next(times, 1e-4))}, GPU, rounds=3, seconds=1.0, shortest=2e-3)
    assert gpu.slept < 0.5


def test_on_a_cpu_there_is_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "cuda_sleep", lambda cycles: pytest.fail("it slept"))
    (found,) = interleaved({"a": lambda: time.sleep(1e-3)}, torch.device("cpu"), rounds=3, seconds=0.1).values()
    assert found.median >= 1e-3 and found.host is None
