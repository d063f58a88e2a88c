"""Precision: what the dtype of an operation does to its result: rounding, wrapping around, casts."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import sympy
import torch

from attn_fuse.expression.functions import FUNCTIONS
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import (
    Add,
    Binary,
    Cast,
    Const,
    Div,
    Expr,
    Gather,
    Index,
    Load,
    Mul,
    Scalar,
    Score,
    Select,
    Unary,
    has_product,
    walk,
)
from attn_fuse.expression.simplify import compare, rebuilt, select

_HALVES: tuple[torch.dtype | None, ...] = (torch.float16, torch.bfloat16)


def rounded(value: float, dtype: torch.dtype) -> bool | int | float:
    """`value` as `dtype` stores it: rounded, or wrapped around."""
    if dtype == torch.bool:
        return bool(value)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return (int(value) - info.min) % (info.max - info.min + 1) + info.min
    return float(torch.tensor(value, dtype=torch.float64).to(dtype).item())


def computed(x: Expr, dtype: torch.dtype, space: Space) -> Expr:
    """`x`, an operation in exact arithmetic, as torch computes it in `dtype` on operands held in `dtype`.

    Integers wrap around where `dtype` is narrower than int64, and positions are rounded where it does not hold them
    exactly. The results of half-precision operations are rounded by `as_rounded` only.
    """
    match x:
        case Const(value) if dtype.is_floating_point or math.isfinite(value):
            return Const(rounded(value, dtype)) if math.isfinite(value) else x
        case Select(cond, a, b):
            return select(cond, computed(a, dtype, space), computed(b, dtype, space))
        case Index(value):
            return x if is_exact(value, dtype, space) else Cast(dtype, x)
        case Add() | Mul() | Div() | Unary() | Binary() if dtype.is_floating_point:
            return x if has_product(x) else _held(x, dtype)
        case Add() | Mul() | Div() | Unary() | Binary() if dtype not in (torch.int64, torch.bool):
            return Cast(dtype, x)
    return x


def _held(x: Expr, dtype: torch.dtype) -> Expr:
    """`x` with a cast to `dtype` around each operand that is made of positions and so carries no dtype."""

    def held(operand: Expr) -> Expr:
        is_number = isinstance(operand, Const) or (isinstance(operand, Select) and not _has_position(operand))
        return operand if is_number or not _is_untyped(operand) else Cast(dtype, operand)

    match x:
        case Unary(name, operand) if FUNCTIONS[name].gives != "same":
            return Unary(name, held(operand))
        case Binary(name, a, b):
            return Binary(name, held(a), held(b))
        case Add(a, b) | Mul(a, b) | Div(a, b):
            return type(x)(held(a), held(b))
    return x


def _is_untyped(x: Expr) -> bool:
    """Whether nothing in `x` carries a dtype, since it is made of positions and numbers alone."""
    return not any(isinstance(part, (Load, Gather, Scalar, Cast, Score)) for part in walk(x))


def _has_position(x: Select) -> bool:
    return any(isinstance(part, Index) for branch in (x.a, x.b) for part in walk(branch))


def is_exact(value: sympy.Expr, dtype: torch.dtype, space: Space) -> bool:
    """Whether `dtype` holds the position `value` exactly, for every value of its indices and sizes."""
    least, greatest = _EXACT[dtype] if dtype in _EXACT else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    low, high = space.bounds(value)
    return least <= low and high <= greatest


_EXACT = {
    torch.bool: (0, 1),
    torch.bfloat16: (-(2**8), 2**8),
    torch.float16: (-(2**11), 2**11),
    torch.float32: (-(2**24), 2**24),
    torch.float64: (-(2**53), 2**53),
}


def as_rounded(x: Expr, leaf_dtypes: Mapping[int, torch.dtype]) -> Expr:
    """`x` with the result of each half-precision operation rounded to its dtype, as a comparison of `x` would show.

    leaf_dtypes: the dtype of each leaf that is a tensor. An expression with a matrix product stays as it is.
    """
    if has_product(x) or not any(_is_half(part, leaf_dtypes) for part in walk(x)):
        return x

    def dtype_of(x: Expr) -> torch.dtype | None:
        match x:
            case Load(leaf) | Gather(leaf):
                return leaf_dtypes[leaf] if leaf_dtypes[leaf].is_floating_point else None
            case Cast(dtype):
                return dtype if dtype.is_floating_point else None
            case Select(_, a, b) | Binary(_, a, b) | Add(a, b) | Mul(a, b) | Div(a, b):
                found = [held for part in (a, b) if (held := dtype_of(part)) is not None]
                return functools.reduce(torch.promote_types, found) if found else None
            case Unary(_, inner):
                return dtype_of(inner)
        return None

    def changed(x: Expr) -> Expr:
        if isinstance(x, Cast) and x.dtype in _HALVES and dtype_of(x.x) == x.dtype:
            return changed(x.x)
        new, dtype = rebuilt(x, changed), dtype_of(x)
        is_rounded = dtype in _HALVES and isinstance(x, (Add, Mul, Div, Unary, Binary))
        return Cast(dtype, new) if dtype is not None and is_rounded else new

    return changed(x)


def _is_half(x: Expr, leaf_dtypes: Mapping[int, torch.dtype]) -> bool:
    match x:
        case Load(leaf) | Gather(leaf):
            return leaf_dtypes[leaf] in _HALVES
        case Cast(dtype):
            return dtype in _HALVES
    return False


def cast(dtype: torch.dtype, x: Expr, from_dtype: torch.dtype, space: Space) -> Expr:
    """`x`, held in `from_dtype`, converted to `dtype`, simplified."""
    if dtype == from_dtype:
        return x
    match x:
        case Const(value) if dtype.is_floating_point or dtype == torch.bool or _fits(value, dtype):
            return Const(rounded(value, dtype))
        case Select(cond, Const() as a, Const() as b):
            return select(cond, cast(dtype, a, from_dtype, space), cast(dtype, b, from_dtype, space))
        case Index(value) if dtype != torch.bool and is_exact(value, dtype, space):
            return x
    if from_dtype == torch.bool:
        one, zero = Const(rounded(1, dtype)), Const(rounded(0, dtype))
        return select(x, one, zero)
    if dtype == torch.bool:
        return compare("ne", x, Const(0), space)
    return Cast(dtype, x)


def _fits(value: float, dtype: torch.dtype) -> bool:
    """Whether converting `value` to an integer dtype is defined: always for an integer, for a float within range."""
    info = torch.iinfo(dtype)
    return isinstance(value, int) or (math.isfinite(value) and info.min <= value <= info.max)
