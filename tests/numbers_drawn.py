"""Random numbers made of sizes and integers, and what they are worth: the judges of every claim about such a number.

A number is a tree that three readers read apart: SymPy, as torch's shape environment writes it, for the claim; Python's
own integers, for the values; z3, for a counterexample. None of the readers knows what the package knows of numbers.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch.utils._sympy import functions as of_torch

Values = Mapping[str, int]
# How many values each symbol takes: sizes at, below and beyond those of an example, integers of either sign.
SIZES = (2, 3, 5, 8, 13)
MAYBE_EMPTY = (0, 1, 2, 7)
INTEGERS = (-9, -4, -1, 0, 1, 3, 10)
WIDE = (-(2**40), -1, 0, 1, 2**40)
# name -> (min, max, values): what is guarded of a symbol, and the values that brute force gives it.
SYMBOLS: dict[str, tuple[float, float, Sequence[int]]] = {
    "s0": (2, math.inf, SIZES),
    "s1": (2, math.inf, SIZES),
    "u0": (0, math.inf, MAYBE_EMPTY),
    "n0": (-math.inf, math.inf, INTEGERS),
    "n1": (-math.inf, math.inf, WIDE),
    "n2": (-math.inf, 4, (-9, -2, 0, 3, 4)),
    "n3": (-3, 6, (-3, -1, 0, 2, 6)),
}
SYMPY = {name: sympy.Symbol(name, integer=True, **({"positive": True} if name[0] == "s" else {})) for name in SYMBOLS}
RANGES = {SYMPY[name]: (low, high) for name, (low, high, _) in SYMBOLS.items()}


@dataclass(frozen=True)
class Number:
    """A tree: `kind` applied to `parts`; a "symbol" holds its name, a "constant" its value."""

    kind: str
    parts: tuple[Any, ...]

    def __str__(self) -> str:
        return (
            str(self.parts[0]) if self.kind in ("symbol", "constant") else f"{self.kind}{tuple(map(str, self.parts))}"
        )


def drawn(rng: random.Random, depth: int) -> Number:
    """A random number of at most `depth` operations deep."""
    if depth == 0 or rng.random() < 0.15:
        if rng.random() < 0.65:
            return Number("symbol", (rng.choice(list(SYMBOLS)),))
        return Number("constant", (rng.choice((-64, -7, -2, -1, 0, 1, 2, 3, 8, 64, 1024)),))
    kind = rng.choice(
        "add add sub sub mul neg floordiv floordiv modulo maximum minimum ceil int round truediv abs".split()
    )
    if kind in ("neg", "abs"):
        return Number(kind, (drawn(rng, depth - 1),))
    if kind in ("floordiv", "modulo", "truediv"):
        by = rng.choice((1, 2, 3, 8, -2)) if rng.random() < 0.6 else None
        divisor = Number("constant", (by,)) if by is not None else Number("symbol", (rng.choice(list(SYMBOLS)),))
        part = Number(kind, (drawn(rng, depth - 1), divisor))
        return Number(rng.choice(("ceil", "int", "floor")), (part,)) if kind == "truediv" else part
    if kind in ("ceil", "int", "round"):
        # As people write it: a share of a length, made whole.
        share = rng.choice((0.5, 0.25, 0.1, 0.3, 1.5, -0.5))
        return Number(kind, (Number("share", (drawn(rng, depth - 1), share)),))
    return Number(kind, (drawn(rng, depth - 1), drawn(rng, depth - 1)))


def as_sympy(x: Number) -> sympy.Expr:
    """`x` as torch's shape environment writes it. Raises where torch's functions do, as for a division by 0."""
    if x.kind == "symbol":
        return SYMPY[x.parts[0]]
    if x.kind == "constant":
        return sympy.Integer(x.parts[0])
    if x.kind == "share":
        return of_torch.ToFloat(as_sympy(x.parts[0])) * sympy.Float(x.parts[1])
    parts = [as_sympy(part) for part in x.parts]
    return _IN_SYMPY[x.kind](*parts)


def _modulo(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    both = a.is_nonnegative and b.is_nonnegative
    return (of_torch.Mod if both else of_torch.PythonMod)(a, b)


_IN_SYMPY: dict[str, Any] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "neg": lambda a: -a,
    "abs": abs, "floordiv": of_torch.FloorDiv, "modulo": _modulo, "maximum": of_torch.Max, "minimum": of_torch.Min,
    "ceil": of_torch.CeilToInt, "int": of_torch.TruncToInt, "floor": of_torch.FloorToInt, "round": of_torch.RoundToInt,
    "truediv": of_torch.IntTrueDiv,
}  # fmt: skip
_IN_PYTHON: dict[str, Any] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "neg": lambda a: -a,
    "abs": abs, "floordiv": lambda a, b: a // b, "modulo": lambda a, b: a % b, "maximum": max, "minimum": min,
    "ceil": math.ceil, "int": int, "floor": math.floor, "round": round, "truediv": lambda a, b: a / b,
}  # fmt: skip


def value(x: Number, at: Values) -> float:
    """What Python computes. Raises ZeroDivisionError where it does."""
    if x.kind == "symbol":
        return at[x.parts[0]]
    if x.kind == "constant":
        return x.parts[0]
    if x.kind == "share":
        return value(x.parts[0], at) * x.parts[1]
    return _IN_PYTHON[x.kind](*(value(part, at) for part in x.parts))


def symbols_of(x: Number) -> set[str]:
    """The names of the symbols in `x`."""
    if x.kind == "symbol":
        return {x.parts[0]}
    return set[str]().union(*(symbols_of(part) for part in x.parts if isinstance(part, Number)))


def assignments(names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Every assignment of the box to the symbols `names`."""
    for chosen in itertools.product(*(SYMBOLS[name][2] for name in names)):
        yield dict(zip(names, chosen, strict=True))


def to_z3(x: sympy.Expr, found: dict[sympy.Symbol, Any]) -> Any:
    """A SymPy number as z3's integers; None where it has a function that z3 is not told of. found: its symbols."""
    import z3

    def quotient(a: Any, b: Any) -> Any:
        # z3's own division rounds towards the side that keeps the remainder from being negative.
        return z3.If(b > 0, a / b, (-a) / (-b))

    if x.is_Integer:
        return z3.IntVal(int(x))
    if x.is_Symbol:
        return found.setdefault(x, z3.Int(str(x)))
    parts = [to_z3(part, found) for part in x.args]
    if any(part is None for part in parts):
        return None
    match x:
        case sympy.Add():
            return z3.Sum(parts)
        case sympy.Mul():
            return z3.Product(parts)
        case sympy.Pow() if x.exp.is_Integer and x.exp > 0:
            return z3.Product([parts[0]] * int(x.exp))
        case of_torch.FloorDiv():
            return quotient(*parts)
        case of_torch.Mod() | of_torch.PythonMod():
            return parts[0] - parts[1] * quotient(*parts)
        case sympy.Abs():
            return z3.If(parts[0] >= 0, parts[0], -parts[0])
        case of_torch.Max() | of_torch.Min():
            total = parts[0]
            for part in parts[1:]:
                larger = total >= part
                total = z3.If(larger, total, part) if isinstance(x, of_torch.Max) else z3.If(larger, part, total)
            return total
    return None
