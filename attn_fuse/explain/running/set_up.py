"""Methods of a model that have to be called before its first run: what sets up its caches, or what forward lacks."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import nn

from attn_fuse.explain.building.sizes import value_for
from attn_fuse.explain.reading.signatures import hints_of, tree_of_function, without_default
from attn_fuse.explain.running.argument_names import CACHES
from attn_fuse.explain.running.declared import LONGEST, USUAL, Sizes
from attn_fuse.explain.steps import TimeUp, trying

# What a method may take.
SECONDS, BYTES = 30.0, 6 << 30


def set_up(model: nn.Module, lacks: Set[str], sizes: Sizes, dtype: torch.dtype, device: torch.device) -> bool:
    """Call the methods of `model` that set up caches, and those of it and its parts that set an attribute of `lacks`.

    sizes, dtype, device: of what is set up. Returns whether a method ran.
    """
    ran = False
    for module in {type(module): module for module in model.modules()}.values():
        for name, method in inspect.getmembers(type(module), inspect.isfunction):
            if name in ("__init__", "forward") or method.__module__.startswith("torch."):
                continue
            if not (module is model and CACHES.search(name)) and not _sets(method) & lacks:
                continue
            hints = hints_of(method)
            needed = [argument for argument in without_default(method) if argument != "self"]
            values = {argument: _value(argument, sizes, dtype, device) for argument in needed}
            values = {a: value_for(a, hints.get(a)) if value is None else value for a, value in values.items()}
            try:
                with trying(SECONDS, BYTES):
                    getattr(module, name)(**values)
            except (Exception, TimeUp):  # it needs more than sizes, or does more than to set up
                continue
            ran = True
    return ran


def _sets(method: Callable[..., Any]) -> set[str]:
    # The attributes of `self` that a method assigns.
    return {
        node.attr
        for node in ast.walk(tree_of_function(method))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def _value(name: str, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Any:
    if "batch" in name:
        return sizes.batch
    if "dtype" in name or "device" in name:
        return dtype if "dtype" in name else device
    return min(sizes.length or USUAL, LONGEST) if re.search(r"len|seq|size|pos", name) else None
