"""Names that older code imports, and that the libraries of today no longer have."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import importlib
import importlib.util
import math
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

import torch

# torch 1.13 removed it, and models took these names from it.
SIX = "torch._six"
OF_SIX: dict[str, Any] = {
    "container_abcs": collections.abc,
    "string_classes": (str, bytes),
    "int_classes": int,
    "inf": math.inf,
    "nan": math.nan,
    "FileNotFoundError": FileNotFoundError,
    "PY3": True,
    "PY37": True,
}
OF_NUMPY: dict[str, Any] = {"int": int, "float": float, "object": object, "complex": complex, "Inf": math.inf}
# torch 1.9 removed it, and DETR's descendants copied torch's attention, which used it.
OF_LINEAR: dict[str, Any] = {"_LinearWithBias": torch.nn.Linear}
OF_TYPING = ("List", "Optional", "Tuple", "Union")
OF_COLLECTIONS = ("Iterable", "Mapping", "MutableMapping", "Sequence", "Callable", "Hashable")


def imported_part(error: AttributeError) -> bool:
    """Import the module below a package that the package lacks as a name; whether there is one.

    An older version of the package imported it.
    """
    if not isinstance(error.obj, types.ModuleType) or not hasattr(error.obj, "__path__"):
        return False
    try:
        importlib.import_module(f"{error.obj.__name__}.{error.name}")
    except Exception:  # it may be missing, or not run on this machine
        return False
    return str(error.name) in vars(error.obj)


@contextlib.contextmanager
def older_names() -> Iterator[None]:
    """Within the block what torch, NumPy and collections once had can be imported; what exists stays as it is."""
    added: list[tuple[types.ModuleType, str]] = []

    def add(module: types.ModuleType, name: str, value: object) -> None:
        if name not in vars(module):
            setattr(module, name, value)
            added.append((module, name))

    if importlib.util.find_spec("numpy") is not None:
        for name, value in OF_NUMPY.items():
            add(importlib.import_module("numpy"), name, value)
    for name, value in OF_LINEAR.items():
        add(torch.nn.modules.linear, name, value)
    # Modules of torch once had these of typing, and files import them from there.
    for name in OF_TYPING:
        add(torch.nn.modules.conv, name, getattr(typing, name))
    for name in OF_COLLECTIONS:
        add(collections, name, getattr(collections.abc, name))
    lacks_six = SIX not in sys.modules and importlib.util.find_spec(SIX) is None
    if lacks_six:
        six = types.ModuleType(SIX)
        vars(six).update(OF_SIX)
        sys.modules[SIX] = six
    try:
        yield
    finally:
        for module, name in added:
            delattr(module, name)
        if lacks_six:
            sys.modules.pop(SIX, None)
