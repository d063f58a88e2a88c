"""Workers: calls in other processes, and what becomes of those that break theirs."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from attn_fuse.picker.workers import Answer, Worker, note, spared
from pool import Pool


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker({"A_WORD": "said"}) as made:
        yield made


def variable(name: str) -> str | None:
    return os.environ.get(name)


def notes(*words: str, then: str = "") -> str:
    for word in words:
        note(word)
    return then


def noted_and_died(*_: object) -> None:
    note("first")
    note("last")
    os.abort()


def each(names: list[str], *bad: str) -> list[str]:
    """Goes through the names, dies of the first bad one and hangs at another."""
    for name in names:
        note(name)
        if name in bad[:1]:
            os.abort()
        if name in bad[1:]:
            time.sleep(60)
    note("")
    return names


def starts_another() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid


def lives(pid: int) -> bool:
    """A process that ended and that nobody asked about does not live."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    """Whether the process ends soon."""
    end = time.perf_counter() + 10
    while lives(pid) and time.perf_counter() < end:
        time.sleep(0.05)
    return not lives(pid)


def test_calls_run_in_one_process_with_its_environment(worker: Worker) -> None:
    pid = worker.call(60, os.getpid)
    assert pid.value != os.getpid() and not pid.problem
    assert worker.call(60, variable, "A_WORD").value == "said" and "A_WORD" not in os.environ
    assert worker.call(60, os.getpid).value == pid.value


def imported(name: str) -> bool:
    return name in sys.modules


def test_torch_is_imported_only_where_a_call_needs_it(worker: Worker) -> None:
    assert not worker.call(60, imported, "torch").value


def test_what_a_call_raises_is_its_problem(worker: Worker) -> None:
    pid = worker.call(60, os.getpid).value
    assert worker.call(60, int, "x").problem == "ValueError: invalid literal for int() with base 10: 'x'"
    assert worker.call(60, sys.exit, 3).problem == "SystemExit: 3"
    assert "Can't pickle" in worker.call(60, eval, "lambda: 3").problem
    with pytest.raises((pickle.PicklingError, AttributeError), match="Can't pickle"):
        worker.call(60, notes, lambda: 3)
    assert worker.call(60, os.getpid).value == pid


@pytest.mark.parametrize(
    ("seconds", "call", "problem", "doing"),
    [
        (60, (os._exit, 3), "its process died with exit code 3", ""),
        (60, (noted_and_died,), "its process died of signal SIGABRT", "last"),
        (0.5, (time.sleep, 60), "stopped after 0.5 s", ""),
    ],
)
def test_a_process_that_a_call_broke_is_replaced(worker: Worker, seconds, call, problem: str, doing: str) -> None:
    before = worker.call(60, os.getpid).value
    answer = worker.call(seconds, *call)
    assert answer.lost and problem in answer.problem and answer.value is None and answer.doing == doing
    assert not lives(before)
    assert worker.call(60, os.getpid).value != before


def test_what_a_process_started_ends_with_it(worker: Worker) -> None:
    pid = worker.call(60, starts_another).value
    assert lives(pid)
    worker.close()
    assert ends(pid)


def test_a_note_goes_with_the_answer(worker: Worker) -> None:
    answer = worker.call(60, notes, "one", "two")
    assert (answer.value, answer.doing, answer.lost) == ("", "two", False)
    assert worker.call(60, notes).doing == ""
    note("nobody hears that")


def test_what_breaks_the_process_is_spared(worker: Worker) -> None:
    end = time.perf_counter() + 100
    answer, broke = spared(worker, 2.0, end, each, ["a", "b", "c", "d"], "b", "d")
    assert answer.value == ["a", "c"] and not answer.problem
    assert broke == {"b": "its process died of signal SIGABRT", "d": "stopped after 2 s"}
    # What is ended because all time is up is nobody's fault.
    answer, broke = spared(worker, 60.0, time.perf_counter() + 1.0, each, ["a", "d"], "b", "d")
    assert answer.lost and not broke
    answer, broke = spared(worker, 2.0, end, noted_and_died, [])
    assert answer.lost and not broke


def test_a_pool_answers_all_and_replaces_its_workers() -> None:
    calls = [(time.sleep, 0.01), (os.kill, 0, 0), (time.sleep, 60), (os._exit, 1), (variable, "PATH")]
    with Pool(2) as pool:
        found = dict(pool.answers(calls, 1.0))
        assert {number for number, answer in found.items() if answer.lost} == {2, 3} and len(found) == 5
        assert found[4].value == os.environ["PATH"]
        # Once the time is up nothing is begun, and what runs is ended.
        started = time.perf_counter()
        found = dict(pool.answers([(time.sleep, 60)] * 3, 60.0, started + 1.0))
        assert time.perf_counter() - started < 20 and sorted(found) == [0, 1] and all(a.lost for a in found.values())
        # Who asks for no more ends what runs.
        for _, answer in pool.answers([(time.sleep, 0.0), (time.sleep, 60)], 60.0):
            assert answer == Answer()
            break
        assert time.perf_counter() - started < 40
        assert dict(pool.answers([], 1.0)) == {}


def test_who_asks_for_no_more_leaves_a_pool_that_answers() -> None:
    with Pool(2) as pool:
        for _ in range(10):
            # The process that dies is about to be replaced.
            for _, answer in pool.answers([(os.abort,), (abs, -1), (os.abort,), (abs, -1)], 60.0):
                if answer.lost:
                    break
            found = dict(pool.answers([(abs, -1)] * 3, 60.0))
            assert [found[number].value for number in range(3)] == [1, 1, 1]


def test_a_process_killed_between_two_calls_is_replaced() -> None:
    with Worker() as worker:
        assert worker.call(60.0, abs, -1).value == 1
        worker.kill()
        assert worker.call(60.0, abs, -1).value == 1


def test_what_fails_beside_the_calls_reaches_the_caller(monkeypatch) -> None:
    monkeypatch.setattr(Worker, "call", lambda self, *_: 1 // 0)
    with Pool(2) as pool, pytest.raises(ZeroDivisionError):
        dict(pool.answers([(abs, -1)] * 3, 60.0))


HELD = []


def holds_a_semaphore() -> None:
    HELD.append(multiprocessing.Lock())


def test_an_idle_worker_gives_its_semaphores_back() -> None:
    program = (
        "from attn_fuse.picker.workers import Worker\nfrom tests.cpu.test_workers import holds_a_semaphore\n"
        "if __name__ == '__main__':\n    with Worker() as worker: print(worker.call(60, holds_a_semaphore).problem)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert done.stdout == "\n" and "leaked" not in done.stderr, done.stderr


def test_a_worker_ends_with_its_program() -> None:
    program = (
        "import os; from attn_fuse.picker.workers import Worker\n"
        "if __name__ == '__main__': print(Worker().call(60, os.getpid).value, flush=True); {}"
    )
    for then in ("pass", "1 / 0", f"os.kill(os.getpid(), {signal.SIGKILL.value})"):
        done = subprocess.run([sys.executable, "-c", program.format(then)], capture_output=True, text=True, timeout=60)
        assert ends(int(done.stdout))


def test_a_worker_leaves_its_callers_program_alone(tmp_path: Path) -> None:
    """A training script without a guard around its main part does not train again."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nfrom attn_fuse.picker.workers import Worker\nprint('trains')\n"
        "with Worker() as worker: print(worker.call(60, os.getpid).value != os.getpid())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment
    )
    assert done.stdout == "trains\nTrue\n", done.stderr


def prints_and_dies(code: int) -> None:
    print("by Python", flush=True)
    os.write(2, b"one line\nand the last\n")
    os._exit(code)


def test_what_a_quiet_worker_prints_is_in_the_problem_that_ends_it(capfd) -> None:
    with Worker(quiet=True) as worker:
        answer = worker.call(60, prints_and_dies, 3)
        assert answer.problem == "its process died with exit code 3: and the last"
        assert worker.call(60, print, "said").value is None
    assert capfd.readouterr() == ("", "")


def test_a_process_that_does_not_start(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('out of luck')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with Worker(quiet=True) as worker:
        answer = worker.call(60, os.getpid)
        assert answer.lost and answer.problem.startswith("its process could not start with exit code 1: ")


def test_without_process_groups(monkeypatch) -> None:
    """Windows has none."""
    monkeypatch.delattr(os, "killpg")
    with Worker() as worker:
        before = worker.call(60, os.getpid).value
        answer = worker.call(0.5, time.sleep, 60)
        assert answer == Answer(problem="stopped after 0.5 s", lost=True) and ends(before)
        assert worker.call(60, os.getpid).value != before
