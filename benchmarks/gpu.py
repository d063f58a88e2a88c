"""Everything that is to be known from a GPU, in six calls of a minute or two each, back to back.

    PYTHONPATH=. python benchmarks/gpu.py correct  --results DIRECTORY   speed limits; kernels, models against float64
    PYTHONPATH=. python benchmarks/gpu.py compile  --results DIRECTORY   what the others time, side by side
    PYTHONPATH=. python benchmarks/gpu.py sweep    --results DIRECTORY   our kernels in other configs, and under ncu
    PYTHONPATH=. python benchmarks/gpu.py speed    --results DIRECTORY   them beside torch's, FlexAttention, decoding
    PYTHONPATH=. python benchmarks/gpu.py evidence --results DIRECTORY   what the kernel picker goes by
    PYTHONPATH=. python benchmarks/gpu.py models   --results DIRECTORY   `bench nanogpt`; tests/gpu

They go by the numbers of their results, too, and `all` makes the six, in 9 minutes. A call that ends early leaves its
time to those after it; --plan prints the seconds of each section, and makes none. Nothing is needed but torch with its
Triton, no network, and nothing is written but to DIRECTORY and to a folder for caches, the same on every machine, since
Triton's cache hits only there: --cache names the archive of `make gpu-cache`. Each row is measured in a process of its
own or one that is replaced where a kernel kills it, hangs or breaks the device, and has a deadline. A later call reads
what an earlier one left in the folder for caches or in --earlier: which kernels are right, and the evidence.
benchmarks/gpu_results.py makes evidence that ships and the tables of benchmarks/README.md from DIRECTORY.

With --device cpu everything runs at tiny sizes, but for what only CUDA can do, to see that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# First of all: other packages, too, bring a `tests`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import gpu_tasks
from attn_fuse.picker import evidence
from attn_fuse.picker.timing import seconds_in_words
from attn_fuse.picker.workers import Worker
from gpu_attention import Row
from gpu_sections import CALLS, SPARE, Run
from harness import commit

# The paths of the caches are part of what is kept in them.
CACHES = Path("/tmp/attn_fuse_gpu")
# Characters of a printed row.
_LONGEST = 400


NUMBERS = {str(call.number): name for name, call in CALLS.items()}


def made(name: str, run: Run) -> bool:
    """Make one call; whether all of it was run."""
    started = time.perf_counter()
    if not run.about:
        with Worker() as worker:
            answer = worker.call(90.0, gpu_tasks.about, run.device)
        if answer.problem:
            raise SystemExit(f"gpu.py {name}: the device does not work: {answer.problem}")
        run.about = {**answer.value, "commit": commit()}
    _read_earlier(run)
    cached = _triton_cache(run.caches)
    print(f"== {name}: {run.left:.0f} s; {cached}", flush=True)
    whole = True
    for section, (rows, share) in CALLS[name].sections.items():
        begun, end = time.perf_counter(), run.until(share)
        made: list[Row] = []
        of: dict[str, Any] = {"status": "cut off", "may take": round(end - begun, 1), "rows": made}
        run.sections[section] = of
        try:
            for row in rows(run, end):
                made.append(row)
                print(f"  {time.perf_counter() - started:5.1f} s  {line(row)[:_LONGEST]}", flush=True)
                _write(run, name, cached)
            of["status"] = "complete"
        except Exception as error:
            of["status"] = f"failed: {type(error).__name__}: {str(error)[:2000]}"
            whole = False
        of["seconds"] = round(time.perf_counter() - begun, 1)
        _write(run, name, cached)
        print(f"   {section}: {of['status']}, {of['seconds']:.0f} s of {of['may take']:.0f}", flush=True)
    print(f"== {name} took {time.perf_counter() - started:.0f} s; {_triton_cache(run.caches)}", flush=True)
    return whole


def _write(run: Run, name: str, cached: str) -> None:
    content = {
        "commit": run.about["commit"],
        "machine": run.about["machine"],
        "call": name,
        "tiny": run.tiny,
        "triton cache": cached,
        # Results of before have none: their times include what the GPU waited for the host.
        "clock": "the GPU's own",
    }
    text = json.dumps({**content, "sections": run.sections}, indent=1) + "\n"
    evidence.write_whole(run.path(name), text)
    evidence.write_whole(run.caches / "state.json", json.dumps(run.earlier) + "\n")


def _read_earlier(run: Run) -> None:
    """What earlier calls left: in the folder for caches, where the machine is the same; else in --earlier."""
    with contextlib.suppress(OSError, ValueError):
        run.earlier |= json.loads((run.caches / "state.json").read_text())


def adopt(earlier: Path, caches: Path) -> None:
    """Take over from a folder of results which kernels are wrong, and the evidence as the picker's own."""
    for path in sorted(earlier.glob("gpu-1-*.json")):
        rows = json.loads(path.read_text())["sections"].get("correctness", {}).get("rows", [])
        for row in rows:
            if "wrong kernels" in row:
                state = json.dumps({"wrong kernels": row["wrong kernels"]})
                evidence.write_whole(caches / "state.json", state)
    for path in sorted(earlier.glob("evidence_*.json")):
        table = evidence.read_table(path)
        evidence.write_whole(evidence.own_path(table.device, table.torch), path.read_text())


def unpack(archive: Path, caches: Path) -> None:
    """Triton's cache, as `make gpu-cache` packed it, where it has not been unpacked."""
    if not (caches / "triton").exists():
        with tarfile.open(archive) as packed:
            packed.extractall(caches, filter="data")


def _triton_cache(caches: Path) -> str:
    """How many kernels Triton's cache on disk has, and whether what was carried is this Triton's."""
    count = len([*(caches / "triton").glob("*/*.cubin")])
    said = f"{count} kernels in Triton's cache"
    manifest = caches / "triton" / "made_with.json"
    if manifest.exists() and gpu_tasks.installed("triton"):
        same = json.loads(manifest.read_text())["triton_key"] == triton_key()
        said += ", carried" if same else ", carried, BUT OF ANOTHER TRITON: none of them hits"
    return said


def triton_key() -> str:
    """By which Triton tells its own versions apart."""
    import hashlib

    from triton.runtime.cache import triton_key as key

    return hashlib.sha256(key().encode()).hexdigest()


def line(row: Row) -> str:
    """A row in words: what it is of, then each figure; times beside the least of the others."""
    figures = {
        "us",
        "host_us",
        "graph_us",
        "tflops",
        "tb_per_s",
        "failed",
        "seconds",
        "peak_bytes",
        "off",
        "why_not",
        "said",
        "not_captured",
    }
    words = [f"{name} {value}" for name, value in row.items() if name not in figures and value not in ("", {}, [])]
    times = row.get("us") or row.get("seconds")
    if isinstance(times, dict):
        unit = 1e-6 if "us" in row else 1.0
        for name, value in times.items():
            others = [other for n, other in times.items() if n != name]
            beside = f" ({value / min(others):.2f})" if others else ""
            words.append(f"{name} {seconds_in_words(value * unit)}{beside}")
    elif times is not None:
        words.append(", ".join(f"{row[f]} {f}" for f in ("us", "tflops", "tb_per_s", "seconds") if f in row))
    failed = row.get("failed", {})
    words += [f"{name}: {why}" for name, why in failed.items()] if isinstance(failed, dict) else [f"FAILED: {failed}"]
    return "; ".join(words)


def plan(names: Sequence[str]) -> str:
    """The seconds of each section, at most."""
    lines = []
    for name in names:
        sections = ", ".join(f"{section} {seconds:.0f}" for section, seconds in CALLS[name].planned().items())
        lines.append(f"{name}: {60 * CALLS[name].minutes:.0f} s at most: {sections}, and {SPARE:.0f} to end")
    return "\n".join([*lines, f"in all {60 * sum(CALLS[name].minutes for name in names):.0f} s"])


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", nargs="+", choices=[*CALLS, *NUMBERS, "all"], metavar="CALL", help="; ".join(CALLS))
    parser.add_argument("--results", type=Path, metavar="DIRECTORY", help="where the result files go")
    parser.add_argument("--plan", action="store_true", help="print the seconds of each section, and do nothing")
    parser.add_argument("--device", type=torch.device, default="cuda")
    parser.add_argument("--minutes", type=float, help="that each call takes at most, for other than its own")
    parser.add_argument("--caches", type=Path, default=CACHES, metavar="DIRECTORY", help=f"instead of {CACHES}")
    parser.add_argument("--cache", type=Path, metavar="ARCHIVE", help="what `make gpu-cache` made")
    parser.add_argument("--earlier", type=Path, metavar="DIRECTORY", help="results of earlier calls, on a new machine")
    args = parser.parse_args(given)
    if args.results is None and not args.plan:
        parser.error("--results DIRECTORY is needed")
    args.call = list(dict.fromkeys(x for c in args.call for x in ([*CALLS] if c == "all" else [NUMBERS.get(c, c)])))
    return args


def main() -> None:
    started = time.perf_counter()
    args = arguments()
    if args.plan:
        print(plan(args.call))
        return
    caches = args.caches.absolute()
    for variable, name in (
        ("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("ATTN_FUSE_CACHE", "attn_fuse"),
    ):  # fmt: skip
        os.environ[variable] = str(caches / name)
    if args.device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device; --device cpu only sees that this script runs")
    if args.cache:
        unpack(args.cache, caches)
    if args.earlier:
        adopt(args.earlier, caches)
    whole, end = True, started
    about: dict[str, Any] = {}
    for name in args.call:
        end += 60 * (args.minutes or CALLS[name].minutes)
        run = Run(args.device, args.results.absolute(), caches, end - SPARE, CALLS[name].number, about)
        whole &= made(name, run)
        about = run.about
    raise SystemExit(not whole)


if __name__ == "__main__":
    main()
