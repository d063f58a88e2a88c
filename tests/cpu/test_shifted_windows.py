"""Masks that are added in place to the scores of some windows of a picture, as shifted windows (Swin) write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.harness import assert_fused, assert_refused, check

HEADS, SIDE, D = 2, 3, 8


def windows(x: Tensor) -> Tensor:
    """[batch, rows * SIDE, columns * SIDE, HEADS * D] -> [batch, HEADS, rows * columns, SIDE * SIDE, D]"""
    batch, height, width, _ = x.shape
    parts = x.view(batch, height // SIDE, SIDE, width // SIDE, SIDE, HEADS, D)
    return parts.permute(0, 5, 1, 3, 2, 4, 6).reshape(batch, HEADS, -1, SIDE * SIDE, D)


def attended(write: Callable[[Tensor, int], None]) -> Callable[[Tensor], Tensor]:
    def program(x: Tensor) -> Tensor:
        columns = x.shape[2] // SIDE
        q, k, v = map(windows, x.chunk(3, -1))
        scores = torch.einsum("bhwid,bhwjd->bhwij", q, k) * D**-0.5
        write(scores, columns)
        return torch.einsum("bhwij,bhwjd->bhwid", scores.softmax(-1), v)

    return program


def of_rows() -> Tensor:
    mask = torch.zeros(SIDE * SIDE, SIDE * SIDE)
    mask[-SIDE:, :-SIDE] = mask[:-SIDE, -SIDE:] = float("-inf")
    return mask


def both(scores: Tensor, columns: int) -> None:
    scores[:, :, -columns:] += of_rows()
    scores[:, :, columns - 1 :: columns] += of_rows().mT * 0.5


def over_a_bias(scores: Tensor, columns: int) -> None:
    scores += torch.arange(SIDE * SIDE)[:, None] * 0.1
    scores[:, :, -columns:] += of_rows()
    scores[:, :, ::columns] += 0.25


def of_one(scores: Tensor, columns: int) -> None:
    scores[:, :, 0] += of_rows()
    scores[:, :, -1, :, 0] += 2.0


@pytest.mark.parametrize("write", [both, over_a_bias, of_one])
@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (2, 3), (1, 1), (3, 2), (1, 5), (3, 1)])
def test_masks_of_some_windows(write, rows: int, columns: int) -> None:
    x = torch.randn(2, rows * SIDE, columns * SIDE, 3 * HEADS * D)
    site = assert_fused(attended(write), x, backward=False).site
    assert site.attention["scale"].startswith(f"{D**-0.5:.6g}"[:6]), site.attention


def test_a_number_of_windows_that_changes() -> None:
    pictures = [torch.randn(1, rows * SIDE, 4 * SIDE, 3 * HEADS * D) for rows in (4, 6, 5)]
    check(attended(both), *pictures[:1], more=[(x,) for x in pictures[1:]], backward=False)


# ---- what looks alike


def of_the_window_before(scores: Tensor, columns: int) -> None:
    scores[:, :, 1::columns] += scores[:, :, ::columns]


def from_the_window_before(scores: Tensor, columns: int) -> None:
    scores[:, :, 1::columns] = scores[:, :, ::columns] + of_rows()


def from_the_last_row(scores: Tensor, columns: int) -> None:
    scores[:, :, :columns] = scores[:, :, -columns:] * 1.0


def from_the_first(scores: Tensor, columns: int) -> None:
    scores[:, :, 1] = scores[:, :, 0] + 1.0


def of_two(scores: Tensor, columns: int) -> None:
    scores[:, :, 2] += scores[:, :, 1]


@pytest.mark.parametrize(
    "write", [of_the_window_before, from_the_window_before, from_the_last_row, from_the_first, of_two]
)
def test_scores_of_other_windows(write) -> None:
    x = torch.randn(2, 3 * SIDE, 3 * SIDE, 3 * HEADS * D)
    assert_refused(attended(write), x, reason="product")


def scaled(scores: Tensor, columns: int) -> None:
    scores[:, :, 1::columns] *= 0.5


def scaled_and_added(scores: Tensor, columns: int) -> None:
    scores[:, :, ::columns] = scores[:, :, ::columns] * 0.5 + 1.0


def filled(scores: Tensor, columns: int) -> None:
    scores[:, :, -columns:, :, 0] = float("-inf")


@pytest.mark.parametrize("write", [scaled, scaled_and_added, filled])
def test_other_writes_into_some_windows(write) -> None:
    check(attended(write), torch.randn(2, 3 * SIDE, 3 * SIDE, 3 * HEADS * D))


def where_they_are_high(scores: Tensor, columns: int) -> None:
    scores += torch.where(scores > 0.5, 1.0, 0.0)


def of_where_they_are_high(scores: Tensor, columns: int) -> None:
    scores[:, :, :columns] = torch.where(
        scores[:, :, :columns] > 0.5, scores[:, :, :columns] + 1, scores[:, :, :columns]
    )


@pytest.mark.parametrize("write", [where_they_are_high, of_where_they_are_high])
def test_a_bias_that_the_scores_decide(write) -> None:
    outcome = check(attended(write), torch.randn(2, 3 * SIDE, 3 * SIDE, 3 * HEADS * D))
    assert "bias" not in outcome.site.attention
