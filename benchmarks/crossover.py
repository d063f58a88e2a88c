"""Where a kernel beats the attention as written: the evidence that ships with attn_fuse, for every kernel and feature.

The cases are those of `python -m attn_fuse.bench calibrate`, at more lengths and batches, measured by the same code:
Inductor on the program as written, and every kernel that can run it, in turn. The rows go to
attn_fuse/picker/evidence_DEVICE.json when all are there; until then they lie in build/, where --resume finds them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from attn_fuse.bench.calibrate import as_table, grid
from attn_fuse.bench.measure import Effort, row_of, timed
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import Row, read_table, write_table
from attn_fuse.picker.timing import Device
from harness import ROOT, OtherLoad, machine

# Rows that are a power of two apart share few places in the cache: other lengths may suit the program as written.
LENGTHS = {
    "cpu": (16, 32, 64, 128, 256, 512, 768, 1024, 1280, 2048),
    "cuda": (64, 256, 512, 1024, 2048, 4096, 8192, 16384),
}
# The times of a batch at these lengths tell nothing that a longer sequence does not.
LONGEST_BATCHED = 512


def cases(device: str, lengths: Sequence[int], batches: Sequence[int], heads: int) -> Iterator[Case]:
    """All cases, those that tell most first; the batches after the first only where they are short and fp32."""
    first, *more = batches
    ordered = grid(device, lengths, heads)
    with_gradient = (case for case in ordered if case.bias == "gradient")
    ordered += [replace(case, bias="indexed", training=trains) for case in with_gradient for trains in (True, False)]
    yield from (replace(case, batch=first) for case in ordered)
    for batch in more:
        for case in ordered:
            plain = not (case.function or case.sink) and case.kv_heads == case.heads
            if plain and case.kv_len <= LONGEST_BATCHED and case.mask in ("none", "causal", "dense"):
                yield replace(case, batch=batch)


def measured_quietly(
    case: Case, device: torch.device, effort: Effort, tries: int, kernels: Sequence[str] | None
) -> Row:
    """The times of `case`, once more while other programs keep the machine busy, at most `tries` times."""
    for left in reversed(range(tries)):
        load = OtherLoad()
        row = row_of(case, timed(case, device, effort, kernels))
        if load.share() < 0.04:
            return row
        if left:
            time.sleep(2)
    print("  the machine was busy with something else")
    return row


def stored_rows(path: Path, head: dict[str, Any]) -> list[Row]:
    """The rows of an interrupted run on this machine and this version of torch."""
    if not path.exists():
        return []
    stored = read_table(path)
    return list(stored.rows) if (stored.device, stored.torch) == (Device.of_machine(head), head["torch"]) else []


def measure_all(wanted: Sequence[Case], path: Path, args: argparse.Namespace) -> list[Row]:
    """The rows of `wanted`, in the table at `path` once all are there."""
    part = ROOT / "build" / path.with_suffix(".part").name
    head, started = machine(args.device), time.perf_counter()
    rows = stored_rows(part, head) if args.resume else []
    known = {row.case for row in rows}
    effort = Effort(args.rounds, args.seconds, args.shortest)
    for number, case in enumerate(wanted, 1):
        if case not in known:
            rows.append(measured_quietly(case, args.device, effort, args.tries, args.kernels))
            print(
                f"{time.perf_counter() - started:5.0f} s  {number}/{len(wanted)}  {case}: {dict(rows[-1].times)}",
                flush=True,
            )
            write_table(part, head, rows)
    print(as_table(rows))
    os.replace(part, path)
    print(f"{len(rows)} rows in {path}")
    return rows


def texts_of(case: Case) -> dict[str, str]:
    return {name: str(value) for name, value in asdict(case).items()}


def fields_of(text: str) -> dict[str, str]:
    """FIELD=VALUE, ... of a case. Raises argparse's error for what is no field of one."""
    found = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    unknown = found.keys() - {field.name for field in fields(Case)}
    if unknown or not found:
        raise argparse.ArgumentTypeError(f"{text!r} does not say fields of a case, as bias=indexed,training=True does")
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", type=torch.device, default="cpu")
    made.add_argument("--lengths", type=int, nargs="+", help="of the sequences")
    made.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    made.add_argument("--heads", type=int, default=8)
    made.add_argument("--only", nargs="+", metavar="FIELD=VALUE[,...]", type=fields_of, help="cases like one of these")
    made.add_argument("--kernels", nargs="+", help="these only")
    made.add_argument("--rounds", type=int, default=15)
    made.add_argument("--seconds", type=float, default=1.5, help="of measuring, at most, for a case")
    made.add_argument("--shortest", type=float, default=2e-3, help="seconds that one measurement lasts at least")
    made.add_argument("--tries", type=int, default=3, help="at most, while other programs keep the machine busy")
    made.add_argument("--most", type=int, help="measure only this many cases, those that tell most")
    made.add_argument("--out", type=Path, help="write here and not beside the kernels")
    made.add_argument("--resume", action="store_true", help="keep the rows of an earlier run on this machine")
    return made


def main() -> None:
    args = parser().parse_args()
    device = args.device.type
    wanted = cases(device, args.lengths or LENGTHS[device], args.batches, args.heads)
    likes = args.only or [{}]
    wanted = [c for c in wanted if any(alike.items() <= texts_of(c).items() for alike in likes)][: args.most]
    measure_all(wanted, args.out or ROOT / "attn_fuse" / "picker" / f"evidence_{device}.json", args)


if __name__ == "__main__":
    main()
