"""Every test here is marked, works offline, and leaves neither a door open nor a tool's settings behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.ecosystem)


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    """Trainer and accelerate keep settings in the environment and in state shared by all their objects."""
    import attn_fuse

    before = dict(os.environ)
    yield
    attn_fuse.uninstall()
    os.environ.clear()
    os.environ.update(before)
    try:
        from accelerate.state import AcceleratorState
    except ImportError:
        return
    AcceleratorState._reset_state(reset_partial_state=True)
