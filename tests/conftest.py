"""What every test starts from: nothing compiled, a known seed. Long random runs only where they are asked for."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import pytest
import torch
from torch._dynamo import guards

try:
    import z3  # noqa: F401
except ImportError:
    # The GPU machine has no solver.
    _CLAIMS = None
else:
    from tests.claims import Claims

    _CLAIMS = Claims()


def pytest_configure() -> None:
    # torch makes the records for tlparse as long as its logger has a handler.
    logging.getLogger("torch.__trace").handlers.clear()
    # After each compilation Dynamo flushes the processor's caches and times the guards.
    guards.profile_guard_manager = lambda *_: 0.0


def pytest_collection_finish() -> None:
    # What is imported by now lives to the end, and the collector need not walk it thousands of times.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _keep_a_share(config, items)
    if "fuzz" in (config.getoption("-m") or ""):
        return
    for item in items:
        if item.get_closest_marker("fuzz"):
            item.add_marker(pytest.mark.skip(reason="a long random run: ask for it with -m fuzz"))


def _keep_a_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    # With SHARE=2/3 in the environment every third case of each test, from the second: CI's commits take turns.
    asked = os.environ.get("SHARE", "1/1")
    first, _, of = asked.partition("/")
    if not (first.isdecimal() and of.isdecimal() and 1 <= int(first) <= int(of)):
        raise pytest.UsageError(f"SHARE={asked!r} is no share; pass one such as 2/3")
    seen: Counter[str] = Counter()
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        # The tests do not all begin with the same case.
        in_share = (seen[name] + crc32(name.encode())) % int(of) == int(first) % int(of)
        in_share |= item.get_closest_marker("every_share") is not None
        (kept if in_share else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield


@pytest.fixture(autouse=True)
def proofs_hold() -> Iterator[None]:
    """Every proof about sizes, integers and positions that a test makes has no counterexample."""
    if _CLAIMS is None:
        yield
        return
    end = _CLAIMS.listen()
    yield
    end()
    assert [*_CLAIMS.wrong()] == []


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput") and _CLAIMS is not None:
        session.config.workeroutput["claims"] = _CLAIMS.counts


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if _CLAIMS is not None:
        _CLAIMS.add(getattr(node, "workeroutput", {}).get("claims", (0, 0, 0)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _CLAIMS is not None and _CLAIMS.checked:
        checked, undecided, beyond = _CLAIMS.counts
        terminalreporter.write_line(
            f"z3: {checked} proofs without a counterexample, {undecided} of them undecided, {beyond} beyond it"
        )
