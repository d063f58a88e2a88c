"""Index arithmetic: SymPy expressions over integer index symbols and symbolic sizes, and proofs about them.

An index symbol runs over [0, size); `numbers` bounds sizes and integers of the program. A proof holds for all values in
these ranges. "Not proved" is an ordinary answer.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
from sympy.core.function import Application

from attn_fuse.expression.numbers import Bounds, Numbers
from attn_fuse.torch_internals import FloorDiv, Mod

Size: TypeAlias = sympy.Expr
# The assumed max of a symbolic size when asking whether a dtype holds a position exactly.
LONGEST = 2**24
# The max absolute value of other integers of the program; guarded by the lift, except for integers read from tensors.
WIDEST = 2**40
# The max steps of a proof, more than any layout needs. Each x // n or x mod n may double them.
_MOST_STEPS = 200


@dataclass
class Space:
    """The index symbols of one region and their ranges: symbol s runs over [0, sizes[s]).

    ranges: the (min, max) of each size symbol, guarded by the shape environment.
    scalars: floats known only at run time, as expressions over size symbols, by leaf number.
    simplified: the memo of `simplify_index`; a mask made by a hundred writes asks for the same few positions.
    """

    ranges: Mapping[sympy.Symbol, Bounds] = field(default_factory=dict)
    scalars: Mapping[int, sympy.Expr] = field(default_factory=dict)
    sizes: dict[sympy.Symbol, Size] = field(default_factory=dict)
    _counter: Iterator[int] = field(default_factory=itertools.count)
    simplified: dict[sympy.Expr, sympy.Expr] = field(default_factory=dict)
    _shared: dict[tuple[str, Size], sympy.Symbol] = field(default_factory=dict)
    _known: dict[sympy.Expr, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = Numbers(self.ranges)
        self._ordinary = Numbers(self.ranges, longest=LONGEST, widest=WIDEST)

    def fresh(self, name: str, size: Size) -> sympy.Symbol:
        """A new index symbol over [0, size), whose name begins with `name`."""
        symbol = sympy.Symbol(f"{name}{next(self._counter)}", integer=True, nonnegative=True)
        self.sizes[symbol] = sympy.sympify(size)
        for numbers in (self._numbers, self._ordinary):
            # Nothing is read along an empty dimension, so its bounds do not matter.
            numbers.limit(symbol, (0, max(numbers.bounds(self.sizes[symbol])[1] - 1, 0)))
        return symbol

    def shared(self, name: str, size: Size) -> sympy.Symbol:
        """Like `fresh`, but the same symbol each time; the caller must substitute it away."""
        if (name, size) not in self._shared:
            self._shared[name, size] = self.fresh(name, size)
        return self._shared[name, size]

    def is_nonnegative(self, expr: sympy.Expr) -> bool:
        """Whether `expr` >= 0 is proved for all values of its indices and sizes."""
        return self._proves_nonnegative(sympy.expand(expr), itertools.count())

    def is_negative(self, expr: sympy.Expr) -> bool:
        """Whether `expr` < 0 is proved for all values of its indices and sizes."""
        return self.is_nonnegative(-expr - 1)

    def is_within(self, expr: sympy.Expr, size: Size) -> bool:
        """Whether 0 <= `expr` < `size` is proved for all values of the indices and sizes."""
        return self.is_nonnegative(expr) and self.is_nonnegative(size - 1 - expr)

    def is_zero(self, expr: sympy.Expr) -> bool:
        """Whether `expr` expands to 0; False where that is not proved."""
        return bool(sympy.expand(expr) == 0)

    def same_size(self, a: Size, b: Size) -> bool:
        """Whether two sizes are proved to be equal on every call."""
        return self.is_zero(sympy.sympify(a) - sympy.sympify(b))

    def bounds(self, expr: sympy.Expr) -> Bounds:
        """The (min, max) of `expr` for symbolic sizes up to `LONGEST` and integers in [-`WIDEST`, `WIDEST`]."""
        return self._ordinary.bounds(expr)

    def floordiv(self, expr: sympy.Expr, by: Size) -> sympy.Expr:
        """expr // by, simplified, for `by` other than 0."""
        whole, rest = self._split(expr, by)
        if self.is_within(rest, by):
            return whole
        factor, coarse, _ = self._common_factor(rest, by)
        return sympy.expand(whole + FloorDiv(coarse, sympy.cancel(by / factor)))

    def mod(self, expr: sympy.Expr, by: Size) -> sympy.Expr:
        """Python's expr % by, simplified, for `by` other than 0; `Mod` means this below 0, too, unlike torch's."""
        _, rest = self._split(expr, by)
        if self.is_within(rest, by):
            return rest
        factor, coarse, fine = self._common_factor(rest, by)
        return sympy.expand(factor * Mod(coarse, sympy.cancel(by / factor)) + fine)

    def _common_factor(self, expr: sympy.Expr, by: Size) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
        """(f, a, b) with expr = f * a + b where f divides `by` and 0 <= b < f; b does not change expr // by."""
        parts = sympy.Add.make_args(expr)
        if by.is_Integer and by > 0 and all(term.as_coeff_Mul()[0].is_Integer for term in parts):
            factors = {abs(sympy.gcd(term.as_coeff_Mul()[0], by)) for term in parts}
            for factor in sorted(factors - {1, by}, reverse=True):
                fine = sum((t for t in parts if t.as_coeff_Mul()[0] % factor), sympy.Integer(0))
                if self.is_within(fine, factor):
                    return factor, sympy.expand((expr - fine) / factor), fine
        return sympy.Integer(1), expr, sympy.Integer(0)

    def _split(self, expr: sympy.Expr, by: Size) -> tuple[sympy.Expr, sympy.Expr]:
        """(whole, rest) with expr = whole * by + rest, where `whole` has every term that `by` divides."""
        by = sympy.expand(by)
        content, sum_of_sizes = by.primitive()
        if sum_of_sizes.is_Add:
            quotient, remainder = _divided(sympy.expand(expr), sum_of_sizes)
            whole, rest = self._split(quotient, content) if content != 1 else (quotient, sympy.Integer(0))
            return whole, sympy.expand(rest * sum_of_sizes + remainder)
        whole, rest = sympy.Integer(0), sympy.Integer(0)
        for term in sympy.Add.make_args(sympy.expand(expr)):
            number, others = term.as_coeff_Mul()
            if by.is_Integer and number.is_Integer and (others == 1 or number % by == 0):
                whole += number // by * others
                rest += number % by * others
            elif not by.is_Integer and sympy.denom(quotient := sympy.cancel(term / by)) == 1:
                whole += quotient
            else:
                rest += term
        return whole, rest

    def _proves_nonnegative(self, expr: sympy.Expr, steps: Iterator[int]) -> bool:
        """Whether `expr` >= 0 is proved within `_MOST_STEPS`, which `steps` counts."""
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
        if not expr.free_symbols & self.sizes.keys():
            return self._numbers.is_nonnegative(expr) is True
        low, high = self._numbers.bounds(expr)
        if low >= 0 or high < 0:
            return low >= 0
        functions = [f for f in expr.atoms(Application) if f.free_symbols & self.sizes.keys()]
        if functions:
            bounded = self._bound_digits(expr, functions)
            return bounded is not None and self._proves_nonnegative(bounded, steps)
        # An expression that is affine in an index has its min at an end of the index's range.
        symbol = min(expr.free_symbols & self.sizes.keys(), key=str)
        slope = sympy.diff(expr, symbol)
        if slope.has(symbol):
            return False
        if self._proves_nonnegative(sympy.expand(slope), steps):
            return self._proves_nonnegative(sympy.expand(expr.subs(symbol, 0)), steps)
        if self._proves_nonnegative(sympy.expand(-slope), steps):
            return self._proves_nonnegative(sympy.expand(expr.subs(symbol, self.sizes[symbol] - 1)), steps)
        return False

    def _bound_digits(self, expr: sympy.Expr, functions: list[sympy.Expr]) -> sympy.Expr | None:
        # A fresh index takes all values in the range of x // c or x mod c, so a proof about it holds for these, too.
        digits = [f for f in functions if not any(a.has(*functions) for a in f.args)]
        for term in digits:
            low, high = self._numbers.bounds(term)
            if isinstance(term, Mod) and self.is_nonnegative(term.args[1]):
                # A divisor of 0 has no positions to divide.
                place, size = sympy.Integer(0), term.args[1]
            elif math.isfinite(low) and math.isfinite(high):
                place, size = sympy.Integer(low), sympy.Integer(high - low + 1)
            else:
                return None
            expr = expr.subs(term, place + self.fresh("digit", size))
        return sympy.expand(expr)


def fold_index(value: sympy.Expr, leaf: Callable[[sympy.Expr], Any], *joins: Callable[[Any, Any], Any]) -> Any:
    """`value` computed by `joins`: functions of two for its sums, products, floor divisions and remainders.

    leaf: the result for a part, or None to compute it from its own parts. Raises ValueError for any other operation.
    """
    if (known := leaf(value)) is not None:
        return known
    for kind, join in zip((sympy.Add, sympy.Mul, FloorDiv, (Mod, sympy.Mod)), joins, strict=True):
        if isinstance(value, kind):
            return functools.reduce(join, [fold_index(part, leaf, *joins) for part in value.args])
    raise ValueError(f"position {value} cannot be computed")


def _divided(expr: sympy.Expr, by: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Quotient and remainder of `expr` by a sum of sizes, as polynomials in one of these sizes."""
    symbol = next((s for s in sorted(by.free_symbols, key=str) if by.coeff(s) == 1 and not (by - s).has(s)), None)
    if symbol is None or by.has(FloorDiv, Mod):
        return sympy.Integer(0), expr
    digits = {digit: sympy.Dummy(integer=True) for digit in expr.atoms(FloorDiv, Mod)}
    quotient, remainder = sympy.div(expr.xreplace(digits), by, symbol)
    back = {dummy: digit for digit, dummy in digits.items()}
    return sympy.expand(quotient.xreplace(back)), sympy.expand(remainder.xreplace(back))


def recombined(expr: sympy.Expr) -> sympy.Expr:
    """`expr` with n * (x // n) + x mod n, or a multiple of it, folded into x."""
    for digit in expr.atoms(Mod):
        dividend, by = digit.args
        factor, whole = expr.coeff(digit), FloorDiv(dividend, by)
        if factor != 0 and sympy.expand(expr.coeff(whole) - factor * by) == 0:
            return recombined(sympy.expand(expr + factor * (dividend - digit - by * whole)))
    return expr


def simplify_index(value: sympy.Expr, space: Space) -> sympy.Expr:
    """`value` with each floor division and modulo carried out where the ranges of its symbols allow it."""
    if not value.has(FloorDiv, Mod):
        return sympy.expand(value)
    if value not in space.simplified:
        build = space.floordiv if isinstance(value, FloorDiv) else space.mod if isinstance(value, Mod) else value.func
        space.simplified[value] = sympy.expand(build(*(simplify_index(arg, space) for arg in value.args)))
    return space.simplified[value]
