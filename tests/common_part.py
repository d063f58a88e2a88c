"""Windows of tokens with a common part: how far an attention's gradients are from float64, beside eager's own.

Values with a large mean, as unnormalised inputs give, cancel in the gradient of a softmax. Softmax's own backward
subtracts the sum of the very products that it multiplies, so that its roundings cancel, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
HEADS, HEAD_DIM, BATCH = 3, 16, 4
# What is asked of every kernel of ours.
TIMES_EAGER = 3


def written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * HEAD_DIM**-0.5 + bias).softmax(-1) @ v


class Window(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM)
        self.bias = nn.Parameter(torch.randn(HEADS, tokens, tokens) / 50)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        return attend(q, k, v, self.bias).transpose(1, 2).flatten(2)


def distances(
    attends: dict[str, Attend],
    mean: float,
    tokens: int,
    seeds: int,
    reference: Attend = written,
    dtype: torch.dtype = torch.float32,
) -> dict[str, dict[str, float]]:
    """By gradient and by attention: the median of its distance from that of `reference` in float64, relative to it."""
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        window, x = Window(tokens).to(dtype), (torch.randn(BATCH, tokens, HEADS * HEAD_DIM) + mean).to(dtype)
        grad = torch.randn_like(x)

        def gradients(attend: Attend, dtype: torch.dtype) -> dict[str, Tensor]:
            leaf = x.to(dtype, copy=True).requires_grad_()  # noqa: B023
            wanted = {"x": leaf, **dict(window.to(dtype).named_parameters())}  # noqa: B023
            out = window(leaf, attend)  # noqa: B023
            return dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), grad.to(dtype)), strict=True))  # noqa: B023

        # To float64 and back nothing is rounded.
        exact = gradients(reference, torch.float64)
        for name, attend in attends.items():
            for of, gradient in gradients(attend, dtype).items():
                distance = ((gradient - exact[of]).norm() / exact[of].norm()).item()
                found.setdefault(of, {}).setdefault(name, []).append(distance)
    return {of: {name: statistics.median(each) for name, each in named.items()} for of, named in found.items()}


def assert_as_good_as_eager(
    attend: Attend,
    mean: float,
    tokens: int,
    seeds: int = 5,
    eager: Attend = written,
    dtype: torch.dtype = torch.float32,
) -> None:
    for of, found in distances({"eager": eager, "ours": attend}, mean, tokens, seeds, eager, dtype).items():
        assert found["ours"] <= TIMES_EAGER * found["eager"], f"{of}: {found}"
