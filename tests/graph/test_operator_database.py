"""Torch's operator database: what the lift says of an operation is what torch computes, in every dtype, or a refusal.

Every day one sample of each entry in a sixth of its dtypes, in the thorough tests in all, and behind `slow` all
samples. With `-s` the counts are printed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, OpInfo, SampleInput, UnaryUfuncInfo

from attn_fuse.lift.lift import OPERATIONS
from attn_fuse.lift.normalize import _decompositions
from tests.graph.operator_database import NotRun, Tally, judged, judged_in, through_a_product

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FRACTIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.bool, *INTEGERS, *FRACTIONS)
N = 300


def samples_of(entry: OpInfo, dtype: torch.dtype) -> Iterator[SampleInput]:
    if isinstance(entry, (UnaryUfuncInfo, BinaryUfuncInfo)):
        # Those of the database are small numbers, which never wrap around.
        count = 1 if isinstance(entry, UnaryUfuncInfo) else 2
        yield SampleInput(*(far_numbers(dtype, n) for n in range(count)))
    yield from entry.sample_inputs_func(entry, "cpu", dtype, False)


def far_numbers(dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[97] numbers from all of the range, the ends among them."""
    torch.manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(97) < 0.5
    if dtype.is_floating_point:
        return (torch.randn(97, dtype=torch.float64) * 10.0 ** torch.linspace(-4, 4, 97, dtype=torch.float64)).to(dtype)
    info = torch.iinfo(dtype)
    x = torch.randint(info.min, info.max, (97,), dtype=torch.int64).to(dtype)
    x[:2] = torch.tensor([info.min, info.max])
    return x.roll(seed)


def tally_of(entry: OpInfo, dtype: torch.dtype, samples: Iterable[SampleInput], tally: Tally) -> bool:
    """Whether an operation that the lift reads is in the entry's normal form."""
    read = False
    torch.manual_seed(0)
    for sample in samples:
        try:
            verdicts = judged(entry.op, sample.input, *sample.args, **sample.kwargs)
            if any(verdict.refused for verdict in verdicts) and is_some_fractions(sample.input):
                verdicts += judged(through_a_product(entry.op), sample.input, *sample.args, **sample.kwargs)
        except NotRun:
            continue
        if any(verdict.operations for verdict in verdicts):
            read = True
            tally.add(f"{entry.formatted_name} in {dtype}", verdicts, dtype)
    return read


def is_some_fractions(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0 and x.numel() > 0


@pytest.mark.parametrize("trains", [False, True])
def test_no_operation_is_both_decomposed_and_read(trains: bool) -> None:
    assert _decompositions(trains).keys() & OPERATIONS.keys() == set()


@pytest.mark.parametrize("share", [6, pytest.param(1, marks=pytest.mark.thorough)])
def test_one_sample_of_each_entry(share: int) -> None:
    """One in `share` of its dtypes, which differ from entry to entry."""
    tally = Tally()
    for place, entry in enumerate(op_db):
        for n, dtype in enumerate(d for d in DTYPES if d in entry.dtypes):
            if (n + place) % share:
                continue
            samples = itertools.islice(samples_of(entry, dtype), n % 3, n % 3 + 1)
            if not tally_of(entry, dtype, samples, tally) and n > 1:
                break
    print(f"\n{tally}")
    assert tally.wrong == []
    # It reads what it read before: a lift that refuses everything is right, too.
    assert tally.right > 1500 // share and len(tally.read) > (120 if share == 1 else 100)


@pytest.mark.slow
def test_every_sample_of_each_entry_in_each_dtype() -> None:
    tally = Tally()
    for entry in op_db:
        for n, dtype in enumerate(d for d in DTYPES if d in entry.dtypes):
            if not tally_of(entry, dtype, samples_of(entry, dtype), tally) and n > 1:
                break
    print(f"\n{tally}\nof {len(OPERATIONS)}; refused: {sorted(tally.refused.items(), key=lambda x: -x[1])}")
    assert tally.wrong == []


# ---- what the database has no sample of


def written(edit: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """`edit` as a function of what it edits."""

    def run(x: Tensor) -> Tensor:
        x = x.clone()
        edit(x)
        return x

    return run


def assigned(*place: Any) -> Callable[[Tensor], Tensor]:
    """A 3 written at `place`, in which a list of lists stands for a tensor of positions."""

    def made(part: Any) -> Any:
        return torch.tensor(part[0]) if isinstance(part, list) and isinstance(part[0], list) else part

    return written(lambda x: x.__setitem__(tuple(map(made, place)), 3))


def at_triangle(x: Tensor, places: Tensor) -> None:
    x[places[0], places[1]] = 3


def matrix(dtype: torch.dtype) -> Tensor:
    """[7, 9]"""
    return far_numbers(dtype)[:63].reshape(7, 9)


SLICES: dict[str, Callable[[Tensor], Tensor]] = {
    "start beyond the front": lambda x: x[:, -64:],
    "end beyond the end": lambda x: x[:, 3:64],
    "both beyond": lambda x: x[-64:64],
    "all in front": lambda x: x[-20:-15],
    "all behind": lambda x: x[20:30],
    "end before start": lambda x: x[5:2],
    "end counted from the end": lambda x: x[1:-2, -5:-1],
    "steps": lambda x: x[1::3, -64::4],
    "steps from the end": lambda x: x[-5::2],
    "backwards": lambda x: x.flip(1)[:, 2:100],
    "one element": lambda x: x[-1:, -1],
    "none": lambda x: x[:0],
    "a slice of a slice": lambda x: x[-64:][2:][:, -3:],
    "narrow": lambda x: x.narrow(1, -4, 3),
    "diagonal": lambda x: x.diagonal(),
    "diagonal above": lambda x: x.diagonal(2),
    "diagonal below": lambda x: x.diagonal(-3, 1, 0),
    "halves": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "repeated": lambda x: x.repeat(2, 3),
    "ones and nothings": lambda x: torch.cat([x[:, :0], x[:, :1], x[:0].reshape(7, 0)], 1),
    "broadcast": lambda x: x[:, :1].expand(7, 5)[:, -64:],
    "padded": lambda x: torch.nn.functional.pad(x, (2, -1, 0, 3), value=5),
}

EDITS: dict[str, Callable[[Tensor], Tensor]] = {
    "a slice": assigned(slice(None), slice(2, 5)),
    "a slice beyond the front": assigned(slice(-64, 3)),
    "a slice beyond the end": assigned(slice(None), slice(4, 64)),
    "an empty slice": assigned(slice(5, 2)),
    "in steps": assigned(..., slice(1, None, 2)),
    "in steps of three": assigned(slice(-64, None, 3), slice(None, -1, 4)),
    "a row": assigned(-1),
    "an element": assigned(2, -3),
    "a block": assigned(slice(1, 3), slice(-3, None)),
    "a block of another": written(lambda x: x[1:3, :4].copy_(x[4:6, -4:].clone())),
    "a slice of itself": written(lambda x: x[:, 1:].sub_(x[:, :-1].clone())),
    "at numbers": assigned([0, -2, 0]),
    "at positions": assigned(slice(None), [[1, 3]]),
    "at a range": written(lambda x: x.__setitem__(torch.arange(2, 5), 3)),
    "at a block of positions": assigned([[[0], [2]]], [[1, -1]]),
    "at pairs of positions": assigned([[0, 2]], [[1, 3]]),
    "where": written(lambda x: x.__setitem__(x > 2, 1)),
    "diagonal": written(lambda x: x.diagonal().fill_(1)),
    "diagonal above": written(lambda x: x.diagonal(2).fill_(1)),
    "diagonal below": written(lambda x: x.diagonal(-2).zero_()),
    "diagonal of columns": written(lambda x: x.diagonal(1, 1, 0).copy_(x[:6, 0].clone())),
    "fill_diagonal_": written(lambda x: x.fill_diagonal_(2)),
    "tril_": written(lambda x: x.tril_(-1)),
    "triu_": written(lambda x: x[1:, :3].triu_(1)),
    "an upper triangle of positions": written(lambda x: at_triangle(x, torch.triu_indices(7, 9, 1))),
    "a lower triangle of positions": written(lambda x: at_triangle(x, torch.tril_indices(5, 4, -1))),
    "a wide triangle of positions": written(lambda x: at_triangle(x, torch.tril_indices(7, 7, 2))),
    "index_fill_": written(lambda x: x.index_fill_(1, torch.tensor([0, 4]), 2)),
    "index_copy_ of a range": written(lambda x: x.index_copy_(0, torch.arange(2) + 3, x[:2].clone())),
    "index_copy_ of a list": written(lambda x: x.index_copy_(0, torch.tensor([5, 1]), x[2:4].clone())),
    "masked_fill_": written(lambda x: x[:, 2:].masked_fill_(torch.ones(7, 7).triu(1).bool(), 4)),
    "read back": lambda x: x.slice_scatter(x[:, :2] + x[:, 1:2], 1, 3, 5)[:, 3:5],
    "read back beside": lambda x: x.slice_scatter(x[:, :2], 1, 3, 5)[:, 5:],
    "read back in part": lambda x: x.slice_scatter(x[:, :3], 1, 3, 6)[:, 4:8],
    "read back of a select": lambda x: x.select_scatter(x[0], 0, 3)[3],
    "read back beside a select": lambda x: x.select_scatter(x[0], 0, 3)[2],
    "read back, transposed": lambda x: x.T.slice_scatter(x.T[:2], 0, 3, 5).T[:, 3:5],
    "unbound": lambda x: x.select_scatter(x[0], 0, 3).unbind(0)[3],
    "fill_": written(lambda x: x.fill_(7)),
    "of another dtype": written(lambda x: x[2:4].copy_(torch.full((9,), 300.7))),
}

ARITHMETIC: dict[str, Callable[[Tensor], Tensor]] = {
    "plus": lambda x: x + x,
    "plus a number": lambda x: x + 100,
    "minus": lambda x: x - x.flip(0),
    "a number minus": lambda x: 3 - x,
    "times": lambda x: x * x,
    "times a number": lambda x: x * 77,
    "squared": lambda x: x**2,
    "absolute": lambda x: x.abs(),
    "alpha": lambda x: torch.add(x, x.flip(0), alpha=3),
    "floor division": lambda x: x // 7,
    "floor division by a negative number": lambda x: x // -3,
    "remainder": lambda x: x % 7,
    "remainder of a negative number": lambda x: x % -3,
    "fmod": lambda x: x.fmod(5),
    "division": lambda x: x / 41,
    "division, floored": lambda x: (x / 3).floor(),
    "clamped": lambda x: x.clamp(3, 99),
    "equal to -1": lambda x: x == -1,
    "at least a fraction": lambda x: x >= 1.5,
    "differences compared": lambda x: (x - x.flip(0)).abs() > 1,
    "sums compared": lambda x: (x + x.flip(0)) > 0,
    "products compared": lambda x: (x * 100) > 50,
    "quotients compared": lambda x: (x / 41) * 41 == x,
    "to a fraction and back": lambda x: x.float().to(x.dtype),
    "to half precision": lambda x: x.half().float(),
    "to bytes": lambda x: (x % 500).to(torch.int32).to(torch.uint8),
    "to bytes and on": lambda x: x.clamp(-99, 99).to(torch.int32).to(torch.int8).to(torch.int64) * 3,
    "with a mask": lambda x: x * (x > 3),
}


def positions(step: int = 1, start: int = 0) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: torch.arange(N, dtype=torch.int64).to(dtype) * step + start


POSITIONS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "as they are": lambda dtype: torch.arange(N).to(dtype),
    "of their own dtype": lambda dtype: torch.arange(N if dtype.itemsize > 1 else 120, dtype=dtype),
    "i - j": lambda dtype: torch.arange(N).to(dtype)[:, None] - torch.arange(N).to(dtype),
    "i - j >= 100": lambda dtype: torch.arange(N).to(dtype)[:, None] - torch.arange(N).to(dtype) >= 100,
    "|i - j|": lambda dtype: (torch.arange(N).to(dtype)[:, None] - torch.arange(N).to(dtype)).abs(),
    "steps of 2**20": positions(2**20 % 97 + 13),
    "far out": lambda dtype: torch.arange(N).to(dtype) * (2**27 if dtype.itemsize > 2 else 100),
    "farther than int64": lambda dtype: torch.arange(N) * 2**62 + 2**60,
    "compared far out": lambda dtype: (torch.arange(N).to(dtype) * 2**3 < 50),
    "2**24 and beyond": lambda dtype: (torch.arange(N) * 2**20 + 1).to(dtype),
    "compared beyond 2**50": lambda dtype: (torch.arange(N) * 2**50 + 1).to(dtype)[:, None]
    < (torch.arange(N) * 2**50).to(dtype) + 1,
    "compared beyond 2**24": lambda dtype: (torch.arange(N) * 2**20 + 1).to(dtype)[:, None]
    <= (torch.arange(N) * 2**20).to(dtype),
    "blocks": lambda dtype: torch.floor(torch.arange(N).to(dtype) / 41),
    "blocks of whole numbers": lambda dtype: torch.arange(N).to(dtype) // 41,
    "blocks compared": lambda dtype: torch.floor(torch.arange(N).to(dtype) / 41)[:, None] == torch.arange(N) // 41,
    "thirds": lambda dtype: (torch.arange(N).to(dtype) / 3) % 1,
    "sevenths": lambda dtype: torch.frac(torch.arange(N).to(dtype) / 7) >= 0.5,
    "blocks by truncation": lambda dtype: torch.trunc(torch.arange(N).to(dtype) / 41),
    "blocks by another floor": lambda dtype: torch.div(torch.arange(N).to(dtype), 41, rounding_mode="floor"),
    "blocks by a cast": lambda dtype: (torch.arange(N).to(dtype) / 41).to(torch.int64),
    "blocks by rounding": lambda dtype: torch.round(torch.arange(N).to(dtype) / 41 - 0.5),
    "blocks by an inverse": lambda dtype: torch.ceil(torch.arange(N).to(dtype) * (1 / 41)),
    "a remainder over and times": lambda dtype: torch.remainder(torch.arange(N).to(dtype), 7) / 7 * 7,
    "multiples in narrow integers": lambda dtype: (torch.arange(30) * 77).to(dtype).long() > 40,
    "quotient as it is": lambda dtype: torch.arange(N).to(dtype) / 7,
    "remainder": lambda dtype: torch.arange(N).to(dtype) % 7,
    "negative remainder": lambda dtype: (torch.arange(N).to(dtype) - 50) % 7,
    "negative floor": lambda dtype: (torch.arange(N).to(dtype) - 50) // 7,
    "fmod": lambda dtype: (torch.arange(N).to(dtype) - 50).fmod(7),
    "a triangle of 256": lambda dtype: (torch.ones(9, 9, dtype=torch.int64).tril() * 256).to(dtype),
    "minus": lambda dtype: -torch.arange(N).to(dtype),
    "square roots": lambda dtype: torch.arange(N).to(dtype).sqrt(),
    "exponentials": lambda dtype: (torch.arange(20).to(dtype) * -0.5).exp(),
    "logarithms": lambda dtype: (torch.log(torch.arange(1, N).to(dtype) / 16) / 2.7725887 * 16).to(torch.int64),
    "powers": lambda dtype: 2 ** torch.arange(7).to(dtype),
    "a tenth": lambda dtype: torch.arange(N).to(dtype) * 0.1 >= 2.3,
    "eye": lambda dtype: torch.eye(N, dtype=dtype),
    "full": lambda dtype: torch.full((3,), 300, dtype=torch.int64).to(dtype),
    "to a byte through a fraction": lambda dtype: (torch.arange(N).to(dtype) / 2).to(torch.uint8),
}  # fmt: skip


def refused_or_right(call: Callable[..., Any], *args: Any) -> Tally:
    tally = Tally()
    tally.add("", judged(call, *args), torch.bool)
    return tally


SOME = (torch.uint8, torch.int64, torch.bfloat16, torch.float32)
EVERY_DAY = (torch.uint8, torch.bfloat16)


def cases(table: dict[str, Any], dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    """Every name in every dtype; those in `EVERY_DAY` run every day."""
    return [
        pytest.param(
            table[name],
            dtype,
            id=f"{name}-{str(dtype).removeprefix('torch.')}",
            marks=() if dtype in EVERY_DAY else pytest.mark.thorough,
        )
        for name in table
        for dtype in dtypes
    ]


@pytest.mark.parametrize("call, dtype", cases(SLICES, SOME))
def test_slices(call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = matrix(dtype)
    assert (refused_or_right(call, x).wrong, refused_or_right(call, x).refused) == ([], {})
    assert refused_or_right(call, x[:, :1].expand(7, 9)).wrong == []
    assert refused_or_right(call, x.T.contiguous().T).wrong == []


@pytest.mark.parametrize("call, dtype", cases(EDITS, SOME))
def test_edits(call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    found = refused_or_right(call, matrix(dtype))
    assert found.wrong == []
    # Neither pairs of positions nor strides have a closed form; the other edits are read.
    assert not found.refused or call in (EDITS["at pairs of positions"], EDITS["fill_diagonal_"]), found.refused


@pytest.mark.parametrize("call, dtype", cases(ARITHMETIC, (*INTEGERS, *FRACTIONS)))
def test_arithmetic_over_the_whole_range(call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    assert refused_or_right(call, far_numbers(dtype)).wrong == []
    assert refused_or_right(call, far_numbers(dtype)[:1].expand(5)).wrong == []
    assert refused_or_right(call, far_numbers(dtype)[:0]).wrong == []


@pytest.mark.parametrize("made, dtype", cases(POSITIONS, (*INTEGERS, *FRACTIONS)))
def test_positions(made: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> None:
    # What is computed in float32 is so beside scores in float64, too.
    for scores in (None, torch.float64):
        assert [verdict.wrong for verdict in judged_in(scores, lambda: made(dtype))] == [""]
