"""Crossings: the length from which on the report promises a kernel, beside the length at which one is measured faster.

Ten attentions of 32 tokens, which are left as written. The report names a length; the attention is measured as written
and on every kernel at that length and at two lengths per octave around it. The goal is a factor of 1.5 at most.
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
_PLAIN = Case("float32", False, 2, 8, SHORT, SHORT, 64)
_TRAINED = replace(_PLAIN, training=True)
CASES = (
    _PLAIN,
    replace(_PLAIN, mask="causal", visible=0.5),
    replace(_PLAIN, mask="padding"),
    replace(_PLAIN, bias="constant"),
    replace(_PLAIN, dtype="bfloat16", mask="causal", visible=0.5),
    replace(_PLAIN, batch=1, heads=4, kv_heads=4, head_dim=32, value_dim=32),
    _TRAINED,
    replace(_TRAINED, mask="causal", visible=0.5),
    replace(_TRAINED, dropout=True),
    replace(_TRAINED, bias="positions", mask="causal", visible=0.5),
)


@dataclass(frozen=True)
class Crossing:
    """Of one attention: the promised length, the first measured length at which a kernel is faster, and the ratios."""

    case: Case
    promised: int | None
    measured: int | None
    ratios: dict[int, float]
    load: float

    @property
    def factor(self) -> float | None:
        if self.promised is None or self.measured is None:
            return None
        return max(self.promised / self.measured, self.measured / self.promised)


def promised(case: Case, device: torch.device) -> int | None:
    """The length that the report on `case` names; None for none."""
    # A new partial each time: Dynamo would reuse the compilation of the same backend.
    picked(case, device, functools.partial(analyze_only))
    (site,) = reports()[-1].sites
    found = re.match(r"from about (\d+) tokens", site.blocker.advice if site.blocker else "")
    return int(found[1]) if found else None


def lengths_around(length: int) -> list[int]:
    """Two for each octave, from half of `length` to twice it."""
    steps = sorted({n for k in range(4, 15) for n in (1 << k, 3 << (k - 1))})
    return [n for n in steps if length / 2 <= n <= length * 2]


def crossing(case: Case, device: torch.device, effort: Effort) -> Crossing:
    length, load, ratios = promised(case, device), OtherLoad(), dict[int, float]()
    for n in lengths_around(length or 512):
        times = timed(replace(case, q_len=n, kv_len=n), device, effort)
        written = times.pop(AS_WRITTEN).median
        ratios[n] = min((timing.median / written for timing in times.values()), default=float("inf"))
    # The first length from which on a kernel stays faster.
    faster = None
    for n in sorted(ratios, reverse=True):
        if ratios[n] >= 1:
            break
        faster = n
    return Crossing(case, length, faster, ratios, round(load.share(), 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.7, help="of measuring, at most, for a length")
    args = parser.parse_args()
    device, found = torch.device("cpu"), list[Crossing]()
    for case in CASES:
        found.append(crossing(case, device, Effort(args.rounds, args.seconds)))
        print(case, found[-1].promised, found[-1].measured, found[-1].ratios, flush=True)
    lines = [
        [str(x.case), str(x.promised), str(x.measured), "" if x.factor is None else f"{x.factor:.2f}"] for x in found
    ]
    print("\n" + table(["attention", "promised", "measured", "factor"], lines))
    within = sum(x.factor is not None and x.factor <= GOAL for x in found)
    print(f"\n{within} of {len(found)} within a factor of {GOAL}")
    rows = [
        {**x.case.as_json(), "promised": x.promised, "measured": x.measured, "ratios": x.ratios, "load": x.load}
        for x in found
    ]
    print(f"stored in {store('crossings', device, {'goal': GOAL, 'within': within, 'sites': rows})}")


if __name__ == "__main__":
    main()
