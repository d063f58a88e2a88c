"""The repository that a file lies in, and which files are the user's own."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path

_ROOT_SIGNS = ("setup.py", "pyproject.toml", "setup.cfg", "requirements.txt", "README.md", "README.rst", "README")
# This package may lie in the repository that is explained.
PACKAGE = Path(__file__).parents[2]
# How far above a file its repository's root may be.
_FARTHEST_ROOT = 5
_MOST_FILES = 2000


def repository_of(path: Path) -> Path:
    """The root of the repository that holds `path`: the nearest folder above with a README or the like.

    A package may hold a README as well, but is a root only if it is a clone. Without a root, it is the file's folder.
    """
    for folder in list(path.parents)[:_FARTHEST_ROOT]:
        is_in_package = any((one / "__init__.py").exists() for one in (folder, folder.parent))
        has_sign = not is_in_package and any((folder / sign).exists() for sign in _ROOT_SIGNS)
        if has_sign or (folder / ".git").exists():
            return folder
    return path.parent


def files_of(root: Path, *suffixes: str) -> list[Path]:
    """The files below a folder that end in one of `suffixes`, without hidden folders and environments; about 2000."""
    found: list[Path] = []
    for place, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in ("site-packages", "node_modules"))
        found += [Path(place) / file for file in sorted(files) if file.endswith(suffixes)]
        if len(found) > _MOST_FILES:
            break
    return found


def is_users(place: str | Path, roots: Sequence[Path]) -> bool:
    """Whether a file or folder lies below one of the roots, but neither in an environment nor in this package."""
    path = Path(place)
    if "site-packages" in path.parts or not any(path.is_relative_to(root) for root in roots):
        return False
    # The environment may be a link to another place.
    return not any(path.is_relative_to(other) for other in (PACKAGE, Path(sys.prefix), Path(sys.prefix).resolve()))


def is_own(cls: type, module: types.ModuleType) -> bool:
    """Whether the repository of `module` defines a class."""
    place = str(getattr(sys.modules.get(cls.__module__), "__file__", None))
    return is_users(place, (repository_of(Path(module.__file__ or "")),))
