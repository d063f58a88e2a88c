"""Left out: each row of the shipped evidence in turn, and what the picker chooses for it by all the others.

Nothing is run: the times are those of the row. What is chosen is the kernel with the least estimate, or the program as
written where none is below its time; the regret is its time over the best of the row.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Iterable
from dataclasses import replace

import torch

from attn_fuse.kernels import cost, evidence
from attn_fuse.kernels.case import Case
from attn_fuse.kernels.evidence import AS_WRITTEN, Row, Table
from harness import store

BEYOND = (1.03, 1.1, 1.5)


def chosen(case: Case, kernels: Iterable[str], known: Table) -> str:
    """What is chosen for `case` among `kernels` and the program as written."""
    on = torch.device(known.device.type)

    def model(of: Case, name: str) -> float:
        expected = cost.estimated(name, of, on)
        return 1.0 if expected is None else expected.ratio

    ratios = {AS_WRITTEN: 1.0}
    for name in kernels:
        modelled = functools.partial(model, name=name)
        found = evidence.compare(name, case, known.device, known.torch, [known], modelled)
        found = found or cost.estimated(name, case, on)
        if found is not None:
            ratios[name] = found.ratio
    return min(ratios, key=ratios.__getitem__)


def regret(row: Row, table: Table) -> float:
    """The regret of what is chosen for `row` by the rows of `table` about other cases."""
    others = tuple(other for other in table.rows if other.case != row.case)
    choice = chosen(row.case, [name for name in row.times if name != AS_WRITTEN], replace(table, rows=others))
    return row.times[choice] / min(row.times.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device, help="whose table it is (default cpu)")
    arguments = parser.parse_args()
    for table in evidence.tables():
        if table.own or table.device.type != arguments.device.type:
            continue
        regrets = [regret(row, table) for row in table.rows]
        counts = {str(limit): sum(x > limit for x in regrets) for limit in BEYOND}
        mean = statistics.fmean(regrets)
        print(f"{table.device}: {len(regrets)} rows, each left out in turn: {mean:.3f} of the best, the mean")
        print("; ".join(f"more than {limit} on {count}" for limit, count in counts.items()))
        worst = sorted(zip(regrets, table.rows, strict=True), key=lambda found: -found[0])[:5]
        print(*(f"{found:.2f}  {row.case}" for found, row in worst), sep="\n")
        results = {"rows": len(regrets), "mean": mean, "beyond": counts}
        results |= {"worst": [{"regret": found, "case": str(row.case)} for found, row in worst]}
        print(f"stored in {store('left-out', arguments.device, results)}")


if __name__ == "__main__":
    main()
