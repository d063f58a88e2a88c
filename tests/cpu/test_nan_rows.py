"""A query that sees no key under minus infinity is NaN: some kernels keep it, others decline a program that tells."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_fuse.report import SiteReport, collecting
from tests.harness import compiled, every_day, tensors

INF = math.inf
T, D = 24, 16
HIDDEN = torch.zeros(2, T, dtype=torch.bool)
HIDDEN[0], HIDDEN[1, 5:] = True, True
PROJECTION = torch.randn(D, D, generator=torch.Generator().manual_seed(0))

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
After = Callable[[Tensor, Tensor], Tensor]


def over_their_sum(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True)


def filled(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).masked_fill(hidden, -INF).softmax(-1) @ v


HIDDEN_KEYS = HIDDEN[:, None, None]
MASK = torch.zeros(2, 1, 1, T).masked_fill(HIDDEN_KEYS, -INF)
LOW = torch.finfo(torch.float32).min
# The weights, of the scores and what is hidden. Without its max taken off, exp of a fill is 0, and a query that sees
# no key 0 / 0; twice the lowest number is minus infinity.
WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "filled": lambda s, hidden: s.masked_fill(hidden, -INF).softmax(-1),
    "added": lambda s, hidden: (s + torch.zeros(2, 1, 1, T).masked_fill(hidden, -INF)).softmax(-1),
    "from memory": lambda s, bias: (s + bias).softmax(-1),
    "twice the lowest": lambda s, hidden: (s + (lambda low: low + low)(torch.where(hidden, LOW, 0.0))).softmax(-1),
    "by hand": lambda s, hidden: over_their_sum(s.masked_fill(hidden, LOW).exp()),
    "by hand and scaled": lambda s, hidden: over_their_sum(((4 * s).masked_fill(hidden, -1e4) * 0.25).exp()),
    "by hand in float32": lambda s, hidden: over_their_sum(s.float().masked_fill(hidden, -200.0).exp()).to(s.dtype),
    "by hand and masked again": lambda s, hidden: over_their_sum(s.masked_fill(hidden, -1e4).exp()) * ~hidden,
}
ATTEND: dict[str, tuple[Attend, Tensor]] = {
    name: (
        lambda q, k, v, given, of=of: of(q @ k.mT * 0.25, given) @ v,
        MASK if name == "from memory" else HIDDEN_KEYS,
    )
    for name, of in WEIGHTS.items()
}

CARRY: dict[str, After] = {
    "nothing": lambda out, v: out,
    "a linear layer": lambda out, v: F.gelu(out @ PROJECTION),
    "a norm": lambda out, v: F.layer_norm(out + v, (D,)),
    "a fill of queries": lambda out, v: out.masked_fill(HIDDEN[:, None, :, None], 0.0),
    "its shape": lambda out, v: out.reshape(out.size(0), -1) + torch.zeros_like(out).flatten(1),
    "nan_to_num at once": lambda out, v: out.transpose(1, 2).reshape(2, T, -1).nan_to_num(),
    "a checkpoint": lambda out, v: checkpoint(lambda x: (x @ PROJECTION).relu(), out, use_reentrant=False),
}
READ: dict[str, After] = {
    "isnan": lambda out, v: torch.where(out.isnan(), v.mean(-2, keepdim=True), out),
    "nan_to_num of 1": lambda out, v: out.nan_to_num(1.0),
    "nan_to_num later": lambda out, v: (out @ PROJECTION + 1).nan_to_num(),
    "unequal to itself": lambda out, v: (out != out).float(),
    "isfinite": lambda out, v: out * out.isfinite().all(),
    "argmax": lambda out, v: out.argmax(-1),
    "comparison": lambda out, v: torch.where((out @ PROJECTION) > 0, 1.0, 2.0),
    "nanmean": lambda out, v: out.nanmean(-1),
    "fmax": lambda out, v: torch.fmax(out, v),
    "sign": lambda out, v: out.sign(),
    "in a checkpoint": lambda out, v: checkpoint(lambda x: x.isnan().float(), out * 2, use_reentrant=False),
    "behind a checkpoint": lambda out, v: checkpoint(lambda x: x * 2, out, use_reentrant=False).isnan().float(),
}


def ran(program: Callable[..., Tensor], *args: Tensor, **options: Any) -> tuple[Tensor, SiteReport]:
    with collecting() as graphs:
        got = compiled(program, **options)(*args)
    (site,) = graphs[-1].sites
    return got, site


def outcome(attend: Attend, hidden: Tensor, after: After, **options: Any) -> tuple[Tensor, Tensor, SiteReport]:
    """(as written, compiled, the report of the site)"""

    def program(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return after(attend(q, k, v, hidden), v)

    args = (*tensors(2, 4, T, D), hidden)
    return program(*args), *ran(program, *args, check=False, **options)


@pytest.mark.parametrize("attend", every_day(ATTEND, "filled", "by hand"))
@pytest.mark.parametrize("name", every_day(CARRY | READ, "a fill of queries", "nan_to_num later", "isnan"))
def test_chunked_keeps_it(name: str, attend: str) -> None:
    written, got, site = outcome(*ATTEND[attend], (CARRY | READ)[name], kernels=["chunked"])
    assert site.fused
    torch.testing.assert_close(got, written, equal_nan=True, atol=1e-5, rtol=1e-5)


TELLS = [(name, "filled") for name in [*READ][::4]] + [("isnan", attend) for attend in [*ATTEND][1::4]]


@pytest.mark.parametrize(
    ("name", "attend"),
    [*TELLS, *(pytest.param(n, a, marks=pytest.mark.thorough) for n in READ for a in ATTEND if (n, a) not in TELLS)],
)
def test_a_program_that_tells_is_left_by_others(name: str, attend: str) -> None:
    written, got, site = outcome(*ATTEND[attend], READ[name], kernels=["cpu_flash"])
    assert site.status == "as written" and "a query that sees no key would get 0 for NaN, which" in site.blocker.reason
    torch.testing.assert_close(got, written, equal_nan=True)


@pytest.mark.parametrize("name", every_day(CARRY, "a norm", "a fill of queries", "a checkpoint"))
def test_others_show_0_for_it(name: str) -> None:
    written, got, site = outcome(filled, HIDDEN_KEYS, CARRY[name])
    assert site.kernel == "cpu_flash"
    shown = ~written.isnan()
    torch.testing.assert_close(got[shown], written[shown], atol=1e-5, rtol=1e-5)


NOT_NAN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "finite": lambda s, hidden: (s + torch.where(hidden, LOW, 0.0)).softmax(-1),
    "guarded": lambda s, hidden: (s + MASK).softmax(-1).nan_to_num(0.0),
    "filled once more": lambda s, hidden: s.masked_fill(hidden, -INF).softmax(-1).masked_fill(hidden, 0.0),
}


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("finite", "cpu_flash"), ("guarded", "cpu_flash"), *((name, "chunked") for name in NOT_NAN)],
)
def test_no_row_is_nan(name: str, kernel: str) -> None:
    """A finite fill gives the mean, a guard 0: any kernel takes them, whoever asks afterwards."""

    def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return NOT_NAN[name](q @ k.mT * 0.25, hidden) @ v

    written, got, site = outcome(attend, HIDDEN_KEYS, lambda out, v: out.nan_to_num(1.0), kernels=[kernel])
    assert site.kernel == kernel
    torch.testing.assert_close(got, written, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["filled", "added"])
def test_gradients_are_nan_where_they_are_as_written(name: str) -> None:
    attend, hidden = ATTEND[name]
    args = tensors(2, 4, T, D)
    results = []
    for by in (attend, compiled(attend, kernels=["chunked"], check=False)):
        leaves = [x.clone().requires_grad_() for x in args]
        results.append(torch.autograd.grad(by(*leaves, hidden).square().sum(), leaves))
    for written, got in zip(*results, strict=True):
        torch.testing.assert_close(got, written, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_the_check_tells_0_from_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that says that it keeps NaN, and gives 0."""
    monkeypatch.setattr("attn_fuse.emit.call.Call.empty_is_nan", False)
    _, site = ran(filled, *tensors(2, 4, T, D), HIDDEN_KEYS, kernels=["chunked"])
    assert not site.fused and "is 0 where it is NaN as written" in site.blocker.reason


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [15, 16, *(pytest.param(n, marks=pytest.mark.thorough) for n in (7, 40))])
def test_a_query_that_is_nan(length: int, causal: bool) -> None:
    """torch's kernel gives 0 for it where the keys fill no vector register."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT * 0.25
        s = s.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -INF) if causal else s
        return (s.softmax(-1) @ v).isnan()

    args = tensors(2, 4, length, D)
    args[0][:, :, 3] = torch.nan
    got, site = ran(program, *args)
    assert torch.equal(got, program(*args))
    assert site.kernel == ("chunked" if length < 16 else "cpu_flash")
    if length < 16:
        assert any("a query that is NaN would get 0 of so few keys, which" in why for why in site.why_not["cpu_flash"])


# Of the scores and two masks of what is seen.
FILLED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "in part": lambda s, one, other: (
        s.masked_fill(~one, -INF).masked_fill(~other, -INF).softmax(-1).masked_fill(~other, 0.0)
    ),
    "wholly": lambda s, one, other: s.masked_fill(~one, -INF).softmax(-1).masked_fill(~one, 0.0),
    "multiplied": lambda s, one, other: s.masked_fill(~one, -INF).softmax(-1) * one,
}


@pytest.mark.parametrize("kernel", ["chunked", "cpu_flash"])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("name", every_day(FILLED, "in part"))
def test_weights_filled_with_0(name: str, reads: bool, kernel: str) -> None:
    """A fill of some weights leaves a fully masked row NaN, a fill of all makes it 0, a product keeps it NaN."""

    def whole(q: Tensor, k: Tensor, v: Tensor, one: Tensor, other: Tensor) -> Tensor:
        out = FILLED[name](q @ k.mT / 4, one, other) @ v
        return torch.where(out.isnan(), 7.0, out) if reads else out

    q, k, v = (torch.randn(1, 2, 32, 16) for _ in range(3))
    masks = (torch.rand(1, 1, 32, 32) > 0.9, torch.rand(1, 1, 32, 32) > 0.5)
    expected = whole(q, k, v, *masks)
    got, site = ran(whole, q, k, v, *masks, kernels=[kernel])
    tells = {"chunked": name == "in part", "cpu_flash": name != "wholly"}
    assert site.fused is not (reads and tells[kernel]), site.blocker
    torch.testing.assert_close(got.nan_to_num(), expected.nan_to_num())
    if reads or (name == "multiplied" and kernel == "chunked"):
        assert got.isnan().equal(expected.isnan())


def multiplied_and_renormalised(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    weights = (q @ k.mT / 4).masked_fill(~kept, -INF).softmax(-1) * kept
    return weights / weights.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("kernel", ["chunked", "cpu_flash"])
def test_weights_times_their_mask_over_their_sum(kernel: str) -> None:
    args = (*(torch.randn(1, 2, 32, 16) for _ in range(3)), torch.rand(1, 1, 32, 32) > 0.9)
    expected = multiplied_and_renormalised(*args)
    got, site = ran(multiplied_and_renormalised, *args, kernels=[kernel], check=False)
    assert site.fused and bool(expected.isnan().any())
    torch.testing.assert_close(got.nan_to_num(), expected.nan_to_num())
    assert kernel != "chunked" or got.isnan().equal(expected.isnan())


@pytest.mark.parametrize("kernel", ["chunked", "cpu_flash"])
@pytest.mark.parametrize("reads", [False, True])
def test_weights_times_their_mask_over_a_bounded_sum(reads: bool, kernel: str) -> None:
    """As written a fully masked row is NaN, and is read as 0: a program that tells is left by every kernel."""

    def program(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        weights = (q @ k.mT / 4).masked_fill(~kept, -INF).softmax(-1) * kept
        out = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9) @ v
        return torch.where(out.isnan(), 7.0, out) if reads else out

    args = (*(torch.randn(1, 2, 32, 16) for _ in range(3)), torch.rand(1, 1, 32, 32) > 0.9)
    got, site = ran(program, *args, kernels=[kernel])
    assert not (reads and site.fused)
    torch.testing.assert_close(got.nan_to_num(), program(*args).nan_to_num())


# Of the weights and what is kept, and whether that is fused.
GUARDED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "multiplied": (lambda w, kept: torch.where(w.isnan(), 0.0, w) * kept, True),
    "filled at once": (lambda w, kept: torch.where(w.isnan() | ~kept, 0.0, w), True),
    "where filled": (lambda w, kept: torch.where(w.isnan() & ~kept, 0.0, w), False),
    "by other scores": (lambda w, kept: torch.where((w < 0.01) | ~kept, 0.0, w), False),
}


@pytest.mark.parametrize("name", GUARDED)
def test_a_guard_beside_a_fill(name: str) -> None:
    """Conditions of the scores and of positions that keep a weight together are a guard and a fill."""
    of, fused = GUARDED[name]

    def program(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        return of((q @ k.mT / 4).softmax(-1), kept) @ v

    args = (*(torch.randn(1, 2, 32, 16) for _ in range(3)), torch.rand(1, 1, 32, 32) > 0.5)
    got, site = ran(program, *args)
    assert site.fused is fused, site.blocker
    torch.testing.assert_close(got, program(*args))


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("factor", every_day([0.5, 1.5, -2.0, 2.0, -0.5, -1.0], 0.5, -2.0))
def test_a_fill_that_a_factor_makes_infinite(factor: float, reads: bool) -> None:
    """Scaled by more than 1, the dtype's lowest number is minus infinity: a row of it is NaN, not the mean."""

    def program(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        fill = torch.finfo(q.dtype).min if factor > 0 else torch.finfo(q.dtype).max
        out = ((q @ k.mT / 4).masked_fill(hidden, fill) * factor).softmax(-1) @ v
        return torch.where(out.isnan(), 7.0, out) if reads else out

    hidden = torch.rand(1, 1, 32, 32) > 0.5
    hidden[..., 3, :] = True
    args = (*(torch.randn(1, 2, 32, 16) for _ in range(3)), hidden)
    expected = program(*args)
    assert bool(expected.isnan().any()) is (abs(factor) > 1 and not reads)
    got, site = ran(program, *args, check=False)
    assert site.fused
    seen = ~expected.isnan()
    torch.testing.assert_close(got[seen], expected[seen], rtol=1e-2, atol=1e-2)
    # A kernel may give 0 for NaN where nothing reads it, but no other number.
    assert bool((got[~seen].isnan() | (got[~seen] == 0)).all())


@pytest.mark.parametrize(
    ("fill", "scale", "dtype"),
    [
        (-50.0, 1.0, torch.float32),
        (-4e2, 0.2, torch.float32),
        (-740.0, 1.0, torch.float64),
        (-1e4, 0.05, torch.float64),
    ],
)
def test_a_fill_whose_exp_is_not_0(fill: float, scale: float, dtype: torch.dtype) -> None:
    """A query that sees no key then has the mean of the values: in float32 down to -103, in float64 to -745."""

    def program(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        e = (((q @ k.mT) * 0.25).masked_fill(hidden[:, None, None], fill) * scale).exp()
        return e / e.sum(-1, keepdim=True) @ v

    q, k, v = (torch.randn(2, 3, T, D, dtype=dtype) for _ in range(3))
    written = program(q, k, v, HIDDEN)
    assert written.isfinite().all()
    run = compiled(program, kernels=["chunked"])
    torch.testing.assert_close(run(q, k, v, HIDDEN), written)


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", ["chunked", None])
def test_no_keys_at_all_give_0(kernel: str | None) -> None:
    """The softmax of no scores is no number, and its product with no values 0: in a graph for any number of keys."""

    def program(q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        length = q.shape[2] - k.shape[2]
        k, v = k[:, :, : -(length // 3)], v[:, :, : -(length // 3)]
        keep = torch.arange(k.shape[2])[None, :] < torch.arange(q.shape[2])[:, None] + n
        return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v

    options = {"inner_backend": "eager", "pick": "fused"} | ({} if kernel is None else {"kernels": [kernel]})
    run = torch.compile(program, backend="attn_fuse", dynamic=True, options=options)
    for q_len, kv_len, n in ((3, 9, 3), (5, 5, -2), (4, 4, 3), (6, 12, 1)):
        q, k, v = (torch.randn(2, 3, length, D) for length in (q_len, kv_len, kv_len))
        written = program(q, k, v, n)
        assert (written == 0).all() or kv_len != q_len
        got = run(q, k, v, n)
        torch.testing.assert_close(got.nan_to_num(), written.nan_to_num(), atol=1e-5, rtol=1e-5)
        assert kv_len != q_len or not got.isnan().any()
