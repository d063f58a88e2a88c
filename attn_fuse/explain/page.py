"""Page: an explanation as one HTML file that needs nothing beside itself: no script, no font, no network."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from attn_fuse.emit.picture import ALL, NONE, SOME
from attn_fuse.report import SDPA, GraphReport, Location, SiteReport, bytes_in_words

_STATUS = {
    "fused": "fused",
    "as written": "left as written",
    "refused": "left as written",
    "already fused": "fused in the program",
}
# Lines of source before and after the one that is shown.
_AROUND = 3
# Pixels of a picture's side.
_SIDE = 224


@dataclass(frozen=True)
class Figures:
    """A table of what was measured. note: the sentence below it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Part:
    """What a page says of one model. sites: those of all graphs, equal layers merged. graphs: for their code."""

    subject: str
    summary: tuple[str, ...]
    sites: tuple[SiteReport, ...]
    notes: tuple[str, ...]
    graphs: tuple[GraphReport, ...]


def page(title: str, parts: Sequence[Part], figures: Sequence[Figures] = (), notes: Sequence[str] = ()) -> str:
    """The page. figures: stand first, below the first part's summary. notes: stand last."""
    body: list[str] = []
    first = 1
    for place, part in enumerate(parts):
        body += _part(part, first, () if place else figures)
        first += len(part.sites)
    body += [f"<p class=note>{escape(note)}</p>" for note in notes]
    head = f"<meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"


def _part(part: Part, first: int, figures: Sequence[Figures]) -> Iterator[str]:
    """The part. first: the number of its first site on the page."""
    yield f"<h1>{escape(part.subject)}</h1>"
    yield from (f"<p class=summary>{escape(line)}</p>" for line in part.summary)
    yield from (line for table in figures for line in _figures(table))
    yield from _contents(part.sites, first)
    yield from (line for number, site in enumerate(part.sites, first) for line in _site(number, site))
    yield from (f"<p class=note>{escape(note)}</p>" for note in part.notes)
    yield from (line for number, graph in enumerate(part.graphs, 1) for line in _graph(number, graph))


def _figures(figures: Figures) -> Iterator[str]:
    yield f"<section><h2>{escape(figures.title)}</h2><table class=figures>"
    yield f"<tr>{''.join(f'<th>{escape(cell)}' for cell in figures.head)}</tr>"
    for name, *cells in figures.rows:
        yield f"<tr><th>{escape(name)}{''.join(f'<td>{escape(cell)}' for cell in cells)}</tr>"
    yield f"</table><p class=note>{escape(figures.note)}</p></section>"


def _contents(sites: Sequence[SiteReport], first: int) -> Iterator[str]:
    if not sites:
        return
    yield "<nav><table>"
    for number, site in enumerate(sites, first):
        where, kernel = site.location.module or "the program", site.kernel or ""
        yield (
            f"<tr><td><a href='#site{number}'>{escape(where)}</a><td>{_badge(site)}<td>{escape(kernel)}"
            f"<td>{escape(site.attention.get('mask', '').partition(',')[0])}</tr>"
        )
    yield "</table></nav>"


def _site(number: int, site: SiteReport) -> Iterator[str]:
    yield f"<section id=site{number}><h2>{escape(site.location.module or f'attention {number}')} {_badge(site)}</h2>"
    yield from _source(site.location)
    if site.blocker is not None:
        yield f"<p class=because>Because {escape(site.blocker.reason)}</p>"
        if site.blocker.location is not None and site.blocker.location != site.location:
            yield from _source(site.blocker.location)
    if site.blocker is not None and site.blocker.advice:
        yield f"<p>Next: {escape(site.blocker.advice)}</p>"
    facts = dict(site.attention)
    if site.status == "already fused":
        facts["calls"] = site.fused_by or SDPA
    if site.score_bytes:
        facts["saved"] = f"{bytes_in_words(site.score_bytes)} of scores no longer stored"
    if facts or site.picture:
        yield "<div class=facts>"
        yield from _table([[name, text] for name, text in facts.items()])
        yield from _picture(site.picture)
        yield "</div>"
    if site.expression:
        yield f"<h3>What is computed</h3><pre>{escape(site.expression)}</pre>"
    if site.kernel or site.why_not:
        yield "<h3>Kernels</h3>"
        chosen = [[site.kernel, f"chosen: {facts.get('picked', '')}"]] if site.kernel else []
        yield from _table([*chosen, *([name, "; ".join(reasons)] for name, reasons in site.why_not.items())])
    yield "</section>"


def _badge(site: SiteReport) -> str:
    return f"<span class='badge {'good' if 'fused' in site.status else 'left'}'>{_STATUS[site.status]}</span>"


def _source(location: Location) -> Iterator[str]:
    yield f"<p class=place>{escape(str(location).partition(' (')[0])}</p><pre class=source>"
    first = max(1, location.line - _AROUND)
    lines = [(n, linecache.getline(location.file, n)) for n in range(first, location.line + _AROUND + 1)]
    if not any(text.strip() == location.code.strip() for n, text in lines if n == location.line):
        lines = [(location.line, location.code)]
    for n, text in lines:
        shown = f"{n:5}  {escape(text.rstrip())}"
        if n == location.line:
            yield f"<mark>{shown}</mark>"
        elif text:
            yield shown
    yield "</pre>"


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "<table>"
    for name, text in rows:
        yield f"<tr><th>{escape(name)}<td>{escape(text)}</tr>"
    yield "</table>"


def _picture(rows: Sequence[str]) -> Iterator[str]:
    """The mask as squares: a row for each cell of queries, from the top, a column for each cell of keys."""
    if not rows:
        return
    wide, high = _SIDE / len(rows[0]), _SIDE / len(rows)
    yield f"<figure><svg width={_SIDE} height={_SIDE} role=img aria-label='the mask' shape-rendering=crispEdges>"
    for i, row in enumerate(rows):
        for first, last, cell in _runs(row):
            x, width = first * wide, (last - first) * wide
            yield f"<rect class={_CELLS[cell]} x={x:g} y={i * high:g} width={width:g} height={high:g} />"
    yield (
        "</svg><figcaption>keys to the right, queries downwards: "
        "<i class=all></i> seen <i class=some></i> in part <i class=none></i> hidden</figcaption></figure>"
    )


def _runs(row: str) -> Iterator[tuple[int, int, str]]:
    """(first, one past the last, character) of each stretch of equal characters."""
    first = 0
    for at in range(1, len(row) + 1):
        if at == len(row) or row[at] != row[first]:
            yield first, at, row[first]
            first = at


_CELLS = {ALL: "all", SOME: "some", NONE: "none"}


def _graph(number: int, graph: GraphReport) -> Iterator[str]:
    yield f"<details><summary>Graph {number}: its code, before and after</summary><div class=graphs>"
    for name, code in (("before", graph.before), ("after", graph.after)):
        yield f"<div><h3>{name}</h3><pre>{escape(code.strip())}</pre></div>"
    yield "</div></details>"


_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --left: #9a6700; --all: #1f6feb; --some: #8bb9f5; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin: 0; } h3 { font-size: .95rem; margin: 1rem 0 .3rem; }
pre { overflow-x: auto; padding: .6rem; border: 1px solid var(--line); border-radius: .3rem; font-size: 13px; }
pre { margin: 0; }
section { border: 1px solid var(--line); border-radius: .5rem; padding: 1rem; margin: 1.2rem 0; }
table { border-collapse: collapse; } th, td { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; }
th { font-weight: 600; white-space: nowrap; } mark { background: #ffd33d66; color: inherit; display: inline-block; }
.figures { font-size: .85rem; display: block; overflow-x: auto; }
.figures th { white-space: normal; } .figures td { white-space: nowrap; }
.figures td, .figures tr:first-child th + th { text-align: right; font-variant-numeric: tabular-nums; }
.summary { font-size: 1.05rem; margin: .2rem 0; } .place { margin: .6rem 0 .2rem; opacity: .75; }
.because { color: var(--left); font-weight: 600; } .note { opacity: .75; }
.badge { color: #fff; border-radius: 1rem; padding: .05rem .6rem; font-size: .8rem; white-space: nowrap; }
.good { background: var(--good); } .left { background: var(--left); }
.facts { display: flex; flex-wrap: wrap; gap: 2rem; margin-top: .8rem; } .facts table { flex: 1 1 24rem; }
figure { margin: 0; } figcaption { font-size: .8rem; max-width: 16rem; } svg { border: 1px solid var(--line); }
rect.all { fill: var(--all); } rect.some { fill: var(--some); } rect.none { fill: transparent; }
i { display: inline-block; width: .8em; height: .8em; border: 1px solid var(--line); }
i.all { background: var(--all); } i.some { background: var(--some); }
.graphs { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; } .graphs > div { min-width: 0; }
details { margin: .8rem 0; } summary { cursor: pointer; }
"""
