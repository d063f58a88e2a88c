"""Draft: an element expression taken apart into query, key, value, score and weights, before its axes have roles.

The product with the value comes off first, then the layers of the weights, the softmax, and the product of query and
key. Everything between the softmax and that product is kept whole, as an expression over `Score`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
from attn_fuse.patterns.layer import DropoutLayer, EmptyIsZero, Factor, Layer, peel
from attn_fuse.patterns.softmax import LONGER, Normalised, softmax
from attn_fuse.torch_internals import FloorDiv, Mod

# The max number of axes to split: more than any layout merges. With symbolic sizes, a digit may survive its split.
_MOST_SPLITS = 8


@dataclass(frozen=True)
class Draft:
    """An attention over index symbols that have no roles yet. Fields are those of `Attention`, except for these.

    factors: the factors of the weights. empty_is_zero: whether the program sets the weights of a fully masked row to 0.
    fills: the conditions outside which it does so; none where it sets all of them.
    key_axes, inner_axes: the axes that the product with the value, and that of query and key, sum over.
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
        """The index symbols of the output and of the sums of both products."""
        return {s for dim in self.output for s in dim} | {*self.key_axes, *self.inner_axes}


def draft(lifted: Lifted) -> Draft | Refusal:
    """The draft of the attention that `lifted` is an element of, with merged axes split; a Refusal where it is none."""
    space = lifted.space
    product, divided_by = _output_product(_joined_output(lifted.element, space))
    if product is None:
        return Refusal("the output is not a matrix product, or there is a single key", lifted.element)
    weights, value = _weights_and_value(product)
    if weights is None or value is None:
        return Refusal("the output is not a product of weights and a value", product)
    if len(product.axes) != 1:
        return Refusal("the output sums over several axes at once", product)
    (key,) = product.axes
    if divided_by is not None:
        weights = ex.Div(weights, divided_by)
    peeled = peel(weights, WEIGHT_LAYERS)
    if peeled.refusal is not None:
        return peeled.refusal
    layers = [layer for layer, _ in peeled.found]
    normalised = softmax(peeled.rest, key, space, lifted.numbers)
    if isinstance(normalised, Refusal):
        return normalised.at(peeled.rest)
    unsure = _wrong_guard(layers, normalised.body, key, space)
    if unsure is not None:
        return unsure
    parts = _query_and_key(normalised, key, space)
    if isinstance(parts, Refusal):
        return parts
    score_product, query, operand, score = parts
    if 1 in infinities(score):
        return Refusal("some scores are plus infinity, whose weight is no number", normalised.body)
    query, operand, query_dtype = _without_widening(query, operand, score_product.dtype, lifted.leaf_dtypes)
    drops = [layer.p for layer in layers if isinstance(layer, DropoutLayer)]
    if len(drops) > 1:
        return Refusal("the weights pass through dropout twice", weights)
    if (dropped := next((part for part in ex.walk(score) if isinstance(part, ex.Dropout)), None)) is not None:
        return Refusal("the scores pass through dropout before the softmax", dropped)
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
    """(the product with the value, the divisor after it that is computed from the scores), each None without one."""
    divided_by = None
    while True:
        match element:
            case ex.Cast(dtype, inner) if dtype.is_floating_point:
                element = inner
            case ex.Div(inner, total) if divided_by is None and ex.has_product(total):
                element, divided_by = inner, total
            case Contract():
                return element, divided_by
            case _:
                return None, None


def _joined_output(element: Expr, space: Space) -> Expr:
    """`element` with a sum of two products, each over a part of the keys, as one product over all keys."""
    match element:
        case ex.Add(Contract((first,), a, b, dtype), Contract((second,), c, d, _)):
            pass
        case _:
            return element
    parts = []
    for axis, sides in ((first, (a, b)), (second, (c, d))):
        weights = next((x for side in sides for x in ex.walk(side) if isinstance(x, ex.Softmax)), None)
        if weights is None or axis not in weights.at.free_symbols:
            return element
        parts.append((axis, sides, sympy.expand(weights.at - axis)))
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
    """`x` with each choice between two products that share an operand (a query, cached or new keys) as one product."""
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


def _weights_and_value(product: Contract) -> tuple[Expr | None, Expr | None]:
    sides = [product.a, product.b]
    match [ex.has_product(side) for side in sides]:
        case [True, False]:
            return product.a, product.b
        case [False, True]:
            return product.b, product.a
    return None, None


def _wrong_guard(layers: Iterable[Layer], body: Expr, key: sympy.Symbol, space: Space) -> Refusal | None:
    """A Refusal where a guard asks about other scores than those of the softmax, or hides a NaN; else None.

    A fill of the weights guards them, too: as written it replaces NaN, where multiplying by a factor does not.
    """
    for layer in layers:
        match layer:
            case EmptyIsZero(None, _):
                continue
            case EmptyIsZero(scores, axis) if scores is not None:
                asked = scores if axis is None else al.substitute(scores, {axis: key}, space)
                if asked != body:
                    return Refusal("the weights are set to zero by what other scores are", asked)
    if any(map(_makes_zero, layers)) and may_be_no_number(body):
        return Refusal(
            "the weights are guarded or filled where a score may be infinity times zero, which makes its row no number",
            body,
        )
    return None


def _makes_zero(layer: Layer) -> bool:
    """Whether `layer` puts 0 in the place of a weight that is NaN."""
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
    products = list(dict.fromkeys(part for part in ex.walk(body) if isinstance(part, Contract)))
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
            advice = "leave it as it is: fused kernels sum over a head_dim of 2 and more"
            return Refusal("head_dim is 1: each score is a product of two numbers", product, advice)
        return Refusal("the score product does not sum over an axis of query and key", product)
    query, key, number = _without_numbers(query, key)
    if number != 1.0:
        score = al.replaced(score, Score(product.dtype), al.mul(Const(number), Score(product.dtype)))
    return product, query, key, score


def _without_numbers(query: Expr, key: Expr) -> tuple[Expr, Expr, float]:
    """(query, key, the product of the constant factors taken off both)"""
    number = 1.0

    def pulled(side: Expr) -> Expr:
        nonlocal number
        match side:
            case ex.Mul(inner, Const(value)) if math.isfinite(value):
                number *= value
                return pulled(inner)
        return side

    return pulled(query), pulled(key), number


def _without_widening(
    query: Expr, key: Expr, dtype: torch.dtype, leaf_dtypes: Mapping[int, torch.dtype]
) -> tuple[Expr, Expr, torch.dtype]:
    """(query, key, dtype of their product) without casts that only widen both: kernels sum in at least float32."""
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
    for expr in _expressions(whole):
        for part in ex.walk(expr):
            for value in part.index if isinstance(part, ex.Load) else ():
                for digit in sorted(value.atoms(FloorDiv, Mod), key=str):
                    if digit.args[0] in symbols:
                        yield digit


def _expressions(whole: Draft) -> Iterator[Expr]:
    yield from (whole.query, whole.key, whole.value, whole.score)
    if whole.sink is not None:
        yield whole.sink
    yield from whole.factors


def _substituted(
    whole: Draft, axis: sympy.Symbol, parts: tuple[sympy.Symbol, sympy.Symbol], base: sympy.Expr, space: Space
) -> Draft:
    by = {axis: parts[0] * base + parts[1]}

    def split(symbols: tuple[sympy.Symbol, ...]) -> tuple[sympy.Symbol, ...]:
        return tuple(p for s in symbols for p in (parts if s == axis else (s,)))

    changed: dict[str, Any] = {}
    for f in fields(whole):
        value = getattr(whole, f.name)
        if isinstance(value, Expr) and f.name != "dropout_p":
            changed[f.name] = al.substitute(value, by, space)
    return replace(
        whole,
        **changed,
        factors=tuple(al.substitute(x, by, space) for x in whole.factors),
        fills=tuple(al.substitute(x, by, space) for x in whole.fills),
        output=tuple(map(split, whole.output)),
        key_axes=split(whole.key_axes),
        inner_axes=split(whole.inner_axes),
    )
