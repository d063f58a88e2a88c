"""Everything that is to be known from a GPU, in one run of a few minutes: speed limits, SDPA, our kernels, models.

    python benchmarks/gpu.py [--minutes 8] [--only sdpa ours] [--results DIRECTORY]

Every section runs in a process of its own and writes its rows to gpu-SECTION-DEVICE.json after each, so that a section
which fails, hangs or breaks the device leaves the others and its own rows so far alone. Time that a section leaves over
goes to the later ones. Nothing needs to be installed but torch. With --device cpu everything runs at tiny sizes, but
for what only CUDA and Triton can do, to see that it runs; such figures mean nothing, and go to build/gpu-dry-run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# First of all: other packages, too, bring a `tests`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import gpu_attention
from gpu_attention import Bench, Row
from harness import RESULTS, ROOT, machine, seconds_in_words

_OVERHEAD = 7.0


@dataclass(frozen=True)
class Section:
    """weight: its share of the time. only_cuda: what of it a CPU does not have."""

    rows: Callable[[Bench], Iterator[Row]]
    weight: int
    only_cuda: str = ""


def correctness(bench: Bench) -> Iterator[Row]:
    """Our operators on the shared grid against float64; several processes, since each program is compiled anew."""
    from tests.grid.case import LONGER, Case
    from tests.grid.operators import operators

    asked = []
    known = operators(bench.device)
    for name, operator in reversed(known.items()):
        rows = operator.rows(other=None if bench.tiny else LONGER)
        asked += [(name, Case.of(row), bench.device) for row in (rows[:4] if bench.tiny else rows)]
    taken, wrong = dict.fromkeys(known, 0), 0
    context = multiprocessing.get_context("spawn")
    with context.Pool(2 if bench.tiny else gpu_attention.WORKERS) as pool:
        for name, c, said in pool.imap_unordered(_checked, asked):
            taken[name] += 1
            if said:
                wrong += 1
                yield {"kernel": name, "case": str(c), "wrong": said}
    yield {"checked": taken, "asked": len(asked), "wrong": wrong}


_broken_by = ""


def _checked(asked: tuple[str, Any, torch.device]) -> tuple[str, Any, str]:
    global _broken_by
    from tests.grid.operators import check, operators

    name, c, device = asked
    if _broken_by:
        return name, c, f"not run: this process was broken by {_broken_by}"
    torch.set_num_threads(1)
    try:
        return name, c, check(operators(device)[name], c, device)
    except Exception as error:
        if "CUDA error" in str(error):
            _broken_by = f"{name} on {c}"
        return name, c, f"{type(error).__name__}: {str(error)[:300]}"


def nanogpt(bench: Bench) -> Iterator[Row]:
    """A training step of GPT-2 small: unmodified under Inductor and attn_fuse, and edited by hand under Inductor."""
    import nanogpt as script
    from attn_fuse.backend import attn_fuse
    from attn_fuse.report import headline, reports
    from tests.grid.operators import operators

    tiny = {"block_size": 32, "vocab_size": 256, "n_layer": 1, "n_head": 2, "n_embd": 32}
    config = script.GPTConfig(**tiny) if bench.tiny else script.GPTConfig()
    inner = "aot_eager" if bench.tiny else "inductor"
    args = argparse.Namespace(
        device=bench.device, dtype="bfloat16", batch=2 if bench.tiny else 12, length=config.block_size,
        rounds=2 if bench.tiny else 15, seconds=6.0, variants=["inductor"],
    )  # fmt: skip
    torch.manual_seed(0)
    weights = script.GPT(config).state_dict()

    def run(name: str, kind: type, **how: Any) -> Callable[[], Any]:
        model = kind(config)
        model.load_state_dict(weights)
        model.to(bench.device, torch.bfloat16).compile(**how)
        return script.block_runs({name: model}, args, training=True)[name]

    def row(name: str, runs: Mapping[str, Callable[[], Any]]) -> Row:
        result = script.measured(name, dict(runs), args)
        result["attn_fuse_over"] = {base: round(ratio, 3) for base, ratio in result["attn_fuse_over"].items()}
        result["seconds"] = {variant: timing.median for variant, timing in result["seconds"].items()}
        return {"what": name, **result, "sites": sorted({headline(s) for r in reports() for s in r.sites})}

    tokens = f"batch {args.batch}, {config.block_size} tokens, bfloat16, forward and backward"
    runs = {
        "inductor": run("inductor", script.GPT, backend=inner),
        "attn_fuse": run("attn_fuse", script.GPT, backend=attn_fuse, options={"inner_backend": inner}),
        "sdpa": run("sdpa", script.SDPAGPT, backend=inner),
    }
    yield row(f"GPT-2 small, {tokens}", runs)
    own = [name for name in reversed(operators(bench.device)) if name.startswith("triton_flash")]
    for kernel in own or ["chunked"]:
        options = {"inner_backend": inner, "kernels": [kernel], "strict": True}
        runs["attn_fuse"] = run("attn_fuse", script.GPT, backend=attn_fuse, options=options)
        yield row(f"GPT-2 small on {kernel}, {tokens}", runs)


SECTIONS = {
    "ceilings": Section(gpu_attention.ceilings, 15),
    "sdpa": Section(gpu_attention.sdpa, 90, "cuDNN and the efficient kernel"),
    "correctness": Section(correctness, 85, "Triton kernels"),
    "ours": Section(gpu_attention.ours, 80, "Triton kernels"),
    "decoding": Section(gpu_attention.decoding, 20, "Triton kernels"),
    "flex": Section(gpu_attention.flex, 80, "FlexAttention compiled, and its gradients"),
    "nanogpt": Section(nanogpt, 110, "Inductor"),
}


class OutOfTime(BaseException):
    """No Exception: what tries one call after another catches those."""


def run_section(name: str, bench: Bench, seconds: float, path: Path) -> str:
    """Rows into `path` as they come; how it ended, in words."""
    started, rows = time.perf_counter(), []  # type: float, list[Row]
    head = {"machine": machine(bench.device), "section": name, "tiny": bench.tiny}

    def write(status: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({**head, "status": status, "rows": rows}, indent=1) + "\n")
        os.replace(part, path)

    def alarm(*_: Any) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        torch.manual_seed(0)
        for row in SECTIONS[name].rows(bench):
            rows.append(row)
            print(f"  {time.perf_counter() - started:5.1f} s  {line(row)}", flush=True)
            write("cut off")
        status = "complete"
    except OutOfTime:
        status = f"out of time after {seconds_in_words(seconds)}"
    except Exception as error:
        status = f"failed: {type(error).__name__}: {str(error)[:2000]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    write(status)
    return status


def line(row: Row) -> str:
    """A row in words: what it is of, then each figure; times beside the least of the others."""
    figures = {"us", "tflops", "tb_per_s", "failed", "seconds", "peak_bytes", "sites"}
    words = [f"{name} {value}" for name, value in row.items() if name not in figures]
    times = row.get("us") or row.get("seconds")
    if isinstance(times, dict):
        unit = 1e-6 if "us" in row else 1.0
        for name, value in times.items():
            others = [other for n, other in times.items() if n != name]
            beside = f" ({value / min(others):.2f})" if others else ""
            words.append(f"{name} {seconds_in_words(value * unit)}{beside}")
    elif times is not None:
        words.append(", ".join(f"{row[f]} {f}" for f in ("us", "tflops", "tb_per_s") if f in row))
    words += [f"{name}: {why}" for name, why in row.get("failed", {}).items()]
    return "; ".join(words)


def run_all(args: argparse.Namespace) -> dict[str, str]:
    """Each section in a process of its own; how each ended."""
    end, ended = time.perf_counter() + 60 * args.minutes, {}
    for number, name in enumerate(args.only):
        left = end - time.perf_counter()
        share = SECTIONS[name].weight / sum(SECTIONS[later].weight for later in args.only[number:])
        path = args.results / f"gpu-{name}-{label(args.device)}.json"
        # What starts a process and ends it comes on top; a small share is no less than it takes to say anything.
        seconds = max(left * share, min(20.0, left)) - _OVERHEAD
        if seconds < 4:
            ended[name] = "not run: no time was left"
            continue
        print(f"== {name}, {seconds:.0f} s" + _left_out(name, args.device), flush=True)
        command = [sys.executable, str(Path(__file__).resolve()), "--section", name, "--seconds", str(seconds)]
        command += ["--device", str(args.device), "--out", str(path)]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            code = process.wait(timeout=seconds + 20)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        ended[name] = json.loads(path.read_text())["status"] if path.exists() else f"no result, exit code {code}"
        if code is None:
            ended[name] = "stopped: it hung"
        print(f"   {ended[name]}", flush=True)
    return ended


def _end(process: subprocess.Popen[bytes]) -> None:
    # The workers of a section are of its process group.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _left_out(name: str, device: torch.device) -> str:
    missing = SECTIONS[name].only_cuda
    return f" (without {missing}, for which a GPU is needed)" if missing and device.type != "cuda" else ""


def label(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device).lower().replace(" ", "-")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0, help="that all sections take together, at most")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--results", type=Path, help="where the result files go, in place of benchmarks/results")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device; --device cpu only sees that this script runs")
    if args.section:
        status = run_section(args.section, Bench(args.device, args.device.type == "cpu"), args.seconds, args.out)
        raise SystemExit(status.startswith("failed"))
    args.results = args.results or (RESULTS if args.device.type == "cuda" else ROOT / "build" / "gpu-dry-run")
    ended = run_all(args)
    print("\n".join(f"{name}: {status}" for name, status in ended.items()))
    raise SystemExit(not all(status == "complete" for status in ended.values()))


if __name__ == "__main__":
    main()
