"""What is done to the scores and no other kernel takes: fused on chunked, exactly, and the report says why."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.test_lookalikes import INF, S, above, scores
from tests.harness import assert_chunked, assert_fused, assert_refused, check, compiled, tensors

# ---- masks that are functions of the scores


def mask_from_scores(q, k, v):
    s = scores(q, k)
    return s.masked_fill(s < 0, -INF).softmax(-1) @ v


def infinity_made_finite(q, k, v):
    return scores(q, k).masked_fill(above(), -INF).nan_to_num(neginf=-5.0).softmax(-1) @ v


# ---- fills that are no masks


def small_fill(q, k, v):
    return scores(q, k).masked_fill(above(), -1.0).softmax(-1) @ v


def zero_fill(q, k, v):
    return scores(q, k).masked_fill(above(), 0.0).softmax(-1) @ v


def row_written(q, k, v):
    s = scores(q, k)
    s[:, :, 0] = 0
    return s.softmax(-1) @ v


def column_written(q, k, v):
    s = scores(q, k)
    s[..., 0].fill_(-3.0)
    return s.softmax(-1) @ v


def ten_thousand(q, k, v):
    return (10 * scores(q, k)).masked_fill(above(), -1e4).softmax(-1) @ v


def filled_with_a_tensor(q, k, v):
    return torch.where(~above(), scores(q, k), v.mean()).softmax(-1) @ v


def chosen_between_products(q, k, v):
    return torch.where(~above(), scores(q, k), scores(k, v)).softmax(-1) @ v


def chosen_between_functions(q, k, v):
    s = scores(q, k)
    return torch.where(~above(), s, 2 * s).softmax(-1) @ v


def parts_scaled_apart(q, k, v):
    s = torch.cat([scores(q, k[:, :, :3]) * 2, scores(q, k[:, :, 3:])], -1)
    return s.softmax(-1) @ v


# ---- scales


def scaled_by_key(q, k, v):
    return (scores(q, k) * torch.arange(1.0, S + 1)).softmax(-1) @ v


def negatively_scaled_mask(q, k, v):
    return (scores(q, k).masked_fill(above(), -1e9) * -1.0).softmax(-1) @ v


def squared(q, k, v):
    s = scores(q, k)
    return (s * s).softmax(-1) @ v


def over_squared(q, k, v):
    s = scores(q, k)
    return (1 / (2 + s * s)).softmax(-1) @ v


def softsign(q, k, v):
    s = scores(q, k)
    return (s / (1 + s.abs())).softmax(-1) @ v


# ---- caps


def capped_twice(q, k, v):
    return (2 * torch.tanh(3 * torch.tanh(scores(q, k) / 3) / 2)).softmax(-1) @ v


def capped_and_scaled(q, k, v):
    return (0.5 * (2 * torch.tanh(scores(q, k) / 2)).clamp(min=-1e30)).softmax(-1) @ v


def capped_after_a_mask(q, k, v):
    return (2 * torch.tanh(scores(q, k).masked_fill(above(), -INF) / 2)).softmax(-1) @ v


def capped_negatively(q, k, v):
    return (-2 * torch.tanh(scores(q, k) / 2)).softmax(-1) @ v


# ---- other functions


def plus_a_function_of_itself(q, k, v):
    s = scores(q, k)
    return (s + torch.tanh(s)).softmax(-1) @ v


def hyperbolic_tangent(q, k, v):
    return torch.tanh(scores(q, k)).softmax(-1) @ v


def clamped(q, k, v):
    return scores(q, k).clamp(-0.5, 0.5).softmax(-1) @ v


def clamped_from_below(q, k, v):
    return torch.clamp(scores(q, k), min=-1.0).softmax(-1) @ v


def rounded(q, k, v):
    return scores(q, k).round().softmax(-1) @ v


def remainder(q, k, v):
    return (scores(q, k) % 1.0).softmax(-1) @ v


def power(q, k, v):
    return scores(q, k).abs().add(0.1).pow(1.5).softmax(-1) @ v


def activations(q, k, v):
    s = scores(q, k)
    return F.gelu(s).softmax(-1) @ v


def fake_quantised(q, k, v):
    return ((scores(q, k) / 0.1).round().clamp(-8, 7) * 0.1).softmax(-1) @ v


def whole_numbers(q, k, v):
    return (4 * scores(q, k)).long().to(q.dtype).softmax(-1) @ v


def small_whole_numbers(q, k, v):
    return ((10 * scores(q, k)).to(torch.int8).to(q.dtype) * 0.1).softmax(-1) @ v


def power_of_whole_numbers(q, k, v):
    return (scores(q, k).abs().int() + 1).to(q.dtype).pow(-1).softmax(-1) @ v


def masked_then_whole_numbers(q, k, v):
    return scores(q, k).masked_fill(above(), -60.0).long().to(q.dtype).softmax(-1) @ v


FUNCTIONS = [
    (mask_from_scores, "the mask is computed from the scores"),
    (infinity_made_finite, "the mask is computed from the scores"),
    (small_fill, "masked scores become -1, which ordinary scores can reach"),
    (zero_fill, "masked scores become 0, which ordinary scores can reach"),
    (row_written, "masked scores become 0, which ordinary scores can reach"),
    (column_written, "masked scores become -3, which ordinary scores can reach"),
    (ten_thousand, "masked scores become -10000, which ordinary scores can reach"),
    (filled_with_a_tensor, "masked scores become something that is not one number"),
    (chosen_between_products, "masked scores become something that is not one number"),
    (chosen_between_functions, "the scores are chosen from several products"),
    (parts_scaled_apart, "masked scores become something that is not one number"),
    (scaled_by_key, "the scores are scaled differently for each key"),
    (negatively_scaled_mask, "masked scores become 1e+09, which ordinary scores can reach"),
    (squared, "the scores are multiplied with something computed from them"),
    (over_squared, "something is divided by the scores"),
    (softsign, "something is divided by the scores"),
    (capped_twice, "capped scores are scaled or bounded"),
    (capped_and_scaled, "capped scores are scaled or bounded"),
    (capped_after_a_mask, "scores are capped after a mask or a bias"),
    (capped_negatively, "the scores pass through tanh"),
    (plus_a_function_of_itself, "the scores are a sum of several products"),
    (hyperbolic_tangent, "the scores pass through tanh"),
    (clamped, "the scores pass through minimum"),
    (clamped_from_below, "the scores pass through maximum"),
    (rounded, "the scores pass through round"),
    (remainder, "the scores pass through remainder"),
    (power, "the scores pass through pow"),
    (activations, "the scores pass through gelu"),
    (fake_quantised, "the scores pass through minimum"),
    (whole_numbers, "the scores pass through a cast to whole numbers"),
    (small_whole_numbers, "the scores pass through a cast to whole numbers"),
    (power_of_whole_numbers, "the scores pass through pow"),
    (masked_then_whole_numbers, "the scores pass through a cast to whole numbers"),
]


def is_chunked(written, reason: str, *args, **how) -> None:
    outcome = assert_chunked(written, *args, reason=f"takes no function of the scores: {reason}", **how)
    assert reason in outcome.site.attention["score_mod"]


@pytest.mark.parametrize(("written", "reason"), FUNCTIONS, ids=lambda c: getattr(c, "__name__", ""))
def test_fused_as_it_is(written, reason: str) -> None:
    is_chunked(written, reason, *tensors(2, 3, S, 16))
    outcome = assert_fused(written, *tensors(2, 3, S, 16), backward=False)
    assert outcome.site.kernel == "chunked" and reason in outcome.site.attention["score_mod"]


ACTIVATIONS = (
    "logsigmoid mish selu celu hardsigmoid hardswish softsign relu6 hardshrink softshrink tanhshrink elu gelu silu "
    "leaky_relu softplus hardtanh"
).split()
POINTWISE = "expm1 erfc asinh atan sgn sinc frac exp2".split()
OF_TWO = "logaddexp logaddexp2 atan2 xlogy fmod maximum".split()
# What it is taken apart into has another gradient at 0.
FORWARD_ONLY = ("xlogy",)


@pytest.mark.parametrize("name", ACTIVATIONS + POINTWISE + OF_TWO)
def test_functions_of_torch(name: str) -> None:
    function = getattr(F, name, None) or getattr(torch, name)

    def written(q, k, v):
        s = scores(q, k)
        return (function(s, 0.5 * s.abs() + 1) if name in OF_TWO else function(s)).softmax(-1) @ v

    outcome = assert_fused(written, *tensors(2, 3, S, 16), backward=name not in FORWARD_ONLY)
    assert outcome.site.kernel == "chunked"


def detached(q, k, v):
    return scores(q, k).detach().softmax(-1) @ v


def half_detached(q, k, v):
    s = scores(q, k)
    return (0.5 * s + 0.5 * s.detach()).softmax(-1) @ v


def straight_through(q, k, v):
    s = scores(q, k)
    return (s + (s.round() - s).detach()).softmax(-1) @ v


@pytest.mark.parametrize("written", [detached, half_detached, straight_through], ids=lambda f: f.__name__)
def test_no_gradient_goes_through_what_is_detached(written) -> None:
    assert assert_fused(written, *tensors(2, 3, S, 16)).site.kernel == "chunked"


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize(
    "written", [mask_from_scores, squared, capped_after_a_mask, hyperbolic_tangent, softsign], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_and_symbolic_sizes(written, dtype: torch.dtype, dynamic: bool) -> None:
    # A mask that turns on a rounding is another one in half precision: it is compared with itself run in float32.
    if written is mask_from_scores and dtype != torch.float64:
        q, k, v = tensors(2, 3, S, 16, dtype=dtype)
        got = compiled(written, dynamic=dynamic)(q, k, v)
        torch.testing.assert_close(got, written(q.float(), k.float(), v.float()).to(dtype), atol=0.02, rtol=0.02)
        return
    (q,), (k, v) = tensors(2, 4, 5, 24, dtype=dtype, count=1), tensors(2, 4, S, 24, dtype=dtype, count=2)
    if written is capped_after_a_mask:
        q, k, v = tensors(2, 4, S, 24, dtype=dtype)
    check(written, q, k, v, dynamic=dynamic)


@pytest.mark.parametrize("written", [squared, hyperbolic_tangent, scaled_by_key, chosen_between_functions])
def test_with_inductor_behind(written) -> None:
    check(written, *tensors(2, 3, S, 16), inner="inductor")


def test_the_inverse_of_a_score() -> None:
    # Scores near 0 make any backward ill-conditioned; the forward is not.
    def over_scores(q, k, v):
        return (1 / scores(q, k)).softmax(-1) @ v

    reason = "something is divided by the scores"
    is_chunked(over_scores, reason, *tensors(2, 3, S, 16), backward=False)
    q, k, v = (t.abs() + 1 for t in tensors(2, 3, S, 16))
    is_chunked(over_scores, reason, q, k, v)


@pytest.mark.parametrize("scale", [1e3, 10.0])
def test_fills_that_large_scores_reach(scale: float) -> None:
    def filled(q, k, v):
        return (scale * scores(q, k)).masked_fill(above(), -1e4).softmax(-1) @ v

    def added(q, k, v):
        return (scale * scores(q, k) + (1 - torch.ones(S, S).tril()) * -1e4).softmax(-1) @ v

    # Scaled up a thousandfold, the weights are 0 or 1 and gradients mere rounding.
    sane = scale < 100
    is_chunked(filled, "masked scores become -10000", *tensors(2, 3, S, 16), backward=sane)
    check(added, *tensors(2, 3, S, 16), backward=sane)


def test_scores_that_are_all_infinite() -> None:
    def scaled(q, k, v):
        return (scores(q, k) * math.inf).softmax(-1) @ v

    q, k, v = tensors(2, 3, S, 16)
    reason = "some scores are plus infinity, whose weight is no number"
    assert_refused(scaled, q, k, v, reason=reason, backward=False)


def test_scores_read_twice_are_one_product() -> None:
    def written(q, k, v):
        s = scores(q, k)
        return torch.where(s > 0, s, 0.1 * s).softmax(-1) @ v + s.sum()

    is_chunked(written, "the mask is computed from the scores", *tensors(2, 3, S, 16))


def test_a_learned_cap_gets_its_gradient() -> None:
    def written(q: Tensor, k: Tensor, v: Tensor, cap: Tensor) -> Tensor:
        return (cap * torch.tanh(scores(q, k) / cap)).softmax(-1) @ v

    caps = torch.tensor([2.0, 3.0, 4.0]).view(3, 1, 1)
    is_chunked(written, "the scores pass through tanh", *tensors(2, 3, S, 16), caps)


def test_a_network_of_the_distance_gets_its_gradient() -> None:
    def written(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, table: Tensor) -> Tensor:
        i = torch.arange(S)
        apart = (i[:, None] - i).abs()
        return torch.tanh(scores(q, k) - slope.exp() * apart + table[apart]).softmax(-1) @ v

    slope, table = torch.randn(3, 1, 1), torch.randn(S)
    is_chunked(written, "the scores pass through tanh", *tensors(2, 3, S, 16), slope, table)
