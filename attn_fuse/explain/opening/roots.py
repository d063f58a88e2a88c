"""Where a user's files lie: the repository of a file, and what below it belongs to libraries."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT_SIGNS = (
    ".git",
    "setup.py",
    "pyproject.toml",
    "setup.cfg",
    "requirements.txt",
    "README.md",
    "README.rst",
    "README",
)
# A model of the repository that holds this package is explained from its own root.
PACKAGE = Path(__file__).parents[2]
# How far above a file its repository's root may be.
FARTHEST_ROOT = 5


def repository_of(path: Path) -> Path:
    """The root of the repository that holds `path`: the nearest folder above with a sign of one, else its own.

    A folder of a package, which may have a README, too, is none; a clone that is a package is.
    """
    for folder in list(path.parents)[:FARTHEST_ROOT]:
        is_in_package = any((one / "__init__.py").exists() for one in (folder, folder.parent))
        signs = [sign for sign in ROOT_SIGNS if (folder / sign).exists()]
        if ".git" in signs or (signs and not is_in_package):
            return folder
    return path.parent


def projects_around(repository: Path) -> list[Path]:
    """The folders above a repository's root that are a project of their own, as that of which it is an example."""
    signs = (".git", "setup.py", "pyproject.toml")
    return [f for f in list(repository.parents)[:FARTHEST_ROOT] if any((f / sign).exists() for sign in signs)]


def is_users(place: str | Path, roots: Sequence[Path]) -> bool:
    """Whether a file or folder is below one of the roots, and neither in an environment nor in this package, which may
    lie there, too."""
    path = Path(place)
    if "site-packages" in path.parts or not any(path.is_relative_to(root) for root in roots):
        return False
    # The environment may be a link to another place.
    return not any(path.is_relative_to(other) for other in (PACKAGE, Path(sys.prefix), Path(sys.prefix).resolve()))
