"""Dropout: a hash of seed, head, query and key says which weights to keep, so that blocks of any size drop the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_fuse.kernels.operands import Operands

_WORD = (1 << 31) - 1


@dataclass(frozen=True)
class Dropout:
    """The dropout of one call.

    rows, keys: the random words of queries, int32 [B, H, Lq, 1], and of keys, int32 [1, 1, 1, Lk].
    threshold: a weight whose hash is below it is dropped. scale: 1 / (1 - p), what kept weights are multiplied by.
    """

    rows: Tensor
    keys: Tensor
    threshold: Tensor
    scale: Tensor


def dropout(given: Operands, dtype: torch.dtype) -> Dropout:
    """The dropout of a call. dtype: of the scale.

    Four rounds of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) give rows and keys.
    """
    seed, p, (batch, heads, q_len, kv_len) = given.seed, given.dropout_p, given.sizes
    assert seed is not None
    device = seed.device
    start = _hashed(seed.reshape(()).to(torch.int64) + _GOLDEN)
    planes = _hashed(start + (torch.arange(batch * heads, device=device) + 1) * _GOLDEN).view(batch, heads, 1, 1)
    rows = _hashed(planes + (torch.arange(q_len, device=device).view(-1, 1) + 1) * _GOLDEN)
    keys = _hashed(~start - (torch.arange(kv_len, device=device).view(1, 1, 1, -1) + 1) * _GOLDEN)
    return Dropout(
        _low(rows),
        _low(keys),
        # Filled on the device: a tensor made from a number is copied there, and the CPU waits for the copy.
        torch.full((1, 1, 1, 1), min(round(p * 2**31), _WORD), dtype=torch.int32, device=device),
        # At p = 1 the largest hash is not below the threshold: a scale of 0 drops its weight, too.
        torch.full((1, 1, 1, 1), 0.0 if p == 1.0 else 1.0 / (1.0 - p), dtype=dtype, device=device),
    )


def kept(rows: Tensor, keys: Tensor, threshold: Tensor, scale: Tensor) -> Tensor:
    """What to multiply the weights of a block by, 0 or 1 / (1 - p). rows, keys: the block's parts of a `Dropout`'s.

    lowbias32 (Wellons, 2018) does the mixing: its 32-bit words fill vector registers.
    """
    word = rows ^ keys
    word = (word ^ _shifted(word, 16)) * 0x7FEB352D
    word = (word ^ _shifted(word, 15)) * _signed(0x846CA68B, 32)
    word = word ^ _shifted(word, 16)
    return torch.where((word & _WORD) >= threshold, scale, 0.0)


def _signed(word: int, bits: int) -> int:
    return word - (1 << bits) if word >= 1 << (bits - 1) else word


_GOLDEN = _signed(0x9E3779B97F4A7C15, 64)


def _hashed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shifted(x, 31)


def _low(x: Tensor) -> Tensor:
    return ((x & 0xFFFFFFFF) - ((x & 0x80000000) << 1)).to(torch.int32)


def _shifted(x: Tensor, bits: int) -> Tensor:
    # torch's shift fills with copies of the sign; a logical shift fills with zeros.
    return (x >> bits) & ((1 << (x.dtype.itemsize * 8 - bits)) - 1)
