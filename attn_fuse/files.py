"""Files that a command is to write, checked before it does anything else. Imports no torch: `run` starts here."""

from __future__ import annotations

import os
from pathlib import Path


def unwritable(flag: str, path: Path) -> str:
    """What keeps the file of `flag` from being written, in words; "" where nothing is known to."""
    said = f"{flag} {path}: it cannot be written; "
    if path.is_dir():
        return f"{said}that is a folder, name a file"
    if not path.parent.is_dir():
        return f"{said}name a file in a folder that exists"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{said}name a file that you may write"
    return ""
