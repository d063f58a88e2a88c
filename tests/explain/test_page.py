"""The page that `--html` writes, and the pictures of masks and biases on it."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attn_fuse
from attn_fuse.backend import analyze_only
from attn_fuse.emit.builder import NotEmitted
from attn_fuse.emit.call import Call
from attn_fuse.explain import explain
from attn_fuse.explain import page as page_module
from attn_fuse.explain.command import main
from attn_fuse.explain.explanation import Explanation
from attn_fuse.report import Blocker, Code, GraphReport, Location, SiteReport, collecting, grouped

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


SLOPES = 2.0 ** -torch.arange(1, 4)


def biased(i: Tensor, j: Tensor) -> Tensor:
    """ALiBi for three heads."""
    return SLOPES[:, None, None] * (j - i)


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("sizes", [(70, 70), (5, 40), (64, 96)])
def test_a_picture_of_biases_has_the_first_number_of_each_cell(sizes: tuple[int, int], hides: bool) -> None:
    i, j = torch.arange(sizes[0])[:, None], torch.arange(sizes[1])

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / 4 + biased(torch.arange(sizes[0])[:, None], torch.arange(sizes[1]))
        kept = torch.arange(sizes[1]) <= torch.arange(sizes[0])[:, None]
        return (scores.masked_fill(~kept, -torch.inf) if hides else scores).softmax(-1) @ v

    (site,) = explain(program, torch.randn(2, 3, sizes[0], 16), *torch.randn(2, 2, 3, sizes[1], 16)).sites
    starts = [[part[0].item() for part in at.flatten().tensor_split(min(32, len(at.flatten())))] for at in (i, j)]
    wanted = biased(i, j)[0]
    assert site.bias == tuple(
        tuple(None if hides and y > x else float(f"{wanted[x, y]:.4g}") for y in starts[1]) for x in starts[0]
    )


class Shown(nn.Module):
    """Causal, with ALiBi."""

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(64)
        apart = at - at[:, None]
        return (x @ x.mT + 0.5 * apart).masked_fill(apart > 0, -torch.inf).softmax(-1) @ x


class Table(nn.Module):
    """Relative positions from a learned table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(15, 2))

    def forward(self, q: Tensor) -> Tensor:
        at = torch.arange(8)
        return (q @ q.mT / 4 + self.table[at - at[:, None] + 7].permute(2, 0, 1)).softmax(-1) @ q


def test_learned_biases_are_drawn() -> None:
    model = Table()
    (site,) = explain(model, torch.randn(1, 2, 8, 16)).sites
    at = torch.arange(8)
    wanted = model.table.detach()[at - at[:, None] + 7, 0]
    assert site.picture == ()
    torch.testing.assert_close(torch.tensor(site.bias), wanted, atol=0, rtol=1e-3)


def test_biases_that_are_not_drawn() -> None:
    def added(q: Tensor, bias: Tensor) -> Tensor:
        return (q @ q.mT + bias).softmax(-1) @ q

    q = torch.randn(1, 2, 8, 16)
    assert explain(added, q, torch.full((8, 8), 2.0)).sites[0].bias == (), "all are the same"
    assert explain(added, q, torch.full((8, 8), math.nan)).sites[0].bias == ()
    computed = explain(lambda q, x: added(q, x @ x.mT), q, torch.randn(8, 4))
    assert computed.sites[0].bias == () and computed.sites[0].attention["bias"] == "1 added to the scores"
    model, x = Table(), torch.randn(1, 2, 8, 16)
    torch.compile(model, backend="attn_fuse", options={"inner_backend": "eager", "pick": "fused"})(x)
    assert attn_fuse.reports()[-1].sites[0].bias == ()


def test_biases_that_cannot_be_computed_cost_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, program = Call.over_scores, Shown()

    def fails(self: Call, x: Any, dtype: torch.dtype | None = None) -> Any:
        if dtype == torch.float32:
            raise NotEmitted("by design")
        return drawn(self, x, dtype)

    monkeypatch.setattr(Call, "over_scores", fails)
    (site,) = explain(program, torch.randn(2, 64, 32)).sites
    assert site.picture and site.bias == ()


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
    assert site.fused and site.picture == site.bias == ()


# ---- the page


class Outline(HTMLParser):
    """A page: its text, the text outside of code, the names of its tags, its ids, and where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.prose, self.tags = "", "", [*re.findall(r"<(\w+)", text)]
        self.ids: list[str] = []
        self.links: list[str] = []
        self._code: list[str] = []
        self.feed(text)
        self.close()
        assert not self._code, "code that is not closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attributes if name == "id"]
        self.links += [value or "" for name, value in attributes if name in ("href", "src")]
        if tag in ("pre", "code", "script", "style"):
            self._code.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("pre", "code", "script", "style"):
            assert self._code.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        self.prose += "" if self._code else data


def page_of(explanation: Explanation, **more: Any) -> Outline:
    """The page of `explanation`, without dead links or backticks, and with each card once."""
    found = Outline(explanation.html(**more))
    assert len({*found.ids}) == len(found.ids)
    assert {link.removeprefix("#") for link in found.links} <= {*found.ids}, "a link without a target, or to elsewhere"
    cards = [*grouped(explanation.sites)]
    assert [name for name in found.ids if name.startswith("site")] == [f"site{n}" for n in range(1, len(cards) + 1)]
    assert "`" not in found.prose
    return found


class Refused(nn.Module):
    """An attention whose sum of weights is kept above <0.5>, which is no HTML tag."""

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.mT).exp()
        return (weights / weights.sum(-1, keepdim=True).clamp(min=0.5)) @ x  # x < 0.5 & x > 0


def test_a_page_has_what_the_report_has() -> None:
    model, x = Stack(2), torch.randn(2, 64, 32)
    explanation = explain(model.eval(), x)
    page = page_of(explanation)
    said = " ".join(page.text.split())
    for site in explanation.sites:
        for text in (*site.attention.values(), *site.why_not, *site.expression.splitlines()):
            assert " ".join(re.sub(r"blocks\.\d+\.", "", text).split())[:30] in re.sub(r"blocks\.\d+\.", "", said), text
    assert explanation.subject in said and "2 attentions" in said
    assert said.count("scores.softmax(-1) @ v).transpose") == 1, "the source is shown once"
    assert page.tags.count("svg") == 1


def test_a_page_names_what_made_it() -> None:
    explanation = replace(explain(Stack(1), torch.randn(2, 9, 32)), said=("small values by `name`",))
    head, _, rest = " ".join(page_of(explanation, command="explain <it>").text.split()).partition(" explain <it> ")
    assert f"attn_fuse {attn_fuse.__version__} · torch {torch.__version__} · " in head
    assert re.search(r" · 20\d\d-\d\d-\d\d \d\d:\d\d ", head)
    assert "How it was run small values by name" in rest


class Mixed(nn.Module):
    """Layers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Layer() for _ in range(3))
        self.decoder = nn.ModuleDict({"first": Refused(), "second": nn.Sequential(Refused())})

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.encoder, *self.decoder.values()):
            x = layer(x)
        return x


def test_the_tree_leads_from_each_module_to_its_card() -> None:
    page = page_of(explain(Mixed(), torch.randn(2, 64, 32)))
    assert page.links == ["#site1", "#site2", *["#site1"] * 3, *["#site2"] * 2], "the overview, then the tree"
    tree = " ".join(page.text.split()).partition(" Modules ")[2]
    outcome = re.match(r"encoder 3 ([a-z ]+?) 0 ", tree)
    assert outcome is not None
    assert tree.startswith(
        f"encoder 3 {outcome[1]} 0 {outcome[1]} 1 {outcome[1]} 2 {outcome[1]} "
        "decoder 2 left as written first left as written second.0 left as written"
    )


def test_times_and_memory_are_drawn_from_figures_alone() -> None:
    where = Location("model.py", 3, "x.softmax(-1)", "h")
    attention = {"picked": "2.0 times as fast as written, by measurements on a machine"}
    slower = {"flex": ("4.00 times as slow as written, by measurements on a machine",), "other": ("takes none",)}
    ratios = {"chunked": 0.5, "flex": 4.0}
    timed = SiteReport(where, "fused", attention, "chunked", slower, ratios, score_bytes=2048)
    text = Explanation("M()", (GraphReport((timed,), 0.0),)).html()
    assert re.findall(r"width: ([\d.]+)%", text) == ["100", "0", "12.5", "100", "25"]
    assert text.count("by measurements on a machine") == 1
    bare = replace(
        timed, ratios={}, score_bytes=0, attention={"picked": "asked for"}, why_not={"other": ("takes none",)}
    )
    assert 'class="bar' not in Explanation("M()", (GraphReport((bare,), 0.0),)).html()


def test_a_refusal_names_its_line_and_code_is_escaped() -> None:
    text = explain(Refused(), torch.randn(2, 3, 9, 16)).html()
    assert "left as written" in text and "Because " in text
    assert re.findall(r'class="badge (\w+)"', text) == ["left"]
    assert "0.5" in Outline(text).text and "# x < 0.5 & x > 0" in Outline(text).text and "<0.5>" not in text
    assert Outline(text).text.count("sum(-1, keepdim=True).clamp(min=0.5)") == 1, "site and blocker share their source"
    assert re.findall(r"<mark class=(\w+)>", text) == ["here", "blocks"]


class Joined(nn.Module):
    """Keeps the largest scores, a few lines above the softmax."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.mT
        limit = scores.topk(2).values[..., -1:]
        return scores.masked_fill(scores < limit, -torch.inf).softmax(-1) @ x


def test_a_blocker_is_marked_in_the_source_of_its_site() -> None:
    explanation = explain(Joined(), torch.randn(2, 9, 16))
    text = explanation.html()
    assert Outline(text).text.count("limit = scores.topk(2)") == 1
    assert re.findall(r"<mark class=(\w+)>", text) == ["blocks", "here"]
    assert "More on this reason" in text and "which could flip the comparison" in page_of(explanation).text


def test_a_line_that_its_file_has_no_longer_is_shown_once() -> None:
    where = Location("gone.py", 3, "weights = scores.softmax(-1)", "")
    site = SiteReport(where, "refused", blocker=Blocker("a reason", "softmax", where))
    assert page_of(Explanation("M()", (GraphReport((site,), 0.0),))).text.count("weights = ") == 1
    elsewhere = replace(
        site, blocker=Blocker("a reason", "topk", Location("other.py", 9, "limit = scores.topk(2)", ""))
    )
    text = Explanation("M()", (GraphReport((elsewhere,), 0.0),)).html()
    assert re.findall(r"<p class=place>(.*?)</p>", text) == ["gone.py:3", "other.py:9"]


def test_a_statement_to_write_otherwise_is_what_comes_next() -> None:
    where = Location("model.py", 3, "weights = scores.softmax(-2)", "")
    change = Code("model.py", ((3, 3),), "forward", (), ("weights = scores.softmax(-1)",), ("it runs `twice`",))
    site = SiteReport(where, "refused", blocker=Blocker("a reason", "softmax", where, "advice", change))
    text = " ".join(page_of(Explanation("M()", (GraphReport((site,), 0.0),))).text.split())
    assert "Next: write in place of line 3 of model.py, in forward weights = scores.softmax(-1) it runs twice" in text
    assert "advice" not in text


def test_evidence_stands_apart_from_what_it_says() -> None:
    said = "2.0 times as fast as written, by measurements here, the nearest at causal; attention takes about 30%"
    wanted = "2.0 times as fast as written; attention takes about 30%", "by measurements here, the nearest at causal"
    assert page_module._without_evidence(said) == wanted
    assert page_module._without_evidence("takes none") == ("takes none", "")


@pytest.mark.parametrize("installed", [False, True])
def test_source_is_coloured_where_pygments_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if installed:
        pytest.importorskip("pygments")
    else:
        monkeypatch.setitem(sys.modules, "pygments", None)
    page_module._python.cache_clear()
    text = explain(Refused(), torch.randn(2, 3, 9, 16)).html()
    page_module._python.cache_clear()
    assert ("<span class=" in text.partition("<pre")[2].partition("</pre>")[0]) is installed
    assert "# x < 0.5 & x > 0" in Outline(text).text


def test_every_documented_reason_has_its_advice_on_the_page() -> None:
    text = Path(page_module.__file__).with_name("reasons.md").read_text()
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", text, re.MULTILINE)
    reasons = {reason: what for cell, what in rows if cell != "reason" for reason in cell.split("; ")}
    assert len(reasons) > 100
    for reason, what in reasons.items():
        known = page_module._what_to_do(reason.replace("…", "a thing"))
        assert known and "](" not in known and not known.startswith("the same"), reason
        if "the same" not in what and "](" not in what and "…" not in reason:
            assert known == what, reason
    assert page_module._what_to_do("a reason of no document") == ""


def test_a_page_without_any_attention() -> None:
    assert "no attention found" in page_of(explain(nn.Linear(4, 4), torch.randn(2, 4))).text


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
    assert f"python -m attn_fuse.explain {model} --html {out}" in Outline(out.read_text()).text


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
    # Once loaded, the pointer goes to the middle of each picture.
    moves = (
        "<script>for (const svg of document.querySelectorAll('svg')) { const box = svg.getBoundingClientRect();"
        " const to = { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2 };"
        " svg.dispatchEvent(new PointerEvent('pointermove', to)); }</script>"
    )
    written = explain(Shown().eval(), torch.randn(2, 64, 32)).html()
    file.write_text(written.replace("</body>", f"{moves}</body>"))
    command = [str(CHROMIUM), *QUIET.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    # The browser closes what it had to repair: its elements are those that we wrote.
    assert [Outline(text).tags.count("path") for text in (shown, written)] == [2 + 17] * 2
    assert re.findall(r"<output>(.*?)</output>", shown) == [
        "queries 32 to 33, keys 32 to 33: seen in part",
        "query 32, key 32: 0",
    ]
