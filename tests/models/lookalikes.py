"""Programs one step away from an attention, each with the reason why it is left as written, or with none.

One without a reason may be fused or not, and is computed right. The tables say what is done with the scores `s` before
the softmax or with the weights `p` after it; the functions are whole programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models import biases, causal, grouped, masks, plain
from tests.models.spelling import Inputs, Spelling, function, given, heads, joined, noise, square

S, INF = 7, math.inf
ANOTHER_AXIS = "the product after the softmax sums over another axis than the softmax"
CHOSEN = "the weights are selected by a condition on scores or weights"
COMPARED = "the scores are compared or joined with what is computed from them"
NOT_NORMALISED = "the weights are not normalised by their own sum over the keys"
NOT_ZERO = "weights are replaced by something that is not zero"
NO_VALUE = "the softmax runs over a key that has no value"
SEVERAL = "the scores join more than one matrix product"
OTHER_SUM = "sum of something other than the scores"
OTHERS_SAY = "the weights are zeroed by a condition on other scores"

_FOUND: list[Spelling] = []


def lookalike(reason: str = "", inputs: Inputs | None = None, name: str = "") -> Callable[[Any], Any]:
    """Adds a program, called with query, key and value of one length unless `inputs` says otherwise."""

    def add(program: Any) -> Any:
        _FOUND.append(function("look-alikes", program, inputs or square(S), name, reason=reason))
        return program

    return add


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def above(diagonal: int = 1) -> Tensor:
    return torch.ones(S, S).triu(diagonal).bool()


# ---- what is done with the scores

for _name, _of, _reason in (
    ("summed with another product", lambda s: s + s.mT, SEVERAL),
    ("summed with other heads", lambda s: s + s.flip(1), SEVERAL),
    ("less the largest of a key", lambda s: s - s.amax(-2, keepdim=True), "the scores pass through amax over an axis"),
    ("running sum", lambda s: s.cumsum(-1), "a running sum"),
    ("mask from a running sum", lambda s: s.masked_fill((s > 0).cumsum(-1) > 2, -INF), "a running sum"),
    ("cumulative product", lambda s: s.cumprod(-1), "the scores pass through cumprod"),
    ("entropy", lambda s: torch.special.entr(s.abs()), "special_entr has no element expression"),
    ("rolled", lambda s: s.roll(1, -1), "roll has no element expression"),
    # Computed once more, the third largest may fall below itself.
    ("largest three", lambda s: s.masked_fill(s < s.topk(3, -1).values[..., -1:], -INF), COMPARED),
    ("reversed triangle", lambda s: s.masked_fill(~above(0), -1e9), ""),
    ("strict triangle", lambda s: s.masked_fill(above(0), -INF), ""),
    ("strict triangle lowest", lambda s: s.masked_fill(above(0), torch.finfo(s.dtype).min), ""),
    ("bool added", lambda s: s + ~above(), ""),
    ("mask with values", lambda s: s.masked_fill(torch.arange(S) % 3 == 0, -INF), ""),
    ("sorted", lambda s: s.sort(-1).values, ""),
    ("mirrored", lambda s: s.flip(-1), ""),
    ("less the mean of a query", lambda s: s - s.mean(-1, keepdim=True), ""),
    ("other cap outside", lambda s: 3.0 * torch.tanh(s / 2.0), ""),
    ("times zero", lambda s: s * 0.0, ""),
    ("infinities that cancel", lambda s: (lambda m: (2 * m - m).nan_to_num(nan=0.5))(s.masked_fill(above(), -INF)),
        "some scores are plus infinity, which makes their row NaN"),
):  # fmt: skip
    lookalike(_reason, name=_name)(lambda q, k, v, of=_of: of(scores(q, k)).softmax(-1) @ v)


# ---- what is done with the weights

for _name, _of, _reason in (
    ("weights of other queries", lambda p: p.mT, ANOTHER_AXIS),
    ("second softmax", lambda p: p.softmax(-1), "the scores pass through a second softmax"),
    ("weights squared", lambda p: p * p, NOT_NORMALISED),
    ("one minus", lambda p: 1 - p, NOT_NORMALISED),
    ("detached weights", lambda p: p.detach(), "the weights are detached: no gradient goes through them"),
    ("normalised before the mask", lambda p: p.tril() / p.sum(-1, keepdim=True).square(), NOT_NORMALISED),
    ("largest only", lambda p: (p == p.amax(-1, keepdim=True)).to(p.dtype) - p.detach() + p, NOT_NORMALISED),
    ("weights above another", lambda p: torch.where(p > 0.1, p, 0.0), CHOSEN),
    ("weights above another and filled", lambda p: torch.where(~((p > 0.1) | above()), p, 0.0), CHOSEN),
    ("guarded or filled", lambda p: torch.where(~(p.isnan() & above()), p, 0.0), CHOSEN),
    ("guarded and filled with values", lambda p: torch.where(~(p.isnan() | above()), p, 0.5), CHOSEN),
    ("weights filled", lambda p: p.masked_fill(above(), 0.5), NOT_ZERO),
    ("shifted weights", lambda p: p.roll(1, -1), "roll has no element expression"),
    ("weights above a quantile", lambda p: p * (p >= p.kthvalue(3, -1, keepdim=True).values), COMPARED),
    ("some queries", lambda p: p[:, :, 2:5], ""),
    ("weights of another batch entry", lambda p: p.flip(0), ""),
    ("weights times a matrix", lambda p: p @ torch.linspace(0, 1, S * S, dtype=p.dtype).view(S, S), ""),
):  # fmt: skip
    lookalike(_reason, name=_name)(lambda q, k, v, of=_of: of(scores(q, k).softmax(-1)) @ v)


# ---- the sum that the exponentials `e` are divided by

for _name, _of, _reason in (
    ("another sum", lambda s, e, q: e.sum(-2).unsqueeze(-1), NOT_NORMALISED),
    ("sum over queries", lambda s, e, q: e.sum(-2, keepdim=True), NOT_NORMALISED),
    ("sum without the last", lambda s, e, q: e[..., :-1].sum(-1, keepdim=True),
        "the weights are normalised over another number of keys"),
    ("sum kept above", lambda s, e, q: e.sum(-1, keepdim=True).clamp(min=0.5),
        "the sum of the weights is clamped to at least 0.5, which could change them"),
    ("sum with another term", lambda s, e, q: e.sum(-1, keepdim=True) + q[..., :1].square(),
        "the sum of the weights has another term, which is no sink"),
    ("sum over other weights", lambda s, e, q: e @ torch.linspace(0.5, 2.0, S, dtype=e.dtype).unsqueeze(-1), ""),
    ("sum of other keys", lambda s, e, q: s.flip(-1).mul(2).exp().sum(-1, keepdim=True), NOT_NORMALISED),
    ("sum at another scale", lambda s, e, q: (s * 0.5).exp().sum(-1, keepdim=True), NOT_NORMALISED),
):  # fmt: skip

    @lookalike(_reason, name=_name)
    def _over(q, k, v, of=_of):
        s = scores(q, k)
        e = s.exp()
        return (e / of(s, e, q)) @ v


for _name, _sum, _reason in (
    ("one added after a shift", lambda total, top, q: 1 + total,
        "1 is added to the sum of the weights, which could change them"),
    ("unshifted sink", lambda total, top, q: total + q[..., :1].exp(),
        "a sink is shifted by another number than the scores"),
):  # fmt: skip

    @lookalike(_reason, name=_name)
    def _shifted(q, k, v, of=_sum):
        s = scores(q, k)
        top = s.amax(-1, keepdim=True)
        e = (s - top).exp()
        return (e / of(e.sum(-1, keepdim=True), top, q)) @ v


for _name, _power, _sum, _reason in (
    ("squares", lambda s: s**2, lambda total: total, ""),
    ("halves less the maximum and one", lambda s: 0.5 ** (s - s.amax(-1, keepdim=True)), lambda total: total + 1,
        "1 is added to the sum of the weights, which could change them"),
    ("halves kept above one", lambda s: 0.5 ** (8 * (s - s.amin(-1, keepdim=True))), lambda total: total.clamp(min=2),
        "the sum of the weights is clamped to at least 2, which could change them"),
):  # fmt: skip

    @lookalike(_reason, name=_name)
    def _of_powers(q, k, v, power=_power, total=_sum):
        e = power(scores(q, k))
        return e / total(e.sum(-1, keepdim=True)) @ v


# ---- whole programs

for _name, _program, _reason in (
    ("other axis", lambda q, k, v: scores(q, k).softmax(-2) @ v, ANOTHER_AXIS),
    ("over heads", lambda q, k, v: scores(q, k).softmax(1) @ v, ANOTHER_AXIS),
    ("softmin over queries", lambda q, k, v: F.softmin(scores(q, k), -2) @ v, ANOTHER_AXIS),
    ("softmin masked from below", lambda q, k, v: F.softmin(scores(q, k).masked_fill(above(), -5e4), -1) @ v, ""),
    ("other axis transposed back", lambda q, k, v: (q @ k.mT).mT.softmax(3).mT @ v, ANOTHER_AXIS),
    ("over both axes", lambda q, k, v: scores(q, k).flatten(-2).softmax(-1).view(2, 3, S, S) @ v,
        "the softmax runs over keys that have no value"),
    ("one key", lambda q, k, v: scores(q, k[:, :, :1]).softmax(-1) @ v[:, :, :1],
        "there is a single key, whose weight is 1"),
    ("logarithm", lambda q, k, v: scores(q, k).log_softmax(-1) @ v, NOT_NORMALISED),
    ("gated by scores", lambda q, k, v: (scores(q, k).softmax(-1) * scores(q, k).sigmoid()) @ v, NOT_NORMALISED),
    ("some keys", lambda q, k, v: scores(q, k).softmax(-1)[..., 2:5] @ v[:, :, 2:5],
        "the softmax runs over keys that have no value"),
    ("all keys but the last", lambda q, k, v: scores(q, k).softmax(-1)[..., :-1] @ v[:, :, :-1], NO_VALUE),
    ("sink at the wrong end", lambda q, k, v: torch.cat([q[..., :1], scores(q, k)], -1).softmax(-1)[..., :-1] @ v,
        NO_VALUE),
    ("sink kept", lambda q, k, v: F.pad(scores(q, k), (0, 1), value=0.3).softmax(-1)[..., 1:] @ v, NO_VALUE),
    ("not a number becomes half",
        lambda q, k, v: scores(q, k).masked_fill(above(), -INF).softmax(-1).nan_to_num(0.5) @ v, CHOSEN),
    ("talking heads", lambda q, k, v: torch.einsum("bhij,hg->bgij", scores(q, k), q.new_ones(3, 3)).softmax(-1) @ v,
        "heads are mixed (talking heads)"),
    ("summed over heads of the keys", lambda q, k, v: torch.einsum("bhie,bgje->bhij", q, k).softmax(-1) @ v, OTHER_SUM),
    ("summed over heads of the values", lambda q, k, v: torch.einsum("bhij,bgjd->bhid", scores(q, k).softmax(-1), v),
        OTHER_SUM),
    # Letters that stand twice are summed over where nothing is said of the result: of b, h and j here.
    ("summed over batch and heads", lambda q, k, v: torch.einsum("bhij,bhjd", scores(q, k).softmax(3), v),
        ANOTHER_AXIS),
    ("head_dim of one", lambda q, k, v: (q[..., :1] @ k[..., :1].mT).softmax(-1) @ v,
        "head_dim is 1: each score is a product of two numbers"),
    ("hard attention", lambda q, k, v: (q @ k.mT * 1e10).softmax(-1) @ v, "the scores are scaled by 1e+10"),
    ("within a derivative",
        lambda q, k, v: torch.func.grad(lambda q: (scores(q, k).softmax(-1) @ v).square().sum())(q),
        "a vmap or a derivative of torch.func is open here"),
    ("channels", lambda q, k, v: (q.mT @ k / 4).softmax(-1) @ v.mT, ""),
    ("two products", lambda q, k, v: (scores(q, k) + scores(k, v)).softmax(-1) @ v, ""),
    ("broadcast value", lambda q, k, v: scores(q, k).softmax(-1) @ v[:1], ""),
    ("row bias", lambda q, k, v: (scores(q, k) + q[..., :1]).softmax(-1) @ v, ""),
    ("value of two dimensions",
        lambda q, k, v: torch.einsum("bhij,bhjxy->bhixy", scores(q, k).softmax(-1), v.view(2, 3, S, 4, 4)), ""),
    ("linear attention", lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v), ""),
    ("heads summed in the output", lambda q, k, v: torch.einsum("bhij,bhjd->bid", scores(q, k).softmax(-1), v),
        ANOTHER_AXIS),
    ("values moved", lambda q, k, v: scores(q, k).softmax(-1) @ v.roll(1, -2), ""),
    ("detached key", lambda q, k, v: scores(q, k.detach()).softmax(-1) @ v, ""),
    ("detached value", lambda q, k, v: scores(q, k).softmax(-1) @ v.detach(), ""),
    ("halves of other scores",
        lambda q, k, v: torch.cat([scores(q, k)[:1].softmax(-1), (2.0 * scores(q, k)[1:]).softmax(-1)]) @ v, NOT_ZERO),
):  # fmt: skip
    lookalike(_reason, name=_name)(_program)


@lookalike(ANOTHER_AXIS)
def normalised_over_queries(q, k, v):
    p = scores(q, k).softmax(-2)
    return (p / p.sum(-1, keepdim=True)) @ v


@lookalike(NOT_NORMALISED)
def slot_attention(q, k, v):
    """Normalised over queries, then over keys."""
    p = scores(q, k).softmax(-2) + 1e-8
    return (p / p.sum(-1, keepdim=True)) @ v


@lookalike()
def kernel_trick(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.mT @ v)) / (q @ k.sum(-2).unsqueeze(-1))


@lookalike(NOT_NORMALISED)
def sum_for_other_queries(q, k, v):
    e = scores(q, k).exp()
    q = q * 0.5
    return e / scores(q, k).exp().sum(-1, keepdim=True) @ v


@lookalike(CHOSEN)
def hidden_where_any_is(q, k, v):
    s = scores(q, k).masked_fill(above(), -INF)
    return torch.where((s == -INF).any(-1, keepdim=True), 0.0, s.softmax(-1)) @ v


@lookalike(OTHERS_SAY)
def hidden_where_other_scores_are(q, k, v):
    s = scores(q, k)
    other = s.masked_fill(above(0), -INF)
    return torch.where((other == -INF).all(-1, keepdim=True), 0.0, s.softmax(-1)) @ v


@lookalike(OTHERS_SAY)
def hidden_where_a_column_is(q, k, v):
    s = scores(q, k).masked_fill(torch.arange(S) == 2, -INF)
    return torch.where((s == -INF).all(-2, keepdim=True), 0.0, s.softmax(-1)) @ v


@lookalike("a running sum")
def stickbreaking(q, k, v):
    s = scores(q, k)
    return (F.logsigmoid(s) - F.softplus(s).cumsum(-1)).exp() @ v


@lookalike("computed without gradients, though the output has one")
def scores_without_gradient(q, k, v):
    with torch.no_grad():
        s = scores(q, k)
    return s.softmax(-1) @ v


@lookalike()
def all_without_gradient(q, k, v):
    with torch.no_grad():
        out = scores(q, k).softmax(-1) @ v
    return out * q


@lookalike("the output is not a product of weights and a value")
def weights_used_again(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ (p @ v)


# ---- writes in place


@lookalike("the scores pass through scatter")
def scores_scattered_into(q, k, v):
    s = scores(q, k)
    s.scatter_(-1, torch.zeros(2, 3, S, 1, dtype=torch.int64), -1.0)
    return s.softmax(-1) @ v


def _parts(*writes: tuple[Any, Callable[[Tensor], Tensor]]) -> Callable[..., Tensor]:
    """Each part of the scores is replaced in turn, and nothing else is a softmax."""

    def program(q, k, v):
        s = scores(q, k)
        for at, of in writes:
            s[at] = of(s)
        return s @ v

    return program


_FIRST, _REST = slice(None, 1), slice(1, None)
for _name, _writes, _reason in (
    ("half of the batch normalised", [(_REST, lambda s: s[1:].softmax(-1))], NOT_ZERO),
    ("halves that differ", [(_REST, lambda s: s[1:].softmax(-1)), (_FIRST, lambda s: s[:1].tanh().softmax(-1))],
        NOT_ZERO),
    ("one half for both", [(_REST, lambda s: s[:1].softmax(-1)), (_FIRST, lambda s: s[:1].softmax(-1))], NOT_ZERO),
    ("a half normalised twice", [*[(_REST, lambda s: s[1:].softmax(-1))] * 2, (_FIRST, lambda s: s[:1].softmax(-1))],
        NOT_ZERO),
    ("halves of the keys", [((..., slice(3)), lambda s: s[..., :3].softmax(-1)),
        ((..., slice(3, None)), lambda s: s[..., 3:].softmax(-1))], NOT_ZERO),
    ("half normalised before all", [(_FIRST, lambda s: s[:1].softmax(-1)), (slice(None), lambda s: s.softmax(-1))],
        "the scores pass through a second softmax"),
):  # fmt: skip
    lookalike(_reason, name=_name)(_parts(*_writes))


@lookalike()
def output_written(q, k, v):
    out = scores(q, k).softmax(-1) @ v
    out.mul_(2)
    return out


@lookalike("written through an alias that is detached from its gradient")
def one_row_of_scores_written(q, k, v):
    s = scores(q, k)
    s[:, 0] += s[:, 1].detach()
    return s.softmax(-1) @ v


@lookalike(inputs=heads())
def scores_edited_and_used(q, k, v):
    s = q @ k.mT
    view = s[..., :1]
    p = s.softmax(-1)
    s.mul_(2)
    return p @ v, view


@lookalike(inputs=joined(square(), noise((7, 7))))
def filled_beside_what_is_not_read(q, k, v, bias):
    """The fill is a statement, and the bias comes out of an operation that few know."""
    s = scores(q, k) + torch.special.sinc(bias).isinf()
    s.masked_fill_(torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), -INF)
    return s.softmax(-1) @ v


@lookalike(inputs=heads())
def mask_edited_in_place(q, k, v):
    mask = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype)
    mask[:, :2] = -1e9
    return (scores(q, k) + mask).softmax(-1) @ v


@lookalike(inputs=heads())
def mask_edited_after_use(q, k, v):
    mask = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype)
    s = scores(q, k) + mask
    mask[:, :2] = -1e9
    return s.softmax(-1) @ v + mask.amax(-1).unsqueeze(-1)


@lookalike(inputs=heads())
def view_of_scores_edited(q, k, v):
    s = scores(q, k)
    s.diagonal(dim1=-2, dim2=-1).fill_(-INF)
    return s.softmax(-1) @ v


@lookalike("elements written at several lists of positions")
def antidiagonal(q, k, v):
    s, i = scores(q, k), torch.arange(S)
    s[:, :, i, S - 1 - i] = -5e4
    return s.softmax(-1) @ v


# ---- of other arguments

_EMPTY = given(lambda: (torch.arange(11) >= torch.tensor([[3], [11]])).long())
_GROUPED = heads(heads=6, kv_heads=2)


def swapped_key(q, k, v):
    """The key permuted wrongly; at these sizes it still multiplies."""
    return (q @ k.permute(0, 2, 3, 1) / 4.0).softmax(-1) @ v


def added(q, k, v, term):
    return (scores(q, k) + term).softmax(-1) @ v


for _name, _program, _inputs in (
    ("other axis at equal sizes", lambda q, k, v: scores(q, k).softmax(-2) @ v,
        square(4, batch=4, heads=4, head_dim=4)),
    ("product without transpose", lambda q, k, v: (q @ k).softmax(-1) @ v, square(16)),
    ("permuted key", swapped_key, square(4, batch=1, heads=4, head_dim=4)),
    ("permuted key of colliding sizes", lambda q, k, v: swapped_key(q, k.permute(0, 2, 3, 1), v),
        noise((1, 4, 4, 16), (1, 16, 4, 4), (1, 4, 4, 4))),
    ("zero", plain.zero, heads()), ("negative", plain.negative, heads()),
    *((f.__name__, f, _GROUPED) for f in (grouped.wrong_order, grouped.key_and_value_in_different_orders)),
    ("repeated along the length", grouped.repeated_along_the_length, heads(heads=6, kv_heads=2, kv_len=16)),
    # DistilBERT's form with a mask that also has twos: only zeros are hidden.
    ("mask of other numbers",
        lambda q, k, v, mask: scores(q, k).masked_fill((mask == 0)[:, None, None, :], -INF).softmax(-1) @ v,
        joined(heads(), given(lambda: torch.arange(22).view(2, 11) % 3))),
    ("whole number mask added", added, joined(heads(), given(lambda: torch.arange(11) % 3))),
    ("mask with a larger batch", added, joined(heads(batch=1), noise((2, 1, 7, 11)))),
    ("number added", added, joined(heads(), noise(()))),
    ("noise added", lambda q, k, v, sample: (scores(q, k) + 0.1 * sample.detach()).softmax(-1) @ v,
        joined(heads(), noise((2, 3, 7, 11)))),
    ("triangle of another shape", causal.tril_filled, heads()),
    ("gpt2 row that sees nothing", masks.gpt2_and_padding, joined(square(11), _EMPTY)),
    ("ten thousand off everything", biases.ten_thousand_off, joined(heads(), _EMPTY)),
):  # fmt: skip
    lookalike(inputs=_inputs, name=_name)(_program)

LOOKALIKES = tuple(_FOUND)
