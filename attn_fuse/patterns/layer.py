"""Layers that patterns take off an attention, outermost first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import sympy
import torch

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression import nodes as ex
from attn_fuse.expression.nodes import Const, Expr, Mul, Reduce, Unary
from attn_fuse.expression.simplify import add


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

    Without an axis it tests the weight's own score; without scores, whether the weight is NaN or infinite.
    """

    scores: Expr | None = None
    axis: sympy.Symbol | None = None


Layer = Scale | Bias | MaskFill | Floor | Softcap | DropoutLayer | Factor | EmptyIsZero


@dataclass(frozen=True)
class Layered:
    """A pattern's answer: the `layer` that it took off and the `inner` expression."""

    inner: Expr
    layer: Layer


Answer = Layered | Refusal | None
Pattern = Callable[[Expr], Answer]


def peel(expr: Expr, patterns: Iterable[Pattern]) -> tuple[list[tuple[Layer, Expr]], Expr, Refusal | None]:
    """(the layers of `expr`, the expression beneath, a pattern's Refusal of that, or None if no pattern knows it)

    The layers come outermost first, each with the expression that the first pattern to know it took it off.
    Casts between floating-point types come off by themselves, because kernels compute at least as precisely as written.
    Casts to integers or Booleans do more than round.
    """
    found: list[tuple[Layer, Expr]] = []
    while True:
        expr = bare(expr)
        answer = next((answer for pattern in patterns if (answer := pattern(expr)) is not None), None)
        if not isinstance(answer, Layered):
            return found, expr, answer and answer.at(expr)
        found.append((answer.layer, expr))
        expr = answer.inner


def dtype_of(scores: Expr) -> torch.dtype:
    """The dtype of `scores`, an expression with a matrix product; float64 if it is unknown."""
    match scores:
        case ex.Score(dtype=dtype) | ex.Contract(dtype=dtype) | ex.Cast(dtype=dtype) | ex.Softmax(dtype=dtype):
            return dtype
        case ex.Select(_, a, b) | ex.Add(a, b) | Mul(a, b) | ex.Div(a, b) | ex.Binary(_, a, b):
            return dtype_of(a if ex.has_product(a) else b)
        case Unary(_, x) | ex.Dropout(x, _):
            return dtype_of(x)
    return torch.float64


def bare(x: Expr) -> Expr:
    """`x` without casts between floating-point types around it."""
    while isinstance(x, ex.Cast) and x.dtype.is_floating_point:
        x = x.x
    return x


def sum_of(terms: Iterable[Expr]) -> Expr:
    """The sum of `terms`, which is 0.0 for none."""
    zero: Expr = Const(0.0)
    return functools.reduce(add, terms, zero)


def maximum_taken_off(term: Expr) -> tuple[sympy.Symbol, Expr] | None:
    """(axis, scores) of a term that subtracts the max of scores along an axis, or None."""
    match term:
        case Mul(Unary("detach", Reduce("amax", axis, over)) | Reduce("amax", axis, over), Const(-1 | -1.0)):
            return axis, over
    return None
