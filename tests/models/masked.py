"""Attention under a mask or with a bias that the caller passes in.

Each takes query, key, value as [batch, heads, len, head_dim] and the mask; its tuple says which kind of mask.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# ---- Boolean [batch, kv_len], True where the key is seen


def padding_filled(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    att = q @ k.mT / math.sqrt(q.size(-1))
    att = att.masked_fill(~seen[:, None, None, :], float("-inf"))
    return att.softmax(-1) @ v


def padding_viewed(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """DistilBERT."""
    q = q / math.sqrt(q.size(-1))
    scores = torch.matmul(q, k.transpose(2, 3))
    mask = (seen == 0).view(q.shape[0], 1, 1, k.shape[2]).expand_as(scores)
    scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    return torch.matmul(nn_softmax(scores), v)


def nn_softmax(scores: Tensor) -> Tensor:
    return torch.nn.Softmax(dim=-1)(scores)


def padding_where(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen[:, None, None], q @ k.mT * 0.25, -1e9).softmax(-1) @ v


def padding_made_additive(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """BERT."""
    extended = seen[:, None, None, :].to(dtype=q.dtype)
    extended = (1.0 - extended) * torch.finfo(q.dtype).min
    return F.softmax(q @ k.mT / math.sqrt(q.size(-1)) + extended, dim=-1) @ v


def padding_and_causal(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    s = q.shape[-2]
    mask = torch.ones(s, s, dtype=torch.bool).tril() & seen[:, None, None, :]
    return (q @ k.mT * 0.25).masked_fill(mask.logical_not(), float("-inf")).softmax(-1) @ v


def padding_after_causal(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    s = q.shape[-2]
    att = (q @ k.mT * 0.25).masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
    return att.masked_fill(~seen[:, None, None, :], float("-inf")).softmax(-1) @ v


def padding_in_place(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    att = q @ k.mT * 0.25
    att.masked_fill_(seen.unsqueeze(1).unsqueeze(2) == 0, -torch.inf)
    return att.softmax(-1) @ v


PADDING = (
    padding_filled, padding_viewed, padding_where, padding_made_additive, padding_and_causal, padding_after_causal,
    padding_in_place,
)  # fmt: skip


# ---- floating point, broadcast against [batch, heads, q_len, kv_len]


def bias_after_scale(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


def bias_after_division(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1)) + bias, dim=-1) @ v


def bias_on_the_left(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (bias + (q * 0.25) @ k.mT).softmax(-1) @ v


def bias_in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT)
    scores += bias
    return F.softmax(scores.float(), dim=-1).type_as(scores) @ v


def bias_before_scale(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return ((q @ k.mT + bias) / math.sqrt(q.size(-1))).softmax(-1) @ v


def bias_by_add_with_alpha(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.add(q @ k.mT * 0.25, bias, alpha=0.5).softmax(-1) @ v


def bias_subtracted(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 - bias).softmax(-1) @ v


def bias_twice(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + bias + bias.abs()).softmax(-1) @ v


def bias_and_causal(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = q.shape[-2]
    att = q @ k.mT * 0.25 + bias
    return att.masked_fill(torch.ones(s, s).triu(1) == 1, torch.finfo(att.dtype).min).softmax(-1) @ v


def bias_in_three_dimensions(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """BART."""
    b, h, s, d = q.shape
    q, k, v = (x.reshape(b * h, -1, d) for x in (q * d**-0.5, k, v))
    att = torch.bmm(q, k.transpose(1, 2)).view(b, h, s, -1) + bias
    att = F.softmax(att.view(b * h, s, -1), dim=-1)
    return torch.bmm(att, v).view(b, h, s, d)


BIASED = (
    bias_after_scale, bias_after_division, bias_on_the_left, bias_in_place, bias_before_scale,
    bias_by_add_with_alpha, bias_subtracted, bias_twice, bias_and_causal, bias_in_three_dimensions,
)  # fmt: skip


# ---- Boolean, broadcast against [batch, heads, q_len, kv_len], True where the key is seen


def mask_filled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def mask_filled_with_least(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    att = q @ k.mT * 0.25
    return att.masked_fill(keep == 0, torch.finfo(att.dtype).min).softmax(-1) @ v


def mask_annotated_transformer(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if keep is not None:
        scores = scores.masked_fill(keep == 0, -1e9)
    return torch.matmul(scores.softmax(dim=-1), v)


def mask_where(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, q @ k.mT * 0.25, -torch.inf).softmax(-1) @ v


def mask_logarithm(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + keep.to(q.dtype).log()).softmax(-1) @ v


def mask_in_place(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    att = (q @ k.mT).mul_(0.25).masked_fill_(keep.logical_not(), -1e30)
    return att.softmax(-1) @ v


BOOLEAN = (
    mask_filled, mask_filled_with_least, mask_annotated_transformer, mask_where, mask_logarithm, mask_in_place
)  # fmt: skip
