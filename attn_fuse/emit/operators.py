"""Operators: functions as named operators, for torch.compile, autograd and torch's caches."""

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

    signature: "NAME(ARGUMENTS) -> RESULTS" in torch's syntax. torch's caches on disk know an operator only by its name:
        put a number into NAME and raise it with every change in the results of `run`.
    fake: returns results in the shapes, strides and dtypes of `run`, for tensors without contents.
    gradient, save: the formula of the gradients, and the setup that saves tensors for it, as for
        `torch.library.register_autograd`; None for an operator without gradients.
    devices: the dispatch keys on which `run` works, such as "CUDA"; all if empty.
    keeps_strides: whether operands must reach `run` in the strides of the trace.
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
    """Tensors without contents in the shapes that a backward operator gives the gradients of `inputs`.

    Gradients that are not `wanted`, or whose input is not floating-point, are empty.
    """
    shapes = [x.shape if want and x.is_floating_point() else (0,) for x, want in zip(inputs, wanted, strict=True)]
    return [x.new_empty(shape) for x, shape in zip(inputs, shapes, strict=True)]
