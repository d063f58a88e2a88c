"""What the tests of `python -m attn_fuse.explain` share."""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

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


State = dict[str, object]


def state() -> State:
    """What a file may change of the process and explain puts back."""
    return {
        "modules": {
            name
            for name, module in sys.modules.items()
            if not (getattr(module, "__file__", "") or "").startswith(sys.prefix)
        },
        "path": list(sys.path),
        "meta_path": list(sys.meta_path),
        "argv": list(sys.argv),
        "stdin": sys.stdin,
        "folder": os.getcwd(),
        "compile": torch.compile,
        "load": torch.load,
        "from_url": torch.hub.load_state_dict_from_url,
        "load_state_dict": nn.Module.load_state_dict,
        "torch": set(vars(torch)),
        "nn": set(vars(nn)),
        "collections": set(vars(collections)),
    }


@pytest.fixture
def left_as_it_was() -> Iterator[None]:
    """What the process has before a test it has after it."""
    before = state()
    yield
    after = state()
    assert {name for name in before if before[name] != after[name]} == set()
