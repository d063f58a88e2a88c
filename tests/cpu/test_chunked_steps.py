"""chunked's point-wise steps as Inductor compiles them: the same numbers as uncompiled, whatever the sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_fuse.kernels.chunked import plan as chunked_plan
from attn_fuse.kernels.chunked import steps as chunked_steps
from attn_fuse.kernels.chunked.diagonals import diagonal_buffer
from attn_fuse.kernels.chunked.hoisted import hoisted
from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.dependence import varying
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.torch_internals import inductor
from tests.graph.chunked_cases import CASE, Case, H, K, Q, S, Sizes, const, documents, drawn, region
from tests.graph.chunked_cases import on_blocks as run

pytestmark = pytest.mark.thorough

# The second has blocks of other sizes than the first.
SEVERAL = (Sizes(2, 4, 2, 150, 130, 8, 12), Sizes(3, 6, 6, 91, 301, 16, 16))

# A table is read at buckets of distances within a segment, and at one bucket across two.
_BUCKETS = ["cast", "int32", ["mul", ["log", ["add", ["abs", ["sub", K, Q]], ["const", 1.0]]], ["const", 1.37]]]
SEGMENTED = Case(
    "segmented buckets",
    ScoreProgram(["add", S, ["gather", 2, H, ["where", ["eq", ["input", 0], ["input", 1]], _BUCKETS, ["const", 0]]]]),
    lambda *_: None,
    lambda s: [*documents(s), torch.randn(s.heads, 12)],
)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (CASE["everything"], torch.float32),
        (CASE["relative table"], torch.bfloat16),
        (SEGMENTED, torch.float32),
        (CASE["regions"], torch.float32),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_compiled_is_uncompiled(case: Case, dtype: torch.dtype, monkeypatch, caplog) -> None:
    monkeypatch.setattr(chunked_plan, "QUERY_BLOCK", 64)
    monkeypatch.setattr(chunked_plan, "MOST_QUERIES", 64)
    monkeypatch.setattr(chunked_plan, "KEY_BLOCK", 48)
    for s in SEVERAL:
        torch.manual_seed(0)
        tensors = [x.to(dtype) if x.is_floating_point() else x for x in drawn(case, s, torch.float32)]
        usual = run(case, s, tensors)
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "attn_fuse"):
            patched.setattr(chunked_plan, "COMPILE_FROM", 0)
            found = run(case, s, tensors)
        assert not [record for record in caplog.records if record.name == "attn_fuse"]
        for a, b in zip(found, usual, strict=True):
            torch.testing.assert_close(
                a, b, equal_nan=True, **({} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02})
            )


def test_without_a_compiler_the_steps_run_as_they_are(monkeypatch, caplog) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler here\nand more lines")

    case, s = CASE["softcap"], SEVERAL[0]
    tensors = drawn(case, s, torch.float32)
    usual = run(case, s, tensors)
    monkeypatch.setattr(inductor, "compile_with", broken)
    monkeypatch.setattr(chunked_plan, "COMPILE_FROM", 0)
    with caplog.at_level(logging.WARNING, "attn_fuse"):
        torch.testing.assert_close(run(case, s, tensors), usual)
    said = {record.getMessage() for record in caplog.records if record.name == "attn_fuse"}
    assert said == {"chunked attention runs uncompiled: no compiler here"}


def laid_out(*shape: int, order: tuple[int, ...] = (0, 1, 2, 3), gap: int = 0) -> Tensor:
    """Random numbers with the dimensions in `order` in memory, `gap` numbers between two rows of the last of them."""
    *outer, last = (shape[dim] for dim in order)
    memory = torch.randn(*outer, last + gap)[..., :last]
    return memory.permute(*sorted(range(4), key=order.__getitem__))


# The sizes of a block, how many query heads share a key head, and its bias.
LAYOUTS = [
    ((2, 3, 40, 24), 1, lambda: laid_out(2, 1, 40, 24)),
    ((5, 2, 33, 17), 1, lambda: laid_out(5, 1, 33, 17)),
    ((2, 3, 24, 40), 1, lambda: laid_out(2, 1, 24, 40)),
    ((2, 3, 24, 24), 1, lambda: laid_out(2, 1, 24, 24)),
    ((2, 6, 40, 24), 3, lambda: laid_out(2, 1, 40, 24)),
    ((1, 4, 40, 24), 4, lambda: laid_out(1, 1, 40, 24)),
    ((2, 3, 40, 24), 1, lambda: laid_out(2, 1, 40, 24, gap=5)),
    ((2, 3, 40, 24), 1, lambda: laid_out(2, 1, 40, 24, order=(0, 1, 3, 2))),
    ((3, 3, 24, 24), 1, lambda: laid_out(3, 1, 24, 24, order=(3, 2, 1, 0))),
    ((2, 3, 40, 24), 1, lambda: laid_out(1, 1, 1, 24).expand(2, 1, 40, 24)),
    ((2, 3, 40, 24), 1, lambda: laid_out(1, 1, 40, 24)),
    ((2, 3, 40, 1), 1, lambda: laid_out(2, 1, 40, 1)),
]


@pytest.mark.parametrize("threads", [None, 1])
def test_a_step_is_asked_which_layouts_it_takes(threads: int | None, monkeypatch, caplog) -> None:
    """In one process, in this order, so that what was compiled for the first is there for those after it."""
    made: list[Sequence[Tensor]] = []

    def counted(function: Callable[..., Any], examples: Sequence[Tensor], threads: int | None) -> Any:
        made.append(examples)
        return inductor.compiled_for_any_size(function, examples, threads)

    monkeypatch.setattr(chunked_steps, "compiled_for_any_size", counted)
    program = ScoreProgram(["add", ["mul", ["score"], ["const", 0.5]], ["input", 0]])
    plan = chunked_plan.planned(
        Operands(*torch.randn(3, 1, 2, 4, 8), [torch.zeros(1, 1, 4, 4)], [], None, 0.0, program.dumps())
    )
    with caplog.at_level(logging.WARNING, "attn_fuse"):
        for (batch, heads, rows, columns), groups, bias in LAYOUTS:
            planes, together = batch * heads // groups, groups * rows
            query, (key, value) = (
                torch.randn(planes, together, 8) / 8,
                torch.randn(2, planes, columns + 3, 8)[:, :, 2:-1],
            )
            read, column = bias(), torch.rand(batch, heads, rows, 1)
            sums = [torch.randn(planes, together, 8), torch.full_like(column, -torch.inf), torch.zeros_like(column)]
            forward = [query, key, value, *sums, read]
            backward = [query, key, value, torch.randn(planes, together, 8), torch.zeros_like(query),
                        *torch.zeros(2, planes, columns + 3, 8)[:, :, 2:-1], column, column, column, read]  # fmt: skip
            for name, tensors in (("forward", forward), ("backward", backward)):
                again = [x.clone() for x in tensors]
                chunked_steps.run(plan.steps, name, again, compiles=False)
                chunked_steps.run(plan.steps, name, tensors, compiles=True, threads=threads)
                torch.testing.assert_close(tensors, again)
    assert not [record for record in caplog.records if record.name == "attn_fuse"]
    assert len(made) < 2 * len(LAYOUTS)


DISTANCE = ["sub", ["j"], ["i"]]
FLOATING = ["sub", ["cast", "float32", ["j"]], ["cast", "float32", ["i"]]]


@pytest.mark.parametrize(
    ("part", "found"),
    [
        (["gather", 0, ["abs", DISTANCE]], True),
        (["gather", 0, ["add", ["j"], ["add", ["mul", ["const", -1], ["i"]], ["const", 9]]]], True),
        (["gather", 0, ["minimum", ["abs", DISTANCE], ["number", 0]], ["h"]], True),
        (["log", ["add", ["abs", DISTANCE], ["input", 1]]], True),
        (["gather", 0, ["add", ["i"], ["j"]]], False),
        (["gather", 0, ["abs", ["sub", ["mul", ["const", 2], ["j"]], ["i"]]]], False),
        (["gather", 0, ["sub", ["floor_divide", ["j"], ["const", 2]], ["floor_divide", ["i"], ["const", 2]]]], False),
        (["gather", 0, ["cast", "int64", FLOATING]], False),
        (["log", ["add", ["abs", DISTANCE], ["input", 2]]], False),
        (["exp", ["mul", ["score"], DISTANCE]], False),
        (["abs", DISTANCE], False),
    ],
)  # fmt: skip
def test_what_depends_on_the_distance_alone(part: list, found: bool) -> None:
    program = ScoreProgram(["add", ["score"], part])
    varies = tuple(map(varying, [(9, 3), (1, 3, 1, 1), (1, 1, 8, 1)]))
    assert any(part.of == "j - i" for part in hoisted(program.dumps(), varies).parts) == found


@pytest.mark.parametrize(
    ("part", "of"),
    [
        (region(Q), "i"),
        (["gather", 0, region(K), H], "j"),
        (["mul", region(H), ["input", 1]], "i"),
        (["mul", region(Q), ["input", 2]], "i"),
        (["mul", ["cast", "float32", region(H)], ["input", 3]], "j"),
        (["add", Q, ["mul", const(2), Q]], ""),
    ],
)
def test_long_formulas_of_one_position_are_computed_once(part: list, of: str) -> None:
    program = ScoreProgram(["add", ["mul", S, K], part])
    varies = tuple(map(varying, [(12, 4), (1, 3, 1, 1), (1, 1, 8, 1), (2, 1, 1, 8)]))
    assert [found.of for found in hoisted(program.dumps(), varies).parts] == [of] * bool(of)
    both = ScoreProgram(["mul", ["mul", S, region(Q)], region(["add", Q, K])])
    assert [found.of for found in hoisted(both.dumps(), varies).parts] == ["i"]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 7), (16, 1), (17, 20), (32, 8), (64, 3), (96, 130)])
def test_sums_along_diagonals(rows: int, columns: int) -> None:
    block = torch.randn(2, 3, rows, columns, dtype=torch.float64)
    exact = [block.diagonal(apart, -2, -1).sum(-1) for apart in range(1 - rows, columns)]
    memory = diagonal_buffer(block)
    for _ in range(2):
        memory.block.copy_(block)
        torch.testing.assert_close(memory.sums().squeeze(-2), torch.stack(exact, -1))
