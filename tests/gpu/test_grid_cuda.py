"""The shared grid on CUDA: every kernel through the backend, and our own as operators, at lengths of several blocks."""

from __future__ import annotations

import pytest
import torch

from attn_fuse.kernels import KERNELS
from tests.grid.backend import Grid, grids
from tests.grid.case import LONGER, Case
from tests.grid.cover import Row
from tests.grid.operators import Operator, check, operators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
GRIDS = grids(KERNELS, CUDA, LONGER) if torch.cuda.is_available() else []
ROWS = [pytest.param(grid, row, id=f"{grid}-{Case.of(row)}") for grid in GRIDS for row in grid.rows()]
OPERATED = [
    pytest.param(operator, Case.of(row), id=f"{operator.name}-{Case.of(row)}")
    for operator in (operators(CUDA).values() if torch.cuda.is_available() else ())
    for row in operator.rows(other=LONGER)
]


@pytest.mark.parametrize(("operator", "c"), OPERATED)
def test_operator(operator: Operator, c: Case) -> None:
    assert not check(operator, c, CUDA)


@pytest.mark.parametrize(("grid", "row"), ROWS)
def test_row(grid: Grid, row: Row) -> None:
    assert not grid.answer(row).wrong


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_is_declined_alone(grid: Grid) -> None:
    assert grid.declines() == grid.declined


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_how_many_rows_are_taken(grid: Grid) -> None:
    taken = sum(not grid.answer(row).reasons for row in grid.rows())
    # Where nobody has counted on a GPU yet, at least some.
    assert taken == grid.takes.accepted if grid.takes.accepted is not None else taken > len(grid.rows()) // 4, taken
