"""What is done to the scores before the softmax: fused exactly by the kernel that takes it, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_fuse.attention.attention import Attention, Refusal
from attn_fuse.report import collecting
from tests.harness import (
    assert_chunked,
    assert_fused,
    assert_refused,
    assert_right,
    check,
    compiled,
    every_day,
    tensors,
)
from tests.models.lookalikes import COMPARED, INF, S, above, scores
from tests.recognised import recognised

SHAPE = (2, 3, S, 16)
ANOTHER = "masked scores become something that is not one number"
FROM_SCORES = "the mask is computed from the scores"
Of = Callable[[Tensor], Tensor]


def attention(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The attention with `of` done to its scores, of more arguments as `of` has them."""

    def program(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        return of(scores(q, k), *more).softmax(-1) @ v

    return program


def written(write: Callable[[Tensor], Any]) -> Of:
    def of(s: Tensor) -> Tensor:
        write(s)
        return s

    return of


def through(name: str) -> str:
    return f"the scores pass through {name}"


def reached(fill: str) -> str:
    return f"masked scores become {fill}, which ordinary scores can reach"


# What chunked alone takes, and what the report says of it.
FUNCTIONS: dict[str, tuple[Of, str]] = {
    "mask from scores": (lambda s: s.masked_fill(s < 0, -INF), FROM_SCORES),
    "infinity made finite": (lambda s: s.masked_fill(above(), -INF).nan_to_num(neginf=-5.0), FROM_SCORES),
    "small fill": (lambda s: s.masked_fill(above(), -1.0), reached("-1")),
    "zero fill": (lambda s: s.masked_fill(above(), 0.0), reached("0")),
    "ten thousand": (lambda s: (10 * s).masked_fill(above(), -1e4), reached("-10000")),
    "chosen between functions": (
        lambda s: torch.where(~above(), s, 2 * s),
        "the scores are chosen from several products",
    ),
    "scaled by key": (lambda s: s * torch.arange(1.0, S + 1), "the scores are scaled differently for each key"),
    "negatively scaled mask": (lambda s: s.masked_fill(above(), -1e9) * -1.0, reached("1e+09")),
    "squared": (lambda s: s * s, "the scores are multiplied with something computed from them"),
    "over squared": (lambda s: 1 / (2 + s * s), "something is divided by the scores"),
    "softsign": (lambda s: s / (1 + s.abs()), "something is divided by the scores"),
    "capped twice": (lambda s: 2 * torch.tanh(3 * torch.tanh(s / 3) / 2), "capped scores are scaled or bounded"),
    "capped and scaled": (
        lambda s: 0.5 * (2 * torch.tanh(s / 2)).clamp(min=-1e30),
        "capped scores are scaled or bounded",
    ),
    "capped after a mask": (
        lambda s: 2 * torch.tanh(s.masked_fill(above(), -INF) / 2),
        "scores are capped after a mask or a bias",
    ),
    "capped negatively": (lambda s: -2 * torch.tanh(s / 2), through("tanh")),
    "plus a function of itself": (lambda s: s + torch.tanh(s), "the scores are a sum of several products"),
    "hyperbolic tangent": (lambda s: torch.tanh(s), through("tanh")),
    "clamped": (lambda s: s.clamp(-0.5, 0.5), through("minimum")),
    "clamped from below": (lambda s: torch.clamp(s, min=-1.0), through("maximum")),
    "rounded": (lambda s: s.round(), through("round")),
    "remainder": (lambda s: s % 1.0, through("remainder")),
    "power": (lambda s: s.abs().add(0.1).pow(1.5), through("pow")),
    "activations": (lambda s: F.gelu(s), through("gelu")),
    "fake quantised": (lambda s: (s / 0.1).round().clamp(-8, 7) * 0.1, through("minimum")),
    "row written": (written(lambda s: s[:, :, 0].zero_()), reached("0")),
    "column written": (written(lambda s: s[..., 0].fill_(-3.0)), reached("-3")),
    "whole numbers": (lambda s: (4 * s).long().to(s.dtype), through("a cast to whole numbers")),
    "small whole numbers": (lambda s: (10 * s).to(torch.int8).to(s.dtype) * 0.1, through("a cast to whole numbers")),
    "power of whole numbers": (lambda s: (s.abs().int() + 1).to(s.dtype).pow(-1), through("pow")),
    "masked then whole numbers": (
        lambda s: s.masked_fill(above(), -60.0).long().to(s.dtype),
        through("a cast to whole numbers"),
    ),
}


def parts_scaled_apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([scores(q, k[:, :, :3]) * 2, scores(q, k[:, :, 3:])], -1).softmax(-1) @ v


PROGRAMS: dict[str, tuple[Callable[..., Tensor], str]] = {
    **{name: (attention(of), reason) for name, (of, reason) in FUNCTIONS.items()},
    "filled with a tensor": (lambda q, k, v: torch.where(~above(), scores(q, k), v.mean()).softmax(-1) @ v, ANOTHER),
    "chosen between products": (
        lambda q, k, v: torch.where(~above(), scores(q, k), scores(k, v)).softmax(-1) @ v,
        ANOTHER,
    ),
    "parts scaled apart": (parts_scaled_apart, ANOTHER),
}


def is_chunked(program: Callable[..., Tensor], reason: str, *args: Any, **how: Any) -> None:
    outcome = assert_chunked(program, *args, reason=f"takes no function of the scores: {reason}", **how)
    assert reason in outcome.site.attention["score_mod"]


@pytest.mark.parametrize(
    "name", every_day(PROGRAMS, "mask from scores", "row written", "parts scaled apart", "squared")
)
def test_fused_as_it_is(name: str) -> None:
    program, reason = PROGRAMS[name]
    is_chunked(program, reason, *tensors(*SHAPE))
    outcome = assert_fused(program, *tensors(*SHAPE), backward=False)
    assert outcome.site.kernel == "chunked" and reason in outcome.site.attention["score_mod"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_read_as_a_function(name: str) -> None:
    """Without numbers, which the thorough test above holds for all."""
    program, reason = PROGRAMS[name]
    (found,) = recognised(program, *(x.requires_grad_() for x in tensors(*SHAPE)))
    assert isinstance(found, Attention) and found.unread is not None and reason in found.unread.reason


ACTIVATIONS = (
    "logsigmoid mish selu celu hardsigmoid hardswish softsign relu6 hardshrink softshrink tanhshrink elu gelu silu "
    "leaky_relu softplus hardtanh"
).split()
POINTWISE = "expm1 erfc asinh atan sgn sinc frac exp2".split()
OF_TWO = "logaddexp logaddexp2 atan2 xlogy fmod maximum".split()


@pytest.mark.parametrize("name", every_day(ACTIVATIONS + POINTWISE + OF_TWO, "mish", "sinc", "fmod"))
def test_functions_of_torch(name: str) -> None:
    function = getattr(F, name, None) or getattr(torch, name)
    of = attention(lambda s: function(s, 0.5 * s.abs() + 1) if name in OF_TWO else function(s))
    # What xlogy is taken apart into has another gradient at 0.
    assert assert_fused(of, *tensors(*SHAPE), backward=name != "xlogy").site.kernel == "chunked"


DETACHED: dict[str, Of] = {
    "all": lambda s: s.detach(),
    "half": lambda s: 0.5 * s + 0.5 * s.detach(),
    "straight through": lambda s: s + (s.round() - s).detach(),
}


@pytest.mark.parametrize("name", DETACHED)
def test_no_gradient_goes_through_what_is_detached(name: str) -> None:
    assert assert_fused(attention(DETACHED[name]), *tensors(*SHAPE)).site.kernel == "chunked"


@pytest.mark.parametrize("dynamic", every_day([True, False], True), ids=["dynamic", "static"])
@pytest.mark.parametrize("name", every_day(["mask from scores", "capped after a mask", "softsign"], "softsign"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dtypes_and_symbolic_sizes(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    # A mask that turns on a rounding is another one in half precision: it is compared with itself run in float32.
    program = PROGRAMS[name][0]
    if name == "mask from scores" and dtype != torch.float64:
        q, k, v = tensors(*SHAPE, dtype=dtype)
        got = compiled(program, dynamic=dynamic)(q, k, v)
        torch.testing.assert_close(got, program(q.float(), k.float(), v.float()).to(dtype), atol=0.02, rtol=0.02)
        return
    q_len = S if name == "capped after a mask" else 5
    (q,), (k, v) = tensors(2, 4, q_len, 24, dtype=dtype, count=1), tensors(2, 4, S, 24, dtype=dtype, count=2)
    check(program, q, k, v, dynamic=dynamic)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["squared", "hyperbolic tangent", "scaled by key", "chosen between functions"])
def test_with_inductor_behind(name: str) -> None:
    check(PROGRAMS[name][0], *tensors(*SHAPE), inner="inductor")


def test_the_inverse_of_a_score() -> None:
    # Scores near 0 make any backward ill-conditioned; the forward is not.
    def over_scores(q, k, v):
        return (1 / scores(q, k)).softmax(-1) @ v

    reason = "something is divided by the scores"
    is_chunked(over_scores, reason, *tensors(2, 3, S, 16), backward=False)
    q, k, v = (t.abs() + 1 for t in tensors(2, 3, S, 16))
    is_chunked(over_scores, reason, q, k, v)


@pytest.mark.parametrize("scale", every_day([1e3, 10.0], 10.0))
def test_fills_that_large_scores_reach(scale: float) -> None:
    def filled(q, k, v):
        return (scale * scores(q, k)).masked_fill(above(), -1e4).softmax(-1) @ v

    def added(q, k, v):
        return (scale * scores(q, k) + (1 - torch.ones(S, S).tril()) * -1e4).softmax(-1) @ v

    # Scaled up a thousandfold, the weights are 0 or 1 and gradients mere rounding.
    sane = scale < 100
    is_chunked(filled, "masked scores become -10000", *tensors(2, 3, S, 16), backward=sane)
    check(added, *tensors(2, 3, S, 16), backward=sane)


def test_scores_read_twice_are_one_product() -> None:
    def program(q, k, v):
        s = scores(q, k)
        return torch.where(s > 0, s, 0.1 * s).softmax(-1) @ v + s.sum()

    is_chunked(program, "the mask is computed from the scores", *tensors(*SHAPE))


def test_what_the_function_learns_gets_its_gradient() -> None:
    caps, slope, table = torch.tensor([2.0, 3.0, 4.0]).view(3, 1, 1), torch.randn(3, 1, 1), torch.randn(S)
    capped = attention(lambda s, cap: cap * torch.tanh(s / cap))
    is_chunked(capped, "the scores pass through tanh", *tensors(*SHAPE), caps)
    apart = (torch.arange(S)[:, None] - torch.arange(S)).abs()
    by_distance = attention(lambda s, slope, table: torch.tanh(s - slope.exp() * apart + table[apart]))
    is_chunked(by_distance, "the scores pass through tanh", *tensors(*SHAPE), slope, table)


# ---- infinities and scales


INFINITE: dict[str, Of] = {
    "all": lambda s: s * INF,
    "abs": lambda s: s.masked_fill(above(), -INF).abs(),
    "square": lambda s: s.masked_fill(above(), -INF).square(),
    "minus": lambda s: -s.masked_fill(above(), -INF),
    "times itself": lambda s: (lambda m: m * m)(s.masked_fill(above(), -INF)),
    "below": lambda s: (-2 * s.masked_fill(above(), -INF).floor()).relu(),
}


@pytest.mark.parametrize("name", INFINITE)
def test_scores_that_become_plus_infinity(name: str) -> None:
    """As written their weight is no number, and that of the keys beside them 0."""
    (found,) = recognised(attention(INFINITE[name]), *tensors(*SHAPE))
    assert isinstance(found, Refusal)
    assert found.reason.startswith("some scores are plus infinity, which makes their row NaN")


BOUNDED: dict[str, Of] = {
    "relu": Tensor.relu, "tanh": Tensor.tanh, "gelu": F.gelu, "clamp": lambda s: s.clamp(-50, 50),
    "scaled": lambda s: s / 0.7, "twice minus": lambda s: -1 * s.neg(),
}  # fmt: skip


@pytest.mark.parametrize("name", every_day(BOUNDED, "gelu", "scaled"))
def test_masked_scores_that_do_not(name: str) -> None:
    assert_fused(attention(lambda s: BOUNDED[name](s.masked_fill(above(), -INF))), *tensors(*SHAPE))


@pytest.mark.parametrize(
    "kernels",
    [["cpu_flash"], ["chunked"], pytest.param(["flex"], marks=pytest.mark.thorough)],
    ids=lambda names: names[0],
)
@pytest.mark.parametrize("scale", every_day([-0.5, 0.0, -0.0, 1e-30], -0.5))
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


@pytest.mark.parametrize("scale", every_day([1.0, 100.0, 1e4, 1e10], 100.0, 1e4))
def test_a_scale_that_takes_scores_below_the_fill(scale: float) -> None:
    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT * scale).masked_fill(above(), -1e9).softmax(-1) @ value

    def divided(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT / (1 / scale)).masked_fill(above(), -1e9).softmax(-1) @ value

    for run in (program, divided):
        outcome = check(run, *tensors(2, 3, S, 8), backward=False)
        said = str(outcome)
        assert outcome.site.fused and ("can reach" in said) == (scale > 100), said


@pytest.mark.thorough
@pytest.mark.parametrize("factor", [1e6, 1e8, 1e10, -1e10, 1e30])
@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("written", ["times", "divided", "in_query"])
def test_scores_that_fall_below_the_fill(factor, fill, written) -> None:
    def program(q, k, v):
        if written == "in_query":
            s = (q * factor) @ k.mT
        else:
            s = q @ k.mT * factor if written == "times" else q @ k.mT / (1 / factor)
        return s.masked_fill(above(), fill).softmax(-1) @ v

    # One query's scores are then nearly always one 1 and zeros: there is no gradient to compare.
    assert_right(program, *tensors(2, 3, S, 8), backward=False)


@pytest.mark.parametrize("bound", [-60.0, pytest.param(-1.0, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("masked", ["before", "after", "as a product"])
@pytest.mark.parametrize("scaled", [1.0, pytest.param(0.01, marks=pytest.mark.thorough)])
def test_a_clamp_of_shifted_scores(bound: float, masked: str, scaled: float) -> None:
    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT
        if masked == "before":
            scores = scores.masked_fill(above(), -INF)
        scores = (scores - scores.amax(-1, keepdim=True)).clamp(min=bound) * scaled
        if masked == "after":
            scores = scores.masked_fill(above(), -INF)
        weights = scores.exp()
        if masked == "as a product":
            weights = weights * ~above()
        return weights / weights.sum(-1, keepdim=True) @ value

    # Scores that lie more than 60 apart, and yet are computed again to 1e-5 in the backward.
    operands = [3 * x for x in tensors(2, 3, S, 8)]
    if masked == "before" and bound * scaled < -50:
        assert_fused(program, *operands)
    else:
        assert_refused(program, *operands, reason="the scores pass through amax over an axis")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "bounded",
    [
        lambda s: s.clamp(min=-60.0),
        lambda s: s.clamp(-60.0, 0.0),
        lambda s: torch.maximum(s, torch.tensor(-60.0)),
        lambda s: F.relu(s + 60) - 60,
        lambda s: F.hardtanh(s, -60.0, 1.0),
        lambda s: torch.where(s < -60, -60.0, s),
        lambda s: s.masked_fill(s < -60, -60.0),
    ],
)
@pytest.mark.parametrize("shift", ["maximum", "detached", "logsumexp"])
@pytest.mark.parametrize("ending", ["softmax", "exp"])
def test_scores_less_their_maximum_are_bounded_and_then_masked(bounded, shift, ending) -> None:
    def program(q, k, v):
        s = q @ k.mT
        top = s.logsumexp(-1, keepdim=True) if shift == "logsumexp" else s.amax(-1, keepdim=True)
        s = bounded(s - (top.detach() if shift == "detached" else top))
        if ending == "softmax":
            return s.masked_fill(above(), -INF).softmax(-1) @ v
        e = s.exp() * ~above()
        return (e / e.sum(-1, keepdim=True)) @ v

    assert_right(program, *(12 * t for t in tensors(2, 3, S, 8)))


def test_scores_that_double_in_parts() -> None:
    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * 0.1
        for _ in range(30):
            scores = scores + 0.01 * scores.tanh()
        return scores.softmax(-1) @ value

    assert_refused(program, *tensors(2, 3, S, 8), reason="an expression with too many parts")


# ---- scores held against others


def threshold_of_another_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        least = ((q * 0.3) @ k.mT).topk(3, -1).values[..., -1:]
    s = (q * 0.3) @ k.mT
    return s.masked_fill(s < least, -torch.inf).softmax(-1) @ v


def largest_of_another_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s, largest = (q * 0.3) @ k.mT, torch.einsum("bhid,bhjd->bhij", q * 0.3, k).amax(-1, keepdim=True)
    return torch.where(s >= largest - 1e-3, 5.0, s).softmax(-1) @ v


@pytest.mark.parametrize("program", [threshold_of_another_product, largest_of_another_product])
def test_scores_held_against_an_equal_product(program: Callable[..., Tensor]) -> None:
    q, k, v = tensors(2, 3, 40, 64)
    with collecting() as graphs, torch.no_grad():
        torch.testing.assert_close(compiled(program, check=False)(q, k, v), program(q, k, v))
    reasons = [site.blocker.reason for graph in graphs for site in graph.sites]
    assert reasons == [COMPARED]


def test_scores_held_against_what_is_made_of_them() -> None:
    """The third largest, computed once more, may fall below itself; as a value it may be what it is."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        third = s.topk(3, -1).values[..., -1:]
        return s.masked_fill(s < third, -INF).softmax(-1) @ (v + third)

    outcome = check(program, *tensors(2, 4, 12, 8), inner="aot_eager")
    assert not any(site.fused for site in outcome.sites), str(outcome)


def test_scores_times_themselves_in_reverse_beside_a_constant_sink() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat(1, 2, 1, 1), v[:, :, None].expand(1, 1, 2, 4, 1).reshape(1, 2, 4, 1)
        s = q @ k.mT
        return nn.functional.pad(s * s.flip(-1), (0, 1), value=0.3).softmax(-1)[..., :-1] @ v

    operands = torch.randn(1, 2, 1, 1), torch.randn(1, 1, 4, 1), torch.randn(1, 1, 4, 1)
    assert_refused(program, *operands, reason="the scores join more than one matrix product")
