"""What the tests of the watch share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.run.watched import RUNS, installed


@pytest.fixture(autouse=True, scope="module")
def _collected_afterwards() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _alone_in_memory(_collected_afterwards: None) -> None:
    """Hide the models and optimizers that other tests have left in memory: the program has to wait for its own.

    They stay hidden until the module ends, so that each test collects only what the one before it has left.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The code of each graph that Inductor is given, which compiles nothing here. Afterwards all is as it was."""
    graphs: list[str] = []

    def compile_fx(graph: Any, inputs: Any, config_patches: Any = None, **_: Any) -> Any:
        graphs.append(graph.code)

        def run(*values: Any) -> Any:
            RUNS.append(graph.code)
            return graph(*values)

        return run

    RUNS.clear()
    before = installed()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    yield graphs
    assert installed() == before
