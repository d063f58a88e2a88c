"""A block of a model with causal attention, for tests that are about something else."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two heads of 16 and a residual. The mask is a buffer for up to 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        seen = self.mask[: x.shape[1], : x.shape[1]] != 0
        weights = (q @ k.mT / 4).masked_fill(~seen, float("-inf")).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))
