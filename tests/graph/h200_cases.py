"""Attentions as people write them, at the sizes people run, and the kernels that suit an H200, with the reason why.

Each program takes query [batch, heads, q_len, head_dim], key and value [batch, kv_heads, kv_len, head_dim] and what
else it reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.h200 import dynamic
from tests.models.grouped import repeat_kv

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Program = Callable[..., Tensor]
AS_WRITTEN = frozenset({None})


@dataclass(frozen=True)
class Want:
    """One case. program: makes it anew. inputs: makes what it is called with.

    best: the kernels that suit it, None for the program as written, among those that may run without a self-check;
    ours: where others join them once ours have passed theirs, all that then suit it. why: in one clause.
    """

    name: str
    why: str
    program: Callable[[], Program]
    inputs: Callable[[], tuple[Any, ...]]
    best: frozenset[str | None]
    ours: frozenset[str | None]
    training: bool = False
    tf32: bool = False
    deterministic: bool = False

    def __str__(self) -> str:
        return self.name


# ---- operands


def qkv(
    batch: int, heads: int, q_len: int, head_dim: int, dtype: torch.dtype = BF16, kv_len: int = 0, kv_heads: int = 0,
    value_dim: int = 0, grad: bool = False, moving: tuple[str, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """moving: which of "batch", "q_len" and "kv_len" may change from call to call."""
    sizes = {"q_len": q_len, "kv_len": kv_len or q_len}
    made = []
    for count, length, width in (
        (heads, "q_len", head_dim), (kv_heads or heads, "kv_len", head_dim),
        (kv_heads or heads, "kv_len", value_dim or head_dim),
    ):  # fmt: skip
        x = torch.empty(batch, count, sizes[length], width, dtype=dtype).requires_grad_(grad)
        moves = {name: 2 if name == length else 0 for name in moving if name in (length, "batch")}
        made.append(dynamic(x, *moves.values()))
    query, key, value = made
    return query, key, value


def words(batch: int, length: int) -> Tensor:
    """What Hugging Face calls an attention mask: 1 for a token, 0 for padding."""
    seen = torch.ones(batch, length, dtype=torch.long)
    seen[1:, length // 2 :] = 0
    return seen


# ---- programs


def scaled(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(scaled(q, k), dim=-1) @ v


class NanoGPT(nn.Module):
    """nanoGPT's, with its buffer."""

    def __init__(self, length: int, p: float = 0.0) -> None:
        super().__init__()
        self.attn_dropout = nn.Dropout(p)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = q.shape[2]
        att = scaled(q, k).masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        return self.attn_dropout(F.softmax(att, dim=-1)) @ v


def nanogpt(length: int, p: float = 0.0) -> Callable[[], Program]:
    return lambda: NanoGPT(length, p)


def gpt2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Hugging Face's GPT-2: the fill is a tensor of the lowest number."""
    scores = q @ k.transpose(-1, -2) / torch.full([], v.size(-1) ** 0.5, dtype=q.dtype)
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    least = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
    return F.softmax(torch.where(causal, scores, least), dim=-1) @ v


def llama(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, grouped, in float32 between the products."""
    groups, t = q.shape[1] // k.shape[1], q.shape[2]
    k, v = repeat_kv(k, groups), repeat_kv(v, groups)
    mask = torch.full((t, t), float("-inf"), dtype=q.dtype).triu(1)
    return F.softmax(scaled(q, k) + mask, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every key is seen, and repeated for the queries that share it."""
    groups = q.shape[1] // k.shape[1]
    k, v = repeat_kv(k, groups), repeat_kv(v, groups)
    return F.softmax(scaled(q, k), dim=-1, dtype=torch.float32).to(q.dtype) @ v


def chunked_prefill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], torch.arange(k.shape[2])[None, :]
    return F.softmax(scaled(q, k).masked_fill(j > i, float("-inf")), dim=-1) @ v


def padded(causal: bool) -> Program:
    """transformers' eager attention: one additive mask, the lowest number where a key is hidden."""

    def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        least = torch.finfo(q.dtype).min
        keep = (seen[:, None, None, :] != 0).expand(-1, 1, q.shape[2], -1)
        if causal:
            keep = keep & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, least)
        return F.softmax(scaled(q, k) + mask, dim=-1, dtype=torch.float32).to(q.dtype) @ v

    return attention


def first_bert(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    extended = (1.0 - seen[:, None, None, :].to(q.dtype)) * -10000.0
    return F.softmax(scaled(q, k) + extended, dim=-1) @ v


def slopes(heads: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([2 ** (-8 * (n + 1) / heads) for n in range(heads)], dtype=dtype)


class ALiBi(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", slopes(heads, FP32))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        scores = scaled(q, k) + self.slopes.to(q.dtype).view(-1, 1, 1) * (j - i)
        return F.softmax(scores.masked_fill(j > i, float("-inf")), dim=-1) @ v


def computed_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The slopes 2^-8/h ... 2^-8, computed where they are used."""
    slope = torch.exp2(-((torch.arange(q.shape[1], dtype=q.dtype) + 1) * 8.0 / q.shape[1]))[:, None, None]
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    return F.softmax((scaled(q, k) + slope * (j - i)).masked_fill(j > i, float("-inf")), dim=-1) @ v


class T5(nn.Module):
    """A learned bias for each bucket of distances, and no scale."""

    def __init__(self, heads: int, dtype: torch.dtype, buckets: int = 32) -> None:
        super().__init__()
        self.table, self.buckets = nn.Embedding(buckets, heads, dtype=dtype), buckets

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        distance = (place[None, :] - place[:, None]).clamp(1 - self.buckets // 2, self.buckets // 2)
        bias = self.table(distance + self.buckets // 2 - 1).permute(2, 0, 1).unsqueeze(0)
        return F.softmax((q @ k.transpose(3, 2) + bias).float(), dim=-1).type_as(q) @ v


class Biased(nn.Module):
    """A learned bias for each pair of positions."""

    def __init__(self, heads: int, length: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, heads, length, length, dtype=dtype))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return biased(q, k, v, self.bias)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.softmax(scaled(q, k) + bias, dim=-1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return F.softmax(scaled(q, k).masked_fill(~keep, float("-inf")), dim=-1) @ v


def banded(reach: int, cap: float = 0.0, sink: bool = False) -> Program:
    """A sliding window, with Gemma 2's cap and gpt-oss's sink where wanted."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *logits: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = repeat_kv(k, groups), repeat_kv(v, groups)
        scores = scaled(q, k)
        if cap:
            scores = torch.tanh(scores / cap) * cap
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        scores = scores.masked_fill((j > i) | (j <= i - reach), float("-inf"))
        if not sink:
            return F.softmax(scores, dim=-1) @ v
        more = logits[0].reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        return F.softmax(torch.cat([scores, more], dim=-1), dim=-1)[..., :-1] @ v

    return attention


def documents(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    keep = (numbers[:, None, :, None] == numbers[:, None, None, :]) & (j <= i)
    return F.softmax(scaled(q, k).masked_fill(~keep, float("-inf")), dim=-1) @ v


def prefixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    return F.softmax(scaled(q, k).masked_fill((j > i) & (j >= q.shape[2] // 4), float("-inf")), dim=-1) @ v


def weights_too(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = F.softmax(scaled(q, k), dim=-1)
    return weights @ v, weights


# ---- what suits them


def one_of(*names: str | None) -> frozenset[str | None]:
    return frozenset(names)


CUDNN, SDPA_HALF, EFFICIENT, FLEX = (
    one_of("cudnn"), one_of("cudnn", "cuda_flash"), one_of("cuda_efficient"), one_of("flex"),
)  # fmt: skip
TRITON = one_of("triton_flash")


def want(
    name: str, why: str, program: Callable[[], Program] | Program, inputs: Callable[[], tuple[Any, ...]],
    best: frozenset[str | None], ours: frozenset[str | None] | None = None, made: bool = False, **how: bool,
) -> Want:  # fmt: skip
    """made: whether `program` makes the program."""
    return Want(name, why, program if made else lambda: program, inputs, best, ours or best, **how)


def trained(*sizes: int, **how: Any) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: qkv(*sizes, grad=True, **how)


def given(*sizes: int, **how: Any) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: qkv(*sizes, **how)


def beside(operands: Callable[[], tuple[Tensor, ...]], *others: Callable[[], Tensor]) -> Callable[[], tuple[Any, ...]]:
    return lambda: (*operands(), *(make() for make in others))


def noise(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Callable[[], Tensor]:
    return lambda: torch.zeros(shape, dtype=dtype).requires_grad_(grad)


def kept(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.ones(shape, dtype=torch.bool)


def numbers(batch: int, length: int) -> Callable[[], Tensor]:
    return lambda: torch.arange(length).div(length // 5, rounding_mode="floor").expand(batch, -1).contiguous()
