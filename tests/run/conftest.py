"""What the tests of the watch share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.run.watched import RUNS, installed


@pytest.fixture(autouse=True)
def _alone_in_memory() -> Iterator[None]:
    """Models and optimizers that other tests have left in memory are none of the program's, which has to wait for its
    own."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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
