"""Centring: attention over values less their mean, so that no gradient is what is left of two large numbers.

The gradient of a score is weight * (grad_out . value - grad_out . out). A part that all values have in common cancels
there, but not its roundings: unlike those of softmax's own backward they are the same for all keys of a query, and add
up where keys have a common part as well. Taken off beforehand, the common part has no roundings.

Weights with a sink, a factor or dropout do not sum to 1: of the centre an output then has as much as its weights sum
to, its share, and by way of the share there is a gradient.
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
    """Whether an attention is to be computed over centred values: where there is a gradient to be exact."""
    facts = call.facts
    return facts.training or facts.bias_needs_grad


def sums_to_one(attention: Attention) -> bool:
    """Whether the weights that meet the values do, for every query that sees a key."""
    return attention.dropout_p is None and attention.factor is None and attention.sink is None


def centre_of(query: Tensor, value: Tensor) -> Tensor:
    """The mean of value [B, Hkv, Lk, Dv] over the keys, for each head of query: [B, H, 1, Dv].

    0 where it is not finite, and where the value of some key, hidden or not, is much smaller: to that the centre would
    bring the roundings of others.
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
    """value [B, Hkv, Lk, Dv] less the centre, [B, H, 1, Dv], in `dtype`; itself for an empty centre."""
    if centre.dim() < 4:
        return value
    groups = centre.shape[1] // max(value.shape[1], 1)
    # Laid out as it is multiplied.
    return torch.sub(value.to(dtype), centre[:, :: max(groups, 1)], out=value.new_empty(value.shape, dtype=dtype))


def restored(out: Any, share: Any, centre: Any, made: Callable[..., Any] = lambda f, *args: f(*args)) -> Any:
    """What an attention gives, of what it gives over centred values.

    share [B, H, Lq]: how much of the centre each output has, as a number or a bool; 0 for a query that sees no key.
    made: applies an operation. No gradient goes by way of `centre`: the operators give that of the whole.
    """
    return made(torch.add, out, made(torch.mul, made(torch.unsqueeze, share, -1), centre))
