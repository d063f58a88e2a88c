"""The chunked operators against dense float64 autograd, forward and every gradient, over many small blocks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attn_fuse.kernels.chunked import attend as chunked_blocks
from attn_fuse.kernels.chunked import plan as chunked_plan
from attn_fuse.kernels.chunked.op import chunked, chunked_backward
from attn_fuse.kernels.chunked.workers import alone
from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.program import ScoreProgram
from tests.dropout import check_distribution, check_seed, kept_weights, seeded
from tests.graph.chunked_cases import (
    CASE,
    CASES,
    INF,
    SIZES,
    USUAL,
    Case,
    S,
    Sizes,
    assert_near,
    biased,
    check,
    const,
    drawn,
    naive,
    operator,
    results,
    where,
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_plan, "QUERY_BLOCK", 16)
    monkeypatch.setattr(chunked_plan, "MOST_QUERIES", 16)
    monkeypatch.setattr(chunked_plan, "KEY_BLOCK", 8)
    monkeypatch.setattr(chunked_plan, "COMPILE_FROM", math.inf)


@pytest.mark.parametrize("s", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_sizes(case: Case, s: Sizes) -> None:
    check(case, s)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_dtypes(case: Case, dtype: torch.dtype) -> None:
    if case.wide_only and dtype.itemsize < 4:
        pytest.skip("written densely, this fill is no number of the dtype")
    check(case, USUAL, dtype)


@pytest.mark.parametrize("fast", [False, True], ids=["in float32", "in bfloat16"])
@pytest.mark.parametrize("name", ["plain", "bias", "softcap", "everything"])
def test_products_of_bfloat16(name: str, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_plan, "_multiplies_bfloat16", lambda device: fast)
    check(CASE[name], USUAL, torch.bfloat16)


def test_scores_of_bfloat16_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of about 70: rounded to bfloat16, as in the program as written, each would be off by up to 0.25."""
    monkeypatch.setattr(chunked_plan, "_multiplies_bfloat16", lambda device: True)
    tensors = [(3 * torch.randn(1, 2, 64, 64)).bfloat16() for _ in range(3)]
    program = CASE["plain"].program.dumps()
    got = chunked_blocks.attend(Operands(*tensors, [], [], None, 0.0, program))[0]
    exact = naive(CASE["plain"], *(x.double() for x in tensors))
    written = naive(CASE["plain"], *tensors)
    assert (got - exact).abs().mean() < (written - exact).abs().mean() / 3


@pytest.mark.parametrize("blocks", [(64, 64), (7, 5), (1, 64), (64, 1)], ids=str)
def test_block_sizes(blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_plan, "QUERY_BLOCK", blocks[0])
    monkeypatch.setattr(chunked_plan, "MOST_QUERIES", blocks[0])
    monkeypatch.setattr(chunked_plan, "KEY_BLOCK", blocks[1])
    check(CASE["everything"], USUAL)


def test_blocks_keep_to_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_plan, "KEY_BLOCK", 128)
    monkeypatch.setattr(chunked_plan, "MOST_QUERIES", 128)
    monkeypatch.setattr(chunked_plan, "ELEMENTS_PER_THREAD", 2 * 128 * 128 // torch.get_num_threads())
    query, key, value = torch.randn(3, 2, 4, 300, 8)
    with Largest() as seen:
        chunked_blocks.attend(Operands(query, key, value, [], [], None, 0.0, CASE["plain"].program.dumps()))
    assert seen.elements == 2 * 128 * 128


@pytest.mark.parametrize("name", ["plain", "bias", "everything"])
def test_strides(name: str) -> None:
    """Transposed tensors, one head for all, a mask's expanded input, and a gradient that is one number."""
    case, s = CASE[name], replace(USUAL, kv_heads=4, value_dim=24)
    query, key, value, *inputs = drawn(case, s, torch.float32)
    transposed = query.transpose(1, 2).contiguous().transpose(1, 2)
    one_head = key[:, :1].expand(-1, s.kv_heads, -1, -1)
    flipped = value.mT.contiguous().mT
    inputs = [x[:1].expand(x.shape) for x in inputs]
    tensors = [transposed, one_head, flipped, *inputs]
    grad_out = torch.full((), 0.7).expand(s.batch, s.heads, s.q_len, s.value_dim)
    got = results(lambda *x: operator(case, *x, numbers=case.numbers(s)), tensors, grad_out)
    assert_near(got, partial(naive, case), tensors, grad_out)


@pytest.mark.parametrize("with_sink", [False, True], ids=["no sink", "sink"])
def test_queries_that_see_no_key(with_sink: bool) -> None:
    keep = torch.ones(1, 1, 19, 1, dtype=torch.bool)
    keep[:, :, ::3] = False
    program = ScoreProgram(where(["input", 0], S), sink=const(0.5) if with_sink else None).dumps()
    query, key, value = (x.requires_grad_() for x in torch.randn(3, 1, 2, 19, 8).unbind(0))
    out, row_max, row_sum, *_ = chunked(query, key, value, [keep], [], None, 0.0, program, False)
    dquery, dkey, dvalue = torch.autograd.grad(out.sum(), [query, key, value])
    assert (out[:, :, ::3] == 0).all() and (dquery[:, :, ::3] == 0).all()
    assert all(x.isfinite().all() for x in (out, dquery, dkey, dvalue))
    lse = row_max + row_sum.log()
    expected = torch.full_like(lse[:, :, ::3], 0.5 if with_sink else -INF)
    torch.testing.assert_close(lse[:, :, ::3], expected)
    assert not row_max.requires_grad and not row_sum.requires_grad


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min])
def test_a_finite_fill_gives_the_mean(fill: float) -> None:
    """log(kv_len) is lost beside the fill, so that a backward from the log-sum-exp alone would be kv_len times off."""
    program = ScoreProgram(where(const(False), S, fill)).dumps()
    query, key, value = (x.requires_grad_() for x in torch.randn(3, 1, 2, 19, 8).unbind(0))
    out = chunked(query, key, value, [], [], None, 0.0, program, False)[0]
    grad_out = torch.randn(out.shape)
    dquery, dkey, dvalue = torch.autograd.grad(out, [query, key, value], grad_out)
    torch.testing.assert_close(out, value.mean(2, keepdim=True).expand_as(out))
    torch.testing.assert_close(dvalue, (grad_out.sum(2, keepdim=True) / 19).expand_as(dvalue))
    assert (dquery == 0).all() and (dkey == 0).all()


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_not_a_number_stays_one(bad: float) -> None:
    bias = torch.zeros(1, 1, 19, 23)
    bias[0, 0, 5, 20] = bad
    tensors = [torch.randn(1, 1, n, 8) for n in (19, 23, 23)]
    out = operator(biased("", -1, -1, -1, -1), *tensors, bias, numbers=[])
    assert out[:, :, 5].isnan().all()
    assert out[:, :, :5].isfinite().all() and out[:, :, 6:].isfinite().all()


@pytest.mark.parametrize("s", [replace(USUAL, q_len=0), replace(USUAL, kv_len=0), replace(USUAL, batch=0)], ids=str)
@pytest.mark.parametrize("name", ["bias", "sink of each head", "everything"])
def test_empty(name: str, s: Sizes) -> None:
    case = CASE[name]
    tensors = drawn(case, s, torch.float32)
    grad_out = torch.randn(s.batch, s.heads, s.q_len, s.value_dim)
    got = results(lambda *x: operator(case, *x, numbers=case.numbers(s)), tensors, grad_out)
    assert got["out"].shape == grad_out.shape
    assert all((x == 0).all() for x in got.values())


def with_dropout(query: Tensor, key: Tensor, value: Tensor, seed: Tensor, p: float) -> Tensor:
    return chunked(query, key, value, [], [], seed, p, ScoreProgram(const(0.0)).dumps(), False)[0]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_distribution(p: float) -> None:
    check_distribution(with_dropout, p)


def test_dropout_depends_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_other_blocks(*tensors: Any) -> Tensor:
        monkeypatch.setattr(chunked_plan, "QUERY_BLOCK", 13)
        monkeypatch.setattr(chunked_plan, "MOST_QUERIES", 13)
        monkeypatch.setattr(chunked_plan, "KEY_BLOCK", 64)
        return with_dropout(*tensors)

    check_seed(with_dropout, with_other_blocks)


@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("name", ["plain", "sink of each head", "everything"])
def test_dropout_against_its_own_mask(name: str, p: float) -> None:
    case, s = CASE[name], USUAL
    tensors = drawn(case, s, torch.float32)
    kept = kept_weights(with_dropout, seeded(3), p, s.batch, s.heads, s.q_len, s.kv_len)
    kept = torch.where(kept > 0, 1 / (1 - p) if p < 1 else 0.0, 0.0).double()
    grad_out = torch.randn(s.batch, s.heads, s.q_len, s.value_dim)
    got = results(lambda *x: operator(case, *x, numbers=case.numbers(s), seed=seeded(3), p=p), tensors, grad_out)
    assert_near(got, partial(naive, case, kept=kept), tensors, grad_out)
    assert p < 1 or all((x == 0).all() for x in got.values())


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *sizes])
        return found


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_plan, "QUERY_BLOCK", 128)
    monkeypatch.setattr(chunked_plan, "MOST_QUERIES", 128)
    monkeypatch.setattr(chunked_plan, "KEY_BLOCK", 128)
    program = CASE["everything"].program.dumps()

    def largest(length: int) -> int:
        query, key, value = torch.randn(3, 1, 1, length, 16).unbind(0)
        inputs = [torch.randn(1, 17), torch.randn(1, 1, length, 1), torch.randn(1, 1, length, 1)]
        how = (query, key, value, inputs, [2], seeded(1), 0.1)
        with alone(), Largest() as seen:
            outputs = chunked_blocks.attend(Operands(*how, program))
            chunked_blocks.attend_backward(Operands(*how, program), outputs, torch.randn(query.shape), None, [True] * 3)
        return seen.elements

    assert largest(8192) <= 2 * largest(4096)


def test_only_visible_blocks_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[torch.Size] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.bmm.default:
                products.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    # In a window of 5, queries 16 to 31 see keys 12 to 31.
    monkeypatch.setattr(chunked_plan, "MOST_QUERIES", 0)
    monkeypatch.setattr(chunked_plan, "QUERY_BLOCK", 32)
    program = CASE["window"].program
    with Products():
        chunked_blocks.attend(Operands(*torch.randn(3, 1, 1, 64, 8), [], [], None, 0.0, program.dumps()))
    assert len(products) == 2 * (2 + 3 * 3)


class NothingFromTheHost(TorchFunctionMode):
    """Fails where a tensor is made of Python numbers, which are copied to the device, and the host waits for that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy), func
        return func(*args, **(kwargs or {}))


class OneDevice(TorchDispatchMode):
    """Fails where an operation takes or gives a tensor of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in pytree.tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        assert all(x.device.type == "meta" for x in tensors), func
        return out


@pytest.mark.parametrize("p", [pytest.param(0.0, marks=pytest.mark.thorough), 0.3])
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=pytest.mark.thorough if n % 6 else ()) for n, c in enumerate(CASES)]
)
def test_the_host_waits_for_nothing(case: Case, p: float) -> None:
    """So that a CUDA graph can hold it; on a device without values, where to look at one raises."""
    query, key, value, *inputs = (x.to("meta") for x in drawn(case, USUAL, torch.float32))
    seed = torch.empty(1, dtype=torch.int64, device="meta") if p else None
    grad_out = torch.empty(*query.shape[:3], value.shape[3], device="meta")
    how, program = (query, key, value, inputs, case.numbers(USUAL), seed, p), case.program.dumps()
    with NothingFromTheHost(), OneDevice():
        outputs = chunked_blocks.attend(Operands(*how, program))
        wanted = [x.is_floating_point() for x in inputs]
        gradients = chunked_blocks.attend_backward(Operands(*how, program), outputs, grad_out, None, wanted)
    assert outputs[0].shape == grad_out.shape and gradients[0].shape == query.shape


@pytest.mark.parametrize("name", ["causal", "relative table", "everything"])
def test_opcheck(name: str) -> None:
    case, s = CASE[name], Sizes(2, 2, 1, 19, 17, 8, 4)
    query, key, value, *inputs = (x.requires_grad_(x.is_floating_point()) for x in drawn(case, s, torch.float32))
    how = (query, key, value, inputs, case.numbers(s), seeded(1), 0.2, case.program.dumps())
    for centred in (False, True):
        torch.library.opcheck(chunked, (*how, centred))


def test_opcheck_of_the_backward() -> None:
    case, s = CASE["everything"], Sizes(2, 2, 1, 19, 17, 8, 4)
    query, key, value, *inputs = drawn(case, s, torch.float32)
    how = (query, key, value, inputs, case.numbers(s), seeded(1), 0.2)
    program = case.program.dumps()
    for centred in (False, True):
        outputs = chunked(*how, program, centred)
        grad_share = torch.randn(outputs[-1].shape) if centred else None
        args = (torch.randn(outputs[0].shape), grad_share, *how, *outputs, program, [True, False, True])
        torch.library.opcheck(chunked_backward, args)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_training_step_compiles(name: str) -> None:
    case = CASE[name]

    text = case.program.dumps()

    def program(query: Tensor, key: Tensor, value: Tensor, *inputs: Tensor) -> Tensor:
        numbers = [key.shape[2] - query.shape[2]] if case.name != "everything" else [2]
        key = key.transpose(1, 2).contiguous().transpose(1, 2)
        return chunked(query * 1, key, value, list(inputs), numbers, None, 0.0, text, False)[0]

    run = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=True)
    for s in (USUAL, replace(USUAL, batch=3, q_len=29, kv_len=31)):
        tensors = drawn(case, s, torch.float32)
        grad_out = torch.randn(s.batch, s.heads, s.q_len, s.value_dim)
        got, eager = results(run, tensors, grad_out), results(program, tensors, grad_out)
        assert all(torch.equal(got[name], eager[name]) for name in eager)


def test_backward_within_a_compiled_graph() -> None:
    """A graph that holds a backward runs below autograd."""
    case = CASE["everything"]
    query, key, value, *inputs = drawn(case, USUAL, torch.float32)
    how = (query, key, value, inputs, [2], seeded(1), 0.2)
    text = case.program.dumps()
    outputs = chunked(*how, text, False)

    def program(grad_out: Tensor) -> Any:
        return chunked_backward(grad_out * 1, None, *how, *outputs, text, [True] * 3)

    run = torch.compile(program, backend="aot_eager", fullgraph=True)
    grad_out = torch.randn(outputs[0].shape)
    with Largest():
        beneath_a_mode = program(grad_out)
    for got in (run(grad_out), beneath_a_mode):
        torch.testing.assert_close(got, program(grad_out), rtol=0, atol=0)


def test_only_wanted_inputs_have_gradients() -> None:
    case = CASE["everything"]
    query, key, value, *inputs = drawn(case, USUAL, torch.float32)
    inputs[1].requires_grad_()
    operator(case, query, key, value, *inputs, numbers=[2]).sum().backward()
    assert inputs[1].grad is not None
    assert all(x.grad is None for x in (query, key, value, inputs[0], inputs[2]))
    how = (query, key, value, [x.detach() for x in inputs], [2], None, 0.0)
    outputs = chunked(*how, case.program.dumps(), False)
    dinputs = chunked_backward(
        torch.ones_like(outputs[0]), None, *how, *outputs, case.program.dumps(), [False, True, False]
    )[3]
    assert [x.numel() for x in dinputs] == [0, inputs[1].numel(), 0]
    torch.testing.assert_close(dinputs[1], inputs[1].grad)


def test_autocast_does_not_reach_in() -> None:
    tensors = drawn(CASE["plain"], USUAL, torch.float32)
    expected = operator(CASE["plain"], *tensors, numbers=[])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(operator(CASE["plain"], *tensors, numbers=[]), expected)


def test_second_derivatives_are_refused() -> None:
    query, key, value = (x.requires_grad_() for x in torch.randn(3, 1, 1, 5, 4).unbind(0))
    out = operator(CASE["plain"], query, key, value, numbers=[])
    (dquery,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        dquery.sum().backward()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key": torch.ones(1, 3, 5, 4), "value": torch.ones(1, 3, 5, 4)}, "no multiple of 3"),
        ({"key": torch.ones(1, 2, 5, 3)}, "shapes do not fit"),
        ({"value": torch.ones(1, 2, 4, 4)}, "shapes do not fit"),
        ({"query": torch.ones(2, 5, 4)}, "four dimensions"),
        ({"dropout_p": 0.5}, "seed"),
        ({"dropout_p": 1.5, "seed": torch.zeros(1, dtype=torch.int64)}, "probability"),
        ({"program": '{"score":["softmax",["score"]]}'}, "no node 'softmax'"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], reason: str) -> None:
    how: dict[str, Any] = dict.fromkeys(("query", "key", "value"), torch.ones(1, 2, 5, 4))
    how |= {
        "inputs": [],
        "numbers": [],
        "seed": None,
        "dropout_p": 0.0,
        "program": '{"score":["score"]}',
        "centred": False,
    }
    with pytest.raises(ValueError, match=reason):
        chunked(**how | change)
