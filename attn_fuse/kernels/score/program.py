"""Score programs: functions from a raw score to the final score, as expressions that operators take as a string.

A score program consists of these nodes of `expression.nodes`, in JSON lists that begin with a name:

    Score()              ["score"]                the raw product of query and key, unscaled
    Position(name)       ["b"] ["h"] ["i"] ["j"]  positions, int64: batch, query head, query, key
    Const(c)             ["const", c]             a bool, int or float; "inf", "-inf" and "nan" where JSON has no number
    Number(n)            ["number", n]            entry n of `numbers`, an int
    Input(n)             ["input", n]             tensor n of `inputs`, [B|1, H|1, Lq|1, Lk|1], at this element
    Diagonal(n)          ["diagonal", n]          a part that `chunked.hoisted` took out: a memo has its value
    Gather(n, (x, ...))  ["gather", n, x...]      tensor n of `inputs`, whole, at these integers, one for each dimension
    Cast(dtype, x)       ["cast", "float32", x]   x in the dtype of that name
    Select(c, x, y)      ["where", c, x, y]
    And, Or, Not         ["and", x...]  ["or", x...]  ["not", x]
    Compare              ["ge", x, y] and its like
    Add, Mul, Div, Binary, Unary                  ["tanh", x]: a function by its name in `expression.functions`

Dtypes are promoted as in torch, with three exceptions. A half-precision tensor is read in float32. A fractional
constant has the widest floating-point dtype of the other operands, at least float32, or the compute dtype if there is
none. A function that makes a fraction of an integer takes it in the compute dtype.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_fuse.expression import nodes as ex
from attn_fuse.expression.functions import BINARY, COMPARISONS, FUNCTIONS, UNARY, bounds_of, gives_fraction
from attn_fuse.expression.nodes import Expr, children, distinct
from attn_fuse.expression.text import as_text
from attn_fuse.kernels.score import lookup
from attn_fuse.kernels.score.dependence import POSITIONS
from attn_fuse.torch_internals import CLAMP_BY_A_TENSOR_SPLITS

# Values by the identity of their nodes; None for a value to keep once it is computed.
Memo = dict[int, Tensor | None]


def _clamped_to(
    clamp: Callable[..., Tensor], other: Callable[..., Tensor], leads: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    # A clamp gives the same numbers as a maximum, but autograd splits a maximum's gradient at a tie. If this torch also
    # splits a clamp's, the choice is written out, and a NaN of the other operand is added.
    def clamped(a: Tensor, b: Tensor) -> Tensor:
        if not torch.promote_types(a.dtype, b.dtype).is_floating_point:
            return other(a, b)
        if CLAMP_BY_A_TENSOR_SPLITS and torch.is_grad_enabled():
            return torch.where(leads(a, b), a, b + torch.where(a.isnan(), a.detach(), 0.0))
        return clamp(a, b)

    return clamped


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **{name: row.torch for name, row in FUNCTIONS.items()},
    **COMPARISONS,
    "maximum": _clamped_to(torch.clamp_min, torch.maximum, torch.gt),
    "minimum": _clamped_to(torch.clamp_max, torch.minimum, torch.lt),
}


@dataclass(frozen=True)
class Block:
    """A rectangle of the scores: queries [i0, i1) and keys [j0, j1) of some heads, computed in `dtype`.

    batch, heads: the numbers of batch entries and heads. origin: the first batch entry and the first head.
    """

    batch: int
    heads: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    device: torch.device
    dtype: torch.dtype
    origin: tuple[int, int] = (0, 0)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The numbers of batch entries, heads, queries and keys."""
        return self.batch, self.heads, self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]

    @property
    def one(self) -> tuple[int, ...]:
        """The shape of a constant as a tensor."""
        return 1, 1, 1, 1

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) along each of the four dimensions."""
        b, h = self.origin
        return (b, b + self.batch), (h, h + self.heads), self.queries, self.keys

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of its queries into tensors [B, H, Lq, ..]."""
        return tuple(slice(*span) for span in self.spans[:3])


@dataclass(frozen=True)
class ScoreProgram:
    """The score function of one attention. Expressions may be given as JSON lists; equal parts become one object.

    score: the final score of a query and a key, mask included. factor: multiplies the weight after the softmax.
    sink: the logit of one more key that has no value, [B|1, H|1, Lq|1, 1].
    visible: a Boolean; where it is False, the weight is 0 (in a fully masked row, the original gives NaN or 0).
    upper, lower: no key is visible unless lower <= j - i <= upper. Integers made of constants, numbers and integer
        arithmetic. Kernels skip blocks of keys by `visible` and these bounds.
    hides_only_if_others_seen: whether `visible` holds only for a query that sees some key, while a fully masked row
        weighs all keys. Then there are no bounds.
    empty_is_nan: whether a fully masked row gives NaN, as its softmax does; else 0.

    Raises ValueError, with the node's name, for a node that has no place in an expression.
    """

    score: Expr
    factor: Expr | None = None
    sink: Expr | None = None
    visible: Expr | None = None
    upper: Expr | None = None
    lower: Expr | None = None
    hides_only_if_others_seen: bool = False
    empty_is_nan: bool = False

    def __post_init__(self) -> None:
        known: dict[Any, Expr] = {}
        for part, forbidden in _FORBIDDEN.items():
            given = getattr(self, part)
            if given is None:
                continue
            expr = ex.interned(given if isinstance(given, Expr) else _parsed(given), known)
            for node in distinct(expr):
                if (name := _written_name(node)) in forbidden:
                    raise ValueError(f"{name!r} has no place in {part!r} of a score program")
            object.__setattr__(self, part, expr)
        if self.hides_only_if_others_seen and (
            self.visible is None or self.upper is not None or self.lower is not None
        ):
            raise ValueError("'hides_only_if_others_seen' of a score program is said of 'visible' without bounds")

    @property
    def weighing(self) -> tuple[Expr, ...]:
        """The expressions that make the weights: the score, and the factor if there is one."""
        return (self.score,) if self.factor is None else (self.score, self.factor)

    @functools.cached_property
    def shared(self) -> frozenset[int]:
        """The nodes that `weighing` uses more than once, by identity."""
        return _shared(*self.weighing)

    @property
    def exprs(self) -> dict[str, Expr]:
        """The expressions, by the names of their fields."""
        return {name: expr for name in _FORBIDDEN if (expr := getattr(self, name)) is not None}

    def dumps(self) -> str:
        """The program as one line of JSON."""
        parts: dict[str, Any] = {name: _as_json(expr) for name, expr in self.exprs.items()}
        parts |= {name: True for name in _FLAGS if getattr(self, name)}
        return json.dumps(parts, separators=(",", ":"), allow_nan=False)

    @staticmethod
    @functools.cache
    def loads(text: str) -> ScoreProgram:
        """The program that `dumps` has written, the same object for the same text. Raises ValueError for other text."""
        parts = json.loads(text)
        if not isinstance(parts, dict) or "score" not in parts or not parts.keys() <= {*_FORBIDDEN, *_FLAGS}:
            raise ValueError(f"not a score program: {text[:100]}")
        return ScoreProgram(**parts)


# Bounds of j - i have only constants, numbers and functions of integers.
_NO_BOUND = frozenset(
    {*COMPARISONS, *POSITIONS, *(name for name, row in FUNCTIONS.items() if not row.whole)}
    | {"score", "input", "diagonal", "gather", "cast", "where", "and", "or", "not"}
)
_FLAGS = ("hides_only_if_others_seen", "empty_is_nan")
_FORBIDDEN = {
    "score": frozenset[str](), "factor": frozenset({"score"}), "sink": frozenset({"score", "j"}),
    "visible": frozenset({"score"}), "upper": _NO_BOUND, "lower": _NO_BOUND,
}  # fmt: skip


def evaluate(
    expr: Expr,
    score: Tensor | None,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    block: Block,
    memo: Memo | None = None,
) -> Tensor:
    """The value of `expr` on one block: a tensor of four dimensions that broadcasts to `block.shape`, in any dtype.

    score: the raw scores of the block, in its compute dtype; None if `expr` reads none. memo: known values, and None
    for those to keep. Raises ValueError for a node that has no place in a score program.
    """
    memo = dict.fromkeys(_shared(expr)) if memo is None else memo

    def value(node: Expr) -> Any:
        known = memo.get(id(node))
        if known is None:
            known = compute(node)
            if id(node) in memo and isinstance(known, Tensor):
                memo[id(node)] = known
        return known

    def compute(node: Expr) -> Any:
        match node:
            case ex.Const(number):
                return number
            case ex.Score():
                if score is None:
                    raise ValueError("there is no 'score' in this expression's place")
                return score
            case ex.Number(n):
                return int(numbers[n])
            case ex.Position(name):
                return _position(POSITIONS.index(name), block)
            case ex.Input() | ex.Gather():
                return read(node, inputs, numbers, block, memo)
            case ex.Cast(dtype, x):
                return tensor(x).to(dtype)
            case ex.Select(condition, x, y):
                return torch.where(tensor(condition).bool(), *tensors((x, y)))
            case ex.And(x, y):
                return torch.logical_and(*tensors((x, y)))
            case ex.Or(x, y):
                return torch.logical_or(*tensors((x, y)))
            case ex.Not(x):
                return torch.logical_not(tensor(x))
        name = ex.name_of(node)
        if name not in _OPERATIONS:
            raise ValueError(f"a score program has no node {type(node).__name__}")
        operands = tensors(children(node))
        if gives_fraction(name):
            operands = [x if x.is_floating_point() else x.to(block.dtype) for x in operands]
        return _OPERATIONS[name](*operands)

    def tensor(node: Expr) -> Tensor:
        return tensors((node,))[0]

    def tensors(several: Sequence[Expr]) -> list[Tensor]:
        return as_tensors([value(node) for node in several], block)

    return tensor(expr)


def read(
    node: ex.Input | ex.Gather, inputs: Sequence[Tensor], numbers: Sequence[int], block: Block, memo: Memo
) -> Tensor:
    """The elements that `node` reads on this block, floating-point ones in at least float32."""
    source = inputs[node.leaf]
    if isinstance(node, ex.Input):
        return widened(narrowed(source, block), block)
    found = source[gathered(node, inputs, numbers, block, memo)] if source.ndim else source.reshape(block.one)
    return widened(found, block)


def gathered(
    node: Expr, inputs: Sequence[Tensor], numbers: Sequence[int], block: Block, memo: Memo
) -> tuple[Tensor, ...]:
    """The indices of a `Gather`: int64, one for each dimension, of shapes that broadcast; none for an `Input`.

    memo: the one used for the node's value, so gradients go to the elements that were read.
    """
    places = node.index if isinstance(node, ex.Gather) else ()
    return tuple(evaluate(x, None, inputs, numbers, block, memo).long() for x in places)


def accumulate(
    node: ex.Input | ex.Gather, gradient: Tensor, into: Tensor, indices: tuple[Tensor, ...], block: Block
) -> None:
    """Add `gradient`, that of what `node` read on a block at `indices`, to `into`, the gradient of the whole input."""
    if isinstance(node, ex.Input):
        narrowed(into, block).add_(gradient)
    elif into.ndim:
        lookup.accumulate(node, gradient.to(into.dtype), into, indices, block.origin[1])
    else:
        into.add_(gradient.sum())


def of_table(
    node: ex.Gather,
    of_rows: Callable[[int, int, torch.dtype], Tensor],
    in_row: int,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    sizes: tuple[int, int, int, int],
) -> Tensor:
    """The gradient of the table that `node` reads, in at least float32; each entry is a sum in one order.

    of_rows: (first, last, dtype) -> the gradient of what the node reads for these queries. in_row: its elements for
    each query, which limit the queries added up at a time. sizes: batch, heads, q_len, kv_len.
    """
    table, (batch, heads, q_len, kv_len) = inputs[node.leaf], sizes
    into = torch.zeros(table.shape, dtype=torch.promote_types(table.dtype, torch.float32), device=table.device)
    strip = max(1, _STRIP // max(in_row, 1))
    for first in range(0, q_len, strip):
        last = min(first + strip, q_len)
        block = Block(batch, heads, (first, last), (0, kv_len), table.device, torch.float32)
        indices = gathered(node, inputs, numbers, block, {})
        accumulate(node, of_rows(first, last, into.dtype), into, indices, block)
    return into


# Elements of a gradient that are added to a table at a time.
_STRIP = 1 << 25


def bound(expr: Expr | None, numbers: Sequence[int]) -> int | None:
    """The value of `expr`, a program's `upper` or `lower`; None for None. Raises ValueError for other expressions."""
    match expr:
        case None:
            return None
        case ex.Const(value):
            return int(value)
        case ex.Number(n):
            return int(numbers[n])
    if (name := ex.name_of(expr)) not in FUNCTIONS or not FUNCTIONS[name].whole:
        raise ValueError(f"not a bound: {as_text(expr)}")
    # A function of known integers has an interval of one number.
    parts = [bound(part, numbers) for part in children(expr)]
    low, high = bounds_of(name, *((part, part) for part in parts))
    if low != high:
        raise ValueError(f"a bound is divided by 0: {as_text(expr)}")
    return int(low)


def _shared(*exprs: Expr) -> frozenset[int]:
    nodes = {id(node): node for expr in exprs for node in distinct(expr)}
    uses = Counter(id(child) for node in nodes.values() for child in children(node))
    uses.update(id(expr) for expr in exprs)
    return frozenset(node for node, count in uses.items() if count > 1)


# ---- the string


def _written_name(node: Expr) -> str:
    match node:
        case ex.Position(name):
            return name
        case ex.Score() | ex.Const() | ex.Number() | ex.Input() | ex.Diagonal() | ex.Given():
            return type(node).__name__.lower()
    return ex.name_of(node)


def _as_json(node: Expr) -> list[Any]:
    own: list[Any] = []
    match node:
        case ex.Const(value):
            own = [str(value) if isinstance(value, float) and not math.isfinite(value) else value]
        case ex.Number(n) | ex.Input(n) | ex.Diagonal(n) | ex.Gather(n):
            own = [n]
        case ex.Cast(dtype):
            own = [str(dtype).removeprefix("torch.")]
    return [_written_name(node), *own, *map(_as_json, children(node))]


# How to make the nodes with a fixed number of operands, and this number.
_MADE: dict[str, tuple[Callable[..., Expr], int]] = {
    **{name: (functools.partial(ex.Position, name), 0) for name in POSITIONS},
    **{name: (functools.partial(ex.Unary, name), 1) for name in UNARY},
    **{name: (functools.partial(ex.Binary, name), 2) for name in BINARY},
    **{name: (functools.partial(ex.Compare, name), 2) for name in COMPARISONS},
    "add": (operator.add, 2), "mul": (operator.mul, 2), "div": (ex.Div, 2), "where": (ex.Select, 3),
    "not": (ex.Not, 1), "and": (ex.And, 2), "or": (ex.Or, 2), "score": (ex.Score, 0),
}  # fmt: skip
_NUMBERED: dict[str, Callable[[int], Expr]] = {"number": ex.Number, "input": ex.Input, "diagonal": ex.Diagonal}


def _parsed(tree: Any) -> Expr:
    """The expression of a JSON list."""
    if isinstance(tree, Expr):
        return tree
    if not isinstance(tree, (tuple, list)) or not tree:
        raise ValueError(f"not a node of a score program: {tree!r}")
    name, *rest = tree
    match name, rest:
        case "const", [str(text)] if text in ("inf", "-inf", "nan"):
            return ex.Const(float(text))
        case "const", [bool() | int() | float() as number]:
            return ex.Const(number)
        case "number" | "input" | "diagonal", [int(n)] if n >= 0:
            return _NUMBERED[name](n)
        case "gather", [int(n), *places] if n >= 0:
            return ex.Gather(n, tuple(map(_parsed, places)))
        case "cast", [str(dtype), x] if isinstance(getattr(torch, dtype, None), torch.dtype):
            return ex.Cast(getattr(torch, dtype), _parsed(x))
        case "const" | "number" | "input" | "diagonal" | "gather" | "cast", _:
            raise ValueError(f"{name!r} of a score program cannot take {rest!r}")
        case str(), _ if name in _MADE:
            make, count = _MADE[name]
            if name in ("and", "or") and rest:
                return functools.reduce(make, map(_parsed, rest))
            if len(rest) != count:
                raise ValueError(f"{name!r} of a score program takes {count} operands, not {len(rest)}")
            return make(*map(_parsed, rest))
    raise ValueError(f"a score program has no node {name!r}")


# ---- on a block


def _position(dimension: int, block: Block) -> Tensor:
    start, stop = block.spans[dimension]
    shape = [1, 1, 1, 1]
    shape[dimension] = stop - start
    return torch.arange(start, stop, device=block.device).view(shape)


def narrowed(source: Tensor, block: Block) -> Tensor:
    """The part of `source` [B|1, H|1, Lq|1, Lk|1] that a block reads, as a view."""
    for dimension, (start, stop) in enumerate(block.spans):
        if source.shape[dimension] != 1:
            source = source.narrow(dimension, start, stop - start)
    return source


def widened(x: Tensor, block: Block) -> Tensor:
    """`x` in at least float32 if it is floating-point: arithmetic is never in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x


def as_tensors(values: Sequence[Any], block: Block) -> list[Tensor]:
    """`values` with constants as tensors of one element, whose four dimensions make promotion heed their dtypes."""
    dtypes = [x.dtype for x in values if isinstance(x, Tensor) and x.is_floating_point()]
    widest = functools.reduce(torch.promote_types, dtypes, torch.float32) if dtypes else block.dtype

    def as_tensor(x: Any) -> Tensor:
        if isinstance(x, Tensor):
            return x
        dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else widest
        return torch.full(block.one, x, dtype=dtype, device=block.device)

    return [as_tensor(x) for x in values]
