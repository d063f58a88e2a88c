"""Which of the look-alikes of tests/models Inductor's own attention patterns rewrite into something else.

python benchmarks/lookalikes.py

A look-alike is one step away from an attention; attn_fuse leaves it as written or computes the same.
"""

from __future__ import annotations

import warnings

import torch

from harness import store
from recall import MODES, inductors, ours
from tests.models.lookalikes import LOOKALIKES


def main() -> None:
    warnings.simplefilter("ignore")
    rows = []
    for program in LOOKALIKES:
        for mode in MODES[: 1 + program.training]:
            theirs, mine = inductors(program, mode), ours(program, mode, "fused")
            row = {"name": program.name, "mode": mode, "inductor_fused": theirs.fused > 0}
            rows.append({**row, "inductor_wrong": theirs.wrong, "wrong": mine.wrong, "failed": theirs.failed})
            if theirs.fused:
                print(row, theirs.wrong, flush=True)
    print(store("lookalikes", torch.device("cpu"), {"rows": rows}))


if __name__ == "__main__":
    main()
