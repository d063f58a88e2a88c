"""Key heads shared by query heads, in the ways not in grouped.py, and keys and values out of a small latent."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import grouped, modules
from tests.models.spelling import function, heads, hidden, module, noise


def repeated_contiguous(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, kv_heads, s, d = k.shape
    groups = q.shape[1] // kv_heads
    k, v = (x.unsqueeze(2).expand(-1, -1, groups, -1, -1).contiguous().view(b, kv_heads * groups, s, d) for x in (k, v))
    return grouped.attention(q, k, v)


def repeated_before_transpose(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Llama as Meta wrote it: [batch, len, heads, head_dim], repeated on axis 3."""
    b, s, kv_heads, d = k.shape
    groups = q.shape[2] // kv_heads
    k, v = (x[:, :, :, None, :].expand(b, s, kv_heads, groups, d).reshape(b, s, -1, d) for x in (k, v))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(d)
    out = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)
    return out.transpose(1, 2).contiguous().view(b, q.shape[2], -1)


def interleaved_before_transpose(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    k, v = (torch.repeat_interleave(x, groups, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.size(-1))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def stacked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (torch.stack([x] * groups, dim=2).flatten(1, 2) for x in (k, v))
    return grouped.attention(q, k, v)


def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads picked by number."""
    head = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    return grouped.attention(q, k[:, head], v.index_select(1, head))


def five_dimensions_len_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, len, kv_heads, groups, head_dim] against [batch, len, kv_heads, head_dim]."""
    b, s, h, d = q.shape
    q = q.view(b, s, k.shape[2], -1, d)
    scores = torch.einsum("bthgd,bshd->bhgts", q, k) * d**-0.5
    return torch.einsum("bhgts,bshd->bthgd", scores.softmax(dim=-1), v).reshape(b, s, h * d)


def one_head_broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(F.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1)), dim=-1), v)


def one_head_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PaLM: the key and value have no axis for heads."""
    sim = torch.einsum("b h i d, b j d -> b h i j", q * q.shape[-1] ** -0.5, k)
    sim = sim - sim.amax(dim=-1, keepdim=True).detach()
    return torch.einsum("b h i j, b j d -> b h i d", sim.softmax(dim=-1), v)


class FoldedHeads(nn.Module):
    """GPTBigCode: heads folded into the rows of one matrix, against one key."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(24, 24 + 2 * 8)

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        query, key_value = self.c_attn(x).split((24, 16), dim=2)
        key, value = key_value.split((8, 8), dim=-1)
        key = key.transpose(-1, -2)
        scores = torch.empty((b, s * 3, s), dtype=query.dtype)
        scores = torch.baddbmm(scores, query.reshape(b, s * 3, 8), key, beta=0, alpha=8**-0.5).view(b, s, 3, s)
        mask = torch.tril(torch.ones((s, s), dtype=torch.bool)).view(1, s, 1, s)
        scores = torch.where(mask, scores, torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype))
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights.view(b, s * 3, s), value).view(b, s, c)


def folded_heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, heads * len, head_dim] against [batch, len, head_dim]."""
    b, h, s, d = q.shape
    weights = torch.bmm(q.reshape(b, h * s, d), k.transpose(1, 2)).mul(d**-0.5).softmax(-1)
    return torch.bmm(weights, v).view(b, h, s, d)


class Latent(nn.Module):
    """DeepSeek's latent attention: a part with rotary positions shared by all heads, and values narrower than keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 3 * (8 + 4), bias=False)
        self.kv_a_proj = nn.Linear(24, 10 + 4, bias=False)
        self.kv_b_proj = nn.Linear(10, 3 * (8 + 6), bias=False)
        angles = torch.outer(torch.arange(32.0), 1.0 / 100 ** (torch.arange(0, 4, 2) / 4)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * self.cos[: x.shape[2]] + torch.cat((-b, a), dim=-1) * self.sin[: x.shape[2]]

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, 3, 12).transpose(1, 2)
        q_nope, q_pe = torch.split(q, [8, 4], dim=-1)
        compressed, k_pe = torch.split(self.kv_a_proj(x), [10, 4], dim=-1)
        kv = self.kv_b_proj(compressed).view(b, s, 3, 14).transpose(1, 2)
        k_nope, value = torch.split(kv, [8, 6], dim=-1)
        k_pe = self.rotated(k_pe.view(b, s, 1, 4).transpose(1, 2))
        query = torch.cat([q_nope, self.rotated(q_pe)], dim=-1)
        key = torch.cat([k_nope, k_pe.expand(-1, 3, -1, -1)], dim=-1)
        scores = torch.matmul(query, key.transpose(2, 3)) * 12**-0.5
        scores = scores + torch.full((s, s), float("-inf"), dtype=x.dtype).triu(1)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, value).transpose(1, 2).reshape(b, s, 3 * 6)


class LatentWrittenInto(Latent):
    """The same, the two parts written into empty tensors as the first release did."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q_nope, q_pe = torch.split(self.q_proj(x).view(b, s, 3, 12).transpose(1, 2), [8, 4], dim=-1)
        compressed, k_pe = torch.split(self.kv_a_proj(x), [10, 4], dim=-1)
        k_nope, value = torch.split(self.kv_b_proj(compressed).view(b, s, 3, 14).transpose(1, 2), [8, 6], dim=-1)
        query = q_nope.new_empty(b, 3, s, 12)
        query[:, :, :, :8] = q_nope
        query[:, :, :, 8:] = self.rotated(q_pe)
        key = k_nope.new_empty(b, 3, s, 12)
        key[:, :, :, :8] = k_nope
        key[:, :, :, 8:] = self.rotated(k_pe.view(b, s, 1, 4).transpose(1, 2))
        weights = torch.softmax(torch.matmul(query, key.transpose(2, 3)) / math.sqrt(12), dim=-1)
        return torch.matmul(weights, value).transpose(1, 2).flatten(2)


class LatentAbsorbed(Latent):
    """Generation's form: the up-projection goes into the query, the latent itself is key and value."""

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q_nope, q_pe = torch.split(self.q_proj(x).view(b, s, 3, 12), [8, 4], dim=-1)
        compressed, k_pe = torch.split(self.kv_a_proj(x), [10, 4], dim=-1)
        up_key, up_value = self.kv_b_proj.weight.view(3, 14, 10).split([8, 6], dim=1)
        q_latent = torch.einsum("bshd,hdc->bshc", q_nope, up_key)
        scores = torch.einsum("bshc,btc->bsht", q_latent, compressed) + torch.einsum("bshr,btr->bsht", q_pe, k_pe)
        scores = scores * 12**-0.5 + torch.full((s, s), float("-inf"), dtype=x.dtype).triu(1).unsqueeze(1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
        out = torch.einsum("bsht,btc->bshc", weights, compressed)
        return torch.einsum("bshc,hdc->bshd", out, up_value).flatten(2)


_G = "grouped queries"
_GROUPED = heads(heads=6, kv_heads=2)
_LEN_FIRST = noise((2, 7, 6, 16), (2, 11, 2, 16), (2, 11, 2, 16))

GROUPS = (
    *(function(_G, f, _GROUPED) for f in grouped.GROUPED),
    *(function(_G, f, _GROUPED) for f in (repeated_contiguous, stacked, gathered)),
    *(function(_G, f, _LEN_FIRST) for f in (interleaved_before_transpose, five_dimensions_len_first)),
    function(_G, repeated_before_transpose, _LEN_FIRST),
    function(_G, one_head_broadcast, heads(kv_heads=1)),
    function(_G, one_head_einsum, noise((2, 3, 7, 16), (2, 11, 16), (2, 11, 16))),
    function(_G, folded_heads_first, noise((2, 3, 7, 16), (2, 11, 16), (2, 11, 16))),
    module(_G, FoldedHeads, hidden()),
    *(module(_G, kind, hidden()) for kind in (modules.MultiQuery, modules.MultiQueryBroadcast)),
    *(module(_G, kind, hidden()) for kind in (Latent, LatentWrittenInto, LatentAbsorbed)),
)
