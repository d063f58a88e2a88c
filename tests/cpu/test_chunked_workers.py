"""chunked's workers: whatever their number, together they compute what one does, and leave torch's settings alone."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_fuse.bench.memory import peak_memory
from attn_fuse.kernels.chunked import attend as chunked_blocks
from attn_fuse.kernels.chunked import plan as chunked_plan
from attn_fuse.kernels.chunked import workers as chunked_workers
from attn_fuse.kernels.chunked.portions import MOST_SLICES, portions
from attn_fuse.kernels.chunked.workers import MOST_WORKERS, together, workers_and_threads
from attn_fuse.kernels.operands import Operands
from tests.graph.chunked_cases import CASE, Case, Sizes, drawn
from tests.graph.chunked_cases import on_blocks as run
from tests.harness import every_day


@pytest.fixture(params=["torch's threads", "ours"])
def threads(request, monkeypatch):
    """torch.set_num_threads for the test, which runs on torch's own threads and on a pool of ours."""
    if request.param == "ours":
        monkeypatch.setattr(chunked_workers, "_team_of_torch", lambda: None)
    elif chunked_workers._team_of_torch() is None:
        pytest.skip("torch's threads here are not of a library that we know")
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 16])
def test_every_block_of_queries_of_every_plane_is_in_one_portion(workers: int) -> None:
    for planes, blocks in itertools.product((0, 1, 2, 7, 16, 33), (0, 1, 2, 5, 40)):
        found = portions(planes, blocks, workers)
        assert 1 <= len(found) <= workers
        met = [
            (plane, block)
            for portion in found
            for plane in range(*portion.planes)
            for block in range(portion.slice, blocks, portion.slices)
        ]
        assert sorted(met) == list(itertools.product(range(planes), range(blocks)))
        largest = max((p.planes[1] - p.planes[0]) * len(range(p.slice, blocks, p.slices)) for p in found)
        # At least as good as dividing the planes alone, or the blocks alone.
        assert largest <= -(-planes // workers) * blocks
        assert largest <= planes * -(-blocks // min(workers, MOST_SLICES))


# More heads than workers, a single plane, whose queries are divided, and heads that no number of workers divides.
SEVERAL = (Sizes(2, 4, 2, 150, 130, 8, 12), Sizes(1, 1, 1, 91, 101, 16, 16), Sizes(3, 6, 6, 40, 64, 8, 8))


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=n, marks=pytest.mark.thorough if k % 16 else ()) for k, (n, c) in enumerate(CASE.items())],
)
def test_many_workers_compute_what_one_does(case: Case, threads, monkeypatch) -> None:
    for name in ("QUERY_BLOCK", "MOST_QUERIES", "KEY_BLOCK"):
        monkeypatch.setattr(chunked_plan, name, 32)
    for s in SEVERAL:
        torch.manual_seed(0)
        # In float64, sums in another order are the same but for what no mistake would be.
        tensors = drawn(case, s, torch.float64)
        with monkeypatch.context() as patched:
            patched.setattr(chunked_plan, "workers_and_threads", lambda: (1, 1))
            expected = run(case, s, tensors)
        for workers in (2, 3, 5):
            with monkeypatch.context() as patched:
                patched.setattr(chunked_plan, "workers_and_threads", lambda workers=workers: (workers, 1))
                patched.setattr(chunked_plan, "WORKERS_FROM", 0)
                patched.setattr(chunked_plan.Plan, "run", uncompiled)
                threads(workers)
                found = run(case, s, tensors)
                again = run(case, s, tensors)
            torch.testing.assert_close(found, expected, equal_nan=True)
            torch.testing.assert_close(found, again, equal_nan=True, rtol=0, atol=0)


def uncompiled(plan: chunked_plan.Plan, name: str, tensors: Any) -> Any:
    return getattr(plan.steps, name)(*tensors)


@pytest.mark.parametrize(
    "threads", ["torch's threads", pytest.param("ours", marks=pytest.mark.thorough)], indirect=True
)
@pytest.mark.parametrize("inference", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", every_day(["plain", "everything"], "plain"))
def test_compiled_in_workers(name: str, inference: bool, threads, monkeypatch, caplog) -> None:
    """The steps as they are compiled, in inference mode, too, from several threads at once."""
    for setting in ("WORKERS_FROM", "COMPILE_FROM"):
        monkeypatch.setattr(chunked_plan, setting, 0)
    case, s = CASE[name], SEVERAL[0]
    torch.manual_seed(0)
    tensors = drawn(case, s, torch.float32)
    threads(1)
    expected = run(case, s, tensors)

    def call(_: int) -> list[Tensor]:
        threads(2)
        with torch.inference_mode(inference):
            return run(case, s, tensors)

    with ThreadPoolExecutor(3) as callers:
        for found in callers.map(call, range(3)):
            torch.testing.assert_close(found, expected, equal_nan=True)
    assert not [record for record in caplog.records if record.name == "attn_fuse"]


def test_autocast_does_not_reach_into_the_workers(threads, monkeypatch) -> None:
    monkeypatch.setattr(chunked_plan, "WORKERS_FROM", 0)
    case, s = CASE["softcap"], SEVERAL[0]
    tensors = drawn(case, s, torch.float32)
    threads(2)
    expected = run(case, s, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(case, s, tensors), expected)


def test_workers_leave_the_number_of_threads_alone(threads) -> None:
    threads(3)
    names = together(lambda _: threading.get_ident(), range(workers_and_threads()[0]))
    assert len(set(names)) <= 3
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (torch.get_num_threads(), later) == (3, [3])


def test_many_cores_give_each_worker_several_threads(threads) -> None:
    threads(MOST_WORKERS)
    assert workers_and_threads() == (MOST_WORKERS, 1)
    threads(3 * MOST_WORKERS - 1)
    assert workers_and_threads() == (MOST_WORKERS - 1, 3)


def test_a_pool_computes_in_as_many_threads_as_each_worker_has(threads, monkeypatch) -> None:
    monkeypatch.setattr(chunked_workers, "MOST_WORKERS", 2)
    threads(4)
    assert workers_and_threads() == (2, 2)
    assert together(lambda _: torch.get_num_threads(), [0, 1]) == [2, 2]
    assert torch.get_num_threads() == 4


def test_what_a_worker_raises_is_raised(threads) -> None:
    def work(n: int) -> None:
        if n:
            raise IndexError("index 9 is out of bounds")

    threads(2)
    with pytest.raises(IndexError, match="index 9"):
        together(work, [0, 1])
    assert together(str, [0, 1]) == ["0", "1"]


def _squares(results: Any) -> None:
    results.put(together(lambda n: n * n, [2, 3]))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_has_workers_of_its_own(threads) -> None:
    """A data loader forks its workers, and threads do not come along."""
    threads(2)
    assert together(lambda n: n, [0, 1]) == [0, 1]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=_squares, args=(results,))
    process.start()
    try:
        assert results.get(timeout=60) == [4, 9]
    finally:
        process.kill()
        process.join()


def test_the_memory_of_workers_is_counted(threads) -> None:
    """The profiler sees no other thread, and each of two workers has blocks of a MiB and more."""
    query, key, value = torch.randn(3, 1, 8, 1024, 64)
    program = CASE["plain"].program.dumps()
    threads(2)
    how = (query, key, value, [], [], None, 0.0, program)
    memory = peak_memory(lambda: chunked_blocks.attend(Operands(*how)), torch.device("cpu"))
    assert memory > query.nbytes + 2 * 4 * chunked_plan.ELEMENTS_PER_THREAD
