"""What each rule of explain carries: of how many reports on files of public repositories it is needed.

A rule is a function of attn_fuse/explain. A first run of each file records which of them take part in its report. Then
each that may be switched off, since it may find nothing anyway, is switched off for the files whose report it took part
in, up to --most of them: what is no report any more, or one of a part where it was one of the whole, is carried by it.
The results name every rule, with the number of reports that it took part in
and how many of those tried it carries.

Repositories are sought in FOLDER as OWNER/NAME; see explain_repositories.py. Needs `coverage`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import coverage

from explain_repositories import LIST, in_share, outcome_of
from harness import commit

PACKAGE = Path(__file__).parents[1] / "attn_fuse" / "explain"
RESULTS = Path(__file__).parent / "results" / "explain_ledger-cpu.json"
# What a function gives that finds nothing, by what its annotation begins or ends with.
_NOTHING = {
    "Iterator": "iter(())",
    "None": "None",
    "bool": "False",
    "list": "[]",
    "dict": "{}",
    "set": "set()",
    "tuple": "()",
    "Counter": "__import__('collections').Counter()",
}
_RANK = {"report": 2, "part": 1}


def rules() -> Iterator[tuple[str, range, str | None]]:
    """The functions of explain: module and name, lines, and what one gives that finds nothing; None if always some."""
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        module = ".".join(file.relative_to(PACKAGE.parents[1]).with_suffix("").parts)
        for owner in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
            for node in owner.body:
                if isinstance(node, ast.FunctionDef):
                    within = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
                    annotation = "" if node.returns is None else ast.unparse(node.returns)
                    decorated = {ast.unparse(one) for one in node.decorator_list}
                    head, tail = annotation.partition("[")[0], annotation.rpartition(" | ")[2]
                    nothing = _NOTHING.get(head) or _NOTHING.get(tail) if annotation != "None" else None
                    nothing = None if "contextlib.contextmanager" in decorated or "property" in decorated else nothing
                    yield f"{module}:{within}{node.name}", range(node.lineno, (node.end_lineno or 0) + 1), nothing


_SWITCH = """
import importlib, os, sys
rule, nothing = {rule!r}, {nothing!r}
module, _, name = rule.partition(":")
owner = importlib.import_module(module)
*path, last = name.split(".")
for one in path:
    owner = getattr(owner, one)
old = getattr(owner, last)
new = eval("lambda *args, **kwargs: " + nothing)
for other in list(sys.modules.values()):
    if getattr(other, "__name__", "").startswith("attn_fuse.explain"):
        for key, value in list(vars(other).items()):
            if value is old:
                setattr(other, key, new)
setattr(owner, last, new)
sys.argv = ["attn_fuse.explain", sys.argv[1]]
from attn_fuse.explain.watched import watch
watch("attn_fuse.explain")
from attn_fuse.explain.command import main
sys.exit(main())
"""


def taken_part(file: Path, limit: float) -> tuple[dict[str, Any], set[str]]:
    """What explain says of a file, and the rules that took part in that."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        start = ["-m", "coverage", "run", f"--source={PACKAGE}", f"--data-file={data}", "-m", "attn_fuse.explain"]
        found = outcome_of(file, limit, start)
        lines: dict[str, set[int]] = {}
        if data.exists():
            recorded = coverage.CoverageData(str(data))
            recorded.read()
            lines = {name: set(recorded.lines(name) or ()) for name in recorded.measured_files()}
    part = set()
    for rule, where, _ in rules():
        path = str(PACKAGE.parents[1].joinpath(*rule.partition(":")[0].split(".")).with_suffix(".py"))
        if lines.get(path, set()) & set(where[1:]):
            part.add(rule)
    return found, part


def without(rule: str, nothing: str, file: Path, limit: float) -> dict[str, Any]:
    """What explain says of a file where a rule is switched off."""
    return outcome_of(file, limit, ["-c", _SWITCH.format(rule=rule, nothing=nothing)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the repositories are")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each file (300)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (2)")
    parser.add_argument("--share", default="0/9", metavar="N/M", help="of M shares, by hash, the one of number N (0/9)")
    parser.add_argument("--most", type=int, default=6, help="files for which each rule is switched off (6)")
    parser.add_argument(
        "--only", default="", help="switch off those rules alone whose name this pattern stands in (all)"
    )
    parser.add_argument("--first", type=Path, help="what the first runs gave, kept there, and taken from there")
    arguments = parser.parse_args()
    files = [row for row in json.loads(LIST.read_text())["files"] if in_share(row, arguments.share)]
    files = [f for f in files if (arguments.folder / f["repository"] / f["path"]).is_file()]
    paths = {f"{f['repository']}/{f['path']}": arguments.folder.resolve() / f["repository"] / f["path"] for f in files}
    first: dict[str, Any] = {}
    if arguments.first is not None and arguments.first.exists():
        first = json.loads(arguments.first.read_text())

    def run(name: str) -> None:
        if name not in first:
            found, part = taken_part(paths[name], arguments.limit)
            first[name] = {**found, "rules": sorted(part)}
            print(f"{found['outcome']:8} {found['cpu']:6} {name}", flush=True)
            if arguments.first is not None:
                arguments.first.write_text(json.dumps(first, indent=1))

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run, paths))
    reports: dict[str, list[str]] = defaultdict(list)
    for name, found in first.items():
        for rule in found["rules"] if found["outcome"] in _RANK else ():
            reports[rule].append(name)
    ledger = [
        {"rule": rule, "lines": len(where), "reports": len(reports[rule]), "switchable": nothing is not None}
        for rule, where, nothing in rules()
    ]

    def wanted(row: dict[str, Any]) -> bool:
        return bool(arguments.most and row["switchable"] and row["reports"] and re.search(arguments.only, row["rule"]))

    def switched(row: dict[str, Any]) -> None:
        nothing = next(n for rule, _, n in rules() if rule == row["rule"])
        row["tried"] = row["carried"] = 0
        for name in sorted(reports[row["rule"]])[: arguments.most]:
            now = without(row["rule"], nothing, paths[name], arguments.limit)
            row["tried"] += 1
            row["carried"] += _RANK.get(now["outcome"], 0) < _RANK[first[name]["outcome"]]
        print(f"{row['rule']}: carries {row['carried']} of {row['tried']}", flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(switched, filter(wanted, ledger)))
    found = {key: sum(one["outcome"] == key for one in first.values()) for key in ("report", "part", "refused", "hang")}
    short = [{**row, "rule": str(row["rule"]).removeprefix("attn_fuse.explain.")} for row in ledger]
    lines = ",\n".join(map(json.dumps, short))
    head = json.dumps({"commit": commit(), "share": arguments.share, "outcomes": found})
    RESULTS.write_text(f'{head[:-1]}, "rules": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
