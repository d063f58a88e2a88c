"""What benchmarks/gpu.py brought back, into the package and benchmarks/README.md: evidence that ships, and tables.

    PYTHONPATH=. python benchmarks/gpu_results.py DIRECTORY

The evidence goes to attn_fuse/picker/evidence_cuda_DEVICE.json, where rows of cases that were measured again replace
those of the same torch; the result files to benchmarks/results; the tables between the two gpu comments of
benchmarks/README.md. It may be run again; `make results` then writes docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# First of all: other packages, too, bring a `tests`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attn_fuse.bench.ways import EAGER, INDUCTOR
from attn_fuse.picker import evidence
from attn_fuse.picker.evidence import AS_WRITTEN
from harness import ROOT, bytes_in_words, seconds_in_words

Row = dict[str, Any]
# Result files, by call.
Found = dict[str, dict[str, Any]]
RESULTS_PAGE = "benchmarks/README.md"
BEGIN, END = "<!-- gpu: benchmarks/gpu_results.py writes this -->", "<!-- gpu: end -->"
TORCHS = ("cudnn", "flash", "efficient", "flex", "sdpa")
OWN = ("triton_flash",)
IN_PLAIN_TORCH = (AS_WRITTEN, "chunked")
KERNELS_SHOWN = ("cudnn", "cuda_flash", "cuda_efficient", "flex", *OWN)


class ResultsError(Exception):
    """What is wrong with what came back, in a line."""


@dataclass(frozen=True)
class Anchor:
    """A goal for our kernels. rows: of the section `speed`, that it is about. over: torch's kernels of the goal."""

    name: str
    goal: str
    rows: Callable[[Row], bool]
    over: Sequence[str] = TORCHS


def _plain(dims: Sequence[int], lengths: range) -> Callable[[Row], bool]:
    return lambda row: row.get("section") == "plain" and row["head_dim"] in dims and row["length"] in lengths


def _feature(*names: str) -> Callable[[Row], bool]:
    return lambda row: row.get("feature") in names


# The max of a range is exclusive.
_LONG, _MIDDLE, _SHORT, _ANY = range(4096, 1 << 20), range(1024, 2049), range(1, 513), range(1, 1 << 20)
ANCHORS = (
    Anchor("D 128, T >= 4k", "0.95 of cuDNN forward", _plain([128], _LONG), ("cudnn",)),
    Anchor("D 64", "1.0", _plain([64], _ANY)),
    Anchor("T 1k-2k", "1.0", _plain([64, 128], _MIDDLE)),
    Anchor("T <= 512", "1.1", _plain([64, 128], _SHORT)),
    Anchor("D 256", "1.6 of FA2", _plain([256], _ANY), ("flash",)),
    Anchor("D 80 and 96", "1.0", _plain([80, 96], _ANY)),
    Anchor("window 1k at 16k", "5 of SDPA", _feature("window"), ("sdpa",)),
    Anchor("documents", "1.3 of FlexAttention", _feature("documents"), ("flex",)),
    Anchor("ALiBi, softcap", "1.4 of FlexAttention", _feature("alibi", "softcap"), ("flex",)),
    Anchor("dense bias with its gradient", "1.5", _feature("learned bias")),
    Anchor("dropout", "1.0", _feature("dropout")),
    Anchor("deterministic", "1.2 of FA2 in training", _feature("deterministic"), ("sdpa",)),
)


def results(folder: Path) -> Found:
    """The result files in `folder`, by call. Raises ResultsError for none, or those of a dry run."""
    found = {}
    for path in sorted(folder.glob("gpu-[1-6]-*.json")):
        content = json.loads(path.read_text())
        if content["tiny"]:
            raise ResultsError(f"{path} is of a dry run, whose figures mean nothing")
        found[content["call"]] = content | {"path": path}
    if not found:
        raise ResultsError(f"{folder} has no gpu-N-CALL-DEVICE.json, which benchmarks/gpu.py writes")
    names = {content["machine"]["gpu"] for content in found.values()}
    if len(names) > 1:
        raise ResultsError(f"{folder} has results of several devices: {', '.join(sorted(names))}")
    return found


def stored(folder: Path, label: str) -> Found:
    """The results of all calls of a device, also of those made before, by call."""
    contents = [json.loads(path.read_text()) for path in sorted(folder.glob(f"gpu-[1-6]-*-{label}.json"))]
    return {content["call"]: content for content in contents}


def rows_of(found: Found, call: str, section: str) -> list[Row]:
    rows: list[Row] = found.get(call, {}).get("sections", {}).get(section, {}).get("rows", [])
    return rows


# ---- evidence


def ship(folder: Path, package: Path) -> list[Path]:
    """Merge the evidence in `folder` into that of the package; the files written."""
    written = []
    for path in sorted(folder.glob("evidence_cuda_*.json")):
        new = evidence.read_table(path)
        target = package / path.name
        rows = list(new.rows)
        if target.exists():
            old = evidence.read_table(target)
            if (old.device, old.torch) == (new.device, new.torch):
                rows = evidence.merged(old.rows, new.rows)
        evidence.write_table(target, json.loads(path.read_text())["machine"], rows)
        written.append(target)
    return written


# ---- tables


def speed(row: Row, over: Sequence[str]) -> float | None:
    """How many times as fast the best of ours is as the best of `over`; by graph replays where both have one.

    None where one of `over` could not be timed, which may be the best.
    """
    if any(name in over for name in row.get("failed", {})):
        return None
    for times in (row.get("graph_us") or {}, row.get("us") or {}):
        ours = [times[name] for name in OWN if name in times]
        others = [times[name] for name in over if name in times]
        if ours and others:
            return min(others) / min(ours)
    return None


def _range(ratios: Sequence[float | None]) -> str:
    known = sorted(r for r in ratios if r is not None)
    if not known:
        return "-"
    low, high = f"{known[0]:.2f}", f"{known[-1]:.2f}"
    return low if low == high else f"{low} to {high}"


def anchors(found: Found) -> Iterator[list[str]]:
    rows = rows_of(found, "speed", "speed")
    for anchor in ANCHORS:
        of = [row for row in rows if anchor.rows(row)]
        if not of:
            continue
        passes = [[row for row in of if row.get("pass") == which] for which in ("forward", "backward")]
        goal = [_range([speed(row, anchor.over) for row in some]) for some in passes]
        best = [_range([speed(row, TORCHS) for row in some]) for some in passes]
        yield [anchor.name, anchor.goal, *goal, *best]
    decoded = [row for row in rows if row.get("section") == "decoding" and row.get("tb_per_s")]
    if decoded:
        reached = [[row["tb_per_s"].get(n) for n in names] for names in (OWN, TORCHS) for row in decoded]
        half = len(decoded)
        ours, others = (
            _range([max((x for x in some if x is not None), default=None) for some in part])
            for part in (reached[:half], reached[half:])
        )
        yield ["decoding, 32 heads, 8 of keys, D 128", "-", f"{ours} TB/s", "-", f"{others} TB/s", "-"]


def evidence_of(found: Found) -> Iterator[list[str]]:
    """A row for each case: each kernel's time over that as written, ours beside torch's best, and what is picked; where
    the host's times are known, the kernels that it takes longer to issue than to run."""
    measured, picked = cases_of(found), picks(found)
    for row in measured:
        times, host = row["us"], row.get("host_us", {})
        ratios = (f"{times[name] / times[AS_WRITTEN]:.2f}" if name in times else "-" for name in KERNELS_SHOWN)
        beside = ours_beside_torch(times)
        longer = [
            f"{_named(name)} {host[name]:.0f} for {times[name]:.0f}"
            for name in (AS_WRITTEN, *KERNELS_SHOWN)
            if host.get(name, 0.0) > times.get(name, math.inf)
        ]
        cells = ["-" if beside is None else f"{beside:.2f}", picked.get(row["case"], "-")]
        yield [row["what"], row["case"], *ratios, *cells, *(["; ".join(longer) or "-"] if by_gpu_time(found) else [])]


def cases_of(found: Found) -> list[Row]:
    """The cases that were measured."""
    return [row for row in rows_of(found, "evidence", "evidence") if AS_WRITTEN in row.get("us", {})]


def by_gpu_time(found: Found) -> bool:
    """Whether the evidence has the GPU's own times; older evidence includes the time that it waited for the host."""
    return any(row.get("host_us") for row in cases_of(found))


def picks(found: Found) -> dict[str, str]:
    """What the picker chooses of the evidence, by case."""
    rows = rows_of(found, "evidence", "choices")
    return {row["case"]: _named(row["picked"]) for row in rows if "picked" in row}


def _named(name: str) -> str:
    return "as written" if name == AS_WRITTEN else f"`{name}`"


def ours_beside_torch(times: dict[str, float]) -> float | None:
    """How many times as fast ours is as the fastest of torch's kernels; None where one of them is missing."""
    ours = [times[name] for name in OWN if name in times]
    others = [time for name, time in times.items() if name not in (*OWN, *IN_PLAIN_TORCH)]
    return min(others) / min(ours) if ours and others else None


def verdict(found: Found) -> str:
    """On how many cases ours are faster than torch's kernels, and are picked; which of ours are never the fastest."""
    measured, picked = cases_of(found), picks(found)
    beside = {row["what"]: ratio for row in measured if (ratio := ours_beside_torch(row["us"])) is not None}
    faster = [what for what, ratio in beside.items() if ratio > 1]
    asked = [row for row in measured if row["case"] in picked]
    mine = [row["what"] for row in asked if picked[row["case"]] in map(_named, OWN)]
    ours = " or ".join(f"`{name}`" for name in OWN)
    text = f"{ours} is faster than torch's best kernel on {_counted(faster)} of the {len(beside)} attentions that both "
    of = f"{len(asked)}" if len(asked) == len(measured) else f"the {len(asked)} that the picker was asked about"
    text += f"run, and picked on {_counted(mine)} of {of}."
    fastest = {min(row["us"], key=row["us"].get) for row in measured}
    for name in (*OWN, *IN_PLAIN_TORCH[1:]):
        if any(name in row["us"] for row in measured) and name not in fastest:
            text += f" `{name}` is the fastest on none."
    return text


def _counted(names: Sequence[str]) -> str:
    return str(len(names)) if names else "none"


def clock(found: Found) -> str:
    """What the times of the evidence are."""
    if by_gpu_time(found):
        return "Times are the GPU's own."
    return "The times are of a clock that has been replaced: they include the time that the GPU waited for the host."


def configs_of(found: Found) -> Iterator[list[str]]:
    """The trials of the sweep: the shipped config, the fastest, and its time over the shipped one's."""
    for row in rows_of(found, "sweep", "sweep"):
        if "fastest" in row and "us" in row:
            fastest = "the same" if row["fastest"] == "shipped" else f"`{row['fastest']}`"
            cells = [f"{row['over shipped']:.2f}", f"{row['noise']:.2f}"]
            yield [row["what"], f"`{row['shipped']}`", fastest, *cells]


def looked_into(found: Found) -> Iterator[list[str]]:
    """The kernels under ncu: the time, shares of what the GPU can do, and what a warp waits for most."""
    for row in rows_of(found, "sweep", "ncu"):
        metrics = row.get("metrics", {})
        if not metrics:
            continue
        stalls = {
            name.removeprefix(STALLED).partition("_per_issue")[0].replace("_", " "): value
            for name, value in metrics.items()
            if name.startswith(STALLED)
        }
        most = sorted(stalls, key=lambda name: -stalls[name])[:3]
        shares = [_share(metrics, pattern) for pattern in ("sm__warps_active", "pipe_tensor", "lts__", "dram")]
        waits = ", ".join(f"{name} {stalls[name]:.2f}" for name in most)
        yield [row["what"], f"{row['us']:.0f} µs" if "us" in row else "-", *shares, waits or "-"]


STALLED = "smsp__average_warps_issue_stalled_"


def _share(metrics: dict[str, float], name: str) -> str:
    """The max of the metrics with `name` in theirs that are shares of what can be had."""
    values = [value for metric, value in metrics.items() if name in metric and ".pct_of_peak" in metric]
    return f"{max(values):.0f}%" if values else "-"


def steps(found: Found) -> Iterator[list[str]]:
    """The rows of `bench nanogpt`, each over eager and over Inductor."""
    rows = rows_of(found, "models", "nanogpt")
    seconds = {row["what"]: row["seconds"] for row in rows if "seconds" in row}
    for row in rows[1:]:
        if "seconds" not in row:
            yield [row["what"], str(row["vocabulary"]), row["failed"], "-", "-", "-", "-"]
            continue
        ratios = [f"{row['seconds'] / seconds[base]:.2f}" if base in seconds else "-" for base in (EAGER, INDUCTOR)]
        memory = bytes_in_words(row["peak_bytes"])
        yield [row["what"], str(row["vocabulary"]), seconds_in_words(row["seconds"]), *ratios, memory, row["fused"]]


def table(head: Sequence[str], rows: Iterator[list[str]]) -> str:
    """In Markdown; empty without rows."""
    lines = [*rows]
    if not lines:
        return ""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines))


def origins(found: Found) -> str:
    """The commit and the day of each call."""
    of: dict[str, list[str]] = {}
    for call, content in found.items():
        of.setdefault(origin(content), []).append(f"`{call}`")
    return "; ".join(f"{', '.join(calls)} at {made}" for made, calls in of.items())


def origin(content: dict[str, Any]) -> str:
    """The commit and the day of a result file."""
    commit, day = content.get("commit", ""), content["machine"].get("date", "")
    return f"{commit[:7]}{'+changes' * commit.endswith('+changes')}, {day}"


def block(found: Found) -> str:
    """What stands in benchmarks/README.md about the GPU."""
    machine = next(iter(found.values()))["machine"]
    parts = [
        f"On one {machine['gpu']}, torch {machine['torch']}, bfloat16 but where it says so (`make gpu`; "
        f"[results/](results)), {origins(found)}."
    ]
    for row in rows_of(found, "correct", "ceilings"):
        if "us" in row:
            rate = f"{row['tflops']} TFLOP/s" if "tflops" in row else f"{row['tb_per_s']} TB/s"
            parts[0] += f" A {row['what']}: {rate}."
    for row in rows_of(found, "correct", "correctness"):
        for name, counts in row.get("checked", {}).items():
            asked = counts["right"] + counts["wrong"] + counts["lost"]
            parts[0] += f" `{name}`: {counts['right']} of {asked} rows of the shared grid right against float64."
    parts[0] += "".join(f" {line}" for line in _whole_programs(found))
    parts += [f"{said}\n\n{text}" for said, head, rows in _tables(found) if (text := table(head, rows))]
    return "\n\n".join(parts)


def _tables(found: Found) -> Iterator[tuple[str, Sequence[str], Iterator[list[str]]]]:
    """What stands above each table, its head, and its rows."""
    said = "Our kernels beside torch's, worst to best shape, forward by CUDA graph replays"
    if "clock" not in found.get("speed", {}):
        said += ", backward by the clock before today's, which includes the time that the GPU waited for the host"
    passes = ("forward, of the goal", "backward", "forward, of torch's best", "backward")
    yield f"{said}:", ("times as fast as torch's", "goal", *passes), anchors(found)
    said = "The evidence: each kernel's time over that as written under Inductor, and what the picker chooses."
    said += f" {clock(found)} {verdict(found)}"
    head = ["", "case", *KERNELS_SHOWN, "ours: times as fast as torch's best", "picked"]
    if by_gpu_time(found):
        said += " Last, what takes the host longer to issue than the GPU to run, in µs of each."
        head.append("longer on the host")
    yield said, head, evidence_of(found)
    said = (
        "Each kernel alone in the config that it shipped with, and the fastest of some others; noise: by how much two "
    )
    said += "measurements of the first differ:"
    yield said, ("kernel", "shipped config", "fastest", "/ shipped", "noise"), configs_of(found)
    head = ["kernel", "time", "warps active", "tensor cores", "L2", "memory", "warps that wait, for each that issues"]
    yield "In Nsight Compute, as shares of the max:", head, looked_into(found)
    sizes = next(iter(rows_of(found, "models", "nanogpt")), {})
    said = "GPT-2 small, its attention written out (`python -m attn_fuse.bench nanogpt`), "
    if "batch" in sizes:
        said += f"{sizes['batch']} sequences of {sizes['length']} tokens, autocast to {sizes['dtype']}, with AdamW:"
    head = ["a training step", "vocabulary", "median", "/ eager", "/ Inductor", "peak memory", "fused"]
    yield said, head, steps(found)


def _whole_programs(found: Found) -> Iterator[str]:
    """What came of the rows through the backend, and of the published models."""
    for row in rows_of(found, "correct", "backend"):
        for_kernels = row.get("through the backend", {})
        counts = {name: sum(of[name] for of in for_kernels.values()) for name in ("right", "wrong", "lost", "declined")}
        if for_kernels:
            asked = counts["right"] + counts["wrong"] + counts["lost"]
            yield (
                f"Through the backend, every kernel: {counts['right']} of {asked} rows right, {counts['declined']} "
                "declined."
            )
    for row in rows_of(found, "correct", "published"):
        for order, of in row.get("published", {}).items():
            on = "our own kernels" if order == "triton" else "any kernel"
            if not of["models"]:
                yield f"No tiny model of `transformers` ran on {on}."
                continue
            yield (
                f"Tiny models of `transformers` in float32 on {on}: {of['models']} runs, {of['training']} in training, "
                f"{of['fused']} of {of['sites']} attentions fused, {of['wrong']} wrong."
            )


def write(readme: Path, text: str) -> None:
    """`text` between the page's two comments."""
    whole = readme.read_text()
    if whole.count(BEGIN) != 1 or whole.count(END) != 1:
        raise ResultsError(f"{readme} has not the lines {BEGIN} and {END}, once each")
    before, _, rest = whole.partition(BEGIN)
    _, _, after = rest.partition(END)
    evidence.write_whole(readme, f"{before}{BEGIN}\n{text}\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what gpu.py was given as --results")
    parser.add_argument("--into", type=Path, default=ROOT, help="a checkout, for other than this")
    args = parser.parse_args(arguments)
    try:
        found = results(args.folder)
        for content in found.values():
            path = args.into / "benchmarks" / "results" / content["path"].name
            evidence.write_whole(path, content["path"].read_text())
            print(path)
        for path in ship(args.folder, args.into / "attn_fuse" / "picker"):
            print(path)
        label = content["path"].stem.rpartition(content["call"] + "-")[2]
        write(args.into / RESULTS_PAGE, block(stored(args.into / "benchmarks" / "results", label)))
        print(args.into / RESULTS_PAGE, "(look over what it, README.md and docs/kernels.md say elsewhere of GPUs)")
    except (ResultsError, OSError, ValueError) as problem:
        raise SystemExit(f"gpu_results.py: {problem}") from problem


if __name__ == "__main__":
    main()
