"""The softmax and what stands between it and the values: casts, softmax by hand, sinks, dropout, two caches.

Each takes query, key and value as [batch, heads, len, head_dim] unless its entry says otherwise.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import plain
from tests.models.spelling import function, heads, joined, module, noise, square


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))


# ---- casts


def cast_softmax_cast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attn = scores_of(q, k).to(torch.float32)
    attn = torch.softmax(attn, dim=-1)
    return torch.matmul(attn.to(q.dtype), v)


def scores_and_values_in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(scores_of(q, k), dim=-1, dtype=torch.float32)
    return torch.matmul(weights, v.float()).to(v.dtype)


# ---- by hand


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores_of(q, k)
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - m)
    return (e / e.sum(-1, keepdim=True)) @ v


def by_hand_with_max_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores_of(q, k)
    e = (s - s.max(dim=-1, keepdim=True)[0]).exp()
    return torch.div(e, e.sum(dim=-1).unsqueeze(-1)) @ v


def by_hand_without_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(scores_of(q, k))
    return (e / e.sum(dim=-1, keepdim=True)) @ v


def by_hand_with_reciprocal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(scores_of(q, k))
    return (e * e.sum(dim=-1, keepdim=True).reciprocal()) @ v


def divided_after_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores_of(q, k)
    e = torch.exp(s - s.amax(dim=-1, keepdim=True))
    return (e @ v) / e.sum(dim=-1, keepdim=True)


def divided_after_values_without_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores_of(q, k).exp()
    return torch.einsum("bhij,bhjd->bhid", e, v) / e.sum(-1)[..., None]


def exp_of_log_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.exp(F.log_softmax(scores_of(q, k), dim=-1)) @ v


def exp_minus_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores_of(q, k)
    return (s - s.logsumexp(dim=-1, keepdim=True)).exp() @ v


def redundant_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores_of(q, k)
    return (s - s.amax(dim=-1, keepdim=True)).softmax(dim=-1) @ v


def redundant_max_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores_of(q, k)
    s = s - s.amax(dim=-1, keepdim=True).detach()
    return s.softmax(dim=-1) @ v


def redundant_max_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores_of(q, k)
    return F.softmax(s - torch.max(s, dim=-1, keepdim=True).values, dim=-1) @ v


def by_hand_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask multiplies the exponentials, before they are divided."""
    s = scores_of(q, k)
    e = torch.exp(s - s.amax(-1, keepdim=True)) * torch.ones(q.shape[2], k.shape[2], dtype=s.dtype).tril()
    return (e / e.sum(-1, keepdim=True)) @ v


# ---- after the softmax


def nans_to_zero(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    p = scores_of(q, k).masked_fill(~keep, float("-inf")).softmax(dim=-1)
    return torch.nan_to_num(p, nan=0.0) @ v


def nans_chosen_away(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    p = torch.where(keep, scores_of(q, k), float("-inf")).softmax(dim=-1)
    return torch.where(torch.isnan(p), torch.zeros_like(p), p) @ v


def nans_filled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    p = scores_of(q, k).masked_fill(keep.logical_not(), float("-inf")).softmax(dim=-1)
    return p.masked_fill(p != p, 0.0) @ v


def masked_again(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    p = scores_of(q, k).masked_fill(keep == 0, torch.finfo(q.dtype).min).softmax(dim=-1)
    return p.masked_fill(keep == 0, 0.0) @ v


def masked_again_by_product(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    p = F.softmax(scores_of(q, k).masked_fill(~keep, -1e9), dim=-1)
    return (p * keep) @ v


def masked_again_by_choice(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    hidden = ~keep
    p = torch.where(hidden, -torch.inf, scores_of(q, k)).softmax(-1)
    return torch.where(hidden, 0.0, p) @ v


def safe_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten._safe_softmax(scores_of(q, k), -1) @ v


def safe_softmax_by_hand(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """What F.scaled_dot_product_attention decomposes into: rows that see nothing become zero."""
    root = math.sqrt(math.sqrt(1 / q.size(-1)))
    s = (q * root) @ (k * root).transpose(-2, -1)
    s = s + torch.zeros_like(keep, dtype=s.dtype).masked_fill(~keep, float("-inf"))
    nothing = torch.logical_not(torch.logical_not(s == float("-inf")).any(dim=-1, keepdim=True))
    return torch.where(nothing, torch.zeros_like(s), s.softmax(-1)) @ v


# ---- sinks: one more column of scores, without a value


class SinkColumn(nn.Module):
    """gpt-oss, run eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.matmul(q, k.transpose(2, 3)) * 0.25
        s = s + torch.full((q.shape[2], k.shape[2]), float("-inf")).triu(1)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        combined = torch.cat([s, sinks], dim=-1)
        combined = combined - combined.max(dim=-1, keepdim=True).values
        probs = F.softmax(combined, dim=-1, dtype=combined.dtype)
        return torch.matmul(probs[..., :-1], v)


class SinkColumnFirst(SinkColumn):
    """The sink in front, no maximum taken off."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores_of(q, k)
        sinks = self.sinks.view(1, -1, 1, 1).expand(*s.shape[:-1], 1)
        return torch.cat((sinks, s), -1).softmax(-1)[..., 1:] @ v


class SinkInDenominator(SinkColumn):
    """No column: the sink's exponential goes into the sum."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores_of(q, k)
        sinks = self.sinks.reshape(1, -1, 1, 1)
        m = torch.maximum(s.amax(dim=-1, keepdim=True), sinks)
        e = torch.exp(s - m)
        return (e / (e.sum(dim=-1, keepdim=True) + torch.exp(sinks - m))) @ v


class SinkByRescaling(SinkColumn):
    """The plain output, times the share of the weights that the sink leaves."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores_of(q, k)
        share = torch.sigmoid(s.logsumexp(dim=-1, keepdim=True) - self.sinks.view(1, -1, 1, 1))
        return (s.softmax(dim=-1) @ v) * share


def softmax_plus_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A sink of score zero: exp(s) / (1 + sum of exp(s))."""
    s = scores_of(q, k)
    m = s.amax(dim=-1, keepdim=True).clamp(min=0)
    e = torch.exp(s - m)
    return (e / (torch.exp(-m) + e.sum(dim=-1, keepdim=True))) @ v


def softmax_plus_one_without_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(scores_of(q, k))
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


def softmax_plus_one_by_padding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.pad(scores_of(q, k), (0, 1), value=0.0).softmax(-1)[..., :-1] @ v


# ---- dropout


class FunctionalDropout(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = F.softmax(scores_of(q, k), dim=-1)
        return torch.matmul(F.dropout(p, p=0.2, training=self.training), v)


class TorchDropout(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.dropout(scores_of(q, k).softmax(-1), 0.2, self.training) @ v


class ModuleDropout(nn.Module):
    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.dropout(scores_of(q, k).softmax(-1)) @ v


class DropoutOfZero(ModuleDropout):
    def __init__(self) -> None:
        super().__init__(0.0)


class DropoutByRandomNumbers(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = scores_of(q, k).softmax(-1)
        if self.training:
            p = p * (torch.rand_like(p) > 0.2) / 0.8
        return p @ v


class DropoutOfOutput(nn.Module):
    """After the product with the values instead of before it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(scores_of(q, k).softmax(-1) @ v, 0.2, self.training)


# ---- more than one of something


def differential(q1: Tensor, k1: Tensor, v: Tensor, q2: Tensor, k2: Tensor) -> Tensor:
    return scores_of(q1, k1).softmax(-1) @ v - 0.4 * (scores_of(q2, k2).softmax(-1) @ v)


def differential_of_weights(q1: Tensor, k1: Tensor, v: Tensor, q2: Tensor, k2: Tensor) -> Tensor:
    return (scores_of(q1, k1).softmax(-1) - 0.4 * scores_of(q2, k2).softmax(-1)) @ v


def cache_and_new_apart(q: Tensor, k: Tensor, v: Tensor, cached_k: Tensor, cached_v: Tensor) -> Tensor:
    s = torch.cat([q @ cached_k.mT, q @ k.mT], dim=-1) * 0.25
    old, new = s.softmax(dim=-1).split([cached_k.shape[2], k.shape[2]], dim=-1)
    return old @ cached_v + new @ v


def sigmoid_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(scores_of(q, k) - math.log(k.shape[-2])) @ v


def relu_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.relu(scores_of(q, k)) / k.shape[-2]) @ v


_G = "softmax"


def _seen(dtype: torch.dtype) -> tuple[Tensor]:
    keep = torch.rand(2, 1, 7, 11) > 0.4
    keep[..., 3] = True
    return (keep,)


_CASTS = (plain.in_float32_and_back, plain.float_and_type_as, plain.operands_in_float32, cast_softmax_cast)
_BY_HAND = (
    by_hand, by_hand_with_max_values, by_hand_without_max, by_hand_with_reciprocal, divided_after_values,
    divided_after_values_without_max, exp_of_log_softmax, exp_minus_logsumexp, redundant_max, redundant_max_detached,
    redundant_max_values, safe_softmax, softmax_plus_one, softmax_plus_one_without_max, softmax_plus_one_by_padding,
)  # fmt: skip
_AFTER = (
    nans_to_zero, nans_chosen_away, nans_filled, masked_again, masked_again_by_product, masked_again_by_choice,
    safe_softmax_by_hand,
)  # fmt: skip
_DROPOUTS = (FunctionalDropout, TorchDropout, ModuleDropout, DropoutByRandomNumbers, DropoutOfOutput)

SOFTMAXES = (
    *(function(_G, f, heads()) for f in (*plain.SOFTMAXES, cast_softmax_cast, scores_and_values_in_float32)),
    *(function(_G, f, heads(), f"{f.__name__}_bfloat16", dtype=torch.bfloat16) for f in _CASTS),
    function(_G, plain.in_float32_and_back, heads(), "in_float32_and_back_float16", dtype=torch.float16),
    *(function(_G, f, heads()) for f in _BY_HAND),
    function(_G, by_hand_masked, square()),
    *(function(_G, f, joined(heads(), _seen)) for f in _AFTER),
    *(module(_G, kind, heads()) for kind in (SinkColumn, SinkColumnFirst, SinkInDenominator, SinkByRescaling)),
    *(module(_G, kind, heads(), dropout=True) for kind in _DROPOUTS),
    module(_G, DropoutOfZero, heads()),
    function(_G, differential, joined(heads(), noise((2, 3, 7, 16), (2, 3, 11, 16))), sites=2),
    function(
        _G, differential_of_weights, joined(heads(), noise((2, 3, 7, 16), (2, 3, 11, 16))), sites=2,
        exception="softmax(s1) - 0.4 softmax(s2) has rows that sum to 0.6 and may be negative, so no one softmax gives "
        "it; only P1 v - 0.4 P2 v, two attentions with a product each where the program has one, is the same",
    ),
    function(_G, cache_and_new_apart, joined(square(4), noise((2, 3, 7, 16), (2, 3, 7, 16)))),
    function(
        _G, sigmoid_weights, heads(), sites=0,
        exception="each weight is sigmoid(s_ij) of its own score alone: rows have no common denominator",
    ),
    function(
        _G, relu_weights, heads(), sites=0,
        exception="each weight is max(s_ij, 0) / n: rows have no common denominator, and weights may all be zero",
    ),
)  # fmt: skip
