"""Small modules, written the way people publish them. Each maps [batch, len, width] to the same shape."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, BLOCK = 24, 3, 32


def ModuleOf(kind: type[nn.Module]) -> nn.Module:
    """An instance, with weights large enough that scores differ."""
    module = kind()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    return module


class NanoGPT(nn.Module):
    """nanoGPT's CausalSelfAttention, the path without flash attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd = HEADS, WIDTH
        self.register_buffer("bias", torch.tril(torch.ones(BLOCK, BLOCK)).view(1, 1, BLOCK, BLOCK))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MinGPTBool(nn.Module):
    """Three projections, a Boolean buffer that is not saved, a Python loop over nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.register_buffer("mask", torch.triu(torch.ones(BLOCK, BLOCK, dtype=torch.bool), 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, HEADS, -1).permute(0, 2, 1, 3) for f in (self.query, self.key, self.value))
        att = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(c // HEADS)
        att.masked_fill_(self.mask[:t, :t], -torch.inf)
        return (att.softmax(dim=-1) @ v).permute(0, 2, 1, 3).reshape(b, t, c)


class BottomSlice(nn.Module):
    """GPT-2's first code: rows ns - nd to ns of a big triangle, and 1e10 taken off what it hides."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(BLOCK, BLOCK)).view(1, 1, BLOCK, BLOCK))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, dim=2))
        w = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(v.size(-1))
        nd, ns = w.size(-2), w.size(-1)
        b = self.bias[:, :, ns - nd : ns, :ns]
        w = w * b - 1e10 * (1 - b)
        return torch.matmul(nn.Softmax(dim=-1)(w), v).permute(0, 2, 1, 3).contiguous().view(*x.shape)


class Head(nn.Module):
    """One head of a teaching transformer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, size, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(BLOCK, BLOCK)))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = self.dropout(F.softmax(wei, dim=-1))
        return wei @ self.value(x)


class HeadByHead(nn.Module):
    """A ModuleList of heads, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(WIDTH // HEADS) for _ in range(HEADS)])
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


class NeoX(nn.Module):
    """GPT-NeoX: heads outside, query, key and value of one head next to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.query_key_value(x)
        qkv = qkv.view(*x.shape[:-1], HEADS, 3 * WIDTH // HEADS).transpose(1, 2)
        query, key, value = qkv.chunk(3, dim=-1)
        scores = torch.matmul(query, key.transpose(2, 3)) * (WIDTH // HEADS) ** -0.5
        t = scores.shape[-1]
        causal = torch.tril(torch.ones(t, t, dtype=torch.bool, device=x.device)).view(1, 1, t, t)
        scores = torch.where(causal, scores, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        out = torch.matmul(weights, value).transpose(1, 2).contiguous()
        return self.dense(out.reshape(*x.shape[:-1], -1))


class Timm(nn.Module):
    """timm's vision transformer."""

    fused_attn = False

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.Identity()
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Indexed(nn.Module):
    """The packed projection taken apart by number: qkv[0], qkv[1], qkv[2]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * (C // HEADS) ** -0.5, qkv[1], qkv[2]
        return ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2)


class LucidViT(nn.Module):
    """Heads by chunk, unflatten and transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(WIDTH, WIDTH * 3, bias=False)
        self.attend = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        dots = torch.matmul(q, k.transpose(-1, -2)) * (WIDTH // HEADS) ** -0.5
        return torch.matmul(self.attend(dots), v).transpose(1, 2).flatten(-2)


class MultiQuery(nn.Module):
    """One key and value head for all query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q = self.q(x).view(b, t, HEADS, -1).transpose(1, 2)
        k, v = self.kv(x).chunk(2, dim=-1)
        att = torch.einsum("bhid,bjd->bhij", q, k) * (c // HEADS) ** -0.5
        att = att.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        return torch.einsum("bhij,bjd->bhid", att.softmax(-1), v).transpose(1, 2).reshape(b, t, c)


class MultiQueryBroadcast(MultiQuery):
    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q = self.q(x).view(b, t, HEADS, -1).transpose(1, 2)
        k, v = (part.unsqueeze(1) for part in self.kv(x).split(c // HEADS, dim=-1))
        return ((q @ k.mT / math.sqrt(c // HEADS)).softmax(-1) @ v).transpose(1, 2).reshape(b, t, c)


class Learned(nn.Module):
    """A learned temperature for each head, on normalised query and key (Swin v2)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.logit_scale = nn.Parameter(torch.zeros(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        att = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        att = att * torch.clamp(self.logit_scale, max=4.6).exp()
        return (att.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c)


class Cross(nn.Module):
    """Queries from the second half of the sequence, keys and values from all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        context, x = x, x[:, t // 2 :]
        q = self.q(x).view(b, -1, HEADS, c // HEADS).transpose(1, 2)
        k, v = self.kv(context).view(b, t, 2, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        att = (q * (c // HEADS) ** -0.5) @ k.transpose(-2, -1)
        return (att.softmax(-1) @ v).transpose(1, 2).reshape(b, -1, c)


class Rotary(nn.Module):
    """Llama: rotary positions, grouped keys by repeat, softmax in float32."""

    kv_heads = 1

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, self.kv_heads * self.head_dim, bias=False) for _ in range(2))
        angles = torch.outer(torch.arange(BLOCK), 1.0 / 100 ** (torch.arange(0, self.head_dim, 2) / self.head_dim))
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * self.cos[: x.shape[2]] + torch.cat((-b, a), dim=-1) * self.sin[: x.shape[2]]

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q = self.rotated(self.wq(x).view(b, t, HEADS, self.head_dim).transpose(1, 2))
        k = self.rotated(self.wk(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2))
        v = self.wv(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        k, v = (y[:, :, None].expand(-1, -1, HEADS // self.kv_heads, -1, -1).reshape(b, HEADS, t, -1) for y in (k, v))
        mask = torch.full((t, t), float("-inf")).triu(1)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim) + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, v).transpose(1, 2).contiguous().reshape(b, t, -1)


class Checkpointed(nn.Module):
    """Two blocks, each recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([NanoGPT(), NanoGPT()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class Diffusers(nn.Module):
    """The attention processor of diffusers: heads folded into the batch, baddbmm, scores in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def heads(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        return x.reshape(b, t, HEADS, c // HEADS).permute(0, 2, 1, 3).reshape(b * HEADS, t, c // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.heads(self.to_q(x)), self.heads(self.to_k(x)), self.heads(self.to_v(x))
        dtype = q.dtype
        q, k = q.float(), k.float()
        empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=(c // HEADS) ** -0.5)
        del empty
        probs = scores.softmax(dim=-1)
        del scores
        out = torch.bmm(probs.to(dtype), v)
        return out.reshape(b, HEADS, t, c // HEADS).permute(0, 2, 1, 3).reshape(b, t, c)


CAUSAL = (NanoGPT, MinGPTBool, BottomSlice, HeadByHead, NeoX, MultiQuery, Rotary, Checkpointed)
FULL = (Timm, Indexed, LucidViT, MultiQueryBroadcast, Learned, Cross, Diffusers)
