"""The chunked operators against dense float64 autograd, forward and every gradient, over many small blocks."""

from __future__ import annotations

import math
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
from tests.dropout import seeded
from tests.graph.chunked_cases import (
    CASE,
    CASES,
    SIZES,
    USUAL,
    Case,
    Sizes,
    check,
    drawn,
    naive,
    operator,
)
from tests.operator_contract import OperatorTests


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_plan, "QUERY_BLOCK", 16)
    monkeypatch.setattr(chunked_plan, "MOST_QUERIES", 16)
    monkeypatch.setattr(chunked_plan, "KEY_BLOCK", 8)
    monkeypatch.setattr(chunked_plan, "COMPILE_FROM", math.inf)


SOME = [
    pytest.param(case, id=case.name, marks=() if n % 4 == 0 else pytest.mark.thorough) for n, case in enumerate(CASES)
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_usual_sizes(case: Case) -> None:
    check(case, USUAL)


@pytest.mark.parametrize("s", SIZES[1:], ids=str)
@pytest.mark.parametrize("case", SOME)
def test_sizes(case: Case, s: Sizes) -> None:
    check(case, s)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SOME)
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


class TestChunked(OperatorTests):
    op = staticmethod(chunked)

    def use_other_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunked_plan, "QUERY_BLOCK", 13)
        monkeypatch.setattr(chunked_plan, "MOST_QUERIES", 13)
        monkeypatch.setattr(chunked_plan, "KEY_BLOCK", 64)


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
    for name in ("QUERY_BLOCK", "MOST_QUERIES", "KEY_BLOCK"):
        monkeypatch.setattr(chunked_plan, name, 64)
    program = CASE["everything"].program.dumps()

    def largest(length: int) -> int:
        query, key, value = torch.randn(3, 1, 1, length, 16).unbind(0)
        inputs = [torch.randn(1, 17), torch.randn(1, 1, length, 1), torch.randn(1, 1, length, 1)]
        how = (query, key, value, inputs, [2], seeded(1), 0.1)
        with alone(), Largest() as seen:
            outputs = chunked_blocks.attend(Operands(*how, program))
            chunked_blocks.attend_backward(Operands(*how, program), outputs, torch.randn(query.shape), None, [True] * 3)
        return seen.elements

    assert largest(1024) <= 2 * largest(512)


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


def test_no_gradient_is_computed_that_nobody_wants() -> None:
    query, key, value, *inputs = drawn(CASE["everything"], USUAL, torch.float32)
    how, program = (query, key, value, inputs, [2], None, 0.0), CASE["everything"].program.dumps()
    outputs = chunked(*how, program, False)
    grad_out = torch.ones_like(outputs[0])
    found = chunked_backward(grad_out, None, *how, *outputs, program, [False, True, False])[3]
    assert [x.numel() for x in found] == [0, inputs[1].numel(), 0]


def test_autocast_does_not_reach_in() -> None:
    tensors = drawn(CASE["plain"], USUAL, torch.float32)
    expected = operator(CASE["plain"], *tensors, numbers=[])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(operator(CASE["plain"], *tensors, numbers=[]), expected)
