"""Programs one step away from an attention: refused with the reason, or computed right. Inductor stands behind us."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.harness import assert_fused, assert_refused, check, tensors

S = 7


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def other_axis(q, k, v):
    return scores(q, k).softmax(-2) @ v


def over_heads(q, k, v):
    return scores(q, k).softmax(1) @ v


def weights_returned(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ v, p


def scores_returned(q, k, v):
    s = scores(q, k)
    return s.softmax(-1) @ v, s


def two_values(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ v, p @ k


def mask_from_scores(q, k, v):
    s = scores(q, k)
    return s.masked_fill(s < 0, float("-inf")).softmax(-1) @ v


def two_products(q, k, v):
    return (scores(q, k) + scores(k, v)).softmax(-1) @ v


def chosen_between_products(q, k, v):
    keep = torch.ones(S, S, dtype=torch.bool).tril()
    return torch.where(keep, scores(q, k), scores(k, v)).softmax(-1) @ v


def squared_product(q, k, v):
    s = scores(q, k)
    return (s * s).softmax(-1) @ v


def over_scores(q, k, v):
    return (1 / scores(q, k)).softmax(-1) @ v


def softcap(q, k, v):
    return (30 * torch.tanh(scores(q, k) / 30)).softmax(-1) @ v


def detached_scores(q, k, v):
    return scores(q, k).detach().softmax(-1) @ v


def scores_without_gradient(q, k, v):
    with torch.no_grad():
        s = scores(q, k)
    return s.softmax(-1) @ v


def small_fill(q, k, v):
    return scores(q, k).masked_fill(torch.ones(S, S).triu(1).bool(), -1.0).softmax(-1) @ v


def zero_fill(q, k, v):
    return scores(q, k).masked_fill(torch.ones(S, S).triu(1).bool(), 0.0).softmax(-1) @ v


def ten_thousand(q, k, v):
    return (1e3 * scores(q, k)).masked_fill(torch.ones(S, S).triu(1).bool(), -1e4).softmax(-1) @ v


def filled_with_a_tensor(q, k, v):
    return torch.where(torch.ones(S, S).tril().bool(), scores(q, k), v.mean()).softmax(-1) @ v


def scaled_by_key(q, k, v):
    return (scores(q, k) * torch.arange(1.0, S + 1)).softmax(-1) @ v


def scaled_by_infinity(q, k, v):
    return (scores(q, k) * float("inf")).softmax(-1) @ v


def mask_then_negative_scale(q, k, v):
    return (scores(q, k).masked_fill(torch.ones(S, S).triu(1).bool(), -1e9) * -1.0).softmax(-1) @ v


def mask_after_softmax(q, k, v):
    return (scores(q, k).softmax(-1) * torch.ones(S, S).tril()) @ v


def whole_numbers(q, k, v):
    return scores(q, k).long().to(q.dtype).softmax(-1) @ v


def dropout_before_softmax(q, k, v):
    return torch.dropout(scores(q, k), 0.5, True).softmax(-1) @ v


def dropout_twice(q, k, v):
    return torch.dropout(torch.dropout(scores(q, k).softmax(-1), 0.5, True), 0.5, True) @ v


def dropout_of_all(q, k, v):
    return torch.dropout(scores(q, k).softmax(-1), 1.0, True) @ v


def talking_heads(q, k, v):
    return torch.einsum("bhij,hg->bgij", scores(q, k), torch.ones(3, 3, dtype=q.dtype)).softmax(-1) @ v


def query_edited_meanwhile(q, k, v):
    q = q.clone()
    s = scores(q, k)
    q.add_(1)
    return s.softmax(-1) @ v + q


def one_key(q, k, v):
    return scores(q, k[:, :, :1]).softmax(-1) @ v[:, :, :1]


def autocast_inside(q, k, v):
    s = scores(q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        return s.softmax(-1) @ v


def value_of_two_dimensions(q, k, v):
    return torch.einsum("bhij,bhjxy->bhixy", scores(q, k).softmax(-1), v.view(*v.shape[:3], 4, 4))


REFUSED = [
    (other_axis, "another axis"),
    (over_heads, "another axis"),
    (weights_returned, "the weights are also used outside"),
    (scores_returned, "the scores are also used outside"),
    (two_values, "multiplied with more than one value"),
    (mask_from_scores, "the mask is computed from the scores"),
    (two_products, "join more than one matrix product"),
    (chosen_between_products, "join more than one matrix product"),
    (squared_product, "multiplied with something computed from them"),
    (over_scores, "the scores pass through"),
    (softcap, "the scores pass through tanh"),
    (detached_scores, "the scores pass through detach"),
    (scores_without_gradient, "the gradient mode changes inside"),
    (small_fill, "become -1, which ordinary scores can reach"),
    (zero_fill, "become 0, which ordinary scores can reach"),
    (ten_thousand, "become -10000, which ordinary scores can reach"),
    (filled_with_a_tensor, "something that is not one number"),
    (scaled_by_key, "scaled differently for each key"),
    (scaled_by_infinity, "the scores are scaled by inf"),
    (mask_then_negative_scale, "something that is not a positive number"),
    (mask_after_softmax, "the weights pass through a choice"),
    (whole_numbers, "a cast to whole numbers"),
    (talking_heads, "an axis that neither query nor value has"),
    (autocast_inside, "autocast or the gradient mode changes inside"),
]
RANDOM = [
    (dropout_before_softmax, "dropout before the softmax"),
    (dropout_twice, "dropout twice"),
    (dropout_of_all, "dropout with probability 1"),
]


@pytest.mark.parametrize(("written", "reason"), REFUSED, ids=lambda c: getattr(c, "__name__", ""))
def test_refused(written, reason: str) -> None:
    assert_refused(written, *tensors(2, 3, S, 16), reason=reason)


def test_refused_where_an_operand_is_edited_meanwhile() -> None:
    assert_refused(query_edited_meanwhile, *tensors(2, 3, S, 16), reason="is also used outside it", backward=False)

    def argument_edited(q, k, v):
        s = scores(q, k)
        q.add_(1)
        return s.softmax(-1) @ v

    assert_refused(argument_edited, *tensors(2, 3, S, 16), reason="written in place meanwhile", backward=False)


@pytest.mark.parametrize(("written", "reason"), RANDOM, ids=lambda c: getattr(c, "__name__", ""))
def test_refused_with_dropout(written, reason: str) -> None:
    import attn_fuse
    from tests.harness import compiled

    out = compiled(written)(*tensors(2, 3, S, 16))
    assert out.shape == (2, 3, S, 16)
    (site,) = attn_fuse.reports()[-1].sites
    assert not site.fused and reason in site.blocker.reason


def swapped_key(q, k, v):
    """The key permuted wrongly; at these sizes it still multiplies."""
    return (q @ k.permute(0, 2, 3, 1) / 4.0).softmax(-1) @ v


def product_without_transpose(q, k, v):
    return (q @ k).softmax(-1) @ v


def reversed_triangle(q, k, v):
    return scores(q, k).masked_fill(torch.ones(S, S).tril(-1).bool(), -1e9).softmax(-1) @ v


def strict_triangle(q, k, v):
    return scores(q, k).masked_fill(torch.ones(S, S).tril(-1) == 0, float("-inf")).softmax(-1) @ v


def strict_triangle_lowest(q, k, v):
    return scores(q, k).masked_fill(torch.ones(S, S).tril(-1) == 0, torch.finfo(q.dtype).min).softmax(-1) @ v


def bool_added(q, k, v):
    return (scores(q, k) + torch.ones(S, S).tril().bool()).softmax(-1) @ v


def channels(q, k, v):
    return ((q.mT @ k) / 4).softmax(-1) @ v.mT


def differential(q, k, v):
    return scores(q, k).softmax(-1) @ v - scores(k, q).softmax(-1) @ v


def broadcast_value(q, k, v):
    return scores(q, k).softmax(-1) @ v[:1]


def zero_scale(q, k, v):
    return (q @ k.mT * 0.0).softmax(-1) @ v


def mask_with_values(q, k, v):
    mask = torch.arange(S) % 3
    return scores(q, k).masked_fill(mask == 0, float("-inf")).softmax(-1) @ v


def ten_thousand_added(q, k, v):
    return (1e3 * scores(q, k) + (1 - torch.ones(S, S).tril()) * -1e4).softmax(-1) @ v


def linear_attention(q, k, v):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def row_bias(q, k, v):
    return (scores(q, k) + q[..., :1]).softmax(-1) @ v


@pytest.mark.parametrize(
    "written",
    [product_without_transpose, reversed_triangle, strict_triangle, strict_triangle_lowest, bool_added, channels,
     differential, broadcast_value, zero_scale, mask_with_values, ten_thousand_added, row_bias, one_key,
     value_of_two_dimensions, linear_attention],
    ids=lambda f: f.__name__,
)  # fmt: skip
@pytest.mark.parametrize("backward", [True, False], ids=["training", "inference"])
def test_computed_right(written, backward: bool) -> None:
    shape = (2, 3, 16, 16) if written is product_without_transpose else (2, 3, S, 16)
    outcome = check(written, *tensors(*shape), backward=backward)
    assert all(site.fused or site.blocker is not None for site in outcome.sites)


def test_a_permuted_key_at_colliding_sizes() -> None:
    q = torch.randn(1, 4, 4, 16)
    check(swapped_key, q, torch.randn(1, 16, 4, 4).permute(0, 2, 3, 1), torch.randn(1, 4, 4, 4))
    k = torch.randn(1, 4, 4, 4)
    check(swapped_key, torch.randn(1, 4, 4, 4), k, torch.randn(1, 4, 4, 4))


def test_heads_in_the_wrong_order_are_still_right() -> None:
    def repeated(q, k, v):
        return scores(q, k.repeat(1, 2, 1, 1)).softmax(-1) @ v.repeat(1, 2, 1, 1)

    (q,), (k, v) = tensors(2, 4, S, 16, count=1), tensors(2, 2, S, 16, count=2)
    assert_fused(repeated, q, k, v)


@pytest.mark.parametrize(
    "written",
    [other_axis, swapped_key, mask_with_values, strict_triangle_lowest, softcap, weights_returned, small_fill,
     ten_thousand_added, differential],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_with_inductor_behind(written) -> None:
    shape = (1, 4, 4, 4) if written is swapped_key else (2, 3, S, 16)
    check(written, *tensors(*shape), inner="inductor", backward=False)
