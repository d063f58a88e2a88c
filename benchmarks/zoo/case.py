"""A case: how a published model is made."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

# (model, positional arguments, keyword arguments), at random, tiny, nothing downloaded
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Build = Callable[[], Made]


@dataclass(frozen=True)
class Package:
    """The cases of one package of the index. name: as `pip install` takes it."""

    name: str
    cases: Mapping[str, Build]


def case(make: Callable[..., nn.Module], inputs: Callable[[], tuple[Any, ...]], *args: Any, **options: Any) -> Build:
    """A case of `make(*args, **options)` on `inputs()`."""
    return lambda: (make(*args, **options), inputs(), {})


def fitting(path: str, sizes: Mapping[str, Any], inputs: Callable[[], tuple[Any, ...]], **options: Any) -> Build:
    """A case of the class at `path` ("package.module.Class"), with those of `sizes` that it knows, then `options`."""

    def build() -> Made:
        module, _, name = path.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        known = inspect.signature(kind.__init__).parameters
        chosen = {size: value for size, value in sizes.items() if size in known} | options
        return kind(**chosen), inputs(), {}

    return build
