"""Attention as few people write it, and beside each spelling what looks like it and is something else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_fuse.report import collecting
from tests.harness import assert_fused, assert_refused, check, compiled, tensors

pytestmark = pytest.mark.thorough

B, H, T, D = 2, 4, 12, 8
SCALE = 1 / math.sqrt(D)
SHAPE = (B, H, T, D)
Program = Callable[[Tensor, Tensor, Tensor], Tensor]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * SCALE


def less_the_mean(q, k, v):
    s = scores(q, k)
    return (s - s.mean(-1, keepdim=True)).softmax(-1) @ v


def over_a_product_with_ones(q, k, v):
    e = scores(q, k).exp()
    return (e / (e @ q.new_ones(T, 1))) @ v


def quotient_of_two_products(q, k, v):
    e = scores(q, k).exp()
    return (e @ v) / (e @ q.new_ones(T, 1))


def added_to_every_second_key(q, k, v):
    s = scores(q, k)
    s[..., ::2] += 1.0
    s[..., 1::3] *= 2.0
    return s.softmax(-1) @ v


def fill_of_a_diagonal_by_positions(q, k, v):
    s, i = scores(q, k), torch.arange(T)
    s[:, :, i, i] = -5e4
    return s.softmax(-1) @ v


def fill_beside_the_diagonal_by_positions(q, k, v):
    s, i = scores(q, k), torch.arange(T - 2)
    s[:, :, i + 2, i + 1] = -math.inf
    return s.softmax(-1) @ v


def product_added_to_something(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    weights = (q @ k.mT * SCALE).softmax(-1)
    return torch.baddbmm(q, weights, v, beta=0.5, alpha=2.0)


def halves_of_the_batch_in_place(q, k, v):
    s = scores(q, k)
    s[:1] = s[:1].softmax(-1)
    s[1:] = s[1:].softmax(-1)
    return s @ v


def halves_of_the_batch_joined(q, k, v):
    s = scores(q, k)
    return torch.cat([s[:1].softmax(-1), s[1:].softmax(-1)]) @ v


def halves_of_the_queries(q, k, v):
    s = scores(q, k)
    s[:, :, 5:] = s[:, :, 5:].softmax(-1)
    s[:, :, :5] = s[:, :, :5].softmax(-1)
    return s @ v


def diagonal_filled(q, k, v):
    s = scores(q, k)
    s.diagonal(dim1=-2, dim2=-1).fill_(-math.inf)
    return s.softmax(-1) @ v


def written_and_returned(q, k, v):
    s = scores(q, k)
    s.mul_(2)
    p = s.softmax(-1)
    return p @ v, p


def autocast_off_inside(q, k, v):
    s = scores(q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        return s.softmax(-1) @ v


def query_edited_afterwards(q, k, v):
    q = q.clone()
    s = scores(q, k)
    q.add_(1)
    return s.softmax(-1) @ v + q


def powers_of_two(q, k, v):
    e = 2 ** scores(q, k)
    return (e / e.sum(-1, keepdim=True)) @ v


def powers_of_ten_less_the_maximum(q, k, v):
    s = scores(q, k).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    e = 10 ** (s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


def softmin_of_the_negative(q, k, v):
    return F.softmin(-scores(q, k), -1) @ v


def softmin_as_a_module(q, k, v):
    return torch.nn.Softmin(-1)(scores(q, k)) @ v


def softmin_masked_from_above(q, k, v):
    s = (q @ k.mT * -SCALE).masked_fill(torch.ones(T, T).triu(1).bool(), math.inf)
    return F.softmin(s, -1) @ v


def second_names(q, k, v):
    s = scores(q, k)
    e = torch.special.exp2(s - torch.special.logsumexp(s, -1, keepdim=True))
    return torch.special.softmax(s, -1) @ (e / e.sum(-1, keepdim=True) @ v)


def written_twice_for_the_maximum(q, k, v):
    largest = scores(q, k).amax(-1, keepdim=True)
    e = (scores(q, k) - largest).exp()
    return e / e.sum(-1, keepdim=True) @ v


def exponentials_written_twice(q, k, v):
    return (scores(q, k).exp() / scores(q, k).exp().sum(-1, keepdim=True)) @ v


def halves_of_the_scores_added(q, k, v):
    return (q @ k.mT / 2 * SCALE + q @ k.mT / 2 * SCALE).softmax(-1) @ v


def sum_of_multiples(q, k, v):
    s = scores(q, k)
    return (s + torch.linspace(0, 1, T) + s * 0.5 - s / 4).softmax(-1) @ v


def masked_scores_doubled(q, k, v):
    s = scores(q, k).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    return (s + s).softmax(-1) @ v


def scores_less_themselves(q, k, v):
    return (scores(q, k) - scores(q, k)).softmax(-1) @ v


def one_value_for_each_head(q, k, v):
    return scores(q, k).softmax(-1) @ v[:, :, :1].expand(-1, -1, k.shape[2], -1)


def one_value_without_a_batch(q, k, v):
    p = scores(q, k).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
    return (p * torch.linspace(0, 1, T)) @ v[:1, :, :1].repeat(B, 1, T, 1)


def keys_and_values_in_pairs(q, k, v):
    k, v = (x[:, :, : T // 2].repeat_interleave(2, 2) for x in (k, v))
    return scores(q, k).softmax(-1) @ v


def one_vector(q, k, v):
    return (k[0, 0] @ q[0, 0, 0] * SCALE).softmax(-1) @ v[0, 0]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "program",
    [
        less_the_mean, over_a_product_with_ones, quotient_of_two_products, fill_of_a_diagonal_by_positions,
        fill_beside_the_diagonal_by_positions, product_added_to_something, halves_of_the_batch_in_place,
        halves_of_the_batch_joined, halves_of_the_queries,
        diagonal_filled, written_and_returned, autocast_off_inside, one_vector,
        powers_of_two, powers_of_ten_less_the_maximum, softmin_of_the_negative, softmin_as_a_module,
        softmin_masked_from_above, second_names, written_twice_for_the_maximum, exponentials_written_twice,
        halves_of_the_scores_added, sum_of_multiples, masked_scores_doubled, scores_less_themselves,
        one_value_for_each_head, one_value_without_a_batch, keys_and_values_in_pairs,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_fused(program: Program, dynamic: bool | None) -> None:
    assert_fused(program, *tensors(*SHAPE), inner="aot_eager", dynamic=dynamic)


@pytest.mark.parametrize(
    "program",
    [
        softmin_of_the_negative, softmin_masked_from_above, written_twice_for_the_maximum, halves_of_the_scores_added,
        masked_scores_doubled,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_read_as_the_plain_spelling(program: Program) -> None:
    assert assert_fused(program, *tensors(*SHAPE)).site.kernel == "cpu_flash"


def test_steps_of_a_known_length() -> None:
    assert_fused(added_to_every_second_key, *tensors(*SHAPE), inner="aot_eager")


def over_another_product(q, k, v):
    e = scores(q, k).exp()
    return (e / (e @ torch.linspace(0.5, 2.0, T, dtype=q.dtype).unsqueeze(-1))) @ v


def softmin_over_the_queries(q, k, v):
    return F.softmin(scores(q, k), -2) @ v


def softmin_masked_from_below(q, k, v):
    return F.softmin(scores(q, k).masked_fill(torch.ones(T, T).triu(1).bool(), -5e4), -1) @ v


def infinities_that_cancel(q, k, v):
    s = scores(q, k).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    return (2 * s - s).nan_to_num(nan=0.5).softmax(-1) @ v


def written_twice_of_other_keys(q, k, v):
    return (scores(q, k).exp() / scores(q, k.flip(-1)).exp().sum(-1, keepdim=True)) @ v


def written_twice_at_other_scales(q, k, v):
    return (scores(q, k).exp() / (scores(q, k) * 0.5).exp().sum(-1, keepdim=True)) @ v


def written_twice_for_other_queries(q, k, v):
    e = scores(q, k).exp()
    q = q * 0.5
    return e / scores(q, k).exp().sum(-1, keepdim=True) @ v


def halves_of_other_scores(q, k, v):
    s = scores(q, k)
    return torch.cat([s[:1].softmax(-1), (2.0 * s[1:]).softmax(-1)]) @ v


def halves_of_the_keys(q, k, v):
    s = scores(q, k)
    s[..., :5] = s[..., :5].softmax(-1)
    s[..., 5:] = s[..., 5:].softmax(-1)
    return s @ v


def half_that_is_normalised_twice(q, k, v):
    s = scores(q, k)
    s[:1] = s[:1].softmax(-1)
    return s.softmax(-1) @ v


def half_that_is_not_normalised(q, k, v):
    s = scores(q, k)
    s[:1] = s[:1].softmax(-1)
    return s @ v


def squares(q, k, v):
    e = scores(q, k) ** 2
    return (e / e.sum(-1, keepdim=True)) @ v


def halves_less_the_maximum_and_one(q, k, v):
    s = scores(q, k)
    e = 0.5 ** (s - s.amax(-1, keepdim=True))
    return (e / (e.sum(-1, keepdim=True) + 1)) @ v


def halves_kept_above_one(q, k, v):
    s = 8 * scores(q, k)
    e = 0.5 ** (s - s.amin(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True).clamp(min=2.0)) @ v


def weights_times_a_matrix(q, k, v):
    return scores(q, k).softmax(-1) @ torch.linspace(0, 1, T * T, dtype=q.dtype).view(T, T) @ v


def antidiagonal(q, k, v):
    s, i = scores(q, k), torch.arange(T)
    s[:, :, i, T - 1 - i] = -5e4
    return s.softmax(-1) @ v


def argument_edited_meanwhile(q, k, v):
    s = scores(q, k)
    q.add_(1)
    return s.softmax(-1) @ v


def bias_written_into(q, k, v, bias):
    bias += scores(q, k)
    return bias.softmax(-1) @ v


def test_writes_into_arguments() -> None:
    assert_fused(query_edited_afterwards, *tensors(*SHAPE), inner="aot_eager", backward=False)
    assert_fused(argument_edited_meanwhile, *tensors(*SHAPE), inner="aot_eager", backward=False)
    assert_fused(bias_written_into, *tensors(*SHAPE), torch.randn(B, H, T, T), inner="aot_eager", backward=False)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "program",
    [
        over_another_product, halves_of_other_scores, halves_of_the_keys, half_that_is_normalised_twice,
        half_that_is_not_normalised, weights_times_a_matrix, antidiagonal,
        squares, halves_less_the_maximum_and_one, halves_kept_above_one, softmin_over_the_queries,
        softmin_masked_from_below, infinities_that_cancel, written_twice_of_other_keys,
        written_twice_at_other_scales, written_twice_for_other_queries,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_right(program: Program, dynamic: bool | None) -> None:
    check(program, *tensors(*SHAPE), inner="aot_eager", dynamic=dynamic)


@pytest.mark.parametrize(
    "program, reason",
    [
        (softmin_over_the_queries, "sums over another axis"),
        (written_twice_of_other_keys, "not normalised by their own sum"),
        (written_twice_at_other_scales, "not normalised by their own sum"),
        (written_twice_for_other_queries, "not normalised by their own sum"),
    ],
)
def test_refused(program: Program, reason: str) -> None:
    assert_refused(program, *tensors(*SHAPE), reason=reason)


def detached(q, k, v):
    return scores(q, k).softmax(-1).detach() @ v


def test_detached_weights_where_nothing_has_a_gradient() -> None:
    with torch.no_grad():
        assert_fused(detached, *tensors(*SHAPE), inner="aot_eager", backward=False)


def test_a_vmap_that_cannot_be_written_out_leaves_no_level_open() -> None:
    factor = torch.tensor(SCALE)

    def program(q, k, v):
        return torch.vmap(torch.vmap(lambda q, k, v: (q @ k.mT * factor.item()).softmax(-1) @ v))(q, k, v)

    check(program, *tensors(*SHAPE), inner="aot_eager", dynamic=True)


@pytest.mark.parametrize(
    "shape, call",
    [
        ((B, T, D), {}),
        ((B, T, D), {"is_causal": True}),
        ((2, B, H, T, D), {}),
        ((T, D), {}),
    ],
    ids=["three dimensions", "three, causal", "five dimensions", "two dimensions"],
)
def test_a_call_of_sdpa_that_torch_has_no_kernel_for(shape: tuple[int, ...], call: dict[str, bool]) -> None:
    def program(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **call)

    assert_fused(program, *tensors(*shape), inner="aot_eager")
    (site,) = check(F.scaled_dot_product_attention, *tensors(*SHAPE), inner="aot_eager").sites
    assert site.status == "already fused"


def test_dropout_of_sdpa() -> None:
    with collecting() as graphs:
        compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1), "aot_eager")(*tensors(*SHAPE))
    assert [site.kernel for graph in graphs for site in graph.sites] == ["chunked"]


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.seen.append(str(operation))
        return operation(*args, **(kwargs or {}))


def test_a_parameter_as_a_bias_without_gradients_runs_on_the_kernel() -> None:
    """A view of a parameter requires a gradient, also where there is none; with a mask that does, torch takes none."""
    pool, x = torch.nn.Linear(D, 1), torch.randn(B, T, D)

    def program(x):
        return torch.einsum("bn,bnd->bd", pool(x).squeeze(-1).softmax(-1), x)

    operations = Operations()

    def counting(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            with operations:
                return graph.forward(*args)

        return call

    with torch.no_grad():
        compiled(program, counting)(x)
    assert any("flash_attention_for_cpu" in name for name in operations.seen), operations.seen


def scores_used_by_two(q, k, v):
    s = scores(q, k)
    first = s.softmax(-1) @ v
    return first + s.mT.softmax(-1) @ (first + v)


def threshold_of_the_scores(q, k, v):
    """The third largest, computed once more, may fall below itself; as a value it may be what it is."""
    s = scores(q, k)
    third = s.topk(3, -1).values[..., -1:]
    return s.masked_fill(s < third, -math.inf).softmax(-1) @ (v + third)


def test_scores_used_by_two() -> None:
    assert_fused(scores_used_by_two, *tensors(*SHAPE), inner="aot_eager")


def test_scores_held_against_what_is_made_of_them() -> None:
    outcome = check(threshold_of_the_scores, *tensors(*SHAPE), inner="aot_eager")
    assert not any(site.fused for site in outcome.sites), str(outcome)


def sizes_by_division(q, k, v):
    """The width of a head as a tensor, as GCViT takes it: torch reads the number in it where a shape is asked for."""
    width = torch.div(H * D, H, rounding_mode="floor")
    q, k, v = (t.reshape(B, T, H, width).transpose(1, 2) for t in (q, k, v))
    return (q @ k.mT * width**-0.5).softmax(-1) @ v


def sizes_by_two_divisions(q, k, v):
    width = torch.div(H * D, H, rounding_mode="floor")
    twice = q.reshape(B, T, H, width).transpose(1, 2)
    width = 2 * width
    q, k, v = (t.reshape(B, T, H // 2, width).transpose(1, 2) for t in (q, k, v))
    return (q @ k.mT * width**-0.5).softmax(-1) @ v + twice.sum()


@pytest.mark.parametrize("program", [sizes_by_division, sizes_by_two_divisions])
def test_sizes_by_division(program: Program) -> None:
    assert_fused(program, *tensors(B, T, H * D), inner="aot_eager")


def sizes_by_division_of_a_size(q, k, v):
    width = torch.div(q.shape[-1], H, rounding_mode="floor")
    q, k, v = (t.reshape(B, T, H, width).transpose(1, 2) for t in (q, k, v))
    return (q @ k.mT * width**-0.5).softmax(-1) @ v


def test_sizes_by_division_of_a_size_that_changes() -> None:
    more = [tensors(B, T, H * D * n) for n in (2, 3)]
    check(sizes_by_division_of_a_size, *tensors(B, T, H * D), inner="aot_eager", more=more)
