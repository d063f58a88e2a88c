"""Training beside other processes: a data loader, say, keeps cores busy on which an attention's threads wait for it.

The programs are those of features.py, each compiled by Inductor as it is written and by attn_fuse as its picker
chooses; beside none, one and more processes that do nothing but count. In turn, in a new order each round; medians.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator

import torch

from features import PROGRAMS, contestants, kept_rows
from harness import interleaved, seconds_in_words, store, table

BUSY = [
    "causal, dropout 0.1, training",
    "bias by a stored index, training",
    "softcap, window 256, training",
    "values of 128, training",
]
NAMES = ("inductor", "attn_fuse")


@contextlib.contextmanager
def beside(processes: int) -> Iterator[None]:
    """While the block runs, as many processes count, and do nothing else."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def measured(program: str, length: int, loads: list[int], rounds: int, seconds: float) -> list[dict[str, object]]:
    """A row for each number of processes in `loads`."""
    found = {name: c for name, c in contestants(*PROGRAMS[program], length).items() if name in NAMES}
    rows = []
    for load in loads:
        with beside(load):
            times = interleaved({name: c.run for name, c in found.items()}, torch.device("cpu"), rounds, seconds)
        gain = times["inductor"].median / times["attn_fuse"].median
        kernel = found["attn_fuse"].kernel
        rows.append(
            {"program": program, "length": length, "beside": load, "kernel": kernel, "times": times, "gain": gain}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048, help="tokens (2048)")
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="processes (0 1 2)")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=BUSY, metavar="PROGRAM")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=60.0, help="the most time for one figure")
    parser.add_argument("--add", action="store_true", help="keep the stored rows of what is not measured")
    parser.add_argument("--dry-run", action="store_true", help="print, and store nothing")
    args = parser.parse_args()
    rows = []
    for program in args.programs:
        of_program = measured(program, args.length, args.beside, args.rounds, args.seconds)
        rows += of_program
        lines = [
            [str(row["beside"]), *(seconds_in_words(row["times"][name].median) for name in NAMES), f"{row['gain']:.2f}"]
            for row in of_program
        ]
        print(f"\n{program}, T = {args.length}, {of_program[0]['kernel']}")
        print(table(["beside", *NAMES, "gain"], lines), flush=True)
    if not args.dry_run:
        print(store("busy", torch.device("cpu"), {"rows": [*kept_rows("busy", rows), *rows] if args.add else rows}))


if __name__ == "__main__":
    main()
