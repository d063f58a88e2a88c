"""Programs of an attacker and of strangers in which one site, or one tensor, was taken for another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.lift import written
from attn_fuse.report import collecting
from tests.harness import assert_fused, assert_refused, check, compiled, tensors

SHAPE = (2, 3, 9, 16)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.25


class Hiding(nn.Module):
    """Two layers written alike: one adds a learned bias, the other an argument, which may hide keys."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.bias, self.first = nn.Parameter(torch.randn(3, 8, 8)), first

    def layer(self, x: Tensor, bias: Tensor) -> Tensor:
        i = torch.arange(8)
        return (scores(x, x.sin()) + bias).masked_fill(i[:, None] < i, -1e9).softmax(-1) @ x.cos()

    def forward(self, x: Tensor, y: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        learned, given = (x, self.bias), (y, padding)
        one, other = (learned, given) if self.first else (given, learned)
        return self.layer(*one), self.layer(*other)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_learned_bias_and_one_that_hides_keys(first: bool, grad: bool) -> None:
    padding = torch.zeros(3, 8, 8)
    padding[:, :, :4] = -1e12
    with torch.set_grad_enabled(grad):
        args = torch.randn(2, 3, 8, 16), torch.randn(2, 3, 8, 16), padding
        # Unchecked: the check would leave as written what is wrong.
        check(Hiding(first), *args, backward=grad, check=False)


def key_detached(q, k, v, b):
    return (scores(q, k.detach()) + b).softmax(-1) @ v


def value_detached(q, k, v, b):
    return (scores(q, k) + b).softmax(-1) @ v.detach()


def bias_detached(q, k, v, b):
    return (scores(q, k) + b.detach()).softmax(-1) @ v


def scores_detached(q, k, v, b):
    return (5 * torch.tanh(scores(q, k).detach() + b)).softmax(-1) @ v


def bias_compared(q, k, v, b):
    return scores(q, k).masked_fill(b > 0.5, -1e9).softmax(-1) @ v


def key_also_compared(q, k, v, b):
    return (scores(q, k).masked_fill(k[..., None, :, 0] > 1, -1e9) + b).softmax(-1) @ v


def nothing_detached(q, k, v, b):
    return (scores(q, k) + b).softmax(-1) @ v


PATHS = (
    key_detached, value_detached, bias_detached, scores_detached, bias_compared, key_also_compared, nothing_detached,
)  # fmt: skip


@pytest.mark.parametrize("program", PATHS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kernels", [["chunked"], None], ids=["chunked", "any"])
def test_what_has_no_gradient_in_the_program_gets_none(program: Callable[..., Any], kernels: Any) -> None:
    """Whatever requires a gradient, and where the same program stands in the graph before, without one."""
    values = [torch.randn(SHAPE), torch.randn(SHAPE), torch.randn(SHAPE), torch.randn(2, 3, 9, 9)]
    options = {"pick": "fused", "inner_backend": "eager"} | ({"kernels": kernels} if kernels else {})

    def twice(*args: Tensor) -> tuple[Tensor, Tensor]:
        return program(*args[:4]), program(*args[4:])

    for wanting in ("q", "k", "v", "b", "qk", "vb", "qkvb"):
        torch._dynamo.reset()
        run = torch.compile(twice, backend="attn_fuse", options=options)
        results = []
        for by in (twice, run):
            args = [x.clone().requires_grad_(name in wanting) for x, name in zip(values, "qkvb", strict=True)]
            before, out = by(*(x.clone() for x in values), *args)
            assert not before.requires_grad
            if out.requires_grad:
                out.pow(2).sum().backward()
            results.append([out, *(x.grad for x in args)])
        for one, other in zip(*results, strict=True):
            assert (one is None) == (other is None), wanting
            if one is not None:
                assert one.requires_grad == other.requires_grad
                torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("large", [1e4, 1e8, 1e30])
def test_what_only_some_queries_see_stays_out_of_the_others(large: float) -> None:
    """A value as large as unset memory may hold, at a key that is hidden from all queries but the last."""
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(scores(q, k)).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    q, k, v = (x.requires_grad_() for x in tensors(*SHAPE))
    with torch.no_grad():
        v[:, :, -1] = large
    found = compiled(program, kernels=["chunked"], check=False)(q, k, v)
    expected = program(q.double(), k.double(), v.double())
    torch.testing.assert_close(found[:, :, :-1], expected[:, :, :-1].float(), atol=1e-5, rtol=1e-5)


def regions_of_windows(
    size: tuple[int, ...], window: tuple[int, ...], shift: tuple[int, ...], again: bool
) -> Callable[..., Tensor]:
    """Numbers of regions written into slices of slices, of which a shift of 0 makes some empty (Earthformer)."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        numbers = torch.zeros(size)
        cuts = [(slice(-w), slice(-w, -s), slice(-s, None)) for w, s in zip(window, shift, strict=True)]
        for number, place in enumerate(itertools.product(*cuts)):
            a, b, c = place
            numbers[a, b, c] = number
        (t, wt), (h, wh), (x, wx) = ((n // w, w) for n, w in zip(size, window, strict=True))
        numbers = numbers.reshape(t, wt, h, wh, x, wx).permute(0, 2, 4, 1, 3, 5).reshape(-1, wt * wh * wx)
        same = numbers[:, None, :] == numbers[:, :, None]
        weights = scores(q, k).masked_fill(~same, -1e18).softmax(-1)
        return (weights * same if again else weights) @ v

    return program


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("shift", [(0, 1, 0), (1, 1, 1), (0, 0, 0)], ids=str)
def test_masks_written_into_nested_slices(shift: tuple[int, ...], again: bool) -> None:
    program = regions_of_windows((4, 4, 6), (2, 2, 3), shift, again)
    assert_fused(program, *tensors(2, 8, 12, 16), inner="aot_eager")


@pytest.mark.parametrize("read", [lambda x: x.mT, lambda x: x.diagonal()[:, None], lambda x: x.diagonal()])
def test_written_regions_that_are_read_along_other_axes(read: Callable[[Tensor], Tensor]) -> None:
    """One position stands at both axes of what was written, or the two change places."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        numbers = torch.zeros(12, 12)
        for number, (a, b) in enumerate([((0, 5), (3, 12)), ((2, 9), (0, 7)), ((4, 12), (5, 11))], 1):
            numbers[slice(*a)][:, slice(*b)] = number
        return scores(q, k).masked_fill(numbers < read(numbers), -1e18).softmax(-1) @ v

    assert_fused(program, *tensors(2, 3, 12, 16), inner="aot_eager")


def test_writes_after_writes_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the 27 regions is written into a slice of a slice of a slice, and reads what the others wrote."""
    counted = 0

    def counting(*args: Any) -> Any:
        nonlocal counted
        counted += 1
        return chosen(*args)

    chosen = written._chosen
    monkeypatch.setattr(written, "_chosen", counting)
    program = regions_of_windows((4, 4, 6), (2, 2, 3), (1, 1, 1), False)
    assert_fused(program, *tensors(1, 8, 12, 16), inner="eager")
    # At new indices for each write it would be five times as many.
    assert 27 * 3 < counted < 27 * 3 * 100


@pytest.mark.parametrize("first", [1, 0])
@pytest.mark.parametrize("of_queries", [False, True])
def test_positions_added_to_all_but_the_first_token(of_queries: bool, first: int) -> None:
    """The slice is written back through a view with a height and a width (MViTv2)."""
    n = 8 + first

    def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, table: Tensor) -> Tensor:
        s = scores(q, k)
        added = bias.view(2, 4, 2, 4)
        if of_queries:
            added = torch.einsum("bhyxc,ykc->bhyxk", q[:, :, first:].reshape(2, 3, 2, 4, 16), table)[..., None]
        s[:, :, first:, first:] = (s[:, :, first:, first:].view(2, -1, 2, 4, 2, 4) + added).view(2, -1, 8, 8)
        return s.softmax(-1) @ v

    assert_fused(program, *tensors(2, 3, n, 16), torch.randn(8, 8), torch.randn(2, 2, 16), inner="aot_eager")


def test_every_fourth_of_old_and_new_keys() -> None:
    """The number of new keys is a size of no tensor that the attention reads (Jukebox)."""

    def program(q: Tensor, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> Tensor:
        k, v = (torch.cat(pair, 1)[:, 1::4] for pair in ((keys, key), (values, value)))
        return scores(q, k).softmax(-1) @ v

    run = compiled(program, dynamic=True)
    with collecting() as graphs, torch.no_grad():
        for n in range(9, 16):
            q, key, value = torch.randn(3, 2, 1, 16)
            args = (q, torch.randn(2, n, 16), torch.randn(2, n, 16), key, value)
            torch.testing.assert_close(run(*args), program(*args))
    assert all(site.fused for graph in graphs for site in graph.sites)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_learned_table_under_a_softmax_in_float64(dtype: torch.dtype) -> None:
    at = torch.arange(9)

    def program(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        bias = nn.functional.embedding((at[:, None] - at).clamp(-4, 4) + 4, table).permute(2, 0, 1)
        return (scores(q, k) + bias).softmax(-1, dtype=torch.float64).to(v.dtype) @ v

    assert_fused(program, *tensors(*SHAPE, dtype=dtype), torch.randn(9, 3, dtype=dtype))


def times_nothing(q, k, v, b):
    return torch.baddbmm(b, q, k.mT, beta=0, alpha=0.3).softmax(-1) @ v


def never_chosen(q, k, v, b):
    return torch.where(torch.ones(9, 9, dtype=torch.bool), scores(q, k), b).softmax(-1) @ v


def cut_off(q, k, v, b):
    return (scores(q, k) + torch.cat([torch.zeros(9, 9).expand(3, 9, 9), b], -1)[..., :9]).softmax(-1) @ v


def assert_zeros_are_kept(program: Callable[..., Any], operands: list[Tensor]) -> None:
    """The last operand gets a gradient of zeros, since the site stays as written for it."""
    with collecting() as graphs:
        out = torch.compile(program, backend="attn_fuse", options={"pick": "fused", "inner_backend": "eager"})(
            *operands
        )
    out.sum().backward()
    assert operands[3].grad is not None and not operands[3].grad.any()
    (reason,) = [site.blocker.reason for graph in graphs for site in graph.sites]
    assert "gets a gradient of zeros as written, and would get none" in reason


@pytest.mark.parametrize("program", [times_nothing, never_chosen, cut_off])
def test_zeros_are_a_gradient(program: Callable[..., Any]) -> None:
    """An optimizer with weight decay moves what has a gradient of zeros, and leaves what has none."""
    operands = [torch.randn(3, 9, n, requires_grad=True) for n in (16, 16, 16, 9)]
    assert_zeros_are_kept(program, operands)


def exponentials(s: Tensor) -> Tensor:
    e = s.exp()
    return e / e.sum(-1, keepdim=True)


def no_number_is_zero(w: Tensor) -> Tensor:
    return torch.where(w.isnan(), 0.0, w)


@pytest.mark.parametrize("guard", [torch.nan_to_num, no_number_is_zero, lambda w: w.masked_fill(w != w, 0.0)])
@pytest.mark.parametrize("fill", [-1e9, -math.inf])
def test_a_guard_of_exponentials_that_are_all_zero(guard: Callable[[Tensor], Tensor], fill: float) -> None:
    seen = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    seen[1] = False

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return guard(exponentials(scores(q, k).masked_fill(~seen, fill))) @ v

    assert_refused(program, *tensors(*SHAPE), reason="the weights are")


@pytest.mark.parametrize(
    "raised",
    [Tensor.abs, Tensor.square, lambda s: -s, lambda s: s * s, lambda s: (-2 * s.floor()).relu()],
    ids=["abs", "square", "minus", "times itself", "below"],
)
def test_masked_scores_that_become_plus_infinity(raised: Callable[[Tensor], Tensor]) -> None:
    """As written their weight is no number, and that of the keys beside them 0."""
    hidden = torch.ones(9, 9).triu(1).bool()

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return raised(scores(q, k).masked_fill(hidden, -math.inf)).softmax(-1) @ v

    assert_refused(program, *tensors(*SHAPE), reason="some scores are plus infinity, whose weight is no number")


@pytest.mark.parametrize(
    "bounded",
    [
        Tensor.relu,
        Tensor.tanh,
        nn.functional.gelu,
        lambda s: s.clamp(-50, 50),
        lambda s: s / 0.7,
        lambda s: -1 * s.neg(),
    ],
    ids=["relu", "tanh", "gelu", "clamp", "scaled", "twice minus"],
)
def test_masked_scores_that_do_not(bounded: Callable[[Tensor], Tensor]) -> None:
    hidden = torch.ones(9, 9).triu(1).bool()

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return bounded(scores(q, k).masked_fill(hidden, -math.inf)).softmax(-1) @ v

    assert_fused(program, *tensors(*SHAPE))


def with_bias(s: Tensor, kept: Tensor, bias: Tensor) -> Tensor:
    return s.masked_fill(~kept, 0.0) + bias


NO_NUMBERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "masked by a product": lambda s, kept, low: low * kept + -1e9 * (1 - kept.to(s.dtype)),
    "times a mask": lambda s, kept, low: low * kept,
    "times nothing": lambda s, kept, low: s.relu() * kept + low * 0.0,
    "times what may be 0": lambda s, kept, low: low * kept.any(0),
    "times positions": lambda s, kept, low: low * torch.arange(9),
    "less itself": lambda s, kept, low: s + (low - low),
    "less the minimum": lambda s, kept, low: low - low.amin(-1, keepdim=True),
    "less the sum": lambda s, kept, low: low - low.sum(-1, keepdim=True),
    "bias times a mask": lambda s, kept, low: with_bias(
        s, kept, torch.zeros(9, 9).masked_fill(~kept, -math.inf) * kept
    ),
    "infinity times a mask": lambda s, kept, low: with_bias(s, kept, (1 - kept.float()) * -math.inf),
    "a cosine": lambda s, kept, low: low.cos(),
    "silu": lambda s, kept, low: nn.functional.silu(low),
    "gelu": lambda s, kept, low: nn.functional.gelu(low),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_scores_that_are_no_number_behind_a_guard(name: str) -> None:
    """As written the whole row is no number, and becomes 0."""
    kept = torch.ones(9, 9).tril().bool()

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        return NO_NUMBERS[name](s, kept, s.masked_fill(~kept, -math.inf)).softmax(-1).nan_to_num(0.0) @ v

    reason = "the weights are guarded or filled where a score may be infinity times zero, which makes its row no number"
    assert_refused(program, *tensors(*SHAPE), reason=reason)


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_scores_that_are_no_number_under_filled_weights(name: str) -> None:
    """As written a query all of whose weights are filled is 0, whatever its scores are."""
    kept, left = torch.ones(9, 9).tril().bool(), torch.ones(9, 9).bool()
    left[2:5] = False

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        weights = NO_NUMBERS[name](s, kept, s.masked_fill(~kept, -math.inf)).softmax(-1)
        return weights.masked_fill(~left, 0.0) @ v

    reason = "the weights are guarded or filled where a score may be infinity times zero, which makes its row no number"
    assert_refused(program, *tensors(*SHAPE), reason=reason)


@pytest.mark.parametrize("fill", [lambda p, hidden: p.masked_fill(hidden, 0.0), lambda p, hidden: p * ~hidden])
def test_weights_filled_where_the_scores_are_hidden(fill: Callable[[Tensor, Tensor], Tensor]) -> None:
    hidden = ~torch.ones(9, 9).tril().bool()
    hidden[3] = True

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fill(scores(q, k).masked_fill(hidden, -math.inf).softmax(-1), hidden) @ v

    assert_fused(program, *tensors(*SHAPE), backward=False)


@pytest.mark.parametrize(
    "low",
    [lambda s: 0.5 * s, lambda s: s - s.amax(-1, keepdim=True), lambda s: s / 3 + 1, lambda s: 2 * s.clamp(max=5)],
    ids=["scaled", "less the maximum", "shifted", "clamped"],
)
def test_scores_that_are_numbers_behind_a_guard(low: Callable[[Tensor], Tensor]) -> None:
    kept = torch.ones(9, 9).tril().bool()
    kept[3] = False

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return low(scores(q, k).masked_fill(~kept, -math.inf)).softmax(-1).nan_to_num(0.0) @ v

    assert_fused(program, *tensors(*SHAPE), backward=False)


@pytest.mark.parametrize(
    "shifted",
    [
        lambda s: s + 0.3 + torch.arange(9) % 3,
        lambda s: (s + torch.arange(9)) * 0.3,
        lambda s: (s + torch.arange(9)) / 3,
        lambda s: s - torch.where(torch.arange(9) > 2.5, torch.arange(9), 0.3) / 7,
    ],
    ids=["added", "multiplied", "divided", "chosen"],
)
def test_whole_numbers_beside_fractions_of_float64(shifted: Callable[[Tensor], Tensor]) -> None:
    """torch adds a fraction to whole numbers in its default dtype, which is narrower than these scores."""
    assert_fused(lambda q, k, v: shifted(scores(q, k)).softmax(-1) @ v, *tensors(*SHAPE, dtype=torch.float64))


def test_scores_times_themselves_in_reverse_beside_a_constant_sink() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat(1, 2, 1, 1), v[:, :, None].expand(1, 1, 2, 4, 1).reshape(1, 2, 4, 1)
        s = q @ k.mT
        return nn.functional.pad(s * s.flip(-1), (0, 1), value=0.3).softmax(-1)[..., :-1] @ v

    operands = torch.randn(1, 2, 1, 1), torch.randn(1, 1, 4, 1), torch.randn(1, 1, 4, 1)
    assert_refused(program, *operands, reason="the scores join more than one matrix product")


def test_a_number_made_a_tensor_under_a_vmap() -> None:
    seen, at = torch.rand(6, 6) > 0.3, torch.arange(6)

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.where(seen | (at[:, None] == at), q @ k.mT, torch.tensor(-math.inf))
        # No scale, no mask, no bias: read as one function.
        return (s * (at + 1)[:, None].to(s.dtype)).tanh().softmax(-1) @ v

    assert_fused(torch.vmap(one), *tensors(3, 2, 6, 4))


CACHES = [
    lambda v: torch.empty(2, 3, 12, 16, dtype=v.dtype),
    lambda v: torch.zeros(2, 3, 12, 16, dtype=v.dtype),
    lambda v: torch.ones(2, 3, 12, 16, dtype=v.dtype),
    lambda v: torch.full((2, 3, 12, 16), 0.5, dtype=v.dtype),
    lambda v: torch.zeros_like(v),
    lambda v: torch.empty_like(v.detach()),
    lambda v: torch.zeros_like(v.sin()),
    lambda v: v.new_zeros(2, 3, 12, 16),
    lambda v: v.new_empty(2, 3, 12, 16),
    lambda v: v.new_full((2, 3, 12, 16), 0.5),
    lambda v: v.detach().clone(),
]


@pytest.mark.parametrize("make", CACHES)
def test_a_cache_that_no_gradient_leaves_is_filled_in_part(make: Callable[[Tensor], Tensor]) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = make(v)
        cache[:, :, :9] = k
        return scores(q, cache[:, :, :9]).softmax(-1) @ v[:, :, :9]

    assert_fused(program, *tensors(*SHAPE)[:2], torch.randn(2, 3, 12, 16))


@pytest.mark.parametrize("make", [torch.clone, torch.sin, lambda v: torch.zeros_like(v) * v])
def test_a_cache_that_gives_an_input_a_gradient_of_zeros(make: Callable[[Tensor], Tensor]) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, old: Tensor) -> Tensor:
        cache = make(old)
        cache[:, :, :9] = k
        return scores(q, cache[:, :, :9]).softmax(-1) @ v

    operands = [torch.randn(2, 3, n, 16, requires_grad=True) for n in (9, 9, 9, 12)]
    assert_zeros_are_kept(program, operands)
