"""What a report says of an attention: true facts, where it stands, what to do next."""

from __future__ import annotations

import collections
import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attn_fuse
from attn_fuse import report
from attn_fuse.graph.location import locate
from attn_fuse.report import Blocker, GraphReport, Location, SiteReport, collecting
from tests.harness import every_day


class Attention(nn.Module):
    """Self-attention of 4 heads, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) * 8**-0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Nested(nn.Module):
    """Attentions under names that are easily mangled."""

    def __init__(self) -> None:
        super().__init__()
        self._first, self.layers = Attention(), nn.ModuleList([nn.Sequential(Attention())])
        self.by_name = nn.ModuleDict({"two__words": Attention()})

    def forward(self, x: Tensor) -> Tensor:
        return self.by_name["two__words"](self.layers[0](self._first(x)))


class Wrapped(nn.Module):
    """A module of torch, called from user code."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.encoder = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def site_of(model: nn.Module, *inputs: Tensor, **named: Tensor) -> SiteReport:
    (site,) = attn_fuse.explain(model, *inputs, **named).sites
    return site


@pytest.mark.parametrize("batch", every_day([1, 2], 2))
@pytest.mark.parametrize("padded", [False, True])
def test_multihead_attention_has_its_heads_and_its_padding(batch: int, padded: bool) -> None:
    x, padding = torch.randn(batch, 16, 64), torch.arange(16).repeat(batch, 1) > 9
    model = nn.MultiheadAttention(64, 8, batch_first=True)
    site = site_of(model, x, x, x, **({"key_padding_mask": padding} if padded else {}))
    assert site.attention["heads"] == "8"
    assert site.attention["mask"] == ("key padding" if padded else "none")
    assert "bias" not in site.attention


def test_a_batch_of_single_heads_has_one_head() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    (site,) = attn_fuse.explain(attention, *(torch.randn(3, 8, 16) for _ in range(3))).sites
    assert site.attention["heads"] == "1"


@pytest.mark.parametrize(
    ("training", "gradients", "said"),
    [
        (False, False, "inference,"),
        (True, True, "training,"),
        (False, True, "eval() with gradients, as in training,"),
        (True, False, "train() without gradients,"),
    ],
)
def test_the_heading_says_whether_gradients_are_recorded(training: bool, gradients: bool, said: str) -> None:
    with contextlib.nullcontext() if gradients else torch.no_grad():
        heading = str(attn_fuse.explain(Attention().train(training), torch.randn(1, 8, 32))).splitlines()[0]
    assert heading.startswith(f"Attention(float32[1, 8, 32]), {said} float32 on cpu")


def test_a_model_without_weights_to_train_is_in_inference() -> None:
    model = Attention().eval().requires_grad_(False)
    assert ", inference," in str(attn_fuse.explain(model, torch.randn(1, 8, 32)))


def test_a_module_of_torch_is_located_in_torch_or_in_its_caller() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    x = torch.randn(1, 8, 32)
    alone, called = site_of(layer.train(), x), site_of(Wrapped(layer), x)
    assert Path(alone.location.file).match("torch/nn/modules/activation.py")
    assert alone.location.line > 1 and alone.location.code == "MultiheadAttention.forward"
    assert called.location.file == __file__ and called.location.code == "return self.encoder(x)"


def test_module_paths_are_as_the_program_names_them() -> None:
    model, x = Nested(), torch.randn(1, 8, 32)
    paths = ["_first", "layers.0.0", "by_name.two__words"]
    assert [site.location.module for site in attn_fuse.explain(model, x).sites] == paths

    def run(x: Tensor) -> Tensor:
        return model(x)

    with collecting() as reports:
        torch.compile(run, backend="attn_fuse", options={"inner_backend": "eager"})(x)
    assert [site.location.module for site in reports[0].sites] == [f"model.{path}" for path in paths]


MIX = torch.randn(4, 4)
LINEAR = nn.Linear(4, 4)


def over_heads(scores: Tensor) -> Tensor:
    """A linear layer over the heads of [batch, heads, q_len, kv_len]."""
    return LINEAR(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def mixed_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("hg,bgij->bhij", MIX, q @ k.mT).softmax(-1) @ v


MIXED: dict[str, Callable[..., Tensor]] = {
    "scores": mixed_scores,
    "scores of an einsum": lambda q, k, v: over_heads(torch.einsum("bhid,bhjd->bhij", q, k)).softmax(-1) @ v,
    "weights": lambda q, k, v: torch.einsum("hg,bgij->bhij", MIX, (q @ k.mT).softmax(-1)) @ v,
    "weights in a layer": lambda q, k, v: over_heads((q @ k.mT).softmax(-1)) @ v,
    "twice": lambda q, k, v: over_heads(over_heads(q @ k.mT).softmax(-1)) @ v,
}
NOT_MIXED: dict[str, Callable[..., Tensor]] = {
    "softmax over the heads": lambda q, k, v: (q @ k.mT).softmax(1) @ v,
    "softmax over the queries": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "one score of all heads": lambda q, k, v: F.dropout((q @ k.mT).mean(1, keepdim=True), 0.1).softmax(-1) @ v,
}


def operands() -> list[Tensor]:
    return [torch.randn(2, 4, 8, 16) for _ in range(3)]


@pytest.mark.parametrize("name", every_day(MIXED, "scores of an einsum", "twice"))
def test_mixed_heads_are_named(name: str) -> None:
    (site,) = attn_fuse.explain(MIXED[name], *operands()).sites
    assert site.status == "refused"
    assert site.blocker is not None and site.blocker.reason == "heads are mixed (talking heads)"
    assert site.blocker.location is not None and site.blocker.location.file == __file__


@pytest.mark.parametrize("name", every_day(NOT_MIXED, "one score of all heads"))
def test_other_refusals_keep_their_reason(name: str) -> None:
    (site,) = attn_fuse.explain(NOT_MIXED[name], *operands()).sites
    assert site.blocker is not None and "mixed (talking" not in site.blocker.reason


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def convolved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.conv2d(q @ k.mT, MIX[:, :, None, None]).softmax(-1) @ v


def weights_kept(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights


LEARNED = torch.ones((), requires_grad=True)


def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT * LEARNED).softmax(-1)
    weights.retain_grad()
    return weights @ v


@pytest.mark.parametrize(
    ("attention", "options", "advice"),
    [
        (plain, {}, 'try larger inputs; options={"pick": "fused"} fuses it all the same; '),
        (plain, {"pick": "fused"}, ""),
        (plain, {"kernels": ["cudnn"]}, "change what the kernels decline, or allow more of them"),
        (plain, {"fuel": 0, "pick": "fused"}, "raise the option fuel"),
        (plain, {"seconds": 1e-9}, "raise the option seconds"),
        (weights_kept, {}, "keep and return no weights, or "),
        (broken, {}, "move that line out of the attention, or "),
        (mixed_scores, {}, "no kernel takes mixed heads: "),
    ],
)
def test_what_is_left_as_written_ends_with_what_to_do(
    attention: Callable[..., Any], options: dict[str, Any], advice: str
) -> None:
    with collecting() as graphs:
        torch.compile(attention, backend="attn_fuse", options={"inner_backend": "eager", **options})(*operands())
    text = str(graphs[-1])
    (given,) = [line for line in text.splitlines() if line.startswith("      next: ")] or [""]
    assert given.removeprefix("      next:").strip().startswith(advice) and bool(given) == bool(advice)
    assert ("LEFT AS WRITTEN" in text) == bool(advice)


def test_no_operation_is_named_on_suspicion() -> None:
    (site,) = attn_fuse.explain(convolved, *operands()).sites
    assert site.blocker is not None and site.blocker.op == "conv2d" and site.blocker.advice == ""


def test_a_printed_report_groups_the_layers() -> None:
    with collecting() as graphs:
        model = nn.Sequential(*(Attention() for _ in range(3)))
        torch.compile(model, backend="attn_fuse", options={"inner_backend": "eager"})(torch.randn(1, 8, 32))
    text = str(graphs[0])
    assert text.startswith("[1] ") and "3 times" in text.splitlines()[0] and "[2]" not in text
    assert "\033" not in text and not text.splitlines()[0].startswith("[1] /")


class Biased(Attention):
    """The same with a table of biases."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) * 8**-0.5 + self.table).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


def passes_on(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward` behind a decorator that does not name the model, as in transformers."""

    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        return forward(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    """Layers with a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool).tril())

    @passes_on
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = layer.qkv(x).chunk(3, -1)
            x = layer(x) + (q @ k.mT / 4).masked_fill(~self.mask, -torch.inf).softmax(-1) @ v
        return x


def test_a_decorator_leaves_paths_as_in_the_model() -> None:
    with collecting() as graphs:
        torch.compile(Decorated(), backend="attn_fuse", options={"inner_backend": "eager"})(torch.randn(1, 8, 32))
    sites = graphs[0].sites
    assert [site.location.module for site in sites] == ["layers.0", "", "layers.1", ""]
    assert "by the contents of mask, a lower triangle" in sites[1].attention["mask"]


def test_layers_print_their_own_names_and_share_an_entry() -> None:
    with collecting() as graphs:
        model = nn.Sequential(*(Biased() for _ in range(3)))
        torch.compile(model, backend="attn_fuse", options={"inner_backend": "eager"})(torch.randn(1, 8, 32))
    assert [f"{site.location.module}.table[i,j]" in site.expression for site in graphs[0].sites] == [True] * 3
    assert "3 times" in (text := str(graphs[0])) and "[2]" not in text


def test_a_report_without_attention_says_so() -> None:
    assert str(GraphReport((), 0.0)) == "no attention found"


def test_a_terminal_gets_its_width_and_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Location("model.py", 3, "att = att.softmax(-1)", "h.0")
    site = SiteReport(where, "refused", blocker=Blocker("a reason of many words " * 12, "einsum", where))
    report, sheet = GraphReport((site,), 0.0), str(GraphReport((site,), 0.0))
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = str(report)
    assert "\033[33m    LEFT AS WRITTEN\033[0m" in shown
    assert max(len(re.sub(r"\033\[\d+m", "", line)) for line in shown.splitlines()) <= 60
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in str(report) and str(report).split() == sheet.split()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["torch.nn.modules.linear.Linear", nn.Linear, type("Bare", (), {})])
def test_any_record_of_a_module_gives_a_location(kind: object) -> None:
    """torch.export, and some versions of Dynamo, record a class by its name alone."""
    node = torch.fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"": ("L['self'].proj", kind)}
    found = locate(node)
    assert found.module == "proj" and (found.code == "Linear.forward" if kind is nn.Linear else found.line == 0)


def test_the_last_report_and_its_sites_in_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_recent", collections.deque())
    with pytest.raises(attn_fuse.AttnFuseError, match=r"compiled no graph in this process yet: .* first runs"):
        attn_fuse.last_report()
    torch.compile(Attention(), backend="attn_fuse", options={"inner_backend": "eager"})(torch.randn(1, 6, 32))
    last = attn_fuse.last_report()
    assert last is attn_fuse.reports()[-1]
    (site,) = last.sites
    assert repr(last.sites).count("\n") == 0 and f"<SiteReport {site.location}: as written: no kernel" in repr(site)
