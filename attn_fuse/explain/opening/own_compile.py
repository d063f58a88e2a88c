"""The `torch.compile` that a user's files call themselves: explain compiles the whole model instead."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def without_own_compile(is_users: Callable[[str], bool], say: Callable[[str], object]) -> Iterator[None]:
    """Within the block `torch.compile` gives back what it is handed, where a file of the user's calls it; `say` is told
    of the first.

    Dynamo inlines a compiled part of a model that is compiled as a whole, so that the graphs are the same. Of a part
    with default arguments it makes guards that raise an error (torch 2.13).
    """
    compiles = torch.compile
    told: list[str] = []

    @functools.wraps(compiles)
    def left_out(model: Any = None, **options: Any) -> Any:
        if not is_users(sys._getframe(1).f_code.co_filename):
            return compiles(model, **options)
        if not told:
            told.append("torch.compile")
            say("its own calls of torch.compile are left out: the whole model is compiled")
        return model if model is not None else lambda one: one

    torch.compile = left_out
    try:
        yield
    finally:
        torch.compile = compiles
