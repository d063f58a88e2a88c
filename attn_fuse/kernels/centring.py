"""Centring: attention over values less their mean, so that a gradient is not what is left of two large numbers.

The gradient of a score is weight * (grad_out . value - grad_out . out). A part that all values have in common cancels
there, but not its roundings: unlike those of softmax's own backward they are the same for all keys of a query, and add
up where keys have a common part as well. Taken off beforehand, the common part has no roundings.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

if TYPE_CHECKING:
    from attn_fuse.call import Call

# In half precision a value less the centre is rounded once more; and the program as written rounds as much as we do.
_DTYPES = (torch.float32, torch.float64)


def gains(call: Call) -> bool:
    """Whether an attention is to be computed over centred values: with a gradient, and with weights that sum to 1."""
    facts, attention = call.facts, call.attention
    whole = attention.dropout_p is None and attention.factor is None and attention.sink is None
    return whole and facts.dtype in _DTYPES and (facts.training or facts.bias_needs_grad)


def centre_of(query: Tensor, value: Tensor) -> Tensor:
    """The mean of value [B, Hkv, Lk, Dv] over the keys, for each head of query: [B, H, 1, Dv].

    0 where it is not finite, or so large that a value less it might not be.
    """
    mean = value.mean(-2, keepdim=True)
    limits = torch.finfo(value.dtype)
    mean = torch.where(mean.abs() < limits.max * limits.eps / 4, mean, 0.0)
    groups = query.shape[1] // max(value.shape[1], 1)
    return mean if groups == 1 else mean.repeat_interleave(groups, 1)


def less_centre(value: Tensor, centre: Tensor) -> Tensor:
    """value [B, Hkv, Lk, Dv] less the centre, [B, H, 1, Dv], in memory as it is multiplied; itself for an empty one."""
    if centre.dim() < 4:
        return value
    groups = centre.shape[1] // max(value.shape[1], 1)
    return torch.sub(value, centre[:, :: max(groups, 1)], out=value.new_empty(value.shape))


def restored(out: Any, row_sum: Any, centre: Any, made: Callable[..., Any] = lambda f, *args: f(*args)) -> Any:
    """What an attention gives, of what it gives over centred values. A query that sees no key has sum 0 and gives 0.

    made: applies an operation. No gradient goes by way of `centre`: the operators give that of the whole.
    """
    empty = made(torch.eq, made(torch.unsqueeze, row_sum, -1), 0)
    return made(torch.add, out, made(torch.where, empty, 0.0, centre))


def attended(call: Call, results: Node) -> Node:
    """What the attention gives, of the results of an operator: out, row_max, row_sum, centre."""
    out = call.node(operator.getitem, results, 0)
    if not gains(call):
        return out
    # As torch's own operations: a function of ours would keep the graph out of torch's caches.
    row_sum, centre = (call.node(operator.getitem, results, n) for n in (2, 3))
    restored_out: Node = restored(out, row_sum, centre, call.node)
    return restored_out
