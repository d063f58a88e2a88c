"""Grouped queries, in the ways people share a key and value head among query heads.

Each takes query [batch, heads, len, head_dim] and key, value [batch, kv_heads, len, head_dim].
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """transformers' Llama."""
    batch, kv_heads, slen, head_dim = x.shape
    if n_rep == 1:
        return x
    x = x[:, :, None, :, :].expand(batch, kv_heads, n_rep, slen, head_dim)
    return x.reshape(batch, kv_heads * n_rep, slen, head_dim)


def by_expand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    return attention(q, repeat_kv(k, groups), repeat_kv(v, groups))


def by_repeat_interleave(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    return attention(q, k.repeat_interleave(groups, dim=1), torch.repeat_interleave(v, groups, 1))


def by_repeat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.unsqueeze(2).repeat(1, 1, groups, 1, 1).flatten(1, 2) for x in (k, v))
    return attention(q, k, v)


def by_five_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, s, d = q.shape
    q = q.view(b, k.shape[1], -1, s, d)
    att = (q @ k.unsqueeze(2).transpose(-2, -1) * d**-0.5).softmax(-1)
    return (att @ v.unsqueeze(2)).reshape(b, h, s, d)


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, s, d = q.shape
    q = q.reshape(b, k.shape[1], -1, s, d) * d**-0.5
    att = torch.einsum("bkgqd,bksd->bkgqs", q, k).softmax(-1)
    return torch.einsum("bkgqs,bksd->bkgqd", att, v).reshape(b, h, s, d)


def by_stack(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Only the key repeated by expand, the value by repeat_interleave: the same order of heads."""
    groups = q.shape[1] // k.shape[1]
    return attention(q, repeat_kv(k, groups), v.repeat_interleave(groups, dim=1))


GROUPED = (by_expand, by_repeat_interleave, by_repeat, by_five_dimensions, by_einsum, by_stack)


def wrong_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads 0, 1, 0, 1: query head h uses key head h mod kv_heads."""
    groups = q.shape[1] // k.shape[1]
    return attention(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1))


def key_and_value_in_different_orders(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    return attention(q, k.repeat_interleave(groups, 1), v.repeat(1, groups, 1, 1))


def repeated_along_the_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With len == head_dim the shapes still fit; the keys are mixed."""
    b, kv, s, d = k.shape
    groups = q.shape[1] // kv
    k = k.unsqueeze(3).expand(b, kv, s, groups, d).reshape(b, kv * groups, s, d)
    return attention(q, k, v.repeat_interleave(groups, 1))
