"""Cache: the one directory in which attn_fuse keeps files of its own on the user's machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """The directory of measurements on the user's devices.

    $ATTN_FUSE_CACHE if it is set, else attn_fuse in the platform's cache directory: $XDG_CACHE_HOME or ~/.cache, on
    macOS ~/Library/Caches, on Windows %LOCALAPPDATA%.
    """
    chosen = os.environ.get("ATTN_FUSE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "attn_fuse"
