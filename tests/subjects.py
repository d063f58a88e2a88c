"""What the commands find in a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from attn_fuse.explain.subject import Subject, add_flags, subject_of


def found_in(path: Path, *flags: str) -> Subject:
    """The subject of a file, as the flags of a command line say."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    with subject_of(parser.parse_args([str(path), *flags])) as subject:
        return subject
