"""Every claim about a number that the tests make the package claim, held against z3.

A claim is a proof that an expression over sizes, integers and positions is at least 0, always or never. z3 looks for
values within the ranges where it is not so; it shares nothing with the proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import sympy

from attn_fuse.expression.index import Space
from attn_fuse.expression.numbers import Numbers
from tests.numbers_drawn import to_z3

Range = tuple[float, float]


class Claims:
    """The claims made since the last look.

    checked: how many were held against z3. undecided: how many of these it gave up. beyond: how many it cannot read.
    """

    def __init__(self) -> None:
        self.checked = self.beyond = self.undecided = 0
        self._seen: set[tuple[str, ...]] = set()
        self._made: list[tuple[sympy.Expr, bool, dict[sympy.Symbol, Range], dict[sympy.Symbol, sympy.Expr]]] = []

    @property
    def counts(self) -> tuple[int, int, int]:
        """checked, undecided, beyond"""
        return self.checked, self.undecided, self.beyond

    def add(self, counts: tuple[int, int, int]) -> None:
        """Count what another process checked."""
        checked, undecided, beyond = counts
        self.checked, self.undecided, self.beyond = (
            self.checked + checked, self.undecided + undecided, self.beyond + beyond,
        )  # fmt: skip

    def listen(self) -> Callable[[], None]:
        """Record what is proved from now on; the result ends it."""
        of_numbers, of_space, made = Numbers.is_nonnegative, Space.is_nonnegative, self._made

        def numbers(known: Numbers, expr: sympy.Expr) -> bool | None:
            answer = of_numbers(known, expr)
            if answer is not None:
                made.append((expr, answer, dict(known._ranges), {}))
            return answer

        def space(known: Space, expr: sympy.Expr) -> bool:
            proved = of_space(known, expr)
            if proved:
                made.append((sympy.expand(expr), True, dict(known._numbers._ranges), dict(known.sizes)))
            return proved

        Numbers.is_nonnegative, Space.is_nonnegative = numbers, space  # type: ignore[method-assign]

        def end() -> None:
            Numbers.is_nonnegative, Space.is_nonnegative = of_numbers, of_space  # type: ignore[method-assign]

        return end

    def wrong(self) -> Iterator[str]:
        """The claims since the last call to which z3 has a counterexample."""
        made, self._made[:] = list(self._made), []
        for expr, answer, ranges, sizes in made:
            used = _closed(expr, sizes)
            key = (
                str(expr), str(answer), *sorted(f"{s} {ranges.get(s)} {sizes.get(s)}" for s in used),
            )  # fmt: skip
            if not used or key in self._seen:
                continue
            self._seen.add(key)
            model = self._counterexample(expr, answer, {s: ranges[s] for s in used if s in ranges}, sizes)
            if model is not None:
                yield f"{expr} >= 0 is claimed to hold {'always' if answer else 'never'}, but not for {model}"

    def _counterexample(
        self, expr: sympy.Expr, answer: bool, ranges: dict[sympy.Symbol, Range], sizes: dict[sympy.Symbol, sympy.Expr]
    ) -> str | None:
        import z3

        found: dict[sympy.Symbol, Any] = {}
        number = to_z3(expr, found)
        conditions: list[Any] = []
        for symbol in [s for s in ranges if not isinstance(s, sympy.Dummy)]:
            variable = to_z3(symbol, found)
            if symbol in sizes:
                size = to_z3(sizes[symbol], found)
                conditions += [None if size is None else variable < size, variable >= 0]
                continue
            low, high = ranges[symbol]
            conditions += [variable >= int(low)] if math.isfinite(low) else []
            conditions += [variable <= int(high)] if math.isfinite(high) else []
        divisors = {f.args[1] for f in expr.atoms(sympy.Function) if len(f.args) == 2}
        conditions += [None if (by := to_z3(divisor, found)) is None else by != 0 for divisor in divisors]
        if number is None or any(condition is None for condition in conditions):
            self.beyond += 1
            return None
        solver = z3.Solver()
        solver.set("rlimit", 200_000)
        solver.add(*conditions, number < 0 if answer else number >= 0)
        self.checked += 1
        result = solver.check()
        self.undecided += result == z3.unknown
        return str(solver.model()) if result == z3.sat else None


def _closed(expr: sympy.Expr, sizes: dict[sympy.Symbol, sympy.Expr]) -> set[sympy.Symbol]:
    """The symbols of `expr`, and those of the sizes of its index symbols."""
    own = set(expr.free_symbols)
    return own.union(*(sizes[symbol].free_symbols for symbol in own & sizes.keys()))
