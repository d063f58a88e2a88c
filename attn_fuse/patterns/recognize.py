"""Recognise: an element expression becomes an Attention, or a Refusal that says why it is none.

draft.py takes the expression apart from the outside. The axes get their roles from which index symbol occurs where,
never from sizes. The layers of the scores are read as structure as far as patterns know them.
"""

from __future__ import annotations

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
from attn_fuse.patterns.heads import MIXED, mixes_heads
from attn_fuse.patterns.layer import peel

# The max size of an expression, in nodes, whose refusal is looked into once more.
_MOST_NODES = 4000


def recognize(lifted: Lifted) -> Attention | Refusal:
    """The attention that `lifted` is an element of; a Refusal where it is none."""
    found = _recognized(lifted)
    if isinstance(found, Attention) or ex.size(lifted.element) > _MOST_NODES:
        return found
    # What blocks then is a detail of the mixing, which its name says better.
    return MIXED.at(found.node) if mixes_heads(lifted.element, lifted.batch_of) else found


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
        # A bias that is read from memory may hide every key by minus infinity.
        mask = replace(mask, empty_rows="zero")
    return replace(found, mask=mask, factor=factor, out_scale=out_scale, zero_for_nan=zero_for_nan)


def _fills_whole_rows(fills: tuple[Expr, ...], mask: Mask) -> bool:
    """Whether every weight of a fully masked row is filled with 0; True without a fill."""
    hidden = {part.keep for part in mask.parts}
    return not fills or (bool(hidden) and any(hidden <= set(conjuncts(cond)) for cond in fills))


# ---- the scores as structure


def _structured(found: Attention, lifted: Lifted) -> Attention:
    """`found` with its scores read as structure, as far as patterns know their layers; else as one `score_mod`."""
    layers, key = peel(found.score, SCORE_LAYERS), found.axes.key
    folded = fold(layers.found, key, lifted.space, lifted.learned)
    if isinstance(folded, Refusal):
        return replace(found, score_mod=found.score, unread=folded.at(found.score))
    if found.sink is None:
        folded = without_shift(folded, key, lifted)
    read = mask_and_biases(folded, layers.rest, found.axes, lifted)
    if isinstance(read, Refusal):
        return replace(found, score_mod=found.score, unread=read.at(found.score))
    mask, biases = read
    found = replace(found, scale=folded.scale, softcap=folded.softcap, mask=mask, biases=biases)
    if isinstance(layers.rest, Score):
        return found
    unknown = Refusal(f"the scores pass through {_word(layers.rest)}", layers.rest)
    return replace(found, score_mod=layers.rest, unread=layers.refusal or unknown)


def _factors(whole: Draft, axes: Axes, mask: Mask) -> tuple[Expr | None, Expr | None]:
    """(the factor of the weights that differs from key to key, the factor that does not), each None without one"""
    hidden = {part.keep for part in mask.parts}
    factor: Expr | None = None
    out_scale: Expr | None = None
    for value in whole.factors:
        match value:
            # The mask once more: hidden weights are 0 already. A fully masked row, NaN or filled with 0, may be 0.
            case ex.Select(cond, Const(1 | 1.0), Const(0 | 0.0)) if (
                hidden and set(conjuncts(cond)) <= hidden and mask.empty_rows in ("none", "nan")
            ):
                continue
        if index_symbols(value) & set(axes.key):
            factor = value if factor is None else al.mul(factor, value)
        else:
            out_scale = value if out_scale is None else al.mul(out_scale, value)
    return factor, out_scale


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
    # The symbols in the output dimension of `last` are positions, less those that the scores treat alike, like heads.
    home = [s for dim in whole.output if last in dim for s in dim if s in rows]
    told_apart = [s for s in home if s in (compared or index_symbols(whole.score))]
    query = tuple(told_apart or home)
    # Of several shared axes the last is that of the heads; a single one is too, behind a batch of 1 or in one dimension
    # with the features, unless queries are grouped: kernels find their heads by one step, from a key head to a group.
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
    """Whether query, key or value lies in a tensor with `axis` and its features in one dimension, as projections do."""
    features = {*whole.inner_axes} | {s for s in index_symbols(whole.value) if s not in whole.key_axes}
    features -= index_symbols(whole.query) & index_symbols(whole.value)
    loads = (part for side in (whole.query, whole.key, whole.value) for part in ex.walk(side))
    return any(
        axis in place.free_symbols and place.free_symbols & features - {axis}
        for load in loads
        if isinstance(load, ex.Load)
        for place in load.index
    )


def _is_compared(score: Expr, row: sympy.Symbol, key_axes: tuple[sympy.Symbol, ...]) -> bool:
    """Whether a mask in `score` compares the position along `row` with that of the key."""
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
