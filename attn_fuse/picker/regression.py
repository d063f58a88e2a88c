"""Nearness: how far cases are apart, and what is to be expected of one from what was measured of others.

A case is a point, so placed that the sum of the differences between the coordinates of two is how far they are apart.
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

from attn_fuse.picker.case import MASKS, Case

Point = tuple[float, ...]

# How far cases are apart that differ in one thing, an octave of it or a kind: what makes the shipped CPU table the most
# likely (torch 2.13, AMD EPYC; 616 rows, by gradient descent), but no less than 0.1, and 0.2 for a function and a sink.
_PLANES, _SCORES, _SHAPE, _HEAD_DIM, _VALUE_DIM, _VISIBLE = 0.43, 0.26, 0.22, 0.1, 0.1, 0.1
_MASK, _TRAINING, _FUNCTION, _DROPOUT, _SINK = 0.63, 0.32, 0.2, 1.1, 0.2
_HALF, _DOUBLE = 1.6, 1.6
# A constant bias against none 0.15, one that wants its gradient against either 0.3; a looked-up one against that 0.5.
_BIAS = {"none": (0.0, 0.0), "constant": (0.15, 0.0), "gradient": (0.075, 0.225), "indexed": (0.075, 0.725)}

# glibc takes so many bytes from the system anew each time (M_MMAP_THRESHOLD at its most), which clears them page by
# page: scores just above that cost the program as written half as much again as scores just below.
_MAPPED, _MAPPED_FROM = 1.2, 1 << 25

# Over this distance the correlation of two ratios falls to 1/e; the variance of a measurement, of that of the ratios.
# What rows left out in turn give: benchmarks/left_out.py. (On 544 rows, 1.008 of the best, the mean; with the three
# nearest rows weighted by their distance 1.024.)
_LENGTH, _NOISE = 4.0, 0.03


@functools.cache
def point_of(case: Case, device_type: str) -> Point:
    """The place of a case on a device of this type."""
    # What counts as the length of the queries is how many share a key: of a single query, heads that share one do.
    groups = case.heads // case.kv_heads
    queries, heads = (groups, case.kv_heads) if case.q_len == 1 else (case.q_len, case.heads)
    shape = case.q_len * groups / case.kv_len
    return (
        _PLANES * math.log2(case.batch * heads),
        _SCORES * math.log2(queries * case.kv_len),
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
        _MAPPED * (device_type == "cpu" and case.scores * case.itemsize >= _MAPPED_FROM),
        *_BIAS[case.bias],
        *(_MASK / 2 * (case.mask == name) for name in MASKS),
    )


def apart(a: Case, b: Case, device_type: str) -> float:
    """The distance of two cases on a device of this type."""
    return sum(abs(x - y) for x, y in zip(point_of(a, device_type), point_of(b, device_type), strict=True))


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
