"""What dropout on the weights must be, whichever operator draws it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

# An operator's weights, times kv_len: (queries, keys, values, seed, p) -> out, for scores that are all equal.
Operator = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def seeded(number: int) -> Tensor:
    return torch.tensor([number])


def kept_weights(operator: Operator, seed: Tensor, p: float, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """What `operator` multiplies the weights by: with equal scores, the values tell."""
    queries, keys = torch.zeros(batch, heads, q_len, 4), torch.zeros(batch, heads, kv_len, 4)
    values = torch.eye(kv_len).expand(batch, heads, -1, -1)
    return operator(queries, keys, values, seed, p) * kv_len


def check_distribution(operator: Operator, p: float) -> None:
    kept = kept_weights(operator, seeded(7), p, 2, 3, 64, 96)
    share = (kept > 0).double()
    torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 1 / (1 - p)))
    # Six standard deviations, of all entries and of those of each batch, head, query and key.
    deviation = 6 * math.sqrt(p * (1 - p))
    for over in [(0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]:
        means = share.mean(over)
        assert (means - (1 - p)).abs().max() <= deviation / math.sqrt(share.numel() / means.numel())
    # No entry tells of another, near or as far as tiles go, in one dimension.
    centred = (share - (1 - p)) / math.sqrt(p * (1 - p))
    for dimension, size in enumerate(share.shape):
        for far in (n for n in (1, 2, 8, 16, 31, 32, 33) if n < size):
            _check_products(_apart(centred, dimension, far))
    # Nor do three of those where two queries meet two keys tell of the fourth, as in a sum or a product of both.
    for far, wide in itertools.product((1, 16, 32), (1, 8, 16, 32, 64)):
        _check_products(_apart(_apart(centred, 2, far), 3, wide))


def _apart(x: Tensor, dimension: int, far: int) -> Tensor:
    """Each entry times that which is `far` behind."""
    left = x.shape[dimension] - far
    return x.narrow(dimension, 0, left) * x.narrow(dimension, far, left)


def _check_products(products: Tensor) -> None:
    assert products.mean().abs() <= 6 / math.sqrt(products.numel())


def check_seed(operator: Operator, with_other_blocks: Operator) -> None:
    """The seed alone says which weights are kept; with_other_blocks: the operator, in blocks of other sizes."""
    first = kept_weights(operator, seeded(1), 0.5, 1, 2, 40, 40)
    assert torch.equal(first, kept_weights(operator, torch.tensor(1), 0.5, 1, 2, 40, 40))
    for other in (2, -1, 2**62):
        same = (first == kept_weights(operator, seeded(other), 0.5, 1, 2, 40, 40)).double().mean()
        assert abs(same - 0.5) < 6 * 0.5 / math.sqrt(first.numel())
    torch.testing.assert_close(first, kept_weights(with_other_blocks, seeded(1), 0.5, 1, 2, 40, 40))
