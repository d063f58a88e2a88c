"""Recognise: an element expression becomes an Attention, or a Refusal with the reason.

draft.py takes the expression apart from the outside. Axes get their roles from the places where their index symbols
occur, never from sizes. Patterns read the layers of the scores as structure; unknown functions become a `score_mod`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

import sympy

from attn_fuse.attention.attention import Attention, Refusal
from attn_fuse.attention.axes import Axes
from attn_fuse.attention.mask import Mask, conjuncts
from attn_fuse.expression import nodes as ex
from attn_fuse.expression import simplify as al
from attn_fuse.expression.nodes import Const, Expr, Score, index_symbols
from attn_fuse.lift.lift import Lifted
from attn_fuse.patterns import SCORE_LAYERS
from attn_fuse.patterns.draft import Draft, draft
from attn_fuse.patterns.fold import fold, mask_and_biases, without_shift
from attn_fuse.patterns.layer import peel

_MIXED = Refusal(
    "heads are mixed (talking heads)",
    advice="no kernel takes mixed heads: keep it, or attend with each head by itself",
)
# Max nodes of a refused expression that is searched for mixed heads.
_MOST_NODES = 4000


def recognize(lifted: Lifted) -> Attention | Refusal:
    """The attention that `lifted` is an element of, or a Refusal."""
    found = _recognized(lifted)
    if isinstance(found, Attention) or ex.size(lifted.element) > _MOST_NODES:
        return found
    # The name of the mixing says more than the detail that blocks.
    return _MIXED.at(found.node) if _mixes_heads(lifted.element, lifted.batch_of) else found


def _recognized(lifted: Lifted) -> Attention | Refusal:
    whole = draft(lifted)
    if isinstance(whole, Refusal):
        return whole
    axes = _axes(whole)
    if isinstance(axes, Refusal):
        return axes
    found = Attention(
        axes=axes,
        space=lifted.space,
        query=whole.query,
        key=whole.key,
        value=whole.value,
        score=whole.score,
        query_dtype=whole.query_dtype,
        value_dtype=whole.value_dtype,
        softmax_dtype=whole.softmax_dtype,
        output=whole.output,
        sink=whole.sink,
        dropout_p=whole.dropout_p,
    )
    found = _structured(found, lifted)
    mask = found.mask
    factor, out_scale = _factors(whole, axes, mask)
    zero_for_nan = mask.empty_rows != "mean" and not _fills_whole_rows(whole.fills, mask)
    if whole.empty_is_zero and mask.empty_rows == "nan":
        mask = Mask(mask.parts, "zero")
    elif whole.empty_is_zero and mask.empty_rows == "none":
        # A bias from memory may hide every key by minus infinity.
        mask = replace(mask, empty_rows="zero")
    return replace(found, mask=mask, factor=factor, out_scale=out_scale, zero_for_nan=zero_for_nan)


def _fills_whole_rows(fills: tuple[Expr, ...], mask: Mask) -> bool:
    """Whether fills set every weight of a fully masked row to 0; True without fills."""
    hidden = {part.keep for part in mask.parts}
    return not fills or (bool(hidden) and any(hidden <= set(conjuncts(cond)) for cond in fills))


# ---- the scores as structure


def _structured(found: Attention, lifted: Lifted) -> Attention:
    """`found` with its scores as structure if patterns know their layers, else as one `score_mod`."""
    (layers, rest, refusal), key = peel(found.score, SCORE_LAYERS), found.axes.key
    folded = fold(layers, key, lifted.space, lifted.learned)
    if isinstance(folded, Refusal):
        return replace(found, score_mod=found.score, unread=folded.at(found.score))
    if found.sink is None:
        folded = without_shift(folded, key, lifted)
    read = mask_and_biases(folded, rest, found.axes, lifted)
    if isinstance(read, Refusal):
        return replace(found, score_mod=found.score, unread=read.at(found.score))
    mask, biases = read
    found = replace(found, scale=folded.scale, softcap=folded.softcap, mask=mask, biases=biases)
    if isinstance(rest, Score):
        return found
    unknown = Refusal(f"the scores pass through {_word(rest)}", rest)
    return replace(found, score_mod=rest, unread=refusal or unknown)


def _factors(whole: Draft, axes: Axes, mask: Mask) -> tuple[Expr | None, Expr | None]:
    """(the factor of the weights that depends on the key, the factor that does not), each None without one"""
    hidden = {part.keep for part in mask.parts}
    factor: Expr | None = None
    out_scale: Expr | None = None
    for value in whole.factors:
        match value:
            # The mask once more: hidden weights are 0 already. A fully masked row, NaN or filled with 0, may become 0.
            case ex.Select(cond, Const(1 | 1.0), Const(0 | 0.0)) if (
                hidden and set(conjuncts(cond)) <= hidden and mask.empty_rows in ("none", "nan")
            ):
                continue
        if index_symbols(value) & set(axes.key):
            factor = value if factor is None else al.mul(factor, value)
        else:
            out_scale = value if out_scale is None else al.mul(out_scale, value)
    return factor, out_scale


# ---- mixed heads, which only name the reason for an expression that is refused anyway


def _mixes_heads(element: Expr, batch_of: Mapping[int, Set[int]]) -> bool:
    """Whether a product in `element` sums scores or weights over an axis that their query and key share.

    batch_of: the batch dimensions of each leaf that is a matrix product.
    """
    products = (product for product in ex.parts(element, ex.Contract) if ex.parts(product, ex.Softmax))
    return any(map(_sums_weights, products)) or any(_sums_scores(x, batch_of) for x in ex.parts(element, ex.Softmax))


def _sums_weights(product: ex.Contract) -> bool:
    """Whether the weights are summed over an axis of both query and key, other than that of the keys."""
    softmaxes = ex.parts(product, ex.Softmax)
    summed = set(product.axes) - {symbol for softmax in softmaxes for symbol in softmax.at.free_symbols}
    scores = [score for softmax in softmaxes for score in ex.parts(softmax.body, ex.Contract)]
    return any(summed & index_symbols(score.a) & index_symbols(score.b) for score in scores)


def _sums_scores(softmax: ex.Softmax, batch_of: Mapping[int, Set[int]]) -> bool:
    """Whether a product in the softmax sums over the heads of a factor with the keys, itself a matrix product."""
    for product in ex.parts(softmax.body, ex.Contract):
        for load in ex.parts(product, ex.Load):
            if load.leaf in batch_of and softmax.axis in index_symbols(load):
                summed = {n for n, place in enumerate(load.index) if place.free_symbols & set(product.axes)}
                if summed and summed <= batch_of[load.leaf]:
                    return True
    return False


# ---- axes


def _axes(whole: Draft) -> Axes | Refusal:
    in_query, in_key, in_value = (index_symbols(side) for side in (whole.query, whole.key, whole.value))
    shared: list[sympy.Symbol] = []
    rows: list[sympy.Symbol] = []
    values: list[sympy.Symbol] = []
    for symbol in (s for dim in whole.output for s in dim):
        match (symbol in in_query, symbol in in_key, symbol in in_value):
            case (True, False, False):
                rows.append(symbol)
            case (False, False, True):
                values.append(symbol)
            case (False, True, False):
                return Refusal("the keys differ along an axis that neither query nor value has", whole.key)
            case _:
                shared.append(symbol)
    if set(whole.key_axes) & in_query:
        return Refusal("the query differs from key to key", whole.query)
    compared = [s for s in rows if _is_compared(whole.score, s, whole.key_axes)]
    last = (compared or rows or [None])[-1]
    # The symbols in the output dimension of `last` are positions, except those that no score depends on, such as heads.
    home = [s for dim in whole.output if last in dim for s in dim if s in rows]
    told_apart = [s for s in home if s in (compared or index_symbols(whole.score))]
    query = tuple(told_apart or home)
    # The last of several shared axes is that of the heads. So is a single one behind a batch of 1, or in one dimension
    # with the features unless queries are grouped: kernels step from a key head to its group of heads by one stride.
    first_is_one = bool(whole.output) and not whole.output[0]
    packed = set(rows) <= set(query) and any(_is_packed(whole, axis) for axis in shared)
    heads = shared[-1:] if len(shared) > 1 or first_is_one or packed else []
    return Axes(
        batch=tuple(shared[: len(shared) - len(heads)]),
        kv_heads=tuple(heads),
        groups=tuple(s for s in rows if s not in query),
        query=query,
        key=whole.key_axes,
        inner=whole.inner_axes,
        value=tuple(values),
    )


def _is_packed(whole: Draft, axis: sympy.Symbol) -> bool:
    """Whether one dimension of a query, key or value tensor holds `axis` and the features, as projections do."""
    features = {*whole.inner_axes} | {s for s in index_symbols(whole.value) if s not in whole.key_axes}
    features -= index_symbols(whole.query) & index_symbols(whole.value)
    loads = (load for side in (whole.query, whole.key, whole.value) for load in ex.parts(side, ex.Load))
    places = (place.free_symbols for load in loads for place in load.index)
    return any(axis in symbols and symbols & features - {axis} for symbols in places)


def _is_compared(score: Expr, row: sympy.Symbol, key_axes: tuple[sympy.Symbol, ...]) -> bool:
    """Whether a mask in `score` compares the positions along `row` and of the key."""
    return any(
        isinstance(part, (ex.NonNegative, ex.IsZero)) and row in part.value.free_symbols
        and part.value.free_symbols & set(key_axes)
        for part in ex.walk(score)
    )  # fmt: skip


_WORDS = {
    ex.Mul: "a product", ex.Add: "a sum", ex.Div: "a quotient", ex.Select: "a choice", ex.Load: "a tensor",
    ex.Cast: "a cast to whole numbers", ex.Compare: "a comparison", Const: "a number",
}  # fmt: skip


def _word(expr: Expr) -> str:
    if isinstance(expr, (ex.Unary, ex.Binary)):
        return expr.name
    return _WORDS.get(type(expr), type(expr).__name__)
