"""What the tests of `python -m attn_fuse.explain` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.explain.repository import HEADER, Write


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of a repository: Python below the usual imports, other texts as they are."""

    def _write(text: str, name: str = "model.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER + text if path.suffix == ".py" else text)
        return path

    return _write


@pytest.fixture
def model_file(tmp_path: Path) -> Callable[[str], str]:
    """Writes a source into model.py as it is, and gives its path."""

    def _write(source: str) -> str:
        path = tmp_path / "model.py"
        path.write_text(source)
        return str(path)

    return _write
