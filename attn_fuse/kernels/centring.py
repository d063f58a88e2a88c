"""Attention over values minus their mean, which keeps gradients accurate.

The gradient of a score is weight * (grad_out . value - grad_out . out). A component common to all values cancels in
this difference, but its rounding errors do not. They are the same for all keys of a query, unlike those of softmax's
own backward, and add up if the keys also have a common component. Subtracting the component first avoids them.

Weights with a sink, a factor or dropout do not sum to 1. An output then contains the centre times the sum of its
weights, called its share, and a gradient flows through the share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attn_fuse.attention.attention import Attention
    from attn_fuse.emit.call import Call


def gains(call: Call) -> bool:
    """Whether to centre the values of an attention, namely if any gradient is wanted."""
    facts = call.facts
    return facts.training or facts.bias_needs_grad


def sums_to_one(attention: Attention) -> bool:
    """Whether the weights that multiply the values sum to 1 in every row that is not fully masked."""
    return attention.dropout_p is None and attention.factor is None and attention.sink is None


def centre_of(query: Tensor, value: Tensor) -> Tensor:
    """The mean of value [B, Hkv, Lk, Dv] over the keys, for each head of query: [B, H, 1, Dv].

    It is 0 for a head whose mean is not finite, or much larger than the value of some key, hidden or not, because that
    value would take on the rounding errors of the others.
    """
    if value.numel() == 0:
        return value.new_zeros(*query.shape[:2], 1, value.shape[-1])
    mean = value.mean(-2, keepdim=True)
    least = value.abs().amax(-1, keepdim=True).amin(-2, keepdim=True)
    most = (2 * least).clamp(max=torch.finfo(value.dtype).max)
    centre = torch.where(mean.abs().amax(-1, keepdim=True) <= most, mean, 0.0)
    groups = query.shape[1] // max(value.shape[1], 1)
    return centre if groups == 1 else centre.repeat_interleave(groups, 1)


def less_centre(value: Tensor, centre: Tensor, dtype: torch.dtype) -> Tensor:
    """value [B, Hkv, Lk, Dv] minus the centre, [B, H, 1, Dv], in `dtype`; `value` itself for an empty centre."""
    if centre.dim() < 4:
        return value
    groups = centre.shape[1] // max(value.shape[1], 1)
    # The products need it contiguous; torch.sub alone would keep the strides of value.
    return torch.sub(value.to(dtype), centre[:, :: max(groups, 1)], out=value.new_empty(value.shape, dtype=dtype))


def restored(out: Any, share: Any, centre: Any, made: Callable[..., Any] = lambda f, *args: f(*args)) -> Any:
    """The output of an attention from its `out` over centred values: out + share * centre.

    share [B, H, Lq]: how much of the centre each output contains, a number or a Boolean; 0 for a fully masked row.
    made: applies an operation. `centre` needs no gradient, since the operators give the gradient of the whole output.
    """
    return made(torch.add, out, made(torch.mul, made(torch.unsqueeze, share, -1), centre))
