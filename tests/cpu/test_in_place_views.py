"""Tensors whose shape the program changes in place: fused as views, right in any case."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_fuse.report import collecting
from tests.harness import assert_fused, check, compiled, every_day, tensors

B, H, S, D = 2, 3, 12, 8


def padded(change):
    def program(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        keep = change(pad.logical_not())
        return (q @ k.mT / 4).masked_fill(~keep, float("-inf")).softmax(-1) @ v

    return program


def reshaped_late(q, k, v, pad):
    keep = pad.logical_not()
    first = keep[:, :5]
    count = keep.sum(-1)
    other = keep.contiguous()
    keep.unsqueeze_(1).unsqueeze_(1)
    out = (q @ k.mT / 4).masked_fill(~other, float("-inf")).softmax(-1) @ v
    return out, first.float(), count, other.float()


def key_transposed(q, k, v, pad):
    key = k.sin()
    before = key.sum(-1)
    key.transpose_(-2, -1)
    return (q @ key / 4).masked_fill(pad[:, None, None], -1e9).softmax(-1) @ v, before


def key_swapped_and_written(q, k, v, pad):
    key = k * 1
    part = key[:, :, 3:5]
    key.swapaxes_(-2, -1)
    key.mul_(2)
    part.add_(1)
    return (q @ key / 4).masked_fill(pad[:, None, None], -1e9).softmax(-1) @ v, part.clone()


def out_transposed(q, k, v, pad):
    out = (q @ k.mT / 4).masked_fill(pad[:, None, None], -1e9).softmax(-1) @ v
    out.transpose_(1, 2)
    return out.reshape(B, S, H * D)


def out_transposed_and_returned(q, k, v, pad):
    out = (q @ k.mT / 4).masked_fill(pad[:, None, None], -1e9).softmax(-1) @ v
    return out.transpose_(1, 2)


def view_of_an_input(q, k, v, pad):
    key = k.detach()[:]
    key.transpose_(-2, -1)
    return (q @ key / 4).masked_fill(pad[:, None, None], -1e9).softmax(-1) @ v, k.sum(-1)


def parts_transposed(q, k, v, pad):
    halves = torch.stack([(k.sin() + 1)[..., : D // 2], k[..., D // 2 :]])
    one, other = halves[0], halves[1]
    one.transpose_(-2, -1)
    other.swapdims_(-2, -1)
    return (q @ torch.cat([one, other], -2) / 4).masked_fill(pad[:, None, None], -1e9).softmax(-1) @ v


def squeezed_and_back(q, k, v, pad):
    scores = (q @ k.mT / 4).unsqueeze(0)
    scores.squeeze_(0).masked_fill_(pad[:, None, None], -1e9)
    return scores.softmax(-1) @ v


def laid_anew(q, k, v, pad):
    key = k.sin()
    key.as_strided_((B, H, D, S), (H * S * D, S * D, 1, D))
    return (q @ key / 4).masked_fill(pad[:, None, None], -1e9).softmax(-1) @ v


PROGRAMS = [
    padded(lambda keep: keep.unsqueeze_(1).unsqueeze_(1)), padded(lambda keep: keep[:, None].unsqueeze_(2)),
    reshaped_late, key_transposed, key_swapped_and_written, out_transposed, out_transposed_and_returned,
    view_of_an_input, parts_transposed, squeezed_and_back, laid_anew,
]  # fmt: skip


@pytest.mark.parametrize(
    "program", every_day(PROGRAMS, PROGRAMS[0], key_swapped_and_written, out_transposed, squeezed_and_back)
)
@pytest.mark.parametrize("backward", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_shape_changed_in_place(program, backward: bool, capfd) -> None:
    pad = torch.arange(S)[None] >= torch.tensor([[S], [7]])
    assert_fused(program, *tensors(B, H, S, D), pad, backward=backward)
    assert "Traceback" not in capfd.readouterr().err


def memory_replaced(q, k, v, pad):
    key = k.sin()
    key.set_(k.cos())
    return (q @ key.mT / 4).masked_fill(pad[:, None, None], -1e9).softmax(-1) @ v


def test_other_memory_in_place_stays_as_written(capfd) -> None:
    pad = torch.arange(S)[None] >= torch.tensor([[S], [7]])
    given = (*(t.detach() for t in tensors(B, H, S, D)), pad)
    with collecting() as graphs:
        assert torch.allclose(compiled(memory_replaced)(*given), memory_replaced(*given))
    (reason,) = [site.blocker.reason for graph in graphs for site in graph.sites]
    assert reason == "memory that is written in place: set_ changes a tensor's memory or size in place"
    assert "Traceback" not in capfd.readouterr().err


def test_a_shape_changed_in_place_inside_a_vmap_stays_as_written(capfd) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            key = k.sin()
            key.transpose_(-2, -1)
            return (q @ key / 4).softmax(-1) @ v

        return torch.vmap(attend)(q, k, v)

    check(program, *tensors(B, H, S, D), backward=False)
    assert "Traceback" not in capfd.readouterr().err


def test_the_shape_of_an_input_changed_in_place() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k.transpose_(-2, -1)
        return (q @ k / 4).softmax(-1) @ v

    q, k, v = (t.detach() for t in tensors(B, H, S, D))
    mine, theirs = k.clone(), k.clone()
    assert torch.allclose(compiled(program)(q, mine, v), program(q, theirs, v), atol=1e-6)
    assert mine.shape == theirs.shape and mine.stride() == theirs.stride()
