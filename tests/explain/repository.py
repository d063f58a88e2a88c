"""Small repositories that tests write, and the models that explain builds from them."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_fuse.explain import building
from attn_fuse.explain.building import MOST_PARAMETERS, Built
from attn_fuse.explain.choose import candidates
from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.steps import now
from attn_fuse.explain.subject import Subject, add_flags, subject_of

HEADER = """
from dataclasses import dataclass
import torch
from torch import nn
"""
# Seconds for a search that a test expects to succeed: many times the usual.
SECONDS = 60.0

# Writes a text into model.py or a named file, and returns its path.
Write = Callable[..., Path]


@dataclass(frozen=True)
class Case:
    """A model's file, a condition on the model built from it, and parts of the notes on it.

    said: each in another note; none where nothing is made up. files: the repository's other files by name.
    most: how many parameters the model may have.
    """

    source: str
    holds: Callable[[Any], object]
    said: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    most: int = MOST_PARAMETERS


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
    """The model built from the likeliest class of a file, while the file is imported."""
    with imported(path) as module:
        yield building.built(candidates(module)[0], module, most, now() + seconds)


def built(path: Path, most: int = MOST_PARAMETERS, seconds: float = SECONDS) -> Built:
    """The model built from the likeliest class of a file."""
    with built_in(path, most, seconds) as made:
        return made


def everything_said(made: Built) -> bool:
    """Whether the notes give the origin of each argument that the constructor needs."""
    parameters = inspect.signature(type(made.model)).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
    return all(any(f"{name}=" in n or f"{name}." in n for n in made.notes) for name in needed)


def check(write: Write, case: Case) -> None:
    """Check the condition of a case on the model that is built, and that all that is made up is noted."""
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
    """The subject of a file for flags of the command line."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    with subject_of(parser.parse_args([str(path), *flags])) as subject:
        return subject
