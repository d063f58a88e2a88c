"""Recognition on element expressions built by hand: what programs seldom reach is refused with its reason, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch

from attn_fuse import expression as ex
from attn_fuse.attention import Attention, Refusal
from attn_fuse.expression import Const, Contract, Expr, Load, Softmax
from attn_fuse.lift import Lifted
from attn_fuse.recognize import recognize
from attn_fuse.space import Space

F32 = torch.float32


class Parts:
    """The symbols of an attention [2, 3, 5, 8] over 7 keys, and its pieces."""

    def __init__(self) -> None:
        self.space = Space()
        self.b, self.h, self.i, self.d = (self.space.fresh("o", n) for n in (2, 3, 5, 8))
        self.j, self.at, self.e = (self.space.fresh(n, s) for n, s in (("j", 7), ("j", 7), ("e", 8)))

    def product(self, key: Expr | None = None, query: Expr | None = None) -> Contract:
        query = query or Load(0, (self.b, self.h, self.i, self.e))
        return Contract(self.e, query, key or Load(1, (self.b, self.h, self.j, self.e)), F32)

    def softmax(self, body: Expr, at: sympy.Expr | None = None) -> Softmax:
        return Softmax(self.j, body, self.at if at is None else at, F32)

    def out(self, weights: Expr, value: Expr | None = None) -> Contract:
        return Contract(self.at, weights, value or Load(2, (self.b, self.h, self.at, self.d)), F32)

    def recognized(self, element: Expr) -> Attention | Refusal:
        indices = (self.b, self.h, self.i, self.d)
        shape = tuple(self.space.sizes[s] for s in indices)
        return recognize(Lifted(element, indices, shape, F32, self.space, {0: F32, 1: F32, 2: F32}))


def test_the_plain_one() -> None:
    p = Parts()
    found = p.recognized(p.out(p.softmax(ex.mul(Const(0.5), p.product()))))
    assert isinstance(found, Attention)
    assert found.axes.batch == (p.b,) and found.axes.kv_heads == (p.h,) and found.axes.query == p.i
    assert found.scale == Const(0.5) and not found.mask.parts and not found.biases


def keys_of_their_own(p: Parts) -> Expr:
    group = p.space.fresh("o", 4)
    return p.out(p.softmax(p.product(key=Load(1, (p.b, p.h, group, p.j, p.e)))))


CASES: list[tuple[str, Callable[[Parts], Expr]]] = [
    ("the output is not a matrix product", lambda p: ex.Add(p.out(p.softmax(p.product())), Const(1.0))),
    ("the output is not a product of weights and a value", lambda p: p.out(p.product())),
    (
        "the output is not a product of weights and a value",
        lambda p: p.out(p.softmax(p.product()), p.softmax(p.product())),
    ),
    ("the weights pass through exp", lambda p: p.out(ex.Unary("exp", p.softmax(p.product())))),
    ("the softmax runs over another axis", lambda p: p.out(p.softmax(p.product(), at=p.i))),
    ("the softmax runs over another axis", lambda p: p.out(p.softmax(p.product(), at=p.at + 1))),
    ("the scores pass through tanh", lambda p: p.out(p.softmax(ex.Unary("tanh", p.product())))),
    ("the scores are a sum of several products", lambda p: p.out(p.softmax(ex.Add(p.product(), p.product())))),
    (
        "the scores are chosen from several products",
        lambda p: p.out(p.softmax(ex.Select(ex.NonNegative(p.i - p.j), p.product(), p.product(query=Const(1.0))))),
    ),
    (
        "the scores are multiplied with something computed from them",
        lambda p: p.out(p.softmax(ex.Mul(p.product(), p.product()))),
    ),
    ("something is divided by the scores", lambda p: p.out(p.softmax(ex.Div(Const(1.0), p.product())))),
    (
        "not exactly one side of the score product runs over the keys",
        lambda p: p.out(p.softmax(p.product(query=Load(0, (p.b, p.h, p.j, p.e))))),
    ),
    (
        "query or key is itself a product",
        lambda p: p.out(p.softmax(p.product(query=Contract(p.d, Load(0, (p.i, p.e, p.d)), Load(3, (p.d,)), F32)))),
    ),
    (
        "the score product does not sum over an axis of query and key",
        lambda p: p.out(p.softmax(p.product(query=Load(0, (p.b, p.h, p.i, sympy.Integer(0)))))),
    ),
    (
        "there is a single key, or the value is the same for every key",
        lambda p: p.out(p.softmax(p.product()), Load(2, (p.b, p.h, sympy.Integer(0), p.d))),
    ),
    (
        "the value has more than one dimension of its own",
        lambda p: p.out(
            p.softmax(p.product(Load(1, (p.b, p.j, p.e)), Load(0, (p.b, p.i, p.e)))), Load(2, (p.b, p.h, p.at, p.d))
        ),
    ),
    (
        "the keys differ along an axis that neither query nor value has",
        lambda p: p.out(p.softmax(p.product(query=Load(0, (p.b, p.i, p.e)))), Load(2, (p.b, p.at, p.d))),
    ),
    ("the weights pass through dropout twice", lambda p: p.out(ex.Dropout(
        ex.Dropout(p.softmax(p.product()), Const(0.1)), Const(0.1)
    ))),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "element"), CASES, ids=[reason for reason, _ in CASES])
def test_refused(reason: str, element: Callable[[Parts], Expr]) -> None:
    p = Parts()
    found = p.recognized(element(p))
    assert isinstance(found, Refusal) and found.reason.startswith(reason)
