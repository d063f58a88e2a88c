"""Graph breaks: a note names the break, and the scores or weights that leave the graph there."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attn_fuse
from attn_fuse.errors import NotFusedError
from attn_fuse.report import GraphReport, collecting
from tests.harness import every_day


def operands(length: int = 8) -> list[Tensor]:
    return [torch.randn(2, 4, length, 16) for _ in range(3)]


def after_the_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / 4
    print("x")
    return scores.softmax(-1) @ v


def after_the_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-2, -1) / 4).softmax(-1)
    print("x")
    return F.dropout(weights, 0.1) @ v


def after_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / 4
    print("x")
    weights = scores.softmax(-1)
    print("y")
    return weights @ v


def where_the_data_decides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k)
    if scores.max() > -1e9:
        scores = scores / 4
    return torch.einsum("bhij,bhjd->bhid", torch.softmax(scores, -1), v)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    scores /= 4
    print("x")
    scores.masked_fill_(torch.ones(q.size(2), k.size(2)).triu(1) == 1, float("-inf"))
    return scores.softmax(-1) @ v


def in_the_exponential(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1) / 4).exp()
    print("x")
    return (scores / scores.sum(-1, keepdim=True)) @ v


def of_joined_heads_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.bmm(q[0], k[0].mT)[None].masked_fill(torch.ones(8, 8).tril() == 0, -1e9)
    print("x")
    return scores.softmax(-1) @ v


# By program: what leaves the graph at the break, the line that made it, and the line of the break.
BROKEN = {
    after_the_product: ("scores", "scores = q @", 'print("x")'),
    after_the_softmax: ("weights", "weights = (q @", 'print("x")'),
    after_both: ("scores", "scores = q @", 'print("x")'),
    where_the_data_decides: ("scores", "scores = torch.einsum", "if scores.max() > -1e9:"),
    in_place: ("scores", "scores = q @", 'print("x")'),
    in_the_exponential: ("scores", "scores = (q @", 'print("x")'),
    of_joined_heads_masked: ("scores", "scores = torch.bmm", 'print("x")'),
}


class Layer(nn.Module):
    """An attention with a break in it, where `broken`; else with breaks all around."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.mlp = nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 32)
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        print("before")
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if not self.broken:
            print("operands")
        scores = q @ k.transpose(-2, -1) * 8**-0.5
        if self.broken:
            print("inside")
        out = scores.softmax(-1) @ v
        print("after")
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(x).relu()


def scores_kept_for_later(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / 4
    out = scores.softmax(-1) @ v
    print("x")
    return out + scores.mean()


def weights_kept_for_later(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-2, -1) / 4).softmax(-1)
    out = weights @ v
    print("x")
    return out + weights.mean()


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-2, -1) / 4).exp()
    out = (weights / weights.sum(-1, keepdim=True)) @ v
    print("x")
    return out + 1


def a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    product = (q @ k.transpose(-2, -1)).mean()
    print("x")
    return (q * product).softmax(-1) @ v.transpose(-2, -1)


def classes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    chosen = q.softmax(-1)
    print("x")
    return chosen * v


WHOLE = (scores_kept_for_later, weights_kept_for_later, written_out, a_number, classes)


def compiled_reports(
    model: Callable[..., Any], *inputs: Any, backward: bool = False, **options: Any
) -> list[GraphReport]:
    torch._dynamo.reset()
    with collecting() as reports:
        out = torch.compile(model, backend="attn_fuse", options={"inner_backend": "eager", **options})(*inputs)
        if backward:
            out.sum().backward()
    return reports


def notes_of(reports: list[GraphReport]) -> list[str]:
    return [note for report in reports for note in report.notes]


@pytest.mark.parametrize("attention", BROKEN, ids=lambda f: f.__name__)
def test_what_leaves_the_graph_is_noted_at_the_break(attention: Callable[..., Tensor]) -> None:
    reports = compiled_reports(attention, *operands(), strict=True)
    what, made, broken = BROKEN[attention]
    lines, first = inspect.getsourcelines(attention)
    (at,) = [n for n, line in enumerate(lines, first) if line.strip().startswith(broken)]
    (made_at,) = [n for n, line in enumerate(lines, first) if line.strip().startswith(made)]
    noted = [note for note in notes_of(reports) if "leaves the graph" in note]
    assert len(noted) == 1 and f"test_breaks.py:{at}: " in noted[0].partition(". ")[0]
    assert f"The result of {Path(__file__).relative_to(Path.cwd())}:{made_at} leaves the graph there" in noted[0]
    assert f"an attention with these {what} stays as written. To fuse it, " in noted[0]
    assert not any(report.sites for report in reports)


def test_dynamos_reason_is_named() -> None:
    (note,) = notes_of(compiled_reports(after_the_product, *operands()))
    assert "Failed to trace builtin operator" in note and "`print`" in note
    assert note.endswith("To fuse it, move that line out of the attention, or write it so that Dynamo can trace it")


def a_check_of_the_data(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / 4
    if torch.isnan(scores).any():  # as `assert`, which pytest writes anew
        raise ValueError("not a number")
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    ("attention", "line"),
    [(where_the_data_decides, "if scores.max() > -1e9:"), (a_check_of_the_data, "if torch.isnan(scores).any():")],
)
def test_a_branch_on_data_is_said_in_words(attention: Callable[..., Tensor], line: str) -> None:
    (note,) = notes_of(compiled_reports(attention, *operands()))
    assert f": the program branches on the data here: `{line}" in note
    assert "To fuse it, compute both cases and choose by torch.where" in note


def keeps_the_gradient_of_the_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    weights.retain_grad()
    return weights @ v


class KeepsTheGradientOfItsClasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        classes = self.classes(x).softmax(-1)
        classes.retain_grad()
        return classes


def test_a_break_that_dynamo_does_not_resume_from_is_said_in_words() -> None:
    inputs = [t.requires_grad_() for t in operands()]
    (site,) = [s for report in compiled_reports(keeps_the_gradient_of_the_weights, *inputs) for s in report.sites]
    assert site.status == "refused" and site.blocker is not None
    assert site.blocker.reason.endswith(
        "Dynamo runs the rest of the function as written, from here on: `weights.retain_grad()`"
    )
    with pytest.raises(NotFusedError, match="retain_grad"):
        compiled_reports(keeps_the_gradient_of_the_weights, *inputs, strict=True)
    reports = compiled_reports(KeepsTheGradientOfItsClasses(), operands()[0], strict=True)
    assert not any(report.sites for report in reports)


@pytest.mark.parametrize("attention", every_day([*BROKEN, *WHOLE], in_place, written_out), ids=lambda f: f.__name__)
def test_it_computes_what_it_did(attention: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    inputs = operands()
    compiled = torch.compile(attention, backend="attn_fuse", options={"inner_backend": "eager", "pick": "fused"})
    for _ in range(2):
        torch.manual_seed(0)
        expected = attention(*inputs)
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(*inputs), expected)


@pytest.mark.parametrize("attention", WHOLE, ids=lambda f: f.__name__)
def test_nothing_else_is_said_to_leave(attention: Callable[..., Tensor]) -> None:
    (note, *others) = notes_of(compiled_reports(attention, *operands()))
    assert note.startswith("the graph breaks at ") and "Failed to trace builtin operator" in note
    assert not any("leaves the graph" in said for said in (note, *others))


def test_breaks_around_attentions_pass_strict() -> None:
    model = nn.Sequential(*(Layer(broken=False) for _ in range(3)))
    reports = compiled_reports(model, torch.randn(2, 8, 32), backward=True, strict=True, pick="fused")
    # The layers run the same code.
    assert [site.status for report in reports for site in report.sites] == ["fused"]
    assert not any("leaves the graph" in note for note in notes_of(reports))


def test_a_break_in_every_layer() -> None:
    model = nn.Sequential(*(Layer(broken=True) for _ in range(3)))
    reports = compiled_reports(model, torch.randn(2, 8, 32), backward=True)
    # The first layer's input needs no gradient, so its code is compiled twice.
    (note,) = {note for note in notes_of(reports) if "leaves the graph" in note}
    assert "with these scores stays as written" in note


def test_sizes_that_change() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(after_the_product, backend="attn_fuse", dynamic=True, options={"inner_backend": "eager"})
    with collecting() as reports:
        for length in (8, 9):
            q, k, v = operands(length)
            torch.testing.assert_close(compiled(q, k, v), after_the_product(q, k, v))
    assert sum("with these scores stays as written" in note for note in notes_of(reports)) == 1


def test_explain_prints_it() -> None:
    explanation = attn_fuse.explain(after_the_product, *operands())
    assert not explanation.sites and "an attention with these scores stays as written" in str(explanation)


def test_an_unexpected_error_costs_the_note_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("attn_fuse.backend.at_the_end", fails)
    assert not notes_of(compiled_reports(after_the_product, *operands(), strict=True))


def each_head_prints(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = []
    for head in range(q.size(1)):
        scores = q[:, head] @ k[:, head].mT
        print("x")
        out.append(scores.softmax(-1) @ v[:, head])
    return torch.stack(out, 1)


def each_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([(q[:, head] @ k[:, head].mT).softmax(-1) @ v[:, head] for head in range(q.size(1))], 1)


def test_a_function_that_dynamo_leaves_alone_is_named() -> None:
    line = inspect.getsourcelines(each_head_prints)[1]
    for _ in range(2):  # Dynamo says it anew each time
        found = attn_fuse.explain(each_head_prints, *operands())
        (note,) = found.notes
        assert note.startswith("torch.compile leaves the function each_head_prints (") and f".py:{line})" in note
        assert f"test_breaks.py:{line + 4}, as in a loop or a generator. " in note and "`print`" in note
        shown = html.unescape(re.sub("</?code>", "`", found.html()))
        assert note in str(found) and note in shown and not found.sites
    assert not attn_fuse.explain(each_head, *operands()).notes


def test_fullgraph_raises_for_a_function_that_dynamo_leaves_alone() -> None:
    compiled = torch.compile(each_head_prints, backend="attn_fuse", options={"strict": True}, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="print"):
        compiled(*operands())


def whole_number(x: Tensor) -> int:
    """As pytorchic-bert's split_last computes a width: through NumPy, which Dynamo traces as a tensor."""
    return int(x.size(-1) / -np.prod([2, -1]))


def heads_from_a_generator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(*x.shape[:-1], 2, whole_number(x)).transpose(-2, -3) for x in (q, k, v))
    return (q @ k.mT).softmax(-1) @ v


def test_a_function_that_dynamo_leaves_alone_for_a_break_in_a_generator() -> None:
    for _ in range(2):
        found = attn_fuse.explain(heads_from_a_generator, *operands())
        named = [note for note in found.notes if note.startswith("torch.compile leaves the function heads_from_a_gen")]
        assert len(named) == 1 and "outside of the functions that are left as written" in str(found)


class Torchs(nn.Module):
    """Torch's encoder, which looks into a mask unless it is told what that is."""

    def __init__(self, is_causal: bool | None) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.encoder(x, mask, is_causal=self.is_causal)


def test_torchs_own_code_that_dynamo_leaves_alone_is_named() -> None:
    line = inspect.getsourcelines(Torchs)[1] + 10
    found = attn_fuse.explain(Torchs(None), torch.randn(1, 6, 8))
    (note,) = found.not_compiled
    assert note.startswith("torch.compile leaves torch's TransformerEncoder.forward, which ")
    assert f"test_breaks.py:{line} calls, as written" in note and "breaks at torch/nn/modules/transformer.py:" in note
    assert "is_causal" in note and "outside of the functions that are left as written" in str(found)
    # As the note says.
    told = attn_fuse.explain(Torchs(True), torch.randn(1, 6, 8))
    assert not told.notes and len(told.sites) == 2


class PrintsWithin(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("x")
        return (x @ x.mT).softmax(-1) @ x


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[torch.unique((x > 0).long()).sum().item() :] + 1


def test_a_function_of_torch_without_attention_is_not_named() -> None:
    found = attn_fuse.explain(Counts(), torch.randn(4, 8))
    assert not found.not_compiled and found.notes


def test_own_code_within_torchs_is_compiled() -> None:
    found = attn_fuse.explain(nn.Sequential(nn.Identity(), PrintsWithin()), torch.randn(1, 6, 8))
    assert not found.not_compiled and len(found.sites) == 1
