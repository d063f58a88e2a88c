"""Score programs: the function from a raw score to the final score, as expressions that an operator takes as a string.

An expression of a score program consists of these nodes of `expression.nodes`, in JSON lists that begin with a name:

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

Arithmetic follows torch's promotion, with three exceptions: a half-precision tensor is read in float32, a fractional
constant has the widest floating dtype of its fellow operands, at least float32 and by default the compute dtype, and an
integer that a function makes a fraction of is converted to the compute dtype first.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_fuse.expression.functions import BINARY, COMPARISONS, FUNCTIONS, UNARY, bounds_of, gives_fraction
from attn_fuse.expression.nodes import (
    And,
    Binary,
    Cast,
    Compare,
    Const,
    Diagonal,
    Div,
    Expr,
    Gather,
    Given,
    Input,
    Not,
    Number,
    Or,
    Position,
    Score,
    Select,
    Unary,
    children,
    distinct,
    interned,
    name_of,
)
from attn_fuse.expression.text import as_text
from attn_fuse.kernels.score import lookup
from attn_fuse.kernels.score.dependence import POSITIONS
from attn_fuse.torch_internals import CLAMP_BY_A_TENSOR_SPLITS

# Values by the identity of their nodes. None: the value is to be kept once it is computed.
Memo = dict[int, Tensor | None]


def _clamped_to(
    clamp: Callable[..., Tensor], other: Callable[..., Tensor], leads: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    # The same numbers, but at a tie autograd splits the gradient of a maximum, and leaves that of a clamp whole. Where
    # a clamp splits it, too, the choice is written out; a NaN of the operand that is not chosen is added.
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

    batch, heads: the numbers of batch entries and of heads. origin: the first batch entry and the first head.
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


@dataclass(frozen=True)
class ScoreProgram:
    """The score function of one attention. Expressions may be given as JSON has them; equal parts become one object.

    score: the final score of a query and a key, mask included. factor: multiplies the weight after the softmax.
    sink: the logit of one more key that has no value, [B|1, H|1, Lq|1, 1].
    visible: a Boolean; where it does not hold, the weight is 0 (of a fully masked row the original gives NaN or 0).
    upper, lower: integers; no key is visible unless lower <= j - i <= upper. They consist of constants, numbers and
        integer arithmetic. Kernels skip blocks of keys by these two guarantees.
    hides_only_if_others_seen: the guarantee of `visible` is only for a query that sees some key; a fully masked row
        weighs all keys. Then there are no bounds.
    empty_is_nan: whether a fully masked row gives NaN, as its softmax does; else 0.

    Raises ValueError for an expression with a node that has no place there, and names the node.
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
            expr = interned(given if isinstance(given, Expr) else _parsed(given), known)
            for node in distinct(expr):
                if (name := _written_name(node)) in forbidden:
                    raise ValueError(f"{name!r} has no place in {part!r} of a score program")
            object.__setattr__(self, part, expr)
        if self.hides_only_if_others_seen and (
            self.visible is None or self.upper is not None or self.lower is not None
        ):
            raise ValueError("'hides_only_if_others_seen' of a score program is said of 'visible' without bounds")

    @functools.cached_property
    def shared(self) -> frozenset[int]:
        """The nodes that `score` and `factor` use more than once, by identity."""
        return _shared(self.score, self.factor)

    def dumps(self) -> str:
        """The program as one line of JSON."""
        parts: dict[str, Any] = {
            part: _as_json(getattr(self, part)) for part in _FORBIDDEN if getattr(self, part) is not None
        }
        parts |= {name: True for name in _FLAGS if getattr(self, name)}
        return json.dumps(parts, separators=(",", ":"), allow_nan=False)

    @staticmethod
    @functools.cache
    def loads(text: str) -> ScoreProgram:
        """The program that `dumps` has written; the same object for the same text.

        Raises ValueError for a text that `dumps` cannot have written.
        """
        parts = json.loads(text)
        if not isinstance(parts, dict) or "score" not in parts or not parts.keys() <= {*_FORBIDDEN, *_FLAGS}:
            raise ValueError(f"not a score program: {text[:100]}")
        return ScoreProgram(**parts)


# What bounds on j - i may not use: all but constants, numbers and functions of integers.
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

    score: the raw scores of the block, in its compute dtype; None where `expr` reads none. memo: the values known so
    far, and None for those to keep. Raises ValueError for a node that has no place in a score program.
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
            case Const(number):
                return number
            case Score():
                if score is None:
                    raise ValueError("there is no 'score' in this expression's place")
                return score
            case Number(n):
                return int(numbers[n])
            case Position(name):
                return _position(POSITIONS.index(name), block)
            case Input() | Gather():
                return read(node, inputs, numbers, block, memo)
            case Cast(dtype, x):
                return tensor(x).to(dtype)
            case Select(condition, x, y):
                return torch.where(tensor(condition).bool(), *tensors((x, y)))
            case And(x, y):
                return torch.logical_and(*tensors((x, y)))
            case Or(x, y):
                return torch.logical_or(*tensors((x, y)))
            case Not(x):
                return torch.logical_not(tensor(x))
        name = name_of(node)
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


def read(node: Input | Gather, inputs: Sequence[Tensor], numbers: Sequence[int], block: Block, memo: Memo) -> Tensor:
    """The elements that `node` reads on this block, floating-point ones in at least float32."""
    source = inputs[node.leaf]
    if isinstance(node, Input):
        return widened(narrowed(source, block), block)
    # A tensor without dimensions takes no index.
    found = source[gathered(node, inputs, numbers, block, memo)] if source.ndim else source.reshape(block.one)
    return widened(found, block)


def gathered(
    node: Expr, inputs: Sequence[Tensor], numbers: Sequence[int], block: Block, memo: Memo
) -> tuple[Tensor, ...]:
    """The indices of a `Gather`: int64, one for each dimension, of shapes that broadcast; of an `Input` none.

    memo: that of the node's value, so that the elements that were read get the gradient.
    """
    places = node.index if isinstance(node, Gather) else ()
    return tuple(evaluate(x, None, inputs, numbers, block, memo).long() for x in places)


def accumulate(node: Input | Gather, gradient: Tensor, into: Tensor, indices: tuple[Tensor, ...], block: Block) -> None:
    """Add `gradient`, of what `node` read on this block at `indices`, to `into`, the gradient of the whole input."""
    if isinstance(node, Input):
        narrowed(into, block).add_(gradient)
    elif into.ndim:
        lookup.accumulate(node, gradient.to(into.dtype), into, indices, block.origin[1])
    else:
        into.add_(gradient.sum())


def of_table(
    node: Gather,
    of_rows: Callable[[int, int, torch.dtype], Tensor],
    in_row: int,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    sizes: tuple[int, int, int, int],
) -> Tensor:
    """The gradient of the table that `node` reads, in at least float32: of each entry a sum in one order.

    of_rows: the gradient of what the node reads for queries [first, last), in a dtype. in_row: its elements for each
    query, which say how many queries are added up at a time. sizes: batch, heads, q_len, kv_len.
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


# Elements whose gradient is added to a table at a time.
_STRIP = 1 << 25


def bound(expr: Expr | None, numbers: Sequence[int]) -> int | None:
    """The value of `expr`, a program's `upper` or `lower`; None for None. Raises ValueError for other expressions."""
    match expr:
        case None:
            return None
        case Const(value):
            return int(value)
        case Number(n):
            return int(numbers[n])
    if (name := name_of(expr)) not in FUNCTIONS or not FUNCTIONS[name].whole:
        raise ValueError(f"not a bound: {as_text(expr)}")
    # Of numbers that are known, the interval of a function of integers is one number.
    parts = [bound(part, numbers) for part in children(expr)]
    low, high = bounds_of(name, *((part, part) for part in parts))
    if low != high:
        raise ValueError(f"a bound is divided by 0: {as_text(expr)}")
    return int(low)


def _shared(*exprs: Expr | None) -> frozenset[int]:
    once: set[int] = set()
    twice: set[int] = set()
    every = {id(node): node for expr in exprs for node in distinct(expr)}
    needed = [expr for expr in exprs if expr is not None]
    needed += [child for node in every.values() for child in children(node)]
    for node in needed:
        (twice if id(node) in once else once).add(id(node))
    return frozenset(twice)


# ---- the string


def _written_name(node: Expr) -> str:
    match node:
        case Position(name):
            return name
        case Score() | Const() | Number() | Input() | Diagonal() | Given():
            return type(node).__name__.lower()
    return name_of(node)


def _as_json(node: Expr) -> list[Any]:
    own: list[Any] = []
    match node:
        case Const(value):
            own = [str(value) if isinstance(value, float) and not math.isfinite(value) else value]
        case Number(n) | Input(n) | Diagonal(n) | Gather(n):
            own = [n]
        case Cast(dtype):
            own = [str(dtype).removeprefix("torch.")]
    return [_written_name(node), *own, *map(_as_json, children(node))]


_CLASSES: dict[str, Callable[..., Expr]] = {
    "add": operator.add, "mul": operator.mul, "div": Div, "where": Select, "not": Not, "and": And, "or": Or,
    "score": Score,
    **{name: functools.partial(Position, name) for name in POSITIONS},
}  # fmt: skip
_ARITY = {**dict.fromkeys(("score", *POSITIONS), 0), **dict.fromkeys(UNARY, 1), **dict.fromkeys(BINARY, 2),
          **dict.fromkeys(COMPARISONS, 2), "not": 1, "and": 2, "or": 2, "where": 3}  # fmt: skip
_NUMBERED: dict[str, Callable[[int], Expr]] = {"number": Number, "input": Input, "diagonal": Diagonal}


def _parsed(tree: Any) -> Expr:
    """The expression that a JSON list stands for."""
    if isinstance(tree, Expr):
        return tree
    if not isinstance(tree, (tuple, list)) or not tree:
        raise ValueError(f"not a node of a score program: {tree!r}")
    name, *rest = tree
    match name, rest:
        case "const", [str(text)] if text in ("inf", "-inf", "nan"):
            return Const(float(text))
        case "const", [bool() | int() | float() as number]:
            return Const(number)
        case "number" | "input" | "diagonal", [int(n)] if n >= 0:
            return _NUMBERED[name](n)
        case "gather", [int(n), *places] if n >= 0:
            return Gather(n, tuple(map(_parsed, places)))
        case "cast", [str(dtype), x] if isinstance(getattr(torch, dtype, None), torch.dtype):
            return Cast(getattr(torch, dtype), _parsed(x))
        case "const" | "number" | "input" | "diagonal" | "gather" | "cast", _:
            raise ValueError(f"{name!r} of a score program cannot take {rest!r}")
        case str(), _ if name in _ARITY:
            if name in ("and", "or") and rest:
                return functools.reduce(_CLASSES[name], map(_parsed, rest))
            if len(rest) != _ARITY[name]:
                raise ValueError(f"{name!r} of a score program takes {_ARITY[name]} operands, not {len(rest)}")
        case _:
            raise ValueError(f"a score program has no node {name!r}")
    operands = map(_parsed, rest)
    if name in _CLASSES:
        return _CLASSES[name](*operands)
    return (Compare if name in COMPARISONS else Unary if name in UNARY else Binary)(name, *operands)


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
    """`x` in at least float32 where it is floating-point, so that arithmetic on it is never in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x


def as_tensors(values: Sequence[Any], block: Block) -> list[Tensor]:
    """`values` with constants as tensors of one element: of four dimensions, so that promotion heeds their dtypes."""
    dtypes = [x.dtype for x in values if isinstance(x, Tensor) and x.is_floating_point()]
    widest = functools.reduce(torch.promote_types, dtypes, torch.float32) if dtypes else block.dtype

    def as_tensor(x: Any) -> Tensor:
        if isinstance(x, Tensor):
            return x
        dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else widest
        return torch.full(block.one, x, dtype=dtype, device=block.device)

    return [as_tensor(x) for x in values]
