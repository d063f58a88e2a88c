"""Recognition on expressions built by hand: what programs seldom reach. tests/models/lookalikes.py has the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch

from attn_fuse.attention.attention import Attention, Refusal
from attn_fuse.attention.mask import Causal, DenseMask, KeyPadding, PositionMask, Window
from attn_fuse.expression import nodes as ex
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import (
    Const,
    Contract,
    Expr,
    Load,
    Mul,
    NonNegative,
    Reduce,
    Score,
    Select,
    Softmax,
    Unary,
)
from attn_fuse.lift.lift import Lifted
from attn_fuse.patterns import draft as draft_of
from attn_fuse.patterns import recognize as recognition
from attn_fuse.patterns.recognize import recognize
from attn_fuse.patterns.softmax import Normalised
from attn_fuse.torch_internals import FloorDiv, Mod

F32 = torch.float32
INF = math.inf


class Parts:
    """The symbols of an attention [2, 3, 5, 8] over 7 keys, and its pieces. `at`: the key that the value is read at."""

    def __init__(self) -> None:
        self.space = Space()
        self.b, self.h, self.i, self.d = (self.space.fresh("o", n) for n in (2, 3, 5, 8))
        self.j, self.at, self.r, self.m = (self.space.fresh("j", 7) for _ in range(4))
        self.e = self.space.fresh("e", 8)

    def product(self, key: Expr | None = None, query: Expr | None = None, at: sympy.Expr | None = None) -> Contract:
        query = query or Load(0, (self.b, self.h, self.i, self.e))
        return Contract((self.e,), query, key or Load(1, (self.b, self.h, at or self.j, self.e)), F32)

    def other(self) -> Contract:
        """Another product of the same shape."""
        return self.product(query=Load(3, (self.b, self.h, self.i, self.e)))

    def softmax(self, body: Expr, at: sympy.Expr | None = None) -> Softmax:
        return Softmax(self.j, body, self.at if at is None else at, F32)

    def out(self, weights: Expr, value: Expr | None = None) -> Contract:
        return Contract((self.at,), weights, value or Load(2, (self.b, self.h, self.at, self.d)), F32)

    def exp(self, at: sympy.Expr, less: Expr | None = None) -> Expr:
        body: Expr = self.product(at=at)
        return Unary("exp", body if less is None else ex.Add(body, -1 * less))

    def total(self, less: Expr | None = None) -> Reduce:
        return Reduce("sum", self.r, self.exp(self.r, less))

    def largest(self) -> Reduce:
        return Reduce("amax", self.m, self.product(at=self.m))

    def recognized(self, element: Expr) -> Attention | Refusal:
        return recognize(self.lifted(element))

    def lifted(self, element: Expr) -> Lifted:
        indices = (self.b, self.h, self.i, self.d)
        shape = tuple(self.space.sizes[s] for s in indices)
        return Lifted(element, indices, shape, F32, self.space, dict.fromkeys(range(4), F32), frozenset())


def test_the_plain_one() -> None:
    p = Parts()
    found = p.recognized(p.out(p.softmax(0.5 * p.product())))
    assert isinstance(found, Attention)
    assert found.axes.batch == (p.b,) and found.axes.kv_heads == (p.h,) and found.axes.groups == ()
    assert found.axes.query == (p.i,) and found.axes.key == (p.at,) and found.axes.inner == (p.e,)
    assert found.axes.value == (p.d,) and found.head_axes == (p.h,)
    assert found.scale == Const(0.5) and not found.mask.parts and not found.biases
    assert found.score == 0.5 * Score(F32) and found.score_mod is None and found.unread is None
    assert found.sink is None and found.factor is None and found.out_scale is None and found.dropout_p is None
    assert found.softcap is None and found.softmax_dtype == F32 and found.query_dtype == F32


def test_axes_of_grouped_queries() -> None:
    p = Parts()
    g = p.space.fresh("o", 4)
    query, key, value = (p.b, p.h, g, p.i, p.e), (p.b, p.h, p.j, p.e), (p.b, p.h, p.at, p.d)
    element = p.out(p.softmax(p.product(Load(1, key), Load(0, query))), Load(2, value))
    found = recognize(replace(p.lifted(element), indices=(p.b, p.h, g, p.i, p.d)))
    assert isinstance(found, Attention)
    assert (found.axes.kv_heads, found.axes.groups, found.axes.query) == ((p.h,), (g,), (p.i,))
    assert found.length(found.head_axes) == 12 and found.length(()) == 1


def test_keys_along_two_axes() -> None:
    p = Parts()
    j, at = p.space.fresh("j", 14), p.space.fresh("j", 14)
    key = Load(1, (p.b, p.h, FloorDiv(j, 7), Mod(j, 7), p.e))
    value = Load(2, (p.b, p.h, FloorDiv(at, 7), Mod(at, 7), p.d))
    weights = Softmax(j, Contract((p.e,), Load(0, (p.b, p.h, p.i, p.e)), key, F32), at, F32)
    found = p.recognized(Contract((at,), weights, value, F32))
    assert isinstance(found, Attention) and len(found.axes.key) == 2
    assert found.length(found.axes.key) == 14


def loaded(*indices: sympy.Expr) -> Expr:
    return ex.Compare("gt", Load(3, indices), Const(0))


def every_third(p: Parts) -> Expr:
    return ex.IsZero(Mod(p.i - p.j, 3))


MASKS = [
    (lambda p: NonNegative(p.i - p.j), Causal, "none"),
    (lambda p: NonNegative(p.j - p.i + 2), Window, "none"),
    (lambda p: loaded(p.b, p.j), KeyPadding, "nan"),
    (lambda p: loaded(p.b, p.i, p.j), DenseMask, "nan"),
    (every_third, PositionMask, "none"),
    # Whatever the tensor holds, query i sees key i.
    (lambda p: ex.Or(every_third(p), loaded(p.b, p.i, p.j)), DenseMask, "none"),
]


@pytest.mark.parametrize(("keep", "kind", "empty_rows"), MASKS)
def test_kinds_of_masks(keep, kind, empty_rows) -> None:
    p = Parts()
    found = p.recognized(p.out(p.softmax(Select(keep(p), p.product(), Const(-INF)))))
    assert isinstance(found, Attention) and [type(part) for part in found.mask.parts] == [kind]
    assert found.mask.empty_rows == empty_rows and found.score_mod is None


def test_structure_in_every_place_at_once() -> None:
    p = Parts()
    bias, factor, gate = Load(3, (p.h, p.i, p.j)), Load(3, (p.h, p.i, p.at)), Load(3, (p.b, p.h, p.i))
    capped = 20.0 * Unary("tanh", 0.05 * p.product())
    scores = Select(NonNegative(p.i - p.j), capped, Const(-INF))
    found = p.recognized(p.out(Mul(Mul(p.softmax(scores), factor), gate)))
    assert isinstance(found, Attention) and found.softcap == 20.0 and found.scale == Const(1.0) and found.mask.is_causal
    assert found.factor == factor and found.out_scale == gate
    found = p.recognized(p.out(ex.Dropout(p.softmax(ex.Add(p.product(), bias)), Const(0.25))))
    assert isinstance(found, Attention) and found.dropout_p == Const(0.25)
    assert found.biases == (Load(3, (p.h, p.i, p.at)),)


CANCELS = [
    (lambda p: Const(-1e4), "none", True),
    (lambda p: ex.Index(p.i), "none", True),
    (lambda p: Select(NonNegative(p.i - 2), Const(3.0), Const(-7.0)), "-inf", True),
    (lambda p: ex.Index(p.i - p.j), "none", False),
    (lambda p: Const(-1e4), "-1e9", False),
    (lambda p: Const(-1e4), "floor", False),
    (lambda p: Load(3, (p.b, p.i)), "none", False),
    (lambda p: ex.Div(Const(1.0), ex.Index(p.i)), "none", False),
]


@pytest.mark.parametrize(("term", "over", "cancels"), CANCELS)
def test_a_term_that_is_the_same_for_every_key_cancels(term, over, cancels) -> None:
    """Unless a finite fill or a floor stands beside it, it may be infinite, or it may need a gradient."""
    p = Parts()
    scores = ex.Add(p.product(), term(p))
    if over in ("-inf", "-1e9"):
        scores = Select(NonNegative(p.i - p.j), scores, Const(float(over)))
    elif over == "floor":
        scores = ex.Binary("maximum", scores, Const(-3e38))
    found = p.recognized(p.out(p.softmax(scores)))
    assert isinstance(found, Attention) and (not found.biases) == cancels


REFUSED: list[tuple[str, Callable[[Parts], Expr]]] = [
    (
        "the output is not a matrix product, or there is a single key",
        lambda p: ex.Add(p.out(p.softmax(p.product())), Const(1.0)),
    ),
    ("the output is not a product of weights and a value", lambda p: p.out(Load(0, (p.b, p.h, p.i, p.at)))),
    (
        "the output is not a product of weights and a value",
        lambda p: p.out(p.softmax(p.product()), p.softmax(p.product())),
    ),
    (
        "the output sums over several axes at once",
        lambda p: Contract((p.at, p.r), p.softmax(p.product()), Load(2, (p.b, p.h, p.at, p.r)), F32),
    ),
    (
        "the weights are not normalised by their own sum over the keys",
        lambda p: p.out(Unary("exp", p.softmax(p.product()))),
    ),
    ("the weights are not normalised by their own sum over the keys", lambda p: p.out(p.product(at=p.at))),
    (
        "the weights are not normalised by their own sum over the keys",
        lambda p: p.out(ex.Div(p.exp(p.at), Reduce("sum", p.r, Unary("exp", 2.0 * p.product(at=p.r))))),
    ),
    (
        "the weights are not normalised by their own sum over the keys",
        lambda p: p.out(ex.Div(p.exp(p.at), Reduce("amax", p.r, p.exp(p.r)))),
    ),
    (
        "the weights are zeroed by a condition on other scores",
        lambda p: p.out(Select(ex.Compare("eq", p.product(at=p.at), Const(-INF)), Const(0.0), p.softmax(p.other()))),
    ),
    (
        "the weights are zeroed by a condition on other scores",
        lambda p: p.out(
            Select(
                Reduce("all", p.r, ex.Compare("eq", p.product(at=p.r), Const(-INF))), Const(0.0), p.softmax(p.other())
            )
        ),
    ),
    ("the softmax runs over keys that have no value", lambda p: few_values(p, 5)),
    ("the softmax runs over a key that has no value", lambda p: few_values(p, 6)),
    (
        "a sink of 1e+08 is so large that torch.float32 keeps no digits of the scores beside it",
        lambda p: p.out(ex.Div(p.exp(p.at), ex.Add(p.total(), Unary("exp", Const(1e8))))),
    ),
    (
        "0.5 is added to the sum of the weights, which could change them",
        lambda p: p.out(ex.Div(p.exp(p.at, p.largest()), ex.Add(p.total(p.largest()), Const(0.5)))),
    ),
    (
        "the sum of the weights has another term for each key",
        lambda p: p.out(ex.Div(p.exp(p.at), ex.Add(p.total(), Unary("exp", Load(3, (p.at,)))))),
    ),
    (
        "not exactly one side of the score product runs over the keys",
        lambda p: p.out(p.softmax(Select(NonNegative(p.i - p.j), p.product(), p.other()))),
    ),
    (
        "not exactly one side of the score product runs over the keys",
        lambda p: p.out(p.softmax(p.product(query=Load(0, (p.b, p.h, p.j, p.e))))),
    ),
    (
        "the score product does not sum over an axis of query and key",
        lambda p: p.out(p.softmax(p.product(query=Load(0, (p.b, p.h, p.i, sympy.Integer(0)))))),
    ),
    ("there is a single key", lambda p: one_key_beside_a_sink(p)),
    (
        "the keys differ along an axis that neither query nor value has",
        lambda p: p.out(p.softmax(p.product(query=Load(0, (p.b, p.i, p.e)))), Load(2, (p.b, p.at, p.d))),
    ),
]


def few_values(p: Parts, count: int) -> Expr:
    """A softmax over 7 keys of which only the first `count` have a value."""
    at = p.space.fresh("j", count)
    return Contract((at,), p.softmax(p.product(), at=at), Load(2, (p.b, p.h, at, p.d)), F32)


def one_key_beside_a_sink(p: Parts) -> Expr:
    j, at = p.space.fresh("j", 2), p.space.fresh("j", 1)
    body = Select(NonNegative(-j), p.product(at=j), Load(3, (p.h,)))
    return Contract((at,), Softmax(j, body, at, F32), Load(2, (p.b, p.h, at, p.d)), F32)


def several_keys_alike(p: Parts) -> Expr:
    """Keys in pairs: two have the same key and each its own value."""
    j, at = p.space.fresh("j", 14), p.space.fresh("j", 14)
    key = Load(1, (p.b, p.h, FloorDiv(j, 2), p.e))
    weights = Softmax(j, Contract((p.e,), Load(0, (p.b, p.h, p.i, p.e)), key, F32), at, F32)
    return Contract((at,), weights, Load(2, (p.b, p.h, at, p.d)), F32)


def test_keys_that_share_a_key_or_a_value() -> None:
    p = Parts()
    assert isinstance(p.recognized(several_keys_alike(p)), Attention)
    found = p.recognized(p.out(p.softmax(p.product()), Load(2, (p.b, p.h, sympy.Integer(0), p.d))))
    assert isinstance(found, Attention) and found.axes.value == (p.d,)


@pytest.mark.parametrize(("reason", "element"), REFUSED, ids=[f"{n} {case[0]}" for n, case in enumerate(REFUSED)])
def test_refused(reason: str, element: Callable[[Parts], Expr]) -> None:
    p = Parts()
    found = p.recognized(element(p))
    assert isinstance(found, Refusal) and found.reason == reason


def test_a_query_that_differs_from_key_to_key() -> None:
    p = Parts()
    whole = draft_of.draft(p.lifted(p.out(p.softmax(p.product()))))
    assert isinstance(whole, draft_of.Draft)
    found = recognition._axes(replace(whole, query=Load(0, (p.b, p.h, p.i, p.at, p.e))))
    assert found == Refusal("the query differs from key to key")


def test_scores_without_a_product() -> None:
    p = Parts()
    found = draft_of._query_and_key(Normalised(Load(0, (p.b, p.h, p.i, p.at)), None, F32), p.at, p.space)
    assert found == Refusal("the scores are not made from a matrix product")


# ---- scores that are read as one function


def filled(p: Parts, score: Expr, fill: float) -> Expr:
    return Select(NonNegative(p.i - p.j), score, Const(fill))


def test_scores_scaled_by_nan_are_read_as_one_function() -> None:
    p = Parts()
    found = p.recognized(p.out(p.softmax(Mul(p.product(), Const(math.nan)))))
    assert isinstance(found, Attention) and found.unread.reason == "the scores are scaled by nan"
    # The whole of it, over the product at the key that the value is read at.
    assert Score(F32) in set(ex.walk(found.score)) and not any(isinstance(x, Contract) for x in ex.walk(found.score))
    assert p.j not in ex.index_symbols(found.score)


def test_what_is_read_of_a_function_stays_structure() -> None:
    p = Parts()
    found = p.recognized(p.out(p.softmax(filled(p, 2.0 * Unary("tanh", p.product()), -INF))))
    assert isinstance(found, Attention) and found.mask.is_causal and found.unread is None and found.softcap == 2.0
    found = p.recognized(p.out(p.softmax(filled(p, 2.0 * Unary("sin", p.product()), -INF))))
    assert isinstance(found, Attention) and found.mask.is_causal and found.scale == Const(2.0)
    assert found.score_mod == Unary("sin", Score(F32)) and found.unread.reason == "the scores pass through sin"
