"""Every kernel that runs on the CPU, through the backend, on the shared grid: what it takes, and that it is right.

Each row is compiled for one kernel alone and held against float64, output and each gradient by name.
"""

from __future__ import annotations

import pytest
import torch

from attn_fuse.kernels import KERNELS
from tests.grid.backend import COMPILED, Grid, grids
from tests.grid.case import Case
from tests.grid.cover import Row

pytestmark = pytest.mark.thorough

ALL = grids(KERNELS, torch.device("cpu"))
GRIDS = [grid for grid in ALL if grid.kernel.name not in COMPILED]


def named(rows: list[tuple[Grid, Row]]) -> list[object]:
    return [pytest.param(grid, row, id=f"{grid}-{Case.of(row)}") for grid, row in rows]


@pytest.mark.parametrize(("grid", "row"), named([(grid, row) for grid in GRIDS for row in grid.rows()]))
def test_row(grid: Grid, row: Row) -> None:
    assert not grid.answer(row).wrong


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_three_together(grid: Grid) -> None:
    wrong = {str(Case.of(row)): grid.answer(row).wrong for row in grid.rows(strength=3)}
    assert not {c: text for c, text in wrong.items() if text}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "row"), named([(grid, row) for grid in ALL if grid not in GRIDS for row in grid.rows()])
)
def test_compiled_row(grid: Grid, row: Row) -> None:
    answer = grid.answer(row)
    assert not answer.wrong and not answer.reasons


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_is_declined_alone(grid: Grid) -> None:
    assert grid.declines() == grid.declined


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_how_many_rows_are_taken(grid: Grid) -> None:
    """A `why_not` that says no too often would leave nothing to compare."""
    assert sum(not grid.answer(row).reasons for row in grid.rows()) == grid.takes.accepted
