"""Programs that are easily mistaken: whatever is made of them, they are computed right. Inductor stands behind us."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cpu.test_lookalikes import INF, S, one_key, other_axis, scores, second_softmax, talking_heads
from tests.harness import assert_fused, check, tensors

pytestmark = pytest.mark.thorough


def swapped_key(q, k, v):
    """The key permuted wrongly; at these sizes it still multiplies."""
    return (q @ k.permute(0, 2, 3, 1) / 4.0).softmax(-1) @ v


def product_without_transpose(q, k, v):
    return (q @ k).softmax(-1) @ v


def reversed_triangle(q, k, v):
    return scores(q, k).masked_fill(torch.ones(S, S).tril(-1).bool(), -1e9).softmax(-1) @ v


def strict_triangle(q, k, v):
    return scores(q, k).masked_fill(torch.ones(S, S).tril(-1) == 0, -INF).softmax(-1) @ v


def strict_triangle_lowest(q, k, v):
    return scores(q, k).masked_fill(torch.ones(S, S).tril(-1) == 0, torch.finfo(q.dtype).min).softmax(-1) @ v


def bool_added(q, k, v):
    return (scores(q, k) + torch.ones(S, S).tril().bool()).softmax(-1) @ v


def channels(q, k, v):
    return ((q.mT @ k) / 4).softmax(-1) @ v.mT


def differential(q, k, v):
    return scores(q, k).softmax(-1) @ v - scores(k, q).softmax(-1) @ v


def two_products(q, k, v):
    return (scores(q, k) + scores(k, v)).softmax(-1) @ v


def broadcast_value(q, k, v):
    return scores(q, k).softmax(-1) @ v[:1]


def zero_scale(q, k, v):
    return (q @ k.mT * 0.0).softmax(-1) @ v


def mask_with_values(q, k, v):
    return scores(q, k).masked_fill(torch.arange(S) % 3 == 0, -INF).softmax(-1) @ v


def linear_attention(q, k, v):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def row_bias(q, k, v):
    return (scores(q, k) + q[..., :1]).softmax(-1) @ v


def value_of_two_dimensions(q, k, v):
    return torch.einsum("bhij,bhjxy->bhixy", scores(q, k).softmax(-1), v.view(*v.shape[:3], 4, 4))


def heads_summed_in_the_output(q, k, v):
    return torch.einsum("bhij,bhjd->bid", scores(q, k).softmax(-1), v)


def sorted_scores(q, k, v):
    return scores(q, k).sort(-1).values.softmax(-1) @ v


def only_some_queries(q, k, v):
    return scores(q, k).softmax(-1)[:, :, 2:5] @ v


def values_moved(q, k, v):
    return scores(q, k).softmax(-1) @ v.roll(1, -2)


def other_batch(q, k, v):
    return scores(q, k).softmax(-1).flip(0) @ v


def scores_mirrored(q, k, v):
    return scores(q, k).flip(-1).softmax(-1) @ v


def less_the_mean_of_a_query(q, k, v):
    s = scores(q, k)
    return (s - s.mean(-1, keepdim=True)).softmax(-1) @ v


def detached_key(q, k, v):
    return scores(q, k.detach()).softmax(-1) @ v


def detached_value(q, k, v):
    return scores(q, k).softmax(-1) @ v.detach()


def all_without_gradient(q, k, v):
    with torch.no_grad():
        out = scores(q, k).softmax(-1) @ v
    return out * q


def output_written(q, k, v):
    out = scores(q, k).softmax(-1) @ v
    out.mul_(2)
    return out


def weights_used_again(q, k, v):
    p = scores(q, k).softmax(-1)
    return p @ (p @ v)


def one_row_of_scores_written(q, k, v):
    s = scores(q, k)
    s[:, 0] += s[:, 1].detach()
    return s.softmax(-1) @ v


RIGHT = [
    product_without_transpose, reversed_triangle, strict_triangle, strict_triangle_lowest, bool_added, channels,
    differential, two_products, broadcast_value, zero_scale, mask_with_values, row_bias, one_key,
    value_of_two_dimensions, linear_attention, heads_summed_in_the_output, sorted_scores, only_some_queries,
    values_moved, other_batch, scores_mirrored, less_the_mean_of_a_query, detached_key, detached_value,
    all_without_gradient, output_written, weights_used_again, one_row_of_scores_written,
]  # fmt: skip


@pytest.mark.parametrize("written", RIGHT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("backward", [True, False], ids=["training", "inference"])
def test_computed_right(written, backward: bool) -> None:
    shape = (2, 3, 16, 16) if written is product_without_transpose else (2, 3, S, 16)
    outcome = check(written, *tensors(*shape), backward=backward)
    assert all(site.fused or site.blocker is not None for site in outcome.sites)


def test_a_permuted_key_at_colliding_sizes() -> None:
    q = torch.randn(1, 4, 4, 16)
    check(swapped_key, q, torch.randn(1, 16, 4, 4).permute(0, 2, 3, 1), torch.randn(1, 4, 4, 4))
    check(swapped_key, *tensors(1, 4, 4, 4))


def test_heads_in_the_wrong_order_are_still_right() -> None:
    def repeated(q, k, v):
        return scores(q, k.repeat(1, 2, 1, 1)).softmax(-1) @ v.repeat(1, 2, 1, 1)

    (q,), (k, v) = tensors(2, 4, S, 16, count=1), tensors(2, 2, S, 16, count=2)
    assert_fused(repeated, q, k, v)


@pytest.mark.parametrize(
    "written",
    [other_axis, swapped_key, mask_with_values, strict_triangle_lowest, differential, talking_heads, second_softmax],
    ids=lambda f: f.__name__,
)
def test_with_inductor_behind(written) -> None:
    shape = (1, 4, 4, 4) if written is swapped_key else (2, 3, S, 16)
    check(written, *tensors(*shape), inner="inductor", backward=False)


# ---- a reading that is nearly right would be wrong


def keep(*, empty: bool = True) -> Tensor:
    """A mask; the third query of the first batch entry sees nothing if `empty`."""
    seen = torch.rand(2, 1, S, S) > 0.4
    seen[..., 0] = True
    seen[0, 0, 2] = not empty
    return seen


def zero_where_a_logarithm_is_no_number(q, k, v):
    s = scores(q, k)
    return torch.where(s.log().isnan(), 0.0, s.softmax(-1)) @ v


def filled_where_the_logarithm_is_infinite(q, k, v):
    p = scores(q, k).masked_fill(torch.ones(S, S).triu(1).bool(), -INF).softmax(-1)
    return torch.where(p.log().isinf(), 0.3, p) @ v


def filled_where_the_inverse_is_infinite(q, k, v):
    p = scores(q, k).masked_fill(torch.ones(S, S).triu(1).bool(), -INF).softmax(-1)
    return torch.where((1 / p) == INF, 0.3, p) @ v


def guard_after_a_finite_fill(q, k, v, seen):
    return scores(q, k).masked_fill(~seen, -1e9).softmax(-1).nan_to_num(0.0) @ v


def guard_after_the_lowest_fill(q, k, v, seen):
    return scores(q, k).masked_fill(~seen, torch.finfo(q.dtype).min).softmax(-1).nan_to_num(0.0) @ v


def row_guard_after_a_finite_fill(q, k, v, seen):
    s = scores(q, k).masked_fill(~seen, -1e9)
    return torch.where((s == -INF).all(-1, keepdim=True), 0.0, s.softmax(-1)) @ v


def safe_after_a_finite_fill(q, k, v, seen):
    return torch.ops.aten._safe_softmax(scores(q, k).masked_fill(~seen, -1e9), -1) @ v


def mask_again_after_a_finite_fill(q, k, v, seen):
    return (scores(q, k).masked_fill(~seen, -1e9).softmax(-1) * seen) @ v


def part_of_the_mask_again(q, k, v, seen):
    part = seen | (torch.arange(S)[:, None] == 2)
    return (scores(q, k).masked_fill(~(seen & part), -1e9).softmax(-1) * part) @ v


def part_of_the_mask_filled_again(q, k, v, seen):
    part = torch.arange(S) < 4
    return scores(q, k).masked_fill(~(seen & part), -1e9).softmax(-1).masked_fill(~part, 0.0) @ v


def mask_again_after_infinity(q, k, v, seen):
    return (scores(q, k).masked_fill(~seen, -INF).softmax(-1).nan_to_num(0.0) * seen) @ v


def another_mask_afterwards(q, k, v, seen):
    return (scores(q, k).masked_fill(~seen, -1e9).softmax(-1) * seen.roll(1, -1)) @ v


EMPTY_ROWS = [
    guard_after_a_finite_fill, guard_after_the_lowest_fill, row_guard_after_a_finite_fill, safe_after_a_finite_fill,
    mask_again_after_a_finite_fill, part_of_the_mask_again, part_of_the_mask_filled_again, mask_again_after_infinity,
    another_mask_afterwards,
]  # fmt: skip


def sink_of_each_key(q, k, v, logits):
    e = scores(q, k).exp()
    return (e / (e.sum(-1, keepdim=True) + logits.exp())) @ v


def shifted_sink_of_each_key(q, k, v, logits):
    s = scores(q, k)
    largest = s.amax(-1, keepdim=True)
    e = (s - largest).exp()
    return (e / (e.sum(-1, keepdim=True) + (logits - largest).exp())) @ v


def looked_up_from_the_end(q, k, v, table):
    i = torch.arange(S)
    return (scores(q, k) + table[i - i[:, None]]).softmax(-1) @ v


def looked_up_from_the_end_then_capped(q, k, v, table):
    i = torch.arange(S)
    return torch.tanh(scores(q, k) + table[i - i[:, None]]).softmax(-1) @ v


def small_whole_numbers(q, k, v, place):
    near = place[:, None].to(q.dtype) * place[None, :].to(q.dtype)
    return torch.tanh(scores(q, k) * near * 1e-3).softmax(-1) @ v


def small_whole_numbers_that_wrap(q, k, v, place):
    return torch.tanh(scores(q, k) * (place[:, None] * place[None, :]) * 0.1).softmax(-1) @ v


def small_whole_numbers_subtracted(q, k, v, place):
    apart = place[:, None].to(q.dtype) - place[None, :].to(q.dtype)
    return torch.tanh(scores(q, k) - 0.01 * apart).softmax(-1) @ v


def learned_temperature(q, k, v, row):
    return (scores(q, k) * row.mean().exp().clamp(max=100)).softmax(-1) @ v


WITH_A_ROW = [
    (sink_of_each_key, torch.arange(float(S)).sin()),
    (shifted_sink_of_each_key, torch.arange(float(S)).sin()),
    (looked_up_from_the_end, torch.arange(2.0 * S - 1).sin()),
    (looked_up_from_the_end_then_capped, torch.arange(2.0 * S - 1).sin()),
    (small_whole_numbers, torch.arange(S, dtype=torch.int8) * 17),
    (small_whole_numbers, torch.arange(S, dtype=torch.uint8) * 40),
    (small_whole_numbers_subtracted, torch.arange(S, dtype=torch.uint8) * 40),
    (small_whole_numbers_that_wrap, torch.arange(S, dtype=torch.int8) * 17),
    (learned_temperature, torch.arange(float(S)).sin()),
]

ONLY_ALLOWED = [["cpu_flash"], ["chunked"]]


@pytest.mark.parametrize("kernels", ONLY_ALLOWED, ids=lambda names: names[0])
@pytest.mark.parametrize(
    "written",
    [
        zero_where_a_logarithm_is_no_number,
        filled_where_the_logarithm_is_infinite,
        filled_where_the_inverse_is_infinite,
    ],
    ids=lambda f: f.__name__,
)
def test_a_question_about_a_function_of_the_weights(written, kernels) -> None:
    check(written, *tensors(2, 3, S, 16), kernels=kernels)


@pytest.mark.parametrize("backward", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("kernels", ONLY_ALLOWED, ids=lambda names: names[0])
@pytest.mark.parametrize("written", EMPTY_ROWS, ids=lambda f: f.__name__)
def test_queries_that_see_nothing(written, kernels, backward: bool) -> None:
    check(written, *tensors(2, 3, S, 16), keep(), kernels=kernels, backward=backward)


@pytest.mark.parametrize("kernels", ONLY_ALLOWED, ids=lambda names: names[0])
@pytest.mark.parametrize(("written", "row"), WITH_A_ROW, ids=lambda c: getattr(c, "__name__", ""))
def test_with_numbers_of_each_key(written, row: Tensor, kernels) -> None:
    for backward in (True, False):
        torch._dynamo.reset()
        check(written, *tensors(2, 3, S, 16), row, kernels=kernels, backward=backward)


@pytest.mark.parametrize("kernels", ONLY_ALLOWED, ids=lambda names: names[0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["range", "cast", "difference"])
def test_positions_that_a_narrow_dtype_rounds(form: str, dtype: torch.dtype, kernels) -> None:
    def written(q, k, v):
        i = torch.arange(600) * 9
        if form == "range":
            i = torch.arange(600, dtype=dtype)
        if form == "cast":
            i = i.to(dtype)
        apart = i[:, None] - i
        hidden = apart.to(dtype) < -4 if form == "difference" else i[:, None] < i
        return scores(q, k).masked_fill(hidden, -INF).softmax(-1) @ v

    check(written, *tensors(1, 1, 600, 8), kernels=kernels, backward=False)


@pytest.mark.parametrize("kernels", [["cpu_flash"], ["chunked"], ["flex"]], ids=lambda names: names[0])
@pytest.mark.parametrize("scale", [-0.5, 0.0, -0.0, 1e-30])
@pytest.mark.parametrize("masked", [True, False], ids=["causal", "no mask"])
def test_a_scale_that_is_not_positive(scale: float, masked: bool, kernels) -> None:
    """torch's flash attention multiplies the -inf of a causal mask by it."""

    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * scale
        if masked:
            scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), float("-inf"))
        return scores.softmax(-1) @ v

    inner = "inductor" if kernels == ["flex"] else "eager"
    check(written, *tensors(2, 3, 9, 16), backward=kernels != ["flex"], kernels=kernels, inner=inner)
