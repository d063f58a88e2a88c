"""Left out: each row of the shipped evidence in turn, and what the picker chooses for it by all the others.

Nothing is run: the times are those of the row. What is chosen is the kernel with the least estimate, or the program as
written where none is below its time; the regret is its time over the best of the row.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from attn_fuse.picker import evidence
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN, Row, Table
from harness import store

BEYOND = (1.03, 1.1, 1.5)
# What longer attentions than any measured one get: rows from the second length on, by those up to the first.
SHORT, LONG = 768, 1024


def chosen(case: Case, kernels: Sequence[str], own: Table, known: Sequence[Table]) -> str:
    """What is chosen for `case` among `kernels` and the program as written, on the device of `own`."""
    ratios = {AS_WRITTEN: 1.0}
    for name in kernels:
        found = evidence.compare(name, case, own.device, own.torch, known, kernels)
        if found is not None:
            ratios[name] = found.ratio
    return min(ratios, key=ratios.__getitem__)


def regret(row: Row, table: Table, tables: Sequence[Table]) -> float:
    """The regret of what is chosen for `row`, one of `table`, by the rows of `tables` about other cases."""
    known = [replace(of, rows=tuple(other for other in of.rows if other.case != row.case)) for of in tables]
    choice = chosen(row.case, [name for name in row.times if name != AS_WRITTEN], table, known)
    return row.times[choice] / min(row.times.values())


def regret_beyond(row: Row, table: Table, tables: Sequence[Table]) -> float:
    """The regret of what is chosen for `row`, one of `table`, by the rows of `tables` about short attentions."""
    known = [replace(of, rows=tuple(r for r in of.rows if r.case.kv_len <= SHORT)) for of in tables]
    choice = chosen(row.case, [name for name in row.times if name != AS_WRITTEN], table, known)
    return row.times[choice] / min(row.times.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device, help="whose table it is (default cpu)")
    arguments = parser.parse_args()
    tables = [of for of in evidence.tables() if not of.own and of.device.type == arguments.device.type]
    found = sorted(((regret(row, of, tables), row, of) for of in tables for row in of.rows), key=lambda one: -one[0])
    regrets = [one[0] for one in found]
    counts = {str(limit): sum(x > limit for x in regrets) for limit in BEYOND}
    mean = statistics.fmean(regrets)
    print(f"{len(regrets)} rows, each left out in turn: {mean:.3f} of the best, the mean")
    print("; ".join(f"more than {limit} on {count}" for limit, count in counts.items()))
    worst = [(x, f"{row.case}, on {of.device}") for x, row, of in found[:5]]
    print(*(f"{x:.2f}  {case}" for x, case in worst), sep="\n")
    longer = [regret_beyond(row, of, tables) for of in tables for row in of.rows if row.case.kv_len >= LONG]
    print(f"{len(longer)} rows from {LONG} keys on, by those up to {SHORT}: {statistics.fmean(longer):.3f}, the mean")
    results = {"rows": len(regrets), "mean": mean, "beyond": counts, "longer": statistics.fmean(longer)}
    results |= {"worst": [{"regret": x, "case": case} for x, case in worst]}
    print(f"stored in {store('left-out', arguments.device, results)}")


if __name__ == "__main__":
    main()
