"""How many files of public repositories `python -m attn_fuse.explain FILE` reports on, with no flag but the path.

The list is benchmarks/results/explain_repositories.json: of each file the repository, its commit and what came of it.
A report counts where the model was built and run; those with an attention in it are counted once more, and those of a
part of the model ("of a part only" in it) apart. A failure must be one line, with exit code 2. Each row has the commit
that it was measured at. Repositories are sought in FOLDER as OWNER/NAME, and cloned there with --clone. Nothing of them
is installed: what they need and this environment, which has the packages of the extra `explain`, lacks is among the
failures. Their code runs: use a machine for it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attn_fuse.explain.finding import OF_A_PART
from harness import commit

NOTE = (
    "with the packages of the extra explain: diffusers, einops, einops-exts, hyper-connections, ml-collections, "
    "omegaconf, pytorch-lightning, PyYAML, rotary-embedding-torch, scipy, timm, transformers, x-transformers"
)
LIST = Path(__file__).parent / "results" / "explain_repositories.json"
_FOUND = re.compile(r"\b\d+ attentions?\b")


def in_share(row: dict[str, Any], share: str) -> bool:
    """Whether a row of the list is in a share, as "0/9" names the first of nine, by the hash of its file's name."""
    number, of_all = map(int, share.split("/"))
    name = f"{row['repository']}/{row['path']}"
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % of_all == number


def outcome_of(file: Path, limit: float, start: Sequence[str] = ("-m", "attn_fuse.explain")) -> dict[str, Any]:
    """What explain says of `file` within `limit` seconds: whether it reported, its words, and how long it took.

    start: what Python runs for that.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        command = [sys.executable, *start, str(file)]
        process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True)
        ended = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
        ended.start()
        _, status, usage = os.wait4(process.pid, 0)
        ended.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        ran = subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())
    seconds = round(time.monotonic() - began)
    cpu = round(usage.ru_utime + usage.ru_stime, 1)
    if ran.returncode < 0:
        return {"outcome": "hang", "words": f"no answer in {limit:g} s", "seconds": seconds, "cpu": cpu}
    lines = (ran.stdout if ran.returncode == 0 else ran.stderr).strip().splitlines()
    if ran.returncode == 0:
        summary = next((line for line in reversed(lines) if "attention" in line), "")
        of_part = next((line.strip() for line in lines if line.strip().startswith(OF_A_PART)), None)
        found = {
            "outcome": "part" if of_part else "report",
            "words": f"{lines[0]}: {summary}",
            "seconds": seconds,
            "cpu": cpu,
        }
        return {**found, "why": of_part} if of_part else found
    kind = "refused" if ran.returncode == 2 and "Traceback" not in ran.stderr else "error"
    return {
        "outcome": kind,
        "words": lines[-1].removeprefix("attn_fuse.explain: ") if lines else "",
        "seconds": seconds,
        "cpu": cpu,
    }


def has_attention(row: dict[str, Any]) -> bool:
    """Whether the report of a row, on a model or on a part of it, has an attention."""
    return row["outcome"] in ("report", "part") and bool(_FOUND.search(row["words"]))


def clone(repository: str, version: str, folder: Path) -> None:
    """The repository of GitHub, OWNER/NAME, at a commit, in `folder`. Raises CalledProcessError where git fails."""
    folder.mkdir(parents=True)
    for arguments in (
        ["init", "-q"],
        ["fetch", "-q", "--depth", "1", f"https://github.com/{repository}", version],
        ["checkout", "-q", "FETCH_HEAD"],
    ):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True)


def measured(row: dict[str, Any], folder: Path, limit: float, may_clone: bool) -> dict[str, Any]:
    """The row of a file with what came of it now."""
    checkout = folder / row["repository"]
    if not checkout.is_dir() and may_clone:
        clone(row["repository"], row["commit"], checkout)
    path = checkout / row["path"]
    found = outcome_of(path, limit) if path.is_file() else {"outcome": "absent", "words": "not there", "seconds": 0}
    found["words"] = found["words"].replace(f"{checkout}{os.sep}", "")[:400]
    print(f"{found['outcome']:8} {found['seconds']:4} s  {row['repository']}/{row['path']}", flush=True)
    return {**{name: value for name, value in row.items() if name != "why"}, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the repositories are, or are cloned to")
    parser.add_argument("--clone", action="store_true", help="clone from GitHub what is not there")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each file (600)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (2)")
    parser.add_argument("--only", default="", help="a word of the group, outcome or path of the files to measure (all)")
    parser.add_argument("--share", default="0/1", metavar="N/M", help="of M shares, by hash, the one of number N (0/1)")
    parser.add_argument("--results", type=Path, default=LIST, help="where the outcomes are written")
    arguments = parser.parse_args()
    before = json.loads(LIST.read_text())
    named = Counter(f"{row['repository']}/{row['path']}" for row in before["files"])
    if twice := [name for name, count in named.items() if count > 1]:
        parser.error(f"{LIST.name} names a file more than once: {', '.join(twice)}")
    now = commit()

    def row_of(row: dict[str, Any]) -> dict[str, Any]:
        name = f"{row['repository']}/{row['path']}"
        if not in_share(row, arguments.share) or arguments.only not in f"{row['group']} {row['outcome']} {name}":
            return {"measured": before["commit"], **row}
        found = measured(row, arguments.folder.resolve(), arguments.limit, arguments.clone)
        return {**found, "measured": now}

    with ThreadPoolExecutor(arguments.jobs) as pool:
        files = list(pool.map(row_of, before["files"]))
    counts = Counter(row["outcome"] for row in files)
    commits = sorted({row["measured"] for row in files})
    content = {"commit": now, "commits": commits, "note": NOTE, "counts": counts, "files": files}
    arguments.results.write_text(json.dumps(content, indent=1) + "\n")
    found = sum(map(has_attention, files))
    if times := [row["cpu"] for row in files if row["measured"] == now and "cpu" in row]:
        print(f"{len(times)} measured now: median {statistics.median(times):.1f} s of CPU, at most {max(times):.1f} s")
    print(f"{counts['report']} of {len(files)} give a report; {dict(counts)}; {found} with an attention")


if __name__ == "__main__":
    main()
