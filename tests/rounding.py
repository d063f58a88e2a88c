"""What float64 loses: no wider type says, so float32 stands in for it, in proportion to the roundings of the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# What a result may be off: a multiple of what eager is off in its dtype, and roundings of the dtype. See tests.harness.
TIMES_EAGER, ROUNDINGS = 4.0, 16.0
# The largest error is often that of one row in which two scores are close: of one trial, chance decides its size.
TRIALS = 8
PROPORTION = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


def rounding_of_float64(run: Callable[[Sequence[Tensor]], Sequence[Tensor]], given: Sequence[Tensor]) -> list[float]:
    """The distance that float64's rounding alone makes in each result of `run`, measured; [] where it cannot be.

    It is the max distance of the results in float32 from those in float64, over several roundings of the numbers given.
    """
    generator = torch.Generator().manual_seed(0)

    def nudged(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        ulps = torch.randint(-1, 2, x.shape, generator=generator)
        return (x.double() * (1 + ulps * torch.finfo(torch.float32).eps)).to(torch.float32)

    try:
        exact = run([x.double() if x.is_floating_point() else x for x in given])
        trials = [run([nudged(x) for x in given]) for _ in range(TRIALS)]
    except Exception:
        return []
    shapes = [x.shape for x in exact]
    if any([x.shape for x in trial] != shapes for trial in trials):
        return []
    return [PROPORTION * max(distance(trial[n], exact[n]) for trial in trials) for n in range(len(exact))]


def distance(x: Tensor, y: Tensor) -> float:
    """The max distance of two tensors of one shape, where it is finite."""
    distances = (x.double() - y.double()).abs()
    known = distances[distances.isfinite()]
    return known.max().item() if known.numel() else 0.0
