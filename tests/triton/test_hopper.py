"""The kernels with bulk copies in the emulator, compared with those without in Triton's interpreter.

Also which calls use them, and that the emulator notices every missing wait or arrival.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.graph.chunked_cases import CASE, Case, Sizes
from tests.harness import every_day
from tests.triton.flash_operator import products_in_one_order  # noqa: F401
from tests.triton.interpreted import INTERPRETED, interpreted

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.triton import flash as package
from attn_fuse.kernels.triton.flash import bulk as flash_bulk
from attn_fuse.kernels.triton.flash import facts as flash_facts
from attn_fuse.kernels.triton.flash import hopper, hopper_backward
from attn_fuse.kernels.triton.flash.bulk import Bulk
from attn_fuse.kernels.triton.flash.facts import call_facts
from tests.triton.bulk_calls import (
    LOWEST,
    SOFT,
    SPANNED,
    TAKEN,
    made,
    operands,
    same,
    with_spans,
)
from tests.triton.gluon_machine import Fault

pytestmark = [
    pytest.mark.skipif(not flash_bulk.is_there(), reason="the kernel is not written for this Triton"),
    *([pytest.mark.usefixtures("products_in_one_order")] if INTERPRETED else []),
]


@pytest.fixture(autouse=True)
def a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on the CPU count as calls on a Hopper GPU."""
    monkeypatch.setattr(flash_facts, "_capability", lambda device: 9)
    monkeypatch.setattr(flash_facts, "_known", {})


# ---- compared with the other kernels


# Small blocks, for many turns of the rings in little time.
SMALL = Bulk(32, 2)
thorough = pytest.mark.thorough


@interpreted
@pytest.mark.parametrize("seed", every_day(range(3), 0))
@pytest.mark.parametrize("name", every_day(TAKEN, "causal", "documents", "bias of the heads"))
def test_it_gives_what_the_other_gives(name: str, seed: int) -> None:
    """In the shipped blocks, and in smaller ones."""
    dtype = (torch.float16, torch.bfloat16)[(seed + TAKEN.index(name)) % 2]
    made(CASE[name], Sizes(1, 2, 1, 150, 217, 96, 80), dtype).check(seed, None if seed == 1 else SMALL)


@interpreted
@pytest.mark.parametrize("name", every_day(TAKEN, "window"))
def test_gradients(name: str) -> None:
    seed = TAKEN.index(name)
    attention = made(CASE[name], Sizes(1, 2, 1, 150, 217, 96, 80), (torch.float16, torch.bfloat16)[seed % 2])
    if attention.facts.bulk.keys() == {"forward"}:
        pytest.skip("the gradient needs the scores again")
    attention.check(seed, SMALL, backward=True)


# Grouped heads or not, fewer and more keys than queries, one key, whole and cut blocks, widths for both block sizes,
# and value rows of another width.
SIZES = (
    Sizes(1, 3, 1, 129, 65, 128, 72),
    Sizes(2, 2, 2, 128, 1, 72, 128),
    Sizes(2, 1, 1, 256, 256, 128, 128),
    Sizes(1, 2, 2, 200, 300, 128, 256),
    Sizes(1, 4, 2, 140, 200, 192, 80),
    Sizes(1, 1, 1, 333, 250, 256, 256),
)


@interpreted
@pytest.mark.parametrize("name", every_day(["causal", "window", "plain", "softcap"], "causal"))
@pytest.mark.parametrize("s", every_day(SIZES, SIZES[0], SIZES[1]), ids=str)
def test_sizes(name: str, s: Sizes) -> None:
    for seed in range(1 if name == "causal" else 3):
        made(CASE[name], s).check(seed)


@interpreted
@thorough
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("case", SPANNED, ids=lambda c: c.name)
def test_spans(case: Case, inner: bool) -> None:
    """The kernels skip blocks that the mask hides."""
    s = Sizes(2, 1, 1, 200, 170, 80, 80)
    attention = made(case, s)
    found = with_spans(attention, inner).check(1, SMALL)
    same(found, attention.in_bulk(2, SMALL), rounded=with_spans(attention, inner).facts.rescaled)


@interpreted
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("case", SPANNED, ids=lambda c: c.name)
@thorough
def test_spans_of_all_sizes(case: Case, inner: bool) -> None:
    for seed, s in enumerate((Sizes(3, 2, 1, 300, 333, 80, 80), Sizes(2, 2, 2, 333, 129, 128, 256))):
        with_spans(made(case, s), inner).check(seed)


@interpreted
@pytest.mark.parametrize("sink", [None, ["const", 0.5]], ids=["no sink", "sink"])
def test_queries_that_see_no_key(sink: list[Any] | None) -> None:
    """The last queries, among them a whole program, are past the window, and one program is partly past it."""
    case = replace(CASE["window"], program=replace(CASE["window"].program, sink=sink))
    out, row_max, row_sum = made(case, Sizes(1, 1, 1, 400, 140, 128, 128)).check().values()
    assert bool((out[:, :, 144:] == 0).all()) and bool((out[:, :, :144] != 0).all())
    last = row_max[..., 144:]
    assert bool((last == -math.inf).all()) if sink is None else bool((last == last[..., :1]).all())
    assert bool((row_sum[..., 144:] == (0 if sink is None else 1)).all()) and bool((row_sum[..., :144] > 0).all())


@interpreted
def test_a_fully_masked_query_with_a_finite_fill() -> None:
    """The query attends to every key, so the spans skip no block."""
    attention = with_spans(made(SOFT, Sizes(2, 1, 1, 200, 170, 80, 80)))
    attention.inputs[0][1] = False
    attention = with_spans(replace(attention, table=(None, None)))
    out, row_max, row_sum = attention.check(0, SMALL).values()
    assert bool((row_max[1] == LOWEST).all()) and bool((row_sum[1] == 170).all())
    mean = attention.value[1].float().mean(1, keepdim=True).expand_as(out[1])
    torch.testing.assert_close(out[1].float(), mean, rtol=1e-2, atol=1e-3)


@interpreted
@thorough
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("s", [Sizes(2, 2, 1, 150, 65, 96, 80), Sizes(2, 2, 1, 150, 65, 192, 80)], ids=str)
def test_what_lies_beside_a_tensor_does_not_come_in(s: Sizes, bad: float) -> None:
    """In memory [B, L, H, D], each row is followed by that of another head, and the last key by foreign memory."""
    clean = made(CASE["causal"], s)
    wanted = clean.in_bulk()
    surrounded = []
    for x in (clean.query, clean.key, clean.value):
        batch, heads, length, width = x.shape
        whole = torch.full((batch, length + 70, heads + 1, width + 8), bad, dtype=x.dtype)
        part = whole[:, :length, :heads, :width].transpose(1, 2)
        surrounded.append(part.copy_(x))
    q, k, v = surrounded
    same(replace(clean, query=q, key=k, value=v).in_bulk(), wanted)
    for one in range(2):
        other = 1 - one
        q, k, v = (x.transpose(1, 2).clone().transpose(1, 2) for x in (clean.query, clean.key, clean.value))
        k[other], v[other] = bad, bad
        found = replace(clean, query=q, key=k, value=v).in_bulk()
        same({name: x[one] for name, x in found.items()}, {name: x[one] for name, x in wanted.items()})
        assert not found["out"][other].isfinite().any()


# ---- faults


SOURCES = {"hopper": Path(hopper.__file__).read_text(), "hopper_backward": Path(hopper_backward.__file__).read_text()}
NEEDED = re.compile(r"mbarrier\.(wait|arrive|expect)\(|mma_wait\(")
LINES = [
    (name, n, f"{name} {n + 1} {line.strip()}")
    for name, text in SOURCES.items()
    for n, line in enumerate(text.splitlines())
    if NEEDED.search(line)
]
WAITS = [
    pytest.param(name, n, id=words, marks=thorough if place % 12 else ())
    for place, (name, n, words) in enumerate(LINES)
]
# Faults other than missing lines: a text and its replacement; {} is a line's indentation. Freeing keys before their
# product is a fault only for the first keys, because the copying warp also waits until the previous block's values are
# free, which happens later.
OTHERS = {
    "keys in the wrong phase": ("k_free.index(stage), turn ^ 1", "k_free.index(stage), turn"),
    "values in the wrong phase": ("v_free.index(stage), turn ^ 1", "v_free.index(stage), turn"),
    "keys are free for one group": ("begun(STAGES, GROUPS), begun(STAGES, 1)", "begun(STAGES, 1), begun(STAGES, 1)"),
    "values are free for one group": ("begun(STAGES, GROUPS)\n", "begun(STAGES, 1)\n"),
    "queries of another size": ("query.block_type.nbytes", "value.block_type.nbytes"),
    "keys of another size": ("key.block_type.nbytes", "value.block_type.nbytes"),
    "values of another size": ("value.block_type.nbytes", "key.block_type.nbytes"),
    "one block too few": ("range(begin, end)", "range(begin, end - 1)"),
    "one block too many": ("range(begin, end)", "range(begin, end + 1)"),
    "the other group's queries": ("rows_of(q.index(GROUP))", "rows_of(q.index(1 - GROUP))"),
    "the other group's barrier": ("q_there.index(GROUP), 0", "q_there.index(1 - GROUP), 0"),
    "keys in another phase": ("k_there.index(stage), (count // STAGES)", "k_there.index(stage), (count // STAGES + 1)"),
    "values of the next phase": ("((count - 1) // STAGES) & 1)\n{}summed", "(count // STAGES) & 1)\n{}summed"),
    "values of the next block": ("rows_of(v.index(before))", "rows_of(v.index(stage))"),
    "values of the next block are free": ("v_free.index(before)", "v_free.index(stage)"),
    "too few waits for the scores": ("warpgroup_mma_wait(1, deps=(scored,", "warpgroup_mma_wait(2, deps=(scored,"),
    "too few waits for the sum": ("warpgroup_mma_wait(0, deps=(summed,", "warpgroup_mma_wait(1, deps=(summed,"),
    "values are free before the product": (
        "acc, used = warpgroup_mma_wait(0, deps=(summed, following))\n{}mbarrier.arrive(v_free.index(before), count=1)",
        "mbarrier.arrive(v_free.index(before), count=1)\n{}acc, used = warpgroup_mma_wait(0, deps=(summed, following))",
    ),
    "the first keys are free before the product": (
        "raw = warpgroup_mma_wait(0, deps=(raw,))\n    mbarrier.arrive(k_free.index(0), count=1)\n",
        "mbarrier.arrive(k_free.index(0), count=1)\n    raw = warpgroup_mma_wait(0, deps=(raw,))\n",
    ),
}  # fmt: skip


# A wait returns the products that it waited for.
WAITED = re.compile(r"= warpgroup_mma_wait\(\d, deps=\((.*?),?\)\)")


def without(text: str, line: int) -> str:
    """`text` without the wait or arrival in this line."""
    lines = text.splitlines(keepends=True)
    kept = WAITED.sub(r"= \1", lines[line])
    lines[line] = kept if kept != lines[line] else re.sub(r"\S.*", "pass", kept)
    return "".join(lines)


def with_fault(name: str) -> str:
    text, instead = (x.replace("{}", " " * 16) for x in OTHERS[name])
    assert SOURCES["hopper"].count(text) == 1, f"the kernel is written otherwise: {text}"
    return SOURCES["hopper"].replace(text, instead)


names = itertools.count()


def module(text: str, folder: Path) -> Any:
    """A module with the source `text`, in a file from which Triton can read the source of its functions."""
    file = folder / f"hopper_{next(names)}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def found_by(name: str, text: str, monkeypatch: pytest.MonkeyPatch, folder: Path, seeds: int = 8) -> str | None:
    """The first failure with `text` in place of the module `name`, or None."""
    attention = made(CASE["causal"], Sizes(1, 1, 1, 200, 170, 80, 40))
    backward = name == "hopper_backward"
    wanted = attention.in_bulk(0, SMALL, backward)
    monkeypatch.setattr(package, name, module(text, folder))
    for seed in range(seeds):
        try:
            same(attention.in_bulk(seed, SMALL, backward), wanted)
        except (Fault, AssertionError, AttributeError, TypeError) as problem:
            return f"{seed}: {type(problem).__name__}: {problem}"
    return None


@interpreted
@pytest.mark.parametrize(("name", "line"), WAITS)
def test_every_wait_and_arrival_is_needed(name: str, line: int, monkeypatch: Any, tmp_path: Path) -> None:
    assert found_by(name, without(SOURCES[name], line), monkeypatch, tmp_path) is not None


@interpreted
@pytest.mark.parametrize("name", every_day(OTHERS, "keys in the wrong phase", "one block too few"))
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert found_by("hopper", with_fault(name), monkeypatch, tmp_path) is not None


# ---- which calls use bulk copies


USUAL = Sizes(2, 4, 2, 150, 130, 128, 96)


def test_the_programs_that_it_takes() -> None:
    assert {name for name in CASE if made(CASE[name], USUAL).taken is not None} == {*TAKEN}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Bulk(128, 2)),
        ({"head_dim": 72, "value_dim": 8}, Bulk(128, 2)),
        ({"value_dim": 136}, Bulk(64, 2)),
        ({"head_dim": 256}, Bulk(64, 2)),
        ({"head_dim": 64, "value_dim": 64}, None),
        ({"q_len": 128}, Bulk(128, 2)),
        ({"q_len": 127}, None),
        ({"kv_len": 1}, Bulk(128, 2)),
        ({"kv_len": 0}, None),
        ({"batch": 0}, None),
        # Rows that are not a multiple of 16 bytes.
        ({"head_dim": 100}, None),
        ({"value_dim": 90}, None),
    ],
    ids=str,
)
def test_sizes_that_it_takes(changes: dict[str, int], expected: Bulk | None) -> None:
    # With a sink, a call without keys also launches a kernel.
    assert made(CASE["sink"], replace(USUAL, **changes)).taken == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("capability", [0, 8, 9, 10, 12])
def test_devices_and_dtypes(capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_facts, "_capability", lambda device: capability)
    taken = made(CASE["plain"], USUAL, dtype).taken is not None
    assert taken == (capability == 9 and dtype != torch.float32)


def test_dropout_and_another_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = operands(USUAL, torch.float16)
    seed, program = torch.zeros(1, dtype=torch.int64), CASE["plain"].program.dumps()
    assert call_facts(Operands(q, k, v, [], [], None, 0.0, program)).bulk
    assert not call_facts(Operands(q, k, v, [], [], seed, 0.1, program)).bulk
    monkeypatch.setattr(flash_facts, "_known", {})
    monkeypatch.setattr(flash_bulk, "is_there", lambda: False)
    assert not call_facts(Operands(q, k, v, [], [], None, 0.0, program)).bulk


def test_layouts_that_it_takes() -> None:
    """Exactly the layouts of which Triton makes descriptors, except for strides of 0, which the engine rejects."""
    drawn, taken = random.Random(0), 0
    for _ in range(300):
        # Rows with gaps, by heads or by positions in memory, one or two batch entries, and some heads expanded.
        s = replace(USUAL, batch=drawn.choice((1, 2)), head_dim=96)
        several = []
        for heads, length in ((4, 150), (2, 130), (2, 130)):
            room = drawn.choice((0, 0, 0, 0, 8, 4, 2))
            shape = [s.batch, heads, length + drawn.choice((0, 1)), 96 + room]
            order = drawn.choice(((0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 1, 3), (1, 2, 0, 3), (0, 1, 3, 2)))
            order = order if order[3] == 3 or drawn.random() < 0.2 else (0, 2, 1, 3)
            memory = torch.randn([shape[n] for n in order]).half()
            x = memory.permute([order.index(n) for n in range(4)])[:, :, :length, :96]
            several.append(x[:, :1].expand_as(x) if drawn.random() < 0.1 else x)
        q, k, v = several
        found = call_facts(Operands(q, k, v, [], [], None, 0.0, CASE["plain"].program.dumps()))
        assert bool(found.bulk) == all(map(is_described, several)), [x.stride() for x in several]
        taken += bool(found.bulk)
    assert 60 < taken < 240


def is_described(x: Tensor) -> bool:
    if any(step == 0 for n, step in zip(x.shape, x.stride(), strict=True) if n > 1):
        return False
    try:
        found = flash_bulk.descriptor(x, x.stride(), 64, 128)
    except AssertionError:
        return False
    assert torch.equal(torch.as_strided(found.base, found.shape, found.strides), x)
    return True
