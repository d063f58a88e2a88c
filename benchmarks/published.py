"""How much attention of published models is fused, and whether it computes the same.

python benchmarks/published.py --package timm

Each case is an unmodified model of a package of the index, at random, tiny, in inference and in training, with
`pick="fused"`. Counted are attention sites that eager runs (zoo/sites.py), those of them that no longer run unfused,
and the distance of outputs, gradients and what is written from eager; where it is large, float64 decides. A site that
is no single attention is not counted, and its case says the mathematics (zoo/apart.py).

Each row goes to build/published.jsonl at once, and is measured again only by --again. A change of the core runs a tenth
that the hash of its commit chooses: --share commit/10 --rows build/tenth.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import os
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forked process cannot use the threads of its parent
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "NO_ALBUMENTATIONS_UPDATE": "1"}

import torch
import torch._dynamo
from torch import nn

from harness import ROOT, commit, store, table
from zoo.apart import APART, REASONS
from zoo.case import Package
from zoo.cases import MODULES
from zoo.forked import DiedError, TooLongError, forked
from zoo.measure import Row, Setting, measured, sites_of
from zoo.vision import declare_operators

MODES = ("inference", "training")
ROWS = ROOT / "build" / "published.jsonl"
# What --again takes.
AGAIN: dict[str, Callable[[Entry], bool]] = {
    "wrong": lambda entry: entry.row.wrong,
    "failed": lambda entry: bool(entry.row.failed),
    "left": lambda entry: entry.fused < entry.sites,
    "broken": lambda entry: bool(entry.row.broken),
    "all": lambda entry: True,
}


@dataclass(frozen=True)
class Entry:
    """A row, and the commit and the version of the package that it was measured with."""

    row: Row
    commit: str
    version: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.row.package, self.row.case, self.row.mode

    @property
    def sites(self) -> int:
        """The sites that are one attention."""
        row, apart = self.row, APART.get(self.row.package, {}).get(self.row.case)
        if apart is not None:
            return 0 if apart.sites is None else row.sites - apart.sites
        return row.sites - min(sum(row.left.get(reason, 0) for reason in REASONS), row.sites - row.fused)

    @property
    def fused(self) -> int:
        return min(self.row.fused, self.sites)


def measure(package: Package, names: Sequence[str], done: set[tuple[str, str, str]], args: argparse.Namespace) -> None:
    """Append a row to the file for each case and mode that is not done."""
    left = [(name, mode) for name, mode in itertools.product(names, MODES) if (package.name, name, mode) not in done]
    if left:
        with contextlib.suppress(Exception):
            package.cases[left[0][0]]()  # loads for all what one of them imports
    for name, mode in left:
        start = time.perf_counter()
        setting = Setting(package.cases[name], mode)
        call = functools.partial(measured, package.name, name, setting)
        try:
            row = forked(call, args.timeout, not args.verbose)
        except (TooLongError, DiedError) as problem:
            eager = functools.partial(sites_of, package.name, name, setting)
            row = replace(forked(eager, args.timeout), failed=str(problem))
        entry = Entry(row, commit(), version(package.name))
        args.rows.parent.mkdir(exist_ok=True)
        with args.rows.open("a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")
        print(f"{line(entry)}  ({time.perf_counter() - start:.1f} s)", flush=True)


def entries(path: Path) -> list[Entry]:
    """What is in the file; the last of each case and mode."""
    found = {}
    for stored in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
        entry = Entry(**{**stored, "row": Row(**stored["row"])})
        found[entry.key] = entry
    return list(found.values())


def line(entry: Entry) -> str:
    row = entry.row
    said = row.failed or (row.broken and f"not measured, {row.broken}") or f"{row.far:.1e}"
    if row.float64:
        said += f" (from float64 {row.float64[0]:.1e}, eager {row.float64[1]:.1e})"
    if row.wrong:
        said += " WRONG"
    left = row.left.items() if row.fused < row.sites else ()
    reasons = "".join(f"\n      {count} x {reason}" for reason, count in left)
    return f"{row.package:16} {row.case:34} {row.mode:9} {entry.fused:3} of {entry.sites:3}  {said}{reasons}"


# ---- what is printed


HEAD = ["", "models", *MODES, "wrong", "crash or hang"]


def lines(found: Sequence[Entry]) -> Iterator[list[str]]:
    """A line a package: its models, the sites that are one attention and the fused ones, and what went wrong."""
    packages = dict.fromkeys(entry.row.package for entry in found)
    parts = [(name, [entry for entry in found if entry.row.package == name]) for name in packages]
    for name, part in [*parts, ("all", list(found))]:
        models = {entry.key[:2] for entry in part if not entry.row.broken}
        wrong, failed = (sum(bool(getattr(entry.row, what)) for entry in part) for what in ("wrong", "failed"))
        yield [name, str(len(models)), *(share(part, mode) for mode in MODES), str(wrong), str(failed)]


def share(part: Sequence[Entry], mode: str) -> str:
    of = [entry for entry in part if entry.row.mode == mode]
    sites, fused = sum(entry.sites for entry in of), sum(entry.fused for entry in of)
    return f"{fused} of {sites} ({fused / sites:.1%})" if sites else "0 of 0"


def markdown(found: Sequence[Entry]) -> str:
    """The lines as docs/results.md has them."""
    rule = ["---"] + ["--:"] * (len(HEAD) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [HEAD, rule, *lines(found)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", default=",".join(MODULES), help="only these packages, separated by commas")
    parser.add_argument("--only", default="", metavar="REGEX", help="only cases in whose name it is found")
    parser.add_argument(
        "--share", type=_share, default=(0, 1), metavar="N/M",
        help="only part N of M, by the hashes of the cases' names; `commit` for N takes the one of the last commit",
    )  # fmt: skip
    parser.add_argument("--again", default="", metavar="WORDS", help=f"measure again what is {', '.join(AGAIN)}")
    parser.add_argument(
        "--timeout", type=int, default=100, help="seconds of computing for a case and mode (default 100)"
    )
    parser.add_argument("--rows", type=Path, default=ROWS, help="the file of rows")
    parser.add_argument("--table", action="store_true", help="measure nothing, print what is there")
    parser.add_argument("--markdown", action="store_true", help="print it as docs/results.md has it")
    parser.add_argument("--verbose", action="store_true", help="let the cases print")
    return parser.parse_args()


def _share(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    parts = int(of)
    return (int(commit()[:7], 16) if number == "commit" else int(number)) % parts, parts


def _is_in(share: tuple[int, int], name: str) -> bool:
    number, parts = share
    return zlib.crc32(name.encode()) % parts == number


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore")
    found = entries(args.rows)
    again = [AGAIN[word] for word in args.again.split(",") if word]
    done = {entry.key for entry in found if not any(test(entry) for test in again)}
    if not args.table:
        warm()
        for name in args.package.split(","):
            try:
                module = importlib.import_module(f"zoo.cases.{MODULES[name]}")
            except ImportError as problem:
                print(f"{name} is not measured: {problem}")
                continue
            package = next(package for package in module.PACKAGES if package.name == name)
            names = [case for case in package.cases if re.search(args.only, case) and _is_in(args.share, case)]
            measure(package, names, done, args)
        found = entries(args.rows)
    print(markdown(found) if args.markdown else table(HEAD, list(lines(found))))
    packages = {entry.row.package: entry.version for entry in found}
    if packages.keys() == MODULES.keys() and args.share[1] == 1:
        stored = {"packages": packages, "commits": sorted({entry.commit for entry in found})}
        print(store("published", torch.device("cpu"), {**stored, "rows": [as_plain(entry) for entry in found]}))


def warm() -> None:
    """Load what every case would: Dynamo, our stages, torchvision."""
    declare_operators()
    model = nn.MultiheadAttention(8, 2)
    x = torch.randn(4, 1, 8)
    Setting(lambda: (model, (x, x, x), {}), "inference").ours("eager")(model)(x, x, x)


def as_plain(entry: Entry) -> dict[str, Any]:
    """The row, without the fields that say nothing."""
    return {name: value for name, value in asdict(entry.row).items() if value or name in ("sites", "fused")}


if __name__ == "__main__":
    main()
