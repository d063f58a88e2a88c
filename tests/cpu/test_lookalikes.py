"""Programs one step away from an attention that no kernel computes: refused, with the reason."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import attn_fuse
from tests.harness import assert_refused, compiled, tensors

S = 7
INF = math.inf


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def above() -> Tensor:
    return torch.ones(S, S).triu(1).bool()


# ---- another softmax


def other_axis(q, k, v):
    return scores(q, k).softmax(-2) @ v


def over_heads(q, k, v):
    return scores(q, k).softmax(1) @ v


def normalised_over_queries(q, k, v):
    p = scores(q, k).softmax(-2)
    return (p / p.sum(-1, keepdim=True)) @ v


def weights_of_other_queries(q, k, v):
    return scores(q, k).softmax(-1).mT @ v


def second_softmax(q, k, v):
    return scores(q, k).softmax(-1).softmax(-1) @ v


def logarithm(q, k, v):
    return scores(q, k).log_softmax(-1) @ v


def weights_squared(q, k, v):
    p = scores(q, k).softmax(-1)
    return (p * p) @ v


def one_minus(q, k, v):
    return (1 - scores(q, k).softmax(-1)) @ v


def weights_gated_by_scores(q, k, v):
    s = scores(q, k)
    return (s.softmax(-1) * s.sigmoid()) @ v


def detached_weights(q, k, v):
    return scores(q, k).softmax(-1).detach() @ v


def largest_only(q, k, v):
    p = scores(q, k).softmax(-1)
    return ((p == p.amax(-1, keepdim=True)).to(q.dtype) - p.detach() + p) @ v


def divided_by_another_sum(q, k, v):
    e = scores(q, k).exp()
    return (e @ v) / e.sum(-2).unsqueeze(-1)


def normalised_before_the_mask(q, k, v):
    p = scores(q, k).softmax(-1)
    return (p.tril() / p.sum(-1, keepdim=True).square()) @ v


def some_keys(q, k, v):
    return scores(q, k).softmax(-1)[..., 2:5] @ v[:, :, 2:5]


def all_keys_but_the_last(q, k, v):
    return scores(q, k).softmax(-1)[..., :-1] @ v[:, :, :-1]


def one_added_after_a_shift(q, k, v):
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


def sum_kept_above(q, k, v):
    e = scores(q, k).exp()
    return (e / e.sum(-1, keepdim=True).clamp(min=0.5)) @ v


def another_term_of_the_sum(q, k, v):
    e = scores(q, k).exp()
    return (e / (e.sum(-1, keepdim=True) + q[..., :1].square())) @ v


def sink_at_the_wrong_end(q, k, v):
    s = torch.cat([q[..., :1], scores(q, k)], -1)
    return s.softmax(-1)[..., :-1] @ v


def unshifted_sink(q, k, v):
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + q[..., :1].exp())) @ v


# ---- other weights


def weights_thresholded(q, k, v):
    p = scores(q, k).softmax(-1)
    return torch.where(p > 0.1, p, 0.0) @ v


def weights_filled(q, k, v):
    return scores(q, k).softmax(-1).masked_fill(above(), 0.5) @ v


def half_of_the_batch_normalised(q, k, v):
    s = scores(q, k)
    s[1:] = s[1:].softmax(-1)
    return s @ v


def halves_that_differ(q, k, v):
    s = scores(q, k)
    s[1:] = s[1:].softmax(-1)
    s[:1] = s[:1].tanh().softmax(-1)
    return s @ v


def one_half_for_both(q, k, v):
    s = scores(q, k)
    s[1:] = s[:1].softmax(-1)
    s[:1] = s[:1].softmax(-1)
    return s @ v


def a_half_normalised_twice(q, k, v):
    s = scores(q, k)
    s[1:] = s[1:].softmax(-1)
    s[1:] = s[1:].softmax(-1)
    s[:1] = s[:1].softmax(-1)
    return s @ v


def not_a_number_becomes_half(q, k, v):
    return scores(q, k).masked_fill(above(), -INF).softmax(-1).nan_to_num(0.5) @ v


def hidden_where_other_scores_are(q, k, v):
    s = scores(q, k)
    other = s.masked_fill(torch.ones(S, S).tril(-1) == 0, -INF)
    return torch.where((other == -INF).all(-1, keepdim=True), 0.0, s.softmax(-1)) @ v


def hidden_where_a_column_is(q, k, v):
    s = scores(q, k).masked_fill(torch.arange(S) == 2, -INF)
    return torch.where((s == -INF).all(-2, keepdim=True), 0.0, s.softmax(-1)) @ v


def hidden_where_any_is(q, k, v):
    s = scores(q, k).masked_fill(above(), -INF)
    return torch.where((s == -INF).any(-1, keepdim=True), 0.0, s.softmax(-1)) @ v


def shifted_weights(q, k, v):
    return scores(q, k).softmax(-1).roll(1, -1) @ v


# ---- other scores


def summed_with_another_product(q, k, v):
    s = scores(q, k)
    return (s + s.mT).softmax(-1) @ v


def summed_with_other_heads(q, k, v):
    s = scores(q, k)
    return (s + s.flip(1)).softmax(-1) @ v


def less_the_largest_of_a_key(q, k, v):
    s = scores(q, k)
    return (s - s.amax(-2, keepdim=True)).softmax(-1) @ v


def running_sum(q, k, v):
    return scores(q, k).cumsum(-1).softmax(-1) @ v


def mask_from_a_running_sum(q, k, v):
    s = scores(q, k)
    return s.masked_fill((s > 0).cumsum(-1) > 2, -INF).softmax(-1) @ v


def stickbreaking(q, k, v):
    s = scores(q, k)
    return (F.logsigmoid(s) - F.softplus(s).cumsum(-1)).exp() @ v


def rolled(q, k, v):
    return scores(q, k).roll(1, -1).softmax(-1) @ v


def talking_heads(q, k, v):
    return torch.einsum("bhij,hg->bgij", scores(q, k), torch.ones(3, 3, dtype=q.dtype)).softmax(-1) @ v


def summed_over_heads_of_the_keys(q, k, v):
    return torch.einsum("bhie,bgje->bhij", q, k).softmax(-1) @ v


def summed_over_heads_of_the_values(q, k, v):
    return torch.einsum("bhij,bgjd->bhid", scores(q, k).softmax(-1), v)


def one_key(q, k, v):
    return scores(q, k[:, :, :1]).softmax(-1) @ v[:, :, :1]


def head_dim_of_one(q, k, v):
    return (q[..., :1] @ k[..., :1].mT).softmax(-1) @ v


# ---- gradients


def scores_without_gradient(q, k, v):
    with torch.no_grad():
        s = scores(q, k)
    return s.softmax(-1) @ v


def hard_attention(q, k, v):
    return (q @ k.mT * 1e10).softmax(-1) @ v


def within_a_derivative(q, k, v):
    return torch.func.grad(lambda q: (scores(q, k).softmax(-1) @ v).square().sum())(q)


# ---- in place


def scores_scattered_into(q, k, v):
    s = scores(q, k)
    s.scatter_(-1, torch.zeros(2, 3, S, 1, dtype=torch.int64), -1.0)
    return s.softmax(-1) @ v


def largest_three(q, k, v):
    """Computed once more, the third largest may fall below itself."""
    s = scores(q, k)
    return s.masked_fill(s < s.topk(3, -1).values[..., -1:], -INF).softmax(-1) @ v


def weights_above_a_quantile(q, k, v):
    p = scores(q, k).softmax(-1)
    return (p * (p >= p.kthvalue(3, -1, keepdim=True).values)) @ v


NOT_NORMALISED = "the weights are not normalised by their own sum over the keys"
ANOTHER_AXIS = "the product after the softmax sums over another axis: the weights are mixed, or are none"
CHOSEN = "the weights are chosen by what they or the scores are"
HALVES = (half_of_the_batch_normalised, halves_that_differ, one_half_for_both, a_half_normalised_twice)
REFUSED = [
    (other_axis, ANOTHER_AXIS),
    (over_heads, ANOTHER_AXIS),
    (normalised_over_queries, ANOTHER_AXIS),
    (weights_of_other_queries, ANOTHER_AXIS),
    (one_key, "there is a single key, whose weight is 1"),
    (second_softmax, "the scores pass through a second softmax"),
    (logarithm, NOT_NORMALISED),
    (weights_squared, NOT_NORMALISED),
    (one_minus, NOT_NORMALISED),
    (weights_gated_by_scores, NOT_NORMALISED),
    (detached_weights, "the weights are detached: no gradient goes through them"),
    (largest_only, NOT_NORMALISED),
    (divided_by_another_sum, NOT_NORMALISED),
    (normalised_before_the_mask, NOT_NORMALISED),
    (some_keys, "the softmax runs over keys that have no value"),
    (all_keys_but_the_last, "the softmax runs over a key that has no value"),
    (sink_at_the_wrong_end, "the softmax runs over a key that has no value"),
    (one_added_after_a_shift, "1 is added to the sum of the weights, which could be seen in them"),
    (sum_kept_above, "the sum of the weights is kept above 0.5, which could be seen in them"),
    (another_term_of_the_sum, "the sum of the weights has another term, which is no sink"),
    (unshifted_sink, "a sink is shifted by another number than the scores"),
    (weights_thresholded, CHOSEN),
    (not_a_number_becomes_half, CHOSEN),
    (hidden_where_any_is, CHOSEN),
    (weights_filled, "weights are replaced by something that is not zero"),
    *((written, "weights are replaced by something that is not zero") for written in HALVES),
    (hidden_where_other_scores_are, "the weights are set to zero by what other scores are"),
    (hidden_where_a_column_is, "the weights are set to zero by what other scores are"),
    (shifted_weights, "roll has no element expression"),
    (summed_with_another_product, "the scores join more than one matrix product"),
    (summed_with_other_heads, "the scores join more than one matrix product"),
    (less_the_largest_of_a_key, "the scores pass through amax over an axis"),
    (running_sum, "a running sum"),
    (mask_from_a_running_sum, "a running sum"),
    (stickbreaking, "a running sum"),
    (rolled, "roll has no element expression"),
    (largest_three, "the scores are compared or joined with what is computed from them"),
    (weights_above_a_quantile, "the scores are compared or joined with what is computed from them"),
    (talking_heads, "heads are mixed (talking heads)"),
    (summed_over_heads_of_the_keys, "sum of something other than the scores"),
    (summed_over_heads_of_the_values, "sum of something other than the scores"),
    (head_dim_of_one, "head_dim is 1: each score is a product of two numbers"),
    (scores_without_gradient, "computed without gradients, though the output has one"),
    (hard_attention, "the scores are scaled by 1e+10"),
    (within_a_derivative, "a vmap or a derivative of torch.func is open here"),
    (scores_scattered_into, "the scores pass through scatter"),
]


@pytest.mark.parametrize(("written", "reason"), REFUSED, ids=lambda c: getattr(c, "__name__", ""))
def test_refused(written, reason: str) -> None:
    assert_refused(written, *tensors(2, 3, S, 16), reason=reason or ANOTHER_AXIS)


# ---- dropout where it does something else


def dropout_before_softmax(q, k, v):
    return torch.dropout(scores(q, k), 0.5, True).softmax(-1) @ v


def dropout_twice(q, k, v):
    return torch.dropout(torch.dropout(scores(q, k).softmax(-1), 0.5, True), 0.5, True) @ v


def dropout_of_all(q, k, v):
    return torch.dropout(scores(q, k).softmax(-1), 1.0, True) @ v


def dropped_weights_returned(q, k, v):
    p = torch.dropout(scores(q, k).softmax(-1), 0.5, True)
    return p @ v, p


def dropped_weights_used_twice(q, k, v):
    p = torch.dropout(scores(q, k).softmax(-1), 0.5, True)
    return p @ v, p @ k


RANDOM = [
    (dropout_before_softmax, "the scores pass through dropout before the softmax"),
    (dropout_twice, "the weights pass through dropout twice"),
    (dropout_of_all, "dropout with probability 1"),
    (dropped_weights_returned, "the weights after dropout are also used outside the attention"),
    (dropped_weights_used_twice, "the weights after dropout are also used outside the attention"),
]


@pytest.mark.parametrize(("written", "reason"), RANDOM, ids=lambda c: getattr(c, "__name__", ""))
def test_refused_with_dropout(written, reason: str) -> None:
    q, k, v = tensors(2, 3, S, 16)
    torch.manual_seed(3)
    got = compiled(written)(q, k, v)
    torch.manual_seed(3)
    torch.testing.assert_close(got, written(q, k, v))
    sites = attn_fuse.reports()[-1].sites
    assert sites and all(not site.fused and reason in site.blocker.reason for site in sites)
