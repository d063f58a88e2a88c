"""Graph breaks: one inside an attention is reported at its line and fails `strict`, and no other does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attn_fuse
from attn_fuse.errors import NotFusedError
from attn_fuse.graph import breaks
from attn_fuse.report import SiteReport, collecting


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


BROKEN = {
    after_the_product: 'print("x")',
    after_the_softmax: 'print("x")',
    after_both: 'print("x")',
    where_the_data_decides: "if scores.max() > -1e9:",
    in_place: 'print("x")',
    in_the_exponential: 'print("x")',
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


def mask_from_before_the_break(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.tanh(q.mean(1)[0] @ k.mean(1)[0].T)
    print("x")
    return (q @ k.transpose(-2, -1) / 4 + bias).softmax(-1) @ v


def scores_kept_for_later(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / 4
    out = scores.softmax(-1) @ v
    print("x")
    return out + scores.mean()


def probabilities(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = q @ k.transpose(-2, -1)
    print("x")
    return logits.softmax(-1).argmax(-1)


def another_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    print("x")
    return scores.softmax(1) @ v


def unrelated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    product = (q @ k.transpose(-2, -1)).mean()
    print("x")
    return (q * product).softmax(-1) @ v.transpose(-2, -1)


WHOLE = (mask_from_before_the_break, scores_kept_for_later, probabilities, another_axis, unrelated)


def compiled_sites(model: Callable[..., Any], *inputs: Any, backward: bool = False, **options: Any) -> list[SiteReport]:
    torch._dynamo.reset()
    with collecting() as reports:
        out = torch.compile(model, backend="attn_fuse", options={"inner_backend": "eager", **options})(*inputs)
        if backward:
            out.sum().backward()
    return [site for report in reports for site in report.sites]


def broken(sites: list[SiteReport]) -> list[SiteReport]:
    return [site for site in sites if site.blocker is not None and site.blocker.op == "graph break"]


@pytest.mark.parametrize("attention", BROKEN, ids=lambda f: f.__name__)
def test_a_broken_attention_is_reported_at_the_break(attention: Callable[..., Tensor]) -> None:
    (site,) = compiled_sites(attention, *operands())
    assert site.status == "as written"
    assert site.attention["heads"] == "4"
    assert site.blocker is not None and site.blocker.location is not None
    assert "the graph breaks inside it, at line " in site.blocker.reason
    lines, first = inspect.getsourcelines(attention)
    broken_at = lines[site.blocker.location.line - first].strip()
    assert broken_at == site.blocker.location.code == BROKEN[attention]
    assert any(said in lines[site.location.line - first] for said in ("softmax", "exp"))


def test_dynamos_reason_is_named() -> None:
    (site,) = compiled_sites(after_the_product, *operands())
    assert site.blocker is not None
    assert "Failed to trace builtin operator" in site.blocker.reason and "`print`" in site.blocker.reason


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
    (site,) = compiled_sites(attention, *operands())
    assert site.blocker is not None and "torch.where" in site.blocker.advice
    assert f": the program branches on the data here: `{line}" in site.blocker.reason


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
    (site,) = compiled_sites(keeps_the_gradient_of_the_weights, *inputs)
    assert site.status == "refused" and site.blocker is not None
    assert site.blocker.reason.endswith(
        "Dynamo runs the rest of the function as written, from here on: `weights.retain_grad()`"
    )
    with pytest.raises(NotFusedError, match="retain_grad"):
        compiled_sites(keeps_the_gradient_of_the_weights, *inputs, strict=True)
    assert not compiled_sites(KeepsTheGradientOfItsClasses(), operands()[0], strict=True)


def test_strict_raises_for_a_broken_attention() -> None:
    with pytest.raises(NotFusedError, match=r"1 of 1 attentions not fused: .*the graph breaks inside it, at line "):
        compiled_sites(after_the_product, *operands(), strict=True)


@pytest.mark.parametrize("attention", [*BROKEN, *WHOLE], ids=lambda f: f.__name__)
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
def test_no_other_break_is_blamed(attention: Callable[..., Tensor]) -> None:
    assert not broken(compiled_sites(attention, *operands()))


def test_breaks_around_attentions_pass_strict() -> None:
    model = nn.Sequential(*(Layer(broken=False) for _ in range(3)))
    sites = compiled_sites(model, torch.randn(2, 8, 32), backward=True, strict=True, pick="fused")
    assert [site.status for site in sites] == ["fused"]  # the layers run the same code


def test_a_break_in_every_layer() -> None:
    model = nn.Sequential(*(Layer(broken=True) for _ in range(3)))
    sites = compiled_sites(model, torch.randn(2, 8, 32), backward=True)
    assert sites and broken(sites) == sites


def test_sizes_that_change() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(after_the_product, backend="attn_fuse", dynamic=True, options={"inner_backend": "eager"})
    with collecting() as reports:
        for length in (8, 9):
            q, k, v = operands(length)
            torch.testing.assert_close(compiled(q, k, v), after_the_product(q, k, v))
    assert [site.blocker.op for report in reports for site in report.sites if site.blocker] == ["graph break"]


def test_explain_counts_it() -> None:
    explanation = attn_fuse.explain(after_the_product, *operands())
    assert explanation.left_as_written == 1
    assert "the graph breaks inside it" in str(explanation)


@pytest.mark.parametrize("model", [probabilities, scores_kept_for_later], ids=lambda f: f.__name__)
def test_a_break_that_cuts_no_attention_is_noted(model: Callable[..., Tensor]) -> None:
    text = str(attn_fuse.explain(model, *operands()))
    assert "note: the graph breaks at " in text and "Failed to trace builtin operator" in text


def test_an_unexpected_error_costs_the_report_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("attn_fuse.backend.joined", fails)
    assert not compiled_sites(after_the_product, *operands(), strict=True)
    monkeypatch.setattr("attn_fuse.backend.part_of", fails)
    assert not compiled_sites(after_the_product, *operands(), strict=True)
    monkeypatch.setattr("attn_fuse.backend.break_after", fails)
    assert not compiled_sites(after_the_product, *operands(), strict=True)


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
        assert note in str(found) and note in found.html().replace("&#x27;", "'") and not found.sites
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


def test_only_the_first_calls_before_a_break_note_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noted(dict[int, Any]):
        count = 0

        def __setitem__(self, key: int, value: Any) -> None:
            self.count += 1
            super().__setitem__(key, value)

    noted = Noted()
    monkeypatch.setattr(breaks, "_returned", noted)
    compiled = torch.compile(after_the_product, backend="attn_fuse", options={"inner_backend": "eager"})
    counts = []
    for _ in range(breaks._CALLS_NOTED + 2):
        compiled(*operands())
        counts.append(noted.count)
    assert counts[0] > 0 and counts[-3] > counts[0] and counts[-1] == counts[-2] == counts[-3]
