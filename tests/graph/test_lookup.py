"""Lookups: gradients of tables against a sum over every element, in one order, and without atomics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_fuse.expression.nodes import Gather
from attn_fuse.kernels.chunked import attend as chunked_blocks
from attn_fuse.kernels.chunked import plan as chunked_plan
from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.lookup import accumulate, add_sorted, add_up, head_dimension, places, rest
from attn_fuse.kernels.score.program import Block, ScoreProgram, evaluate, gathered

S, H, Q, K = ["score"], ["h"], ["i"], ["j"]
BATCH, HEADS, ROWS, COLUMNS = 2, 3, 21, 34
BLOCK = Block(BATCH, HEADS, (5, 5 + ROWS), (7, 7 + COLUMNS), torch.device("cpu"), torch.float64, (0, 2))


def gather(*places_: Any) -> Gather:
    node = ScoreProgram(["add", S, ["gather", 0, *places_]]).score.b
    assert isinstance(node, Gather)
    return node


# What a table is read by, and its sizes: six heads, of which the block has three from the third on.
TABLES = {
    "stored": ((["input", 1], H), (11, 6)),
    "stored, the head first": ((H, ["input", 1]), (6, 11)),
    "stored, by batch entry": ((["input", 2], H), (11, 6)),
    "stored, by head": ((["input", 3], H), (11, 6)),
    "stored, no heads": ((["input", 1],), (11,)),
    "two dimensions": ((["remainder", K, ["const", 5]], H, ["input", 1]), (5, 6, 11)),
    "distances": ((["add", ["sub", K, Q], ["const", 30]], H), (80, 6)),
    "distances, from the end": ((H, ["sub", K, Q]), (6, 80)),
    "distances, no heads": ((["abs", ["sub", K, Q]],), (60,)),
    "heads by formula": ((["floor_divide", H, ["const", 2]], ["input", 1]), (3, 11)),
    "the head twice": ((H, H, ["input", 1]), (6, 6, 11)),
    "heads alone": ((H,), (6,)),
    "queries": ((Q, H), (40, 6)),
}


def drawn(name: str) -> tuple[Any, Tensor, tuple[Tensor, ...], Tensor]:
    """The node, the gradient of what it reads on the block, at which indices, and the exact sums."""
    torch.manual_seed(0)
    spelled, sizes = TABLES[name]
    node, table = gather(*spelled), torch.zeros(sizes, dtype=torch.float64)
    whole = (5 + ROWS, 7 + COLUMNS)
    stored = [torch.randint(-11, 11, (b, h, *whole)) for b, h in ((1, 1), (BATCH, 1), (1, 6))]
    inputs = [table, *stored]
    indices = gathered(node, inputs, [], BLOCK, {})
    gradient = torch.randn(torch.broadcast_shapes(*(x.shape for x in indices)), dtype=torch.float64)
    exact = table.clone()
    for at in torch.cartesian_prod(*map(torch.arange, gradient.shape)):
        element = tuple(index.expand(gradient.shape)[tuple(at)] for index in indices)
        exact[element] += gradient[tuple(at)]
    assert evaluate(node, None, inputs, [], BLOCK).shape == gradient.shape
    return node, gradient, indices, exact


@pytest.mark.parametrize("name", TABLES)
def test_gradients_are_added_where_they_were_read(name: str) -> None:
    node, gradient, indices, exact = drawn(name)
    into = torch.full_like(exact, 0.5)
    accumulate(node, gradient, into, indices, BLOCK.origin[1])
    torch.testing.assert_close(into, exact + 0.5)


@pytest.mark.parametrize("name", ["stored", "stored, the head first", "stored, by batch entry", "two dimensions"])
def test_both_ways_to_add_give_the_same(name: str) -> None:
    node, gradient, indices, exact = drawn(name)
    head, by_sorting, by_place = head_dimension(node), torch.zeros_like(exact), torch.zeros_like(exact)
    assert head is not None
    others = rest(head, indices)
    add_sorted(head, gradient, by_sorting, others, BLOCK.origin[1])
    shape = (len(gradient), 1, *gradient.shape[2:])
    add_up(head, gradient, by_place, places(rest(head, exact.shape), others, shape), BLOCK.origin[1])
    torch.testing.assert_close(by_sorting, exact)
    torch.testing.assert_close(by_place, exact)


def test_distances_are_summed_along_diagonals_first(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[torch.Size] = []

    def counted(sizes: Any, indices: Any, shape: torch.Size) -> Tensor:
        read.append(shape)
        return places(sizes, indices, shape)

    monkeypatch.setattr("attn_fuse.kernels.score.lookup.places", counted)
    for name, count in (("distances", ROWS + COLUMNS - 1), ("stored", ROWS * COLUMNS)):
        node, gradient, indices, exact = drawn(name)
        accumulate(node, gradient, torch.zeros_like(exact), indices, BLOCK.origin[1])
        assert torch.Size(read.pop()).numel() == count


@pytest.mark.parametrize("wrong", [11, -12])
def test_an_index_out_of_range_is_said(wrong: int) -> None:
    at = torch.zeros(1, 1, 4, 4, dtype=torch.int64)
    at[0, 0, 2, 3] = wrong
    program = ScoreProgram(["add", S, ["gather", 1, ["input", 0], H]]).dumps()
    with pytest.raises(IndexError, match=f"index {wrong} is out of bounds for a dimension of size 11"):
        chunked_blocks.attend(Operands(*torch.randn(3, 1, 2, 4, 8), [at, torch.randn(11, 2)], [], None, 0.0, program))


def test_two_runs_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_plan, "COMPILE_FROM", float("inf"))
    torch.manual_seed(0)
    query, key, value, grad = torch.randn(4, 1, 4, 600, 16)
    inputs = [torch.randint(0, 9, (1, 1, 600, 600)), torch.randn(9, 4)]
    program = ScoreProgram(["add", S, ["gather", 1, ["input", 0], H]]).dumps()
    how = (query, key, value, inputs, [], None, 0.0)
    outputs = chunked_blocks.attend(Operands(*how, program))
    runs = [
        chunked_blocks.attend_backward(Operands(*how, program), outputs, grad, None, [False, True])[3] for _ in range(3)
    ]
    assert all(torch.equal(again[1], runs[0][1]) for again in runs)
