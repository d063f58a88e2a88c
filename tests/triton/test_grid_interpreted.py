"""The shared grid on the kernels in Triton, interpreted on the CPU, as operators and through the backend.

The interpreter computes bfloat16 wrongly, so only tests/gpu covers it.
"""

from __future__ import annotations

import pytest
import torch

from attn_fuse.kernels import KERNELS
from tests.grid.backend import Grid, grids
from tests.grid.case import SMALLER, Case
from tests.grid.operators import FLASH, check, operators
from tests.triton.interpreted import interpreted

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
# With gradients, if a kernel has them.
GRIDS = {
    grid.kernel.name: grid for grid in reversed(grids(KERNELS, CPU, SMALLER)) if grid.kernel.name.startswith("triton")
}
OPERATED = [Case.of(row) for row in FLASH.rows(other=SMALLER) if row["dtype"] != "bfloat16"]


@interpreted
@pytest.mark.parametrize("c", OPERATED, ids=str)
def test_operator(c: Case) -> None:
    assert not check(operators(CPU)[FLASH.name], c, CPU)


@interpreted
def test_kernels_take_the_cpu_when_interpreted() -> None:
    assert set(GRIDS) == {"triton_flash"}


@interpreted
@pytest.mark.parametrize("grid", GRIDS.values(), ids=str)
def test_each_value_alone_through_the_backend(grid: Grid) -> None:
    rows = [row for row in grid.alone() if row["dtype"] != "bfloat16"]
    wrong = {str(Case.of(row)): grid.answer(row).wrong for row in rows}
    assert not {c: text for c, text in wrong.items() if text}


@interpreted
@pytest.mark.parametrize("grid", GRIDS.values(), ids=str)
def test_what_is_declined_alone(grid: Grid) -> None:
    assert grid.declines() == grid.declined
