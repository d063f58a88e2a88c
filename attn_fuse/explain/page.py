"""An explanation as one self-contained HTML file: no font, no network, and it reads the same without its script.

Its template is page.html.jinja, its style page.css, and page.js names the positions under the pointer.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import linecache
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
import torch
from markupsafe import Markup, escape

from attn_fuse.emit.picture import ALL, NONE, SOME
from attn_fuse.picker.timing import this_device
from attn_fuse.report import SDPA, GraphReport, Location, SiteReport, bytes_in_words, version

_STATUS = {
    "fused": "fused",
    "as written": "left as written",
    "refused": "left as written",
    "already fused": "fused in the program",
}
_CELLS = {ALL: "all", SOME: "some", NONE: "none"}
# Lines of source shown before and after the site.
_AROUND = 3
# Shades of a picture of biases.
_SHADES = 16


@dataclass(frozen=True)
class Bar:
    """A cell with a bar. share: the bar's length over that of the longest."""

    text: str
    share: float


@dataclass(frozen=True)
class Figures:
    """A table of measurements. notes: the sentences below it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str | Bar, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """The page's part on one model.

    said: what was made up to run it. cards: the sites of all graphs, equal layers merged, each with its members.
    graphs: for their code.
    """

    subject: str
    summary: tuple[str, ...]
    said: tuple[str, ...]
    cards: tuple[tuple[SiteReport, Sequence[SiteReport]], ...]
    notes: tuple[str, ...]
    graphs: tuple[GraphReport, ...]


def page(
    title: str, parts: Sequence[Part], figures: Sequence[Figures] = (), notes: Sequence[str] = (), command: str = ""
) -> str:
    """The page. figures: placed below the first part's summary. notes: placed last. command: what made the page."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    made = (
        f"attn_fuse {version()}",
        f"torch {torch.__version__}",
        *(str(this_device(torch.device(name))) for name in devices),
        f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    )
    return _template().render(title=title, parts=parts, figures=figures, notes=notes, command=command, made=made)


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("attn_fuse.explain", "")
    environment = jinja2.Environment(autoescape=True, loader=loader, undefined=jinja2.StrictUndefined)
    environment.filters["prose"] = _prose
    environment.globals |= {
        "style": Markup(loader.get_source(environment, "page.css")[0]),
        "script": Markup(loader.get_source(environment, "page.js")[0]),
        "status": _STATUS,
        "shades": _SHADES,
        "bytes_in_words": bytes_in_words,
        "sources": _sources,
        "python": _python,
        "mask_of": _mask,
        "bias_of": _bias,
        "facts_of": _facts,
        "without_evidence": _without_evidence,
        "what_to_do": _what_to_do,
        "kernels_of": _kernels,
        "tree_of": _tree,
    }
    return environment.get_template("page.html.jinja")


def _prose(text: object) -> Markup:
    """`text` with words in backticks, and options, as code."""
    return Markup(re.sub(r"`([^`]+)`|(options=\{[^}]+\})", r"<code>\1\2</code>", str(escape(text))))


# ---- what a card says


def _facts(site: SiteReport) -> dict[str, str]:
    facts = {name: text for name, text in site.attention.items() if name != "picked"}
    if site.status == "already fused":
        facts["calls"] = site.fused_by or SDPA
    return facts


def _without_evidence(text: str) -> tuple[str, str]:
    """(`text` without the measurements that it rests on, those measurements)"""
    found = re.search(r", ((?:by|estimated from) measurements [^;]*)", text)
    return (text[: found.start()] + text[found.end() :], found[1]) if found else (text, "")


@dataclass(frozen=True)
class _Kernels:
    """The table of kernels. rows: names, why or why not, the time as a bar, whether it was chosen."""

    rows: tuple[tuple[str, str, Bar | None, bool], ...]
    evidence: tuple[str, ...]


def _kernels(site: SiteReport) -> _Kernels:
    reasons = {name: "; ".join(reasons) for name, reasons in site.why_not.items()}
    if site.kernel:
        reasons = {site.kernel: site.attention.get("picked", ""), **reasons}
    longest = max(1.0, *site.ratios.values()) if site.ratios else 1.0
    names: dict[tuple[str, Bar | None], list[str]] = {}
    evidence = dict[str, None]()
    for name, reason in reasons.items():
        said, how = _without_evidence(reason)
        ratio = site.ratios.get(name)
        names.setdefault((said, None if ratio is None else Bar(f"{ratio:.2f}", ratio / longest)), []).append(name)
        evidence |= {how: None} if how else {}
    rows = [(", ".join(of), said, bar, site.kernel in of) for (said, bar), of in names.items()]
    if site.ratios:
        rows.append(("as written", "the program under Inductor", Bar("1", 1 / longest), not site.kernel))
    return _Kernels(tuple(rows), tuple(evidence))


@functools.cache
def _advice() -> dict[re.Pattern[str], str]:
    """The rows of reasons.md: a reason's pattern, and what to do."""
    rows, text = dict[re.Pattern[str], str](), ""
    for line in Path(__file__).with_name("reasons.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.removeprefix("|").rstrip("| ").split(" | ")]
        if line.startswith("| ") and len(cells) == 2 and cells[0] != "reason":
            text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", cells[1].replace("the same", text, 1))
            rows |= {re.compile(".*".join(map(re.escape, reason.split("…")))): text for reason in cells[0].split("; ")}
    return rows


def _what_to_do(reason: str) -> str:
    """The documentation of `reason`, by the longest pattern that it begins with; "" without one."""
    found = [pattern for pattern in _advice() if pattern.match(reason)]
    return _advice()[max(found, key=lambda pattern: len(pattern.pattern))] if found else ""


# ---- source


@dataclass(frozen=True)
class _Source:
    """Lines of a file: number, code, and why the line is marked."""

    place: str
    lines: tuple[tuple[int, Markup, str], ...]


def _sources(site: SiteReport) -> Iterator[_Source]:
    """The source of the site, and of its blocker unless the first shows it."""
    marks, blocks = [(site.location, "here")], site.blocker and site.blocker.location
    if blocks and (blocks.file, blocks.line) != (site.location.file, site.location.line):
        marks.append((blocks, "blocks"))
    known = [_is_current(location) for location, _ in marks]
    (first, _), (last, _) = marks[0], marks[-1]
    if first.file == last.file and all(known) and abs(first.line - last.line) <= 2 * _AROUND:
        yield _source(marks[::-1])
        return
    yield from (_source([mark]) for mark in marks)


def _source(marks: Sequence[tuple[Location, str]]) -> _Source:
    location = marks[-1][0]
    place = str(replace(location, module=""))
    if not all(_is_current(location) for location, _ in marks):
        return _Source(place, ((location.line, _python(location.code)[0], marks[-1][1]),))
    why = {location.line: words for location, words in marks}
    code = _python("".join(linecache.getlines(location.file)))
    shown = range(max(1, min(why) - _AROUND), min(len(code), max(why) + _AROUND) + 1)
    return _Source(place, tuple((n, code[n - 1], why.get(n, "")) for n in shown))


def _is_current(location: Location) -> bool:
    """Whether the file has the line; it may have changed since the graph was made."""
    return linecache.getline(location.file, location.line).strip() == location.code.strip() != ""


@functools.lru_cache(32)
def _python(code: str) -> tuple[Markup, ...]:
    """The lines of Python code, coloured if Pygments is installed."""
    try:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer
    except ImportError:
        return tuple(map(escape, code.rstrip().split("\n")))
    lines = highlight(code.rstrip(), PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).rstrip("\n").split("\n")
    return tuple(map(Markup, lines))


# ---- pictures


@dataclass(frozen=True)
class _Picture:
    """A picture of cells. paths: those of one shade. rows: for the script, with the lengths. cell: positions in one."""

    paths: tuple[tuple[str, str], ...]
    rows: str
    height: int
    width: int
    cell: str
    low: str = ""
    high: str = ""


def _mask(site: SiteReport) -> _Picture | None:
    return _picture(site, site.picture, [[_CELLS[cell] for cell in row] for row in site.picture])


def _bias(site: SiteReport) -> _Picture | None:
    numbers = [number for row in site.bias for number in row if number is not None]
    if not numbers:
        return None
    low, high = min(numbers), max(numbers)

    def shade(number: float | None) -> str:
        return "hidden" if number is None else f"s{(number - low) / (high - low) * (_SHADES - 1):.0f}"

    drawn = _picture(site, site.bias, [[*map(shade, row)] for row in site.bias])
    return drawn and replace(drawn, low=f"{low:g}", high=f"{high:g}")


def _picture(site: SiteReport, rows: Sequence[Any], shades: Sequence[Sequence[str]]) -> _Picture | None:
    if not rows:
        return None
    lengths = [int(site.attention[name]) for name in ("q_len", "kv_len")]
    paths: dict[str, str] = {}
    for y, row in enumerate(shades):
        x = 0
        for shade, run in itertools.groupby(row):
            count = len([*run])
            paths[shade] = paths.get(shade, "") + f"M{x} {y}h{count}v1h-{count}z"
            x += count
    paths.pop("none", None)
    cells = len(rows), len(rows[0])
    sizes = [f"{n / count:.3g}" for n, count in zip(lengths, cells, strict=True)]
    cell = " x ".join(sizes) if lengths != [*cells] else ""
    return _Picture(tuple(paths.items()), json.dumps({"lengths": lengths, "rows": rows}), *cells, cell)


# ---- the tree of modules


@dataclass(frozen=True)
class _Branch:
    """Modules below a name. cards: the status and card of each site of the module itself. counts: sites by status."""

    name: str
    cards: tuple[tuple[str, int], ...]
    below: tuple[_Branch, ...]
    counts: dict[str, int]


def _tree(part: Part, before: int) -> tuple[_Branch, ...]:
    """The modules of the part's sites. before: the number of cards of earlier parts."""
    sites = [
        (tuple(member.location.module.split(".")), _STATUS[site.status], number)
        for number, (site, members) in enumerate(part.cards, before + 1)
        for member in members
        if member.location.module
    ]
    return tuple(_branches(sites))


def _branches(sites: Sequence[tuple[tuple[str, ...], str, int]]) -> Iterator[_Branch]:
    below: dict[str, list[tuple[tuple[str, ...], str, int]]] = {}
    for path, status, card in sites:
        below.setdefault(path[0], []).append((path[1:], status, card))
    for name, found in below.items():
        # A chain of modules with one child each is one branch.
        while len({path[:1] for path, _, _ in found}) == 1 and found[0][0]:
            name = f"{name}.{found[0][0][0]}"
            found = [(path[1:], status, card) for path, status, card in found]
        cards = tuple((status, card) for path, status, card in found if not path)
        deeper = tuple(_branches([site for site in found if site[0]]))
        statuses = [status for _, status, _ in found]
        yield _Branch(name, cards, deeper, {status: statuses.count(status) for status in dict.fromkeys(statuses)})
