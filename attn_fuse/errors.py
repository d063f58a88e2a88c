"""Errors: all that a user can meet. Each message says what was wrong, with which value, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from attn_fuse.torch_internals import PassesThroughDynamo


class AttnFuseError(PassesThroughDynamo, RuntimeError):
    """Base of the errors attn_fuse raises on purpose; Dynamo hands them to the user unwrapped."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)
        self.message = message

    def __str__(self) -> str:
        # Dynamo appends advice on its own debugging to the args of an exception that it lets pass.
        return self.message


class OptionError(AttnFuseError, ValueError):
    """An option that attn_fuse does not know, or an impossible value of an option."""


class NotFusedError(AttnFuseError):
    """Raised under ``options={"strict": True}`` where an attention stays as written."""


class ExplainError(Exception):
    """What `python -m attn_fuse.explain` prints as its one line before it exits with code 2."""


class BenchError(Exception):
    """What `python -m attn_fuse.bench` prints as its one line before it exits with code 2."""


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint to end a message with: ` Did you mean 'x'?` for a known name close to `name`, or all known names."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(known)}."


def first_line(problem: object) -> str:
    """The first line of an error's message; torch's have pages."""
    return str(problem).strip().partition("\n")[0]


def named(problem: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(problem).__name__}: {first_line(problem)}"
