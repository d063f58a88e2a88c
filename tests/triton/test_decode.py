"""triton_decode, interpreted on the CPU: every score program of `chunked_cases` against dense float64, few queries.

Triton is told to interpret before it is imported, so the tests run in a process of their own.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from attn_fuse.expression.nodes import Const, Select
from attn_fuse.kernels.score.program import ScoreProgram
from tests.graph.chunked_cases import (
    CASE,
    CASES,
    INF,
    Case,
    S,
    Sizes,
    biased,
    const,
    drawn,
    naive,
    where,
)
from tests.harness import ROUNDINGS, TIMES_EAGER
from tests.triton.interpreted import INTERPRETED, interpreted, run_interpreted

pytestmark = pytest.mark.thorough

if INTERPRETED:
    from attn_fuse.kernels.triton.decode import launch as module
    from attn_fuse.kernels.triton.decode.op import decode

LOWEST = torch.finfo(torch.float32).min
Q_LEN, KV_LEN, SPLITS = (1, 2, 5, 16), (1, 17, 300, 1000), (1, 3, 9)
# Of every kind of score program each query length, each cache and each number of splits, not each with each.
SOME = [
    (case, Q_LEN[(n + m) % 4], KV_LEN[m], SPLITS[(n + m) % 3])
    for n, case in enumerate(CASES)
    for m in range(len(KV_LEN))
]
ALL = [*itertools.product(CASES, Q_LEN, KV_LEN, SPLITS)]


def test_in_a_process_that_interprets() -> None:
    run_interpreted(__file__)


def sizes(q_len: int, kv_len: int, **other: int) -> Sizes:
    usual = Sizes(batch=2, heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=24, value_dim=40)
    return dataclasses.replace(usual, **other)


def operator(case: Case, *tensors: Tensor, numbers: list[int], splits: int | None) -> Tensor:
    query, key, value, *inputs = tensors
    return decode(query, key, value, inputs, numbers, case.program.dumps(), splits)


def with_visible(case: Case) -> Case:
    """The same, with the mask of its score told apart, where it hides keys by -inf."""
    score = case.program.score
    if not isinstance(score, Select) or score.b != Const(-INF):
        return case
    return dataclasses.replace(case, program=dataclasses.replace(case.program, visible=score.cond))


def check(case: Case, s: Sizes, splits: int | None = 3, dtype: torch.dtype = torch.float32) -> None:
    """Against dense float64, with the mask told apart and without. The two need not read the same keys."""
    tensors, numbers = drawn(case, s, dtype), case.numbers(s)
    for variant in {id(c): c for c in (case, with_visible(case))}.values():
        got = operator(variant, *tensors, numbers=numbers, splits=splits)
        assert got.shape == (s.batch, s.heads, s.q_len, s.value_dim) and got.dtype == dtype
        assert_out_near(got, case, tensors)


def assert_out_near(got: Tensor, case: Case, tensors: list[Tensor]) -> None:
    wide = [x.double() if x.is_floating_point() else x for x in tensors]
    exact, usual = naive(case, *wide), naive(case, *tensors)
    off, error = ((x.double() - exact).abs().max().item() for x in (usual, got))
    allowed = TIMES_EAGER * off + ROUNDINGS * torch.finfo(got.dtype).eps * exact.abs().max().item()
    assert error <= allowed, f"{error:.3g}, allowed {allowed:.3g}"


@interpreted
@pytest.mark.parametrize(("case", "q_len", "kv_len", "splits"), SOME, ids=lambda x: getattr(x, "name", str(x)))
def test_scores(case: Case, q_len: int, kv_len: int, splits: int) -> None:
    check(case, sizes(q_len, kv_len), splits)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("case", "q_len", "kv_len", "splits"), ALL, ids=lambda x: getattr(x, "name", str(x)))
def test_scores_of_all_sizes(case: Case, q_len: int, kv_len: int, splits: int) -> None:
    check(case, sizes(q_len, kv_len), splits)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_half_precision(case: Case) -> None:
    if case.wide_only:
        pytest.skip("written densely, this fill is no number of the dtype")
    check(case, sizes(2, 77), dtype=torch.float16)


@interpreted
@pytest.mark.parametrize(
    "s",
    [
        sizes(1, 70, kv_heads=4),
        sizes(3, 70, heads=6, kv_heads=1),
        sizes(16, 70, heads=8, kv_heads=1),  # two tiles of rows
        sizes(1, 70, heads=71, kv_heads=1),
        sizes(2, 70, head_dim=5, value_dim=3),
        sizes(2, 70, head_dim=16, value_dim=16),
        sizes(2, 70, head_dim=80, value_dim=144),
        sizes(1, 40, heads=2, kv_heads=1, head_dim=256, value_dim=256),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_heads_and_widths(name: str, s: Sizes) -> None:
    check(CASE[name], dataclasses.replace(s, batch=1), dtype=torch.float16 if name == "causal" else torch.float32)


@interpreted
def test_as_many_splits_as_the_device_runs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "multiprocessors", lambda device: 8)
    check(CASE["everything"], sizes(2, 1000), splits=None)


def over_all(x: Tensor, length: int) -> Tensor:
    """`x` in the middle of a longer buffer of NaN, along its third dimension."""
    buffer = torch.full((*x.shape[:2], length, x.shape[3]), math.nan, dtype=x.dtype)
    buffer[:, :, 7 : 7 + x.shape[2]] = x
    return buffer[:, :, 7 : 7 + x.shape[2]]


@interpreted
@pytest.mark.parametrize("name", ["plain", "bias", "everything"])
def test_strides(name: str) -> None:
    """Caches as people keep them: by position, sliced, packed, one head for all, head_dim not last, broadcast masks."""
    case, s = CASE[name], sizes(2, 70, value_dim=24)
    query, key, value, *inputs = drawn(case, s, torch.float32)
    packed = torch.stack((key, value), 3).transpose(1, 2).contiguous().transpose(1, 2)
    layouts = [
        (key.transpose(1, 2).contiguous().transpose(1, 2), value.transpose(1, 2).contiguous().transpose(1, 2)),
        (over_all(key, 96), over_all(value, 96)),
        tuple(packed.unbind(3)),
        (key[:, :1].expand(key.shape), value[:1].expand(value.shape)),
        (key.mT.contiguous().mT, value.mT.contiguous().mT),
    ]
    inputs = [x[:1].expand(x.shape) for x in inputs]
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    for one, other in layouts:
        got = operator(case, query, one, other, *inputs, numbers=case.numbers(s), splits=3)
        assert_out_near(got, case, [query, one, other, *inputs])


@interpreted
@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("s", [sizes(2, 0), sizes(2, 9, batch=0), sizes(0, 9)], ids=str)
def test_empty(name: str, s: Sizes) -> None:
    case = CASE[name]
    for splits in (1, 3):
        got = operator(case, *drawn(case, s, torch.float32), numbers=case.numbers(s), splits=splits)
        assert got.shape == (s.batch, s.heads, s.q_len, s.value_dim) and (got == 0).all()


# ---- what is not read: NaN where no query looks, which even a weight of 0 would hand on


@interpreted
@pytest.mark.parametrize("fill", [-INF, LOWEST], ids=["infinite", "finite"])
@pytest.mark.parametrize("splits", [1, 3, 40])
@pytest.mark.parametrize(("q_len", "filled"), [(1, 1), (1, 300), (4, 130), (2, 1000)])
def test_a_static_cache_costs_what_is_visible(q_len: int, filled: int, splits: int, fill: float) -> None:
    """Positions come as a tensor, so that nothing is known of them before the kernel runs."""
    seen = ["le", ["j"], ["gather", 0, ["i"]]]
    case = Case(
        "",
        ScoreProgram(where(seen, S, fill), visible=seen, hides_only_if_others_seen=fill == LOWEST),
        lambda s, at, position: s.masked_fill(at.j > position[at.i], fill),
    )
    s = sizes(q_len, 1000)
    position = torch.arange(max(0, filled - q_len), filled)[-q_len:].clamp(min=0)
    position = torch.nn.functional.pad(position, (q_len - len(position), 0))
    tensors = [*drawn(case, s, torch.float32), position]
    block = module.tiles(2 * q_len, 40, 4).keys
    unread = [*tensors]
    for n in (1, 2):
        unread[n] = tensors[n].clone()
        unread[n][:, :, -(-filled // block) * block :] = math.nan
    assert_out_near(operator(case, *unread, numbers=[], splits=splits), case, tensors)


@interpreted
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("told", ["by bounds", "by the mask"])
def test_a_window_costs_what_is_visible(told: str, splits: int) -> None:
    window = CASE["window"]
    offset = ["number", 0]
    first, last = ["add", ["i"], ["sub", offset, const(70)]], ["add", ["i"], offset]
    seen = ["and", ["le", ["j"], last], ["gt", ["j"], first]]
    bounds = {"upper": offset, "lower": ["sub", offset, const(69)]} if told == "by bounds" else {"visible": seen}
    case = dataclasses.replace(
        window,
        program=ScoreProgram(where(seen, S), **bounds),
        dense=lambda s, at: s.masked_fill((at.j > at.i + 600) | (at.j <= at.i + 530), -INF),
    )
    tensors = drawn(case, sizes(3, 1000), torch.float32)
    unread = [*tensors]
    for n in (1, 2):
        unread[n] = tensors[n].clone()
        unread[n][:, :, :512] = math.nan
        unread[n][:, :, 608:] = math.nan
    assert_out_near(operator(case, *unread, numbers=[600], splits=splits), case, tensors)


# ---- rows that see no key


@interpreted
@pytest.mark.parametrize("splits", [1, 3, 40])
@pytest.mark.parametrize("visible", [False, True], ids=["in the score", "told apart"])
@pytest.mark.parametrize("sink", [None, 0.5])
def test_queries_that_see_no_key(sink: float | None, visible: bool, splits: int) -> None:
    keep = torch.ones(1, 4, 5, 1, dtype=torch.bool)
    keep[:, :2, ::2] = False
    seen = ["input", 0]
    program = ScoreProgram(
        where(seen, S), sink=None if sink is None else const(sink), visible=seen if visible else None
    )
    query, key, value = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 70, 8), torch.randn(1, 2, 70, 8)
    out = decode(query, key, value, [keep], [], program.dumps(), splits)
    assert (out[:, :2, ::2] == 0).all() and out.isfinite().all()
    assert (out[:, 2:] != 0).all() and (out[:, :, 1::2] != 0).all()


@interpreted
@pytest.mark.parametrize("splits", [1, 3, 40])
@pytest.mark.parametrize("fill", [-1e4, -1e9, LOWEST])
def test_a_finite_fill_gives_the_mean(fill: float, splits: int) -> None:
    program = ScoreProgram(where(const(False), ["mul", S, const(0.3)], fill)).dumps()
    query, key, value = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 70, 8), torch.randn(1, 2, 70, 8)
    out = decode(query, key, value, [], [], program, splits)
    torch.testing.assert_close(out, value.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(out))


@interpreted
@pytest.mark.parametrize("splits", [1, 3, 40])
def test_a_finite_fill_hides_from_queries_that_see_a_key(splits: int) -> None:
    """Of the queries of a tile, one that sees no key gets the mean of all values, and the others what they see."""
    seen = ["and", ["ge", ["j"], ["gather", 0, ["b"]]], ["le", ["j"], ["add", ["i"], const(500)]]]
    case = Case(
        "",
        ScoreProgram(where(seen, S, LOWEST), visible=seen, hides_only_if_others_seen=True),
        lambda s, at, first: s.masked_fill((at.j < first[at.b]) | (at.j > at.i + 500), LOWEST),
    )
    s = sizes(4, 700, batch=4)
    tensors = [*drawn(case, s, torch.float32), torch.tensor([0, 450, 502, 699])]
    out = operator(case, *tensors, numbers=[], splits=splits)
    assert_out_near(out, case, tensors)
    mean = tensors[2].mean(2, keepdim=True).repeat_interleave(2, 1)
    torch.testing.assert_close(out[2:3, :, :2], mean[2:3].expand(1, 4, 2, -1))
    assert not torch.isclose(out[2:3, :, 2:], mean[2:3], atol=1e-3).all()


@interpreted
@pytest.mark.parametrize("splits", [1, 3, 40])
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_not_a_number_stays_one(bad: float, splits: int) -> None:
    bias = torch.zeros(1, 1, 5, 70)
    bias[0, 0, 3, 40] = bad
    tensors = [torch.randn(1, 1, n, 8) for n in (5, 70, 70)]
    out = operator(biased("", -1, -1, -1, -1), *tensors, bias, numbers=[], splits=splits)
    assert out[:, :, 3].isnan().all() and out[:, :, [0, 1, 2, 4]].isfinite().all()


# ---- the operator


@interpreted
def test_it_has_no_gradient_and_says_so() -> None:
    query, key, value = (x.requires_grad_() for x in torch.randn(3, 1, 2, 3, 8).unbind(0))
    out = decode(query, key, value, [], [], ScoreProgram(S).dumps())
    with pytest.raises(RuntimeError, match="triton_decode is attention for inference: it has no gradient"):
        out.sum().backward()


@interpreted
def test_the_operator_is_registered_as_it_should_be() -> None:
    tensors = [torch.randn(1, 4, 3, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 16)]
    arguments = (*tensors, [torch.randn(1, 4, 3, 20)], [17], CASE["bias"].program.dumps())
    torch.library.opcheck(decode, arguments, test_utils=("test_schema", "test_faketensor"))


@interpreted
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q, k, v: (q[0], k, v), "four dimensions"),
        (lambda q, k, v: (q, k[..., :4], v), "do not fit"),
        (lambda q, k, v: (q[:, :3], k, v), "no multiple"),
        (lambda q, k, v: (q, k, v.expand(1, 2, 20, 8).repeat(1, 1, 1, 33)), "too large"),
        (lambda q, k, v: (q, k, v.double()), "does not take"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "does not take"),
    ],
)
def test_what_does_not_fit_is_refused(change: object, said: str) -> None:
    tensors = [torch.randn(1, 4, 3, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)]
    with pytest.raises(ValueError, match=said):
        decode(*change(*tensors), [], [], ScoreProgram(S).dumps())


@interpreted
def test_the_keys_are_shared_where_that_fills_the_device() -> None:
    assert module.splits_for(planes=264, blocks=512, processors=132) == 1
    assert module.splits_for(planes=8, blocks=1, processors=132) == 1
    for planes in (1, 8, 64, 200):
        for blocks in (4, 64, 512):
            splits = module.splits_for(planes, blocks, 132)
            assert 1 <= splits <= max(1, blocks // 2)
    assert 8 * module.splits_for(planes=8, blocks=512, processors=132) >= 200
