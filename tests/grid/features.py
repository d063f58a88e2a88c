"""What attentions are made of, each part twice: as people write it, and as a tree of a score program.

A part draws its own tensors. `write` is what a program does with the scores and these tensors; `tree` says the same of
a tree and the numbers under which the tensors are known. The numbers of a score program are q_len and kv_len.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tree = list[Any]

S, B, H, I, J = (["score"], ["b"], ["h"], ["i"], ["j"])  # noqa: E741
Q_LEN, KV_LEN = ["number", 0], ["number", 1]


@dataclass(frozen=True)
class Sizes:
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class At:
    """Where the scores are, as four tensors that broadcast, and how many there are."""

    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    q_len: int
    kv_len: int

    @staticmethod
    def scores(q: Tensor, k: Tensor) -> At:
        b, h, i, j = (torch.arange(n, device=q.device) for n in (*q.shape[:3], k.shape[2]))
        return At(b[:, None, None, None], h[:, None, None], i[:, None], j, q.shape[2], k.shape[2])


def nothing(s: Sizes) -> list[Tensor]:
    return []


@dataclass(frozen=True)
class Part:
    """write: (scores, at, *tensors) -> scores; for a mask, a factor or a sink (at, *tensors) -> it.

    learned: the tensors have gradients. lower, upper: a mask's bounds of key position less query position.
    """

    write: Callable[..., Any]
    tree: Callable[..., Tree]
    tensors: Callable[[Sizes], list[Tensor]] = nothing
    learned: bool = False
    lower: Tree | None = None
    upper: Tree | None = None


def const(value: float) -> Tree:
    return ["const", value]


def _random(shape: str) -> Callable[[Sizes], list[Tensor]]:
    """One tensor of four dimensions: "bhij" is as large as the scores, and a "1" instead of a letter broadcasts."""

    def draw(s: Sizes) -> list[Tensor]:
        whole = {"b": s.batch, "h": s.heads, "i": s.q_len, "j": s.kv_len, "1": 1}
        return [torch.randn([whole[letter] for letter in shape])]

    return draw


def _bias(shape: str, learned: bool = False) -> Part:
    return Part(
        write=lambda scores, at, bias: scores + bias,
        tree=lambda tree, n: ["add", tree, ["input", n]],
        tensors=_random(shape),
        learned=learned,
    )


def _lengths(s: Sizes) -> list[Tensor]:
    # The first of several sees no key at all.
    return [(torch.arange(s.batch) * 7 + (s.batch == 1) * 3) % (s.kv_len + 1)]


def _ids(s: Sizes) -> list[Tensor]:
    # Document 3 has no key.
    return [torch.randint(0, 4, (s.batch, s.q_len)), torch.randint(0, 3, (s.batch, s.kv_len)).sort(-1).values]


def _keep(s: Sizes) -> list[Tensor]:
    keep = torch.rand(s.batch, 1, s.q_len, s.kv_len) > 0.3
    keep[:, :, s.q_len // 2] = False
    return [keep]


def _slopes(s: Sizes) -> list[Tensor]:
    return [0.5 ** torch.arange(1.0, s.heads + 1)]


def _distance(at: At) -> Tensor:
    return (at.j - at.i).clamp(-8, 8) + 8


_DISTANCE = ["add", ["maximum", ["minimum", ["sub", J, I], const(8)], const(-8)], const(8)]

POSITIONS = {
    "every key": None,
    "causal": Part(lambda at: at.j <= at.i, lambda: ["le", J, I], upper=const(0)),
    "causal with offset": Part(
        lambda at: at.j <= at.i + (at.kv_len - at.q_len),
        lambda: ["le", J, ["add", I, ["sub", KV_LEN, Q_LEN]]],
        upper=["sub", KV_LEN, Q_LEN],
    ),
    "window": Part(
        lambda at: (at.j <= at.i) & (at.i - at.j < 5),
        lambda: ["and", ["le", J, I], ["lt", ["sub", I, J], const(5)]],
        lower=const(-4),
        upper=const(0),
    ),
    "band": Part(
        lambda at: (at.j - at.i >= -6) & (at.j - at.i <= 3),
        lambda: ["and", ["ge", ["sub", J, I], const(-6)], ["le", ["sub", J, I], const(3)]],
        lower=const(-6),
        upper=const(3),
    ),
    "prefix": Part(
        lambda at, lengths: (at.j <= at.i) | (at.j < lengths[:, None, None, None]),
        lambda n: ["or", ["le", J, I], ["lt", J, ["gather", n, B]]],
        _lengths,
    ),
}
VISIBLE = {
    "every key": None,
    "lengths": Part(
        lambda at, lengths: at.j < lengths[:, None, None, None], lambda n: ["lt", J, ["gather", n, B]], _lengths
    ),
    "documents": Part(
        lambda at, queries, keys: queries[:, None, :, None] == keys[:, None, None, :],
        lambda n, m: ["eq", ["gather", n, B, I], ["gather", m, B, J]],
        _ids,
    ),
    "a tensor": Part(lambda at, keep: keep, lambda n: ["input", n], _keep),
    "a tensor for all batches": Part(
        lambda at, keep: keep, lambda n: ["input", n], lambda s: [_keep(s)[0][:1].expand(1, s.heads, -1, -1).clone()]
    ),
}
BIASES = {
    "none": None,
    "full": _bias("bhij"),
    "of the keys": _bias("b11j"),
    "learned": _bias("bhij", learned=True),
    "learned for all batches": _bias("1hij", learned=True),
    "learned for all heads": _bias("b1ij", learned=True),
    "learned for all queries": _bias("1h1j", learned=True),
    "learned for all keys": _bias("1hi1", learned=True),
    "alibi": Part(
        lambda scores, at, slopes: scores - slopes[:, None, None].to(scores.dtype) * (at.i - at.j).abs(),
        lambda tree, n: ["sub", tree, ["mul", ["gather", n, H], ["abs", ["sub", I, J]]]],
        _slopes,
    ),
    "relative table": Part(
        lambda scores, at, table: scores + table[:, _distance(at)],
        lambda tree, n: ["add", tree, ["gather", n, H, _DISTANCE]],
        lambda s: [torch.randn(s.heads, 17)],
        learned=True,
    ),
}
FUNCTIONS = {
    "none": None,
    "softcap": Part(
        lambda scores, at: 5 * torch.tanh(scores / 5),
        lambda tree: ["mul", const(5), ["tanh", ["div", tree, const(5)]]],
    ),
    "arbitrary": Part(
        lambda scores, at: scores * torch.sigmoid(scores) - scores.square() * 0.1,
        lambda tree: ["sub", ["mul", tree, ["sigmoid", tree]], ["mul", ["mul", tree, tree], const(0.1)]],
    ),
    "temperature of each head": Part(
        lambda scores, at, t: scores / (1 + t[:, None, None].exp()),
        lambda tree, n: ["div", tree, ["add", const(1), ["exp", ["gather", n, H]]]],
        lambda s: [torch.randn(s.heads)],
        learned=True,
    ),
    "temperature of each query": Part(
        lambda scores, at: scores * (1 + 0.1 * torch.log1p(at.i.to(scores.dtype))),
        lambda tree: ["mul", tree, ["add", const(1), ["mul", const(0.1), ["log1p", I]]]],
    ),
}
SINKS = {
    "none": None,
    "of each head": Part(
        lambda at, sink: sink[:, None, None],
        lambda n: ["gather", n, H],
        lambda s: [torch.randn(s.heads)],
        learned=True,
    ),
}
FACTORS = {
    "none": None,
    "of each head": Part(
        lambda at, gates: gates[:, None, None],
        lambda n: ["gather", n, H],
        lambda s: [torch.randn(s.heads)],
        learned=True,
    ),
    "of the keys": Part(
        lambda at, gates: gates[:, None, None, :],
        lambda n: ["gather", n, B, J],
        lambda s: [torch.randn(s.batch, s.kv_len)],
    ),
}
# What a query that sees no key gives, by what hides the keys.
FILLS = {"nan": -math.inf, "zero": -math.inf, "mean": None}
