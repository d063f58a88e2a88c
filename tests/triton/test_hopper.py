"""The Hopper kernels: interpreted, against dense float64; and compiled for sm_90a, within budgets.

Each in a process of its own: Triton's interpreter is chosen before Triton is imported. It computes bfloat16 wrongly; on
a GPU tests/gpu has it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_fuse.kernels import KERNELS
from attn_fuse.kernels.chunked.kernel import CHUNKED
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.triton.flash.hopper import TRITON_FLASH_HOPPER
from attn_fuse.picker import cost
from attn_fuse.picker import pick as picker
from attn_fuse.picker.evidence import Comparison
from attn_fuse.report import collecting
from tests.harness import ROUNDINGS, TIMES_EAGER, assert_fused, compiled, tensors
from tests.triton.interpreted import INTERPRETED, interpreted, run_interpreted
from tests.triton.messages import mismatches
from tests.triton.test_flash_compile import TRITON
from tests.triton.test_flash_compile import compiled as compiled_flash

pytestmark = pytest.mark.thorough

# Of one SM, in bytes and registers of a thread, by what the chip and PTX allow.
SHARED_MEMORY, REGISTERS = 232_448, 255


def test_in_a_process_that_interprets() -> None:
    run_interpreted(__file__)


# ---- compiled


# By width of a row and case: of each kernel the most instructions that a whole block may take for an element. As
# compiled by Triton 3.6, and a tenth more.
PRODUCTS = {
    (64, "plain"): {"forward": 8.0, "query": 8.2, "key_value": 11.5},
    (64, "grouped"): {"forward": 8.1, "query": 8.3, "key_value": 12.2},
    (64, "dropout"): {"forward": 12.4, "query": 12.1, "key_value": 16.9},
    (128, "plain"): {"forward": 8.5, "query": 8.6, "key_value": 17.1},
    (128, "grouped"): {"forward": 8.6, "query": 8.6, "key_value": 18.6},
    (128, "dropout"): {"forward": 13.0, "query": 15.1, "key_value": 26.0},
    (256, "plain"): {"forward": 15.6, "query": 19.2, "key": 26.5, "value": 12.4},
    (256, "dropout"): {"forward": 19.9, "query": 23.2, "key": 30.7, "value": 19.5},
    (128, "softcap"): {"forward": 34.8, "query": 39.7, "key_value": 54.1},
    (128, "alibi"): {"forward": 12.8, "query": 15.3, "key_value": 25.3},
    (128, "bias"): {"forward": 19.0, "query": 17.7, "key_value": 31.3},
    (128, "documents"): {"forward": 17.9, "query": 20.8, "key_value": 28.0},
}
# Random numbers, a tanh, distances and reads take longer than the products.
WAITING = {
    (64, "dropout"): {"forward"},
    (128, "softcap"): {"forward", "query", "key_value"},
    (128, "bias"): {"forward"},
    (128, "documents"): {"forward"},
}
# Read by pointers, since it would spill.
BY_POINTERS = {
    (256, "plain"): {"key"},
    (64, "dropout"): {"key_value"},
    (128, "dropout"): {"key_value"},
    (256, "dropout"): {"key", "value"},
    (128, "alibi"): {"key_value"},
    (128, "bias"): {"key_value"},
    (128, "documents"): {"key_value"},
}
USUAL = {(64, "plain"), (128, "plain"), (256, "plain"), (128, "documents")}


@pytest.mark.skipif(INTERPRETED, reason="the compiler runs where the interpreter does not")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("head_dim", "case"), [pytest.param(*x, marks=() if x in USUAL else pytest.mark.slow) for x in PRODUCTS]
)
def test_compiled_for_hopper(head_dim: int, case: str) -> None:
    """Nothing spills, products are those of warp groups, and what the copy engine sends has its room and barrier."""
    lines = compiled_flash(90, "bfloat16", head_dim, case, "descriptors")
    found = {line["kernel"]: line for line in lines if line["kernel"] not in ("statistics", "input")}
    budget = PRODUCTS[head_dim, case]
    assert found.keys() == budget.keys()
    for name, of in found.items():
        assert of["stack"] == of.get("LDL", 0) == of.get("STL", 0) == 0, name
        assert of["HGMMA"] > 0 and not of.get("HMMA"), name
        assert of["shared"] <= SHARED_MEMORY, name
        assert of["registers"] <= REGISTERS, name
        if name in BY_POINTERS.get((head_dim, case), ()):
            assert "descriptors" not in of, name
        else:
            assert of["UTMALDG"] > 0 and of["messages"] >= of["descriptors"] >= 3 and not of["wrong"], (name, of)
        if TRITON == (3, 6):
            assert of["per_element"] <= budget[name], (name, of)
            assert of["bound_by_issue"] <= 1.0 or name in WAITING.get((head_dim, case), ()), (name, of)


BARRIER, TILE = (
    "ttng.barrier_expect %bar, {bytes}, %true : !ttg.memdesc<1xi64>",
    "!ttg.memdesc<{shape}xbf16, #s, mutable>",
)
COPY = "ttng.async_tma_copy_global_to_local %query[%b, %h, %i, %d] %q, %bar, %true : !tt.tensordesc<x> -> " + TILE


@pytest.mark.parametrize(
    ("expected", "shape", "box", "wrong"),
    (
        (32768, "128x128", (1, 1, 128, 64), []),
        # A held tile that warp groups share: each half is 64 rows, and its descriptor has the box of all.
        (16384, "64x128", (1, 1, 128, 64), ["32768 bytes are sent where there is room for 16384", "waits for -16384"]),
        (32768, "64x128", (1, 1, 64, 64), ["waits for 16384 bytes that do not arrive"]),
        (None, "128x128", (1, 1, 128, 64), ["no barrier waits"]),
    ),
)
def test_messages_that_do_not_fit_are_found(
    expected: int | None, shape: str, box: tuple[int, ...], wrong: list[str]
) -> None:
    lines = [BARRIER.format(bytes=expected)] if expected is not None else []
    count, found = mismatches("\n".join([*lines, COPY.format(shape=shape)]), {"query": box})
    assert count == 1 and len(found) == len(wrong)
    assert all(words in said for words, said in zip(wrong, found, strict=True)), found


# ---- interpreted


@dataclass(frozen=True)
class Case:
    """lower, upper: bounds of j - i. cap: of the scores, 0 for none."""

    heads: tuple[int, int] = (2, 2)
    lengths: tuple[int, int] = (40, 40)
    dims: tuple[int, int] = (16, 16)
    lower: int | None = None
    upper: int | None = None
    cap: float = 0.0

    @property
    def scale(self) -> float:
        return self.dims[0] ** -0.5

    @property
    def program(self) -> ScoreProgram:
        tree: list[Any] = ["mul", ["score"], ["const", self.scale]]
        if self.cap:
            tree = ["mul", ["tanh", ["div", tree, ["const", self.cap]]], ["const", self.cap]]
        apart = ["sub", ["j"], ["i"]]
        seen = [["ge", apart, ["const", self.lower]]] if self.lower is not None else []
        seen += [["le", apart, ["const", self.upper]]] if self.upper is not None else []
        if seen:
            tree = ["where", ["and", *seen], tree, ["const", -math.inf]]
        bounds = {name: ["const", n] for name, n in (("lower", self.lower), ("upper", self.upper)) if n is not None}
        return ScoreProgram(tree, **bounds)  # type: ignore[arg-type]

    def dense(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """0 for a query that sees no key."""
        groups = self.heads[0] // self.heads[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.mT * self.scale
        if self.cap:
            scores = torch.tanh(scores / self.cap) * self.cap
        apart = torch.arange(self.lengths[1]) - torch.arange(self.lengths[0])[:, None]
        keep = torch.ones_like(apart, dtype=torch.bool)
        if self.lower is not None:
            keep &= apart >= self.lower
        if self.upper is not None:
            keep &= apart <= self.upper
        scores = scores.masked_fill(~keep, -math.inf)
        seen = keep.any(-1, keepdim=True)
        return torch.softmax(torch.where(seen, scores, 0.0), -1).mul(seen) @ value


CASES = [
    Case(upper=0),
    Case(upper=0, lengths=(128, 128), dims=(64, 64)),
    Case(upper=0, lengths=(257, 257)),
    Case(),
    Case(lengths=(1, 333), upper=332, heads=(4, 1)),
    Case(lengths=(131, 77), heads=(4, 2)),
    Case(lengths=(77, 131), upper=54, dims=(80, 40)),
    Case(lengths=(150, 150), lower=-20, upper=3, dims=(24, 72)),
    Case(lengths=(300, 300), lower=-130, upper=0, heads=(2, 1)),
    Case(lengths=(100, 30), upper=-40),
    Case(lengths=(30, 100), lower=60),
    Case(lengths=(200, 200), lower=-(10**12), upper=10**12),
    Case(lengths=(140, 140), dims=(256, 256), upper=0),
    Case(lengths=(5, 1), dims=(8, 128)),
    Case(lengths=(130, 130), upper=0),
    Case(lengths=(140, 140), upper=0, cap=2.0),
    Case(lengths=(77, 131), lower=-9, cap=2.0, dims=(40, 24)),
    Case(lengths=(30, 20), dims=(12, 10)),
]


def run(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from attn_fuse.kernels.triton.flash.op import triton_flash_hopper

    return triton_flash_hopper(query, key, value, [], [], None, None, None, 0.0, case.program.dumps(), False)[0]


def operands(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    (heads, kv_heads), (q_len, kv_len), (dim, value_dim) = case.heads, case.lengths, case.dims
    shapes = [(2, heads, q_len, dim), (2, kv_heads, kv_len, dim), (2, kv_heads, kv_len, value_dim)]
    return tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)


def assert_near(case: Case, got: Tensor, given: tuple[Tensor, ...], grad_out: Tensor) -> None:
    """Output and gradients are about as near to float64 as the dense computation in the same dtype."""
    dtype = given[0].dtype
    exact, usual = (
        [out, *torch.autograd.grad(out, x, grad_out.to(out.dtype))]
        for x in ([t.detach().to(d).requires_grad_() for t in given] for d in (torch.float64, dtype))
        for out in (case.dense(*x),)
    )
    found = [got, *torch.autograd.grad(got, given, grad_out)]
    largest = max(x.abs().max().item() for x in exact)
    for name, result, wanted, written in zip(("out", "dq", "dk", "dv"), found, exact, usual, strict=True):
        assert result.dtype == dtype and result.shape == wanted.shape
        error, own = ((x.double() - wanted).abs().max().item() for x in (result, written))
        allowed = TIMES_EAGER * own + ROUNDINGS * torch.finfo(dtype).eps * largest
        assert error <= allowed, f"{name} is {error:.3g} off, written {own:.3g}, allowed {allowed:.3g}"


@interpreted
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case, dtype: torch.dtype) -> None:
    given = operands(case, dtype)
    got = run(case, *given)
    assert got.transpose(1, 2).is_contiguous()
    assert_near(case, got, given, torch.randn_like(got))


@interpreted
def test_any_strides() -> None:
    """Steps of 0, a last dimension that is not dense, an odd address: read by pointers, not by the copy engine."""
    case = Case(upper=0, heads=(4, 2))
    query, key, value = (x.detach() for x in operands(case, torch.float32))
    odd = torch.empty(value.numel() + 1)[1:].view(value.shape).copy_(value)
    given = (
        query.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
        key.mT.contiguous().mT.requires_grad_(),
        odd.requires_grad_(),
    )
    got = run(case, *given)
    for grad_out in (torch.full((), 0.7).expand(got.shape), torch.zeros(()).expand(got.shape)):
        assert_near(case, run(case, *given), given, grad_out)


@interpreted
def test_nothing_is_read_beyond_the_end() -> None:
    """Of tensors inside larger ones that hold NaN everywhere else."""
    case = Case(lengths=(40, 52), heads=(4, 2), dims=(24, 24))

    def inside(x: Tensor) -> Tensor:
        whole = torch.full((x.shape[0] + 1, x.shape[1] + 1, x.shape[2] + 9, x.shape[3] + 8), math.nan)
        whole[: x.shape[0], : x.shape[1], : x.shape[2], : x.shape[3]] = x
        return whole[: x.shape[0], : x.shape[1], : x.shape[2], : x.shape[3]].detach().requires_grad_()

    given = tuple(inside(x.detach()) for x in operands(case, torch.float32))
    got = run(case, *given)
    assert_near(case, got, given, torch.randn_like(got))


@interpreted
@pytest.mark.parametrize("shape", ((0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0)), ids=str)
def test_empty(shape: tuple[int, int, int, int]) -> None:
    batch, heads, q_len, kv_len = shape
    sizes = ((batch, heads, q_len, 16), (batch, heads, kv_len, 16), (batch, heads, kv_len, 16))
    given = tuple(torch.randn(size).requires_grad_() for size in sizes)
    got = run(Case(), *given)
    assert got.shape == given[0].shape and not got.any()
    assert not any(x.any() for x in torch.autograd.grad(got, given, torch.ones_like(got)))


@interpreted
def test_nan_and_infinity_come_out_as_nan() -> None:
    case = Case(upper=0)
    for value in (math.nan, math.inf):
        query, key, values = (x.detach() for x in operands(case, torch.float32))
        key[0, 0, 7] = value
        got = run(case, query, key, values)
        assert got[0, 0, 7:].isnan().any(-1).all() and got[0, 0, :7].isfinite().all() and got[1].isfinite().all()


@interpreted
@pytest.mark.parametrize(
    ("shapes", "words"),
    (
        (((1, 2, 4, 16), (1, 2, 4, 16), (1, 2, 5, 16)), "do not fit"),
        (((1, 3, 4, 16), (1, 2, 4, 16), (1, 2, 4, 16)), "no multiple"),
        (((1, 2, 4, 264), (1, 2, 4, 264), (1, 2, 4, 16)), "too large"),
    ),
)
def test_refused_shapes(shapes: tuple[tuple[int, ...], ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(Case(), *map(torch.randn, shapes))


@interpreted
def test_reads_through_descriptors_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_fuse.kernels.triton.flash import launch as flash

    made: list[tuple[int, ...]] = []
    describe = flash.described
    monkeypatch.setattr(flash, "described", lambda x, *block: made.append(block) or describe(x, *block))
    case = Case(dims=(24, 40))
    given = operands(case, torch.float16)
    got = run(case, *given)
    assert made == [(128, 32), (64, 32), (64, 64)]
    torch.autograd.grad(got, given, torch.randn_like(got))
    # grad_out, query, key, value and statistics, of two kernels.
    assert len(made) == 3 + 2 * 5
    made.clear()
    got = run(case, given[0], given[1].mT.contiguous().mT, given[2])
    torch.autograd.grad(got, given, torch.ones(()).half().expand(got.shape))
    assert not made


# ---- through the backend


def attention(query: Tensor, key: Tensor, value: Tensor, *more: Tensor, window: int = 0, cap: float = 0.0) -> Tensor:
    scores = query @ key.transpose(-2, -1) * 0.2
    if cap:
        scores = cap * torch.tanh(scores / cap)
    for bias in more:
        scores = scores + bias
    apart = torch.arange(key.shape[-2]) - torch.arange(query.shape[-2])[:, None]
    keep = (apart <= 0) & (apart > -window) if window else apart <= 0
    return torch.softmax(scores.masked_fill(~keep, -math.inf), -1) @ value


@interpreted
@pytest.mark.parametrize("how", ({}, {"window": 9}, {"cap": 3.0}), ids=str)
def test_through_the_backend(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picker, "KERNELS", (TRITON_FLASH_HOPPER,))
    outcome = assert_fused(lambda q, k, v: attention(q, k, v, **how), *tensors(2, 2, 37, 24), inner="aot_eager")
    assert "triton_flash_hopper" in outcome.after, outcome.after


@interpreted
def test_bias_and_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picker, "KERNELS", (TRITON_FLASH_HOPPER,))
    given = (*tensors(2, 2, 37, 24), torch.randn(2, 37, 37))
    assert_fused(attention, *given)
    with collecting() as graphs:
        compiled(lambda q, k, v: torch.dropout(torch.softmax(q @ k.mT, -1), 0.1, True) @ v)(*tensors(2, 2, 9, 16))
    ((site,),) = ([*graph.sites] for graph in graphs)
    assert site.fused


@interpreted
@pytest.mark.parametrize(
    ("program", "reason"),
    (
        (
            lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v[..., :3],
            "takes a value_dim of a multiple of 16 bytes, not 3",
        ),
        (
            lambda q, k, v: torch.softmax(q[..., :6] @ k[..., :6].mT, -1) @ v,
            "takes a head_dim of a multiple of 16 bytes",
        ),
    ),
)
def test_declined(program: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picker, "KERNELS", (TRITON_FLASH_HOPPER,))
    with collecting() as graphs:
        compiled(program)(*(x.requires_grad_() for x in tensors(2, 2, 9, 16)))
    ((site,),) = ([*graph.sites] for graph in graphs)
    assert any(reason in said for said in site.why_not["triton_flash_hopper"]), site


def test_not_tried_where_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a self-check, however fast an estimate promises it to be; where everything is fused, it is asked last."""
    assert KERNELS[-1] is TRITON_FLASH_HOPPER and TRITON_FLASH_HOPPER.needs_evidence
    new = dataclasses.replace(CHUNKED, name="new", needs_evidence=True)
    monkeypatch.setattr(picker, "KERNELS", (new,))
    monkeypatch.setattr(cost, "estimated", lambda *_: Comparison(0.1, "estimated", is_estimate=True))
    outcomes = {}
    for pick in ("fastest", "fused"):
        torch._dynamo.reset()
        with collecting() as graphs:
            compiled(attention, pick=pick, try_unmeasured=False)(*tensors(2, 2, 37, 24))
        ((outcomes[pick],),) = (graph.sites for graph in graphs)
    assert not outcomes["fastest"].fused and outcomes["fused"].fused
    assert "was not measured on such a device" in outcomes["fastest"].why_not["new"][0]
