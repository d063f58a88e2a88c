"""Left out: each row of the shipped evidence in turn, and the picker's choice for it by all the others.

Nothing is run: the times are those of the row. The choice is the kernel with the smallest estimate, or the program as
written if no estimate is below its time. The regret is the time of the choice over the best time of the row. The same
is computed with the weighted mean of the nearest rows in place of the regression.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

import torch

from attn_fuse.picker import evidence
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN, Row, Table
from attn_fuse.picker.regression import Point, apart
from harness import store

BEYOND = (1.03, 1.1, 1.5)
# For lengths beyond all measured ones: rows from the second length on, by rows up to the first.
SHORT, LONG = 768, 1024
NEAREST = 3


def chosen(case: Case, kernels: Sequence[str], own: Table, known: Sequence[Table]) -> str:
    """The choice for `case` among `kernels` and the program as written, on the device of `own`."""
    ratios = {AS_WRITTEN: 1.0}
    for name in kernels:
        found = evidence.compare(name, case, own.device, own.torch, known, kernels)
        if found is not None:
            ratios[name] = found.ratio
    return min(ratios, key=ratios.__getitem__)


def regret(row: Row, table: Table, tables: Sequence[Table], kept: Callable[[Case], bool]) -> float:
    """The regret of the choice for `row`, one of `table`, by the rows of `tables` whose case is `kept`."""
    known = [replace(of, rows=tuple(other for other in of.rows if kept(other.case))) for of in tables]
    choice = chosen(row.case, [name for name in row.times if name != AS_WRITTEN], table, known)
    return row.times[choice] / min(row.times.values())


def regrets(tables: Sequence[Table]) -> tuple[list[tuple[float, Row, Table]], list[float]]:
    """The regret of each row by all other cases, the largest first; and of each long row by all short ones."""
    rows = [(row, of) for of in tables for row in of.rows]
    found = [(regret(row, of, tables, lambda case, row=row: case != row.case), row, of) for row, of in rows]
    longer = [regret(row, of, tables, lambda case: case.kv_len <= SHORT) for row, of in rows if row.case.kv_len >= LONG]
    return sorted(found, key=lambda one: -one[0]), longer


def mean_of_nearest(point: Point, points: Sequence[Point], values: Sequence[float]) -> float:
    """The mean of the nearest values, weighted by the inverse of their distance."""
    nearest = sorted((apart(point, other), value) for other, value in zip(points, values, strict=True))[:NEAREST]
    weights = [1 / (distance + 0.05) for distance, _ in nearest]
    return sum(w * value for w, (_, value) in zip(weights, nearest, strict=True)) / sum(weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device, help="whose table it is (default cpu)")
    arguments = parser.parse_args()
    tables = [of for of in evidence.tables() if not of.own and of.device.type == arguments.device.type]
    found, longer = regrets(tables)
    mean, beyond = statistics.fmean(one[0] for one in found), statistics.fmean(longer)
    counts = {str(limit): sum(one[0] > limit for one in found) for limit in BEYOND}
    print(f"{len(found)} rows, each left out in turn: {mean:.3f} of the best, the mean")
    print("; ".join(f"more than {limit} on {count}" for limit, count in counts.items()))
    worst = [(x, f"{row.case}, on {of.device}") for x, row, of in found[:5]]
    print(*(f"{x:.2f}  {case}" for x, case in worst), sep="\n")
    print(f"{len(longer)} rows from {LONG} keys on, by those up to {SHORT}: {beyond:.3f}, the mean")
    with mock.patch.object(evidence, "expected", mean_of_nearest):
        found, longer = regrets(tables)
    nearest = {"mean": statistics.fmean(one[0] for one in found), "longer": statistics.fmean(longer)}
    print(f"by the mean of the {NEAREST} nearest rows: {nearest['mean']:.3f} and {nearest['longer']:.3f}")
    results = {"rows": len(found), "mean": mean, "beyond": counts, "longer": beyond, "nearest": nearest}
    results |= {"worst": [{"regret": x, "case": case} for x, case in worst]}
    print(f"stored in {store('left-out', arguments.device, results)}")


if __name__ == "__main__":
    main()
