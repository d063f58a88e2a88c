"""Layers: what patterns take off an attention, outermost first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import sympy
import torch

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression.nodes import (
    Add,
    Binary,
    Cast,
    Const,
    Contract,
    Div,
    Dropout,
    Expr,
    Mul,
    Reduce,
    Score,
    Select,
    Softmax,
    Unary,
    has_product,
)


@dataclass(frozen=True)
class Scale:
    """The scores beneath are multiplied by `factor`."""

    factor: Expr


@dataclass(frozen=True)
class Bias:
    """`term` is added to the scores beneath."""

    term: Expr


@dataclass(frozen=True)
class MaskFill:
    """Where `keep` does not hold, the score becomes `value`. added: `value` is added to it instead."""

    keep: Expr
    value: float
    added: bool = False


@dataclass(frozen=True)
class Floor:
    """The scores beneath are at least `value`."""

    value: float


@dataclass(frozen=True)
class Softcap:
    """The scores beneath are capped softly: value * tanh(x / value)."""

    value: float


@dataclass(frozen=True)
class DropoutLayer:
    """Dropout with probability `p`."""

    p: Expr


@dataclass(frozen=True)
class Factor:
    """The weights beneath are multiplied by `value`. filled: 0 in `value` replaces even a weight that is NaN."""

    value: Expr
    filled: bool = False


@dataclass(frozen=True)
class EmptyIsZero:
    """The weights of a fully masked row are 0: the program tests that all `scores` along `axis` are minus infinity.

    Without an axis, it tests the score of the weight itself; without scores, whether the weight is NaN or infinite.
    """

    scores: Expr | None = None
    axis: sympy.Symbol | None = None


@dataclass(frozen=True)
class Nothing:
    """A layer that does not change the mathematics."""


Layer = Scale | Bias | MaskFill | Floor | Softcap | DropoutLayer | Factor | EmptyIsZero | Nothing


@dataclass(frozen=True)
class Layered:
    """The answer of a pattern: `layer`, which it took off, and `inner`, the expression beneath."""

    inner: Expr
    layer: Layer


Answer = Layered | Refusal | None
Pattern = Callable[[Expr], Answer]


@dataclass(frozen=True)
class Layers:
    """An expression taken apart into layers.

    found: the layers, outermost first, each with the part that it was taken off. rest: the expression beneath.
    refusal: a pattern's Refusal of `rest`; None where no pattern knows it.
    """

    rest: Expr
    found: tuple[tuple[Layer, Expr], ...]
    refusal: Refusal | None = None


def peel(expr: Expr, patterns: Iterable[Pattern]) -> Layers:
    """`expr` taken apart by the patterns, which are asked in their order at every layer."""
    found: list[tuple[Layer, Expr]] = []
    while True:
        answer = next((answer for pattern in patterns if (answer := pattern(expr)) is not None), None)
        if not isinstance(answer, Layered):
            return Layers(expr, tuple(found), answer and answer.at(expr))
        found.append((answer.layer, expr))
        expr = answer.inner


def dtype_of(scores: Expr) -> torch.dtype:
    """The dtype of `scores`, an expression with a matrix product; float64 where it does not tell."""
    match scores:
        case Score(dtype=dtype) | Contract(dtype=dtype) | Cast(dtype=dtype) | Softmax(dtype=dtype):
            return dtype
        case Select(_, a, b) | Add(a, b) | Mul(a, b) | Div(a, b) | Binary(_, a, b):
            return dtype_of(a if has_product(a) else b)
        case Unary(_, x) | Dropout(x, _):
            return dtype_of(x)
    return torch.float64


def maximum_taken_off(term: Expr) -> tuple[sympy.Symbol, Expr] | None:
    """(axis, scores) of a term that subtracts the max of scores along an axis, detached or not; else None."""
    match term:
        case Mul(Unary("detach", Reduce("amax", axis, over)) | Reduce("amax", axis, over), Const(-1 | -1.0)):
            return axis, over
    return None
