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

import torch

from attn_fuse.errors import AttnFuseError
from attn_fuse.torch_internals import trace_artifact

log = logging.getLogger("attn_fuse")


@dataclass(frozen=True)
class Location:
    """A place in the user's program.

    code: the text of the line. module: the dotted path of the module that runs the line; "" outside modules.
    """

    file: str
    line: int
    code: str
    module: str

    def __str__(self) -> str:
        where = f"{near(self.file)}:{self.line}"
        return f"{where} ({self.module})" if self.module else where


def near(file: str) -> str:
    """The path of a file, relative to the current folder if it lies in there."""
    path = os.path.relpath(file) if os.path.isabs(file) else file
    return file if path.startswith("..") else path


@dataclass(frozen=True)
class Code:
    """Code to write by hand in place of an attention.

    file, function: its place. lines: the first and last lines of the statements that it replaces; it stands in place
        of the last.
    imports, text: lines of Python. notes: sentences on the code.
    """

    file: str
    lines: tuple[tuple[int, int], ...]
    function: str
    imports: tuple[str, ...]
    text: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The lines that it replaces, such as "lines 42-46 of model.py, in forward"."""
        spans: list[list[int]] = []
        for first, last in self.lines:
            if spans and first <= spans[-1][1] + 1:
                spans[-1][1] = max(last, spans[-1][1])
            else:
                spans.append([first, last])
        lines = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
        return f"line{'s' if '-' in lines or ',' in lines else ''} {lines} of {near(self.file)}, in {self.function}"


@dataclass(frozen=True)
class Blocker:
    """Why a site stayed as written.

    op: the blocking operation. location: its place in the source. advice: what to do next.
    change: the statement to write otherwise, with which the attention is fused; None outside explain, or if none is
        known.
    """

    reason: str
    op: str
    location: Location | None
    advice: str = ""
    change: Code | None = None


@dataclass(frozen=True)
class Failure:
    """A failure of attn_fuse on one attention, which then runs as written or on another kernel.

    what: the failure in words. kernel: the kernel that raised or was wrong; None if no kernel is to blame.
    file: the script that shows the failure, with ``options={"repro": DIR}``; "" without one.
    """

    what: str
    kernel: str | None = None
    file: str = ""


# The start of the note on a graph that stays as written as a whole.
GRAPH_FAILED = "this graph stays as written because analysing it failed"
SDPA = "F.scaled_dot_product_attention"


@dataclass(frozen=True, repr=False)
class SiteReport:
    """One attention: what was recognised, and what became of it.

    location: the place of its softmax.
    status: "fused", "as written" (recognised, but no kernel took it), "refused" (not proved to be an attention that
        can be fused), or "already fused" (the program calls a fused attention itself).
    attention: the recognised facts in words, by name: heads, head_dim, mask, scale, dropout, ...; empty if refused.
    kernel: the kernel chosen, or None.
    why_not: the reasons against each of the other kernels.
    ratios: the times of kernels over the time as written, by name, if they are known.
    blocker: the cause, for a site that is not fused; None if the program fuses it itself.
    score_bytes: the bytes of the score matrix that is no longer stored; 0 unless fused.
    expression: one element of the scores and of the output, as mathematics; for a refused site the part that was read.
    picture, bias: the mask and the sum of the biases, drawn by `emit.picture`; empty outside explain.
    fused_by: the function that the program calls for a fused attention, other than torch's SDPA.
    failures: the failures of attn_fuse on this site.
    code: the code to write by hand; None unless it was asked for. no_code: why there is none.
    """

    location: Location
    status: Literal["fused", "as written", "refused", "already fused"]
    attention: dict[str, str] = field(default_factory=dict)
    kernel: str | None = None
    why_not: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    blocker: Blocker | None = None
    score_bytes: int = 0
    expression: str = ""
    picture: tuple[str, ...] = ()
    bias: tuple[tuple[float | None, ...], ...] = ()
    fused_by: str = ""
    failures: tuple[Failure, ...] = ()
    code: Code | None = None
    no_code: str = ""

    @property
    def fused(self) -> bool:
        """Whether attn_fuse put the attention on a kernel."""
        return self.status == "fused"

    def __repr__(self) -> str:
        """One line with the place and the outcome."""
        return f"<SiteReport {self.location}: {headline(self)}>"


@dataclass(frozen=True)
class GraphReport:
    """One graph that the backend compiled.

    seconds: the time until the graph went to the inner backend. notes: sentences on the whole graph.
    before, after: the graph's code from Dynamo, and for the inner backend; outside explain "" for a graph that can hold
        no attention.
    """

    sites: tuple[SiteReport, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        """The report in words, like that of `explain`."""
        return as_text(self).strip() if self.sites or self.notes else "no attention found"


def relocated(sites: Sequence[SiteReport], locations: Sequence[Location]) -> tuple[SiteReport, ...]:
    """`sites` at `locations`, which come from the first capture: a graph captured again has lost its source lines.

    Both captures have the sites in the same order; if the numbers differ, `sites` stay as they are.
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
    """Keep `report` for `reports()`, tell the listeners, log each site, and add the text to torch's trace."""
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
    """The report of the last graph compiled in this process.

    Raises AttnFuseError without one: torch.compile compiles a model at its first call.
    """
    if not _recent:
        raise AttnFuseError(
            "attn_fuse has compiled no graph in this process yet: torch.compile compiles a model when it first runs. "
            'Call the model from torch.compile(..., backend="attn_fuse") before you ask for the report.'
        )
    return _recent[-1]


@contextlib.contextmanager
def collecting() -> Iterator[list[GraphReport]]:
    """A block whose list receives the reports of the graphs compiled within."""
    collected: list[GraphReport] = []
    with listening(collected.append):
        yield collected


def version() -> str:
    """The version of attn_fuse; "unknown" in a checkout that is not installed."""
    try:
        return importlib.metadata.version("attn_fuse")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def headline(site: SiteReport) -> str:
    """One line on a site: its status, and the kernel or the cause."""
    if site.fused:
        return f"fused on {site.kernel}"
    if site.blocker is None:
        return site.status
    return f"{site.status}: {site.blocker.reason}"


def as_text(report: GraphReport, expressions: bool = False, plain: bool = False) -> str:
    """The report of one graph, as `python -m attn_fuse.explain` prints it; identical layers share an entry.

    expressions: as with --expression. The text has the width of the terminal and colours, unless it is `plain`;
    NO_COLOR turns colours off.
    """
    wide = not plain and getattr(sys.stdout, "isatty", bool)()
    styled = functools.partial(_styled, on=wide and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")
    wrapped = functools.partial(_wrapped, width=max(40, shutil.get_terminal_size().columns) if wide else None)
    lines: list[str] = []
    # A site's expression tells apart entries with the same text.
    sites = report.sites if expressions else [replace(site, expression="") for site in report.sites]
    for number, (site, _) in enumerate(grouped(sites), 1):
        lines += [styled(f"[{number}] {site.location}", _BOLD), *wrapped(site.location.code, 4)]
        heading, colour = _HEADINGS[site.status]
        heading += f" on {site.kernel}" if site.kernel else ""
        if site.status == "already fused":
            heading += f" ({site.fused_by or SDPA})"
        lines += [styled(line, colour) for line in wrapped(heading, 4)]
        for name, value in site.attention.items():
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
        if site.blocker is not None and (change := site.blocker.change) is not None:
            lines += wrapped(f"{'next:':<12}write in place of {change.place}:", 6)
            lines += [f"          {line}" for line in change.text]
            lines += [line for note in change.notes for line in wrapped(f"# {note}", 10)]
        elif site.blocker is not None and site.blocker.advice:
            lines += wrapped(f"{'next:':<12}{site.blocker.advice}", 6)
        if site.code is not None:
            lines += wrapped(f"by hand, in place of {site.code.place}:", 6)
            lines += [f"          {line}".rstrip() for line in (*site.code.imports, *site.code.text)]
            lines += [line for note in site.code.notes for line in wrapped(f"# {note}", 10)]
        elif site.no_code:
            lines += wrapped(f"by hand: no code, since {site.no_code}", 6)
        for file in dict.fromkeys(failure.file for failure in site.failures if failure.file):
            lines += wrapped(f"{'repro:':<12}{file}", 6)
        lines.append("")
    lines += [line for note in report.notes for line in wrapped(f"note: {note}", 0)]
    return "\n".join(lines)


_BOLD, _GREEN, _YELLOW = "1", "32", "33"


def _styled(text: str, style: str, on: bool) -> str:
    return f"\033[{style}m{text}\033[0m" if on else text


def _wrapped(text: str, indent: int, width: int | None) -> list[str]:
    """`text`, indented, in lines of at most `width` characters; in one line without a width."""
    if width is None:
        return [" " * indent + text]
    return textwrap.wrap(
        text, width, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2), replace_whitespace=False,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def json_head() -> dict[str, Any]:
    """The first keys of a report as JSON: the version of report.schema.json, and those that made the report."""
    return {"schema": 1, "attn_fuse": version(), "torch": torch.__version__}


def as_json(report: GraphReport) -> dict[str, Any]:
    """The report as plain dictionaries and lists for ``json.dump``, without the graphs' code."""
    data = asdict(report)
    del data["before"], data["after"]
    return data


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


def grouped(sites: Iterable[SiteReport]) -> Iterator[tuple[SiteReport, Sequence[SiteReport]]]:
    """`sites`, merged if they differ only in their module, times and biases, each with its members.

    A merged site lists the modules, has the sum of the bytes, and the times and biases of the first member.
    """
    groups: dict[str, list[SiteReport]] = {}
    for site in sites:
        alike = _anywhere(site)
        # Names of nodes, such as linear_3, are numbered through the graph.
        expression = re.sub(r"\b([a-z]\w*?)_\d+\b", r"\1", alike.expression)
        groups.setdefault(str(asdict(replace(alike, expression=expression, ratios={}, bias=()))), []).append(site)
    for members in groups.values():
        shown = _anywhere(members[0]) if len(members) > 1 else members[0]
        location = replace(shown.location, module=_modules_in_words([site.location.module for site in members]))
        yield replace(shown, location=location, score_bytes=sum(site.score_bytes for site in members)), members


def _anywhere(site: SiteReport) -> SiteReport:
    """`site` without its module, to compare layers: "self.bias" for "h.3.attn.bias"."""
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
