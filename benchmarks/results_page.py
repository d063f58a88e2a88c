"""Write the tables of the documents from benchmarks/results: make results

The prose of the pages is written by hand. Each block between `<!-- result: NAME -->` and `<!-- end -->` comes from the
stored results of that name. docs/results.md is for users, and its blocks end with the machine and the day;
benchmarks/README.md has the commits, the samples and, by gpu_results.py, every measurement of the GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# First of all: other packages, too, bring a `tests`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_results
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.picker.timing import Device
from harness import RESULTS, ROOT, bytes_in_words, seconds_in_words

PAGES = (
    *(ROOT / "docs" / f"{name}.md" for name in ("results", "does-it-help", "compare", "bench", "decoding")),
    ROOT / "benchmarks" / "README.md",
    ROOT / "README.md",
)
_BLOCK = re.compile(r"(<!-- result: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# The code that decides what is fused, and on what.
MEASURED = (
    "attention", "backend.py", "emit", "expression", "graph", "guard.py", "kernels", "lift", "patterns", "picker",
    "site.py",
)  # fmt: skip
# What of it no CPU runs: the results of a CPU but those of the host's calls do not measure it.
ON_A_GPU = ("kernels/triton", "picker/evidence_cuda*")
OF_THE_HOST = ("host-cpu",)
# Results on explain's own stages; `info` is a command of its own.
EXPLAIN = {"explain_repositories": ("explain",)}
NO_STAGE = "explain/info.py"
# What explain says of a model that computes with a package that is not there.
LACKS = "is not installed"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its first column to the left."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rows])


def speedup(ratio: float) -> str:
    """How many times as fast it is, from its time over the other's."""
    return f"{1 / ratio:.2f}x"


def stored(name: str) -> dict[str, Any]:
    """The result file of `name`."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


# ---- the blocks


def speed() -> str:
    """blocks.py: whole blocks and attention alone, beside Inductor and the model edited by hand."""
    rows = []
    for name, result in stored("nanogpt-cpu")["results"].items():
        over, peak = result["attn_fuse_over"], result["peak_bytes"]
        memory = ", ".join(bytes_in_words(peak[variant]) for variant in ("inductor", "attn_fuse", "sdpa"))
        rows.append([name, speedup(over["inductor"]), speedup(over["sdpa"]), memory])
    head = ["", "vs Inductor", "vs edited by hand", "peak memory: Inductor, attn_fuse, by hand"]
    return _signed(markdown(head, rows), "nanogpt-cpu")


def features() -> str:
    """features.py: what torch has no fused CPU kernel for, by length, and the same edited by hand to SDPA."""
    rows = stored("features-cpu")["rows"]
    lengths = sorted({row["length"] for row in rows})
    middle, by_hand = lengths[len(lengths) // 2], "by hand to sdpa"
    lines = []
    for program in dict.fromkeys(row["program"] for row in rows):
        of = {row["length"]: row for row in rows if row["program"] == program}
        kernels = dict.fromkeys(of[length]["kernels"]["attn_fuse"] for length in lengths)
        ratios = [speedup(of[length]["over_inductor"]["attn_fuse"]) for length in lengths]
        over, memory = of[middle]["over_inductor"], of[middle]["memory"]
        lines.append([
            program, ", then ".join(f"`{kernel}`" for kernel in kernels), *ratios,
            speedup(over[by_hand]) if by_hand in over else "",
            ", ".join(bytes_in_words(memory[name]) for name in ("inductor", "attn_fuse", by_hand) if name in memory),
        ])  # fmt: skip
    head = [
        "", "kernel", *(f"T = {length}" for length in lengths), f"by hand, T = {middle}",
        f"memory at T = {middle}: Inductor, attn_fuse, by hand",
    ]  # fmt: skip
    return _signed(markdown(head, lines), "features-cpu")


def busy() -> str:
    """busy.py: training beside processes that keep the cores busy, relative to Inductor beside the same processes."""
    rows = stored("busy-cpu")["rows"]
    loads = sorted({row["beside"] for row in rows})
    lines = []
    for program in dict.fromkeys(row["program"] for row in rows):
        of = {row["beside"]: row for row in rows if row["program"] == program}
        lines.append([program, f"`{of[loads[0]]['kernel']}`", *(speedup(1 / of[load]["gain"]) for load in loads)])
    head = ["", "kernel", "alone", *(f"beside {load}" for load in loads[1:])]
    length = rows[0]["length"]
    return _signed(f"At {length} tokens:\n\n{markdown(head, lines)}", "busy-cpu")


def choices() -> str:
    """left_out.py and regret.py: what the picker's choices cost over the best there is."""
    out, regret = stored("left-out-cpu"), stored("regret-cpu")
    summary = regret["summary"]
    text = (
        f"On {len(regret['sites'])} attentions of sizes that were never measured before, the picker's choice takes "
        f"{summary['median']:.3f} times\nas long as the best kernel in the median and {summary['worst']:.2f} times at "
        f"worst (`make regret`). With each of the {out['rows']} measured\nattentions left out of the evidence in turn, "
        f"its choice takes {out['mean']:.3f} times as long as the best on average, and more\nthan 1.1 times on "
        f"{out['beyond']['1.1']} of them (`benchmarks/left_out.py`)."
    )
    return _signed(text, "left-out-cpu", "regret-cpu")


def calls() -> str:
    """guard.py and host.py: what a call costs before anything is computed."""
    guard, host = stored("guard-cpu"), stored("host-cpu")["seconds"]
    said = ", ".join(f"{seconds_in_words(time['median'])} ({name})" for name, time in host.items())
    text = (
        f"Checking {guard['buffers']} mask buffers takes {seconds_in_words(guard['seconds']['median'])} a call. "
        f"Launching our Triton kernels takes the host\n{said}."
    )
    return _signed(text, "guard-cpu", "host-cpu")


def compiling() -> str:
    """compile_time.py: what our stages add to compiling."""
    rows = []
    for name, runs in stored("compile_time-stages-cpu")["runs"].items():
        median = sorted(runs, key=lambda run: run["stages_s"])[len(runs) // 2]
        rows.append(
            [name, str(median["nodes"]), f"{median['fused']} of {median['sites']}", f"{median['stages_s']:.2f} s"]
        )
    return _signed(markdown(["program", "operations", "fused", "our stages"], rows), "compile_time-stages-cpu")


def crossings() -> str:
    """crossings.py: from how many tokens on an attention is faster fused, and what the report says of that."""
    found = stored("crossings-cpu")
    sites, noise = found["sites"], found["noise"]
    lengths = [sorted(site["span"][1] for site in sites if site["training"] is mode) for mode in (False, True)]
    (first, last), (first_trained, last_trained) = ((of[0], of[-1]) for of in lengths)
    there = sorted(site["ratios"][str(site["promised"])] for site in sites)
    return (
        f"Ten attentions of 4 to 8 heads were faster on a fused kernel by {noise:.0%} or more from {first} to "
        f"{last} tokens on in\ninference, and from {first_trained} to {last_trained} in training. The length that the "
        f"report names was within a factor of {found['goal']} of the\nmeasured one for {found['within']} of them, and "
        f"there a kernel took {there[0]:.2f} to {there[-1]:.2f} of the time as written (crossings-cpu.json)."
    )


def recall() -> str:
    """recall.py: how many programs of the spellings are wholly fused."""
    spellings = stored("recall-cpu")["spellings"]
    rows = []
    for mode in dict.fromkeys(row["mode"] for row in spellings):
        of = [row for row in spellings if row["mode"] == mode and row["sites"]]
        ours = sum(row["fused"]["fused"] >= row["sites"] for row in of)
        rows.append([mode, f"{ours} of {len(of)}", str(sum(row["inductor"]["fused"] >= row["sites"] for row in of))])
    return _signed(markdown(["", 'attn_fuse, `pick="fused"`', "Inductor's own patterns"], rows), "recall-cpu")


def inductors_patterns() -> str:
    """recall.py and lookalikes.py: what Inductor's own patterns find, and what they rewrite wrongly."""
    spellings, rows = stored("recall-cpu")["spellings"], stored("lookalikes-cpu")["rows"]
    found, wrong = [], []
    for mode in ("inference", "training"):
        of = [row for row in spellings if row["mode"] == mode and row["sites"]]
        found.append(f"{sum(row['inductor']['fused'] >= row['sites'] for row in of)} of {len(of)} in {mode}")
        wrong.append(f"{sum(row['inductor_wrong'] for row in rows if row['mode'] == mode)} in {mode}")
    text = (
        f"They fuse {' and '.join(found)} of our spellings of attention. Of {len(rows) // 2} look-alikes, programs one "
        f"step from\nan attention, they compute {' and '.join(wrong)} wrongly, and attn_fuse computes "
        f"{sum(row['wrong'] for row in rows) or 'none'} wrongly."
    )
    return _signed(text, "recall-cpu", "lookalikes-cpu")


def published() -> str:
    """published.py: sites of published models."""
    from published import HEAD, lines

    return _signed(markdown(HEAD, list(lines(_entries()))), "published-cpu")


def _entries() -> list[Any]:
    from published import Entry
    from zoo.measure import Row

    return [Entry(Row(**row), "", "") for row in stored("published-cpu")["rows"]]


def repositories() -> str:
    """Sites of models that explain opens in public repositories."""
    content = stored("repositories-cpu")
    head = ["", "models", "sites", "fused", "wrong", "too long or died"]
    rows = [
        [mode, *(str(part[key]) for key in ("models", "sites", "fused", "wrong", "failed"))]
        for mode, part in content["total"].items()
    ]
    files = len({row["case"] for row in content["rows"]})
    table = f"{files} files were measured, not all that give a report.\n\n{markdown(head, rows)}"
    return _signed(table, "repositories-cpu")


def recognised() -> str:
    """The README's sentence on published models."""
    from published import lines

    *_, (_, models, inference, training, wrong, _) = lines(_entries())
    shares = [text.partition("(")[2].rstrip(")") for text in (inference, training)]
    return (
        f"In {models} unmodified published models (transformers, timm, diffusers, x-transformers and 20 more packages),"
        f"\nattn_fuse fuses {shares[0]} of the attentions in inference and {shares[1]} in training, {wrong} wrongly."
    )


def on_a_gpu() -> str:
    """gpu_results.py: our kernels beside torch's, on each GPU whose evidence is stored."""
    said = []
    for path in sorted(RESULTS.glob("gpu-4-evidence-*.json")):
        found = gpu_results.stored(RESULTS, path.stem.removeprefix("gpu-4-evidence-"))
        gpu, verdict = found["evidence"]["machine"]["gpu"], gpu_results.verdict(found)
        said.append(f"On an {gpu} {verdict} {gpu_results.clock(found)}")
    return "\n".join(textwrap.wrap(" ".join(said), 120, break_long_words=False, break_on_hyphens=False))


def gpu_gains() -> str:
    """gpu_results.py: the kernel that the picker chose on a GPU, beside the program as written and torch's kernels."""
    rows = []
    found = gpu_results.stored(RESULTS, "h200")
    picked = gpu_results.picks(found)
    for row in gpu_results.cases_of(found):
        name = picked.get(row["case"], "").strip("`")
        if name in row["us"]:
            beside = gpu_results.ours_beside_torch(row["us"])
            over = speedup(row["us"][name] / row["us"][AS_WRITTEN])
            rows.append([row["what"], f"`{name}`", over, "no kernel of torch" if beside is None else f"{beside:.2f}x"])
        elif name:
            rows.append([row["what"], name, "1.00x", ""])
    return _signed(markdown(["", "picked", "vs Inductor", "vs torch's best kernel"], rows), "gpu-4-evidence-h200")


def gpu_steps() -> str:
    """gpu_results.py: the training step of GPT-2 small."""
    rows, steps = [], _gpu_steps()
    for name, row in steps.items():
        over = row["seconds"] / steps["Inductor"]["seconds"]
        rows.append([name, seconds_in_words(row["seconds"]), speedup(over), bytes_in_words(row["peak_bytes"])])
    return _signed(markdown(["", "a step", "vs Inductor", "peak memory"], rows), "gpu-5-models-h200")


def _gpu_steps() -> dict[str, dict[str, Any]]:
    rows = gpu_results.rows_of(gpu_results.stored(RESULTS, "h200"), "models", "nanogpt")
    return {row["what"]: row for row in rows if "seconds" in row}


def opened_in_short() -> str:
    """explain_repositories.py: on how many files explain reported that nobody had looked at before."""
    unseen = [row for row in stored("explain_repositories")["files"] if "new" in row]
    counts = Counter(row["new"] for row in unseen)
    return (
        f"When nobody had looked at a file before, explain reported on the whole model for {counts['report']} of "
        f"{len(unseen)}, and on a part for\n{counts['part']} more."
    )


def tools_in_short() -> str:
    """ecosystem.py: how many of the tests pass that run other projects' tools."""
    outcomes = [*stored("ecosystem-cpu")["tests"].values()]
    return _signed(f"{outcomes.count('passed')} of {len(outcomes)} tests pass.", "ecosystem-cpu")


def repositories_in_short() -> str:
    """Sites of models that explain opens in public repositories."""
    part = stored("repositories-cpu")["total"]
    said = [f"{part[mode]['fused']} of {part[mode]['sites']} in {mode}" for mode in ("inference", "training")]
    return f"Of the attentions in models of public repositories, opened by explain, {' and '.join(said)} are fused."


def gains() -> str:
    """What a few programs gain, in words."""
    blocks, rows = stored("nanogpt-cpu")["results"], []
    for name, result in blocks.items():
        if "blocks" in name:
            over, peak = result["attn_fuse_over"], result["peak_bytes"]
            rows.append(_gain(name, over["inductor"], peak["inductor"], peak["attn_fuse"], "nanogpt-cpu"))
    for row in stored("features-cpu")["rows"]:
        if (row["program"], row["length"]) in GAINS:
            name, memory = f"{row['program']}, 8 heads of 64, {row['length']} tokens", row["memory"]
            over = row["over_inductor"]["attn_fuse"]
            rows.append(_gain(name, over, memory["inductor"], memory["attn_fuse"], "features-cpu"))
    inductor, ours = (_gpu_steps()[way] for way in ("Inductor", "attn_fuse, its own choice"))
    name = "GPT-2 small, a training step of 12 x 1024 tokens, bfloat16, on an H200"
    over = ours["seconds"] / inductor["seconds"]
    rows.append(_gain(name, over, inductor["peak_bytes"], ours["peak_bytes"], "gpu-5-models-h200"))
    return markdown(["", "as fast as under Inductor", "peak memory", "stored in"], rows).replace("--:", "---")


def _gain(name: str, over: float, before: float, after: float, source: str) -> list[str]:
    memory = f"{bytes_in_words(after)} instead of {bytes_in_words(before)}"
    return [name, f"{1 / over:.1f} times", memory, f"{source}.json"]


def origins() -> str:
    """Where each result comes from."""
    rows = [[f"[{path.stem}](results/{path.name})", *_origin(path.stem)] for path in sorted(RESULTS.glob("*.json"))]
    return markdown(["", "day", "machine", "commits"], rows).replace("--:", "---")


def opened() -> str:
    """explain_repositories.py: on how many files of public repositories explain reports, with nothing but the path."""
    from explain_repositories import has_attention

    content = stored("explain_repositories")
    rows = []
    groups = [*dict.fromkeys(row["group"] for row in content["files"]), "all"]
    for group in groups:
        of = [row for row in content["files"] if group in ("all", row["group"])]
        is_told = all("new" in row for row in of)
        cells = []
        for key in ("new", "outcome"):
            counts = Counter(row.get(key) for row in of)
            cells += [str(counts["report"]), str(counts["part"])] if key == "outcome" or is_told else ["", ""]
        lacks = sum(row["outcome"] != "report" and LACKS in row.get("why", "") + row["words"] for row in of)
        rows.append([group, str(len(of)), *cells, str(sum(map(has_attention, of))), str(lacks)])
    heads = [
        "sample", "files", "a report, when it was new", "of a part", "a report, now", "of a part", "with an attention",
        "not one for want of a package",
    ]  # fmt: skip
    return _signed(markdown(heads, rows), "explain_repositories")


def walked() -> str:
    """walk.py: what a new user's first commands take."""
    rows = []
    for step in stored("walk-cpu")["steps"]:
        said = step["said"] if len(step["said"]) < 120 else f"{step['said'][:117]}..."
        rows.append([f"`{step['command']}`", f"{step['seconds']:.1f} s", said if step["status"] == 0 else "failed"])
    text = markdown(["", "", "its last line"], rows).replace("| --- | --: | --: |", "| --- | --: | --- |")
    return _signed(text, "walk-cpu")


def cold_threads() -> str:
    """cold_threads.py: what each thread adds that calls a model for the first time beside others."""
    content = stored("cold-threads-cpu")
    first, added, sizes = content["first_seconds"], content["added_by_a_thread"], content["sizes"]
    said = " and ".join(f"{added[name]:.0%} of {first[name]:.0f} s under {name}" for name in first)
    text = (
        f"{sizes['threads']} threads make the first call of a model at once ({sizes['layers']} layers of GPT-2's size, "
        f"{sizes['length']} tokens). Each thread after\nthe first adds {said}."
    )
    return _signed(text, "cold-threads-cpu")


def tools() -> str:
    """ecosystem.py: the tests that run other projects' tools."""
    content = stored("ecosystem-cpu")
    files: dict[str, list[str]] = {}
    for name, outcome in content["tests"].items():
        files.setdefault(name.partition(".py")[0].removeprefix("test_"), []).append(outcome)
    rows = [[name, f"{of.count('passed')} of {len(of)}"] for name, of in sorted(files.items())]
    versions = ", ".join(f"{tool} {version}" for tool, version in content["versions"].items())
    return _signed(f"{markdown(['tests of', 'passed'], rows)}\n\n{versions}.", "ecosystem-cpu")


def generated() -> str:
    """generate.py: tokens a second."""
    content = stored("generate-cpu")
    rows = []
    for name, way in content["ways"].items():
        prompt = seconds_in_words(way["prompt_seconds"]["median"])
        rows.append([name, f"{way['tokens_per_second']:.0f}", f"{way['decoded_per_second']:.0f}", prompt])
    sizes = ", ".join(f"{name} {size}" for name, size in content["sizes"].items())
    table = markdown(["", "tokens a second", "after the prompt", "the prompt"], rows)
    return _signed(f"{table}\n\n{sizes}.", "generate-cpu")


def headline() -> str:
    """The few figures of the README."""
    results, rows = stored("nanogpt-cpu")["results"], []
    for name, result in results.items():
        if "tokens" in name and ("2048" in name or ("training" in name and "blocks" in name)):
            peak = result["peak_bytes"]
            memory = f"{bytes_in_words(peak['inductor'])}, {bytes_in_words(peak['attn_fuse'])}"
            rows.append([name, speedup(result["attn_fuse_over"]["inductor"]), memory])
    for row in stored("features-cpu")["rows"]:
        if (row["program"], row["length"]) in HEADLINES:
            memory = f"{bytes_in_words(row['memory']['inductor'])}, {bytes_in_words(row['memory']['attn_fuse'])}"
            name = f"{row['program']}, 8 heads of 64, {row['length']} tokens"
            rows.append([name, speedup(row["over_inductor"]["attn_fuse"]), memory])
    return markdown(["", "vs Inductor", "peak memory: Inductor, attn_fuse"], rows)


def _printed(command: str) -> Callable[[], str]:
    """A block: what a command of `attn_fuse.bench` printed, as bench_outputs.py stores it."""

    def printed() -> str:
        name = f"bench-{command}-cpu"
        return _signed(f"```\n{stored(name)['printed'].strip()}\n```", name)

    return printed


HEADLINES = (("causal and padding, training", 2048), ("window 256, inference", 4096))
GAINS = (*HEADLINES, ("T5 bias with gradient, training", 2048), ("causal, dropout 0.1, training", 2048))
BLOCKS: Mapping[str, Callable[[], str]] = {
    **{
        block.__name__: block
        for block in (
            speed, features, choices, calls, compiling, recall, published, repositories, headline, recognised,
            on_a_gpu, opened, walked, busy, cold_threads, tools, generated, crossings, gpu_gains, gpu_steps,
            inductors_patterns, opened_in_short, tools_in_short, repositories_in_short, gains, origins,
        )
    },
    **{f"bench_{command}": _printed(command) for command in ("model", "sweep", "nanogpt")},
}  # fmt: skip


def _signed(text: str, *names: str) -> str:
    lines = [" · ".join(part for part in (*_origin(name)[1::-1], f"{name}.json") if part) for name in names]
    return f"{text}\n\n<sub>{'<br>'.join(lines)}</sub>"


def _origin(name: str) -> tuple[str, str, str]:
    """The day, the machine and the commits of a result."""
    content = stored(name)
    head = content.get("machine") or {}
    if not isinstance(head, dict):
        return content.get("day", ""), head, content.get("commit", "")[:7]
    commits = content.get("commits") or [head.get("commit") or content.get("commit") or content.get("measured", "")]
    rows = content["rows"] if isinstance(content.get("rows"), list) else []
    commits = dict.fromkeys([*commits, *(row["machine"]["commit"] for row in rows if "machine" in row)])
    said = ", ".join(c[:7] + ("+changes" if c.endswith("+changes") else "") for c in commits if c)
    machine = ""
    if head:
        name = head.get("gpu") or str(Device("cpu", head["cpu"], head["threads"]))
        machine = f"{name}, torch {head['torch']}"
    return head.get("date", ""), machine, said


def filled(text: str) -> str:
    """A page with its blocks written anew. Raises KeyError for a block of an unknown name."""
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found['name']]()}\n{found[3]}", text)


def outdated() -> Iterator[str]:
    """A line for each result whose commit is older than a change of the code that it measures."""
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        head = content.get("machine")
        commit = (head if isinstance(head, dict) else content).get("commit", "")
        if not commit:
            continue
        paths = [f"attn_fuse/{part}" for part in EXPLAIN.get(path.stem, MEASURED)]
        paths.append(f":(exclude)attn_fuse/{NO_STAGE}")
        if path.stem.endswith("-cpu") and path.stem not in OF_THE_HOST:
            paths += [f":(exclude,glob)attn_fuse/{part}" for part in (*ON_A_GPU, *(f"{p}/**" for p in ON_A_GPU))]
        # What was taken back since is no change.
        same = ["git", "diff", "--quiet", commit.partition("+")[0], "HEAD", "--", *paths]
        if subprocess.run(same, cwd=ROOT, capture_output=True).returncode == 0:
            continue
        command = ["git", "log", "--oneline", f"{commit.partition('+')[0]}..HEAD", "--", *paths]
        since = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if since.returncode or since.stdout:
            count = f"{len(since.stdout.splitlines())} changes" if not since.returncode else "an unknown commit"
            yield f"{path.name}: measured at {commit[:7]}, {count} of the code since"


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))
        print(page.relative_to(ROOT))
    for line in outdated():
        print(line)


if __name__ == "__main__":
    main()
