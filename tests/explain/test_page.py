"""The page that `--html` writes, and the pictures of masks on it."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attn_fuse
from attn_fuse.backend import analyze_only
from attn_fuse.explain import explain
from attn_fuse.explain.command import main
from attn_fuse.report import SiteReport, collecting

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


class Layer(nn.Module):
    """Causal self-attention by a buffer, as nanoGPT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)
        self.register_buffer("bias", torch.ones(64, 64).tril())

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        scores = (q @ k.mT / 4).masked_fill(self.bias[:n, :n] == 0, -torch.inf)
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    """`count` layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Layer() for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def site_of(keep: Callable[[Tensor, Tensor], Tensor], q_len: int, kv_len: int, *more: Tensor) -> SiteReport:
    """The site of an attention that hides what `keep`, a function of i and j and of `more`, does not hold for."""

    def program(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        kept = keep(torch.arange(q_len)[:, None], torch.arange(kv_len)[None], *more)
        return (q @ k.mT / 4).masked_fill(~kept, -torch.inf).softmax(-1) @ v

    (site,) = explain(program, torch.randn(2, 3, q_len, 16), *torch.randn(2, 2, 3, kv_len, 16), *more).sites
    return site


def drawn(kept: Tensor) -> tuple[str, ...]:
    """The picture of a mask that is given as a tensor [queries, keys]."""
    cells = (part.tensor_split(min(32, kept.shape[1]), 1) for part in kept.tensor_split(min(32, kept.shape[0])))
    return tuple("".join("#" if c.all() else "+" if c.any() else "." for c in row) for row in cells)


PADDING = torch.arange(70) < torch.tensor([55, 70])[:, None]
DOCUMENTS = torch.arange(70).div(25, rounding_mode="floor").expand(2, -1).contiguous()
MASKS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "causal": (lambda i, j: j <= i, ()),
    "window": (lambda i, j: (i - j).abs() < 9, ()),
    "prefix": (lambda i, j: (j <= i) | (j < 20), ()),
    "dilated": (lambda i, j: (i - j) % 3 == 0, ()),
    "blocks": (lambda i, j: i // 8 == j // 8, ()),
    "padding": (lambda i, j, kept: kept[:, None, None, :], (PADDING,)),
    "documents": (lambda i, j, n: n[:, None, :, None] == n[:, None, None, :], (DOCUMENTS,)),
    "documents, causal": (lambda i, j, n: (n[:, None, :, None] == n[:, None, None, :]) & (j <= i), (DOCUMENTS,)),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_picture_is_the_mask(name: str) -> None:
    keep, more = MASKS[name]
    site = site_of(keep, 70, 70, *more)
    kept = keep(torch.arange(70)[:, None], torch.arange(70)[None], *more).expand(2, 3, 70, 70)
    assert site.picture == drawn(kept[0, 0])


@pytest.mark.parametrize("sizes", [(1, 70), (70, 5), (33, 64)])
def test_few_positions_are_cells_of_their_own(sizes: tuple[int, int]) -> None:
    def keep(i: Tensor, j: Tensor) -> Tensor:
        return j <= i + sizes[1] - sizes[0] - 2

    site = site_of(keep, *sizes)
    assert site.picture == drawn(keep(torch.arange(sizes[0])[:, None], torch.arange(sizes[1])))


def test_keys_on_two_axes() -> None:
    """Windows of an image: the keys lie on rows and columns; a row of queries is one head of them."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(6)
        near = (at[:, None] - at).abs() < 2
        kept = near[:, None, :, None] & near[None, :, None, :]
        scores = torch.einsum("bxyd,buvd->bxyuv", q, k).masked_fill(~kept, -torch.inf)
        weights = scores.flatten(3).softmax(-1).unflatten(3, (6, 6))
        return torch.einsum("bxyuv,buvd->bxyd", weights, v)

    near = (torch.arange(6)[:, None] - torch.arange(6)).abs() < 2
    kept = (near[:, None, :, None] & near[None, :, None, :]).reshape(6, 6, 36)
    (site,) = explain(program, *torch.randn(3, 2, 6, 6, 16)).sites
    assert site.picture == drawn(kept[0])


def test_what_is_not_drawn() -> None:
    plain = explain(lambda x: (x @ x.mT).softmax(-1) @ x, torch.randn(2, 3, 9, 16))
    assert plain.sites[0].picture == ()
    long = site_of(lambda i, j: j <= i, 4097, 4097)
    assert long.picture == () and "causal" in long.attention["mask"]
    model, x = Stack(1), torch.randn(2, 9, 32)
    torch.compile(model, backend="attn_fuse", options={"inner_backend": "eager", "pick": "fused"})(x)
    assert attn_fuse.reports()[-1].sites[0].picture == ()


def test_a_mask_that_cannot_be_drawn_costs_no_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> tuple[str, ...]:
        raise RuntimeError("by design")

    monkeypatch.setattr("attn_fuse.site.picture", fails)
    with collecting() as graphs:
        torch.compile(Stack(1), backend=lambda g, x: analyze_only(g, x, options={"pick": "fused"}))(
            torch.randn(2, 9, 32)
        )
    (site,) = graphs[0].sites
    assert site.fused and site.picture == ()


# ---- the page


class Outline(HTMLParser):
    """The text of a page, and its tags by name; what is not closed raises."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tags = "", [*re.findall(r"<(\w+)", text)]
        self.feed(text)
        self.close()

    def handle_data(self, data: str) -> None:
        self.text += data


class Refused(nn.Module):
    """An attention whose sum of weights is kept above <0.5>, which is no HTML tag."""

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.mT).exp()
        return (weights / weights.sum(-1, keepdim=True).clamp(min=0.5)) @ x  # x < 0.5 & x > 0


def test_a_page_has_what_the_report_has() -> None:
    model, x = Stack(2), torch.randn(2, 64, 32)
    explanation = explain(model.eval(), x)
    page = Outline(explanation.html())
    said = " ".join(page.text.split())
    for site in explanation.sites:
        for text in (*site.attention.values(), *site.why_not, *site.expression.splitlines()):
            assert " ".join(re.sub(r"blocks\.\d+\.", "", text).split())[:30] in re.sub(r"blocks\.\d+\.", "", said), text
    assert explanation.subject in said and "2 attentions" in said
    assert page.tags.count("section") == 1 and page.tags.count("svg") == 1 and page.tags.count("details") == 1


def test_a_refusal_names_its_line_and_code_is_escaped() -> None:
    text = explain(Refused(), torch.randn(2, 3, 9, 16)).html()
    assert "left as written" in text and "Because " in text
    assert html.escape("# x < 0.5 & x > 0") in text and "<0.5>" not in text


def test_a_page_without_any_attention() -> None:
    assert "no attention found" in Outline(explain(nn.Linear(4, 4), torch.randn(2, 4)).html()).text


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Model(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.p = nn.Linear(16, 48)\n\n    def forward(self, x: torch.Tensor):\n"
        "        q, k, v = self.p(x).chunk(3, -1)\n        return (q @ k.mT / 4).softmax(-1) @ v\n"
    )
    out = tmp_path / "report.html"
    assert main([str(model), "--html", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>") and "1 attention" in capsys.readouterr().out


def test_a_page_that_cannot_be_written_is_told_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {
        tmp_path / "none" / "report.html": "name a file in a folder that exists",
        tmp_path: "that is a folder, name a file",
    }
    for path, words in said.items():
        assert main(["no_such_model.py", "--html", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"--html {path}: it cannot be written; {words}" in line


def test_the_text_is_printed_where_the_page_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    model = tmp_path / "model.py"
    model.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Model(nn.Module):\n"
        "    def forward(self, q: torch.Tensor):\n        return (q @ q.mT).softmax(-1) @ q\n"
    )
    inputs = ["--inputs", "torch.randn(2, 8, 16)"]
    monkeypatch.setattr(Path, "write_text", full)
    assert main([str(model), *inputs, "--html", str(tmp_path / "report.html")]) == 2
    captured = capsys.readouterr()
    assert "1 attention" in captured.out and "it cannot be written: No space left on device" in captured.err


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(explain(Stack(2).eval(), torch.randn(2, 64, 32)).html())
    command = [str(CHROMIUM), *QUIET.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    # The browser closes what it had to repair: its elements are those that we wrote.
    assert Outline(shown).tags.count("rect") == Outline(file.read_text()).tags.count("rect") > 32
    assert "In part" not in shown and " in part " in shown
