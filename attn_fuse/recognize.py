"""Recognise: an element expression becomes an Attention, or a Refusal that says what it is instead.

The expression is taken apart from the outside: the product with the value, the layers of the weights, the softmax, the
layers of the scores, the product of query and key. What remains are the axes, and these follow from which index symbol
occurs where, never from sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import sympy
import torch

from attn_fuse import expression as ex
from attn_fuse.attention import Attention, Axes, Refusal
from attn_fuse.expression import Const, Contract, Expr, Softmax, index_symbols
from attn_fuse.fold import fold, mask_and_biases
from attn_fuse.lift import Lifted
from attn_fuse.patterns import SCORE_LAYERS, WEIGHT_LAYERS
from attn_fuse.patterns.layer import Drop, Layer
from attn_fuse.torch_internals import FloorDiv, Mod

# More than any layout merges; symbolic sizes can keep a digit from coming apart, and then from ever going away.
_MOST_SPLITS = 6


def recognize(lifted: Lifted) -> Attention | Refusal:
    """The attention that `lifted` is an element of."""
    space = lifted.space
    element, output = _split_axes(lifted)
    while isinstance(element, ex.Cast) and element.dtype.is_floating_point:
        element = element.x
    if not isinstance(element, Contract):
        return Refusal("the output is not a matrix product")
    weights, value = _weights_and_value(element)
    if weights is None or value is None:
        return Refusal("the output is not a product of weights and a value")

    drops = _peel(weights, WEIGHT_LAYERS, "weights")
    if isinstance(drops, Refusal):
        return drops
    softmax, weight_layers = drops
    if not isinstance(softmax, Softmax):
        return Refusal(f"the weights pass through {_word(softmax)}")
    key_axis = element.axis
    if softmax.at != key_axis or not space.same_size(space.sizes[softmax.axis], space.sizes[key_axis]):
        return Refusal("the softmax runs over another axis than the one that the value is summed over")
    body = ex.substitute(softmax.body, {softmax.axis: key_axis}, space)

    peeled = _peel(body, SCORE_LAYERS, "scores")
    if isinstance(peeled, Refusal):
        return peeled
    product, score_layers = peeled
    if not isinstance(product, Contract):
        return Refusal(f"the scores pass through {_word(product)}")
    scores = fold(score_layers, key_axis)
    if isinstance(scores, Refusal):
        return scores
    pair = _query_and_key(product, key_axis)
    if isinstance(pair, Refusal):
        return pair
    query, key, scale = _pull_scale(*pair, scores.scale)
    query, key, query_dtype = _without_widening(query, key, product.dtype, lifted.leaf_dtypes)

    if key_axis not in index_symbols(value):
        return Refusal("there is a single key, or the value is the same for every key")
    axes = _axes(output, query, key, value, product.axis, key_axis, [f.keep for f in scores.fills])
    if isinstance(axes, Refusal):
        return axes
    masked = mask_and_biases(scores, axes, space)
    if isinstance(masked, Refusal):
        return masked
    mask, biases = masked
    probabilities = [layer.p for layer in weight_layers if isinstance(layer, Drop)]
    if len(probabilities) > 1:
        return Refusal("the weights pass through dropout twice")
    return Attention(
        axes=axes,
        space=space,
        query=query,
        key=key,
        value=value,
        scale=scale,
        mask=mask,
        biases=biases,
        dropout_p=probabilities[0] if probabilities else None,
        query_dtype=query_dtype,
        value_dtype=element.dtype,
        softmax_dtype=softmax.dtype,
        output=output,
    )


def _split_axes(lifted: Lifted) -> tuple[Expr, tuple[tuple[sympy.Symbol, ...], ...]]:
    """The element with merged axes taken apart, and the symbols that each output dimension is then made of.

    An axis n that is read as n // c and n mod c is two axes: n = outer * c + inner.
    """
    element, space = lifted.element, lifted.space
    output: list[tuple[sympy.Symbol, ...]] = [tuple(i.free_symbols) for i in lifted.indices]
    for _ in range(_MOST_SPLITS):
        digit = next(_digits(element, {s for dim in output for s in dim}), None)
        if digit is None:
            break
        axis, base = digit.args
        size = sympy.cancel(space.sizes[axis] / base)
        if sympy.denom(size) != 1:
            break
        outer, inner = space.fresh("o", size), space.fresh("o", base)
        element = ex.substitute(element, {axis: outer * base + inner}, space)
        output = [tuple(part for s in dim for part in ((outer, inner) if s == axis else (s,))) for dim in output]
    return element, tuple(output)


def _digits(element: Expr, axes: set[sympy.Symbol]) -> Iterator[sympy.Expr]:
    for part in ex.walk(element):
        values = part.index if isinstance(part, ex.Load) else ()
        for value in values:
            for digit in sorted(value.atoms(FloorDiv, Mod), key=str):
                if digit.args[0] in axes:
                    yield digit


def _weights_and_value(product: Contract) -> tuple[Expr | None, Expr | None]:
    sides = [product.a, product.b]
    weighing = [any(isinstance(e, Softmax) for e in ex.walk(side)) for side in sides]
    if weighing == [True, False]:
        return product.a, product.b
    if weighing == [False, True]:
        return product.b, product.a
    return None, None


def _peel(scores: Expr, patterns: Iterable, what: str) -> tuple[Expr, list[Layer]] | Refusal:
    """What lies beneath every layer that a pattern knows, and the layers, outermost first."""
    layers: list[Layer] = []
    while True:
        for pattern in patterns:
            answer = pattern(scores)
            if isinstance(answer, Refusal):
                return answer
            if answer is not None:
                scores = answer.inner
                layers.append(answer.layer)
                break
        else:
            return scores, layers


def _query_and_key(product: Contract, key_axis: sympy.Symbol) -> tuple[Expr, Expr] | Refusal:
    with_key = [key_axis in index_symbols(side) for side in (product.a, product.b)]
    if with_key == [False, True]:
        query, key = product.a, product.b
    elif with_key == [True, False]:
        query, key = product.b, product.a
    else:
        return Refusal("not exactly one side of the score product runs over the keys")
    if any(ex.has_product(side) for side in (query, key)):
        return Refusal("query or key is itself a product")
    if not all(product.axis in index_symbols(side) for side in (query, key)):
        return Refusal("the score product does not sum over an axis of query and key")
    return query, key


def _pull_scale(query: Expr, key: Expr, scale: Expr) -> tuple[Expr, Expr, Expr]:
    """Numbers that query or key are multiplied with become part of the scale."""

    def pulled(side: Expr) -> tuple[Expr, Expr]:
        match side:
            case ex.Mul(Const() as number, inner) | ex.Mul(inner, Const() as number) if math.isfinite(number.value):
                return inner, number
        return side, Const(1.0)

    query, a = pulled(query)
    key, b = pulled(key)
    return query, key, ex.mul(ex.mul(scale, a), b)


def _without_widening(
    query: Expr, key: Expr, dtype: torch.dtype, leaf_dtypes: Mapping[int, torch.dtype]
) -> tuple[Expr, Expr, torch.dtype]:
    """Query and key without a cast that only widens them: products are summed in at least fp32 anyway."""
    match query, key:
        case ex.Cast(_, ex.Load(q) as narrow_query), ex.Cast(_, ex.Load(k) as narrow_key):
            narrow = leaf_dtypes[q]
            if narrow == leaf_dtypes[k] and dtype == torch.float32 and narrow in (torch.bfloat16, torch.float16):
                return narrow_query, narrow_key, narrow
    return query, key, dtype


def _axes(
    output: tuple[tuple[sympy.Symbol, ...], ...],
    query: Expr,
    key: Expr,
    value: Expr,
    inner: sympy.Symbol,
    key_axis: sympy.Symbol,
    keeps: list[Expr],
) -> Axes | Refusal:
    in_query, in_key, in_value = (index_symbols(side) for side in (query, key, value))
    shared: list[sympy.Symbol] = []
    rows: list[sympy.Symbol] = []
    values: list[sympy.Symbol] = []
    for symbol in (s for dim in output for s in dim):
        where = (symbol in in_query, symbol in in_key, symbol in in_value)
        if where == (True, False, False):
            rows.append(symbol)
        elif where == (False, False, True):
            values.append(symbol)
        elif where == (False, True, False):
            return Refusal("the keys differ along an axis that neither query nor value has")
        else:
            shared.append(symbol)
    if len(values) > 1:
        return Refusal("the value has more than one dimension of its own")
    compared = [s for s in rows if any(_compares(keep, s, key_axis) for keep in keeps)]
    position = (compared or rows or [None])[-1]
    # Of several shared axes the last are the heads; a single one is, where a batch of 1 stands before it.
    first_is_one = bool(output) and not output[0]
    heads = shared[-1:] if len(shared) > 1 or first_is_one else []
    return Axes(
        batch=tuple(shared[: len(shared) - len(heads)]),
        kv_heads=tuple(heads),
        groups=tuple(s for s in rows if s is not position),
        query=position,
        key=key_axis,
        inner=inner,
        value=values[0] if values else None,
    )


def _compares(keep: Expr, row: sympy.Symbol, key_axis: sympy.Symbol) -> bool:
    return any(
        isinstance(part, (ex.NonNegative, ex.IsZero)) and {row, key_axis} <= part.value.free_symbols
        for part in ex.walk(keep)
    )


_WORDS = {
    ex.Mul: "a product", ex.Add: "a sum", ex.Div: "a quotient", ex.Select: "a choice", ex.Load: "a tensor",
    ex.Softmax: "a second softmax", ex.Dropout: "dropout before the softmax", ex.Cast: "a cast to whole numbers",
    ex.Compare: "a comparison", Const: "a number", Contract: "a matrix product",
}  # fmt: skip


def _word(expr: Expr) -> str:
    if isinstance(expr, (ex.Unary, ex.Binary)):
        return expr.name
    return _WORDS.get(type(expr), type(expr).__name__)
