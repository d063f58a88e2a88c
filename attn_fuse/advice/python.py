"""Python: element expressions as a person would write them, over the tensors `b`, `h`, `q_idx` and `kv_idx`.

These are the arguments of FlexAttention's functions, single elements there. For a mask in SDPA they are ranges that
broadcast to [batch, heads, q_len, kv_len].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
import torch
import torch.nn.functional as F

from attn_fuse.emit.builder import NotEmitted
from attn_fuse.expression import nodes as ex
from attn_fuse.expression.index import fold_index
from attn_fuse.expression.nodes import Expr

# Precedence in Python: an operand that binds less tightly is put in parentheses.
_COMPARED, _OR, _AND, _SUM, _PRODUCT, _UNARY, _POWER, ATOM = range(8)
_INFIX = {
    "add": ("+", _SUM), "sub": ("-", _SUM), "mul": ("*", _PRODUCT), "div": ("/", _PRODUCT), "or": ("|", _OR),
    "floor_divide": ("//", _PRODUCT), "remainder": ("%", _PRODUCT), "and": ("&", _AND), "eq": ("==", _COMPARED),
    "ne": ("!=", _COMPARED), "lt": ("<", _COMPARED), "le": ("<=", _COMPARED), "gt": (">", _COMPARED),
    "ge": (">=", _COMPARED),
}  # fmt: skip
_NEGATED = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}


@dataclass(frozen=True)
class Words:
    """How to write what an expression reads.

    symbols: the text of index symbols and symbolic sizes. element: writes an element of a tensor, from its leaf's
    number and the texts of its index. tensor: writes a `Load` as a whole tensor that broadcasts; "" where it cannot.
    """

    symbols: Mapping[sympy.Symbol, str]
    element: Callable[[int, list[str]], str]
    tensor: Callable[[ex.Load], str] = lambda load: ""


def as_python(expr: Expr, words: Words, least: int = 0) -> str:
    """`expr` as Python code, in parentheses if it binds less tightly than `least`.

    Raises NotEmitted for a part that cannot be written.
    """
    return _Writer(words).of(expr, least)


def number(value: bool | int | float) -> str:
    """A number as a person would write it."""
    if isinstance(value, float) and math.isinf(value):
        return "torch.inf" if value > 0 else "-torch.inf"
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        if value == torch.finfo(getattr(torch, dtype)).min:
            return f"torch.finfo(torch.{dtype}).min"
    if isinstance(value, float):
        # The program's own number, where float32 holds no more digits.
        short = next(f"{value:.{n}g}" for n in range(1, 18) if _rounds_to(f"{value:.{n}g}", value))
        return repr(float(short))
    return repr(value)


def _rounds_to(text: str, value: float) -> bool:
    written = float(text)
    narrow = torch.tensor(value, dtype=torch.float32).item() == value
    return written == value or (narrow and torch.tensor(written, dtype=torch.float32).item() == value)


class _Writer:
    def __init__(self, words: Words) -> None:
        self._words = words

    def of(self, expr: Expr, least: int = 0) -> str:
        """`expr`, in parentheses if it binds less tightly than `least`."""
        return _bound(*self._of(expr), least)

    def _of(self, expr: Expr) -> tuple[str, int]:
        match expr:
            case ex.Const(value):
                return number(value), ATOM if value >= 0 else _UNARY
            case ex.Score():
                return "score", ATOM
            case ex.Index(value):
                return self._index(value)
            case ex.Scalar(leaf):
                return self._words.element(leaf, []), ATOM
            case ex.Load(leaf, index):
                whole = self._words.tensor(expr)
                return whole or self._words.element(leaf, [self._index(i)[0] for i in index]), ATOM
            case ex.Gather(leaf, places):
                return self._words.element(leaf, [self.of(place) for place in places]), ATOM
            case ex.NonNegative(value):
                return self._compared(value, "<="), _COMPARED
            case ex.IsZero(value):
                return self._compared(value, "=="), _COMPARED
            case ex.Not(ex.IsZero(value)):
                return self._compared(value, "!="), _COMPARED
            case ex.Not(ex.NonNegative(value)):
                return self._compared(-1 - value, "<="), _COMPARED
            case ex.Not(ex.Compare(op, a, b)) if op in ("eq", "ne"):
                return self._of(ex.Compare(_NEGATED[op], a, b))
            case ex.Not(x):
                return f"~{self.of(x, _UNARY)}", _UNARY
            case ex.Select(condition, a, b):
                return f"torch.where({self.of(condition)}, {self.of(a)}, {self.of(b)})", ATOM
            case ex.Cast(dtype, x):
                return f"{self.of(x, ATOM)}.to({dtype})", ATOM
            case ex.Mul(x, ex.Const(-1 | -1.0)) | ex.Unary("neg", x):
                return f"-{self.of(x, _UNARY)}", _UNARY
            case ex.Add(a, ex.Mul(b, ex.Const(-1 | -1.0))) | ex.Add(a, ex.Unary("neg", b)):
                return f"{self.of(a, _SUM)} - {self.of(b, _PRODUCT)}", _SUM
            case ex.Binary("pow", a, b):
                return f"{self.of(a, ATOM)} ** {self.of(b, ATOM)}", _POWER
            case ex.Binary("maximum", x, ex.Const(bound)):
                return f"torch.clamp({self.of(x)}, min={number(bound)})", ATOM
            case ex.Binary("minimum", x, ex.Const(bound)):
                return f"torch.clamp({self.of(x)}, max={number(bound)})", ATOM
            case ex.Unary("detach", x):
                return f"{self.of(x, ATOM)}.detach()", ATOM
        return self._operation(ex.name_of(expr), *map(_without_cast, ex.children(expr)))

    def _operation(self, name: str, *operands: Expr) -> tuple[str, int]:
        if name in _INFIX:
            sign, binds = _INFIX[name]
            a, b = operands
            return f"{self.of(a, binds + (binds == _COMPARED))} {sign} {self.of(b, binds + 1)}", binds
        owner = "torch" if hasattr(torch, name) else "F" if hasattr(F, name) else ""
        if not name or not owner:
            raise NotEmitted(f"{name or 'a part of the scores'} cannot be written as a function")
        return f"{owner}.{name}({', '.join(map(self.of, operands))})", ATOM

    def _index(self, value: sympy.Expr) -> tuple[str, int]:
        """An index expression, with positive terms first."""
        value = sympy.expand(value)
        terms = sympy.Add.make_args(value)
        if len(terms) > 1:
            ordered = sorted(terms, key=lambda term: (term.is_number, term.could_extract_minus_sign()))
            text = self._index(ordered[0])[0]
            for term in ordered[1:]:
                sign, size = ("-", -term) if term.could_extract_minus_sign() else ("+", term)
                text += f" {sign} {self._index(size)[0]}"
            return text, _SUM
        if value.is_Integer:
            return str(value), ATOM if value >= 0 else _UNARY

        def leaf(part: sympy.Expr) -> tuple[str, int] | None:
            if part.is_Symbol:
                if part not in self._words.symbols:
                    raise NotEmitted(f"the size {part} has no name here")
                text = self._words.symbols[part]
                return text, ATOM if text.isidentifier() or text.endswith(")") else _PRODUCT
            return (str(part), ATOM) if part.is_Integer else None

        def join(sign: str, binds: int) -> Callable[[tuple[str, int], tuple[str, int]], tuple[str, int]]:
            def joined(a: tuple[str, int], b: tuple[str, int]) -> tuple[str, int]:
                return f"{_bound(*a, binds)} {sign} {_bound(*b, binds + 1)}", binds

            return joined

        try:
            found: tuple[str, int] = fold_index(
                value, leaf, join("+", _SUM), join("*", _PRODUCT), join("//", _PRODUCT), join("%", _PRODUCT)
            )
        except ValueError as problem:
            raise NotEmitted(str(problem)) from None
        return found

    def _compared(self, value: sympy.Expr, sign: str) -> str:
        """value >= 0 ("<=") or value = 0 ("==", "!="), as a comparison without negative terms."""
        value = sympy.expand(value)
        constant = sum((t for t in sympy.Add.make_args(value) if t.is_number), sympy.Integer(0))
        terms = [t for t in sympy.Add.make_args(value) if not t.is_number]
        more = sum((t for t in terms if not t.could_extract_minus_sign()), sympy.Integer(0))
        less = sum((-t for t in terms if t.could_extract_minus_sign()), sympy.Integer(0))
        turned = {"<=": ">="}.get(sign, sign)
        if constant == 0 and more != 0 and less != 0:
            left, sign, right = more, turned, less
        elif constant < 0 or less == 0:
            left, sign, right = more - less, turned, -constant
        else:
            left, right = less - more, constant
        return f"{self._index(left)[0]} {sign} {self._index(right)[0]}"


def _bound(text: str, binds: int, least: int) -> str:
    return text if binds >= least else f"({text})"


def _without_cast(x: Expr) -> Expr:
    # torch promotes an integer beside a float by itself.
    return x.x if isinstance(x, ex.Cast) and x.dtype == torch.float32 and isinstance(x.x, ex.Index) else x
