"""triton_flash as an operator, interpreted on the CPU: dropout, opcheck, compiling, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_fuse.kernels.score.program import ScoreProgram
from tests.dropout import check_distribution, check_seed, kept_weights, seeded
from tests.graph.chunked_cases import (
    CASE,
    USUAL,
    Sizes,
    assert_near,
    const,
    drawn,
    naive,
    results,
)
from tests.triton.flash_operator import operator, small_tiles, use_tiles  # noqa: F401
from tests.triton.interpreted import INTERPRETED, interpreted, run_interpreted

pytestmark = pytest.mark.thorough

if INTERPRETED:
    from attn_fuse.kernels.triton.flash.configs import Config
    from attn_fuse.kernels.triton.flash.op import triton_flash, triton_flash_backward


def test_in_a_process_that_interprets() -> None:
    run_interpreted(__file__)


# ---- dropout


def with_dropout(query: Tensor, key: Tensor, value: Tensor, seed: Tensor, p: float) -> Tensor:
    return triton_flash(query, key, value, [], [], seed, None, None, p, ScoreProgram(const(0.0)).dumps(), False)[0]


@interpreted
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_distribution(p: float) -> None:
    check_distribution(with_dropout, p)


@interpreted
def test_dropout_depends_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_other_blocks(*tensors: Any) -> Tensor:
        use_tiles(monkeypatch, Config(32, 16, 4, 1))
        return with_dropout(*tensors)

    check_seed(with_dropout, with_other_blocks)


@interpreted
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


# ---- the operators


@interpreted
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_opcheck(name: str) -> None:
    case, s = CASE[name], Sizes(2, 2, 1, 19, 17, 8, 4)
    query, key, value, *inputs = (x.requires_grad_(x.is_floating_point()) for x in drawn(case, s, torch.float32))
    how = (query, key, value, inputs, case.numbers(s), seeded(1), None, None, 0.2, case.program.dumps())
    for centred in (False, True):
        torch.library.opcheck(triton_flash, (*how, centred))


@interpreted
def test_opcheck_of_the_backward() -> None:
    case, s = CASE["everything"], Sizes(2, 2, 1, 19, 17, 8, 4)
    query, key, value, *inputs = drawn(case, s, torch.float32)
    how = (query, key, value, inputs, case.numbers(s), seeded(1), None, None, 0.2)
    program = case.program.dumps()
    outputs = triton_flash(*how, program, False)
    args = (torch.randn(outputs[0].shape), *how, *outputs, program, [True, False, True])
    torch.library.opcheck(triton_flash_backward, args)


@interpreted
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_training_step_compiles(inner: str) -> None:
    case = CASE["everything"]
    text = case.program.dumps()

    def program(query: Tensor, key: Tensor, value: Tensor, *inputs: Tensor) -> Tensor:
        key = key.transpose(1, 2).contiguous().transpose(1, 2)
        return triton_flash(query * 1, key, value, list(inputs), [2], None, None, None, 0.0, text, False)[0]

    run = torch.compile(program, backend=inner, fullgraph=True, dynamic=True)
    small = Sizes(batch=2, heads=2, kv_heads=1, q_len=37, kv_len=53, head_dim=24, value_dim=40)
    for s in (small, replace(small, batch=3, q_len=29, kv_len=31)):
        tensors = drawn(case, s, torch.float32)
        grad_out = torch.randn(s.batch, s.heads, s.q_len, s.value_dim)
        got, eager = results(run, tensors, grad_out), results(program, tensors, grad_out)
        assert all(torch.equal(got[name], eager[name]) for name in eager)


@interpreted
def test_results_do_not_change_from_run_to_run() -> None:
    case = CASE["everything"]
    tensors = drawn(case, USUAL, torch.float32)
    grad_out = torch.randn(USUAL.batch, USUAL.heads, USUAL.q_len, USUAL.value_dim)
    first, second = (results(partial(operator, case, numbers=[2]), tensors, grad_out) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@interpreted
def test_only_wanted_inputs_have_gradients() -> None:
    case = CASE["everything"]
    query, key, value, *inputs = drawn(case, USUAL, torch.float32)
    inputs[1].requires_grad_()
    operator(case, query, key, value, *inputs, numbers=[2]).sum().backward()
    assert inputs[1].grad is not None
    assert all(x.grad is None for x in (query, key, value, inputs[0], inputs[2]))


@interpreted
def test_second_derivatives_are_refused() -> None:
    query, key, value = (x.requires_grad_() for x in torch.randn(3, 1, 1, 5, 4).unbind(0))
    out = operator(CASE["plain"], query, key, value, numbers=[])
    (dquery,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        dquery.sum().backward()


@interpreted
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key": torch.ones(1, 3, 5, 4), "value": torch.ones(1, 3, 5, 4)}, "no multiple of 3"),
        ({"key": torch.ones(1, 2, 5, 3)}, "shapes do not fit"),
        ({"value": torch.ones(1, 2, 4, 4)}, "shapes do not fit"),
        ({"query": torch.ones(2, 5, 4)}, "four dimensions"),
        ({"value": torch.ones(1, 2, 5, 4, dtype=torch.float64)}, "not computed in"),
        ({"value": torch.ones(1, 2, 5, 257)}, "too large"),
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
        "of_queries": None,
        "of_keys": None,
        "dropout_p": 0.0,
        "centred": False,
    }
    with pytest.raises(ValueError, match=reason):
        triton_flash(**how | {"program": '{"score":["score"]}'} | change)
