"""Dropout: a hash of seed, head, query and key decides which weights to keep, whatever the size of the blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_fuse.kernels.operands import Operands

_WORD = (1 << 31) - 1


def dropout(given: Operands, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(rows, keys, threshold, scale) of a call, the arguments of `kept`; nothing without dropout.

    rows, keys: random words of the queries, int32 [B, H, Lq, 1], and of the keys, int32 [1, 1, 1, Lk], by four rounds
    of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). threshold: weights with a smaller hash are dropped.
    scale: 1 / (1 - p) in `dtype`, the factor of kept weights.
    """
    if not given.drops:
        return ()
    seed, p, (batch, heads, q_len, kv_len) = given.seed, given.dropout_p, given.sizes
    assert seed is not None
    device = seed.device
    start = _hashed(seed.reshape(()).to(torch.int64) + _GOLDEN)
    planes = _hashed(start + (torch.arange(batch * heads, device=device) + 1) * _GOLDEN).view(batch, heads, 1, 1)
    rows = _hashed(planes + (torch.arange(q_len, device=device).view(-1, 1) + 1) * _GOLDEN)
    keys = _hashed(~start - (torch.arange(kv_len, device=device).view(1, 1, 1, -1) + 1) * _GOLDEN)
    return (
        _low(rows),
        _low(keys),
        # torch.tensor would make the host wait for a copy to the device.
        torch.full((1, 1, 1, 1), min(round(p * 2**31), _WORD), dtype=torch.int32, device=device),
        # At p = 1 the largest hash is not below the threshold, so a scale of 0 drops its weight.
        torch.full((1, 1, 1, 1), 0.0 if p == 1.0 else 1.0 / (1.0 - p), dtype=dtype, device=device),
    )


def kept(rows: Tensor, keys: Tensor, threshold: Tensor, scale: Tensor) -> Tensor:
    """The factors of the weights of a block, 0 or 1 / (1 - p). rows, keys: the block's parts.

    The hash is lowbias32 (Wellons, 2018), whose 32-bit words fill vector registers.
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
    # A logical shift; torch's own fills with copies of the sign.
    return (x >> bits) & ((1 << (x.dtype.itemsize * 8 - bits)) - 1)
