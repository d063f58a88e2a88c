"""The programs of docs/masks.md: attention as people write it by hand, each with another mask or score.

They take query, key and value in [batch, heads, length, head_dim]. A docstring is a heading of the page and the text
below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def causal_tril(q, k, v):
    """Causal, by a triangle made on the way.

    Each token sees itself and the tokens before it.
    """
    att = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    mask = torch.tril(torch.ones(q.size(-2), k.size(-2), device=q.device))
    att = att.masked_fill(mask == 0, float("-inf"))
    return F.softmax(att, dim=-1) @ v


class CausalBuffer(nn.Module):
    """Causal, by a buffer.

    As in nanoGPT and minGPT. The proof reads the buffer's contents, and every call checks that they are still the same.
    """

    def __init__(self, block_size=64):
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, q, k, v):
        T = q.size(-2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return att @ v


def causal_finite(q, k, v):
    """Causal, by a large negative number.

    As in GPT-2, with -1e9 or -1e4 in place of minus infinity, added or filled in.
    """
    att = torch.einsum("bhid,bhjd->bhij", q, k) * q.size(-1) ** -0.5
    att = att + torch.triu(torch.full((q.size(-2), k.size(-2)), -1e9, device=q.device), diagonal=1)
    return torch.einsum("bhij,bhjd->bhid", att.softmax(-1), v)


def padding(q, k, v, keep):
    """Padding.

    `keep` is True for a token and False for padding: [batch, length].
    """
    scores = q @ k.mT / math.sqrt(q.size(-1))
    scores = scores.masked_fill(~keep[:, None, None, :], float("-inf"))
    return scores.softmax(dim=-1) @ v


def padding_added(q, k, v, attention_mask):
    """Padding, added, as in BERT.

    `attention_mask` is 1 for a token and 0 for padding: [batch, length]. It could hold any number, so its term counts
    as a bias.
    """
    bias = (1.0 - attention_mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
    return torch.matmul(nn.functional.softmax(scores + bias, dim=-1), v)


def window(q, k, v):
    """A causal window, as in Mistral and Gemma.

    Each token sees itself and the seven before it.
    """
    i = torch.arange(q.size(-2), device=q.device)
    distance = i[:, None] - i[None, :]
    visible = (distance >= 0) & (distance < 8)
    scores = q @ k.mT * q.size(-1) ** -0.5
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def both_sides(q, k, v):
    """A window to both sides, as in Longformer.

    Each token sees the tokens at a distance of at most four.
    """
    i = torch.arange(q.size(-2), device=q.device)
    scores = q @ k.mT * q.size(-1) ** -0.5
    scores = torch.where((i[:, None] - i[None, :]).abs() <= 4, scores, float("-inf"))
    return scores.softmax(-1) @ v


def prefix(q, k, v):
    """A prefix, as in prefix language models.

    All tokens see the first twelve; the rest is causal.
    """
    i = torch.arange(q.size(-2), device=q.device)
    visible = (i[None, :] <= i[:, None]) | (i[None, :] < 12)
    scores = q @ k.mT / q.size(-1) ** 0.5
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v


def documents(q, k, v, document):
    """Documents packed into one sequence.

    `document` numbers the document of each token: [batch, length]. A token sees its own document, causally.
    """
    same = document[:, None, :, None] == document[:, None, None, :]
    causal = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).tril()
    scores = q @ k.mT / math.sqrt(q.size(-1))
    return scores.masked_fill(~(same & causal), float("-inf")).softmax(-1) @ v


def blocks(q, k, v):
    """Blocks.

    Each token sees the tokens of its own block of eight.
    """
    block = torch.arange(q.size(-2), device=q.device) // 8
    scores = q @ k.mT / math.sqrt(q.size(-1))
    return scores.masked_fill(block[:, None] != block[None, :], float("-inf")).softmax(-1) @ v


def strided(q, k, v):
    """Strides, as in the Sparse Transformer.

    Each token sees every fourth token before it, and its three neighbours.
    """
    i = torch.arange(q.size(-2), device=q.device)
    distance = i[:, None] - i[None, :]
    visible = (distance >= 0) & ((distance % 4 == 0) | (distance < 4))
    scores = q @ k.mT / math.sqrt(q.size(-1))
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v


def streaming(q, k, v):
    """A window and the first tokens, as in StreamingLLM.

    Each token sees the first four, itself, and the seven before it.
    """
    i = torch.arange(q.size(-2), device=q.device)[:, None]
    j = torch.arange(k.size(-2), device=k.device)[None, :]
    visible = (j <= i) & ((j < 4) | (i - j < 8))
    scores = q @ k.mT / math.sqrt(q.size(-1))
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v


def alibi(q, k, v):
    """ALiBi: a penalty that grows with the distance.

    Each head has a slope of its own (arXiv 2108.12409).
    """
    heads, length = q.size(1), q.size(-2)
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=q.device) / heads)
    i = torch.arange(length, device=q.device)
    scores = q @ k.mT / math.sqrt(q.size(-1))
    scores = scores - slopes[:, None, None] * (i[:, None] - i[None, :])
    return scores.masked_fill(i[None, :] > i[:, None], float("-inf")).softmax(-1) @ v


class RelativeBias(nn.Module):
    """A learned bias of relative positions.

    As in T5, but with clipped distances in place of T5's logarithmic buckets.
    """

    def __init__(self, heads=4, furthest=31):
        super().__init__()
        self.furthest, self.table = furthest, nn.Embedding(2 * furthest + 1, heads)

    def forward(self, q, k, v):
        i = torch.arange(q.size(-2), device=q.device)
        distance = (i[None, :] - i[:, None]).clamp(-self.furthest, self.furthest) + self.furthest
        bias = self.table(distance).permute(2, 0, 1).unsqueeze(0)
        return (q @ k.transpose(-2, -1) + bias).softmax(-1) @ v


def softcap(q, k, v):
    """A softcap, as in Gemma 2.

    Scores stay within -50 and 50 (arXiv 2408.00118).
    """
    scores = q @ k.mT * q.size(-1) ** -0.5
    scores = torch.tanh(scores / 50.0) * 50.0
    hidden = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


class Sinks(nn.Module):
    """A sink for each head, as in gpt-oss.

    A learned score takes part in the softmax and has no value.
    """

    def __init__(self, heads=4):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(heads))

    def forward(self, q, k, v):
        scores = q @ k.mT * q.size(-1) ** -0.5
        hidden = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.size(0), -1, q.size(-2), 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)
        return weights[..., :-1] @ v


def grouped(q, k, v):
    """Grouped queries, as in Llama.

    Two heads of queries share a head of keys and values, which the program repeats.
    """
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    v = v.repeat_interleave(q.size(1) // v.size(1), dim=1)
    scores = q @ k.mT / math.sqrt(q.size(-1))
    hidden = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


LENGTH = 32
# In the order of the page.
PROGRAMS: tuple[Callable[..., Any], ...] = (
    causal_tril, CausalBuffer, causal_finite, padding, padding_added, window, both_sides, prefix, documents, blocks,
    strided, streaming, alibi, RelativeBias, softcap, Sinks, grouped,
)  # fmt: skip


def inputs_of(program: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    """The arguments of a program: four heads of 16, and 32 tokens."""
    generator = torch.Generator().manual_seed(0)
    kv_heads = 2 if program is grouped else 4
    q, k, v = (torch.randn(1, heads, LENGTH, 16, generator=generator) for heads in (4, kv_heads, kv_heads))
    keep = torch.arange(LENGTH)[None] < 21
    document = torch.tensor([0] * 9 + [1] * 14 + [2] * 9)[None]
    more = {padding: (keep,), padding_added: (keep.long(),), documents: (document,)}
    return q, k, v, *more.get(program, ())
