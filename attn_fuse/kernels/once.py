"""once: raise on a double backward, for which torch only warns and gives wrong gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def once(gradient: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """`gradient` in the form that `register_autograd` takes; its results raise RuntimeError on a double backward.

    gradient: (ctx, saved tensors, grad_out, gradients of further results) -> tensors, or lists of tensors.
    """

    def found(ctx: Any, grad_out: Tensor, *rest: Any) -> tuple[Any, ...]:
        # Activation checkpointing unpacks saved tensors only once.
        saved = ctx.saved_tensors
        results = gradient(ctx, saved, grad_out, *rest)
        anchor = next((x for x in (grad_out, *saved) if x is not None and x.requires_grad), None)
        if not torch.is_grad_enabled() or anchor is None:
            return results
        flat = [x for result in results for x in (result if isinstance(result, list) else [result])]
        guarded = iter(_Once.apply(anchor, *(x.detach() if isinstance(x, Tensor) else x for x in flat)))
        return tuple([next(guarded) for _ in x] if isinstance(x, list) else next(guarded) for x in results)

    return found


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.clone() for x in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("an attention that attn_fuse has fused cannot be differentiated twice")
