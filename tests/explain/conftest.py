"""Fixtures of the tests of `python -m attn_fuse.explain`."""

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


@pytest.fixture(autouse=True)
def no_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget a module `model` that another test of the process imported: repositories here call their file that."""
    monkeypatch.delitem(sys.modules, "model", raising=False)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes a file of a repository; Python files begin with the usual imports."""

    def _write(text: str, name: str = "model.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER + text if path.suffix == ".py" else text)
        return path

    return _write


@pytest.fixture
def model_file(tmp_path: Path) -> Callable[[str], str]:
    """A function that writes a source into model.py and returns its path."""

    def _write(source: str) -> str:
        path = tmp_path / "model.py"
        path.write_text(source)
        return str(path)

    return _write


State = dict[str, object]


def state() -> State:
    """The state of the process that files may change and explain restores."""
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
    """Assert that the state of the process is the same after a test as before it."""
    before = state()
    yield
    after = state()
    assert {name for name in before if before[name] != after[name]} == set()
