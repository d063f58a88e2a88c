"""The grid itself, and our own operators on it as score programs, without a compiler."""

from __future__ import annotations

import itertools

import pytest
import torch

from attn_fuse.kernels.chunked import plan as chunked_plan
from tests.grid import cover
from tests.grid.case import AXES, PLAIN, Case
from tests.grid.operators import CHUNKED, check

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_plan, "QUERY_BLOCK", 16)
    monkeypatch.setattr(chunked_plan, "MOST_QUERIES", 16)
    monkeypatch.setattr(chunked_plan, "KEY_BLOCK", 8)


@pytest.mark.parametrize("strength", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_all_values_meet(strength: int) -> None:
    rows = cover.covering(AXES, strength)
    for axes in itertools.combinations(AXES, strength):
        met = {tuple(row[axis] for axis in axes) for row in rows}
        assert met == {*itertools.product(*(AXES[axis] for axis in axes))}, axes


def test_each_value_stands_alone() -> None:
    rows = cover.alone(AXES, PLAIN)
    assert len(rows) == 1 + sum(len(values) - 1 for values in AXES.values())
    assert all(len(row.items() - PLAIN.items()) == 1 for row in rows[1:])


@pytest.mark.parametrize("c", [Case.of(row) for row in CHUNKED.rows()], ids=str)
def test_chunked(c: Case) -> None:
    assert not check(CHUNKED, c, CPU)


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(8))
def test_chunked_with_every_three_together(part: int) -> None:
    wrong = {str(c): check(CHUNKED, c, CPU) for c in map(Case.of, CHUNKED.rows(strength=3)[part::8])}
    assert not {c: text for c, text in wrong.items() if text}


@pytest.mark.slow
def test_chunked_with_every_four_together() -> None:
    wrong = {str(c): check(CHUNKED, c, CPU) for c in map(Case.of, CHUNKED.rows(strength=4))}
    assert not {c: text for c, text in wrong.items() if text}
