"""Causal attention, in the ways people write the triangle. Query, key and value are [batch, heads, len, head_dim]."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def tril_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
    mask = torch.tril(torch.ones(q.size(-2), k.size(-2), device=q.device))
    return F.softmax(att.masked_fill(mask == 0, float("-inf")), dim=-1) @ v


def tril_bool_inverted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    att = q @ k.mT * 0.25
    return att.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), -torch.inf).softmax(-1) @ v


def triu_bool_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    mask = torch.triu(torch.ones(s, s), diagonal=1).bool()
    return (q @ k.mT * 0.25).masked_fill(mask, -1e9).softmax(-1) @ v


def triu_byte_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    mask = torch.triu(torch.ones((1, s, s), dtype=torch.uint8), diagonal=1) == 0
    return (q @ k.mT * 0.25).masked_fill(mask == 0, torch.finfo(q.dtype).min).softmax(-1) @ v


def where_tril(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    causal = torch.tril(torch.ones((s, s), dtype=torch.bool)).view(1, 1, s, s)
    att = q @ k.mT / math.sqrt(q.shape[-1])
    return torch.where(causal, att, torch.finfo(att.dtype).min).softmax(-1) @ v


def where_triu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    return torch.where(torch.triu(torch.ones(s, s), 1) > 0, float("-inf"), (q @ k.mT) * 0.25).softmax(-1) @ v


def where_full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """GPT-2 in transformers: the fill is a tensor without dimensions."""
    s = q.shape[-2]
    att = q @ k.transpose(-1, -2)
    att = att / torch.full([], v.size(-1) ** 0.5, dtype=att.dtype, device=att.device)
    causal = torch.ones(s, s, dtype=torch.bool).tril()
    least = torch.full([], torch.finfo(att.dtype).min, dtype=att.dtype, device=att.device)
    return F.softmax(torch.where(causal, att.to(att.dtype), least), dim=-1) @ v


def compared_ranges(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[-2])[:, None]
    j = torch.arange(k.shape[-2])[None, :]
    return torch.where(j <= i, q @ k.mT * 0.25, float("-inf")).softmax(-1) @ v


def compared_ranges_greater(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    position = torch.arange(q.shape[-2])
    future = position[None, :] > position[:, None]
    return (q @ k.mT * 0.25).masked_fill(future, float("-inf")).softmax(-1) @ v


def difference_of_ranges(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    position = torch.arange(q.shape[-2])
    distance = position.unsqueeze(1) - position.unsqueeze(0)
    return torch.where(distance >= 0, q @ k.mT * 0.25, -1e10).softmax(-1) @ v


def added_infinities(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    mask = torch.triu(torch.full((s, s), float("-inf")), diagonal=1)
    return F.softmax(q @ k.mT / math.sqrt(q.size(-1)) + mask, dim=-1) @ v


def added_on_the_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    mask = torch.zeros(s, s).masked_fill(torch.triu(torch.ones(s, s, dtype=torch.bool), 1), float("-inf"))
    return F.softmax(mask + q @ k.mT * 0.25, dim=-1) @ v


def added_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    att = q @ k.mT / math.sqrt(q.size(-1))
    att += torch.triu(torch.ones(s, s, dtype=att.dtype) * float(-1e9), diagonal=1)
    return att.softmax(-1) @ v


def added_one_minus(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    mask = torch.tril(torch.ones(s, s))
    return (q @ k.mT * 0.25 + (1.0 - mask) * -1e9).softmax(-1) @ v


def subtracted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    return (q @ k.mT * 0.25 - 1e9 * torch.triu(torch.ones(s, s), 1)).softmax(-1) @ v


def added_least(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    least = torch.finfo(q.dtype).min
    mask = torch.triu(torch.full((s, s), least, dtype=q.dtype), diagonal=1)[None, None, :, :].expand(q.size(0), 1, s, s)
    return F.softmax(q @ k.mT * 0.25 + mask, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def filled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    att = q @ k.mT * 0.25
    att.masked_fill_(torch.ones(s, s, dtype=torch.bool).triu_(1), float("-inf"))
    return att.softmax(-1) @ v


def filled_before_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    att = (q @ k.mT).masked_fill(torch.tril(torch.ones(s, s)) == 0, float("-inf"))
    return (att / math.sqrt(q.shape[-1])).softmax(-1) @ v


def filled_then_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Llama as Meta wrote it."""
    s = q.shape[-2]
    mask = torch.full((1, 1, s, s), float("-inf"), device=q.device)
    mask = torch.triu(mask, diagonal=1).type_as(q)
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
    scores = scores + mask
    return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)


def einsum_and_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = torch.einsum("bhid,bhjd->bhij", q * 0.25, k)
    i, j = att.shape[-2:]
    mask = torch.ones((i, j), dtype=torch.bool, device=att.device).triu(j - i + 1)
    att = att.masked_fill(mask, -torch.finfo(att.dtype).max)
    return torch.einsum("bhij,bhjd->bhid", att.softmax(dim=-1), v)


def in_three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, s, d = q.shape
    q, k, v = (x.reshape(b * h, s, d) for x in (q, k, v))
    att = torch.baddbmm(torch.empty(b * h, s, s, dtype=q.dtype), q, k.mT, beta=0, alpha=d**-0.5)
    att = att.view(b, h, s, s).masked_fill(torch.ones(s, s).triu(1).bool(), float("-inf")).view(b * h, s, s)
    return torch.bmm(att.softmax(-1), v).view(b, h, s, d)


def transposed_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys down, queries across: the softmax runs over the rows and the triangle is the upper one."""
    s = q.shape[-2]
    att = (k @ q.mT * 0.25).masked_fill(torch.ones(s, s).triu() == 0, float("-inf"))
    return att.softmax(-2).mT @ v


CAUSAL = (
    tril_filled, tril_bool_inverted, triu_bool_filled, triu_byte_filled, where_tril, where_triu, where_full,
    compared_ranges, compared_ranges_greater, difference_of_ranges, added_infinities, added_on_the_left,
    added_in_place, added_one_minus, subtracted, added_least, filled_in_place, filled_before_scale,
    filled_then_float32, einsum_and_where, in_three_dimensions, transposed_scores,
)  # fmt: skip


# ---- not the square triangle


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return torch.where((j <= i) & (i - j < 3), q @ k.mT * 0.25, float("-inf")).softmax(-1) @ v


def band_of_two_triangles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ones = torch.ones(q.shape[-2], k.shape[-2])
    return (q @ k.mT * 0.25).masked_fill(torch.tril(ones) * torch.triu(ones, -2) == 0, -1e9).softmax(-1) @ v


def prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return torch.where((j <= i) | (j < 4), q @ k.mT * 0.25, float("-inf")).softmax(-1) @ v


def bottom_right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last query sees every key: what a cache of past keys needs."""
    q_len, kv_len = q.shape[-2], k.shape[-2]
    mask = torch.tril(torch.ones(q_len, kv_len), diagonal=kv_len - q_len)
    return (q @ k.mT * 0.25).masked_fill(mask == 0, float("-inf")).softmax(-1) @ v


def reversed_triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    return (q @ k.mT * 0.25).masked_fill(torch.tril(torch.ones(s, s), -1) == 1, float("-inf")).softmax(-1) @ v


def one_key_further(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.shape[-2]
    return (q @ k.mT * 0.25).masked_fill(torch.tril(torch.ones(s, s), 1) == 0, float("-inf")).softmax(-1) @ v


def causal_and_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads, s = q.shape[1], q.shape[-2]
    slopes = torch.tensor([2.0 ** (-8.0 * (n + 1) / 4) for n in range(4)])[:heads]
    position = torch.arange(s)
    bias = slopes[:, None, None] * (position[None, :] - position[:, None])
    att = q @ k.mT * 0.25 + bias
    return att.masked_fill(torch.ones(s, s).triu(1).bool(), float("-inf")).softmax(-1) @ v


MASKED = (window, band_of_two_triangles, prefix, bottom_right, reversed_triangle, one_key_further, causal_and_alibi)
