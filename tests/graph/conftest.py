"""What the tests that read a model's file share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model_files import HEADER, Write


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a model file with the usual imports."""

    def _write(source: str, name: str = "model.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER + source)
        return path

    return _write
