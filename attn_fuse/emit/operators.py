"""Operators: functions that stand in a graph by name, as torch.compile, autograd and torch's caches take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("attn_fuse", "FRAGMENT")


def operator(
    signature: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
    devices: Sequence[str] = (),
    keeps_strides: bool = False,
) -> Any:
    """Register attn_fuse::NAME and return the operator.

    signature: "NAME(ARGUMENTS) -> RESULTS", as torch writes them. torch's caches on disk know an operator by its name
        only: put a number into NAME and raise it with every change in what `run` computes.
    fake: gives results of the shapes, strides and dtypes that `run` gives, for tensors without contents.
    gradient, save: the formula of the gradients and what it keeps, as `torch.library.register_autograd` takes them;
        None for an operator without gradients.
    devices: the dispatch keys on which `run` works, as "CUDA"; all where none is named.
    keeps_strides: whether operands must reach `run` in the strides that they were traced with.
    """
    name = signature.partition("(")[0]
    layout = () if keeps_strides else (torch.Tag.flexible_layout,)
    _LIBRARY.define(signature, tags=(torch.Tag.pt2_compliant_tag, *layout))
    for device in devices or ("CompositeExplicitAutograd",):
        _LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"attn_fuse::{name}", fake, lib=_LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(f"attn_fuse::{name}", gradient, setup_context=save, lib=_LIBRARY)
    return getattr(torch.ops.attn_fuse, name).default


def gradients_of_inputs(inputs: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor]:
    """Tensors without contents in the shapes of the gradients that a backward operator gives of `inputs`.

    wanted: whether each input's gradient is; one that is not wanted, or is of no floating-point tensor, is empty.
    """
    shapes = [x.shape if want and x.is_floating_point() else (0,) for x, want in zip(inputs, wanted, strict=True)]
    return [x.new_empty(shape) for x, shape in zip(inputs, shapes, strict=True)]
