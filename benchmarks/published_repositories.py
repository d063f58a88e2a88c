"""How much attention of models in public repositories is fused, and whether it computes the same.

python benchmarks/published_repositories.py FOLDER

The files are those of benchmarks/explain_repositories.py that give a report, in the repositories that FOLDER has,
checked out as OWNER+NAME. explain builds the model and finds its inputs, as for a user; then it is measured as
benchmarks/published.py does: sites that eager runs, those of them that no longer run unfused with `pick="fused"`, and
the distance of outputs, gradients and what is written from eager. Parameters that are all 0, as a last layer's often
are, get small random values, so that what comes before them counts.

Each row goes to build/published_repositories.jsonl at once. `pip install '.[explain]'` brings what the models need.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forked process cannot use the threads of its parent
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from torch import nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.subject import OF_A_PART, add_flags, subject_of
from explain_repositories import LIST
from harness import ROOT, commit, store
from published import warm
from zoo.case import Made
from zoo.forked import DiedError, TooLongError, forked
from zoo.measure import Row, Setting, measured

ROWS = ROOT / "build" / "published_repositories.jsonl"
# Seconds of computing for a file, and the parameters above which a training step is left out.
SECONDS, MOST_TRAINED = 400, 40_000_000
MODES = ("inference", "training")


def rows_of(name: str, path: Path) -> list[Row]:
    """The rows of a file, one for each mode; one that says why where explain gives no model."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    try:
        with subject_of(parser.parse_args([str(path)])) as subject:
            model, inputs = subject.model, subject.inputs
            if not isinstance(model, nn.Module):
                return [Row("repositories", name, "inference", broken="no module")]
            without_zeros(model)

            def build() -> Made:
                return copy.deepcopy(model), *copy.deepcopy((inputs.args, inputs.kwargs))

            part = " (a part)" if any(note.startswith(OF_A_PART) for note in subject.said) else ""
            count = sum(parameter.numel() for parameter in model.parameters())
            modes = MODES if count <= MOST_TRAINED else MODES[:1]
            return [measured(f"{type(model).__name__}{part}", name, Setting(build, mode)) for mode in modes]
    except ExplainError as problem:
        return [Row("repositories", name, "inference", broken=f"explain: {problem}"[:300])]


def without_zeros(model: nn.Module) -> None:
    """Small random values for parameters that are 0."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(0, 0.02)


def entries(path: Path) -> list[dict[str, Any]]:
    """The rows that are in the file; the last of each case and mode."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list({(row["case"], row["mode"]): row for row in map(json.loads, lines)}.values())


def measure(folder: Path, only: str, rows: Path) -> None:
    """Append the rows of each file to `rows` that is not there yet."""
    done = {row["case"] for row in entries(rows)}
    rows.parent.mkdir(exist_ok=True)
    for file in json.loads(LIST.read_text())["files"]:
        name = f"{file['repository']}/{file['path']}"
        path = folder / file["repository"].replace("/", "+") / file["path"]
        if file["outcome"] not in ("report", "part") or only not in name or name in done or not path.is_file():
            continue
        start = time.perf_counter()
        try:
            found = forked(functools.partial(rows_of, name, path), SECONDS)
        except (TooLongError, DiedError) as problem:
            found = [Row("repositories", name, "inference", failed=str(problem))]
        with rows.open("a") as out:
            for row in found:
                out.write(json.dumps({**asdict(row), "commit": commit()}) + "\n")
                wrong = "WRONG" if row.wrong else row.failed or row.broken
                print(f"{row.fused:3} of {row.sites:3}  {row.far:.1e}  {row.mode:9}  {name}  {wrong}", flush=True)
        print(f"    {time.perf_counter() - start:.0f} s", flush=True)


def totals(found: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, int]]]:
    """Of each mode the sites, those that are fused, and the cases that are wrong."""
    for mode in MODES:
        of_mode = [row for row in found if row["mode"] == mode and not row["broken"]]
        yield (
            mode,
            {
                "models": sum(bool(row["sites"]) for row in of_mode),
                "sites": sum(row["sites"] for row in of_mode),
                "fused": sum(row["fused"] for row in of_mode),
                "wrong": sum(row["wrong"] for row in of_mode),
                "failed": sum(bool(row["failed"]) for row in of_mode),
            },
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the repositories are")
    parser.add_argument("--only", default="", help="a word of the names of the files to measure (all)")
    parser.add_argument("--rows", type=Path, default=ROWS, help="the file of rows")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    warm()
    for package in ("timm", "transformers"):  # for all what many import
        with contextlib.suppress(Exception):
            importlib.import_module(package)
    measure(arguments.folder.resolve(), arguments.only, arguments.rows)
    found = entries(arguments.rows)
    content = {"commits": sorted({row["commit"] for row in found}), "total": dict(totals(found))}
    kept = [{k: v for k, v in row.items() if v or k in ("sites", "fused")} for row in found]
    print(content["total"])
    if not arguments.only:
        print(store("repositories", torch.device("cpu"), {**content, "rows": kept}))


if __name__ == "__main__":
    main()
