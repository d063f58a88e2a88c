"""Nearness: how far cases are apart, and what is to be expected of one from what was measured of others.

A case is a point, so placed that the sum of the differences between the coordinates of two is how far they are apart:
by how many octaves the ratio of a kernel's time to the time as written is expected to change from the one to the other.
Between points the logarithm of the ratio is interpolated by ordinary kriging, that is Gaussian process regression with
a mean that is not known (C. E. Rasmussen and C. K. I. Williams, Gaussian Processes for Machine Learning, 2006, chapter
2): rows near each other count for less than rows on all sides, and what one says alone is taken for noise in part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_fuse.kernels.case import MASKS, Case

Point = tuple[float, ...]

# The figures are means over the pairs of rows of the shipped CPU table that differ in one thing (torch 2.13, AMD EPYC):
# an octave of scores 0.17, of their shape 0.15 (a single query against a square 1.4), 16-bit against fp32 0.9, training
# against inference 0.5, one mask against another 0.3, a bias against none 0.1. Not measured yet and so set with
# caution: what only some kernels take is worth a factor of two; an octave of what is seen is worth one to a kernel that
# skips the rest and none to the others.
_SCORES, _SHAPE, _HEAD_DIM, _VALUE_DIM, _VISIBLE = 0.17, 0.15, 0.25, 0.25, 0.5
_MASK, _TRAINING, _FUNCTION, _DROPOUT, _SINK = 0.3, 0.5, 1.0, 1.0, 1.0
_HALF, _DOUBLE = 0.9, 0.9
# A bias against none 0.1, one that wants its gradient against either 1.
_BIAS = {"none": (0.0, 0.0), "constant": (0.1, 0.0), "gradient": (0.05, 0.95)}

# Over this distance the correlation of two ratios falls to 1/e; the variance of a measurement, of that of the ratios.
# Each row of the shipped CPU table left out in turn: what is picked then takes 1.012 of the best, the mean of 528, and
# more than 1.1 on 16 (with three neighbours weighted by their distance: 1.046, and 46). Half or twice the length, or
# half the noise, make little difference.
_LENGTH, _NOISE = 4.0, 0.04


@functools.cache
def point_of(case: Case) -> Point:
    """The place of a case, in octaves of the ratio."""
    # What counts as the length of the queries is how many share a key: of a single query, heads that share one do.
    shape = case.q_len * case.heads / case.kv_heads / case.kv_len
    return (
        _SCORES * math.log2(case.scores),
        _SHAPE * math.log2(shape),
        _HEAD_DIM * math.log2(case.head_dim),
        _VALUE_DIM * math.log2(case.value_dim / case.head_dim),
        _VISIBLE * math.log2(case.visible),
        _TRAINING * case.training,
        _FUNCTION * case.function,
        _DROPOUT * case.dropout,
        _SINK * case.sink,
        _HALF * (case.itemsize == 2),
        _DOUBLE * (case.itemsize == 8),
        *_BIAS[case.bias],
        *(_MASK / 2 * (case.mask == name) for name in MASKS),
    )


def apart(a: Case, b: Case) -> float:
    """The distance of two cases, in octaves of the ratio."""
    return sum(abs(x - y) for x, y in zip(point_of(a), point_of(b), strict=True))


def expected(point: Point, points: Sequence[Point], values: Sequence[float]) -> float:
    """What is to be expected at `point` of something that had these `values` at these `points`, one or more."""
    known = torch.tensor(points, dtype=torch.float64, device="cpu")
    at = torch.tensor([point], dtype=torch.float64, device="cpu")
    found = torch.tensor(values, dtype=torch.float64, device="cpu")
    covariance = _correlation(known, known) + _NOISE * torch.eye(len(points), dtype=torch.float64, device="cpu")
    both = torch.stack([found, torch.ones_like(found)], 1)
    solved, of_ones = torch.linalg.solve(covariance, both).unbind(1)
    mean = solved.sum() / of_ones.sum()
    return float(mean + _correlation(at, known)[0] @ (solved - mean * of_ones))


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(a, b, p=1.0) / _LENGTH)
