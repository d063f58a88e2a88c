"""Precision: how the dtype of an operation changes its result by rounding, wrapping around and casts."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression.functions import FUNCTIONS
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Expr, has_product, walk
from attn_fuse.expression.simplify import compare, rebuilt, select

_HALVES: tuple[torch.dtype | None, ...] = (torch.float16, torch.bfloat16)


def rounded(value: float, dtype: torch.dtype) -> bool | int | float:
    """`value` as stored in `dtype`: rounded or wrapped around."""
    if dtype == torch.bool:
        return bool(value)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return (int(value) - info.min) % (info.max - info.min + 1) + info.min
    return float(torch.tensor(value, dtype=torch.float64).to(dtype).item())


def computed(x: Expr, dtype: torch.dtype, space: Space) -> Expr:
    """`x`, an operation in exact arithmetic, as torch computes it in `dtype` on operands of `dtype`.

    Integers narrower than int64 wrap around, and positions that `dtype` does not hold exactly are rounded. Only
    `as_rounded` rounds the results of half-precision operations.
    """
    match x:
        case ex.Const(value) if math.isfinite(value):
            return ex.Const(rounded(value, dtype))
        case ex.Select(cond, a, b):
            return select(cond, computed(a, dtype, space), computed(b, dtype, space))
        case ex.Index(value):
            return x if is_exact(value, dtype, space) else ex.Cast(dtype, x)
        case ex.Add() | ex.Mul() | ex.Div() | ex.Unary() | ex.Binary() if dtype.is_floating_point:
            return x if has_product(x) else _held(x, dtype)
        case ex.Add() | ex.Mul() | ex.Div() | ex.Unary() | ex.Binary() if dtype not in (torch.int64, torch.bool):
            return ex.Cast(dtype, x)
    return x


def _held(x: Expr, dtype: torch.dtype) -> Expr:
    """`x` with a cast to `dtype` around each operand computed from positions, which has no dtype of its own."""

    def held(operand: Expr) -> Expr:
        if isinstance(operand, ex.Const) or any(isinstance(part, _WITH_DTYPE) for part in walk(operand)):
            return operand
        branches = (operand.a, operand.b) if isinstance(operand, ex.Select) else ()
        of_numbers = branches and not any(isinstance(part, ex.Index) for branch in branches for part in walk(branch))
        return operand if of_numbers else ex.Cast(dtype, operand)

    match x:
        case ex.Unary(name, operand) if FUNCTIONS[name].gives != "same":
            return ex.Unary(name, held(operand))
        case ex.Binary(name, a, b):
            return ex.Binary(name, held(a), held(b))
        case ex.Add(a, b) | ex.Mul(a, b) | ex.Div(a, b):
            return type(x)(held(a), held(b))
    return x


_WITH_DTYPE = (ex.Load, ex.Gather, ex.Scalar, ex.Cast, ex.Score)


def is_exact(value: sympy.Expr, dtype: torch.dtype, space: Space) -> bool:
    """Whether `dtype` is proved to hold the position `value` exactly."""
    low, high = space.bounds(value)
    if dtype == torch.bool:
        return 0 <= low and high <= 1
    if dtype.is_floating_point:
        return max(-low, high) <= 2 / torch.finfo(dtype).eps
    return torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max


def as_rounded(x: Expr, leaf_dtypes: Mapping[int, torch.dtype]) -> Expr:
    """`x` with the result of each half-precision operation rounded, which matters where `x` is compared.

    An expression with a matrix product stays as it is. leaf_dtypes: the dtype of each leaf that is a tensor.
    """

    def dtype_of(x: Expr) -> torch.dtype | None:
        match x:
            case ex.Load(leaf) | ex.Gather(leaf):
                return leaf_dtypes[leaf] if leaf_dtypes[leaf].is_floating_point else None
            case ex.Cast(dtype):
                return dtype if dtype.is_floating_point else None
            case ex.Select(_, a, b) | ex.Binary(_, a, b) | ex.Add(a, b) | ex.Mul(a, b) | ex.Div(a, b):
                found = [held for part in (a, b) if (held := dtype_of(part)) is not None]
                return functools.reduce(torch.promote_types, found) if found else None
            case ex.Unary(_, inner):
                return dtype_of(inner)
        return None

    def changed(x: Expr) -> Expr:
        if isinstance(x, ex.Cast) and x.dtype in _HALVES and dtype_of(x.x) == x.dtype:
            return changed(x.x)
        new, dtype = rebuilt(x, changed), dtype_of(x)
        is_rounded = dtype in _HALVES and isinstance(x, (ex.Add, ex.Mul, ex.Div, ex.Unary, ex.Binary))
        return ex.Cast(dtype, new) if dtype is not None and is_rounded else new

    held = (part for part in walk(x) if isinstance(part, (ex.Load, ex.Gather, ex.Cast)))
    return x if has_product(x) or not any(dtype_of(part) in _HALVES for part in held) else changed(x)


def cast(dtype: torch.dtype, x: Expr, from_dtype: torch.dtype, space: Space) -> Expr:
    """`x` converted from `from_dtype` to `dtype`, simplified."""
    if dtype == from_dtype:
        return x
    match x:
        case ex.Const(value) if dtype.is_floating_point or dtype == torch.bool or _fits(value, dtype):
            return ex.Const(rounded(value, dtype))
        case ex.Select(cond, ex.Const() as a, ex.Const() as b):
            return select(cond, cast(dtype, a, from_dtype, space), cast(dtype, b, from_dtype, space))
        case ex.Index(value) if dtype != torch.bool and is_exact(value, dtype, space):
            return x
    if from_dtype == torch.bool:
        return select(x, ex.Const(rounded(1, dtype)), ex.Const(rounded(0, dtype)))
    if dtype == torch.bool:
        return compare("ne", x, ex.Const(0), space)
    return ex.Cast(dtype, x)


def _fits(value: float, dtype: torch.dtype) -> bool:
    """Whether converting `value` to an integer dtype is defined: for integers, and for floats in its range."""
    info = torch.iinfo(dtype)
    return isinstance(value, int) or (math.isfinite(value) and info.min <= value <= info.max)
