"""Masks and biases written in place into slices: of the windows of a picture, and of slices of slices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_fuse.lift import written
from tests.harness import assert_fused, assert_refused, check, every_day, tensors

INF = float("inf")
B, H, S, D = 2, 3, 12, 8


def product(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / D**0.5


@pytest.mark.thorough
def test_a_bias_of_the_query_written_into_the_scores() -> None:
    """Decomposed relative positions as MViTv2 in timm adds them: into a slice that is all of the scores."""

    def written(q: Tensor, k: Tensor, v: Tensor, high: Tensor, wide: Tensor) -> Tensor:
        scores = product(q, k)
        grid = q[:, :, 0:].reshape(B, H, 3, 4, D)
        of_rows = torch.einsum("byhwc,hkc->byhwk", grid, high)
        of_columns = torch.einsum("byhwc,wkc->byhwk", grid, wide)
        scores[:, :, 0:, 0:] = (
            scores[:, :, 0:, 0:].view(B, -1, 3, 4, 3, 4) + of_rows.unsqueeze(-1) + of_columns.unsqueeze(-2)
        ).view(B, -1, S, S)
        return scores.softmax(-1) @ v

    tables = torch.randn(3, 3, D), torch.randn(4, 4, D)
    assert_fused(written, *tensors(B, H, S, D), *tables, backward=False)


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
        weights = product(q, k).masked_fill(~same, -1e18).softmax(-1)
        return (weights * same if again else weights) @ v

    return program


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("shift", every_day([(0, 1, 0), (1, 1, 1), (0, 0, 0)], (1, 1, 1)), ids=str)
def test_masks_written_into_nested_slices(shift: tuple[int, ...], again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each region is written into a slice of a slice of a slice, and reads what the others wrote."""
    counted = 0

    def counting(*args: Any) -> Any:
        nonlocal counted
        counted += 1
        return chosen(*args)

    chosen = written._chosen
    monkeypatch.setattr(written, "_chosen", counting)
    program = regions_of_windows((4, 4, 6), (2, 2, 3), shift, again)
    assert_fused(program, *tensors(2, 8, 12, 16), inner="aot_eager")
    if shift == (1, 1, 1) and not again:
        # At new indices for each write it would be five times as many.
        assert 27 * 3 < counted < 27 * 3 * 100


@pytest.mark.parametrize("read", [lambda x: x.mT, lambda x: x.diagonal()[:, None], lambda x: x.diagonal()])
def test_written_regions_that_are_read_along_other_axes(read: Callable[[Tensor], Tensor]) -> None:
    """One position stands at both axes of what was written, or the two change places."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        numbers = torch.zeros(12, 12)
        for number, (a, b) in enumerate([((0, 5), (3, 12)), ((2, 9), (0, 7)), ((4, 12), (5, 11))], 1):
            numbers[slice(*a)][:, slice(*b)] = number
        return product(q, k).masked_fill(numbers < read(numbers), -1e18).softmax(-1) @ v

    assert_fused(program, *tensors(2, 3, 12, 16), inner="aot_eager")


@pytest.mark.parametrize(
    ("of_queries", "first"),
    [(False, 1), *(pytest.param(*x, marks=pytest.mark.thorough) for x in ((False, 0), (True, 1), (True, 0)))],
)
def test_positions_added_to_all_but_the_first_token(of_queries: bool, first: int) -> None:
    """The slice is written back through a view with a height and a width (MViTv2)."""
    n = 8 + first

    def program(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, table: Tensor) -> Tensor:
        s = product(q, k)
        added = bias.view(2, 4, 2, 4)
        if of_queries:
            added = torch.einsum("bhyxc,ykc->bhyxk", q[:, :, first:].reshape(2, 3, 2, 4, 16), table)[..., None]
        s[:, :, first:, first:] = (s[:, :, first:, first:].view(2, -1, 2, 4, 2, 4) + added).view(2, -1, 8, 8)
        return s.softmax(-1) @ v

    assert_fused(program, *tensors(2, 3, n, 16), torch.randn(8, 8), torch.randn(2, 2, 16), inner="aot_eager")


# ---- windows of a picture, into some of which a mask is added in place, as Swin's shifted windows are written

SIDE = 3


def windows(x: Tensor) -> Tensor:
    """[batch, rows * SIDE, columns * SIDE, 2 * D] -> [batch, 2, rows * columns, SIDE * SIDE, D]"""
    batch, height, width, _ = x.shape
    parts = x.view(batch, height // SIDE, SIDE, width // SIDE, SIDE, 2, D)
    return parts.permute(0, 5, 1, 3, 2, 4, 6).reshape(batch, 2, -1, SIDE * SIDE, D)


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
    mask[-SIDE:, :-SIDE] = mask[:-SIDE, -SIDE:] = -INF
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


WINDOWS = ((3, 2), (1, 1), *(pytest.param(*x, marks=pytest.mark.thorough) for x in ((4, 4), (2, 3), (1, 5), (3, 1))))


@pytest.mark.parametrize("write", [both, over_a_bias, of_one])
@pytest.mark.parametrize(("rows", "columns"), WINDOWS)
def test_masks_of_some_windows(write, rows: int, columns: int) -> None:
    x = torch.randn(2, rows * SIDE, columns * SIDE, 3 * 2 * D)
    site = assert_fused(attended(write), x, backward=False).site
    assert site.attention["scale"].startswith(f"{D**-0.5:.6g}"[:6]), site.attention


@pytest.mark.thorough
def test_a_number_of_windows_that_changes() -> None:
    pictures = [torch.randn(1, rows * SIDE, 4 * SIDE, 3 * 2 * D) for rows in (4, 6, 5)]
    check(attended(both), *pictures[:1], more=[(x,) for x in pictures[1:]], backward=False)


def from_the_window_before(s: Tensor, n: int) -> None:
    s[:, :, 1::n] = s[:, :, ::n] + of_rows()


def from_the_last_row(s: Tensor, n: int) -> None:
    s[:, :, :n] = s[:, :, -n:] * 1.0


def from_the_first(s: Tensor, n: int) -> None:
    s[:, :, 1] = s[:, :, 0] + 1.0


def scaled_and_added(s: Tensor, n: int) -> None:
    s[:, :, ::n] = s[:, :, ::n] * 0.5 + 1.0


def of_where_they_are_high(s: Tensor, n: int) -> None:
    s[:, :, :n] = torch.where(s[:, :, :n] > 0.5, s[:, :, :n] + 1, s[:, :, :n])


# Of the scores and the number of columns, and whether other windows are read; a function of the scores is no bias.
OTHER_WINDOWS: dict[str, tuple[Callable[[Tensor, int], Any], str]] = {
    "of the window before": (lambda s, n: s[:, :, 1::n].add_(s[:, :, ::n]), "product"),
    "from the window before": (from_the_window_before, "product"),
    "from the last row": (from_the_last_row, "product"),
    "from the first": (from_the_first, "product"),
    "of two": (lambda s, n: s[:, :, 2].add_(s[:, :, 1]), "product"),
    "scaled": (lambda s, n: s[:, :, 1::n].mul_(0.5), ""),
    "scaled and added": (scaled_and_added, ""),
    "filled": (lambda s, n: s[:, :, -n:, :, 0].fill_(-INF), ""),
    "where they are high": (lambda s, n: s.add_(torch.where(s > 0.5, 1.0, 0.0)), "no bias"),
    "of where they are high": (of_where_they_are_high, "no bias"),
}


@pytest.mark.parametrize("name", OTHER_WINDOWS)
def test_other_writes_into_some_windows(name: str) -> None:
    write, reason = OTHER_WINDOWS[name]
    x = torch.randn(2, 3 * SIDE, 3 * SIDE, 3 * 2 * D)
    if reason == "product":
        assert_refused(attended(write), x, reason=reason)
        return
    outcome = check(attended(write), x)
    assert reason != "no bias" or "bias" not in outcome.site.attention
