"""Emitter: writes expressions of a score program as lines of Triton that compute the same as `score.program.evaluate`.

Equal lines share a variable. The emitter tracks each node's dtype in torch, which decides how to compute the node, and
the [min, max] of each integer, to carry an int64 in an int32 that holds all its values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_fuse.expression import nodes as ex
from attn_fuse.expression.functions import FUNCTIONS, bounds_of, gives_fraction
from attn_fuse.kernels.score.program import Block, evaluate

# All positions are below this number, as each launch checks.
LONGEST = (1 << 30) - 1
# Float32 represents every position below this number, and every sum or difference of two.
SHORT = 1 << 23

_INT32 = (-(1 << 31), (1 << 31) - 1)
_INT64 = (-(1 << 63), (1 << 63) - 1)
_LARGEST_POWER = 16


@dataclass(frozen=True)
class Described:
    """The properties of an input on which the code depends.

    single: for each dimension, whether its size is 1. narrow: whether an int32 holds every offset within the tensor.
    """

    dtype: torch.dtype
    single: tuple[bool, ...]
    narrow: bool


def described(x: Tensor) -> Described:
    """The properties of `x` on which the code depends."""
    last = sum((n - 1) * abs(step) for n, step in zip(x.shape, x.stride(), strict=True))
    return Described(x.dtype, tuple(n == 1 for n in x.shape), last <= _INT32[1])


@dataclass(frozen=True)
class Granted:
    """The properties of a call on which the code relies.

    wide: whether a number may exceed `LONGEST`. short: whether positions and numbers are below `SHORT`.
    half: whether query and key have 16 bits, in which case the program rounds their products to 11 or 8 bits.
    """

    wide: bool = False
    short: bool = False
    half: bool = False


@dataclass(frozen=True)
class Value:
    """A node in Triton.

    code: a variable, or a literal if `constant` is not None, which can be written in any dtype.
    dtype: the dtype of the node in torch. carrier: the dtype of `code` in Triton.
    depends: which of score, b, h, i and j the node depends on. span: [min, max] of an integer or Boolean.
    made_of: function name and operands of a sum or difference of a row and a column that is exact in float32, or of
        the magnitude of such a sum or difference.
    """

    code: str
    dtype: torch.dtype
    carrier: torch.dtype
    depends: frozenset[str] = frozenset()
    span: tuple[int, int] = _INT64
    constant: bool | int | float | None = None
    made_of: tuple[str, tuple[Value, ...]] | None = None


class Emitter:
    """Writes the lines of one function. inputs: the tensors that the function reads."""

    def __init__(self, inputs: Sequence[Described], granted: Granted) -> None:
        self.lines: list[str] = []
        self._inputs = inputs
        self._granted = granted
        most = SHORT if granted.short else LONGEST
        self._positions, self._number_span = (0, most), _INT64 if granted.wide else (-most, most)
        self._known: dict[int, tuple[ex.Expr, Value]] = {}
        self._variables: dict[str, str] = {}
        self._first_size = [2 * sum(len(x.single) for x in inputs[:n]) for n in range(len(inputs))]

    def value(self, expr: ex.Expr) -> Value:
        """`expr` as a variable of the function, or as a literal."""
        # Keeping the expression alive keeps its identity from being reused.
        if id(expr) not in self._known:
            self._known[id(expr)] = expr, self._folded(expr) or self._written(expr)
        return self._known[id(expr)][1]

    def float32(self, expr: ex.Expr, like: str) -> str:
        """`expr` as float32 in the shape of the variable `like`: "i", or "raw" of a tile."""
        value = self.value(expr)
        code = self._as(value, torch.float32)
        if "score" in value.depends or (frozenset("i") if like == "i" else _TILE) <= value.depends:
            return code
        return self._let(f"fn.spread({code}, {like})")

    def boolean(self, expr: ex.Expr) -> str:
        """`expr` as a Boolean, in any shape that broadcasts to the tile."""
        return self._as_bool(self.value(expr))

    # ---- one node

    def _folded(self, expr: ex.Expr) -> Value | None:
        if isinstance(expr, ex.Const):
            return _literal(expr.value)
        parts = ex.children(expr)
        if not parts or isinstance(expr, ex.Gather) or any(self.value(part).constant is None for part in parts):
            return None
        found = evaluate(expr, None, (), (), Block(1, 1, (0, 1), (0, 1), torch.device("cpu"), torch.float32))
        constant = found.item()
        return Value(_as_text(constant, found.dtype), found.dtype, found.dtype, constant=constant, span=_span(constant))

    def _written(self, expr: ex.Expr) -> Value:
        match expr:
            case ex.Score():
                return Value("raw", torch.float32, torch.float32, frozenset({"score"}))
            case ex.Given(n):
                return Value(f"given{n}", torch.float32, torch.float32, frozenset({"score"}))
            case ex.Position(name):
                return Value(name, torch.int64, torch.int32, frozenset({name}), self._positions)
            case ex.Number(n):
                carrier = torch.int64 if self._number_span == _INT64 else torch.int32
                code = self._let(f"tl.cast(reads[2][{n}] >> 2, tl.{_short(carrier)})")
                return Value(code, torch.int64, carrier, span=self._number_span)
            case ex.Input(n):
                return self._read(n, *self._offset_of_element(n))
            case ex.Gather(n, index):
                return self._read(n, *self._offset_of_gathered(n, [self.value(x) for x in index]))
            case ex.Cast(dtype, x):
                return self._cast(self.value(x), dtype)
            case ex.Select(condition, x, y):
                return self._where(self.value(condition), self.value(x), self.value(y))
            case ex.And(x, y) | ex.Or(x, y):
                values = [self.value(part) for part in (x, y)]
                sign = " & " if isinstance(expr, ex.And) else " | "
                return self._boolean(sign.join(map(self._as_bool, values)), *values)
            case ex.Not(x):
                value = self.value(x)
                return self._boolean(f"~{self._as_bool(value)}", value)
            case ex.Compare(name, x, y):
                return self._compared(name, self.value(x), self.value(y))
            case ex.Unary(name, x):
                return self._unary(name, self.value(x))
        if ex.name_of(expr) not in FUNCTIONS:
            raise ValueError(f"a score program has no node {type(expr).__name__}")
        return self._binary(ex.name_of(expr), *map(self.value, ex.children(expr)))

    # ---- reading

    def _offset_of_element(self, n: int) -> tuple[list[str], frozenset[str]]:
        one, first = self._inputs[n].single, self._first_size[n]
        along = [(name, first + d) for d, name in enumerate("bhij") if not one[d]]
        # Each term lies along one dimension, where int64 costs nothing.
        terms = [self._let(f"tl.cast({name}, tl.int64) * reads[1][{size}]") for name, size in along]
        return terms, frozenset(name for name, _ in along)

    def _offset_of_gathered(self, n: int, index: list[Value]) -> tuple[list[str], frozenset[str]]:
        source, first = self._inputs[n], self._first_size[n]
        wide, dims = torch.int32 if source.narrow else torch.int64, len(source.single)
        terms, used = [], [(d, value) for d, value in enumerate(index) if not source.single[d]]
        for d, value in used:
            code = self._as(self._cast(value, torch.int64), wide)
            if value.span[0] < 0 or value.dtype.is_floating_point:
                size = f"reads[1][{first + dims + d}]"
                code = self._let(f"tl.where({code} < 0, {code} + {size}, {code})")
            terms.append(self._let(f"{code} * reads[1][{first + d}]"))
        return terms, _depends([value for _, value in used])

    def _read(self, n: int, offset: list[str], depends: frozenset[str]) -> Value:
        dtype = self._inputs[n].dtype
        inside = [f"fn.before({x}, {end})" for x, end in (("i", "q_len"), ("j", "kv_len")) if x in depends]
        masked = f", mask={' & '.join(inside)}, other=0" if inside else ""
        code = f"tl.load({' + '.join([f'reads[0][{n}]', *offset])}{masked})"
        if dtype == torch.bool:
            return Value(self._let(f"{code} != 0"), dtype, dtype, depends, (0, 1))
        if dtype in _HALF:
            return Value(self._let(f"tl.cast({code}, tl.float32)"), torch.float32, torch.float32, depends)
        span = _INT64 if dtype.is_floating_point else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        return Value(self._let(code), dtype, dtype, depends, span)

    # ---- computing

    def _cast(self, x: Value, dtype: torch.dtype) -> Value:
        if dtype == torch.bool:
            return x if x.dtype == dtype else self._boolean(self._as_bool(x), x)
        if dtype.is_floating_point:
            if x.constant is not None and dtype not in _HALF:
                return _literal(float(x.constant))
            return Value(self._as(x, dtype), dtype, dtype, x.depends)
        limits = torch.iinfo(dtype)
        if not x.dtype.is_floating_point and limits.min <= x.span[0] and x.span[1] <= limits.max:
            carrier = _carrier(dtype, x.span)
            return Value(self._as(x, carrier), dtype, carrier, x.depends, x.span, x.constant)
        return Value(self._as(x, dtype), dtype, dtype, x.depends, (limits.min, limits.max))

    def _where(self, condition: Value, x: Value, y: Value) -> Value:
        dtype, span = _promoted(x, y), (min(x.span[0], y.span[0]), max(x.span[1], y.span[1]))
        carrier = _carrier(dtype, span)
        code = self._let(f"tl.where({self._as_bool(condition)}, {self._as(x, carrier)}, {self._as(y, carrier)})")
        return Value(code, dtype, carrier, condition.depends | x.depends | y.depends, span)

    def _compared(self, name: str, x: Value, y: Value) -> Value:
        dtype = _promoted(x, y)
        carrier = _carrier(dtype, (min(x.span[0], y.span[0]), max(x.span[1], y.span[1])))
        return self._boolean(f"{self._as(x, carrier)} {_SIGNS[name]} {self._as(y, carrier)}", x, y)

    def _unary(self, name: str, x: Value) -> Value:
        if name == "detach":
            return x
        row, floating = FUNCTIONS[name], x.dtype.is_floating_point
        if row.gives == "truth":
            if not floating:
                return self._boolean(f"tl.cast({name == 'isfinite'}, tl.int1)")
            code = self._as(x, _computed(x.dtype))
            return self._boolean(row.triton.format(code), x)
        if not floating and row.gives == "same":
            return self._unary_of_integer(name, x)
        dtype = x.dtype if floating else torch.float32
        if name == "tanh" and "score" in x.depends and _computed(dtype) == torch.float32:
            return self._rounded(f"fn.tanh_of_score({self._as(x, torch.float32)}, {self._granted.half})", dtype, x)
        return self._rounded(row.triton.format(self._as(x, _computed(dtype))), dtype, x)

    def _unary_of_integer(self, name: str, x: Value) -> Value:
        if x.dtype == torch.bool:
            raise ValueError(f"{name} of a Boolean")
        if (template := FUNCTIONS[name].whole) == "{0}":
            return x
        value = self._integer(template, x.dtype, bounds_of(name, x.span), x)
        return replace(value, made_of=(name, (x,))) if name == "abs" and x.made_of else value

    def _binary(self, name: str, x: Value, y: Value) -> Value:
        if gives_fraction(name):
            x, y = (v if v.dtype.is_floating_point else self._cast(v, torch.float32) for v in (x, y))
        dtype = _promoted(x, y)
        if name == "pow":
            return self._power(x, y, dtype)
        if dtype == torch.bool:
            if name not in _LOGICAL:
                raise ValueError(f"{name} of Booleans")
            return self._boolean(f"{self._as_bool(x)} {_LOGICAL[name]} {self._as_bool(y)}", x, y)
        if dtype.is_floating_point:
            return self._binary_of_floats(name, x, y, dtype)
        # Triton's division and remainder round towards 0, which is right if nothing is negative.
        unsigned = _OF_POSITIVE.get(name) if x.span[0] >= 0 and y.span[0] > 0 else None
        value = self._integer(unsigned or FUNCTIONS[name].whole, dtype, bounds_of(name, x.span, y.span), x, y)
        return replace(value, made_of=(name, (x, y))) if _is_exact_apart(name, x, y, value) else value

    def _binary_of_floats(self, name: str, x: Value, y: Value, dtype: torch.dtype) -> Value:
        computed, template = _computed(dtype), FUNCTIONS[name].triton
        if name == "div" and "score" in x.depends | y.depends:
            if y.constant and abs(math.frexp(y.constant)[1]) < 100:
                y, template = _literal(1.0 / y.constant), "{0} * {1}"
        elif name == "div" and computed == torch.float32:
            # Positions and lookups may depend on such quotients, so they are rounded as in torch.
            template = "tl.div_rn({0}, {1})"
        return self._rounded(template.format(self._as(x, computed), self._as(y, computed)), dtype, x, y)

    def _power(self, x: Value, y: Value, dtype: torch.dtype) -> Value:
        if y.constant is not None and y.constant == int(y.constant) and abs(y.constant) <= _LARGEST_POWER:
            base, times = self._cast(x, dtype), int(y.constant)
            found: Value | None = None
            for digit in f"{abs(times):b}" if times else "":
                found = None if found is None else self._binary("mul", found, found)
                if digit == "1":
                    found = base if found is None else self._binary("mul", found, base)
            if found is None:
                return self._cast(_literal(1), dtype)
            return found if times > 0 else self._binary("div", _literal(1.0), found)
        if not dtype.is_floating_point:
            raise ValueError("a power of integers whose exponent is no small number")
        computed = _computed(dtype)
        if y.constant == 0.5:
            return self._rounded(f"tl.sqrt({self._as(x, computed)})", dtype, x)
        return self._rounded(f"fn.power({self._as(x, computed)}, {self._as(y, computed)})", dtype, x, y)

    # ---- lines

    def _integer(self, template: str, dtype: torch.dtype, span: tuple[int, int], *operands: Value) -> Value:
        """An integer. An int64 is computed wide enough for operands and result; a narrower dtype wraps around."""
        if dtype != torch.int64:
            limits = torch.iinfo(dtype)
            code = self._let(template.format(*(self._as(x, dtype) for x in operands)))
            return Value(code, dtype, dtype, _depends(operands), (limits.min, limits.max))
        if span[0] < _INT64[0] or span[1] > _INT64[1]:
            span = _INT64
        spans = [span, *(x.span for x in operands)]
        wide = _carrier(dtype, (min(low for low, _ in spans), max(high for _, high in spans)))
        code = self._let(template.format(*(self._as(x, wide) for x in operands)))
        carrier = _carrier(dtype, span)
        found = Value(code, dtype, wide, _depends(operands), span)
        return found if carrier == wide else Value(self._as(found, carrier), dtype, carrier, found.depends, span)

    def _rounded(self, code: str, dtype: torch.dtype, *operands: Value) -> Value:
        computed = _computed(dtype)
        found = Value(self._let(code), dtype, computed, _depends(operands))
        return found if computed == dtype else Value(self._as(found, dtype), dtype, dtype, found.depends)

    def _boolean(self, code: str, *operands: Value) -> Value:
        return Value(self._let(code), torch.bool, torch.bool, _depends(operands), (0, 1))

    def _as_bool(self, x: Value) -> str:
        if x.constant is not None:
            return f"tl.cast({bool(x.constant)}, tl.int1)"
        return x.code if x.carrier == torch.bool else self._let(f"{x.code} != 0")

    def _as(self, x: Value, dtype: torch.dtype) -> str:
        """The code of `x` in Triton's dtype for `dtype`."""
        if x.constant is not None:
            return _as_text(x.constant, dtype)
        if dtype == torch.float32 and x.made_of is not None:
            # A row and a column are cast separately, which saves a slow cast of each element.
            name, operands = x.made_of
            return self._let(FUNCTIONS[name].triton.format(*(self._as(part, dtype) for part in operands)))
        return x.code if x.carrier == dtype else self._let(f"tl.cast({x.code}, tl.{_short(dtype)})")

    def _let(self, code: str) -> str:
        if code not in self._variables:
            self._variables[code] = f"v{len(self._variables)}"
            self.lines.append(f"{self._variables[code]} = {code}")
        return self._variables[code]


def _depends(values: Sequence[Value]) -> frozenset[str]:
    return frozenset().union(*(x.depends for x in values))


def _is_exact_apart(name: str, x: Value, y: Value, whole: Value) -> bool:
    """Whether x + y or x - y has a row and a column as operands, and float32 represents operands and result.

    Only int64 qualifies, because narrower integers wrap around.
    """
    apart = not any(_TILE <= value.depends for value in (x, y)) and whole.depends >= _TILE
    held = all(-2 * SHORT <= end <= 2 * SHORT for value in (x, y, whole) for end in value.span)
    return name in ("add", "sub") and whole.dtype == torch.int64 and apart and held


def _promoted(*values: Value) -> torch.dtype:
    """The dtype to which torch promotes tensors of these values. A fractional constant counts as at least float32."""
    floats = [x.dtype for x in values if x.dtype.is_floating_point and x.constant is None]
    widest = functools.reduce(torch.promote_types, floats, torch.float32)
    dtypes = [widest if isinstance(x.constant, float) else x.dtype for x in values]
    return functools.reduce(torch.promote_types, dtypes)


def _carrier(dtype: torch.dtype, span: tuple[int, int]) -> torch.dtype:
    return torch.int32 if dtype == torch.int64 and _INT32[0] <= span[0] and span[1] <= _INT32[1] else dtype


def _computed(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _literal(x: bool | int | float) -> Value:
    dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else torch.float32
    return Value(_as_text(x, dtype), dtype, dtype, constant=x, span=_span(x))


def _span(x: bool | int | float) -> tuple[int, int]:
    return _INT64 if isinstance(x, float) else (int(x), int(x))


def _as_text(x: bool | int | float, dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return f"tl.cast({bool(x)}, tl.int1)"
    if not dtype.is_floating_point:
        return str(int(x))
    rounded = torch.tensor(x, dtype=torch.float64).to(dtype).item()
    return repr(rounded) if math.isfinite(rounded) else f'float("{rounded}")'


def _short(dtype: torch.dtype) -> str:
    return "int1" if dtype == torch.bool else str(dtype).removeprefix("torch.")


_HALF = (torch.float16, torch.bfloat16)
_TILE = frozenset({"i", "j"})
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "eq": "==", "ne": "!="}
_LOGICAL = {"add": "|", "maximum": "|", "mul": "&", "minimum": "&"}
_OF_POSITIVE = {"floor_divide": "{0} // {1}", "remainder": "{0} % {1}"}
