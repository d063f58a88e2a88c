"""Text: an expression as mathematics, as in 0.125·q[b,h,i,:]·k[b,h,j,:] where j ≤ i else -inf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy

from attn_fuse.expression import nodes as ex
from attn_fuse.expression.nodes import Expr
from attn_fuse.expression.simplify import logical_not

# Precedence: an operand that binds less tightly is put in parentheses.
_CHOICE, _OR, _AND, _COMPARED, _SUM, _PRODUCT, _ATOM = range(7)
_SIGNS = {
    "eq": "=", "ne": "≠", "lt": "<", "le": "≤", "gt": ">", "ge": "≥", "sub": "-", "floor_divide": "//",
    "remainder": "mod", "fmod": "fmod",
}  # fmt: skip
_NAMES = {"maximum": "max", "minimum": "min", "neg": "-"}
_TIMES = "·"


@dataclass(frozen=True)
class Names:
    """The letters of index symbols, the names of leaves by number, and the text of `Score`, in which to print."""

    symbols: Mapping[sympy.Symbol, str] = field(default_factory=dict)
    leaves: Mapping[int, str] = field(default_factory=dict)
    score: str = "score"

    def index(self, value: sympy.Expr) -> str:
        """An index expression in these letters."""
        letters = {symbol: sympy.Symbol(letter) for symbol, letter in self.symbols.items()}
        return str(value.xreplace(letters)).replace("*", _TIMES)

    def leaf(self, number: int) -> str:
        """The name of a leaf; leaf0, leaf1, ... by default."""
        return self.leaves.get(number, f"leaf{number}")

    def of(self, expr: Expr, least: int = _CHOICE) -> str:
        """`expr`, in parentheses if it binds less tightly than `least`."""
        text, binds = self._of(expr)
        return text if binds >= least else f"({text})"

    def _of(self, expr: Expr) -> tuple[str, int]:
        match expr:
            case ex.Const(value):
                return (str(value) if isinstance(value, bool) else f"{value:g}"), _ATOM if value >= 0 else _PRODUCT
            case ex.Index(value):
                return self.index(value), _ATOM if value.is_Atom else _SUM
            case ex.Load(leaf, index):
                return self._element(self.leaf(leaf), [self.index(i) for i in index])
            case ex.Scalar(leaf):
                return self.leaf(leaf), _ATOM
            case ex.Gather(leaf, index):
                return self._element(self.leaf(leaf), [self.of(i) for i in index])
            case ex.Input(leaf) | ex.Diagonal(leaf):
                return self.leaf(leaf), _ATOM
            case ex.Position(name):
                return name, _ATOM
            case ex.Number(n) | ex.Given(n):
                return f"{type(expr).__name__.lower()}{n}", _ATOM
            case ex.Score():
                return self.score, _PRODUCT
            case ex.NonNegative(value):
                return self._inequality(value, "≤"), _COMPARED
            case ex.IsZero(value):
                return self._inequality(value, "="), _COMPARED
            case ex.Select(cond, ex.Const() as a, b) if not isinstance(b, ex.Const):
                return self._of(ex.Select(logical_not(cond), b, a))
            case ex.Select(cond, a, b):
                return f"{self.of(a, _OR)} where {self.of(cond, _OR)} else {self.of(b, _OR)}", _CHOICE
            case ex.And(a, b):
                return f"{self.of(a, _AND)} and {self.of(b, _AND)}", _AND
            case ex.Or(a, b):
                return f"{self.of(a, _OR)} or {self.of(b, _OR)}", _OR
            case ex.Not(x):
                return f"not {self.of(x, _ATOM)}", _AND
            case ex.Compare(op, a, b):
                return f"{self.of(a, _SUM)} {_SIGNS[op]} {self.of(b, _SUM)}", _COMPARED
            case ex.Cast(dtype, x):
                return f"{str(dtype).removeprefix('torch.')}({self.of(x)})", _ATOM
            case ex.Contract(axes, a, b):
                return self._contracted(axes, a, b)
            case ex.Reduce(name, axis, body):
                return f"{name}_{self.index(axis)}({self.of(body)})", _ATOM
            case ex.Softmax(axis, body):
                return f"softmax_{self.index(axis)}({self.of(body)})", _ATOM
            case ex.Dropout(x, p):
                return f"dropout({self.of(x)}, {self.of(p)})", _ATOM
            case ex.Mul(x, ex.Const(-1 | -1.0)):
                return f"-{self.of(x, _PRODUCT)}", _PRODUCT
            case ex.Add(a, ex.Mul(b, ex.Const(-1 | -1.0))) | ex.Binary("sub", a, b):
                return f"{self.of(a, _SUM)} - {self.of(b, _PRODUCT)}", _SUM
            case ex.Add(a, b):
                return f"{self.of(a, _SUM)} + {self.of(b, _SUM)}", _SUM
            case ex.Mul(a, b):
                a, b = (b, a) if isinstance(b, ex.Const) else (a, b)
                return f"{self.of(a, _PRODUCT)}{_TIMES}{self.of(b, _PRODUCT)}", _PRODUCT
            case ex.Div(a, b):
                return f"{self.of(a, _PRODUCT)} / {self.of(b, _ATOM)}", _PRODUCT
            case ex.Binary("pow", a, b):
                return f"{self.of(a, _ATOM)}^{self.of(b, _ATOM)}", _PRODUCT
            case ex.Binary(name, a, b) if name in _SIGNS:
                return f"{self.of(a, _ATOM)} {_SIGNS[name]} {self.of(b, _ATOM)}", _PRODUCT
            case ex.Unary("neg", x):
                return f"-{self.of(x, _PRODUCT)}", _PRODUCT
        name = ex.name_of(expr)
        return f"{_NAMES.get(name, name)}({', '.join(map(self.of, ex.children(expr)))})", _ATOM

    def _element(self, name: str, index: list[str]) -> tuple[str, int]:
        return (f"{name}[{','.join(index)}]" if index else name), _ATOM

    def _contracted(self, axes: tuple[sympy.Symbol, ...], a: Expr, b: Expr) -> tuple[str, int]:
        """A sum of products: with a colon for a single axis that is an index of both tensors, else sum_."""
        if len(axes) == 1 and all(_runs_along(x, axes[0]) for x in (a, b)):
            inner = Names({**self.symbols, axes[0]: ":"}, self.leaves, self.score)
            return f"{inner.of(a)}{_TIMES}{inner.of(b)}", _PRODUCT
        over = ",".join(map(self.index, axes))
        return f"sum_{over}({self.of(a, _PRODUCT)}{_TIMES}{self.of(b, _PRODUCT)})", _ATOM

    def _inequality(self, value: sympy.Expr, sign: str) -> str:
        """value >= 0 ("≤") or value = 0 ("="), with the negative terms moved to the left."""
        left = right = sympy.Integer(0)
        for term in sympy.Add.make_args(sympy.expand(value)):
            if term.could_extract_minus_sign():
                left -= term
            else:
                right += term
        if left == 0:
            return f"{self.index(right)} {'≥' if sign == '≤' else sign} 0"
        return f"{self.index(left)} {sign} {self.index(right)}"


def as_text(expr: Expr, names: Names | None = None) -> str:
    """`expr` as a line of mathematics."""
    return (names or Names()).of(expr)


def _runs_along(x: Expr, axis: sympy.Symbol) -> bool:
    """Whether `x` is a `Load` with `axis` as one index and in no other."""
    return isinstance(x, ex.Load) and [i for i in x.index if axis in i.free_symbols] == [axis]
