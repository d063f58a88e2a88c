"""The outermost modules of a program, and the models in its memory that are still to be called."""

from __future__ import annotations

import gc
import sys
from collections.abc import Container
from typing import Any

import torch
from torch import nn

from attn_fuse.torch_internals import compiled_by_author

_TORCHS_OWN = "torch.nn.modules."
_ATTEND = ("torch.nn.modules.activation.MultiheadAttention", "torch.nn.modules.transformer.")


def cannot_attend(module: nn.Module) -> bool:
    """Whether `module` consists of torch's own modules without attention: a loss, a layer, a stack of layers."""
    names = {f"{type(part).__module__}.{type(part).__name__}" for part in module.modules()}
    return all(name.startswith(_TORCHS_OWN) and not name.startswith(_ATTEND) for name in names)


def is_wrapper(module: nn.Module) -> bool:
    """Whether to look at the modules inside `module` instead.

    True for wrappers such as DistributedDataParallel, and if the author compiles or shards parts of `module`, which
    must stay what they are.
    """
    if [*module._modules] == ["module"] or "_is_replica" in module.__dict__:
        return True
    if is_sharded(module) and "forward" in module.__dict__:
        return True
    return any(part is not module and (compiled_by_author(part) or is_sharded(part)) for part in module.modules())


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP gathers the weights of `module` at each call."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = [getattr(fsdp, name, None) for name in ("FSDPModule", "FullyShardedDataParallel")]
    return isinstance(module, tuple(kind for kind in kinds if kind is not None))


def optimizer_exists() -> bool:
    """Whether the program holds an optimizer, a sign that it trains."""
    return any(issubclass(type(one), torch.optim.Optimizer) for one in gc.get_objects())


def others_wait(called: Container[nn.Module]) -> bool:
    """Whether the program holds a model with weights that may attend and of which no part was called yet."""
    # A module without `_modules` is still under construction.
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and "_modules" in one.__dict__]
    inner = {id(part) for one in modules for part in one._modules.values()}
    return any(
        any(part._parameters for part in root.modules())
        and not cannot_attend(root)
        and not any(part in called for part in root.modules())
        for root in modules
        if id(root) not in inner
    )
