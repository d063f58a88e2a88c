"""What benchmarks/gpu.py brought back, into the package and docs/results.md: evidence that ships, and tables.

    PYTHONPATH=. python benchmarks/gpu_results.py DIRECTORY

The evidence goes to attn_fuse/picker/evidence_cuda_DEVICE.json, where rows of cases that were measured again replace
those of the same torch; the result files to benchmarks/results; the tables between the two gpu comments of
docs/results.md. It may be run again.
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
RESULTS_PAGE = "docs/results.md"
BEGIN, END = "<!-- gpu: benchmarks/gpu_results.py writes this -->", "<!-- gpu: end -->"
TORCHS = ("cudnn", "flash", "efficient", "flex", "sdpa")
OWN = ("triton_flash",)
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


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """The result files in `folder`, by call. Raises ResultsError for none, or those of a dry run."""
    found = {}
    for path in sorted(folder.glob("gpu-[1-5]-*.json")):
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


def rows_of(found: dict[str, dict[str, Any]], call: str, section: str) -> list[Row]:
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


def anchors(found: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
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


def picks(found: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    measured = {row["case"]: row for row in rows_of(found, "evidence", "evidence") if "us" in row}
    for row in rows_of(found, "evidence", "choices"):
        times = measured.get(row.get("case"), {}).get("us")
        if times is None or "over the best" not in row:
            continue
        others = [time for name, time in times.items() if name not in (*OWN, AS_WRITTEN, "chunked")]
        over = f"{min(others) / times[row['picked']]:.2f}" if others else "-"
        name = "as written" if row["picked"] == AS_WRITTEN else f"`{row['picked']}`"
        yield [row["what"], row["case"], name, f"{row['over as written']:.2f}", over]


def evidence_of(found: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    """A row for each case; where the host's times are known, the kernels that it takes longer to issue than to run."""
    measured = [row for row in rows_of(found, "evidence", "evidence") if AS_WRITTEN in row.get("us", {})]
    known = any(row.get("host_us") for row in measured)
    for row in measured:
        times, host = row["us"], row.get("host_us", {})
        ratios = (f"{times[name] / times[AS_WRITTEN]:.2f}" if name in times else "-" for name in KERNELS_SHOWN)
        longer = [
            f"{'as written' if name == AS_WRITTEN else f'`{name}`'} {host[name]:.0f} for {times[name]:.0f}"
            for name in (AS_WRITTEN, *KERNELS_SHOWN)
            if host.get(name, 0.0) > times.get(name, math.inf)
        ]
        yield [row["what"], row["case"], *ratios, *(["; ".join(longer) or "-"] if known else [])]


def steps(found: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
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


def block(found: dict[str, dict[str, Any]]) -> str:
    """What stands in docs/results.md about the GPU."""
    machine = next(iter(found.values()))["machine"]
    parts = [
        f"On one {machine['gpu']}, torch {machine['torch']}, bfloat16 but where it says so (`make gpu`; "
        f"[benchmarks/results/](../benchmarks/results))."
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
    ratios = table(
        [
            "times as fast as torch's",
            "goal",
            "forward, of the goal",
            "backward",
            "forward, of torch's best",
            "backward",
        ],
        anchors(found),
    )
    if ratios:
        parts.append("Our kernels beside torch's, worst to best shape, forward by CUDA graph replays:\n\n" + ratios)
    rows = [*evidence_of(found)]
    by_gpu_time = bool(rows) and len(rows[0]) > 2 + len(KERNELS_SHOWN)
    said = "The evidence: the time of each kernel over that as written under Inductor"
    if by_gpu_time:
        said += ", by GPU time; last, what takes the host longer to issue than the GPU to run, in µs of each"
    measured = table(["", "case", *KERNELS_SHOWN, *(["longer on the host"] if by_gpu_time else [])], iter(rows))
    if measured:
        parts.append(f"{said}:\n\n{measured}")
    chosen = table(["", "case", "picked", "/ as written under Inductor", "times as fast as torch's best"], picks(found))
    if chosen:
        parts.append("What the picker chooses by this evidence; / is its time over that of the other:\n\n" + chosen)
    head = ["a training step", "vocabulary", "median", "/ eager", "/ Inductor", "peak memory", "fused"]
    trained = table(head, steps(found))
    if trained:
        sizes = rows_of(found, "models", "nanogpt")[0]
        said = f"{sizes['batch']} sequences of {sizes['length']} tokens, autocast to {sizes['dtype']}, with AdamW"
        parts.append(
            f"GPT-2 small, its attention written out (`python -m attn_fuse.bench nanogpt`), {said}:\n\n{trained}"
        )
    return "\n\n".join(parts)


def _whole_programs(found: dict[str, dict[str, Any]]) -> Iterator[str]:
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
        # The tables are of all calls of this device, also of those made before.
        label = content["path"].stem.rpartition(content["call"] + "-")[2]
        stored = args.into / "benchmarks" / "results"
        same = {json.loads(p.read_text())["call"]: p for p in sorted(stored.glob(f"gpu-[1-5]-*-{label}.json"))}
        write(args.into / RESULTS_PAGE, block({call: json.loads(path.read_text()) for call, path in same.items()}))
        print(args.into / RESULTS_PAGE, "(look over what it says elsewhere of GPUs)")
    except (ResultsError, OSError, ValueError) as problem:
        raise SystemExit(f"gpu_results.py: {problem}") from problem


if __name__ == "__main__":
    main()
