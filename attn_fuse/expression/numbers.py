"""Numbers: what is known of an integer that is made of sizes and integers of the program.

Sizes of tensors and `int` arguments are symbols. All that is known of one is the range that torch's shape environment
guards: a size is at least 2 or 0, an argument may be any integer, of either sign. Every question about the sign or the
size of such a number is answered here, by torch's own interval arithmetic over these ranges and by an expansion that
keeps the terms that cancel. A question has three answers, always, never and unknown; unknown proves nothing. No answer
comes from the sizes of the first call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import sympy

from attn_fuse.torch_internals import FloorDiv, Mod, interval_of_number

# Whole numbers, or minus infinity and infinity where there is no bound.
Bounds: TypeAlias = tuple[float, float]
UNBOUNDED: Bounds = (-math.inf, math.inf)
# No tensor has a dimension longer than an address space.
_LONGEST_SIZE = 2**48
# Rounding moves a product or quotient of floating-point numbers by far less than this part of itself.
_ROUNDING = 2.0**-40


class Numbers:
    """What is known of expressions over `ranges`, the (min, max) of each symbol; any integer for one without a range.

    A symbol that is positive by itself is a size of a tensor: torch makes no other symbol so. longest: the max that
    such a size is assumed to have. widest: the max that the absolute value of any other symbol is assumed to have.
    """

    def __init__(
        self, ranges: Mapping[sympy.Symbol, Bounds], longest: int = _LONGEST_SIZE, widest: float = math.inf
    ) -> None:
        self._ranges = {symbol: _within(bounds, symbol, longest, widest) for symbol, bounds in ranges.items()}
        self._bounds: dict[sympy.Expr, Bounds] = {}
        self._opened: dict[sympy.Expr, sympy.Symbol] = {}

    def limit(self, symbol: sympy.Symbol, bounds: Bounds) -> None:
        """Make it known that a new `symbol` lies within `bounds`."""
        self._ranges[symbol] = bounds

    def bounds(self, expr: sympy.Expr) -> Bounds:
        """The (min, max) of `expr`, by interval arithmetic; what is not known is infinite."""
        if expr not in self._bounds:
            self._bounds[expr] = self._interval(self._open(expr))
        return self._bounds[expr]

    def is_nonnegative(self, expr: sympy.Expr) -> bool | None:
        """Whether `expr` >= 0: True if always, False if never, None if unknown."""
        low, high = self.bounds(expr)
        if low >= 0 or self._expands_above_0(expr):
            return True
        return False if high < 0 or self._expands_above_0(-expr - 1) else None

    def _expands_above_0(self, expr: sympy.Expr) -> bool:
        """Whether `expr`, each symbol of it written as its min or max and something non-negative, has no minus."""
        opened = self._open(expr)
        apart = {}
        for symbol in opened.free_symbols:
            low, high = self._ranges.get(symbol, UNBOUNDED)
            beyond = sympy.Dummy(nonnegative=True)
            if math.isfinite(low):
                apart[symbol] = math.floor(low) + beyond
            elif math.isfinite(high):
                apart[symbol] = math.ceil(high) - beyond
        expanded = sympy.expand(opened.xreplace(apart))
        beyond_all = {symbol for place in apart.values() for symbol in place.free_symbols}
        return expanded.free_symbols <= beyond_all and all(
            term.as_coeff_Mul()[0] >= 0 for term in sympy.Add.make_args(expanded)
        )

    def _open(self, expr: sympy.Expr) -> sympy.Expr:
        """`expr` as a polynomial, in which a symbol with the range of its results stands for each function."""
        if not expr.args:
            return expr
        parts = [self._open(part) for part in expr.args]
        if isinstance(expr, (sympy.Add, sympy.Mul)) or (isinstance(expr, sympy.Pow) and _is_natural(expr.exp)):
            return expr.func(*parts)
        if expr not in self._opened:
            symbol = sympy.Dummy(integer=True if expr.is_integer else None, real=True)
            self.limit(symbol, self._range_of(expr, parts))
            self._opened[expr] = symbol
        return self._opened[expr]

    def _range_of(self, expr: sympy.Expr, parts: list[sympy.Expr]) -> Bounds:
        """The range of a function of `parts`."""
        if isinstance(expr, FloorDiv) and self._interval(parts[1])[0] < 0:
            # torch writes x // 8 // -2 as x // -16, which is another number where it rounds.
            return UNBOUNDED
        if isinstance(expr, Mod):
            # torch's ranges take it for C's remainder, which torch itself never applies below 0; Python's is meant.
            (low, _), (least, most) = map(self._interval, parts)
            if low < 0:
                return (0, most - 1) if least >= 0 else UNBOUNDED
        if expr.is_integer and not all(part.is_integer for part in parts):
            parts = [part if part.is_integer else self._rounded(part) for part in parts]
        try:
            return self._interval(expr.func(*parts))
        except Exception:
            # SymPy raises where the arguments are outside of what a function is defined for.
            return UNBOUNDED

    def _rounded(self, part: sympy.Expr) -> sympy.Symbol:
        """A symbol with the range of `part`, a floating-point number, and of all that rounding may make of it."""
        low, high = self._interval(part)
        terms = [self._interval(term) for term in sympy.Add.make_args(part)]
        # A difference keeps the rounding of what it is taken from, however small it is itself.
        cancels = not (all(a >= 0 for a, _ in terms) or all(b <= 0 for _, b in terms))
        symbol = sympy.Dummy(real=True)
        self.limit(symbol, UNBOUNDED if cancels else (low - abs(low) * _ROUNDING, high + abs(high) * _ROUNDING))
        return symbol

    def _interval(self, expr: sympy.Expr) -> Bounds:
        if isinstance(expr, sympy.Integer):
            return int(expr), int(expr)
        if expr.is_Symbol:
            return self._ranges.get(expr, UNBOUNDED)
        return interval_of_number(expr, {s: self._ranges.get(s, UNBOUNDED) for s in expr.free_symbols})


def _within(bounds: Bounds, symbol: sympy.Symbol, longest: int, widest: float) -> Bounds:
    low, high = bounds
    return (low, min(high, longest)) if symbol.is_positive else (max(low, -widest), min(high, widest))


def _is_natural(exponent: sympy.Expr) -> bool:
    return bool(exponent.is_Integer and exponent > 0)
