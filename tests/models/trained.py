"""What matters in training: biases that learn, masks that need a gradient, two dtypes, dropout among the rest.

Each takes query, key and value as [batch, heads, len, head_dim] unless its entry says otherwise.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import causal, masked, modules, plain
from tests.models.spelling import function, given, heads, heads_last, hidden, joined, module, noise, square

# ---- biases that learn


class BiasParameter(nn.Module):
    """One number for each head, query and key."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 3, 32, 32))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_len, kv_len = q.shape[-2], k.shape[-2]
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        return (scores + self.bias[:, :, :q_len, :kv_len]).softmax(-1) @ v


class BiasOfKeys(nn.Module):
    """One number for each head and key."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3, 1, 11))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 0.25 + self.bias).softmax(-1) @ v


class BiasOfDistances(nn.Module):
    """An embedding of the distance, cut off at 4 either way, under a triangle."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 3)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(q.shape[-2])
        distance = (position[None, :] - position[:, None]).clamp(-4, 4) + 4
        scores = q @ k.mT * 0.25 + self.embedding(distance).permute(2, 0, 1)
        return scores.masked_fill(distance > 4, float("-inf")).softmax(-1) @ v


class LearnedSlopes(nn.Module):
    """ALiBi whose slopes learn."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.zeros(3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(q.shape[-2], dtype=q.dtype)
        distance = (position[:, None] - position[None, :]).abs()
        return (q @ k.mT * 0.25 - self.slopes.exp()[:, None, None] * distance).softmax(-1) @ v


class BiasByNetwork(nn.Module):
    """Swin v2's continuous positions: a small network of the offsets, 16 times a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 3, bias=False))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        position = torch.arange(q.shape[-2], dtype=q.dtype)
        bias = 16 * torch.sigmoid(self.mlp((position[:, None] - position).unsqueeze(-1)).permute(2, 0, 1))
        return (q @ k.mT * 0.25 + bias.unsqueeze(0)).softmax(-1) @ v


def soft_mask(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """A mask between 0 and 1 that is learned elsewhere, as a logarithm."""
    return (q @ k.mT * 0.25 + torch.log(torch.sigmoid(gate) + 1e-6)).softmax(-1) @ v


# ---- two dtypes


def mask_in_float32(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
    return torch.matmul(F.softmax(scores + mask, dim=-1).to(v.dtype), v)


def mask_in_their_dtype(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
    return torch.matmul(F.softmax(scores + mask, dim=-1), v)


# ---- dropout among the rest


class DropoutUnderTriangle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_dropout = nn.Dropout(0.2)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q.shape[-2]
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :s, :s] == 0, float("-inf"))
        return self.attn_dropout(F.softmax(att, dim=-1)) @ v


class DropoutWithMask(nn.Module):
    """BERT with padding, [batch, len, heads, head_dim]."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(16)
        scores = scores + (1.0 - mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
        probs = self.dropout(nn.functional.softmax(scores, dim=-1))
        return torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous().flatten(2)


class DropoutAndPrescaledQuery(nn.Module):
    """DistilBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q / math.sqrt(q.size(-1))
        weights = self.dropout(torch.matmul(q, k.transpose(2, 3)).softmax(dim=-1))
        return torch.matmul(weights, v)


class DropoutAndBias(nn.Module):
    """T5 while it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(32, 3)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = (torch.arange(k.shape[2])[None, :] - torch.arange(q.shape[2])[:, None]).clamp(-15, 16) + 15
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += self.bias(distance).permute(2, 0, 1).unsqueeze(0)
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        weights = F.dropout(weights, p=0.1, training=self.training)
        return torch.matmul(weights, v)


# ---- recomputed, and by hand


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(torch.matmul(q, k.mT) / math.sqrt(q.size(-1)), dim=-1) @ v

    return checkpoint(core, q, k, v, use_reentrant=False)


class WrittenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        p = (q @ k.mT * 0.25).softmax(-1)
        out = p @ v
        ctx.save_for_backward(q, k, v, p, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, p, out = ctx.saved_tensors
        dp = grad @ v.mT
        ds = p * (dp - (grad * out).sum(-1, keepdim=True)) * 0.25
        return ds @ k, ds.mT @ q, p.mT @ grad


def backward_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return WrittenBackward.apply(q, k, v)


_G = "training"
_HALF = torch.bfloat16


def _float32(*shape: int):
    return lambda dtype: (torch.randn(shape),)


TRAINED = (
    *(module(_G, kind, heads()) for kind in (BiasParameter, BiasOfKeys)),
    *(module(_G, kind, square()) for kind in (BiasOfDistances, LearnedSlopes, BiasByNetwork)),
    function(_G, soft_mask, joined(heads(), noise((2, 1, 7, 11)))),
    function(_G, mask_in_float32, joined(heads(), _float32(2, 1, 7, 11)), dtype=_HALF),
    function(_G, mask_in_their_dtype, joined(heads(), noise((2, 1, 7, 11))), dtype=_HALF),
    function(_G, causal.tril_filled, square(), "triangle_in_bfloat16", dtype=_HALF),
    function(_G, plain.bshd_transposed, heads_last(), "len_first_in_bfloat16", dtype=_HALF),
    function(_G, plain.times_power, heads(), "times_power_in_float16", dtype=torch.float16),
    function(_G, masked.bias_and_causal, joined(square(), noise((1, 3, 7, 7))), "bias_in_bfloat16", dtype=_HALF),
    module(_G, DropoutUnderTriangle, square(), dropout=True),
    module(_G, DropoutAndPrescaledQuery, heads(), dropout=True),
    module(_G, DropoutAndBias, heads(), dropout=True),
    module(
        _G, DropoutWithMask,
        joined(heads_last(), given(lambda: torch.arange(11) < torch.tensor([[11], [6]]))), dropout=True,
    ),
    module(_G, functools.partial(modules.NanoGPT, dropout=0.1), hidden(), "NanoGPTWithDropout", dropout=True),
    function(_G, checkpointed, heads()),
    function(
        _G, backward_by_hand, heads(),
        exception="forward and backward are two programs: that the second is the first's derivative would have to be "
        "proved, dS = P (dP - rowsum(dO O)), before a kernel's own derivative may stand for it",
    ),
)  # fmt: skip
