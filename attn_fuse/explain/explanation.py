"""Explanation: what became of every attention of a model, as a value, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attn_fuse.explain.page import Figures, Part, page
from attn_fuse.report import SDPA, GraphReport, SiteReport, as_json, as_text, bytes_in_words, grouped


@dataclass(frozen=True)
class Explanation:
    """What became of every attention of a model; as text, `str(explanation)`.

    subject: the model and its inputs, mode, dtype and device, in words.
    reports: one for each graph that torch.compile made of the model.
    said: what was made up to build and run it, one line each.
    not_compiled: a sentence on each function that torch.compile left as written, with no graph of it.
    """

    subject: str
    reports: tuple[GraphReport, ...]
    said: tuple[str, ...] = ()
    not_compiled: tuple[str, ...] = ()

    @property
    def sites(self) -> tuple[SiteReport, ...]:
        """The attentions of all graphs."""
        return tuple(site for report in self.reports for site in report.sites)

    @property
    def fused(self) -> int:
        """How many attentions run on a fused kernel."""
        return sum(site.fused for site in self.sites)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the graphs, and on what has none."""
        return tuple(dict.fromkeys((*self.not_compiled, *(note for report in self.reports for note in report.notes))))

    @property
    def already_fused(self) -> int:
        """How many attentions are calls of a fused attention in the program, left alone."""
        return sum(site.status == "already fused" for site in self.sites)

    @property
    def left_as_written(self) -> int:
        """How many attentions stay as written, refused ones included."""
        return len(self.sites) - self.fused - self.already_fused

    @property
    def score_bytes(self) -> int:
        """The bytes of score matrices that are no longer stored."""
        return sum(site.score_bytes for site in self.sites)

    def __str__(self) -> str:
        """The report in words; attentions that differ only in their module stand in one block."""
        return self.text()

    def text(self, expressions: bool = False) -> str:
        """The report in words. expressions: with each attention as mathematics."""
        text = as_text(GraphReport(self.sites, 0.0, self.notes), expressions).strip()
        subject = "\n".join((self.subject, *(f"  {line}" for line in self.said)))
        return "\n\n".join(part for part in (subject, text, self._summary()) if part)

    def as_json(self, graphs: bool = False) -> dict[str, Any]:
        """Everything as plain dictionaries and lists. graphs: whether to add each graph's code, before and after."""
        code = [{"before": r.before, "after": r.after} if graphs else {} for r in self.reports]
        return {
            "subject": self.subject,
            "said": list(self.said),
            "not_compiled": list(self.not_compiled),
            "attentions": len(self.sites),
            "fused": self.fused,
            "left_as_written": self.left_as_written,
            "already_fused": self.already_fused,
            "score_bytes": self.score_bytes,
            "graphs": [{**as_json(report), **both} for report, both in zip(self.reports, code, strict=True)],
        }

    def html(self, figures: Sequence[Figures] = ()) -> str:
        """The explanation as an HTML page that needs nothing beside itself. figures: tables to stand first on it."""
        return page(self.subject, [part_of(self)], figures)

    def graphs(self) -> str:
        """The code of each graph, before and after the rewrites."""
        parts = [
            f"graph {number}, {when}:\n{code.strip()}"
            for number, report in enumerate(self.reports, 1)
            for when, code in (("before", report.before), ("after", report.after))
        ]
        return "\n\n".join(parts)

    def _summary(self) -> str:
        if not self.reports:
            return "no attention found: torch.compile made no graph of it"
        count = len(self.reports)
        graphs = f" in {count} graphs" if count > 1 else ""
        if not self.sites:
            why = "no softmax that can be followed stands between two products"
            if self.not_compiled:
                return f"no attention found{graphs}: {why} outside of the functions that are left as written"
            return f"no attention found{graphs}: {why}"
        attentions = f"{len(self.sites)} attention{'s' if len(self.sites) > 1 else ''}"
        summary = f"{attentions}{graphs}: {self.fused} fused, {self.left_as_written} left as written"
        if self.already_fused:
            names = dict.fromkeys(site.fused_by or SDPA for site in self.sites if site.status == "already fused")
            summary += f", {self.already_fused} fused already in the program ({', '.join(names)})"
        if self.score_bytes:
            summary += f"\n{bytes_in_words(self.score_bytes)} of scores no longer stored"
        return summary


def part_of(explanation: Explanation) -> Part:
    """`explanation` as a part of a page."""
    lines = (*explanation._summary().splitlines(), *explanation.said)
    sites = tuple(grouped(explanation.sites))
    return Part(explanation.subject, lines, sites, explanation.notes, explanation.reports)
