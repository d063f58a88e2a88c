"""Where a function has an edge, a jump or no number: of the scores and of a bias, its gradient is autograd's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_fuse.report import collecting
from attn_fuse.torch_internals import CLAMP_PASSES_AT_ITS_EDGE
from tests.harness import assert_fused, check, compiled, every_day, tensors

POINTS = torch.tensor([-300.0, -100, -6, -3, -2, -1, -0.5, 0, 0, 0.5, 1, 2, 3, 6, 20, 100, 300])


N = len(POINTS)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp(min=0)": lambda x: x.clamp(min=0),
    "clamp(max=1)": lambda x: x.clamp(max=1),
    "clamp(-1, 1)": lambda x: x.clamp(-1, 1),
    "clamp(3, -3)": lambda x: x.clamp(3, -3),
    "clamp_min of tensors": lambda x: torch.clamp_min(x, torch.full((N,), 0.5)),
    "maximum": lambda x: torch.maximum(x, torch.ones(N)),
    "minimum": lambda x: torch.minimum(torch.zeros(()), x),
    "max of two": lambda x: torch.max(x, -x),
    "threshold": lambda x: F.threshold(x, 1.0, -2.0),
    "square root of what is not negative": lambda x: torch.sqrt(x.relu() + 1),
    "xlogy": lambda x: torch.xlogy(x, torch.tensor(2.0)),
    "atan2": lambda x: torch.atan2(x, torch.zeros(())),
    "a choice": lambda x: torch.where(x > 0, x, torch.expm1(x.clamp(max=0))),
    **{
        name: getattr(F, name)
        for name in (
            "relu relu6 hardtanh hardsigmoid hardswish leaky_relu elu celu selu softshrink hardshrink tanhshrink "
            "gelu silu softplus mish logsigmoid softsign"
        ).split()
    },
    **{name: getattr(torch, name) for name in "abs sign sinc tanh sigmoid atan erf asinh".split()},
}


@pytest.mark.parametrize("name", every_day(FUNCTIONS, "clamp(3, -3)", "a choice", "xlogy", "gelu"))
def test_edges(name: str) -> None:
    """The scores, and the bias, are the points themselves."""
    function = FUNCTIONS[name]

    def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        of_scores = (0.01 * function(q @ k.mT)).softmax(-1) @ v
        of_bias = (q @ k.mT * 0.001 + 0.01 * function(bias)).softmax(-1) @ v
        return torch.stack([of_scores, of_bias])

    ones = torch.ones(1, 1, N, 1)
    values = [
        torch.cat([ones, 0 * ones], -1), torch.cat([POINTS.view(1, 1, N, 1), ones], -1), torch.randn(1, 1, N, 4),
        POINTS.expand(N, N),
    ]  # fmt: skip
    results = []
    with collecting() as graphs:
        for by in (program, compiled(program, kernels=["chunked"], check=False)):
            args = [x.clone().requires_grad_() for x in values]
            out = by(*args)
            results.append([out, *torch.autograd.grad((out * torch.linspace(0.5, 1.5, 4)).sum(), args)])
    # Of the scores, xlogy is not read in training.
    assert [site.fused for site in graphs[-1].sites] == [name != "xlogy", True]
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(
            torch.where(wanted.isnan(), wanted, found), wanted, atol=1e-4, rtol=1e-4, equal_nan=True
        )


LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.bfloat16, torch.float16)}


FLOORS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "max": lambda s, hidden, low: torch.max(s + low * hidden, torch.tensor(low, dtype=s.dtype)),
    "maximum, bound first": lambda s, hidden, low: torch.maximum(torch.tensor(low, dtype=s.dtype), s + low * hidden),
    "max of a choice": lambda s, hidden, low: torch.max(
        s + torch.where(hidden > 0, low, 0.0).to(s.dtype), torch.tensor(low, dtype=s.dtype)
    ),
    "max of a fill": lambda s, hidden, low: torch.max(s.masked_fill(hidden > 0, low), torch.tensor(low, dtype=s.dtype)),
    "clamp": lambda s, hidden, low: (s + low * hidden).clamp(min=low),
    "clamp of a choice": lambda s, hidden, low: (s + torch.where(hidden > 0, low, 0.0).to(s.dtype)).clamp(min=low),
    "choice": lambda s, hidden, low: (lambda x: torch.where(x > low, x, low))(s + low * hidden),
    "min": lambda s, hidden, low: -torch.min(-(s + low * hidden), torch.tensor(-low, dtype=s.dtype)),
}


@pytest.mark.parametrize("dtype", every_day(LOWEST, torch.float16), ids=str)
@pytest.mark.parametrize("name", every_day(FLOORS, "max", "choice", "min"))
def test_a_floor_equals_the_fill(name: str, dtype: torch.dtype) -> None:
    """A score that a mask lowers to the floor ties with it: OPT's first queries under padding on the left."""
    hidden = torch.ones(1, 1, N, N, dtype=dtype).triu(1)
    hidden[..., :5] = 1

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return FLOORS[name](q @ k.mT * 0.25, hidden, LOWEST[dtype]).softmax(-1) @ v

    values = tensors(2, 3, N, 8, dtype=dtype)
    results = []
    with collecting() as graphs:
        for by in (program, compiled(program, kernels=["chunked"], check=False)):
            args = [x.clone().requires_grad_() for x in values]
            out = by(*args)
            results.append([out, *torch.autograd.grad((out * torch.linspace(-1, 1, 8).cos()).sum(), args)])
    assert [site.fused for site in graphs[-1].sites] == [True]
    near = 1e-5 if dtype == torch.float32 else 0.02
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=near * wanted.abs().max().item(), rtol=0)


SHIFTED: dict[str, Callable[[Tensor], Tensor]] = {
    "minimum": lambda s: torch.minimum(s, torch.zeros(())),
    "hardtanh": lambda s: F.hardtanh(s, -1000.0, 0.0),
    "clamp": lambda s: s.clamp(max=0),
}


@pytest.mark.parametrize("name", SHIFTED)
def test_a_shift_that_stops_the_gradient_of_the_largest(name: str) -> None:
    """Each row has its largest score exactly at the bound."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        return SHIFTED[name](s - s.amax(-1, keepdim=True).detach()).softmax(-1) @ v

    # Since torch 2.14 a clamp stops the gradient at its edge, too.
    (assert_fused if name == "clamp" and CLAMP_PASSES_AT_ITS_EDGE else check)(
        program, *tensors(2, 3, 9, 16), check=False
    )


@pytest.mark.parametrize("bound", ["a number", "a tensor", "two tensors", "maximum"])
def test_a_clamp_at_a_tie_has_the_gradient_that_torch_gives(bound: str) -> None:
    """Most scores equal the bound. Since torch 2.14 a clamp by a tensor shares the gradient of a tie."""

    def program(q: Tensor, k: Tensor, v: Tensor, low: Tensor) -> Tensor:
        s = q @ k.mT
        if bound == "two tensors":
            return s.clamp(low, low + 1).softmax(-1) @ v
        if bound == "maximum":
            return torch.maximum(s, low).softmax(-1) @ v
        return s.clamp(min=0.0 if bound == "a number" else low).softmax(-1) @ v

    q, k = (torch.randint(-1, 2, (2, 3, 9, 16)).float().requires_grad_() for _ in range(2))
    v, low = torch.randn(2, 3, 9, 16, requires_grad=True), torch.zeros(9, requires_grad=bound != "a number")
    given = [x for x in (q, k, v, low) if x.requires_grad]
    wanted = torch.autograd.grad(program(q, k, v, low).square().sum(), given)
    with collecting() as graphs:
        found = torch.autograd.grad(compiled(program, check=False)(q, k, v, low).square().sum(), given)
    (site,) = graphs[0].sites
    assert site.fused or bound == "two tensors", site
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)


WIDE: dict[str, Callable[..., Tensor]] = {
    "a bias of 1e8": lambda s, keep: s + torch.linspace(0, 3, 9, dtype=torch.float64) + 1e8,
    "a fill of -1e300": lambda s, keep: s.double().masked_fill(~keep, -1e300),
    "the lowest number added": lambda s, keep: s.double() + (~keep).double() * torch.finfo(torch.float64).min,
    "a bias of -1e300": lambda s, keep: s.double() + (~keep).double() * -1e300,
}


@pytest.mark.parametrize("name", WIDE)
def test_scores_in_float64_between_narrower_products(name: str) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return WIDE[name](q @ k.mT, keep).softmax(-1).float() @ v

    keep = torch.rand(2, 1, 1, 9) > 0.5
    keep[0] = False
    q, k, v = tensors(2, 3, 9, 16)
    run = compiled(program, check=False)
    with torch.no_grad():
        torch.testing.assert_close(run(q, k, v, keep), program(q, k, v, keep), atol=1e-5, rtol=1e-5)
