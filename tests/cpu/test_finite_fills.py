"""Keys that a finite fill hides are passed over, unless something else may lie as low."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.report import collecting
from tests.harness import check, compiled, every_day

T, LONG, INF = 8, 600, math.inf
LOWEST = torch.finfo(torch.float32).min
ABOVE = torch.ones(T, T, dtype=torch.bool).triu(1)
ALLOWED = pytest.mark.parametrize("kernels", [["cpu_flash"], ["chunked"]], ids=lambda names: names[0])


def keeps(padding: Tensor, window: int | None = None) -> Tensor:
    """Causal, with padding [batch, LONG] of 0 and 1, as Hugging Face's models make it."""
    i, j = torch.arange(LONG)[:, None], torch.arange(LONG)
    seen = (j <= i) if window is None else (j <= i) & (j > i - window)
    return seen & (padding[:, None, None, :] != 0)


# The scores with keys hidden by a padding.
SOFT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal padding added": lambda s, p: s + torch.where(keeps(p), 0.0, LOWEST),
    "causal padding filled": lambda s, p: s.masked_fill(~keeps(p), -1e9),
    "window padding filled": lambda s, p: torch.where(keeps(p, 50), s, -1e30),
    "padding alone": lambda s, p: s + torch.where(p[:, None, None, :] != 0, 0.0, -3e38),
    "causal and padding each added": lambda s, p: (
        s + torch.where(p[:, None, None, :] != 0, 0.0, LOWEST / 4) + torch.full((LONG, LONG), LOWEST).triu(1) / 4
    ),
}


def sides() -> Tensor:
    """No padding, on the right, on the left, one in the middle, and nothing else."""
    padding = torch.ones(5, LONG, dtype=torch.int64)
    padding[1, 250:], padding[2, :333], padding[3, 40:290], padding[4] = 0, 0, 0, 0
    return padding


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kernel", "backward"),
    [
        *((name, "chunked", backward) for name in SOFT for backward in (True, False)),
        *((name, "flex", False) for name in ("causal padding added", "window padding filled")),
    ],
)
def test_blocks_are_passed_over(name: str, kernel: str, backward: bool) -> None:
    # In float64 other numbers would swallow a score, so it is held against itself in float32.
    program = lambda q, p: SOFT[name](q @ q.mT, p).softmax(-1) @ q  # noqa: E731
    q = torch.randn(5, 2, LONG, 16)
    again, pull, padding = q.clone().requires_grad_(backward), torch.randn(q.shape), sides()
    expected = program(q.requires_grad_(backward), padding)
    with collecting() as graphs:
        inner = "inductor" if kernel == "flex" else "eager"
        got = compiled(program, inner, kernels=[kernel], strict=True)(again, padding)
    assert "key padding" in graphs[-1].sites[0].attention["mask"]
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    if backward:
        expected.backward(pull)
        got.backward(pull)
        torch.testing.assert_close(again.grad, q.grad, atol=2e-4, rtol=1e-3)


@pytest.mark.thorough
def test_what_is_hidden_is_not_computed() -> None:
    """NaN in a value that nobody sees would come out, if it had a weight of 0."""
    q, v, padding = torch.randn(1, 2, LONG, 16), torch.randn(1, 2, LONG, 16), torch.ones(1, LONG, dtype=torch.int64)
    padding[:, 250:], v[:, :, 256:] = 0, torch.nan

    def written(q: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        return (q @ q.mT + torch.where(keeps(padding), 0.0, LOWEST)).softmax(-1) @ v

    assert compiled(written, kernels=["chunked"])(q, v, padding).isfinite().all()


LOWER: dict[str, Callable[[Tensor], Tensor]] = {
    "logarithm": lambda s: s.relu().log(),
    "logarithm of a sigmoid": lambda s: nn.functional.logsigmoid(1e10 * s),
    "exponential": lambda s: -torch.exp(-30 * s),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kernels", [["chunked"], ["flex"]], ids=lambda names: names[0])
@pytest.mark.parametrize("name", LOWER)
def test_a_function_of_the_scores_may_be_lower_than_the_fill(name: str, kernels: list[str]) -> None:
    """Then the one key that the first query sees has no weight, and those that are hidden from it have."""

    def written(q: Tensor) -> Tensor:
        return LOWER[name](-(q @ q.mT)).masked_fill(ABOVE, -1e9).softmax(-1) @ q

    q = torch.randn(1, 2, T, 16)
    expected = written(q)
    assert torch.allclose(expected[:, :, 0], q[:, :, 1:].mean(2), atol=1e-4)
    torch.testing.assert_close(compiled(written, "inductor", kernels=kernels)(q), expected, atol=1e-5, rtol=1e-4)


AT, TABLE = torch.arange(T).lt(3).long(), torch.tensor([0.0, -1e30])
# 9 ** 20 is no int64: what comes out is negative, so that the exponential of its negative is huge.
BIASES: dict[str, Callable[[], Tensor]] = {
    "a table": lambda: TABLE[AT],
    "a number": lambda: torch.where(AT == 1, -1e30 * torch.arange(1.0, 1 + T), 0.25),
    "infinite elsewhere": lambda: torch.where(AT == 1, -INF, 0.1 * torch.arange(T)),
    "logarithm of a mask": lambda: (torch.arange(T) > 2).float().log(),
    "logarithm of a position": lambda: (torch.arange(T) - 2.0).relu().log(),
    "over a position": lambda: -1.0 / torch.arange(T),
    "position to the power of minus two": lambda: -(torch.arange(T).float() ** -2),
    "exponential of a position": lambda: -(30 * (T - torch.arange(T))).exp(),
    "high power of a position": lambda: -((T - torch.arange(T)).float() ** 60),
    "whole numbers that wrap": lambda: -(-1e-17 * (T + 1 - torch.arange(T)) ** 20).exp(),
}


@pytest.mark.parametrize("backward", [True, False], ids=["training", "inference"])
@ALLOWED
@pytest.mark.parametrize("name", every_day(BIASES, "a table", "whole numbers that wrap"))
def test_a_bias_may_be_lower_than_the_fill(name: str, kernels: list[str], backward: bool) -> None:
    def written(q: Tensor) -> Tensor:
        return (q @ q.mT + BIASES[name]()).masked_fill(ABOVE, -1e9).softmax(-1) @ q

    q = torch.randn(2, 4, T, 16)
    assert written(q)[:, :, 0].isfinite().all()
    check(written, q, backward=backward, **({} if kernels == ["cpu_flash"] else {"kernels": kernels}))


class LearnedBias(nn.Module):
    """T5's decoder: a learned bias by distance, and a finite causal mask with padding, added up before the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * LONG, 2)

    def forward(self, q: Tensor, padding: Tensor) -> Tensor:
        i = torch.arange(LONG)
        bias = self.table(i[:, None] - i + LONG).permute(2, 0, 1)
        return (q @ q.mT + (bias + torch.where(keeps(padding), 0.0, LOWEST))).softmax(-1) @ q


@pytest.mark.thorough
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
    def written(q: Tensor) -> Tensor:
        return ((q @ q.mT).masked_fill(ABOVE, -1e9) / temperature).softmax(-1) @ q

    site = check(written, torch.randn(2, 4, T, 16)).site
    assert site.fused and (site.attention["mask"] == "none") == (temperature > 1e7)


HUGE = [(lambda s, t: s * t, 1e10), (lambda s, t: s / t, 1e-10), (lambda s, t: s * t.sqrt() * t.sqrt(), 1e10)]


@pytest.mark.thorough
@pytest.mark.parametrize("kernels", [["cpu_flash"], ["chunked"]], ids=lambda names: names[0])
@pytest.mark.parametrize("shape", [(), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("fill", ["in place", "added"])
@pytest.mark.parametrize(("scaled", "number"), HUGE, ids=["times", "over", "times roots"])
def test_a_factor_from_memory_may_be_anything(scaled, number, fill, shape, kernels) -> None:
    """Scores of 1e10 reach -1e9: hidden keys then have weights beside them."""

    def written(q: Tensor, factor: Tensor) -> Tensor:
        s = scaled(q @ q.flip(2).mT, factor)
        s = s.masked_fill(ABOVE, -1e9) if fill == "in place" else s + torch.where(ABOVE, -1e9, 0.0)
        return s.softmax(-1) @ q

    q, factor = torch.randn(2, 4, T, 16), torch.full(shape, number)
    hidden = scaled(q @ q.flip(2).mT, factor).masked_fill(ABOVE, -INF).softmax(-1) @ q
    expected = written(q, factor)
    assert not torch.allclose(expected, hidden, atol=1e-2)
    torch.testing.assert_close(compiled(written, kernels=kernels)(q, factor), expected, atol=1e-4, rtol=1e-4)


class Tempered(nn.Module):
    """Scores over a number that the module keeps."""

    def __init__(self, number: Tensor) -> None:
        super().__init__()
        if isinstance(number, nn.Parameter):
            self.number = number
        else:
            self.register_buffer("number", number)

    def forward(self, q: Tensor) -> Tensor:
        return (q @ q.mT / self.number).masked_fill(ABOVE, -1e9).softmax(-1) @ q


@pytest.mark.parametrize(
    "number",
    [torch.tensor([16.0]).sqrt(), torch.tensor(4.0), nn.Parameter(torch.ones(4, 1, 1))],
    ids=["buffer", "number", "learned"],
)
def test_a_factor_that_is_known_or_learned_is_ordinary(number) -> None:
    outcome = check(Tempered(number), torch.randn(2, 4, T, 16), backward=False)
    assert outcome.site.attention["mask"].startswith("causal") and outcome.site.kernel == "cpu_flash"


# ---- float16

HALF = torch.finfo(torch.float16).min
# Of the scores, what hides keys (their padding is 0) and a bias.
LOWEST_ADDED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "added": lambda s, padding, bias: s + (1 - padding) * HALF,
    "added by condition": lambda s, padding, bias: s + (1 - torch.ones(T, T).triu(1).to(s.dtype)) * HALF,
    "added in float32": lambda s, padding, bias: s.float() + (1 - padding) * HALF,
    "added twice": lambda s, padding, bias: s + (1 - padding) * HALF + torch.full((T, T), HALF, dtype=s.dtype).triu(4),
    "filled, then a bias": lambda s, padding, bias: s.masked_fill(padding == 0, HALF) + bias,
    "added, and a bias": lambda s, padding, bias: s + (1 - padding) * HALF + bias,
    "chosen, and a bias": lambda s, padding, bias: s + torch.where(padding > 0, 0.0, HALF).to(s.dtype) + bias,
    "made in float32": lambda s, padding, bias: s + ((1 - padding.float()) * HALF).to(s.dtype),
    "made in float32, with a triangle": lambda s, padding, bias: (
        (s + bias).masked_fill(ABOVE, HALF) + ((1 - padding.float()) * HALF).to(s.dtype)
    ),
}


@pytest.mark.parametrize("kernels", [None, pytest.param(["chunked"], marks=pytest.mark.thorough)], ids=str)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", every_day(LOWEST_ADDED, "made in float32, with a triangle"))
def test_the_lowest_number_of_float16_takes_up_what_is_added_to_it(name: str, grad: bool, kernels) -> None:
    """In float32 and wider the sum would still tell the keys apart that nothing is to be seen of."""
    padding = torch.ones(2, 1, 1, T, dtype=torch.float16)
    padding[0, ..., 5:] = padding[1] = 0
    q, k, v, bias = (torch.randn(2, 3, T, n, dtype=torch.float16) for n in (4, 4, 4, T))

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return LOWEST_ADDED[name](q @ k.mT * 0.35, padding, bias).softmax(-1).to(q.dtype) @ v

    def results(by: Callable[..., Tensor]) -> list[Tensor]:
        operands = [x.clone().requires_grad_(grad) for x in (q, k, v, bias)]
        out = by(*operands)
        grads = torch.autograd.grad(out.sum(), operands, allow_unused=True) if grad else ()
        return [out.detach(), *(x for x in grads if x is not None)]

    options = {"pick": "fused", "inner_backend": "eager"} | ({"kernels": kernels} if kernels else {})
    with collecting() as graphs:
        found = results(torch.compile(attend, backend="attn_fuse", options=options))
    assert [site.fused for graph in graphs for site in graph.sites] == [True]
    torch.testing.assert_close(found, results(attend), atol=0.02, rtol=0.02)
