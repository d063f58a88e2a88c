"""Which file of a directory or package holds its model."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building.choose_entry import AROUND
from attn_fuse.explain.opening.open_file import Say

# Folders that hold no model of the repository's own.
PASSED_OVER = {"tests", "test", "node_modules", "venv", "env", "build", "dist", "site-packages", "__pycache__", "docs"}
MOST_FILES, MOST_BYTES = 2000, 1_000_000
USUAL_NAMES = ("model", "models", "modeling", "transformer", "gpt", "vit", "bert", "net", "network", "unet")


def file_in(folder: Path, say: Say = lambda note: None) -> Path:
    """The file below `folder` that likeliest defines its model, by its classes and its name; `say` is told which.

    Files are read, not run. Raises ExplainError where none defines an nn.Module.
    """
    found = sorted((c for c in map(_candidate, _files(folder)) if c is not None), key=lambda c: c.rank(folder))
    if not found:
        raise ExplainError(
            f"{folder}: no Python file in it defines an nn.Module class; pass the file that builds the model"
        )
    best = found[0].path
    if len(found) > 1:
        others = ", ".join(str(c.path.relative_to(folder)) for c in found[1:4])
        say(f"of {len(found)} files with models, {best.relative_to(folder)} is taken; others: {others}")
    return best


@dataclass(frozen=True)
class _Candidate:
    # A file with modules: how many classes it has, and whether it computes an attention itself.
    path: Path
    classes: int
    attends: bool
    around: bool

    def rank(self, folder: Path) -> tuple[bool, bool, bool, int, int, str]:
        stem = self.path.stem.lower()
        parts = self.path.relative_to(folder).parts
        known = any(stem == name or stem.startswith(f"{name}_") or stem.endswith(f"_{name}") for name in USUAL_NAMES)
        return (self.around, not known, not self.attends, len(parts), -self.classes, str(self.path))


def _files(folder: Path) -> Iterator[Path]:
    count = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in PASSED_OVER and not f.startswith("."))
        for name in sorted(names):
            if name.endswith(".py") and not name.startswith(("test_", "setup.py", "conftest")):
                yield Path(place) / name
                count += 1
                if count >= MOST_FILES:
                    return


def _candidate(path: Path) -> _Candidate | None:
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        text = path.read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(text) if "Module" in text else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return None
    classes = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).rpartition(".")[2] == "Module" for base in node.bases)
    ]
    if not classes:
        return None
    return _Candidate(
        path, len(classes), "softmax" in text or "attention" in text.lower(), all(map(AROUND.search, classes))
    )
