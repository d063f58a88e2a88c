"""A query that sees no key: NaN under minus infinity, a mean of the values under a finite fill, exactly as written."""

from __future__ import annotations

import pytest
import torch

from attn_fuse.report import collecting
from tests.harness import assert_chunked, assert_fused, check, compiled

pytestmark = pytest.mark.thorough

T = 8
LOWEST = torch.finfo(torch.float32).min


def above() -> torch.Tensor:
    return torch.ones(T, T, dtype=torch.bool).triu(1)


def causal_then_padding(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """GPT-2 in Hugging Face's form: a finite causal fill, then a finite padding mask added."""
    return ((q @ q.mT).masked_fill(above(), LOWEST) + padding).softmax(-1) @ q


def padding_then_causal(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT + padding).masked_fill(above(), LOWEST).softmax(-1) @ q


def both_added(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT + padding + torch.full((T, T), -1e9).triu(1)).softmax(-1) @ q


def infinite_causal_then_padding(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return ((q @ q.mT).masked_fill(above(), float("-inf")) + padding).softmax(-1) @ q


def less_than_lowest_causal(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return ((q @ q.mT).masked_fill(above(), -1e9) + padding).softmax(-1) @ q


def two_fills(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT).masked_fill(padding < 0, -1e9).masked_fill(above(), float("-inf")).softmax(-1) @ q


def finite_padding(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT).masked_fill(padding < 0, -1e9).softmax(-1) @ q


def added_twice(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT + padding.clamp(min=-1e9) + padding.clamp(min=-1e9)).softmax(-1) @ q


def infinite_padding_made_zero(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT).masked_fill(padding < 0, float("-inf")).softmax(-1).nan_to_num(0.0) @ q


def infinite_padding_safe(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._safe_softmax((q @ q.mT).masked_fill(padding < 0, float("-inf")), -1) @ q


def infinite_padding_guarded(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    scores = (q @ q.mT).masked_fill(padding < 0, float("-inf"))
    return torch.where((scores == float("-inf")).all(-1, keepdim=True), 0.0, scores.softmax(-1)) @ q


MEAN = "a query that sees no key would get another mean of the values"
GRADIENT = "a query that sees no key would get a gradient, which the program's fill value stops"
HIDING = "a bias that may hide every key of a query, as padding does, would get a wrong gradient"
# What cpu_flash says in inference, and in training.
CASES = [
    (causal_then_padding, None, HIDING),
    (padding_then_causal, None, HIDING),
    (both_added, None, HIDING),
    (infinite_causal_then_padding, None, HIDING),
    (added_twice, None, HIDING),
    (finite_padding, None, GRADIENT),
    (less_than_lowest_causal, MEAN, MEAN),
    (two_fills, MEAN, MEAN),
    (infinite_padding_made_zero, None, None),
    (infinite_padding_safe, None, None),
    (infinite_padding_guarded, None, None),
]


def padding(first: int) -> torch.Tensor:
    """Left padding, as generation has it: the first queries see nothing."""
    mask = torch.zeros(2, 1, 1, T)
    mask[0, ..., :first] = LOWEST
    return mask


@pytest.mark.parametrize("backward", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("first", [0, 3, T])
@pytest.mark.parametrize(("written", "inference", "training"), CASES, ids=lambda c: getattr(c, "__name__", ""))
def test_every_case(written, inference, training, first: int, backward: bool) -> None:
    q, mask = torch.randn(2, 4, T, 16), padding(first)
    # The padding takes no gradient: it is a mask.
    program = lambda q: written(q, mask)  # noqa: E731
    declined = training if backward else inference
    if declined is None:
        assert assert_fused(program, q, backward=backward).site.kernel == "cpu_flash"
    else:
        assert_chunked(program, q, reason=declined, backward=backward)
    check(program, q, backward=backward, kernels=["chunked"])


GUARDED = [infinite_padding_made_zero, infinite_padding_safe, infinite_padding_guarded]


@pytest.mark.parametrize("written", [infinite_causal_then_padding, *GUARDED], ids=lambda c: c.__name__)
def test_float16(written) -> None:
    # The others fill with numbers that float16 does not have.
    q, mask = torch.randn(2, 4, T, 16).half(), padding(3).clamp(min=torch.finfo(torch.float16).min).half()
    check(written, q, mask, backward=False)


@pytest.mark.parametrize("kernels", [["cpu_flash"], ["chunked"]], ids=lambda names: names[0])
@pytest.mark.parametrize("written", GUARDED, ids=lambda f: f.__name__)
def test_a_guard_gives_exactly_zero(written, kernels) -> None:
    out = compiled(written, kernels=kernels)(torch.randn(2, 4, T, 16), padding(T))
    assert not out[0].any() and out[1].all()


# ---- what a finite fill hides is passed over, where the query sees another key

LONG = 600


def keeps(padding: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Causal, with padding [batch, LONG] of 0 and 1, as Hugging Face's models make it."""
    i, j = torch.arange(LONG)[:, None], torch.arange(LONG)
    seen = (j <= i) if window is None else (j <= i) & (j > i - window)
    return seen & (padding[:, None, None, :] != 0)


def causal_padding_added(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT + torch.where(keeps(padding), 0.0, torch.finfo(q.dtype).min)).softmax(-1) @ q


def causal_padding_filled(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT).masked_fill(~keeps(padding), -1e9).softmax(-1) @ q


def window_padding_filled(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return torch.where(keeps(padding, 50), q @ q.mT, -1e30).softmax(-1) @ q


def causal_and_padding_each_added(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    above = torch.full((LONG, LONG), LOWEST).triu(1)
    hidden = torch.where(padding[:, None, None, :] != 0, 0.0, LOWEST / 4)
    return (q @ q.mT + hidden + above / 4).softmax(-1) @ q


def padding_alone(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT + torch.where(padding[:, None, None, :] != 0, 0.0, -3e38)).softmax(-1) @ q


SOFT = [
    causal_padding_added, causal_padding_filled, window_padding_filled, causal_and_padding_each_added, padding_alone,
]  # fmt: skip


def sides() -> torch.Tensor:
    """No padding, on the right, on the left, one in the middle, and nothing else."""
    padding = torch.ones(5, LONG, dtype=torch.int64)
    padding[1, 250:], padding[2, :333], padding[3, 40:290], padding[4] = 0, 0, 0, 0
    return padding


@pytest.mark.parametrize(
    ("written", "kernel", "backward"),
    [
        *((f, "chunked", True) for f in SOFT),
        *((f, "chunked", False) for f in SOFT),
        *((f, "flex", False) for f in SOFT[:3:2]),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_blocks_are_passed_over(written, kernel, backward) -> None:
    # In float64 other numbers would swallow a score, so it is held against itself in float32.
    q = torch.randn(5, 2, LONG, 16)
    again, pull, padding = q.clone().requires_grad_(backward), torch.randn(q.shape), sides()
    expected = written(q.requires_grad_(backward), padding)
    with collecting() as graphs:
        inner = "inductor" if kernel == "flex" else "eager"
        got = compiled(written, inner, kernels=[kernel], strict=True)(again, padding)
    assert "key padding" in graphs[-1].sites[0].attention["mask"]
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    if backward:
        expected.backward(pull)
        got.backward(pull)
        torch.testing.assert_close(again.grad, q.grad, atol=2e-4, rtol=1e-3)


def test_what_is_hidden_is_not_computed() -> None:
    """NaN in a value that nobody sees would come out, if it had a weight of 0."""
    q, v, padding = torch.randn(1, 2, LONG, 16), torch.randn(1, 2, LONG, 16), torch.ones(1, LONG, dtype=torch.int64)
    padding[:, 250:], v[:, :, 256:] = 0, torch.nan

    def written(q: torch.Tensor, v: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return (q @ q.mT + torch.where(keeps(padding), 0.0, LOWEST)).softmax(-1) @ v

    assert compiled(written, kernels=["chunked"])(q, v, padding).isfinite().all()


def logarithm(scores: torch.Tensor) -> torch.Tensor:
    return scores.relu().log()


def logarithm_of_a_sigmoid(scores: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.logsigmoid(1e10 * scores)


def exponential(scores: torch.Tensor) -> torch.Tensor:
    return -torch.exp(-30 * scores)


@pytest.mark.parametrize("kernels", [["chunked"], ["flex"]], ids=lambda names: names[0])
@pytest.mark.parametrize("function", [logarithm, logarithm_of_a_sigmoid, exponential], ids=lambda f: f.__name__)
def test_a_function_of_the_scores_may_be_lower_than_the_fill(function, kernels) -> None:
    """Then the one key that the first query sees has no weight, and those that are hidden from it have."""

    def written(q: torch.Tensor) -> torch.Tensor:
        return function(-(q @ q.mT)).masked_fill(above(), -1e9).softmax(-1) @ q

    q = torch.randn(1, 2, T, 16)
    expected = written(q)
    assert torch.allclose(expected[:, :, 0], q[:, :, 1:].mean(2), atol=1e-4)
    torch.testing.assert_close(compiled(written, "inductor", kernels=kernels)(q), expected, atol=1e-5, rtol=1e-4)


def a_table(q: torch.Tensor, at: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT + table[at]).masked_fill(above(), -1e9).softmax(-1) @ q


def a_number(q: torch.Tensor, at: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    slope = torch.where(at == 1, -1e30 * torch.arange(1.0, 1 + T), 0.25)
    return (q @ q.mT + slope).masked_fill(above(), -1e9).softmax(-1) @ q


def infinite_elsewhere(q: torch.Tensor, at: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    hidden = torch.where(at == 1, float("-inf"), 0.1 * torch.arange(T))
    return (q @ q.mT + hidden).masked_fill(above(), -1e9).softmax(-1) @ q


def logarithm_of_a_mask(q: torch.Tensor, at: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT + (torch.arange(T) > 2).float().log()).masked_fill(above(), -1e9).softmax(-1) @ q


def logarithm_of_a_position(q: torch.Tensor, at: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT + (torch.arange(T) - 2.0).relu().log()).masked_fill(above(), -1e9).softmax(-1) @ q


def divided_by_a_position(q: torch.Tensor, at: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT - 1.0 / torch.arange(T)).masked_fill(above(), -1e9).softmax(-1) @ q


def position_to_the_power_of_minus_two(q: torch.Tensor, at: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT - torch.arange(T).float() ** -2).masked_fill(above(), -1e9).softmax(-1) @ q


def exponential_of_a_position(q: torch.Tensor, at: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT - (30 * (T - torch.arange(T))).exp()).masked_fill(above(), -1e9).softmax(-1) @ q


def high_power_of_a_position(q: torch.Tensor, at: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT - (T - torch.arange(T)).float() ** 60).masked_fill(above(), -1e9).softmax(-1) @ q


def whole_numbers_that_wrap(q: torch.Tensor, at: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """9 ** 20 is no int64: what comes out is negative, so that the exponential of its negative is huge."""
    power = (T + 1 - torch.arange(T)) ** 20
    return (q @ q.mT - (-1e-17 * power).exp()).masked_fill(above(), -1e9).softmax(-1) @ q


@pytest.mark.parametrize("written", [a_table, a_number, infinite_elsewhere], ids=lambda f: f.__name__)
@pytest.mark.parametrize("backward", [False, True], ids=["inference", "training"])
def test_a_bias_may_be_lower_than_the_fill(written, backward: bool) -> None:
    q, at, table = torch.randn(2, 4, T, 16), torch.zeros(T, dtype=torch.int64), torch.tensor([0.0, -1e30])
    at[:3] = 1
    expected = written(q, at, table)
    assert torch.allclose(expected[:, :, 0], q[:, :, 1:].mean(2), atol=1e-4)
    check(lambda q: written(q, at, table), q, backward=backward)
    check(lambda q: written(q, at, table), q, backward=backward, kernels=["chunked"])


_MAY_HIDE = [
    logarithm_of_a_mask,
    logarithm_of_a_position,
    divided_by_a_position,
    position_to_the_power_of_minus_two,
    exponential_of_a_position,
    high_power_of_a_position,
    whole_numbers_that_wrap,
]


@pytest.mark.parametrize("written", _MAY_HIDE, ids=lambda f: f.__name__)
def test_a_function_of_positions_in_a_bias_may_hide(written) -> None:
    q, none = torch.randn(2, 4, T, 16), torch.zeros(T)
    assert written(q, none, none)[:, :, 0].isfinite().all()
    check(lambda q: written(q, none, none), q)
    check(lambda q: written(q, none, none), q, kernels=["chunked"])


class LearnedBias(torch.nn.Module):
    """T5's decoder: a learned bias by distance, and a finite causal mask with padding, added up before the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(2 * LONG, 2)

    def forward(self, q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        i = torch.arange(LONG)
        bias = self.table(i[:, None] - i + LONG).permute(2, 0, 1)
        return (q @ q.mT + (bias + torch.where(keeps(padding), 0.0, LOWEST))).softmax(-1) @ q


def test_a_learned_bias_hides_nothing() -> None:
    model, q, padding = LearnedBias(), torch.randn(5, 2, LONG, 16), sides()
    again, pull = q.clone().requires_grad_(), torch.randn(q.shape)
    model(q.requires_grad_(), padding).backward(pull)
    expected, model.table.weight.grad = model.table.weight.grad, None
    with collecting() as graphs:
        compiled(model)(again, padding).backward(pull)
    site = graphs[-1].sites[0]
    assert site.kernel == "chunked" and "causal & key padding, added" in site.attention["mask"]
    torch.testing.assert_close(again.grad, q.grad, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(model.table.weight.grad, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("temperature", [8, 1e6, 1e8])
def test_a_scaled_fill_has_to_stay_out_of_reach(temperature: float) -> None:
    def written(q: torch.Tensor) -> torch.Tensor:
        return ((q @ q.mT).masked_fill(above(), -1e9) / temperature).softmax(-1) @ q

    site = check(written, torch.randn(2, 4, T, 16)).site
    assert site.fused and (site.attention["mask"] == "none") == (temperature > 1e7)


HUGE = [(lambda s, t: s * t, 1e10), (lambda s, t: s / t, 1e-10), (lambda s, t: s * t.sqrt() * t.sqrt(), 1e10)]


@pytest.mark.parametrize("kernels", [["cpu_flash"], ["chunked"]], ids=lambda names: names[0])
@pytest.mark.parametrize("shape", [(), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("fill", ["in place", "added"])
@pytest.mark.parametrize(("scaled", "number"), HUGE, ids=["times", "over", "times roots"])
def test_a_factor_from_memory_may_be_anything(scaled, number, fill, shape, kernels) -> None:
    """Scores of 1e10 reach -1e9: hidden keys then have weights beside them."""

    def written(q: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        s = scaled(q @ q.flip(2).mT, factor)
        s = s.masked_fill(above(), -1e9) if fill == "in place" else s + torch.where(above(), -1e9, 0.0)
        return s.softmax(-1) @ q

    q, factor = torch.randn(2, 4, T, 16), torch.full(shape, number)
    hidden = scaled(q @ q.flip(2).mT, factor).masked_fill(above(), -torch.inf).softmax(-1) @ q
    expected = written(q, factor)
    assert not torch.allclose(expected, hidden, atol=1e-2)
    torch.testing.assert_close(compiled(written, kernels=kernels)(q, factor), expected, atol=1e-4, rtol=1e-4)


class Tempered(torch.nn.Module):
    """Scores over a number that the module keeps."""

    def __init__(self, number: torch.Tensor) -> None:
        super().__init__()
        if isinstance(number, torch.nn.Parameter):
            self.number = number
        else:
            self.register_buffer("number", number)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return (q @ q.mT / self.number).masked_fill(above(), -1e9).softmax(-1) @ q


@pytest.mark.parametrize(
    "number",
    [torch.tensor([16.0]).sqrt(), torch.tensor(4.0), torch.nn.Parameter(torch.ones(4, 1, 1))],
    ids=["buffer", "number", "learned"],
)
def test_a_factor_that_is_known_or_learned_is_ordinary(number) -> None:
    outcome = check(Tempered(number), torch.randn(2, 4, T, 16), backward=False)
    assert outcome.site.attention["mask"].startswith("causal") and outcome.site.kernel == "cpu_flash"


# ---- float16


def lowest_added(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT * 0.25 + padding).softmax(-1) @ q


def lowest_added_by_condition(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    hidden = 1 - torch.ones(T, T).triu(1).to(q.dtype)
    return (q @ q.mT * 0.25 + hidden * torch.finfo(q.dtype).min).softmax(-1) @ q


def lowest_added_in_float32(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return ((q @ q.mT * 0.25).float() + padding).softmax(-1).to(q.dtype) @ q


def lowest_added_twice(q: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return (q @ q.mT * 0.25 + padding + torch.full((T, T), -65504.0, dtype=q.dtype).triu(4)).softmax(-1) @ q


@pytest.mark.parametrize("options", [{}, {"kernels": ["chunked"]}], ids=["picked", "chunked"])
@pytest.mark.parametrize(
    "written",
    [lowest_added, lowest_added_by_condition, lowest_added_in_float32, lowest_added_twice],
    ids=lambda f: f.__name__,
)
def test_float16_takes_up_what_is_added_to_its_lowest_number(written, options) -> None:
    """In float64 that number would be another one, so the program as written is what is compared with."""
    q, mask = torch.randn(2, 4, T, 16).half(), padding(3).clamp(min=torch.finfo(torch.float16).min).half()
    again, pull = q.clone().requires_grad_(), torch.randn(q.shape).half()
    expected = written(q.requires_grad_(), mask)
    got = compiled(written, **options)(again, mask)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=5e-3)
    expected.backward(pull)
    got.backward(pull)
    torch.testing.assert_close(again.grad, q.grad, rtol=2e-2, atol=2e-2)
    with torch.no_grad():
        torch.testing.assert_close(compiled(written, **options)(q, mask), expected, rtol=1e-2, atol=5e-3)


LOWEST_HALF = torch.finfo(torch.float16).min


def filled_then_a_bias(s: torch.Tensor, padding: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return s.masked_fill(padding == 0, LOWEST_HALF) + bias


def added_and_a_bias(s: torch.Tensor, padding: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return s + (1 - padding) * LOWEST_HALF + bias


def chosen_and_a_bias(s: torch.Tensor, padding: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return s + torch.where(padding > 0, 0.0, LOWEST_HALF).to(s.dtype) + bias


def made_in_float32(s: torch.Tensor, padding: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return s + ((1 - padding.float()) * LOWEST_HALF).to(s.dtype)


def made_in_float32_with_a_triangle(s: torch.Tensor, padding: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (s + bias).masked_fill(above(), LOWEST_HALF) + ((1 - padding.float()) * LOWEST_HALF).to(s.dtype)


@pytest.mark.parametrize(
    "program",
    [filled_then_a_bias, added_and_a_bias, chosen_and_a_bias, made_in_float32, made_in_float32_with_a_triangle],
)
@pytest.mark.parametrize("grad", [False, True])
def test_the_lowest_number_of_float16_takes_up_what_is_added_to_it(program, grad: bool) -> None:
    """In float32 the sum would still tell the keys apart that nothing is to be seen of."""
    padding = torch.ones(2, 1, 1, T, dtype=torch.float16)
    padding[0, ..., 5:] = padding[1] = 0
    q, k, v, bias = (torch.randn(2, 3, T, n, dtype=torch.float16) for n in (4, 4, 4, T))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return program(q @ k.mT * 0.35, padding, bias).softmax(-1) @ v

    def results(by, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
        operands = [x.to(dtype, copy=True).requires_grad_(grad) for x in (q, k, v, bias)]
        out = by(*operands)
        grads = torch.autograd.grad(out.sum(), operands, allow_unused=True) if grad else ()
        return [out.detach(), *(x for x in grads if x is not None)]

    with collecting() as graphs:
        found = results(torch.compile(attend, backend="attn_fuse", options={"pick": "fused", "inner_backend": "eager"}))
    assert [site.fused for graph in graphs for site in graph.sites] == [True]
    torch.testing.assert_close(found, results(attend), atol=0.02, rtol=0.02)
