"""The watch over a program is gone after it, whatever way it ends."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_fuse
from attn_fuse.run.steps import Steps, Stopped
from attn_fuse.run.watch import Watch
from tests.run.watched import Block, inputs, installed, watching

pytestmark = pytest.mark.usefixtures("compiled")


class Ends(Block):
    """Leaves its call by an exception."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        torch._dynamo.graph_break()
        if x.shape[0] == 2:
            raise self.error
        return out


class TestEnds:
    """Whatever way the program ends, the watch takes away what it has installed."""

    @pytest.mark.parametrize("error", [ValueError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
    @pytest.mark.parametrize("steps", [None, 100])
    def test_a_program_that_raises(self, error: BaseException, steps: int | None) -> None:
        before = installed()
        with watching(steps) as watch, pytest.raises(type(error)):
            assert installed() != before
            Ends(error)(inputs())
        assert installed() == before
        watch.end()
        assert installed() == before

    @pytest.mark.parametrize("attends", [True, False])
    def test_one_that_is_stopped_leaves_nothing_that_stops_again(self, attends: bool) -> None:
        gc.collect()
        model, function = Block().eval(), torch.compile(Block().eval(), backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with watching(1), pytest.raises(Stopped):
            model(inputs()).sum().backward()
            optimizer.step()
        for _ in range(4):
            (model if attends else function)(inputs()).sum().backward()
            optimizer.step()

    @pytest.mark.parametrize("steps", [None, 100])
    def test_a_watch_that_ends_in_another_thread_than_it_began(self, steps: int | None) -> None:
        before = installed()
        with watching(steps) as watch:
            Block()(inputs())
            thread = threading.Thread(target=lambda: (Block()(inputs()), watch.end()))
            thread.start()
            thread.join()
            assert installed() == before

    def test_a_watch_that_cannot_begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("no door")

        before = installed()
        monkeypatch.setattr("attn_fuse.run.watch.inductor_door", fail)
        watches = [Watch(steps, False, {}) for steps in (None, Steps(1))]
        for watch in watches:
            with pytest.raises(RuntimeError, match="no door"):
                watch.begin()
            assert installed() == before

    @pytest.mark.parametrize("steps", [None, 100])
    def test_a_program_that_has_installed_attn_fuse_before(self, steps: int | None) -> None:
        with attn_fuse.install():
            before = installed()
            with watching(steps):
                assert installed() != before
            assert installed() == before

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
    def test_a_forked_child_is_not_watched(self) -> None:
        before = installed()
        with watching():
            child = os.fork()
            if child == 0:
                os._exit(installed() != before)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
