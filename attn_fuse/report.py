"""Reports: what became of each attention of a compiled graph, as values and as text."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from attn_fuse.torch_internals import trace_artifact

log = logging.getLogger("attn_fuse")


@dataclass(frozen=True)
class Location:
    """A place in the user's program.

    code: the text of the line. module: the dotted path of the module that runs it; "" outside a module.
    """

    file: str
    line: int
    code: str
    module: str

    def __str__(self) -> str:
        near = os.path.relpath(self.file) if os.path.isabs(self.file) else self.file
        where = f"{self.file if near.startswith('..') else near}:{self.line}"
        return f"{where} ({self.module})" if self.module else where


@dataclass(frozen=True)
class Blocker:
    """Why a site stayed as written. op: the name of the operation that blocks. location: its place in the source."""

    reason: str
    op: str
    location: Location | None


@dataclass(frozen=True)
class SiteReport:
    """One attention: what was recognised and what was done with it.

    location: where its softmax stands.
    status: "fused", "as written" (recognised, but no kernel took it), "refused" (not proved to be an attention that
        can be fused), or "already fused" (the program calls `F.scaled_dot_product_attention` itself).
    attention: the recognised facts in words, by name: heads, head_dim, mask, scale, dropout, ...; empty if refused.
    kernel: the kernel chosen, or None.
    why_not: for every other kernel the reasons why it was not chosen.
    blocker: for a site that is not fused, the one cause; None where the program fuses it itself.
    score_bytes: the bytes of the score matrix that is no longer stored; 0 unless fused.
    expression: what each element of the scores and of the output is, as mathematics; of a refused site what was read of
        the output, "" where nothing was.
    picture: the mask, as `attention.picture` draws it; empty where it draws none, and outside explain.
    """

    location: Location
    status: Literal["fused", "as written", "refused", "already fused"]
    attention: dict[str, str] = field(default_factory=dict)
    kernel: str | None = None
    why_not: dict[str, tuple[str, ...]] = field(default_factory=dict)
    blocker: Blocker | None = None
    score_bytes: int = 0
    expression: str = ""
    picture: tuple[str, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether attn_fuse put the attention on a kernel."""
        return self.status == "fused"


@dataclass(frozen=True)
class GraphReport:
    """One graph that the backend compiled.

    seconds: the time until the graph went to the inner backend. notes: sentences for the user about the whole graph.
    before, after: the code of the graph as Dynamo made it, and as handed to the inner backend.
    """

    sites: tuple[SiteReport, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    before: str = ""
    after: str = ""


def relocated(sites: Sequence[SiteReport], locations: Sequence[Location]) -> tuple[SiteReport, ...]:
    """`sites` at `locations`, those of the first capture: a graph captured anew has lost its source lines.

    The sites of both captures match in order; where their numbers differ, `sites` stay as they are.
    """
    if len(sites) != len(locations):
        return tuple(sites)
    return tuple(replace(site, location=where) for site, where in zip(sites, locations, strict=True))


_recent: collections.deque[GraphReport] = collections.deque(maxlen=256)


def record(report: GraphReport) -> None:
    """Keep `report` for `reports()`, log one line for each site, and add the text to torch's structured trace."""
    _recent.append(report)
    if report.sites:
        trace_artifact("attn_fuse", lambda: as_text(report, expressions=True))
    for site in report.sites:
        log.info("%s: %s", site.location, headline(site))


def reports() -> tuple[GraphReport, ...]:
    """The reports of the last 256 graphs compiled in this process, oldest first."""
    return tuple(_recent)


@contextlib.contextmanager
def collecting() -> Iterator[list[GraphReport]]:
    """A block with a list, which receives the reports of the graphs compiled within when the block ends."""
    global _recent
    kept = _recent
    collected: list[GraphReport] = []
    _recent = collections.deque(maxlen=None)
    try:
        yield collected
    finally:
        collected.extend(_recent)
        kept.extend(_recent)
        _recent = kept


def headline(site: SiteReport) -> str:
    """The one line on a site: its status, and the kernel or the cause."""
    if site.fused:
        return f"fused on {site.kernel}"
    if site.blocker is None:
        return site.status
    return f"{site.status}: {site.blocker.reason}"


def as_text(report: GraphReport, expressions: bool = False) -> str:
    """The report of one graph, as `python -m attn_fuse.explain` prints it. expressions: as with --expression."""
    lines: list[str] = []
    for number, site in enumerate(report.sites, 1):
        lines += [f"[{number}] {site.location}", f"    {site.location.code}"]
        lines.append(f"    {_HEADINGS[site.status]}" + (f" on {site.kernel}" if site.kernel else ""))
        lines += [f"      {name + ':':<12}{value}" for name, value in site.attention.items()]
        if expressions and site.expression:
            lines += [f"      {line}" for line in site.expression.splitlines()]
        if site.score_bytes:
            lines.append(f"      {'saved:':<12}{bytes_in_words(site.score_bytes)} of scores no longer stored")
        if site.blocker is not None:
            lines.append(f"      {'because:':<12}{site.blocker.reason}")
            if site.blocker.location is not None and site.blocker.location != site.location:
                lines.append(f"      {'at:':<12}{site.blocker.location}: {site.blocker.location.code}")
        kernels: dict[tuple[str, ...], list[str]] = {}
        for kernel, reasons in site.why_not.items():
            kernels.setdefault(reasons, []).append(kernel)
        lines += [f"      not {', '.join(names)}: {'; '.join(reasons)}" for reasons, names in kernels.items()]
        lines.append("")
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(lines)


def as_json(report: GraphReport) -> dict[str, Any]:
    """The report as plain dictionaries and lists, for ``json.dump``; the graphs' code is left out."""
    data = asdict(report)
    del data["before"], data["after"]
    return data


_HEADINGS = {
    "fused": "FUSED",
    "as written": "LEFT AS WRITTEN",
    "refused": "LEFT AS WRITTEN",
    "already fused": "ALREADY FUSED in the program (F.scaled_dot_product_attention)",
}


def bytes_in_words(count: int) -> str:
    """`count` bytes in B, KiB, MiB or GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
