"""Score programs by themselves: what is one, and what it computes. test_one_evaluator.py has the gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_fuse.expression.nodes import And, Const, Expr
from attn_fuse.kernels.score.program import Block, ScoreProgram, bound, evaluate
from tests.graph.chunked_cases import CASES, INF, Case, K, Q, S, const


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_programs_survive_the_string(case: Case) -> None:
    text = case.program.dumps()
    assert ScoreProgram.loads(text) == case.program
    assert ScoreProgram.loads(text).dumps() == text
    assert ScoreProgram.loads(text) is ScoreProgram.loads(text)


def test_constants_survive_the_string() -> None:
    values = [True, 1, 1.0, -0.0, INF, -INF, math.nan, 0.1, torch.finfo(torch.float64).min, 2**53 + 1]
    program = ScoreProgram(["and", *map(const, values)])
    loaded = ScoreProgram.loads(program.dumps()).score
    assert [repr(node.value) for node in constants(loaded)] == [repr(value) for value in values]


def constants(expr: Expr) -> list[Const]:
    """Those of a conjunction, in order."""
    if isinstance(expr, And):
        return constants(expr.a) + constants(expr.b)
    assert isinstance(expr, Const)
    return [expr]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"score": ["softmax", S]}, "no node 'softmax'"),
        ({"score": ["add", S]}, "'add' of a score program takes 2 operands, not 1"),
        ({"score": ["cast", "float31", S]}, "'cast' of a score program cannot take"),
        ({"score": ["input", S]}, "'input' of a score program cannot take"),
        ({"score": ["const", "one"]}, "'const' of a score program cannot take"),
        ({"score": "score"}, "not a node of a score program: 'score'"),
        ({"score": S, "factor": S}, "'score' has no place in 'factor'"),
        ({"score": S, "sink": K}, "'j' has no place in 'sink'"),
        ({"score": S, "upper": ["neg", Q]}, "'i' has no place in 'upper'"),
        ({"score": S, "lower": ["input", 0]}, "'input' has no place in 'lower'"),
    ],
)
def test_programs_that_are_none(parts: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ScoreProgram(**parts)


def test_equal_parts_are_computed_once() -> None:
    shared = ["exp", ["mul", S, const(2)]]
    program = ScoreProgram(["add", shared, ["div", shared, ["exp", ["mul", S, const(2.0)]]]], factor=["exp", Q])
    left, again, other = program.score.a, program.score.b.a, program.score.b.b
    assert left is again and other is not left
    assert id(left) in program.shared and id(other) not in program.shared


def test_bounds() -> None:
    program = ScoreProgram(S, upper=["sub", ["number", 1], ["floor_divide", ["neg", ["number", 0]], const(2)]])
    assert bound(program.upper, [5, 7]) == 10
    assert bound(program.lower, [5, 7]) is None


BLOCK = Block(1, 1, (3, 5), (4, 7), torch.device("cpu"), torch.float64)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (["floor_divide", ["sub", Q, K], const(2)], [[-1, -1, -2], [0, -1, -1]]),
        (["remainder", ["sub", Q, K], const(3)], [[2, 1, 0], [0, 2, 1]]),
        (["fmod", ["sub", Q, K], const(3)], [[-1, -2, 0], [0, -1, -2]]),
        (["div", Q, const(2)], [[1.5] * 3, [2.0] * 3]),
        (["pow", Q, const(2)], [[9] * 3, [16] * 3]),
        (
            ["where", ["or", ["eq", Q, K], ["ne", K, const(5)]], const(1), const(0.5)],
            [[1.0, 0.5, 1.0], [1.0, 0.5, 1.0]],
        ),
        (["cast", "int64", ["mul", K, const(0.4)]], [[1, 2, 2], [1, 2, 2]]),
        (["gather", 0], [[0.5] * 3] * 2),
        (["gather", 1, ["sub", Q, const(3)], ["sub", K, const(4)]], [[1, 2, 3], [4, 5, 6]]),
        (["add", ["number", 0], ["cast", "float32", ["gt", K, Q]]], [[8.0, 8.0, 8.0], [7.0, 8.0, 8.0]]),
    ],
)
def test_evaluate(tree: list[Any], expected: list[list[float]]) -> None:
    inputs = [torch.tensor(0.5, dtype=torch.float64), torch.tensor([[1, 2, 3], [4, 5, 6]])]
    found = evaluate(ScoreProgram(tree).score, None, inputs, [7], BLOCK)
    assert found.expand(BLOCK.shape).tolist() == [[expected]]


def test_half_precision_is_read_in_the_compute_dtype() -> None:
    block = replace(BLOCK, dtype=torch.float32)
    bias = torch.randn(1, 1, 8, 8).half()
    found = evaluate(ScoreProgram(["mul", ["input", 0], const(0.1)]).score, None, [bias], [], block)
    assert torch.equal(found, bias[:, :, 3:5, 4:7].float() * 0.1)
