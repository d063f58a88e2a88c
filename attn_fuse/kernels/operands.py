"""Operands: the arguments of our attentions, with checks that raise ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


def strides_inside(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a [batch, heads, length, dim] stored as [batch, length, heads, dim]."""
    _, heads, length, dim = shape
    return length * heads * dim, dim, heads * dim, 1


class Operands(NamedTuple):
    """The operands of an attention with a score program.

    query [B, H, Lq, D], key [B, Hkv, Lk, D], value [B, Hkv, Lk, Dv], in any strides; H is a multiple of Hkv.
    inputs, numbers: the tensors and ints that the program reads. program: the text of a `ScoreProgram`.
    seed: int64, one element, unless dropout_p is 0; the same seed drops the same weights.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    inputs: Sequence[Tensor]
    numbers: Sequence[int]
    seed: Tensor | None
    dropout_p: float
    program: str

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """batch, heads, q_len, kv_len."""
        return (*self.query.shape[:3], self.key.shape[2])

    @property
    def drops(self) -> bool:
        """Whether dropout drops weights."""
        return self.dropout_p > 0 and self.seed is not None

    def check(self) -> None:
        """Raise ValueError for shapes that do not fit, or dropout whose probability or seed does not."""
        query, key, value = self.query, self.key, self.value
        if not (query.ndim == key.ndim == value.ndim == 4):
            raise ValueError("query, key and value need four dimensions")
        if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
            raise ValueError(f"shapes do not fit: {[*query.shape]}, {[*key.shape]}, {[*value.shape]}")
        if query.shape[1] != key.shape[1] and (key.shape[1] == 0 or query.shape[1] % key.shape[1]):
            raise ValueError(f"{query.shape[1]} query heads are no multiple of {key.shape[1]} key heads")
        has_seed = self.seed is not None and self.seed.numel() == 1
        if not 0.0 <= self.dropout_p <= 1.0 or (self.dropout_p > 0.0 and not has_seed):
            raise ValueError("dropout needs a probability and a seed of one element")


def within_exp2(x: Tensor) -> Tensor:
    """`x`, with numbers below a quarter of the min of its floating-point dtype moved four times closer to it.

    Kernels that compute exp(x) as exp2(x * log2(e)) turn the min of float32, with which programs hide keys, into -inf,
    so a fully masked row would not get the mean of the values. Order and -inf are kept. Different numbers that low
    still differ by more than 1e30, so only the max counts in a softmax.
    """
    quarter = torch.finfo(x.dtype).min / 4
    return torch.maximum(x, x * 0.25 + 0.75 * quarter)
