"""Print the changelog's section of a version, for its release: python tools/release_notes.py v0.1.0"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class NotReady(Exception):
    """The one line that says what is to be done before the tag."""


def notes(tag: str, project: str, changelog: str) -> str:
    """The changelog's section of the version that `tag` names.

    project, changelog: the texts of pyproject.toml and CHANGELOG.md. Raises NotReady where the tag is not the project's
    version, or the section is missing, empty, or has no day.
    """
    version = tomllib.loads(project)["project"]["version"]
    if tag != f"v{version}":
        raise NotReady(f"the tag is {tag}, and pyproject.toml has version {version}: the tag must be v{version}")
    sections = re.split(r"(?m)^## ", changelog)[1:]
    found = [section for section in sections if re.split(r"[\s,]", section, maxsplit=1)[0] == version]
    if len(found) != 1:
        raise NotReady(f"CHANGELOG.md has {len(found)} sections of {version}: it must have one")
    heading, _, body = found[0].partition("\n")
    if not re.fullmatch(r"\S+, \d{4}-\d{2}-\d{2}", heading.strip()):
        raise NotReady(f"CHANGELOG.md heads its section {heading!r}: write the day, as in '## {version}, 2026-12-31'")
    if not body.strip():
        raise NotReady(f"CHANGELOG.md says nothing of {version}")
    return body.strip() + "\n"


def main(arguments: Sequence[str]) -> int:
    """Print the notes; gives the exit code, 2 where the version is not ready."""
    if len(arguments) != 1:
        print("usage: python tools/release_notes.py TAG", file=sys.stderr)
        return 2
    try:
        print(notes(arguments[0], (ROOT / "pyproject.toml").read_text(), (ROOT / "CHANGELOG.md").read_text()), end="")
    except NotReady as problem:
        print(f"release: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
