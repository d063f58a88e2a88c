"""triton_flash, interpreted on the CPU: every score program of `chunked_cases` against float64, with gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_fuse.kernels.centring import restored
from attn_fuse.kernels.score import program as score_program
from attn_fuse.kernels.score.program import ScoreProgram
from tests.common_part import HEAD_DIM, TIMES_EAGER, distances, written
from tests.graph.chunked_cases import (
    CASE,
    CASES,
    CAUSAL,
    INF,
    SIZES,
    USUAL,
    B,
    Case,
    H,
    K,
    Q,
    S,
    Sizes,
    assert_near,
    const,
    drawn,
    naive,
    randn,
    results,
    where,
)
from tests.graph.random_cases import random_case
from tests.grid.features import At
from tests.triton.flash_operator import operator, products_in_one_order, small_tiles, use_tiles  # noqa: F401
from tests.triton.interpreted import INTERPRETED, interpreted

pytestmark = pytest.mark.thorough

if INTERPRETED:
    from attn_fuse.kernels.triton.flash import launch as flash
    from attn_fuse.kernels.triton.flash import spans_kernel
    from attn_fuse.kernels.triton.flash.configs import Config
    from attn_fuse.kernels.triton.flash.op import triton_flash
    from attn_fuse.kernels.triton.flash.spans import spans


def check(case: Case, s: Sizes, dtype: torch.dtype = torch.float32, inner: bool | None = None) -> None:
    """Compare with `naive`. inner: whether the spans say where every key is seen; None without spans."""
    tensors = drawn(case, s, dtype)
    grad_out = torch.randn(s.batch, s.heads, s.q_len, s.value_dim).to(dtype)
    how: dict[str, Any] = {"numbers": case.numbers(s)}
    if inner is not None:
        how["tables"] = tables_of(case, s, tensors[3:], inner)
    got = results(lambda *x: operator(case, *x, **how), tensors, grad_out)
    assert_near(got, partial(naive, case), tensors, grad_out)


def tables_of(case: Case, s: Sizes, inputs: Sequence[Tensor], inner: bool = False) -> tuple[Tensor, Tensor]:
    program = case.program.dumps()
    return spans(inputs, case.numbers(s), s.batch, s.heads, s.q_len, s.kv_len, program, torch.device("cpu"), inner)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_scores(case: Case) -> None:
    check(case, USUAL)


@interpreted
@pytest.mark.usefixtures("products_in_one_order")
def test_gradients_of_values_with_a_common_part() -> None:
    program = ScoreProgram(["add", ["mul", S, const(HEAD_DIM**-0.5)], ["input", 0]]).dumps()

    def attend(centred: bool, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        rest = ([bias.unsqueeze(0)], [], None, None, None, 0.0, program, centred)
        out, _, row_sum, centre = triton_flash(q, k, v, *rest)
        return restored(out, row_sum != 0, centre) if centred else out

    several = {"eager": written, "not centred": partial(attend, False), "centred": partial(attend, True)}
    found = distances(several, 500.0, tokens=40, seeds=1)
    assert all(of["centred"] <= TIMES_EAGER * of["eager"] for of in found.values()), found
    assert found["qkv.weight"]["centred"] < found["qkv.weight"]["not centred"] / 5


@interpreted
@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    check(random_case(seed), Sizes(2, 2, 1, 37, 29, 8, 8))


@interpreted
@pytest.mark.parametrize("s", SIZES[1:], ids=str)
@pytest.mark.parametrize("name", ["causal", "window", "relative table", "everything"])
def test_sizes(name: str, s: Sizes) -> None:
    check(CASE[name], s)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("s", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_scores_of_all_sizes(case: Case, s: Sizes) -> None:
    check(case, s)


@interpreted
@pytest.mark.parametrize("name", ["causal", "documents", "bias of every batch", "everything"])
def test_half_precision(name: str) -> None:
    check(CASE[name], USUAL, torch.float16)


@interpreted
@pytest.mark.parametrize(("head_dim", "value_dim"), [(40, 24), (80, 80), (128, 128), (3, 130), (256, 16)])
def test_widths(head_dim: int, value_dim: int) -> None:
    """The scores are scaled, because a backward cannot repeat the rounding of unscaled scores of about 40."""
    scale, causal = head_dim**-0.5, CASE["causal"]
    scaled = replace(
        causal,
        program=replace(causal.program, score=where(CAUSAL, ["mul", S, const(scale)])),
        dense=lambda s, at: causal.dense(s * scale, at),
    )
    check(scaled, replace(USUAL, batch=1, heads=2, kv_heads=1, head_dim=head_dim, value_dim=value_dim))


# ---- blocks that are skipped


def banded(lower: int | None, upper: int | None) -> Case:
    """A mask that shows lower <= j - i <= upper, as a condition of the program and as bounds."""
    parts = [] if upper is None else [["le", ["sub", K, Q], const(upper)]]
    parts += [] if lower is None else [["ge", K, ["add", Q, const(lower)]]]
    condition = ["and", *parts]

    def dense(s: Tensor, at: At) -> Tensor:
        seen = (at.j - at.i <= (INF if upper is None else upper)) & (at.j - at.i >= (-INF if lower is None else lower))
        return s.masked_fill(~seen, -INF)

    bounds = {name: const(n) for name, n in (("upper", upper), ("lower", lower)) if n is not None}
    return Case(f"{lower} to {upper}", ScoreProgram(where(condition, S), visible=condition, **bounds), dense)


@interpreted
@pytest.mark.parametrize(
    ("lower", "upper"),
    [(None, 0), (None, 5), (None, -20), (None, -70), (0, None), (-70, 70), (-30, 3), (-3, 30), (40, 45), (-60, -50)],
)
@pytest.mark.parametrize("lengths", [(70, 70), (33, 97), (97, 64)], ids=str)
def test_bounds(lower: int | None, upper: int | None, lengths: tuple[int, int]) -> None:
    """Bands that begin or end within tiles or between them, that hide whole rows, or hide everything."""
    check(banded(lower, upper), Sizes(1, 1, 1, *lengths, 16, 16))


@interpreted
def test_within_the_bounds_nothing_is_compared() -> None:
    from attn_fuse.kernels.triton.scores import score_code

    for lower, upper in ((None, 0), (-5, 5)):
        code = score_code(banded(lower, upper).program.dumps(), [], [])
        assert "where" not in code.source.split("def score_whole")[1].split("def ")[0]
    other = ScoreProgram(where(["le", K, ["add", Q, const(1)]], S), upper=const(2)).dumps()
    assert score_code(other, [], []).score_whole is score_code(other, [], []).score


def seen_by(name: str, condition: list[Any]) -> Case:
    case = CASE[name]
    return replace(case, program=replace(case.program, visible=condition))


@interpreted
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("tile", [(16, 32), (64, 32), (128, 16)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        seen_by("documents", ["eq", ["input", 0], ["input", 1]]),
        seen_by("key padding", ["not", ["ge", K, ["gather", 0, B]]]),
        seen_by("prefix", ["or", ["ge", Q, K], ["lt", K, ["number", 0]]]),
    ],
    ids=lambda c: c.name,
)
def test_spans(case: Case, tile: tuple[int, int], inner: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, Config(*tile, 4, 1))
    s = replace(USUAL, heads=2, kv_heads=1, q_len=150, kv_len=201)
    if case.name == "documents":

        def in_order(s: Sizes) -> list[Tensor]:
            ids = torch.randint(0, 4, (s.batch, 1, s.kv_len)).sort(-1).values
            return [ids[:, :, : s.q_len, None].contiguous(), ids[:, :, None, :].contiguous()]

        case = replace(case, inputs=in_order)
    check(case, s, inner=inner)


@interpreted
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", [CASE["causal"], CASE["window"], CASE["everything"]], ids=lambda c: c.name)
def test_statistics_loaded_together(case: Case, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, Config(32, 16, 4, 1, statistics=count))
    check(case, USUAL)


LOWEST = torch.finfo(torch.float32).min
# The mask of Hugging Face's models, whose fully masked queries get the mean of the values.
SOFTLY = ["and", ["le", K, Q], ["ge", K, ["gather", 0, B]], ["lt", K, ["gather", 1, B]]]


@interpreted
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("tile", [(16, 32), (64, 32), (128, 16)], ids=str)
def test_a_finite_fill_hides_from_queries_that_see_a_key(tile: tuple[int, int], inner: bool, monkeypatch) -> None:
    use_tiles(monkeypatch, Config(*tile, 4, 1))
    program = ScoreProgram(where(SOFTLY, S, LOWEST), visible=SOFTLY, hides_only_if_others_seen=True)
    s = Sizes(4, 2, 1, 150, 201, 16, 24)

    def dense(scores: Tensor, at: At, first: Tensor, last: Tensor) -> Tensor:
        keep = (at.j <= at.i) & (at.j >= first[at.b]) & (at.j < last[at.b])
        return scores.masked_fill(~keep, LOWEST)

    case = Case("", program, dense, lambda s: [torch.tensor([0, 0, 70, 150]), torch.tensor([201, 90, 201, 201])])
    check(case, s, inner=inner)
    tensors = drawn(case, s, torch.float32)
    of_queries, of_keys = tables_of(case, s, tensors[3:])
    assert of_queries[0, 0].tolist() == [[0, 64], [0, 128], [0, 150]]
    assert of_queries[1, 0].tolist() == [[0, 64], [0, 90], [0, 90]]
    assert of_queries[2:, 0, 0].tolist() == [[0, 201], [0, 201]] and of_queries[2, 0, 2].tolist() == [70, 150]
    assert of_keys[0, 0].tolist() == [[0, 150], [64, 150], [128, 150], [150, 0]]


@interpreted
def test_hidden_keys_are_not_read() -> None:
    """NaN in a hidden value does not reach the output if its whole block is skipped."""
    case = seen_by("key padding", ["not", ["ge", K, ["gather", 0, B]]])
    s = Sizes(2, 1, 1, 70, 300, 16, 16)
    tensors = drawn(case, s, torch.float32)
    tensors[3] = torch.tensor([60, 128])
    tensors[2][0, :, 64:], tensors[2][1, :, 128:] = math.nan, math.nan
    assert operator(case, *tensors, numbers=[], tables=tables_of(case, s, tensors[3:])).isfinite().all()
    assert not operator(case, *tensors, numbers=[]).isfinite().any()


QUERY, KEY = torch.arange(150)[:, None], torch.arange(201)
DENSE, OF_HEADS = (
    torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.01
    for shape in ((2, 1, 150, 201), (1, 3, 150, 201))
)
FIRST, LAST = torch.tensor([0, 70]), torch.tensor([180, 201])
WITHIN = (KEY <= QUERY) & (KEY >= FIRST[:, None, None, None]) & (KEY < LAST[:, None, None, None])
THIRDS = ["eq", ["remainder", Q, ["const", 3]], ["remainder", K, ["const", 3]]]


@interpreted
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("softly", [False, True])
@pytest.mark.parametrize(
    ("visible", "mask"),
    [
        (SOFTLY, WITHIN),
        (["input", 2], DENSE),
        (["and", ["input", 2], SOFTLY], DENSE & WITHIN),
        (["input", 3], OF_HEADS),
        (["and", THIRDS, ["lt", K, Q]], ((QUERY % 3 == KEY % 3) & (KEY < QUERY))[None, None]),
        (["const", True], torch.ones(1, 1, 150, 201, dtype=torch.bool)),
    ],
    ids=["lengths", "dense", "both", "of heads", "positions", "all"],
)
def test_spans_by_the_mask_itself(visible: list[Any], mask: Tensor, softly: bool, inner: bool) -> None:
    inputs = [FIRST, LAST, DENSE, OF_HEADS]
    program = ScoreProgram(S, visible=visible, hides_only_if_others_seen=softly).dumps()
    of_queries, of_keys = spans(inputs, [], 2, 3, 150, 201, program, torch.device("cpu"), inner)
    every = mask
    if softly:
        # A query that sees no key has weights for all, so its block sees every key.
        empty = ~mask.any(-1, keepdim=True)
        mask = mask | torch.cat([x.any(2, keepdim=True).expand_as(x) for x in empty.split(64, 2)], 2)
    for table, seen, all_seen in ((of_queries, mask, every), (of_keys, mask.mT, every.mT)):
        other, place = seen.shape[3], torch.arange(seen.shape[3])
        blocks = torch.stack([block.any(2) for block in seen.split(64, 2)], 2)
        first, last = torch.where(blocks, place, other).amin(-1), torch.where(blocks, place + 1, 0).amax(-1)
        assert torch.equal(table[..., :2].long(), torch.stack([first, last], -1))
        assert table.shape[-1] == (4 if inner else 2)
        if inner:
            full = torch.stack([block.all(2) for block in all_seen.split(64, 2)], 2)
            begin = torch.where(full, place, other).amin(-1)
            end = torch.where(full | (place < begin[..., None]), other, place).amin(-1)
            assert torch.equal(table[..., 2:].long(), torch.stack([begin, end], -1))


@interpreted
@pytest.mark.parametrize("fill", [-math.inf, LOWEST])
@pytest.mark.parametrize("at", [(70, 70), (149, 0), (0, 200)], ids=str)
def test_a_single_hidden_key(at: tuple[int, int], fill: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single hidden pair of query and key makes its blocks cut ones, but not those of other batch entries."""
    use_tiles(monkeypatch, Config(64, 32, 4, 1))
    keep = torch.ones(2, 1, 150, 201, dtype=torch.bool)
    keep[1, 0, at[0], at[1]] = False
    program = ScoreProgram(
        where(["input", 0], S, fill), visible=["input", 0], hides_only_if_others_seen=math.isfinite(fill)
    )
    case = Case("", program, lambda scores, at, seen: scores.masked_fill(~seen, fill), lambda s: [keep])
    check(case, Sizes(2, 2, 1, 150, 201, 16, 24), inner=True)


@interpreted
def test_spans_are_found_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which may be a different one."""
    entered: list[torch.device] = []
    launched: list[int] = []

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    monkeypatch.setattr(spans_kernel, "on", on)
    monkeypatch.setattr(spans_kernel, "Launch", lambda *_, **__: lambda *_: launched.append(len(entered)))
    program = ScoreProgram(S, visible=["input", 0]).dumps()
    spans([DENSE], [], 2, 3, 150, 201, program, torch.device("cpu"), True)
    assert launched == [1, 1]


@interpreted
def test_opcheck_of_spans() -> None:
    case = seen_by("documents", ["eq", ["input", 0], ["input", 1]])
    inputs = case.inputs(USUAL)
    how = inputs, [], 2, 4, 37, 53, case.program.dumps(), torch.device("cpu")
    torch.library.opcheck(spans, (*how, False))
    torch.library.opcheck(spans, (*how, True))


# ---- memory


@interpreted
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, -1, 1, 1), (-1, -1, 1, 1)], ids=str)
def test_the_gradient_of_a_sink_that_heads_or_batch_entries_share(shape: tuple[int, ...]) -> None:
    made = ScoreProgram(["mul", S, const(0.5)], sink=["input", 0])
    check(Case("", made, lambda s, at, sink: (s * 0.5, None, sink), randn(*shape)), USUAL)


@interpreted
def test_the_gradient_of_a_sink_from_a_longer_table() -> None:
    made = ScoreProgram(["mul", S, const(0.5)], sink=["gather", 0, H])
    dense = lambda s, at, table: (s * 0.5, None, table[: s.shape[1]].view(1, -1, 1, 1))  # noqa: E731
    check(Case("", made, dense, lambda s: [torch.randn(s.heads + 3)]), USUAL)


@interpreted
def test_a_distance_that_wraps_around() -> None:
    """As int8, the difference of positions 100 and -100 is -56."""
    narrow = [["cast", "int8", ["mul", x, const(9)]] for x in (Q, K)]
    made = ScoreProgram(["add", S, ["cast", "float32", ["sub", *narrow]]])

    def dense(s: Tensor, at: Any) -> Tensor:
        return s + ((at.i * 9).to(torch.int8) - (at.j * 9).to(torch.int8)).to(s.dtype)

    check(Case("", made, dense), USUAL)


@interpreted
def test_a_table_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_program, "_STRIP", 20 * USUAL.kv_len * USUAL.heads)
    check(CASE["everything"], USUAL)


@interpreted
@pytest.mark.parametrize("programs", [1, 7, 10**6])
def test_sums_in_parts(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_PROGRAMS", programs)
    for name in ("bias of every batch", "bias of the heads", "bias of the keys"):
        check(CASE[name], USUAL)


# ---- rows without a visible key
