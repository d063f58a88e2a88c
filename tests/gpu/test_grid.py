"""The shared grid on CUDA: every kernel through the backend, and our own as operators, at lengths of several blocks."""

from __future__ import annotations

import pytest
import torch

from attn_fuse.kernels import KERNELS
from tests.grid.backend import Grid, answer, grids
from tests.grid.case import LONGER, Case
from tests.grid.operators import check, operators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
GRIDS = grids(KERNELS, "cuda", LONGER)
OPERATED = [(n, Case.of(row)) for n, o in operators(CUDA).items() for row in o.rows(lengths=LONGER)]


@pytest.mark.parametrize(("grid", "c"), [(grid, Case.of(row)) for grid in GRIDS for row in grid.rows()], ids=str)
def test_row(grid: Grid, c: Case) -> None:
    assert not answer(grid.kernel, CUDA, c).wrong


@pytest.mark.parametrize(("name", "c"), OPERATED, ids=str)
def test_operator(name: str, c: Case) -> None:
    assert not check(operators(CUDA)[name], c, CUDA)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_is_declined_alone(grid: Grid) -> None:
    assert grid.declines(CUDA) == {axis: tuple(values) for axis, values in grid.takes.declined.items()}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_how_many_rows_are_taken(grid: Grid) -> None:
    taken = sum(not answer(grid.kernel, CUDA, Case.of(row)).reasons for row in grid.rows())
    # None: nobody has counted on a GPU yet, and what is declined alone is what torch documents.
    assert taken == grid.takes.accepted if grid.takes.accepted is not None else taken > len(grid.rows()) // 4, taken
