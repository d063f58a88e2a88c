"""The code to write by hand: the program edited as it says computes the same."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_fuse.advice import code as writer
from attn_fuse.report import Code
from tests.advice.edited import analysed, edited
from tests.harness import _results, assert_as_good_as_eager
from tests.models.collection import RARE, SPELLINGS, Spelling
from tests.models.spelling import heads, square

MADE_UP, ONLY_FORWARD = " is a tensor ", "for inference only"
ATTENTIONS = [s for s in (*SPELLINGS, *RARE) if s.exception is None]
MODES = pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])


def name(value: object) -> str:
    return getattr(value, "name", str(value))


def codes_of(spelling: Spelling, training: bool) -> tuple[object, tuple[object, ...], list[Code | str]]:
    torch.manual_seed(0)
    program = spelling.program()
    if isinstance(program, nn.Module):
        program.train(training and not spelling.dropout)
    args = spelling.inputs(spelling.dtype)
    with torch.set_grad_enabled(training):
        sites = analysed(program, *args, dynamic=spelling.dynamic)
    return program, args, [site.code or site.no_code for site in sites if site.status != "already fused"]


def assert_same_by_hand(spelling: Spelling, training: bool) -> None:
    program, args, codes = codes_of(spelling, training)
    written = [code for code in codes if isinstance(code, Code)]
    # A name that is made up, and the steps of a loop, are for a person to complete.
    complete = [code for code in written if not any(MADE_UP in note for note in code.notes)]
    if not complete or len(complete) < len(written) or len({c.lines for c in written}) < len({c.text for c in written}):
        pytest.skip("; ".join(note for code in written for note in code.notes) or str(codes))
    backward = (
        training and spelling.training and not any(ONLY_FORWARD in note for code in written for note in code.notes)
    )
    with edited(complete, training):
        got = _results(program, program, args, backward)
    assert_as_good_as_eager(got, program, args, backward)


@pytest.mark.thorough
@pytest.mark.parametrize("form, training", [("sdpa", True), ("flex", False)])
@pytest.mark.parametrize("spelling", ATTENTIONS, ids=name)
def test_the_edited_program(
    spelling: Spelling, training: bool, form: writer.Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [one for one in ("sdpa", "flex") if one != form]
    monkeypatch.setattr(writer, "_usual", lambda found: (form, *others))
    assert_same_by_hand(spelling, training)


@pytest.mark.parametrize("spelling", ATTENTIONS[::16], ids=name)
def test_some_edited_programs(spelling: Spelling) -> None:
    assert_same_by_hand(spelling, spelling.training)


@pytest.mark.thorough
def test_nearly_all_have_code() -> None:
    codes = [code for spelling in ATTENTIONS for code in codes_of(spelling, False)[2]]
    written = [code for code in codes if isinstance(code, Code)]
    named = [code for code in written if not any(MADE_UP in note for note in code.notes)]
    # Of the rest most are lambdas, and torch's own module.
    assert len(written) > 0.97 * len(codes) and len(named) > 0.88 * len(codes)


# ---- the text


def code_for(program: object, *args: object) -> str:
    (site,) = analysed(program, *args)  # type: ignore[arg-type]
    if site.code is None:
        return f"no code: {site.no_code}"
    lines = "".join(f"\n{line}" for line in site.code.text)
    return site.code.place.partition(" of ")[0] + lines + "".join(f"\n# {note}" for note in site.code.notes)


def offset_of(function: object) -> int:
    return function.__code__.co_firstlineno  # type: ignore[attr-defined]


class Usual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :7, :7] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.drop(att)
        y = att @ v
        return y.transpose(1, 2)


def test_the_usual_attention() -> None:
    assert_expected_inline(
        code_for(Usual().eval(), *square()(torch.float32)).partition("\n")[2],
        """\
y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.drop.p if self.drop.training else 0.0)
# for what self.bias holds in this run""",
    )


class TwoDropouts(nn.Module):
    """The second is outside of the attention, on the same line."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Dropout(0.5), nn.Dropout(0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.outer(self.inner((q @ k.mT * 0.25).softmax(-1)) @ v)


def test_of_two_dropouts_on_a_line_that_of_the_weights() -> None:
    said = code_for(TwoDropouts().train(), *square()(torch.float32))
    assert "self.outer(F.scaled_dot_product_attention(" in said
    assert "dropout_p=self.inner.p if self.inner.training else 0.0" in said and "self.outer.p" not in said


class DropoutWithin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weights(of(q, k)) @ v

    def weights(self, scores: Tensor) -> Tensor:
        return self.drop(scores.softmax(-1))


def test_a_dropout_that_another_function_calls_is_a_number() -> None:
    said = code_for(DropoutWithin().train(), *square()(torch.float32))
    assert "dropout_p=0.1)" in said and "# in inference give 0.0 for dropout_p" in said
    torch.compiler.reset()
    said = code_for(DropoutWithin().eval(), *square()(torch.float32))
    assert "dropout_p" not in said and "# for inference only: it lacks the program's dropout" in said


def test_a_batch_of_one_keeps_its_dimension() -> None:
    assert "(q, k, v, is_causal" in code_for(Usual().eval(), *square(batch=1, heads=1)(torch.float32))


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    seen = (j <= i) & (i - j < 4)
    return (q @ k.mT * 0.25).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def test_a_window() -> None:
    assert_expected_inline(
        code_for(window, *square()(torch.float32)).partition("\n")[2],
        """\
q_idx = torch.arange(q.size(-2), device=q.device)[:, None]
kv_idx = torch.arange(k.size(-2), device=k.device)
attn_mask = (q_idx >= kv_idx) & (q_idx - kv_idx <= 3)
return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
# its whole numbers are those of this run, and may be sizes""",
    )


def test_a_window_for_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_usual", lambda found: ("flex",))
    assert_expected_inline(
        code_for(window, *square()(torch.float32)).partition("\n")[2],
        """\
def causal_and_window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 3)

block_mask = create_block_mask(causal_and_window, None, None, q.size(-2), k.size(-2), device=q.device)
return flex_attention(q, k, v, block_mask=block_mask)
# its whole numbers are those of this run, and may be sizes""",
    )


def softcapped(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT * 0.25 / 30.0) * 30.0
    scores = scores + slopes[:, None, None] * (torch.arange(7) - torch.arange(7)[:, None])
    return scores.softmax(-1) @ v


def test_a_function_of_the_scores() -> None:
    args = (*square()(torch.float32), torch.rand(3))
    assert_expected_inline(
        code_for(softcapped, *args).partition("\n")[2],
        """\
def score_mod(score, b, h, q_idx, kv_idx):
    return torch.tanh(score / 30.0) * 30.0 + slopes[h] * (kv_idx - q_idx)

return flex_attention(q, k, v, score_mod=score_mod)""",
    )


# ---- what a name stands for


def reassigned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    q = q + 1
    return scores.softmax(-1) @ v, q


def swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = k, q
    return (q @ k.mT * 0.25).softmax(-1) @ v


def of(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.mT * 0.25


def arguments_in_another_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return of(b=k, a=q).softmax(-1) @ v


def written_later(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = (q @ k.mT * 0.25).softmax(-1) @ v
    out += 1
    return out


def weights_kept(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    scores.mul_(0.25)
    weights = scores.softmax(-1)
    del scores
    return weights @ v, weights


def under_a_condition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT * 0.25
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf)
    weights = scores.softmax(-1)
    return weights @ v


def made_for_it(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10).softmax(-1)
    return weights @ v


def over_lines(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(
        torch.matmul(
            q,
            k.transpose(-2, -1),
        )
        * 0.25,
        dim=-1,
    )
    return torch.matmul(
        weights,
        v,
    )


def called_like_an_index(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + b).softmax(-1) @ v


PROGRAMS = (
    reassigned, swapped, arguments_in_another_order, written_later, weights_kept, under_a_condition, made_for_it,
    over_lines,
)  # fmt: skip


@MODES
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_edits(program: object, training: bool) -> None:
    args = square()(torch.float32)
    with torch.set_grad_enabled(training):
        (site,) = analysed(program, *args)  # type: ignore[arg-type]
    assert site.code is not None, site.no_code
    assert not any(MADE_UP in note for note in site.code.notes) or program is reassigned
    if program is reassigned:
        return
    with edited([site.code], training):
        got = _results(program, program, args, training)  # type: ignore[arg-type]
    assert_as_good_as_eager(got, program, args, training)  # type: ignore[arg-type]


def test_contents_of_a_buffer_that_the_code_rests_on_are_named() -> None:
    class Biased(nn.Module):
        def __init__(self, bias: Tensor) -> None:
            super().__init__()
            self.register_buffer("bias", bias)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.mT + self.bias).softmax(-1) @ v

    # A checkpoint may yet fill the buffer.
    empty, full = (code_for(Biased(bias), *square()(torch.float32)) for bias in (torch.zeros(7, 7), torch.randn(7, 7)))
    assert "self.bias" in empty.splitlines()[-1] and ONLY_FORWARD not in empty, empty
    assert "attn_mask=self.bias" in full and "in this run" not in full, full


def test_a_name_that_means_something_else_by_then_is_not_used() -> None:
    assert "# query is a tensor" in code_for(reassigned, *square()(torch.float32))


def test_a_condition_of_this_run_is_told() -> None:
    said = code_for(under_a_condition, *square()(torch.float32))
    assert "# in this run: mask is None" in said


def test_a_tensor_called_like_an_argument_of_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_usual", lambda found: ("flex",))
    args = (*heads()(torch.float32), torch.rand(7, 11))
    assert "called b" in code_for(called_like_an_index, *args)


def test_wrong_code_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_fuse.advice.calls._scale", lambda scale, head_dim: ["scale=0.3"])
    assert "no code" in code_for(window, *square()(torch.float32))


def core(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    return first @ second.mT * 0.25


def called_by_a_checkpoint(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(core, q, k, v, use_reentrant=False).softmax(-1) @ v


def written_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.25
    k.mul_(2)
    weights = scores.softmax(-1)
    return weights @ v


@pytest.mark.parametrize("program", [called_by_a_checkpoint, written_between], ids=lambda program: program.__name__)
def test_what_has_no_sure_name_gets_another(program: object) -> None:
    args = square()(torch.float32)
    (site,) = analysed(program, *args)  # type: ignore[arg-type]
    if site.code is not None:
        assert "(q, k, v" not in "".join(site.code.text) and any(MADE_UP in note for note in site.code.notes)


def test_numbers_that_may_be_sizes_are_told() -> None:
    assert "whole numbers" in code_for(window, *square()(torch.float32))
    assert "whole numbers" not in code_for(Usual().eval(), *square()(torch.float32))
