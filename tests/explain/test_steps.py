"""Time limits of the steps of explain, and their messages."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import signal
import time

import pytest

from attn_fuse.errors import ExplainError
from attn_fuse.explain.steps import TimeUp, limited, step


class TestSteps:
    def test_what_cleans_up_is_left_alone(self) -> None:
        done = []
        with pytest.raises(TimeUp), limited(0.1):
            try:
                while True:
                    time.sleep(0.01)
            finally:
                time.sleep(1.5)  # the next alarm comes after a second
                done.append("cleaned up")
        assert done == ["cleaned up"]

    def test_a_handler_that_goes_on_is_stopped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("attn_fuse.explain.steps.CLEANING_UP", 0.5)
        with pytest.raises(TimeUp), limited(0.1):
            try:
                while True:
                    time.sleep(0.01)
            except TimeUp:
                while True:
                    time.sleep(0.01)

    def test_a_limit_strikes_again_where_it_is_caught(self) -> None:
        with pytest.raises(TimeUp), limited(0.1):
            try:
                while True:
                    pass
            except BaseException:  # what training loops do with KeyboardInterrupt
                while True:
                    pass

    def test_waiting_counts_for_a_quarter(self) -> None:
        with limited(0.5):
            time.sleep(0.8)
        with pytest.raises(TimeUp), limited(0.5):
            time.sleep(10)

    def test_a_step_says_what_takes_long(self) -> None:
        message = "building GPT takes more than 0.1 s; build less, or give more with --time-limit"
        with pytest.raises(ExplainError, match=re.escape(message)), step("building GPT", 0.1, "build less"):
            while True:
                pass

    @pytest.mark.parametrize("inner", [0.05, 30.0])
    def test_a_limit_within_another(self, inner: float) -> None:
        start = time.monotonic()
        with pytest.raises(TimeUp), limited(0.3):
            with contextlib.suppress(TimeUp), limited(inner):
                while True:
                    time.sleep(0.01)
            while time.monotonic() - start < 20:
                time.sleep(0.01)

    def test_time_that_is_up_before_a_block_begins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_timer, before = signal.setitimer, signal.getsignal(signal.SIGALRM)

        def fires_at_once(which: int, seconds: float, interval: float = 0.0) -> None:
            monkeypatch.setattr(signal, "setitimer", set_timer)
            set_timer(which, seconds, interval)
            signal.raise_signal(signal.SIGALRM)

        monkeypatch.setattr(signal, "setitimer", fires_at_once)
        monkeypatch.setattr("attn_fuse.explain.steps.now", functools.partial(next, itertools.count(0.0, 100.0)))
        with pytest.raises(TimeUp), limited(30.0):
            raise AssertionError("the block begins")
        assert signal.getsignal(signal.SIGALRM) is before

    def test_no_alarm_is_left(self) -> None:
        with limited(0.1):
            pass
        time.sleep(0.15)
