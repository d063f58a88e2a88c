"""Score programs of every kind beside the same written densely, and how near to the dense one a result must be.

The budget is the one of `tests.harness`: a small multiple of what the dense computation is off in the same dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_fuse.kernels.chunked.attend import attend, attend_backward
from attn_fuse.kernels.chunked.op import chunked
from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.program import ScoreProgram
from tests.grid.features import At, Sizes
from tests.harness import ROUNDINGS, TIMES_EAGER

S, B, H, Q, K = ["score"], ["b"], ["h"], ["i"], ["j"]
INF = math.inf
Make = Callable[[Sizes], list[Tensor]]


@dataclass(frozen=True)
class Case:
    """A score program, and the same written densely: (scores, positions, *inputs) -> score, factor, sink.

    wide_only: written densely, it overflows in half precision.
    """

    name: str
    program: ScoreProgram
    dense: Callable[..., Any]
    inputs: Make = lambda s: []
    numbers: Callable[[Sizes], list[int]] = lambda s: []
    wide_only: bool = False


def const(value: float) -> list[Any]:
    return ["const", value]


def where(condition: list[Any], tree: list[Any], other: float = -INF) -> list[Any]:
    return ["where", condition, tree, const(other)]


def hidden(keep: Tensor, scores: Tensor, fill: float = -INF) -> Tensor:
    return scores.masked_fill(~keep, fill)


CAUSAL = ["le", K, ["add", Q, ["number", 0]]]


def region(place: list[Any]) -> list[Any]:
    """Which of 12 regions a place of a batch entry is in, by too many operations for each score."""
    row, column = ["floor_divide", place, const(5)], ["remainder", ["add", place, B], const(5)]
    third = ["where", ["ge", row, const(5)], const(2), ["where", ["ge", row, const(2)], const(1), const(0)]]
    return ["add", ["mul", third, const(4)], ["minimum", column, const(3)]]


def region_of(place: Tensor, entry: Tensor) -> Tensor:
    row, column = place // 5, (place + entry) % 5
    return ((row >= 5).long() + (row >= 2).long()) * 4 + column.clamp(max=3)


DISTANCE = ["minimum", ["maximum", ["add", ["sub", K, Q], const(8)], const(0)], const(16)]
SAME_DOCUMENT = ["eq", ["input", 0], ["input", 1]]


def documents(s: Sizes) -> list[Tensor]:
    # Document 3 has no key.
    return [torch.randint(0, 4, (s.batch, 1, s.q_len, 1)), torch.randint(0, 3, (s.batch, 1, 1, s.kv_len))]


def stored(s: Sizes, *of: tuple[int, bool, bool]) -> list[Tensor]:
    """Places in a dimension of a table for each query and key: its size, whether batch entries and heads differ.

    Some are counted from the end.
    """
    shapes = [(s.batch if batch else 1, s.heads if head else 1, s.q_len, s.kv_len) for _, batch, head in of]
    return [torch.randint(-size, size, shape) for shape, (size, _, _) in zip(shapes, of, strict=True)]


def randn(*shape: int) -> Callable[[Sizes], list[Tensor]]:
    """One tensor; a -1 in `shape` stands for the whole dimension."""

    def make(s: Sizes) -> list[Tensor]:
        whole = (s.batch, s.heads, s.q_len, s.kv_len)
        return [torch.randn([n if n > 0 else w for n, w in zip(shape, whole, strict=True)])]

    return make


def biased(name: str, *shape: int) -> Case:
    return Case(name, ScoreProgram(["add", S, ["input", 0]]), lambda s, at, bias: s + bias, randn(*shape))


def filled(fill: float) -> Case:
    return Case(
        f"documents filled with {fill:.3g}",
        ScoreProgram(where(SAME_DOCUMENT, ["mul", S, const(0.2)], fill)),
        lambda s, at, q, k: hidden(q == k, s * 0.2, fill),
        documents,
        wide_only=True,
    )


CASES = [
    Case("plain", ScoreProgram(S), lambda s, at: s),
    Case("scaled", ScoreProgram(["mul", S, const(0.3)]), lambda s, at: s * 0.3),
    Case(
        "causal",
        ScoreProgram(where(CAUSAL, S), upper=["number", 0]),
        lambda s, at: hidden(at.j <= at.i + s.shape[3] - s.shape[2], s),
        numbers=lambda s: [s.kv_len - s.q_len],
    ),
    Case(
        "window",
        ScoreProgram(
            where(["and", ["le", K, Q], ["gt", K, ["sub", Q, const(5)]]], S),
            upper=const(0),
            lower=["sub", const(1), const(5)],
        ),
        lambda s, at: hidden((at.j <= at.i) & (at.j > at.i - 5), s),
    ),
    Case(
        "prefix",
        ScoreProgram(where(["or", ["ge", Q, K], ["lt", K, ["number", 0]]], S)),
        lambda s, at: hidden((at.j <= at.i) | (at.j < 3), s),
        numbers=lambda s: [3],
    ),
    Case(
        "documents",
        ScoreProgram(where(SAME_DOCUMENT, S)),
        lambda s, at, q, k: hidden(q == k, s),
        documents,
    ),
    filled(-1e9),
    filled(torch.finfo(torch.float32).min),
    Case(
        "added fill",
        ScoreProgram(["add", S, ["mul", ["not", SAME_DOCUMENT], const(-1e4)]]),
        lambda s, at, q, k: s + (q != k).to(s.dtype) * -1e4,
        documents,
    ),
    Case(
        "key padding",
        ScoreProgram(where(["not", ["ge", K, ["gather", 0, B]]], S)),
        lambda s, at, lengths: hidden(at.j < lengths.view(-1, 1, 1, 1), s),
        lambda s: [torch.arange(s.batch) + s.kv_len // 2],
    ),
    biased("bias", -1, -1, -1, -1),
    biased("bias of every batch", 1, -1, -1, -1),
    biased("bias of every head", -1, 1, -1, -1),
    biased("bias of the keys", -1, 1, 1, -1),
    biased("bias of the queries", 1, -1, -1, 1),
    biased("bias of the heads", 1, -1, 1, 1),
    Case(
        "alibi",
        ScoreProgram(["sub", S, ["mul", ["input", 0], ["abs", ["sub", Q, K]]]]),
        lambda s, at, slopes: s - slopes * (at.i - at.j).abs(),
        randn(1, -1, 1, 1),
    ),
    Case(
        "relative table",
        ScoreProgram(["add", S, ["gather", 0, DISTANCE, H]]),
        lambda s, at, table: s + table[(at.j - at.i + 8).clamp(0, 16), at.h],
        lambda s: [torch.randn(17, s.heads)],
    ),
    Case(
        "regions",
        ScoreProgram(where(["eq", region(Q), region(K)], S, -100.0)),
        lambda s, at: hidden(region_of(at.i, at.b) == region_of(at.j, at.b), s, -100.0),
    ),
    Case(
        "tables of regions",
        ScoreProgram(
            ["mul", ["add", S, ["gather", 0, region(K), H]], ["sigmoid", ["gather", 1, region(Q)]]],
            factor=["tanh", ["gather", 0, region(Q), H]],
        ),
        lambda s, at, table, factor: (
            (s + table[region_of(at.j, at.b), at.h]) * factor[region_of(at.i, at.b)].sigmoid(),
            table[region_of(at.i, at.b), at.h].tanh(),
            None,
        ),
        lambda s: [torch.randn(12, s.heads), torch.randn(12)],
    ),
    Case(
        "table at stored places",
        ScoreProgram(["add", S, ["gather", 1, ["input", 0], H]]),
        lambda s, at, places, table: s + table[places, at.h],
        lambda s: [*stored(s, (23, False, False)), torch.randn(23, s.heads)],
    ),
    Case(
        "table at stored places of each batch entry",
        ScoreProgram(["add", S, ["gather", 1, H, ["cast", "int64", ["input", 0]]]]),
        lambda s, at, places, table: s + table[at.h, places.long()],
        lambda s: [stored(s, (23, True, False))[0].int(), torch.randn(s.heads, 23)],
    ),
    Case(
        "table at stored places of each head",
        ScoreProgram(["add", S, ["gather", 1, H, ["input", 0]]]),
        lambda s, at, places, table: s + table[at.h, places],
        lambda s: [*stored(s, (23, False, True)), torch.randn(s.heads, 23)],
    ),
    Case(
        "table without heads at stored places",
        ScoreProgram(["mul", S, ["sigmoid", ["gather", 1, ["input", 0]]]]),
        lambda s, at, places, table: s * table[places].sigmoid(),
        lambda s: [*stored(s, (23, False, False)), torch.randn(23)],
    ),
    Case(
        "table read twice, of several dimensions",
        ScoreProgram(
            ["add", S, ["gather", 2, ["input", 0], H, ["input", 1]]],
            factor=[
                "tanh",
                ["gather", 2, ["input", 0], H, ["maximum", ["minimum", ["sub", K, Q], const(3)], const(0)]],
            ],
        ),
        lambda s, at, row, column, table: (
            s + table[row, at.h, column],
            table[row, at.h, (at.j - at.i).clamp(0, 3)].tanh(),
            None,
        ),
        lambda s: [*stored(s, (5, False, False), (4, True, False)), torch.randn(5, s.heads, 4)],
    ),
    Case(
        "Boolean table at stored places",
        ScoreProgram(where(["gather", 1, ["input", 0], H], ["mul", S, const(0.3)], -100.0)),
        lambda s, at, places, table: hidden(table[places, at.h], s * 0.3, -100.0),
        lambda s: [*stored(s, (23, False, False)), torch.rand(23, s.heads) < 0.7],
    ),
    Case(
        "softcap",
        ScoreProgram(["mul", const(5.0), ["tanh", ["div", S, const(5.0)]]]),
        lambda s, at: 5.0 * (s / 5.0).tanh(),
    ),
    Case(
        "clamp",
        ScoreProgram(["minimum", ["maximum", S, const(-1.0)], const(1.0)]),
        lambda s, at: s.maximum(torch.full_like(s, -1.0)).minimum(torch.full_like(s, 1.0)),
    ),
    Case(
        "temperature",
        ScoreProgram(["div", S, ["add", const(1), ["exp", ["input", 0]]]]),
        lambda s, at, t: s / (1 + t.exp()),
        randn(1, -1, 1, 1),
    ),
    Case(
        "shared parts",
        ScoreProgram(
            ["mul", ["tanh", ["mul", S, ["input", 0]]], ["sigmoid", ["mul", S, ["input", 0]]]],
            factor=["tanh", ["input", 0]],
        ),
        lambda s, at, t: ((s * t).tanh() * (s * t).sigmoid(), t.tanh(), None),
        randn(1, -1, 1, 1),
    ),
    Case(
        "index shared with the scores",
        ScoreProgram(
            [
                "add",
                ["mul", S, ["pow", ["input", 0], const(2)]],
                ["gather", 1, ["cast", "int64", ["pow", ["input", 0], const(2)]]],
            ]
        ),
        lambda s, at, t, table: s * t.square() + table[t.square().long()],
        lambda s: [torch.rand(1, s.heads, 1, 1) * 2 + 0.1, torch.randn(5)],
    ),
    Case(
        "sink",
        ScoreProgram(["mul", S, const(0.5)], sink=const(0)),
        lambda s, at: (s * 0.5, None, torch.zeros_like(s[..., :1])),
    ),
    Case(
        "sink of each head",
        ScoreProgram(where(SAME_DOCUMENT, S), sink=["input", 2]),
        lambda s, at, q, k, sink: (hidden(q == k, s), None, sink),
        lambda s: [*documents(s), torch.randn(1, s.heads, 1, 1)],
    ),
    Case(
        "sink from a table",
        ScoreProgram(S, sink=["mul", ["gather", 0, H], const(2)]),
        lambda s, at, table: (s, None, table.view(1, -1, 1, 1) * 2),
        lambda s: [torch.randn(s.heads)],
    ),
    Case(
        "head mask",
        ScoreProgram(S, factor=["gather", 0, H]),
        lambda s, at, mask: (s, mask.view(1, -1, 1, 1), None),
        lambda s: [torch.randn(s.heads)],
    ),
    Case(
        "key factor",
        ScoreProgram(["mul", S, const(0.5)], factor=["input", 0]),
        lambda s, at, factor: (s * 0.5, factor, None),
        randn(-1, 1, 1, -1),
    ),
    Case(
        "mask applied again",
        ScoreProgram(where(SAME_DOCUMENT, S), factor=SAME_DOCUMENT),
        lambda s, at, q, k: (hidden(q == k, s), (q == k).to(s.dtype), None),
        documents,
    ),
    Case(
        "everything",
        ScoreProgram(
            where(CAUSAL, ["add", ["mul", const(3.0), ["tanh", S]], ["gather", 0, H, DISTANCE]]),
            factor=["input", 1],
            sink=["input", 2],
            upper=["number", 0],
        ),
        lambda s, at, table, factor, sink: (
            hidden(at.j <= at.i + 2, 3.0 * s.tanh() + table[at.h, (at.j - at.i + 8).clamp(0, 16)]),
            factor,
            sink,
        ),
        lambda s: [
            torch.randn(s.heads, 17),
            torch.randn(1, s.heads, s.q_len, 1),
            torch.randn(s.batch, s.heads, s.q_len, 1),
        ],
        lambda s: [2],
    ),
]
CASE = {case.name: case for case in CASES}

USUAL = Sizes(2, 4, 2, 37, 53, 24, 40)
SIZES = [
    USUAL,
    Sizes(1, 3, 1, 1, 17, 40, 8),  # one query
    Sizes(2, 2, 2, 41, 29, 8, 8),
    Sizes(1, 4, 1, 23, 1, 16, 24),  # one key
    Sizes(3, 3, 3, 16, 8, 5, 3),  # whole blocks; batch == heads
]


def naive(
    case: Case,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *inputs: Tensor,
    kept: Tensor | None = None,
    held: bool = False,
) -> Tensor:
    """held: without the gradient of the softmax's denominator."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    raw = query @ key.mT
    found = case.dense(raw, At.scores(query, key), *inputs)
    scores, factor, sink = found if isinstance(found, tuple) else (found, None, None)
    empty = (scores == -INF).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype).expand(*scores.shape[:3], 1)], -1)
    if held:
        weights = scores.softmax(-1).detach() * (1 + torch.where(scores == -INF, 0.0, scores - scores.detach()))
    else:
        weights = scores.softmax(-1)
    weights = weights[..., : key.shape[2]].masked_fill(empty, 0.0)
    weights = weights if factor is None else weights * factor
    return (weights if kept is None else weights * kept.to(weights.dtype)) @ value


def operator(
    case: Case, *tensors: Tensor, numbers: Sequence[int], seed: Tensor | None = None, p: float = 0.0
) -> Tensor:
    query, key, value, *inputs = tensors
    return chunked(query, key, value, inputs, numbers, seed, p, case.program.dumps(), False)[0]


def on_blocks(case: Case, s: Sizes, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The outputs and every gradient of chunked's own functions, with dropout."""
    query, key, value, *inputs = tensors
    how = Operands(query, key, value, inputs, case.numbers(s), torch.tensor([3]), 0.25, case.program.dumps())
    outputs = attend(how)
    grad = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1)).to(query.dtype)
    *gradients, of_inputs = attend_backward(how, outputs, grad, None, [True] * len(inputs))
    return [*outputs, *gradients, *of_inputs]


def drawn(case: Case, s: Sizes, dtype: torch.dtype) -> list[Tensor]:
    """query, key, value and the inputs."""
    query = torch.randn(s.batch, s.heads, s.q_len, s.head_dim)
    key = torch.randn(s.batch, s.kv_heads, s.kv_len, s.head_dim)
    value = torch.randn(s.batch, s.kv_heads, s.kv_len, s.value_dim)
    return [x.to(dtype) if x.is_floating_point() else x for x in (query, key, value, *case.inputs(s))]


def results(run: Callable[..., Tensor], tensors: Sequence[Tensor], grad_out: Tensor) -> dict[str, Tensor]:
    names = ["query", "key", "value", *(f"input {n}" for n in range(len(tensors) - 3))]
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    out = run(*leaves)
    wanted = {name: x for name, x in zip(names, leaves, strict=True) if x.requires_grad}
    gradients = torch.autograd.grad(out, list(wanted.values()), grad_out.to(out.dtype), allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted.values(), gradients, strict=True)]
    return {"out": out.detach(), **dict(zip(wanted, zeros, strict=True))}


def assert_near(got: dict[str, Tensor], dense: Callable[..., Tensor], tensors: Sequence[Tensor], grad: Tensor) -> None:
    """`got` is about as near to float64 as `dense`, a partial of `naive`, is in the same dtype."""
    dtype = tensors[0].dtype
    wide = [x.double() if x.is_floating_point() else x for x in tensors]
    # Against itself, float64 is off by nothing: what float32 is off, in its roundings, says what to expect.
    less = torch.float32 if dtype == torch.float64 else dtype
    narrow = [x.to(less) if x.is_floating_point() else x for x in tensors]
    exact, usual = results(dense, wide, grad.double()), results(dense, narrow, grad.to(less))
    exact_of_usual = results(
        dense, [x.double() if x.is_floating_point() else x for x in narrow], grad.to(less).double()
    )
    # A gradient through a softmax is the difference of two: 0 for one key, where each of the two is not.
    held = results(partial(dense, held=True), wide, grad.double())
    assert got.keys() == exact.keys()
    for name, reference in exact.items():
        assert got[name].dtype == tensors[0].dtype and got[name].shape == reference.shape, name
        assert got[name].isfinite().all(), name
        if not reference.numel():
            continue
        eps = torch.finfo(dtype).eps
        error = (got[name] - reference).abs().max().item()
        off = (usual[name] - exact_of_usual[name]).abs().max().item() * eps / torch.finfo(less).eps
        largest = max(reference.abs().max().item(), held[name].abs().max().item())
        allowed = TIMES_EAGER * off + ROUNDINGS * eps * largest
        assert error <= allowed, f"{name}: {error:.3g}, allowed {allowed:.3g}"


def check(case: Case, s: Sizes, dtype: torch.dtype = torch.float32) -> None:
    tensors = drawn(case, s, dtype)
    grad_out = torch.randn(s.batch, s.heads, s.q_len, s.value_dim).to(dtype)
    got = results(lambda *x: operator(case, *x, numbers=case.numbers(s)), tensors, grad_out)
    assert_near(got, partial(naive, case), tensors, grad_out)
