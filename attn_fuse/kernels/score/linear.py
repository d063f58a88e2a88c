"""Linear forms: integers of a score program as sums of positions and numbers, each times an integer, in SymPy."""

from __future__ import annotations

import sympy
import torch

from attn_fuse.expression.nodes import Add, Binary, Cast, Compare, Const, Expr, Mul, Number, Position, Unary


def linear(expr: Expr) -> sympy.Expr:
    """`expr` as a linear form; a part that is no sum, difference or integer multiple becomes a symbol of its own.

    `is_integer` of the form holds where all its symbols are positions and numbers.
    """
    match expr:
        case Const(bool() | int() as value):
            return sympy.Integer(int(value))
        case Position() | Number():
            return sympy.Symbol(repr(expr), integer=True)
        case Cast(torch.int64, inner) if (form := linear(inner)).is_integer:
            return form
        case Add(a, b):
            return linear(a) + linear(b)
        case Binary("sub", a, b):
            return linear(a) - linear(b)
        case Unary("neg", inner):
            return -linear(inner)
        case Mul(inner, Const(int() as value)):
            return linear(inner) * int(value)
    return sympy.Symbol(f"node {id(expr)}")


def at_least_zero(expr: Expr) -> sympy.Expr | None:
    """The form that is at least 0 where `expr`, an inequality of integers, holds; None for other expressions."""
    match expr:
        case Compare("ge", a, b) | Compare("le", b, a):
            return linear(a) - linear(b)
        case Compare("gt", a, b) | Compare("lt", b, a):
            return linear(a) - linear(b) - 1
    return None
