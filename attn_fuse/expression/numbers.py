"""Numbers: bounds and signs of integers computed from sizes and integer arguments of the program.

Sizes and `int` arguments are symbols. All that is known of a symbol is the range that torch's shape environment guards:
a size is 0 or at least 2, an argument may be any integer. Torch's interval arithmetic and an expansion, in which terms
cancel, answer always, never or unknown; unknown proves nothing. Sizes of the first call are never used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import sympy

from attn_fuse.torch_internals import FloorDiv, Mod, interval_of_number

# Integers, or an infinity for no bound.
Bounds: TypeAlias = tuple[float, float]
UNBOUNDED: Bounds = (-math.inf, math.inf)
# The size of an address space.
_LONGEST_SIZE = 2**48
# Far above the relative rounding error of a product or quotient.
_ROUNDING = 2.0**-40


class Numbers:
    """Bounds of expressions over symbols with known `ranges` (min, max); a symbol without a range may be any integer.

    longest: the assumed max of a tensor size, which is a symbol that SymPy knows to be positive: torch declares no
        other symbol so. widest: the assumed max of the absolute value of any other symbol.
    """

    def __init__(
        self, ranges: Mapping[sympy.Symbol, Bounds], longest: int = _LONGEST_SIZE, widest: float = math.inf
    ) -> None:
        self._ranges = {symbol: _within(bounds, symbol, longest, widest) for symbol, bounds in ranges.items()}
        self._bounds: dict[sympy.Expr, Bounds] = {}
        self._opened: dict[sympy.Expr, sympy.Symbol] = {}

    def limit(self, symbol: sympy.Symbol, bounds: Bounds) -> None:
        """Set the bounds of a new `symbol`."""
        self._ranges[symbol] = bounds

    def bounds(self, expr: sympy.Expr) -> Bounds:
        """The (min, max) of `expr` by interval arithmetic; infinite where unknown."""
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
        """Whether no term is negative after writing each symbol as its min plus, or max minus, one that is not."""
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
        """`expr` as a polynomial, with each function replaced by a symbol that has the range of its results."""
        if not expr.args:
            return expr
        parts = [self._open(part) for part in expr.args]
        if isinstance(expr, (sympy.Add, sympy.Mul)) or (expr.is_Pow and expr.exp.is_Integer and expr.exp > 0):
            return expr.func(*parts)
        if expr not in self._opened:
            symbol = sympy.Dummy(integer=True if expr.is_integer else None, real=True)
            self.limit(symbol, self._range_of(expr, parts))
            self._opened[expr] = symbol
        return self._opened[expr]

    def _range_of(self, expr: sympy.Expr, parts: list[sympy.Expr]) -> Bounds:
        """The range of a function of `parts`."""
        if isinstance(expr, FloorDiv) and self._interval(parts[1])[0] < 0:
            # torch rewrites x // 8 // -2 to x // -16, which rounds differently.
            return UNBOUNDED
        if isinstance(expr, Mod):
            # Below 0 torch's ranges are those of C's remainder; here it is Python's.
            (low, _), (least, most) = map(self._interval, parts)
            if low < 0:
                return (0, most - 1) if least >= 0 else UNBOUNDED
        if expr.is_integer and not all(part.is_integer for part in parts):
            parts = [part if part.is_integer else self._rounded(part) for part in parts]
        try:
            return self._interval(expr.func(*parts))
        except Exception:
            # SymPy raises outside of a function's domain.
            return UNBOUNDED

    def _rounded(self, part: sympy.Expr) -> sympy.Symbol:
        """A symbol with the range of `part`, a floating-point number, widened by its rounding error."""
        low, high = self._interval(part)
        terms = [self._interval(term) for term in sympy.Add.make_args(part)]
        # A difference has the rounding error of its operands, however small it is itself.
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
