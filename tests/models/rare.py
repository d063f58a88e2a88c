"""Attention as few people write it. Beside most of these stands one of lookalikes.py, which is something else."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.spelling import Spelling, function, square

B, T, D = 2, 12, 8
INF, SCALE = math.inf, 1 / math.sqrt(D)
ABOVE = torch.ones(T, T).triu(1).bool()


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * SCALE


def normalised(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True)


def less_the_maximum(s: Tensor) -> Tensor:
    return s - s.amax(-1, keepdim=True)


# The weights, as a function of the scores.
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "less the mean": lambda s: (s - s.mean(-1, keepdim=True)).softmax(-1),
    "over a product with ones": lambda s: (lambda e: e / (e @ e.new_ones(T, 1)))(s.exp()),
    "powers of two": lambda s: normalised(2**s),
    "powers of ten less the maximum": lambda s: normalised(10 ** less_the_maximum(s.masked_fill(ABOVE, -INF))),
    "exp2 less the maximum": lambda s: normalised(torch.exp2(less_the_maximum(s))),
    "exp2 of masked scores": lambda s: normalised(torch.exp2(less_the_maximum(s.masked_fill(ABOVE, -INF)))),
    # CogView's: moved by their largest before they are scaled up again (arXiv 2105.13290).
    "relaxed": lambda s: (less_the_maximum(s / 32) * 32).softmax(-1),
    "relaxed and masked": lambda s: (less_the_maximum((s / 32).masked_fill(ABOVE, -INF)) * 32).softmax(-1),
    "softmin of the negative": lambda s: F.softmin(-s, -1),
    "softmin as a module": lambda s: torch.nn.Softmin(-1)(s),
    "softmin masked from above": lambda s: F.softmin((-s).masked_fill(ABOVE, INF), -1),
    "sum of multiples": lambda s: (s + torch.linspace(0, 1, T) + s * 0.5 - s / 4).softmax(-1),
    "masked scores doubled": lambda s: (lambda m: m + m)(s.masked_fill(ABOVE, -INF)).softmax(-1),
    "guarded and filled at once": lambda s: (lambda p: torch.where(~(p.isnan() | ABOVE), p, 0.0))(
        s.masked_fill(ABOVE, -INF).softmax(-1)
    ),
    "halves of the batch joined": lambda s: torch.cat([s[:1].softmax(-1), s[1:].softmax(-1)]),
}

# The output, as a function of query, key and value.
PROGRAMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "exponentials written twice": lambda q, k, v: (scores(q, k).exp() / scores(q, k).exp().sum(-1, keepdim=True)) @ v,
    "written twice for the maximum":
        lambda q, k, v: normalised((scores(q, k) - scores(q, k).amax(-1, keepdim=True)).exp()) @ v,
    "halves of the scores added": lambda q, k, v: (q @ k.mT / 2 * SCALE + q @ k.mT / 2 * SCALE).softmax(-1) @ v,
    "scores less themselves": lambda q, k, v: (scores(q, k) - scores(q, k)).softmax(-1) @ v,
    "one value for each head": lambda q, k, v: scores(q, k).softmax(-1) @ v[:, :, :1].expand(-1, -1, T, -1),
    "one value without a batch":
        lambda q, k, v: (scores(q, k).masked_fill(ABOVE, -INF).softmax(-1) * torch.linspace(0, 1, T))
        @ v[:1, :, :1].repeat(B, 1, T, 1),
    "one vector": lambda q, k, v: (k[0, 0] @ q[0, 0, 0] * SCALE).softmax(-1) @ v[0, 0],
}  # fmt: skip


def second_names(q, k, v):
    s = scores(q, k)
    e = torch.special.exp2(s - torch.special.logsumexp(s, -1, keepdim=True))
    return torch.special.softmax(s, -1) @ (normalised(e) @ v)


def quotient_of_two_products(q, k, v):
    e = scores(q, k).exp()
    return (e @ v) / (e @ q.new_ones(T, 1))


def keys_and_values_in_pairs(q, k, v):
    k, v = (x[:, :, : T // 2].repeat_interleave(2, 2) for x in (k, v))
    return scores(q, k).softmax(-1) @ v


def product_added_to_something(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.baddbmm(q, scores(q, k).softmax(-1), v, beta=0.5, alpha=2.0)


def scores_used_by_two(q, k, v):
    s = scores(q, k)
    first = s.softmax(-1) @ v
    return first + s.mT.softmax(-1) @ (first + v)


def autocast_off_inside(q, k, v):
    s = scores(q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        return s.softmax(-1) @ v


# ---- written in place


def written(write: Callable[[Tensor], object]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def program(q, k, v):
        s = scores(q, k)
        write(s)
        return s.softmax(-1) @ v

    return program


def every_second_key(s: Tensor) -> None:
    s[..., ::2] += 1.0
    s[..., 1::3] *= 2.0


def diagonal_by_positions(s: Tensor) -> None:
    i = torch.arange(T)
    s[:, :, i, i] = -5e4


def beside_the_diagonal(s: Tensor) -> None:
    i = torch.arange(T - 2)
    s[:, :, i + 2, i + 1] = -INF


def diagonal(s: Tensor) -> None:
    s.diagonal(dim1=-2, dim2=-1).fill_(-INF)


def first_and_rest_in_place(q, k, v):
    s = scores(q, k)
    s[:1] = s[:1].softmax(-1)
    s[1:] = s[1:].softmax(-1)
    return s @ v


def halves_of_the_queries_in_place(q, k, v):
    s = scores(q, k)
    s[:, :, 5:] = s[:, :, 5:].softmax(-1)
    s[:, :, :5] = s[:, :, :5].softmax(-1)
    return s @ v


def written_and_returned(q, k, v):
    s = scores(q, k)
    s.mul_(2)
    p = s.softmax(-1)
    return p @ v, p


_G = "rare"
_FUNCTIONS = (
    quotient_of_two_products, keys_and_values_in_pairs, product_added_to_something,
    autocast_off_inside, written_and_returned, first_and_rest_in_place, halves_of_the_queries_in_place,
)  # fmt: skip

RARE: tuple[Spelling, ...] = tuple(
    function(_G, program, square(T, heads=4, head_dim=D), name)
    for name, program in (
        *((name, lambda q, k, v, of=of: of(scores(q, k)) @ v) for name, of in WEIGHTS.items()),
        *PROGRAMS.items(),
        *((f.__name__, f) for f in _FUNCTIONS),
        *((f.__name__, written(f)) for f in (every_second_key, diagonal_by_positions, beside_the_diagonal, diagonal)),
    )
) + tuple(
    function(_G, program, square(T, heads=4, head_dim=D), sites=2) for program in (second_names, scores_used_by_two)
)
