"""What every test starts from: nothing compiled, a known seed. Long random runs only where they are asked for."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fuzz: a long random run; only with -m fuzz")
    config.addinivalue_line("markers", "slow: compiles with Inductor")
    # What torch writes down for tlparse: pytest would keep it all.
    logging.getLogger("torch.__trace").disabled = True


def pytest_collection_finish() -> None:
    # What is imported by now lives to the end, and the collector need not walk it thousands of times.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "fuzz" in (config.getoption("-m") or ""):
        return
    for item in items:
        if item.get_closest_marker("fuzz"):
            item.add_marker(pytest.mark.skip(reason="a long random run: ask for it with -m fuzz"))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
