"""What the tests of `python -m attn_fuse.explain` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """Writes a source into model.py and gives its path."""

    def _write(source: str) -> str:
        path = tmp_path / "model.py"
        path.write_text(source)
        return str(path)

    return _write
