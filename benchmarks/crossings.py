"""Crossings: the length from which on the report promises a kernel, beside the lengths at which one is measured faster.

Ten attentions of 32 tokens, which are left as written. The report names a length; the attention is measured as written
and on every kernel at that length and at two lengths per octave around it. A ratio within 5% of 1 tells the two apart
on no machine that we have, so what is measured is a span: from the length at which a kernel stops being slower by 5% to
the one at which it is faster by 5%. The goal is a promise within that span, or a factor of 1.5 off it at most.
"""

from __future__ import annotations

import argparse
import functools
import re
from dataclasses import dataclass, replace

import torch

from attn_fuse.backend import analyze_only
from attn_fuse.bench.measure import Effort, timed
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.report import reports
from harness import OtherLoad, store, table
from regret import picked

SHORT, GOAL = 32, 1.5
# Ratios of two runs of one program differ by this much.
NOISE = 0.05
_PLAIN = Case("float32", False, 2, 8, SHORT, SHORT, 64)
_TRAINED = replace(_PLAIN, training=True)
CASES = (
    _PLAIN,
    replace(_PLAIN, mask="causal", visible=0.5),
    replace(_PLAIN, mask="padding"),
    replace(_PLAIN, bias="constant"),
    replace(_PLAIN, head_dim=128, value_dim=128),
    replace(_PLAIN, batch=1, heads=4, kv_heads=4, head_dim=32, value_dim=32),
    _TRAINED,
    replace(_TRAINED, mask="causal", visible=0.5),
    replace(_TRAINED, dropout=True),
    replace(_TRAINED, bias="positions", mask="causal", visible=0.5),
)


@dataclass(frozen=True)
class Crossing:
    """The promised length for an attention, and the measured ratios by length: a kernel's time over that as written."""

    case: Case
    promised: int | None
    ratios: dict[int, float]
    load: float

    @property
    def span(self) -> tuple[int, int] | None:
        """The lengths from which on a kernel is not slower, and faster, by more than NOISE; None if it never is."""
        first, last = self._below(1 + NOISE), self._below(1 - NOISE)
        return None if first is None or last is None else (first, last)

    @property
    def factor(self) -> float | None:
        """How far the promise is off the span; 1 within it, None without a promise or a span."""
        if self.promised is None or self.span is None:
            return None
        first, last = self.span
        return max(first / self.promised, self.promised / last, 1.0)

    def _below(self, ratio: float) -> int | None:
        slow = max((n for n in self.ratios if self.ratios[n] >= ratio), default=0)
        return min((n for n in self.ratios if n > slow), default=None)


def promised(case: Case, device: torch.device) -> int | None:
    """The length that the report on `case` names; None for none."""
    # A new partial each time: Dynamo would reuse the compilation of the same backend.
    picked(case, device, functools.partial(analyze_only))
    (site,) = reports()[-1].sites
    found = re.match(r"from about (\d+) tokens", site.blocker.advice if site.blocker else "")
    return int(found[1]) if found else None


def lengths_around(length: int) -> list[int]:
    """Two for each octave, from a third of `length` to twice it."""
    steps = sorted({n for k in range(4, 15) for n in (1 << k, 3 << (k - 1))})
    return [n for n in steps if length / 3 <= n <= length * 2]


def crossing(case: Case, device: torch.device, effort: Effort) -> Crossing:
    length, load, ratios = promised(case, device), OtherLoad(), dict[int, float]()
    for n in lengths_around(length or 512):
        times = timed(replace(case, q_len=n, kv_len=n), device, effort)
        written = times.pop(AS_WRITTEN).median
        ratios[n] = min((timing.median / written for timing in times.values()), default=float("inf"))
    return Crossing(case, length, ratios, round(load.share(), 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.7, help="of measuring, at most, for a length")
    args = parser.parse_args()
    device, found = torch.device("cpu"), list[Crossing]()
    for case in CASES:
        found.append(crossing(case, device, Effort(args.rounds, args.seconds)))
        print(case, found[-1].promised, found[-1].span, found[-1].ratios, flush=True)
    lines = [
        [
            str(x.case),
            str(x.promised),
            "-" if x.span is None else "{} to {}".format(*x.span),
            "-" if x.promised not in x.ratios else f"{x.ratios[x.promised]:.2f}",
            "-" if x.factor is None else f"{x.factor:.2f}",
        ]
        for x in found
    ]
    print("\n" + table(["attention", "promised", "measured", "ratio there", "factor"], lines))
    within = sum(x.factor is not None and x.factor <= GOAL for x in found)
    print(f"\n{within} of {len(found)} within a factor of {GOAL}")
    rows = [
        {**x.case.as_json(), "promised": x.promised, "span": x.span, "ratios": x.ratios, "load": x.load} for x in found
    ]
    print(f"stored in {store('crossings', device, {'goal': GOAL, 'noise': NOISE, 'within': within, 'sites': rows})}")


if __name__ == "__main__":
    main()
