"""Every kernel that runs on the CPU, through the backend, on the shared grid: what it takes, and that it is right.

Each row is compiled for one kernel alone and held against float64, output and each gradient by name.
"""

from __future__ import annotations

import pytest
import torch

from attn_fuse.kernels import KERNELS
from tests.grid.backend import Grid, answer, grids
from tests.grid.case import Case

CPU = torch.device("cpu")
GRIDS = grids(KERNELS, "cpu")
ROWS = [(grid, Case.of(row)) for grid in GRIDS for row in grid.rows()]


@pytest.mark.parametrize(("grid", "c"), ROWS, ids=str)
def test_row(grid: Grid, c: Case) -> None:
    assert not answer(grid.kernel, CPU, c).wrong


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_three_together(grid: Grid) -> None:
    wrong = {str(c): answer(grid.kernel, CPU, c).wrong for c in map(Case.of, grid.rows(strength=3))}
    assert not {c: text for c, text in wrong.items() if text}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_is_declined_alone(grid: Grid) -> None:
    assert grid.declines(CPU) == {axis: tuple(values) for axis, values in grid.takes.declined.items()}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_how_many_rows_are_taken(grid: Grid) -> None:
    """A `why_not` that says no too often would leave nothing to compare."""
    assert sum(not answer(grid.kernel, CPU, Case.of(row)).reasons for row in grid.rows()) == grid.takes.accepted
