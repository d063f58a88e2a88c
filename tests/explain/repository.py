"""Small repositories that tests write, and what explain makes of them."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from attn_fuse.explain.building import MOST_PARAMETERS, Built, all_built
from attn_fuse.explain.choose import candidates
from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.steps import now
from attn_fuse.explain.subject import Subject, add_flags, subject_of

HEADER = """
from dataclasses import dataclass
import torch
from torch import nn
"""
# Seconds that a search may take which a test expects to succeed: many times what it does take.
SECONDS = 60.0

# Writes a text into model.py or the file of a name, and gives its path.
Write = Callable[..., Path]


@dataclass(frozen=True)
class Case:
    """A model's file, what holds for the model that is built of it, and parts of what is said of that.

    files: the repository's other files by name. said: each in another note; none where nothing is made up.
    most: how many parameters the model may have. not_yet: why it is not built so today.
    """

    source: str
    holds: Callable[[Any], object]
    said: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    most: int = MOST_PARAMETERS
    not_yet: str = ""


def parameters(tables: Mapping[str, Case]) -> list[Any]:
    """The cases as parameters of a test, those of a known bug as such."""
    return [
        pytest.param(case, id=name, marks=[pytest.mark.xfail(strict=True, reason=case.not_yet)] if case.not_yet else [])
        for name, case in tables.items()
    ]


def net(signature: str, body: str = "pass", name: str = "GPT") -> str:
    """The source of a module whose constructor has a signature and a body."""
    return f"""
class {name}(nn.Module):
    def __init__(self, {signature}):
        super().__init__()
        {body}
"""


@contextmanager
def built_in(path: Path, most: int = MOST_PARAMETERS, seconds: float = SECONDS) -> Iterator[Built]:
    """What is built first of the likeliest class of a file, while the file is imported."""
    with imported(path) as module:
        cls = candidates(module)[0]
        yield next(all_built(cls, module, most, now() + seconds))


def built(path: Path, most: int = MOST_PARAMETERS, seconds: float = SECONDS) -> Built:
    """What is built first of the likeliest class of a file."""
    with built_in(path, most, seconds) as made:
        return made


def everything_said(made: Built) -> bool:
    """Whether the notes tell where each argument that the constructor needs is from."""
    parameters = inspect.signature(type(made.model)).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
    from_text = any(note.startswith("as in ") for note in made.notes)
    return from_text or all(any(f"{name}=" in n or f"{name}." in n for n in made.notes) for name in needed)


def check(write: Write, case: Case) -> None:
    """What a case says holds for the model that is built, and all that is made up for it is said."""
    for name, text in case.files.items():
        write(text, name)
    made = built(write(case.source), case.most)
    assert case.holds(made.model)
    assert everything_said(made) or not case.said
    for words in case.said:
        assert any(words in note for note in made.notes), made.notes
    assert case.said or made.notes == ()


def size_of_layer(model: Any) -> tuple[int, int]:
    """(in_features, out_features) of the model's layer."""
    return model.layer.in_features, model.layer.out_features


def width(expected: int) -> Callable[[Any], bool]:
    """Whether the layer of a model takes `expected` features."""
    return lambda model: bool(model.layer.in_features == expected)


def found_in(path: Path, *flags: str) -> Subject:
    """The subject of a file, as the flags of a command line say."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    with subject_of(parser.parse_args([str(path), *flags])) as subject:
        return subject
