"""Index arithmetic: SymPy expressions over integer index symbols and symbolic sizes, and proofs about them.

An index symbol runs over [0, size), and a symbolic size has a known min. A proof holds for all values in these ranges;
"not proved" is an ordinary answer.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import sympy

from attn_fuse.torch_internals import FloorDiv, Mod, index_bounds

Size: TypeAlias = sympy.Expr
# The max that a symbolic size is assumed to have.
LONGEST = 2**24
# The max steps of a proof: more than any layout needs. Each digit of an expression, x // n or x mod n, may double them.
_MOST_STEPS = 200


@dataclass
class Space:
    """The index symbols of one region and their ranges: symbol s runs over [0, sizes[s]).

    lower: the min of each symbolic size, guarded by the shape environment; 0 for a size that is not named.
    simplified: the memo of `simplify_index`; a mask made by a hundred writes asks for the same few positions.
    """

    lower: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    sizes: dict[sympy.Symbol, Size] = field(default_factory=dict)
    _counter: Iterator[int] = field(default_factory=itertools.count)
    simplified: dict[sympy.Expr, sympy.Expr] = field(default_factory=dict)
    _shared: dict[tuple[str, Size], sympy.Symbol] = field(default_factory=dict)
    _known: dict[sympy.Expr, bool] = field(default_factory=dict)
    _bounds: dict[sympy.Expr, tuple[float, float]] = field(default_factory=dict)

    def fresh(self, name: str, size: Size) -> sympy.Symbol:
        """A new index symbol over [0, size), whose name begins with `name`."""
        symbol = sympy.Symbol(f"{name}{next(self._counter)}", integer=True, nonnegative=True)
        self.sizes[symbol] = sympy.sympify(size)
        return symbol

    def shared(self, name: str, size: Size) -> sympy.Symbol:
        """As `fresh`, but the same symbol each time: a stand-in, which the caller replaces before anyone sees it."""
        if (name, size) not in self._shared:
            self._shared[name, size] = self.fresh(name, size)
        return self._shared[name, size]

    def is_nonnegative(self, expr: sympy.Expr) -> bool:
        """Whether `expr` is >= 0 for every value of its indices and sizes; False where that is not proved."""
        expr = sympy.expand(expr)
        if expr not in self._known:
            low, high = self._ends(expr)
            lowest = _interval(expr, {s: (low[s], high[s]) for s in low})
            # With a symbolic size, `high` is the last index at one example size, which proves nothing for others.
            numbers = all(s in self.sizes and self.sizes[s].is_Integer for s in expr.free_symbols)
            if numbers and lowest is not None and lowest[0] >= 0:
                self._known[expr] = True
            elif any(_is_negative_at(expr, values) for values in (low, high)):
                self._known[expr] = False
        return self._proves_nonnegative(expr, itertools.count())

    def _ends(self, expr: sympy.Expr) -> tuple[_Values, _Values]:
        """The first and the last value of each index, at example sizes: the min of a symbolic size, but at least 2."""
        sizes = {s: self.sizes[s] for s in expr.free_symbols & self.sizes.keys()}
        symbols = expr.free_symbols.union(*(size.free_symbols for size in sizes.values())) - self.sizes.keys()
        fixed = {s: (max(self.lower.get(s, 0), 2),) * 2 for s in symbols}
        last: dict[sympy.Symbol, int] = {}
        for symbol, size in sizes.items():
            found = _interval(size, fixed)
            last[symbol] = max(found[0] - 1, 0) if found is not None else 0
        known = {s: n for s, (n, _) in fixed.items()}
        return known | dict.fromkeys(sizes, 0), known | last

    def is_negative(self, expr: sympy.Expr) -> bool:
        """Whether `expr` is < 0 for every value of its indices and sizes; False where that is not proved."""
        return self.is_nonnegative(-expr - 1)

    def is_zero(self, expr: sympy.Expr) -> bool:
        """Whether `expr` is 0 once it is expanded, so for every value; False where that is not proved."""
        return sympy.expand(expr) == 0

    def same_size(self, a: Size, b: Size) -> bool:
        """Whether two sizes are equal on every call; False where that is not proved."""
        return self.is_zero(sympy.sympify(a) - sympy.sympify(b))

    def bounds(self, expr: sympy.Expr) -> tuple[float, float]:
        """Bounds (min, max) of `expr` for symbolic sizes up to `LONGEST`; infinite if it has an unknown function."""
        if expr not in self._bounds:
            ranges = {
                symbol: (0, max(self.longest(self.sizes[symbol]) - 1, 0))
                if symbol in self.sizes
                else (self.lower.get(symbol, 0), LONGEST)
                for symbol in expr.free_symbols
            }
            unknown = any(not isinstance(f, (FloorDiv, Mod)) for f in expr.atoms(sympy.Function))
            self._bounds[expr] = (-math.inf, math.inf) if unknown else index_bounds(expr, ranges)
        return self._bounds[expr]

    def longest(self, size: Size) -> int:
        """The max of `size`: the number itself, or `LONGEST` for a symbolic size."""
        return int(size) if size.is_Integer else LONGEST

    def floordiv(self, expr: sympy.Expr, by: Size) -> sympy.Expr:
        """floor(expr / by), simplified, for expr >= 0 and by > 0."""
        whole, rest = self._split(expr, by)
        if self.is_nonnegative(rest) and self.is_nonnegative(by - 1 - rest):
            return whole
        factor, coarse, _ = self._common_factor(rest, by)
        return sympy.expand(whole + FloorDiv(coarse, sympy.cancel(by / factor)))

    def mod(self, expr: sympy.Expr, by: Size) -> sympy.Expr:
        """expr mod by, simplified, for expr >= 0 and by > 0."""
        _, rest = self._split(expr, by)
        if self.is_nonnegative(rest) and self.is_nonnegative(by - 1 - rest):
            return rest
        factor, coarse, fine = self._common_factor(rest, by)
        return sympy.expand(factor * Mod(coarse, sympy.cancel(by / factor)) + fine)

    def _common_factor(self, expr: sympy.Expr, by: Size) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
        """(f, a, b) with expr = f * a + b, f a divisor of `by` and 0 <= b < f, so that b does not change expr // by."""
        parts = sympy.Add.make_args(expr)
        if by.is_Integer and all(term.as_coeff_Mul()[0].is_Integer for term in parts):
            factors = {abs(sympy.gcd(term.as_coeff_Mul()[0], by)) for term in parts}
            for factor in sorted(factors - {1, by}, reverse=True):
                fine = sum((t for t in parts if t.as_coeff_Mul()[0] % factor), sympy.Integer(0))
                if self.is_nonnegative(fine) and self.is_nonnegative(factor - 1 - fine):
                    return factor, sympy.expand((expr - fine) / factor), fine
        return sympy.Integer(1), expr, sympy.Integer(0)

    def _split(self, expr: sympy.Expr, by: Size) -> tuple[sympy.Expr, sympy.Expr]:
        # (whole, rest) with expr = whole * by + rest, where `whole` has every term that `by` divides
        by = sympy.expand(by)
        content, sum_of_sizes = by.primitive()
        if sum_of_sizes.is_Add:
            quotient, remainder = _divided(sympy.expand(expr), sum_of_sizes)
            whole, rest = self._split(quotient, content) if content != 1 else (quotient, sympy.Integer(0))
            return whole, sympy.expand(rest * sum_of_sizes + remainder)
        whole, rest = sympy.Integer(0), sympy.Integer(0)
        for term in sympy.Add.make_args(sympy.expand(expr)):
            if by.is_Integer and not term.is_Integer and term.as_coeff_Mul()[0].is_Integer:
                number, others = term.as_coeff_Mul()
                whole, rest = (whole + number // by * others, rest) if number % by == 0 else (whole, rest + term)
                continue
            quotient = sympy.cancel(term / by) if term != 0 else term
            if sympy.denom(quotient) == 1:
                whole += quotient
            elif term.is_Integer and by.is_Integer:
                whole += term // by
                rest += term % by
            else:
                rest += term
        return whole, rest

    def _proves_nonnegative(self, expr: sympy.Expr, steps: Iterator[int]) -> bool:
        """Whether `expr` >= 0 is proved. steps: counts the steps of one proof, which gives up after `_MOST_STEPS`."""
        if expr.is_Integer:
            return bool(expr >= 0)
        if expr not in self._known:
            if next(steps) >= _MOST_STEPS:
                return False
            proved = self._found_nonnegative(expr, steps)
            if not proved and next(steps) >= _MOST_STEPS:
                return False
            self._known[expr] = proved
        return self._known[expr]

    def _found_nonnegative(self, expr: sympy.Expr, steps: Iterator[int]) -> bool:
        if expr.has(FloorDiv, Mod):
            # A quotient or remainder of sizes counts as one more size, of which only the sign is known.
            sizes = [t for t in expr.atoms(FloorDiv, Mod) if not t.free_symbols & self.sizes.keys()]
            expr = sympy.expand(expr.subs({t: sympy.Dummy(integer=True, nonnegative=True) for t in sizes}))
        if expr.has(FloorDiv, Mod):
            bounded = self._bound_digits(expr)
            return bounded is not None and self._proves_nonnegative(bounded, steps)
        # An expression affine in an index has its min at one end of the index's range.
        for symbol in sorted(expr.free_symbols & self.sizes.keys(), key=str):
            slope = sympy.diff(expr, symbol)
            if slope.has(symbol):
                return False
            if self._proves_nonnegative(sympy.expand(slope), steps):
                return self._proves_nonnegative(sympy.expand(expr.subs(symbol, 0)), steps)
            if self._proves_nonnegative(sympy.expand(-slope), steps):
                return self._proves_nonnegative(sympy.expand(expr.subs(symbol, self.sizes[symbol] - 1)), steps)
            return False
        # Only sizes are left: write each as its min plus something non-negative.
        shifted = expr.subs({s: self.lower.get(s, 0) + sympy.Dummy(nonnegative=True) for s in expr.free_symbols})
        return all(bool(term.is_nonnegative) for term in sympy.Add.make_args(sympy.expand(shifted)))

    def _bound_digits(self, expr: sympy.Expr) -> sympy.Expr | None:
        # Fresh indices over the ranges of x // c and x mod c take more values than these, so a proof still holds.
        digits = [term for term in expr.atoms(FloorDiv, Mod) if not any(a.has(FloorDiv, Mod) for a in term.args)]
        if not digits:
            return None
        for term in digits:
            dividend, by = term.args
            if isinstance(term, Mod):
                size = by
            else:
                top = self._greatest(dividend)
                if top is None or not (top.is_Integer and by.is_Integer):
                    return None
                size = top // by + 1
            expr = expr.subs(term, self.fresh("digit", size))
        return sympy.expand(expr)

    def _greatest(self, expr: sympy.Expr) -> sympy.Expr | None:
        for symbol in expr.free_symbols & self.sizes.keys():
            if not self.is_nonnegative(sympy.diff(expr, symbol)):
                return None
            expr = expr.subs(symbol, self.sizes[symbol] - 1)
        return sympy.expand(expr)


_Values: TypeAlias = Mapping[sympy.Symbol, int]


def _is_negative_at(expr: sympy.Expr, values: _Values) -> bool:
    found = _interval(expr, {s: (n, n) for s, n in values.items()})
    return found is not None and found[1] < 0


def _interval(expr: sympy.Expr, ends: Mapping[sympy.Symbol, tuple[int, int]]) -> tuple[int, int] | None:
    """Bounds (min, max) of `expr` where each symbol lies between its ends; None where they are not known."""
    if expr.is_Integer:
        return int(expr), int(expr)
    if expr.is_Symbol:
        return ends.get(expr)
    parts = [_interval(arg, ends) for arg in expr.args]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    match expr:
        case sympy.Add():
            return sum(low for low, _ in known), sum(high for _, high in known)
        case sympy.Mul():
            return functools.reduce(_product, known)
        case FloorDiv() if known[1][0] > 0:
            corners = [a // b for a in known[0] for b in known[1]]
            return min(corners), max(corners)
        case Mod() if known[1][0] > 0:
            (low, high), (by, most) = known
            return (low % by, low % by) if low == high and by == most else (0, most - 1)
    return None


def _product(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    corners = [m * n for m in a for n in b]
    return min(corners), max(corners)


def _divided(expr: sympy.Expr, by: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Quotient and remainder of `expr` by a sum of sizes, as polynomials in a size that is one term of the sum."""
    symbol = next((s for s in sorted(by.free_symbols, key=str) if by.coeff(s) == 1 and not (by - s).has(s)), None)
    if symbol is None or by.has(FloorDiv, Mod):
        return sympy.Integer(0), expr
    digits = {digit: sympy.Dummy(integer=True) for digit in expr.atoms(FloorDiv, Mod)}
    quotient, remainder = sympy.div(expr.xreplace(digits), by, symbol)
    back = {dummy: digit for digit, dummy in digits.items()}
    return sympy.expand(quotient.xreplace(back)), sympy.expand(remainder.xreplace(back))


def recombined(expr: sympy.Expr) -> sympy.Expr:
    """`expr` with n * (x // n) + x mod n, and multiples of it, folded back into x."""
    for digit in expr.atoms(Mod):
        dividend, by = digit.args
        factor, whole = expr.coeff(digit), FloorDiv(dividend, by)
        if factor != 0 and sympy.expand(expr.coeff(whole) - factor * by) == 0:
            return recombined(sympy.expand(expr + factor * (dividend - digit - by * whole)))
    return expr


def simplify_index(value: sympy.Expr, space: Space) -> sympy.Expr:
    """`value` with every floor division and modulo carried out that the ranges of its symbols allow."""
    if not value.has(FloorDiv, Mod):
        return sympy.expand(value)
    if value not in space.simplified:
        space.simplified[value] = _divided_out(value, space)
    return space.simplified[value]


def _divided_out(value: sympy.Expr, space: Space) -> sympy.Expr:
    args = [simplify_index(arg, space) for arg in value.args]
    if isinstance(value, FloorDiv):
        return space.floordiv(*args)
    if isinstance(value, Mod):
        return space.mod(*args)
    return sympy.expand(value.func(*args))
