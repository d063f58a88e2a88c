"""Reports: what became of each attention of a compiled graph, as values and as text."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.metadata
import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from attn_fuse.errors import AttnFuseError
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
    """Why a site stayed as written.

    op: the name of the operation that blocks. location: its place in the source. advice: what to do next.
    """

    reason: str
    op: str
    location: Location | None
    advice: str = ""


@dataclass(frozen=True)
class Failure:
    """A failure of attn_fuse itself on one attention. The program runs on as written, or on another kernel.

    what: the failure in words. kernel: the kernel that raised or was wrong; None where no kernel is to blame.
    file: the script that shows the failure by itself, for ``options={"repro": DIR}``; "" where none was written.
    """

    what: str
    kernel: str | None = None
    file: str = ""


# How the note of a graph begins that stays as written as a whole.
GRAPH_FAILED = "this graph stays as written, since analysing it failed"
SDPA = "F.scaled_dot_product_attention"


@dataclass(frozen=True, repr=False)
class SiteReport:
    """One attention: what was recognised and what was done with it.

    location: where its softmax stands.
    status: "fused", "as written" (recognised, but no kernel took it), "refused" (not proved to be an attention that
        can be fused), or "already fused" (the program calls a fused attention itself).
    attention: the recognised facts in words, by name: heads, head_dim, mask, scale, dropout, ...; empty if refused.
    kernel: the kernel chosen, or None.
    why_not: for every other kernel the reasons why it was not chosen.
    blocker: for a site that is not fused, the one cause; None where the program fuses it itself.
    score_bytes: the bytes of the score matrix that is no longer stored; 0 unless fused.
    expression: what each element of the scores and of the output is, as mathematics; of a refused site what was read of
        the output, "" where nothing was.
    picture: the mask, as `emit.picture` draws it; empty where it draws none, and outside explain.
    fused_by: of a site that is fused already, what the program calls, where that is not torch's SDPA.
    failures: what failed in attn_fuse on this site.
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
    fused_by: str = ""
    failures: tuple[Failure, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether attn_fuse put the attention on a kernel."""
        return self.status == "fused"

    def __repr__(self) -> str:
        """One line: the place, and what became of the attention."""
        return f"<SiteReport {self.location}: {headline(self)}>"


@dataclass(frozen=True)
class GraphReport:
    """One graph that the backend compiled.

    seconds: the time until the graph went to the inner backend. notes: sentences for the user about the whole graph.
    before, after: the code of the graph as Dynamo made it, and as handed to the inner backend; "" for a graph that can
        hold no attention, except in explain.
    """

    sites: tuple[SiteReport, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        """The report in words, as `explain` prints it."""
        return as_text(self).strip() if self.sites or self.notes else "no attention found"


def relocated(sites: Sequence[SiteReport], locations: Sequence[Location]) -> tuple[SiteReport, ...]:
    """`sites` at `locations`, those of the first capture: a graph captured anew has lost its source lines.

    The sites of both captures match in order; where their numbers differ, `sites` stay as they are.
    """
    if len(sites) != len(locations):
        return tuple(sites)
    return tuple(replace(site, location=where) for site, where in zip(sites, locations, strict=True))


_recent: collections.deque[GraphReport] = collections.deque(maxlen=256)
_listeners: list[Callable[[GraphReport], None]] = []


@contextlib.contextmanager
def listening(listener: Callable[[GraphReport], None]) -> Iterator[None]:
    """A block in which `listener` is called with each report, in the thread that compiles."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def record(report: GraphReport) -> None:
    """Keep `report` for `reports()`, hand it to the listeners, log each site, and add the text to torch's trace."""
    _recent.append(report)
    for listener in tuple(_listeners):
        listener(report)
    if report.sites:
        trace_artifact("attn_fuse", lambda: as_text(report, expressions=True, plain=True))
    for site in report.sites:
        log.info("%s: %s", site.location, headline(site))


def reports() -> tuple[GraphReport, ...]:
    """The reports of the last 256 graphs compiled in this process, oldest first."""
    return tuple(_recent)


def last_report() -> GraphReport:
    """The report of the graph that was compiled last in this process.

    Raises AttnFuseError where none was compiled: torch.compile compiles a model when the model first runs.
    """
    if not _recent:
        raise AttnFuseError(
            "attn_fuse has compiled no graph in this process yet: torch.compile compiles a model when it first runs, "
            'so run what torch.compile(..., backend="attn_fuse") gave, and ask again.'
        )
    return _recent[-1]


@contextlib.contextmanager
def collecting(keep: bool = True) -> Iterator[list[GraphReport]]:
    """A block with a list, which receives the reports of the graphs compiled within when the block ends.

    keep: whether `reports` has them, too.
    """
    global _recent
    kept = _recent
    collected: list[GraphReport] = []
    _recent = collections.deque(maxlen=None)
    try:
        yield collected
    finally:
        collected.extend(_recent)
        kept.extend(_recent if keep else ())
        _recent = kept


def version() -> str:
    """The version of attn_fuse; "unknown" where it runs from a checkout that is not installed."""
    try:
        return importlib.metadata.version("attn_fuse")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def headline(site: SiteReport) -> str:
    """The one line on a site: its status, and the kernel or the cause."""
    if site.fused:
        return f"fused on {site.kernel}"
    if site.blocker is None:
        return site.status
    return f"{site.status}: {site.blocker.reason}"


def as_text(report: GraphReport, expressions: bool = False, plain: bool = False) -> str:
    """The report of one graph, as `python -m attn_fuse.explain` prints it: layers that differ in nothing as one entry.

    expressions: as with --expression. On a terminal the text is as wide as it and coloured, unless NO_COLOR is set or
    the text is to be `plain`.
    """
    wide = _on_terminal() and not plain
    styled = functools.partial(_styled, on=wide and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")
    wrapped = functools.partial(_wrapped, width=max(40, shutil.get_terminal_size().columns) if wide else None)
    lines: list[str] = []
    for number, site in enumerate(grouped(report.sites), 1):
        lines += [styled(f"[{number}] {site.location}", _BOLD), *wrapped(site.location.code, 4)]
        heading, colour = _HEADINGS[site.status]
        heading += f" on {site.kernel}" if site.kernel else ""
        if site.status == "already fused":
            heading += f" ({site.fused_by or SDPA})"
        lines += [styled(line, colour) for line in wrapped(heading, 4)]
        for name, value in site.attention.items():
            # How long the kernel takes stands apart from where that was measured.
            fact, _, measured = value.partition(", by measurements ")
            lines += wrapped(f"{name + ':':<12}{fact}", 6)
            lines += wrapped(f"{'':<12}by measurements {measured}", 6) if measured else []
        if expressions and site.expression:
            lines += [line for part in site.expression.splitlines() for line in wrapped(part, 6)]
        if site.score_bytes:
            lines.append(f"      {'saved:':<12}{bytes_in_words(site.score_bytes)} of scores no longer stored")
        if site.blocker is not None:
            lines += wrapped(f"{'because:':<12}{site.blocker.reason}", 6)
            where = site.blocker.location
            if where is not None and (where.file, where.line) != (site.location.file, site.location.line):
                lines += wrapped(f"{'at:':<12}{where}: {where.code}", 6)
        kernels: dict[tuple[str, ...], list[str]] = {}
        for kernel, reasons in site.why_not.items():
            kernels.setdefault(reasons, []).append(kernel)
        for reasons, names in kernels.items():
            lines += wrapped(f"not {', '.join(names)}: {'; '.join(reasons)}", 6)
        if site.blocker is not None and site.blocker.advice:
            lines += wrapped(f"{'next:':<12}{site.blocker.advice}", 6)
        for file in dict.fromkeys(failure.file for failure in site.failures if failure.file):
            lines += wrapped(f"{'repro:':<12}{file}", 6)
        lines.append("")
    lines += [line for note in report.notes for line in wrapped(f"note: {note}", 0)]
    return "\n".join(lines)


_BOLD, _GREEN, _YELLOW = "1", "32", "33"


def _on_terminal() -> bool:
    return bool(getattr(sys.stdout, "isatty", bool)())


def _styled(text: str, style: str, on: bool) -> str:
    return f"\033[{style}m{text}\033[0m" if on else text


def _wrapped(text: str, indent: int, width: int | None) -> list[str]:
    """`text` in lines of at most `width` characters, the first behind `indent` spaces; without a width in one line."""
    if width is None:
        return [" " * indent + text]
    # Names, paths and numbers stay whole.
    return textwrap.wrap(
        text, width, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2), replace_whitespace=False,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def as_json(report: GraphReport) -> dict[str, Any]:
    """The report as plain dictionaries and lists, for ``json.dump``; the graphs' code is left out."""
    data = asdict(report)
    del data["before"], data["after"]
    return data


# By status: the words, and the colour on a terminal.
_HEADINGS = {
    "fused": ("FUSED", _GREEN),
    "as written": ("LEFT AS WRITTEN", _YELLOW),
    "refused": ("LEFT AS WRITTEN", _YELLOW),
    "already fused": ("ALREADY FUSED in the program", _GREEN),
}


def bytes_in_words(count: int) -> str:
    """`count` bytes in B, KiB, MiB or GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def grouped(sites: Iterable[SiteReport]) -> Iterator[SiteReport]:
    """`sites` with those that differ only in their module merged: modules are listed, and bytes added up."""
    groups: list[tuple[SiteReport, list[SiteReport]]] = []
    for site in sites:
        anywhere = _anywhere(site)
        for known, members in groups:
            if known == anywhere:
                members.append(site)
                break
        else:
            groups.append((anywhere, [site]))
    for anywhere, members in groups:
        shown = anywhere if len(members) > 1 else members[0]
        modules = _modules_in_words([site.location.module for site in members])
        yield replace(
            shown,
            location=replace(shown.location, module=modules),
            score_bytes=sum(site.score_bytes for site in members),
        )


def _anywhere(site: SiteReport) -> SiteReport:
    """`site` without its module, so that equal layers compare equal: "self.bias" for "h.3.attn.bias"."""
    module, blocker = site.location.module, site.blocker
    layer = re.match(r"(.*\.)?\d+(?=\.|$)", module)

    def words(text: str) -> str:
        if module:
            text = text.replace(f"{module}.", "self.")
        if layer is not None:
            text = re.sub(rf"\b{re.escape(layer[0])}\b", f"{layer[1] or ''}*", text)
        return text

    if blocker is not None:
        where = blocker.location and replace(blocker.location, module="")
        blocker = replace(blocker, reason=words(blocker.reason), op=words(blocker.op), location=where)
    return replace(
        site,
        location=replace(site.location, module=""),
        attention={name: words(text) for name, text in site.attention.items()},
        expression=words(site.expression),
        why_not={name: tuple(words(reason) for reason in reasons) for name, reasons in site.why_not.items()},
        blocker=blocker,
    )


def _modules_in_words(modules: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(module for module in modules if module))
    if len(distinct) < 3 and len(distinct) == len(modules):
        return ", ".join(distinct)
    named = ", ".join(distinct) if len(distinct) < 3 else f"{distinct[0]} ... {distinct[-1]}"
    times = f"{len(modules)} times" if len(modules) > 1 else ""
    return ", ".join(part for part in (named, times) if part)
