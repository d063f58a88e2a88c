"""Score programs: what becomes of one raw score, as a small tree that travels through an operator as a string.

A tree is a nested tuple (a list in JSON) whose first entry names the node:

    ["score"]                the raw product of query and key, unscaled
    ["b"] ["h"] ["i"] ["j"]  positions, int64: batch, query head, query, key
    ["const", c]             a bool, int or float; "inf", "-inf" and "nan" where JSON has no number
    ["number", n]            entry n of `numbers`, an int
    ["input", n]             tensor n of `inputs`, [B|1, H|1, Lq|1, Lk|1], at this element
    ["diagonal", n]          what `chunked_hoisted` has put in a tree's place: only a memo has its value
    ["gather", n, x...]      tensor n of `inputs`, whole, at these integers, one a dimension
    ["cast", "float32", x]   x in the dtype of that name
    ["where", c, x, y]       ["and", x...]  ["or", x...]  ["not", x]
    [COMPARISONS, x, y]      [BINARY, x, y]               [UNARY, x]

Arithmetic follows torch's promotion, except that nothing is narrower than it has to be: a half-precision tensor is
read, and a fractional number taken, at least in the compute dtype, and so is an integer that a fraction is made of.
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
import torch.nn.functional as F
from torch import Tensor

from attn_fuse.kernels.score import lookup
from attn_fuse.kernels.score.tree import POSITIONS as POSITIONS
from attn_fuse.kernels.score.tree import Tree as Tree
from attn_fuse.kernels.score.tree import children
from attn_fuse.kernels.score.tree import nodes as nodes

# By the identity of a node. None: to be kept once it has been computed.
Memo = dict[int, Tensor | None]

COMPARISONS = tuple("ge gt le lt eq ne".split())
BINARY = tuple("add sub mul div floordiv mod maximum minimum pow fmod remainder atan2".split())
# Those that keep an integer an integer, or make a bool; then those that make a fraction of it.
_EXACT = tuple("detach abs neg sign square floor ceil round trunc relu isnan isinf isfinite".split())
FRACTIONAL = tuple(
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal frac sin cos tan asin acos atan sinh cosh tanh "
    "asinh acosh atanh erf erfc sigmoid silu gelu softplus log_sigmoid mish".split()
)
UNARY = _EXACT + FRACTIONAL


def _clamped_to(clamp: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    # The same numbers; but autograd shares a gradient between what a maximum takes for equal, and a clamp does not.
    return lambda a, b: (clamp if torch.promote_types(a.dtype, b.dtype).is_floating_point else other)(a, b)


_NAMED: Mapping[str, Any] = {
    "floordiv": torch.floor_divide, "mod": torch.remainder, "log_sigmoid": F.logsigmoid,
    "maximum": _clamped_to(torch.clamp_min, torch.maximum), "minimum": _clamped_to(torch.clamp_max, torch.minimum),
}  # fmt: skip
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    name: _NAMED.get(name) or getattr(torch, name, None) or getattr(F, name) for name in (*COMPARISONS, *BINARY, *UNARY)
}
_BOUNDS: Mapping[str, Callable[..., int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg, "abs": operator.abs,
    "floordiv": operator.floordiv, "mod": operator.mod, "maximum": max, "minimum": min,
}  # fmt: skip
_ARITY = {
    **dict.fromkeys(("score", *POSITIONS), 0),
    **dict.fromkeys(("not", *UNARY), 1),
    **dict.fromkeys((*COMPARISONS, *BINARY), 2),
    "where": 3,
}


@dataclass(frozen=True)
class Block:
    """A rectangle of the scores: queries [i0, i1) and keys [j0, j1) of some heads, computed in `dtype`.

    batch, heads: how many. origin: the first batch entry and the first head.
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
        return self.batch, self.heads, self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]

    @property
    def one(self) -> tuple[int, ...]:
        """The shape of a constant."""
        return 1, 1, 1, 1

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Start and stop along each of the four dimensions."""
        b, h = self.origin
        return (b, b + self.batch), (h, h + self.heads), self.queries, self.keys


@dataclass(frozen=True)
class ScoreProgram:
    """The score function of one attention. Trees may be given as lists; equal parts become one object.

    score: the final score of a query and a key. factor: multiplies the weight after the softmax. sink: the logit of
    one more key that has no value, [B|1, H|1, Lq|1, 1].

    Two promises by which blocks of keys are skipped, while `score` holds the mask itself: where the Boolean `visible`
    does not hold, the weight is 0 (in a query all of whose keys are hidden, the original's output is NaN or 0); and
    nothing is visible unless lower <= j - i <= upper, made of constants, numbers and integer arithmetic.
    unless_empty: the first promise holds for a query that sees some key; of one that sees none, all keys count. Then
    there are no bounds.

    Raises ValueError for a tree that is not one, naming the node.
    """

    score: Tree
    factor: Tree | None = None
    sink: Tree | None = None
    visible: Tree | None = None
    upper: Tree | None = None
    lower: Tree | None = None
    unless_empty: bool = False

    def __post_init__(self) -> None:
        known: dict[Any, Tree] = {}
        for part, forbidden in _FORBIDDEN.items():
            tree = getattr(self, part)
            if tree is None:
                continue
            tree = _interned(tree, known)
            for node in nodes(tree):
                if node[0] in forbidden:
                    raise ValueError(f"{node[0]!r} has no place in {part!r} of a score program")
            object.__setattr__(self, part, tree)
        if self.unless_empty and (self.visible is None or self.upper is not None or self.lower is not None):
            raise ValueError("'unless_empty' of a score program is said of 'visible' without bounds")

    @functools.cached_property
    def shared(self) -> frozenset[int]:
        """The nodes that `score` and `factor` need more than once, by identity."""
        return _shared(self.score, self.factor)

    def dumps(self) -> str:
        parts = {part: _as_json(getattr(self, part)) for part in _FORBIDDEN if getattr(self, part) is not None}
        parts |= {_SOFTLY: True} if self.unless_empty else {}
        return json.dumps(parts, separators=(",", ":"), allow_nan=False)

    @staticmethod
    @functools.cache
    def loads(text: str) -> ScoreProgram:
        """Raises ValueError for what `dumps` cannot have written."""
        parts = json.loads(text)
        if not isinstance(parts, dict) or "score" not in parts or not parts.keys() <= {*_FORBIDDEN, _SOFTLY}:
            raise ValueError(f"not a score program: {text[:100]}")
        return ScoreProgram(**parts)


_NO_BOUND = frozenset(set(_ARITY) - set(_BOUNDS) | {"input", "diagonal", "gather", "cast", "and", "or"})
_SOFTLY = "unless_empty"
_FORBIDDEN = {
    "score": frozenset[str](), "factor": frozenset({"score"}), "sink": frozenset({"score", "j"}),
    "visible": frozenset({"score"}), "upper": _NO_BOUND, "lower": _NO_BOUND,
}  # fmt: skip


def evaluate(
    tree: Tree,
    score: Tensor | None,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    block: Block,
    memo: Memo | None = None,
) -> Tensor:
    """`tree` on one block: a tensor of four dimensions that broadcasts to `block.shape`, in whatever dtype it has.

    score: the raw scores of the block, in its compute dtype. memo: holds the nodes whose value is known already, and
    None for those to keep.
    Raises ValueError for a node it does not know.
    """
    memo = dict.fromkeys(_shared(tree)) if memo is None else memo

    def value(node: Tree) -> Any:
        known = memo.get(id(node))
        if known is None:
            known = compute(node)
            if id(node) in memo and isinstance(known, Tensor):
                memo[id(node)] = known
        return known

    def compute(node: Tree) -> Any:
        match node:
            case ("score",):
                if score is None:
                    raise ValueError("there is no 'score' in this tree's place")
                return score
            case ("const", number):
                return number
            case ("number", n):
                return int(numbers[n])
            case ("b" | "h" | "i" | "j",):
                return _position(POSITIONS.index(node[0]), block)
            case ("input" | "gather", *_):
                return read(node, inputs, numbers, block, memo)
            case ("cast", name, x):
                return tensor(x).to(getattr(torch, name))
            case ("where", condition, *branches):
                return torch.where(tensor(condition).bool(), *tensors(branches))
            case ("and" | "or" as name, *parts):
                joined = torch.logical_and if name == "and" else torch.logical_or
                return functools.reduce(joined, tensors(parts))
            case ("not", x):
                return torch.logical_not(tensor(x))
            case (name, *parts) if name in _OPERATIONS:
                operands = tensors(parts)
                if name in FRACTIONAL or name in ("div", "atan2"):
                    operands = [x if x.is_floating_point() else x.to(block.dtype) for x in operands]
                return _OPERATIONS[name](*operands)
        raise ValueError(f"a score program has no node {node[0]!r}")

    def tensor(node: Tree) -> Tensor:
        return tensors([node])[0]

    def tensors(several: Sequence[Tree]) -> list[Tensor]:
        return as_tensors([value(node) for node in several], block)

    return tensor(tree)


def read(node: Tree, inputs: Sequence[Tensor], numbers: Sequence[int], block: Block, memo: Memo) -> Tensor:
    """What an "input" or "gather" node reads on this block, at least in the compute dtype where it is floating."""
    source = inputs[node[1]]
    if node[0] == "input":
        return widened(narrowed(source, block), block)
    # Without a dimension there is nothing to index.
    found = source[gathered(node, inputs, numbers, block, memo)] if source.ndim else source.reshape(block.one)
    return widened(found, block)


def gathered(
    node: Tree, inputs: Sequence[Tensor], numbers: Sequence[int], block: Block, memo: Memo
) -> tuple[Tensor, ...]:
    """The indices of a "gather" node: int64, one a dimension, of shapes that broadcast; of an "input" none.

    memo: the one that the node's value was computed with, so that the element read is the one that gets the gradient.
    """
    return tuple(evaluate(x, None, inputs, numbers, block, memo).long() for x in node[2:])


def accumulate(node: Tree, gradient: Tensor, into: Tensor, indices: tuple[Tensor, ...], block: Block) -> None:
    """Add to `into`, the gradient of a whole input, that of what `node` has read of it on this block at `indices`."""
    if node[0] == "input":
        narrowed(into, block).add_(gradient)
    elif into.ndim:
        lookup.accumulate(node, gradient.to(into.dtype), into, indices, block.origin[1])
    else:
        into.add_(gradient.sum())


def bound(tree: Tree | None, numbers: Sequence[int]) -> int | None:
    """The integer that `upper` or `lower` stands for."""
    match tree:
        case None:
            return None
        case ("const", value):
            return int(value)
        case ("number", n):
            return int(numbers[n])
        case (name, *parts):
            return _BOUNDS[name](*(bound(part, numbers) for part in parts))
    raise ValueError(f"not a bound: {tree}")


def _shared(*trees: Tree | None) -> frozenset[int]:
    once: set[int] = set()
    twice: set[int] = set()
    distinct = {id(node): node for tree in trees for node in nodes(tree)}
    needed = [tree for tree in trees if tree is not None]
    needed += [child for node in distinct.values() for child in children(node)]
    for node in needed:
        (twice if id(node) in once else once).add(id(node))
    return frozenset(twice)


def _interned(tree: Any, known: dict[Any, Tree]) -> Tree:
    """`tree` as tuples, checked, with equal parts as one object."""
    if not isinstance(tree, (tuple, list)) or not tree:
        raise ValueError(f"not a node of a score program: {tree!r}")
    name, *rest = tree
    constants: list[Any] = []
    match name, rest:
        case "const", [str(text)] if text in ("inf", "-inf", "nan"):
            constants, rest = [float(text)], []
        case "const", [bool() | int() | float() as number]:
            constants, rest = [number], []
        case "number" | "input" | "diagonal", [int(n)] if n >= 0:
            constants, rest = [n], []
        case "gather", [int(n), *rest] if n >= 0:
            constants = [n]
        case "cast", [str(dtype), x] if isinstance(getattr(torch, dtype, None), torch.dtype):
            constants, rest = [dtype], [x]
        case "and" | "or", [_, *_]:
            pass
        case str(), _ if name in _ARITY:
            if len(rest) != _ARITY[name]:
                raise ValueError(f"{name!r} of a score program takes {_ARITY[name]} operands, not {len(rest)}")
        case "const" | "number" | "input" | "diagonal" | "gather" | "cast" | "and" | "or", _:
            raise ValueError(f"{name!r} of a score program cannot take {rest!r}")
        case _:
            raise ValueError(f"a score program has no node {name!r}")
    children = [_interned(part, known) for part in rest]
    # True, 1 and 1.0 are equal, but not the same constant.
    key = (name, *map(repr, constants), *map(id, children))
    return known.setdefault(key, (name, *constants, *children))


def _as_json(part: Any) -> Any:
    if isinstance(part, tuple):
        return [_as_json(x) for x in part]
    return str(part) if isinstance(part, float) and not math.isfinite(part) else part


def _position(dimension: int, block: Block) -> Tensor:
    start, stop = block.spans[dimension]
    shape = [1, 1, 1, 1]
    shape[dimension] = stop - start
    return torch.arange(start, stop, device=block.device).view(shape)


def narrowed(source: Tensor, block: Block) -> Tensor:
    """The part of `source`, [B|1, H|1, Lq|1, Lk|1], that a block sees."""
    for dimension, (start, stop) in enumerate(block.spans):
        if source.shape[dimension] != 1:
            source = source.narrow(dimension, start, stop - start)
    return source


def widened(x: Tensor, block: Block) -> Tensor:
    """`x` at least in float32, where it is floating: the types that it is computed in are then those of the program."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x


def as_tensors(values: Sequence[Any], block: Block) -> list[Tensor]:
    """Constants as tensors of one element. They have four dimensions, so that they widen what they meet."""
    dtypes = [x.dtype for x in values if isinstance(x, Tensor) and x.is_floating_point()]
    widest = functools.reduce(torch.promote_types, dtypes, torch.float32) if dtypes else block.dtype

    def as_tensor(x: Any) -> Tensor:
        if isinstance(x, Tensor):
            return x
        dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else widest
        return torch.full(block.one, x, dtype=dtype, device=block.device)

    return [as_tensor(x) for x in values]
