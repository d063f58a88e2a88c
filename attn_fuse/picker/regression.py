"""Regression: the distance of cases, and the expected ratio of a case from the measured ratios of others.

A case is a point, and the distance of two cases is the L1 distance of their points. Between points the logarithm of the
ratio is interpolated by ordinary kriging, that is, Gaussian process regression with an unknown mean (C. E. Rasmussen
and C. K. I. Williams, Gaussian Processes for Machine Learning, 2006, chapter 2). Rows close to each other count less
than rows on all sides, and a single row counts partly as noise. Beyond the rows a trend continues: the more scores, the
more a kernel gains. Weighted means of the nearest rows did worse: benchmarks/left_out.py gave 1.03 in place of 1.01 of
the best time for each row left out, and 1.24 in place of 1.05 for lengths beyond the rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_fuse.attention.mask import KINDS
from attn_fuse.picker.case import Case

Point = tuple[float, ...]

# The distance of two cases that differ in one property, by an octave or in kind. Fitted by max likelihood, with
# gradient descent, to 616 rows of the shipped CPU table (torch 2.13, AMD EPYC), with a min of 0.1, and of 0.2 for a
# function and a sink.
_PLANES, _SCORES, _SHAPE, _HEAD_DIM, _VALUE_DIM, _VISIBLE = 0.43, 0.26, 0.22, 0.1, 0.1, 0.1
_MASK, _TRAINING, _FUNCTION, _DROPOUT, _SINK = 0.63, 0.32, 0.2, 1.1, 0.2
_HALF, _DOUBLE = 1.6, 1.6
# Distances: constant to none 0.15, gradient to constant or none 0.3, indexed to gradient 0.5.
_BIAS = {
    "none": (0.0, 0.0), "constant": (0.15, 0.0), "positions": (0.15, 0.0), "gradient": (0.075, 0.225),
    "indexed": (0.075, 0.725),
}  # fmt: skip
# On a GPU: from a function of the scores to a table, from a constant bias to positions, and from a shared bias to one
# for each batch entry. Assumed to be as small as the min above, since no device has rows of both yet.
_TABLE, _POSITIONS, _BY_ENTRY = 0.2, 0.2, 0.2

# From this many bytes on (the max of M_MMAP_THRESHOLD) glibc takes each allocation from the system, which clears it
# page by page: scores just above cost the program as written 1.5 times as much as scores just below.
_MAPPED, _MAPPED_FROM = 1.2, 1 << 25

# The distance over which the correlation of two ratios falls to 1/e; the variances of a measurement and of the trend's
# slope along the scores, over the variance of the ratios. benchmarks/left_out.py measures the picks that result.
_LENGTH, _NOISE, _TREND = 4.0, 0.03, 1.0
_ALONG = 1


@functools.cache
def point_of(case: Case, device_type: str) -> Point:
    """The coordinates of `case` on a device of this type."""
    # Speed depends on how many queries share a key. With a single query, those are the heads that share one.
    groups = case.heads // case.kv_heads
    queries, heads = (groups, case.kv_heads) if case.q_len == 1 else (case.q_len, case.heads)
    shape = case.q_len * groups / case.kv_len
    on_gpu = device_type == "cuda"
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
        _TABLE * (on_gpu and case.table),
        _POSITIONS * (on_gpu and case.bias == "positions"),
        _BY_ENTRY * (on_gpu and case.bias_by_entry),
        *(_MASK / 2 * (case.mask == name) for name in KINDS),
    )


def apart(a: Point, b: Point) -> float:
    """The distance of two points, L1."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True))


def distance(a: Case, b: Case, device_type: str) -> float:
    """The distance of two cases on a device of this type."""
    return apart(point_of(a, device_type), point_of(b, device_type))


def expected(point: Point, points: Sequence[Point], values: Sequence[float]) -> float:
    """The expected value at `point`, given these `values` at these `points`, one or more."""
    tensor = functools.partial(torch.tensor, dtype=torch.float64, device="cpu")  # whatever the caller's defaults are
    known, found = tensor(points), tensor(values)
    middle = known.mean(0)
    known, at = known - middle, tensor([point]) - middle
    covariance = _covariance(known, known)
    covariance.diagonal().add_(_NOISE)
    solved, of_ones = torch.linalg.solve(covariance, torch.stack([found, torch.ones_like(found)], 1)).unbind(1)
    mean = solved.sum() / of_ones.sum()
    return float(mean + _covariance(at, known)[0] @ (solved - mean * of_ones))


def _covariance(a: Tensor, b: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(a, b, p=1.0) / _LENGTH) + _TREND * torch.outer(a[:, _ALONG], b[:, _ALONG])
