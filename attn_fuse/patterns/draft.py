"""Draft: an element expression taken apart into query, key, value, score and weights, before its axes have roles.

The product with the value comes off first, then the layers of the weights, the softmax, and the product of query and
key. The part between the softmax and that product stays whole, as an expression over `Score`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression import nodes as ex
from attn_fuse.expression import simplify as al
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Const, Contract, Expr, Score, index_symbols
from attn_fuse.expression.ranges import infinities, may_be_no_number
from attn_fuse.lift.lift import Lifted
from attn_fuse.patterns import WEIGHT_LAYERS
from attn_fuse.patterns.layer import DropoutLayer, EmptyIsZero, Factor, Layer, bare, peel
from attn_fuse.patterns.softmax import LONGER, Normalised, softmax
from attn_fuse.torch_internals import FloorDiv, Mod

# Max axes to split: more than any layout merges. With symbolic sizes, a split may leave its digit behind.
_MOST_SPLITS = 8


@dataclass(frozen=True)
class Draft:
    """An attention over index symbols without roles. These fields differ from those of `Attention`:

    factors: the factors of the weights. empty_is_zero: whether the program sets the weights of a fully masked row to 0.
    fills: the conditions outside which it does so; none if it sets all of them.
    key_axes, inner_axes: the axes summed by the product with the value, and by that of query and key.
    """

    query: Expr
    key: Expr
    value: Expr
    score: Expr
    sink: Expr | None
    factors: tuple[Expr, ...]
    dropout_p: Expr | None
    empty_is_zero: bool
    fills: tuple[Expr, ...]
    query_dtype: torch.dtype
    value_dtype: torch.dtype
    softmax_dtype: torch.dtype
    output: tuple[tuple[sympy.Symbol, ...], ...]
    key_axes: tuple[sympy.Symbol, ...]
    inner_axes: tuple[sympy.Symbol, ...]

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The index symbols of the output and of both sums."""
        return {s for dim in self.output for s in dim} | {*self.key_axes, *self.inner_axes}


def draft(lifted: Lifted) -> Draft | Refusal:
    """The draft of the attention that `lifted` is an element of, with merged axes split, or a Refusal."""
    space = lifted.space
    product, divided_by = _output_product(_joined_output(lifted.element, space))
    if product is None:
        return Refusal("the output is not a matrix product, or there is a single key", lifted.element)
    match ex.has_product(product.a), ex.has_product(product.b):
        case True, False:
            weights, value = product.a, product.b
        case False, True:
            weights, value = product.b, product.a
        case _:
            return Refusal("the output is not a product of weights and a value", product)
    if len(product.axes) != 1:
        return Refusal("the output sums over several axes at once", product)
    (key,) = product.axes
    if divided_by is not None:
        weights = ex.Div(weights, divided_by)
    found, rest, refusal = peel(weights, WEIGHT_LAYERS)
    if refusal is not None:
        return refusal
    layers = [layer for layer, _ in found]
    normalised = softmax(rest, key, space, lifted.numbers)
    if isinstance(normalised, Refusal):
        return normalised.at(rest)
    unsure = _wrong_guard(layers, normalised.body, key, space)
    if unsure is not None:
        return unsure
    parts = _query_and_key(normalised, key, space)
    if isinstance(parts, Refusal):
        return parts
    score_product, query, operand, score = parts
    if 1 in infinities(score):
        return Refusal("some scores are plus infinity, which makes their row NaN", normalised.body)
    query, operand, query_dtype = _without_widening(query, operand, score_product.dtype, lifted.leaf_dtypes)
    drops = [layer.p for layer in layers if isinstance(layer, DropoutLayer)]
    if len(drops) > 1:
        return Refusal("the weights pass through dropout twice", weights)
    if dropped := ex.parts(score, ex.Dropout):
        return Refusal("the scores pass through dropout before the softmax", dropped[0])
    if space.sizes[key] == 1:
        return Refusal("there is a single key", value, LONGER)
    return _split_axes(
        Draft(
            query=query,
            key=operand,
            value=value,
            score=score,
            sink=normalised.sink,
            factors=tuple(layer.value for layer in layers if isinstance(layer, Factor)),
            dropout_p=drops[0] if drops else None,
            empty_is_zero=normalised.zero or any(map(_makes_zero, layers)),
            fills=_fills(normalised, layers),
            query_dtype=query_dtype,
            value_dtype=product.dtype,
            softmax_dtype=normalised.dtype or score_product.dtype,
            output=tuple(tuple(i.free_symbols) for i in lifted.indices),
            key_axes=product.axes,
            inner_axes=score_product.axes,
        ),
        space,
    )


def _output_product(element: Expr) -> tuple[Contract | None, Expr | None]:
    """(the product with the value, a divisor after it computed from the scores), each None without one"""
    divided_by = None
    match product := bare(element):
        case ex.Div(inner, total) if ex.has_product(total):
            product, divided_by = bare(inner), total
    return (product, divided_by) if isinstance(product, Contract) else (None, None)


def _joined_output(element: Expr, space: Space) -> Expr:
    """`element` with a sum of two products over different keys, such as a cache, as one product over all keys."""
    match element:
        case ex.Add(Contract((first,), a, b, dtype), Contract((second,), c, d, _)):
            pass
        case _:
            return element
    parts = []
    for axis, sides in ((first, (a, b)), (second, (c, d))):
        weights = [x for side in sides for x in ex.parts(side, ex.Softmax)]
        if not weights or axis not in weights[0].at.free_symbols:
            return element
        parts.append((axis, sides, sympy.expand(weights[0].at - axis)))
    parts.sort(key=lambda part: part[2] != 0)
    (head, one, start), (tail, other, middle) = parts
    if start != 0 or not space.is_zero(middle - space.sizes[head]):
        return element
    key = space.fresh("j", space.sizes[head] + space.sizes[tail])
    before = [al.substitute(side, {head: key}, space) for side in one]
    behind = [al.substitute(side, {tail: key - middle}, space) for side in other]
    reached = al.nonnegative(key - middle, space)
    whole = [x if x == y else al.select(reached, y, x) for x, y in zip(before, behind, strict=True)]
    return Contract((key,), whole[0], whole[1], dtype)


def _joined_products(x: Expr, space: Space) -> Expr:
    """`x` with each choice between two products as one product if they share an operand, such as the query."""
    match x:
        case ex.Select(cond, Contract(axes, a, b, dtype), Contract(others, c, d, _)) if _fit(axes, others, space):
            by = dict(zip(others, axes, strict=True))
            c, d = (al.substitute(side, by, Space()) for side in (c, d))
            if a == c:
                return Contract(axes, a, al.select(cond, b, d), dtype)
            if b == d:
                return Contract(axes, al.select(cond, a, c), b, dtype)
    return al.rebuilt(x, lambda part: _joined_products(part, space))


def _fit(axes: Sequence[sympy.Symbol], others: Sequence[sympy.Symbol], space: Space) -> bool:
    sizes = ([space.sizes[axis] for axis in some] for some in (axes, others))
    return len(axes) == len(others) and all(space.same_size(a, b) for a, b in zip(*sizes, strict=True))


def _wrong_guard(layers: Iterable[Layer], body: Expr, key: sympy.Symbol, space: Space) -> Refusal | None:
    """A Refusal if a guard tests other scores than the softmax has, or hides a NaN; else None.

    A fill of the weights is a guard, too, because it replaces NaN; multiplying by a factor does not.
    """
    for layer in layers:
        match layer:
            case EmptyIsZero(scores, axis) if scores is not None:
                asked = scores if axis is None else al.substitute(scores, {axis: key}, space)
                if asked != body:
                    return Refusal("the weights are zeroed by a condition on other scores", asked)
    if any(map(_makes_zero, layers)) and may_be_no_number(body):
        return Refusal(
            "the weights are guarded or filled where a score may be infinity times zero, which is NaN",
            body,
        )
    return None


def _makes_zero(layer: Layer) -> bool:
    """Whether `layer` turns a NaN weight into 0."""
    return isinstance(layer, EmptyIsZero) or (isinstance(layer, Factor) and layer.filled)


def _fills(normalised: Normalised, layers: Sequence[Layer]) -> tuple[Expr, ...]:
    if normalised.zero_for_nan:
        return (Const(True),)
    if normalised.zero or any(isinstance(layer, EmptyIsZero) for layer in layers):
        return ()
    values = (layer.value for layer in layers if isinstance(layer, Factor) and layer.filled)
    return tuple(al.compare("ne", value, Const(0)) for value in values)


def _query_and_key(
    normalised: Normalised, key_axis: sympy.Symbol, space: Space
) -> tuple[Contract, Expr, Expr, Expr] | Refusal:
    """(the product of query and key, query, key, the score over the product)"""
    body = _joined_products(normalised.body, space)
    products = list(dict.fromkeys(ex.parts(body, Contract)))
    product = next((p for p in products if not any(p is not o and p in ex.walk(o) for o in products)), None)
    if product is None:
        return Refusal("the scores are not made from a matrix product", body)
    score = al.replaced(body, product, Score(product.dtype))
    left = next((part for part in ex.walk(score) if isinstance(part, (Contract, ex.Softmax, ex.Reduce))), None)
    match left:
        case Contract():
            return Refusal("the scores join more than one matrix product", left)
        case ex.Softmax():
            return Refusal("the scores pass through a second softmax", left)
        case ex.Reduce(name):
            return Refusal(f"the scores pass through {name} over an axis", left)
    with_key = [key_axis in index_symbols(side) for side in (product.a, product.b)]
    if with_key == [False, True]:
        query, key = product.a, product.b
    elif with_key == [True, False]:
        query, key = product.b, product.a
    else:
        return Refusal("not exactly one side of the score product runs over the keys", product)
    if not all(set(product.axes) <= index_symbols(side) for side in (query, key)):
        if all(space.sizes[axis] == 1 for axis in product.axes):
            advice = "leave it: fused kernels need a head_dim of at least 2"
            return Refusal("head_dim is 1: each score is a product of two numbers", product, advice)
        return Refusal("the score product does not sum over an axis of query and key", product)
    (query, of_query), (key, of_key) = _without_number(query), _without_number(key)
    if (number := of_query * of_key) != 1.0:
        score = al.replaced(score, Score(product.dtype), al.mul(Const(number), Score(product.dtype)))
    return product, query, key, score


def _without_number(side: Expr) -> tuple[Expr, float]:
    """(a query or key without constant factors, the product of the factors)"""
    match side:
        case ex.Mul(inner, Const(value)) if math.isfinite(value):
            rest, number = _without_number(inner)
            return rest, value * number
    return side, 1.0


def _without_widening(
    query: Expr, key: Expr, dtype: torch.dtype, leaf_dtypes: Mapping[int, torch.dtype]
) -> tuple[Expr, Expr, torch.dtype]:
    """(query, key, dtype of their product) without casts that widen both; kernels sum in at least float32 anyway."""
    match query, key:
        case ex.Cast(_, ex.Load(q) as narrow_query), ex.Cast(_, ex.Load(k) as narrow_key):
            narrow = leaf_dtypes[q]
            if narrow == leaf_dtypes[k] and dtype == torch.float32 and narrow in (torch.bfloat16, torch.float16):
                return narrow_query, narrow_key, narrow
    return query, key, dtype


# ---- merged axes


def _split_axes(whole: Draft, space: Space) -> Draft:
    """`whole` with merged axes split: an axis n read as n // c and n mod c becomes n = outer * c + inner."""
    for _ in range(_MOST_SPLITS):
        digit = next(_digits(whole), None)
        if digit is None:
            break
        axis, base = digit.args
        size = sympy.cancel(space.sizes[axis] / base)
        if sympy.denom(size) != 1:
            break
        outer, inner = space.fresh("o", size), space.fresh("o", base)
        whole = _substituted(whole, axis, (outer, inner), base, space)
    return whole


def _digits(whole: Draft) -> Iterator[sympy.Expr]:
    symbols = whole.symbols
    sink = () if whole.sink is None else (whole.sink,)
    for expr in (whole.query, whole.key, whole.value, whole.score, *sink, *whole.factors):
        for value in (value for load in ex.parts(expr, ex.Load) for value in load.index):
            for digit in sorted(value.atoms(FloorDiv, Mod), key=str):
                if digit.args[0] in symbols:
                    yield digit


def _substituted(
    whole: Draft, axis: sympy.Symbol, parts: tuple[sympy.Symbol, sympy.Symbol], base: sympy.Expr, space: Space
) -> Draft:
    by, split = {axis: parts[0] * base + parts[1]}, {axis: parts}

    def substituted(value: Any) -> Any:
        if isinstance(value, Expr):
            return al.substitute(value, by, space)
        if isinstance(value, tuple):
            return tuple(new for x in value for new in split.get(x, (substituted(x),)))
        return value

    return replace(whole, **{name: substituted(value) for name, value in vars(whole).items()})
