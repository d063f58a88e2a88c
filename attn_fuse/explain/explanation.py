"""The explanation of a model: the outcome for each of its attentions, as a value, text, JSON and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attn_fuse.explain.page import Figures, Part, page
from attn_fuse.files import CODE
from attn_fuse.report import SDPA, GraphReport, SiteReport, as_json, as_text, bytes_in_words, grouped, json_head


@dataclass(frozen=True)
class Explanation:
    """The outcome for each attention of a model; `str(explanation)` is the report.

    subject: the model with its inputs, mode, dtype and device, in words.
    reports: one for each graph that torch.compile made.
    said: lines on what was made up to build and run the model.
    not_compiled: a sentence on each function that torch.compile left uncompiled.
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
        """How many attentions were fused."""
        return sum(site.fused for site in self.sites)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the graphs and on uncompiled functions."""
        return tuple(dict.fromkeys((*self.not_compiled, *(note for report in self.reports for note in report.notes))))

    @property
    def already_fused(self) -> int:
        """How many attentions the program itself calls in fused form."""
        return sum(site.status == "already fused" for site in self.sites)

    @property
    def left_as_written(self) -> int:
        """How many attentions were left as written, refused ones included."""
        return len(self.sites) - self.fused - self.already_fused

    @property
    def score_bytes(self) -> int:
        """The bytes of scores no longer stored."""
        return sum(site.score_bytes for site in self.sites)

    def __str__(self) -> str:
        """The report. Attentions that differ only in their module share a block."""
        return self.text()

    def text(self, expressions: bool = False) -> str:
        """The report. expressions: whether to print each attention as mathematics."""
        text = as_text(GraphReport(self.sites, 0.0, self.notes), expressions).strip()
        subject = "\n".join((self.subject, *(f"  {line}" for line in self.said)))
        return "\n\n".join(part for part in (subject, text, self._summary()) if part)

    def as_json(self, graphs: bool = False) -> dict[str, Any]:
        """Everything as dictionaries and lists, by report.schema.json.

        graphs: whether to add each graph's code, before and after.
        """
        code = [{"before": r.before, "after": r.after} if graphs else {} for r in self.reports]
        return {
            **json_head(),
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

    def html(self, figures: Sequence[Figures] = (), command: str = "") -> str:
        """The explanation as a self-contained HTML page. figures: tables to put first. command: what made it."""
        return page(self.subject, [part_of(self)], figures, command=command)

    def code(self) -> str:
        """The code to write by hand, as text for a Python file; see `code_file`."""
        return code_file([self])

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


def code_file(explanations: Sequence[Explanation]) -> str:
    """The code to write by hand for the attentions of several models, as text for a Python file.

    Each part stands in place of the lines that the comment above it names.
    """
    codes = [
        site.code for explanation in explanations for site, _ in grouped(explanation.sites) if site.code is not None
    ]
    imports = sorted({line for code in codes for line in code.imports})
    parts = [f"{CODE}{'; '.join(explanation.subject for explanation in explanations)}", "\n".join(imports)]
    for code in dict.fromkeys(codes):
        comments = (f"In place of {code.place}:", *code.notes)
        parts.append("\n".join([*(f"# {line}" for line in comments), *code.text]))
    return "\n\n".join(part for part in parts if part) + "\n"


def part_of(explanation: Explanation) -> Part:
    """The explanation as a part of a page."""
    summary, cards = tuple(explanation._summary().splitlines()), tuple(grouped(explanation.sites))
    return Part(explanation.subject, summary, explanation.said, cards, explanation.notes, explanation.reports)
