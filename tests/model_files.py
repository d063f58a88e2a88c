"""Model files that tests write: how one is written, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attn_fuse.explain.building.build import built
from attn_fuse.explain.building.choose_entry import outermost
from attn_fuse.explain.opening.open_file import imported

HEADER = """
from dataclasses import dataclass
import torch
from torch import nn
"""

# Writes a source below the usual imports, into model.py or the file of a name, and gives its path.
Write = Callable[..., Path]


def model_of(path: Path, notes: list[str] | None = None, **limits: int) -> tuple[Any, tuple[object, ...]]:
    """The model that is built of the file, and what says its sizes; `notes` receives what was made up."""
    with imported(path) as module:
        made = built(outermost(module), vars(module), (notes if notes is not None else []).append, **limits)
    return made.model, tuple(holder for holder in made.holders if type(holder) is not dict)


def net(signature: str, body: str = "pass", name: str = "GPT") -> str:
    """The source of a module whose constructor has a signature and a body."""
    return f"""
class {name}(nn.Module):
    def __init__(self, {signature}):
        super().__init__()
        {body}
"""
