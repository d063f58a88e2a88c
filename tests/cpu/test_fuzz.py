"""Attention programs drawn at random: fused correctly, or left alone with a reason.

tests/fuzz describes, draws, writes and tries them. Each program is compared with itself run eagerly in float64, fused
or not, and the whole rewritten program with the written one; one that fails is made smaller and printed as source that
stands alone.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.description import Program
from tests.fuzz.draw import PROGRAMS, drawn, drawn_with_numbers
from tests.fuzz.trial import Tally, smallest
from tests.fuzz.write import write

EXAMPLES = 200
# Programs that whole numbers move: in the everyday tests, and in the thorough ones after those.
NUMBERED = (0, 2, 128)
# Of the attentions that were not mutated. The others are written in place, or are in the list that `make fuzz` prints.
LEAST_FUSED = 0.9
# Making a program smaller takes some seconds.
MOST_FAILURES_SHOWN = 5


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of programs, compiled one after the other, are not worth their log."""
    monkeypatch.setattr(logging.getLogger("attn_fuse"), "disabled", True)


def drawing(count: int, run: Callable[[Program], None], **how: object) -> Callable[[], None]:
    """Calls `run` on `count` programs. What fails is kept by the tally, so that one failure does not hide the next."""
    checks = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    return settings(max_examples=count, phases=(Phase.generate,), **checks, **how)(given(PROGRAMS)(run))


def assert_nothing_found(tally: Tally) -> None:
    shown = [str(smallest(failure)) for failure in tally.failures[:MOST_FAILURES_SHOWN]]
    assert not tally.failures, f"{len(tally.failures)} of the programs fail:\n\n" + "\n\n".join(shown)


def with_numbers(first: int, count: int) -> Tally:
    """Programs moved by whole numbers, each called again at other sizes and at numbers of both signs."""
    tally = Tally()
    for n in range(first, first + count):
        tally.run(drawn_with_numbers(n))
    assert tally.counts["programs"] == count
    assert_nothing_found(tally)
    assert tally.counts["called again: reused"] >= 2 * count, str(tally)
    assert tally.counts["called again, fused: reused"] >= count, str(tally)
    return tally


def test_some_called_again_at_other_numbers() -> None:
    with_numbers(NUMBERED[0], NUMBERED[1])


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(8))
def test_called_again_at_other_numbers(part: int) -> None:
    each = (NUMBERED[2] + 7) // 8
    with_numbers(NUMBERED[1] + part * each, each)


@pytest.mark.thorough
def test_fused_correctly_or_left_alone() -> None:
    tally = Tally()
    drawing(EXAMPLES, lambda program: tally.run(program), derandomize=True)()
    assert_nothing_found(tally)
    assert tally.counts["programs"] >= EXAMPLES
    assert tally.counts["not run: eager raises"] <= EXAMPLES // 20, str(tally)
    assert tally.share_fused >= LEAST_FUSED, str(tally)


def test_a_program_is_the_same_whenever_it_is_drawn() -> None:
    assert write(drawn(2**63 + 5)) == write(drawn(2**63 + 5)) != write(drawn(2**63 + 6))


@pytest.mark.fuzz
def test_long_run(capsys: pytest.CaptureFixture[str]) -> None:
    """FUZZ_SECONDS: how long; FUZZ_SEED: to repeat a run; FUZZ_INDUCTOR: one program in so many goes on to Inductor."""
    first = int(os.environ.get("FUZZ_SEED", random.randrange(2**31)))
    seconds = float(os.environ.get("FUZZ_SECONDS", 900))
    every = int(os.environ.get("FUZZ_INDUCTOR", 50))
    tally, started = Tally(), time.monotonic()
    with capsys.disabled():
        print(f"\nFUZZ_SEED={first} FUZZ_SECONDS={seconds:.0f} FUZZ_INDUCTOR={every}")

    def run(program: Program) -> None:
        if time.monotonic() - started < seconds:
            through_inductor = every and tally.counts["programs"] % every == every - 1
            tally.run(program, "inductor" if through_inductor else "eager")

    for n in range(10**6):
        if time.monotonic() - started >= seconds:
            break
        for numbered in range(first + 200 * n, first + 200 * (n + 1)):
            run(drawn_with_numbers(numbered))
        seed(first + n)(drawing(200, lambda program: run(program)))()
    with capsys.disabled():
        print(tally)
    assert_nothing_found(tally)
