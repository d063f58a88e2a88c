"""Files that a command will write, checked before it starts. Imports no torch, because `run` must not."""

from __future__ import annotations

import os
from pathlib import Path


def unwritable(flag: str, path: Path) -> str:
    """Why the file of `flag` cannot be written; "" if nothing seems to prevent it."""
    said = f"{flag} {path}: it cannot be written; "
    if path.is_dir():
        return f"{said}that is a folder, name a file"
    if not path.parent.is_dir():
        return f"{said}name a file in a folder that exists"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{said}name a file that you may write"
    return ""


# The first words of a file of code.
CODE = "# The attention of "


def not_ours(flag: str, file: Path) -> str:
    """Why `flag` must not write code to `file`, which exists and holds other text; "" if it may."""
    if file.is_file() and not file.read_text(encoding="utf-8", errors="replace").startswith(CODE):
        return f"{flag} {file}: the file exists, and attn_fuse did not write it; name another"
    return ""
