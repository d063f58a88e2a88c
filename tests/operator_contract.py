"""What each of our operators must do that computes attention by a score program: tests for their classes to inherit."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from attn_fuse.kernels.score.program import ScoreProgram
from tests.dropout import check_distribution, check_seed, kept_weights, seeded
from tests.graph.chunked_cases import (
    CASE,
    INF,
    USUAL,
    Case,
    S,
    Sizes,
    assert_near,
    biased,
    const,
    drawn,
    naive,
    results,
    where,
)
from tests.harness import every_day

SMALL = Sizes(2, 2, 1, 19, 17, 8, 4)


class OperatorTests:
    """op: the operator. more: arguments that others do not have. unit: of the max of each row."""

    op: Any
    more: ClassVar[dict[str, Any]] = {}
    unit = 1.0

    def use_other_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compute in blocks of other sizes from here on."""
        raise NotImplementedError

    def given(self, program: ScoreProgram, *tensors: Tensor, **changes: Any) -> dict[str, Any]:
        """The arguments of `op`, by name."""
        query, key, value, *inputs = tensors
        how = {"query": query, "key": key, "value": value, "inputs": inputs, "numbers": [], "seed": None}
        return how | {"dropout_p": 0.0, "program": program.dumps(), "centred": False} | self.more | changes

    def outputs(self, program: ScoreProgram, *tensors: Tensor, **changes: Any) -> Any:
        return self.op(**self.given(program, *tensors, **changes))

    def attend(self, case: Case, s: Sizes, *tensors: Tensor, **changes: Any) -> Tensor:
        return self.outputs(case.program, *tensors, numbers=case.numbers(s), **changes)[0]

    def dropped(self, query: Tensor, key: Tensor, value: Tensor, seed: Tensor, p: float) -> Tensor:
        return self.outputs(ScoreProgram(const(0.0)), query, key, value, seed=seed, dropout_p=p)[0]

    # ---- memory

    @pytest.mark.parametrize("name", ["plain", "bias", "everything"])
    def test_strides(self, name: str) -> None:
        """Transposed tensors, an expanded head, an expanded input of a mask, and an expanded gradient."""
        case, s = CASE[name], replace(USUAL, kv_heads=4, value_dim=24)
        query, key, value, *inputs = drawn(case, s, torch.float32)
        transposed = query.transpose(1, 2).contiguous().transpose(1, 2)
        one_head = key[:, :1].expand(-1, s.kv_heads, -1, -1)
        flipped = value.mT.contiguous().mT
        tensors = [transposed, one_head, flipped, *(x[:1].expand(x.shape) for x in inputs)]
        grad_out = torch.full((), 0.7).expand(s.batch, s.heads, s.q_len, s.value_dim)
        got = results(partial(self.attend, case, s), tensors, grad_out)
        assert_near(got, partial(naive, case), tensors, grad_out)

    @pytest.mark.parametrize("s", [replace(USUAL, q_len=0), replace(USUAL, kv_len=0), replace(USUAL, batch=0)], ids=str)
    @pytest.mark.parametrize("name", ["bias", "sink of each head", "everything"])
    def test_empty(self, name: str, s: Sizes) -> None:
        tensors = drawn(CASE[name], s, torch.float32)
        grad_out = torch.randn(s.batch, s.heads, s.q_len, s.value_dim)
        got = results(partial(self.attend, CASE[name], s), tensors, grad_out)
        assert got["out"].shape == grad_out.shape
        assert all((x == 0).all() for x in got.values())

    # ---- rows without a visible key, and numbers that are none

    @pytest.mark.parametrize("with_sink", [False, True], ids=["no sink", "sink"])
    def test_queries_that_see_no_key(self, with_sink: bool) -> None:
        keep = torch.ones(1, 1, 19, 1, dtype=torch.bool)
        keep[:, :, ::3] = False
        program = ScoreProgram(where(["input", 0], S), sink=const(0.5) if with_sink else None)
        query, key, value = (x.requires_grad_() for x in torch.randn(3, 1, 2, 19, 8).unbind(0))
        out, row_max, row_sum, *_ = self.outputs(program, query, key, value, keep)
        gradients = torch.autograd.grad(out.sum(), [query, key, value])
        assert (out[:, :, ::3] == 0).all() and (gradients[0][:, :, ::3] == 0).all()
        assert all(x.isfinite().all() for x in (out, *gradients))
        lse = (row_max / self.unit + row_sum.log())[:, :, ::3]
        torch.testing.assert_close(lse, torch.full_like(lse, 0.5 if with_sink else -INF))
        assert not row_max.requires_grad and not row_sum.requires_grad

    @pytest.mark.parametrize("fill", [-1e4, -1e9, -3e38, torch.finfo(torch.float32).min])
    @pytest.mark.parametrize("scale", [1.0, 0.3])
    def test_a_finite_fill_gives_the_mean(self, fill: float, scale: float) -> None:
        """Beside the fill log(kv_len) is lost; a backward from the log-sum-exp would be wrong by a factor of kv_len."""
        program = ScoreProgram(where(const(False), ["mul", S, const(scale)], fill))
        query, key, value = (x.requires_grad_() for x in torch.randn(3, 1, 2, 75, 8).unbind(0))
        out = self.outputs(program, query, key, value)[0]
        grad_out = torch.randn(out.shape)
        dquery, dkey, dvalue = torch.autograd.grad(out, [query, key, value], grad_out)
        torch.testing.assert_close(out, value.mean(2, keepdim=True).expand_as(out))
        torch.testing.assert_close(dvalue, (grad_out.sum(2, keepdim=True) / 75).expand_as(dvalue), rtol=1e-5, atol=1e-6)
        assert (dquery == 0).all() and (dkey == 0).all()

    @pytest.mark.parametrize("bad", [math.nan, INF])
    def test_not_a_number_stays_one(self, bad: float) -> None:
        bias = torch.zeros(1, 1, 19, 23)
        bias[0, 0, 5, 20] = bad
        out = self.outputs(biased("").program, *(torch.randn(1, 1, n, 8) for n in (19, 23, 23)), bias)[0]
        assert out[:, :, 5].isnan().all()
        assert out[:, :, :5].isfinite().all() and out[:, :, 6:].isfinite().all()

    # ---- dropout

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_dropout_keeps_its_distribution(self, p: float) -> None:
        check_distribution(self.dropped, p)

    def test_dropout_depends_on_the_seed_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def with_other_blocks(*tensors: Any) -> Tensor:
            self.use_other_blocks(monkeypatch)
            return self.dropped(*tensors)

        check_seed(self.dropped, with_other_blocks)

    @pytest.mark.parametrize("p", [0.3, 1.0])
    @pytest.mark.parametrize("name", ["plain", "sink of each head", "everything"])
    def test_dropout_against_its_own_mask(self, name: str, p: float) -> None:
        case, s = CASE[name], USUAL
        tensors = drawn(case, s, torch.float32)
        kept = kept_weights(self.dropped, seeded(3), p, s.batch, s.heads, s.q_len, s.kv_len)
        kept = torch.where(kept > 0, 1 / (1 - p) if p < 1 else 0.0, 0.0).double()
        grad_out = torch.randn(s.batch, s.heads, s.q_len, s.value_dim)
        got = results(partial(self.attend, case, s, seed=seeded(3), dropout_p=p), tensors, grad_out)
        assert_near(got, partial(naive, case, kept=kept), tensors, grad_out)
        assert p < 1 or all((x == 0).all() for x in got.values())

    # ---- the operator

    @pytest.mark.parametrize("centred", [False, True])
    @pytest.mark.parametrize("name", every_day(["everything", "causal", "relative table"], "everything"))
    def test_opcheck(self, name: str, centred: bool) -> None:
        case = CASE[name]
        tensors = (x.requires_grad_(x.is_floating_point()) for x in drawn(case, SMALL, torch.float32))
        how = {"numbers": case.numbers(SMALL), "seed": seeded(1), "dropout_p": 0.2, "centred": centred}
        torch.library.opcheck(self.op, (), self.given(case.program, *tensors, **how))

    @pytest.mark.parametrize("inner", every_day(["aot_eager", "inductor"], "aot_eager"))
    def test_training_step_compiles(self, inner: str) -> None:
        case, op = CASE["everything"], self.op
        how = self.given(case.program, *torch.empty(3), numbers=case.numbers(USUAL))

        def program(query: Tensor, key: Tensor, value: Tensor, *inputs: Tensor) -> Tensor:
            key = key.transpose(1, 2).contiguous().transpose(1, 2)
            return op(**how | {"query": query * 1, "key": key, "value": value, "inputs": list(inputs)})[0]

        run = torch.compile(program, backend=inner, fullgraph=True, dynamic=True)
        small = Sizes(batch=2, heads=2, kv_heads=1, q_len=37, kv_len=53, head_dim=24, value_dim=40)
        for s in (small, replace(small, batch=3, q_len=29, kv_len=31)):
            tensors = drawn(case, s, torch.float32)
            grad_out = torch.randn(s.batch, s.heads, s.q_len, s.value_dim)
            got, eager = results(run, tensors, grad_out), results(program, tensors, grad_out)
            assert all(torch.equal(got[name], eager[name]) for name in eager)

    def test_results_do_not_change_from_run_to_run(self) -> None:
        case = CASE["everything"]
        tensors = drawn(case, USUAL, torch.float32)
        grad_out = torch.randn(USUAL.batch, USUAL.heads, USUAL.q_len, USUAL.value_dim)
        first, second = (results(partial(self.attend, case, USUAL), tensors, grad_out) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_only_wanted_inputs_have_gradients(self) -> None:
        query, key, value, *inputs = drawn(CASE["everything"], USUAL, torch.float32)
        inputs[1].requires_grad_()
        self.attend(CASE["everything"], USUAL, query, key, value, *inputs).sum().backward()
        assert inputs[1].grad is not None
        assert all(x.grad is None for x in (query, key, value, inputs[0], inputs[2]))

    def test_second_derivatives_are_refused(self) -> None:
        query, key, value = (x.requires_grad_() for x in torch.randn(3, 1, 1, 5, 4).unbind(0))
        out = self.outputs(CASE["plain"].program, query, key, value)[0]
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
    def test_what_does_not_fit_is_said(self, change: dict[str, Any], reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            self.op(**self.given(CASE["plain"].program, *torch.ones(3, 1, 2, 5, 4)) | change)
