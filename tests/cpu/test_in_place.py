"""Scores, masks and biases that the program writes in place: fused where nothing is lost, right in any case."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_fuse.report import collecting
from tests.harness import assert_fused, assert_refused, check, compiled, tensors

B, H, S, D = 2, 3, 12, 8
ROWS, COLUMNS = 3, 4


def product(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / D**0.5


def bucketed(q: Tensor, k: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """T5's buckets as CPM-Ant writes them, added to in place, and a padding of `lengths`."""
    at = torch.arange(S)
    apart = at[None, :] - at[:, None]
    buckets = (apart > 0).to(torch.int32) * 4
    buckets += torch.where(apart.abs() < 3, apart.abs(), 3).to(torch.int32)
    scores = product(q, k) + table[buckets].permute(2, 0, 1)
    return scores.masked_fill((at >= lengths[:, None])[:, None, None], float("-inf"))


def test_a_bias_of_the_query_written_into_the_scores() -> None:
    """Decomposed relative positions as MViTv2 in timm adds them: into a slice that is all of the scores."""

    def written(q: Tensor, k: Tensor, v: Tensor, high: Tensor, wide: Tensor) -> Tensor:
        scores = product(q, k)
        grid = q[:, :, 0:].reshape(B, H, ROWS, COLUMNS, D)
        of_rows = torch.einsum("byhwc,hkc->byhwk", grid, high)
        of_columns = torch.einsum("byhwc,wkc->byhwk", grid, wide)
        scores[:, :, 0:, 0:] = (
            scores[:, :, 0:, 0:].view(B, -1, ROWS, COLUMNS, ROWS, COLUMNS)
            + of_rows.unsqueeze(-1)
            + of_columns.unsqueeze(-2)
        ).view(B, -1, S, S)
        return scores.softmax(-1) @ v

    tables = torch.randn(ROWS, ROWS, D), torch.randn(COLUMNS, COLUMNS, D)
    assert_fused(written, *tensors(B, H, S, D), *tables, backward=False)


def test_lengths_that_are_counted_beside_buckets_written_in_place() -> None:
    def written(q: Tensor, k: Tensor, v: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        return bucketed(q, k, table, torch.sum(ids != 0, -1)).softmax(-1) @ v

    ids = torch.tensor([[1] * S, [1] * 7 + [0] * 5])
    assert_fused(written, *tensors(B, H, S, D), torch.randn(8, H), ids)


def counted_and_raised(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    lengths = torch.sum(ids != 0, -1)
    lengths += 2
    return bucketed(q, k, table, lengths)


def counted_and_cleared_afterwards(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    lengths = torch.sum(ids != 0, -1)
    scores = bucketed(q, k, table, lengths)
    lengths.zero_()
    return scores


def raised_through_a_view(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    lengths = torch.sum(ids != 0, -1)
    lengths.view(-1)[1:] += 3
    return bucketed(q, k, table, lengths)


def counted_from_what_is_written(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    some = ids * 1
    some[:, 2:3] = 0
    return bucketed(q, k, table, torch.sum(some != 0, -1))


def other_product_in_a_part_of_the_scores(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    scores = product(q, k)
    scores[..., :4] = q @ k.flip(-1)[:, :, :4].transpose(-2, -1)
    return scores


def other_product_over_all_of_the_scores(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    scores = product(q, k)
    scores[:] = q.flip(-1) @ k.transpose(-2, -1)
    return scores


def other_product_of_the_scores(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    scores = product(q, k)
    scores += product(q, k) @ product(q, k)
    return scores


def diagonal_of_the_mask(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    keep = (ids != 0)[:, None, None, :].expand(B, 1, S, S).clone()
    keep.diagonal(dim1=-2, dim2=-1).fill_(True)
    return product(q, k).masked_fill(~keep, -1e9)


def view_of_the_mask_taken_before(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    bias = (ids * 1.0)[:, None, None, :] + torch.zeros(S, 1)
    part = bias.as_strided((B, 1, S, 4), (S * S, S * S, S, 1))
    part -= 3.0
    return product(q, k) + bias


def transposed_view_of_the_mask(q: Tensor, k: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    bias = (ids * 1.0)[:, None, None, :] + torch.zeros(S, 1)
    bias.mT[..., 2:5, :] = -4.0
    return product(q, k) + bias


@pytest.mark.parametrize(
    "scores_of",
    [
        diagonal_of_the_mask,
        view_of_the_mask_taken_before,
        transposed_view_of_the_mask,
        counted_and_raised,
        counted_and_cleared_afterwards,
        raised_through_a_view,
        counted_from_what_is_written,
        other_product_in_a_part_of_the_scores,
        other_product_over_all_of_the_scores,
        other_product_of_the_scores,
    ],
)
@pytest.mark.parametrize("backward", [False, True], ids=["inference", "training"])
def test_right_in_any_case(scores_of, backward: bool) -> None:
    def written(q: Tensor, k: Tensor, v: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        return scores_of(q, k, table, ids).softmax(-1) @ v

    ids = torch.tensor([[1] * 9 + [0] * 3, [1] * 7 + [0] * 5])
    check(written, *tensors(B, H, S, D), torch.randn(8, H), ids, backward=backward)


def into_an_input(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    bias += product(q, k)
    return bias.softmax(-1) @ v


def into_an_input_before_the_scores(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    bias[..., 3:] = -1.0
    bias += 1.0
    return (product(q, k) + bias).softmax(-1) @ v


def into_a_view_of_an_input(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    part = bias[:]
    part += product(q, k)
    return part.softmax(-1) @ v


@pytest.mark.parametrize("program", [into_an_input, into_an_input_before_the_scores, into_a_view_of_an_input])
def test_an_input_keeps_what_is_written_into_it(program) -> None:
    args = [*tensors(B, H, S, D), torch.randn(B, H, S, S)]
    again = [x.clone() for x in args]
    with torch.no_grad(), collecting() as graphs:
        torch.testing.assert_close(compiled(program)(*args), program(*again))
    torch.testing.assert_close(args[3], again[3])
    assert [site.status for graph in graphs for site in graph.sites] == ["fused"]


def read_again_under_its_other_name(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = bias.sin()
    other = scores
    scores += product(q, k)
    return scores.softmax(-1) @ v, other * 1


def read_again_through_a_view(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = bias.sin()
    part = scores[0]
    scores += product(q, k)
    return scores.softmax(-1) @ v, part + 1


@pytest.mark.parametrize("program", [read_again_under_its_other_name, read_again_through_a_view])
def test_what_is_written_is_read_again(program) -> None:
    assert_fused(program, *tensors(B, H, S, D), torch.randn(B, H, S, S), backward=False)


def test_dead_code_does_not_matter() -> None:
    """x-transformers copies the scores for who asks for them, beside positions that it adds to in place."""

    def written(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        scores = product(q, k)
        scores.clone()
        at = torch.arange(S)[:, None] - torch.arange(S)
        at += S - 1
        return (scores + table[at]).softmax(-1) @ v

    assert_fused(written, *tensors(B, H, S, D), torch.randn(2 * S - 1))


def copied_and_written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = product(q, k)
    scores += bias
    copied = scores.clone()
    copied += 1.0
    return scores.softmax(-1) @ v, copied


def viewed_and_written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = product(q, k)
    scores += bias
    part = scores[:1]
    part += 1.0
    return scores.softmax(-1) @ v, scores.exp()


@pytest.mark.parametrize("program", [copied_and_written, viewed_and_written])
def test_code_that_is_not_dead(program) -> None:
    check(program, *tensors(B, H, S, D), torch.randn(B, H, S, S), backward=False)


def test_what_was_read_before_does_not_matter() -> None:
    def written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = bias.sin()
        before = scores * 2
        scores += product(q, k)
        return scores.softmax(-1) @ v, before

    assert_fused(written, *tensors(B, H, S, D), torch.randn(B, H, S, S), backward=False)


def counted_of_what_is_written(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    some = ids * 1
    some.clamp_(max=1)
    seen = torch.arange(S) < torch.sum(some, -1)[:, None]
    scores = product(q, k) + some[:, None, None, :]
    return scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1) @ v


def bias_used_again(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    some = ids * 1
    some.clamp_(max=1)
    bias = some[:, None, None, :] * 2.0
    return (product(q, k) + bias).softmax(-1) @ v, bias


def bias_of_a_leaf_used_again(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    some = torch.nn.functional.linear(ids * 1.0, torch.eye(S))
    some += 1.0
    bias = some[:, None, None, :] * 2.0
    return (product(q, k) + bias).softmax(-1) @ v, bias


def bias_of_two_layers(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    some = ids * 1
    some.clamp_(max=1)
    bias = some[:, None, None, :] * 2.0
    out = (product(q, k) + bias).softmax(-1) @ v
    return (product(out, k) + bias).softmax(-1).square() @ v


@pytest.mark.parametrize(
    "program", [counted_of_what_is_written, bias_used_again, bias_of_a_leaf_used_again, bias_of_two_layers]
)
def test_what_is_left_still_finds_it_written(program) -> None:
    check(program, *tensors(B, H, S, D), torch.tensor([[3] * 4 + [0] * 8, [2] * 3 + [0] * 9]), backward=False)


def mask_of_ones(like: Tensor) -> Tensor:
    return torch.ones_like(like).triu_(1).bool()


def mask_by_slices(like: Tensor) -> Tensor:
    mask = torch.zeros_like(like)
    mask[:, 3:] = 1
    mask[:3, 5:] = 0
    return mask != 0


def mask_of_buckets(like: Tensor) -> Tensor:
    at = torch.arange(len(like))
    apart = at - at[:, None]
    buckets = torch.zeros_like(apart)
    buckets += (apart > 0).long() * 4
    return torch.linspace(-1, 1, 8)[buckets] > 0


@pytest.mark.parametrize("mask", [mask_of_ones, mask_by_slices, mask_of_buckets])
@pytest.mark.parametrize("filled", [torch.Tensor.masked_fill_, lambda s, m, value: s.add_(m * value)])
def test_scores_written_with_a_mask_that_was_written(mask, filled) -> None:
    """The mask lies in memory of its own, and what writes the scores is a statement."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = product(q, k)
        filled(scores, mask(scores[0, 0]), -1e9)
        return scores.softmax(-1) @ v

    assert_fused(program, *tensors(B, H, S, D))


def less_the_largest(scores: Tensor) -> object:
    scores -= scores.detach().amax(-1, keepdim=True)
    return None


def looked_at(scores: Tensor) -> object:
    spread = scores.detach()[:, 1:].std()
    scores.masked_fill_(torch.arange(S) > 3, -1e9)
    return spread


def looked_at_before_and_after(scores: Tensor) -> object:
    before = scores.detach()
    scores.mul_(0.3)
    return before, before.view(-1).sum(), scores.data.unbind(0)[0]


@pytest.mark.parametrize("seen", [less_the_largest, looked_at, looked_at_before_and_after])
def test_written_scores_read_without_a_gradient(seen) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[object, Tensor]:
        scores = product(q, k)
        extra = seen(scores)
        return extra, scores.softmax(-1) @ v

    assert_fused(program, *tensors(B, H, S, D))


def a_part(scores: Tensor) -> None:
    scores.detach()[:, 1:].mul_(0.3)


def one_of_several(scores: Tensor) -> None:
    scores.data.unbind(0)[0].add_(1)


@pytest.mark.parametrize("write", [a_part, one_of_several])
def test_scores_written_without_a_gradient(write) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = product(q, k)
        scores.mul_(2)
        write(scores)
        return scores.softmax(-1) @ v

    assert_refused(program, *tensors(B, H, S, D), reason="written through an alias that is detached from its gradient")


def test_scores_scaled_in_place_through_a_view_of_symbolic_sizes() -> None:
    """Batch and heads are one number here, so that torch writes one stride in two forms."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, length, _ = q.shape
        q, k, v = (x.reshape(batch * heads, -1, x.shape[-1]) for x in (q, k, v))
        scores = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1)
        seen = scores.reshape(batch, heads, length, -1)
        seen *= 0.5
        weights = seen.softmax(-1).reshape(scores.shape)
        return (weights @ v).view(batch, heads, length, -1)

    shapes = [(tensors(3, 3, n, 4)[0], *tensors(3, 3, m, 4, count=2)) for n, m in ((2, 5), (3, 8), (8, 8))]
    assert_fused(program, *shapes[0], dynamic=True, more=tuple(shapes[1:]))


def test_a_view_of_the_shape_of_another_tensor() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        base = q.clone()
        viewed = base.view(base.shape)
        out = product(viewed, k).softmax(-1) @ v
        base.add_(1)
        return out * base.mean()

    more = ((*tensors(2, 3, 7, 8),),)
    assert_fused(program, *tensors(2, 3, 5, 8), dynamic=True, backward=False, more=more)
