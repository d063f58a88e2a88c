"""The import arrow: each stage imports what stands below it, patterns and kernels never meet, and no cycle hides."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "attn_fuse"
# From the bottom up: a module imports from its own folder and from what stands before it. The last are entry points.
ORDER = (
    "files", "torch_internals", "errors", "report", "expression", "attention", "graph", "lift", "patterns", "emit",
    "kernels", "options", "picker", "repro", "guard", "analysis", "site", "advice", "backend", "doors", "explain",
    "run", "bench", "__init__", "__main__",
)  # fmt: skip
ORDER_IN_EXPLAIN = (
    "names", "inputs", "steps", "page", "torchs_own", "watched", "opening.roots", "problems", "opening", "sandbox",
    "asked", "search", "arguments", "building", "choose", "feeding", "explanation", "__init__", "finding", "info",
    "subject", "command", "__main__",
)  # fmt: skip
MODULES = sorted(ROOT.rglob("*.py"))
MOST_FILES_AT_THE_ROOT = 10
KERNELS, PATTERNS = "kernels", "patterns"


def imported(file: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, the module's path below attn_fuse) of every import of our own, wherever in the file it stands."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == ROOT.name:
            folder = node.module.split(".")[1:]
            for alias in node.names:
                there = ROOT.joinpath(*folder, alias.name)
                is_module = there.with_suffix(".py").exists() or there.is_dir()
                yield node.lineno, (*folder, alias.name) if is_module else tuple(folder)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, tuple(a.name.split(".")[1:])) for a in node.names if a.name.startswith(ROOT.name))


def stage(path: tuple[str, ...]) -> str:
    return path[0].removesuffix(".py") if path else "__init__"


@pytest.mark.parametrize("file", MODULES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_point_down(file: Path) -> None:
    own = stage(file.relative_to(ROOT).parts)
    upward = [
        f"line {line}: {'.'.join(path)}" for line, path in imported(file) if ORDER.index(stage(path)) > ORDER.index(own)
    ]
    assert not upward


EXPLAIN = ROOT / "explain"


def stage_in_explain(path: tuple[str, ...]) -> str:
    dotted = ".".join(path).removesuffix(".py")
    return dotted if dotted in ORDER_IN_EXPLAIN else stage(path)


@pytest.mark.parametrize("file", sorted(EXPLAIN.rglob("*.py")), ids=lambda f: str(f.relative_to(EXPLAIN)))
def test_imports_within_explain_point_down(file: Path) -> None:
    own = stage_in_explain(file.relative_to(EXPLAIN).parts)
    below = [(line, stage_in_explain(path[1:])) for line, path in imported(file) if path[:1] == (EXPLAIN.name,)]
    upward = [
        f"line {line}: {other}" for line, other in below if ORDER_IN_EXPLAIN.index(other) > ORDER_IN_EXPLAIN.index(own)
    ]
    assert not upward


def test_patterns_and_kernels_never_meet() -> None:
    for file in (f for f in MODULES if stage(f.relative_to(ROOT).parts) in (PATTERNS, KERNELS)):
        met = {stage(path) for _, path in imported(file)} & {PATTERNS, KERNELS}
        assert met <= {stage(file.relative_to(ROOT).parts)}, file


def test_no_cycle() -> None:
    edges: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for file in MODULES:
        own = file.relative_to(ROOT).with_suffix("").parts
        own = own[:-1] if own[-1] == "__init__" else own
        # An import in a function counts, since it hides a cycle; one for type checkers alone does not.
        top = ast.parse(file.read_text())
        for node in ast.walk(top):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = [ast.Pass()]
        lines = {n.lineno for n in ast.walk(top) if isinstance(n, (ast.Import, ast.ImportFrom))}
        edges[own] = {path for line, path in imported(file) if line in lines and path != own}
    done: set[tuple[str, ...]] = set()

    def visit(module: tuple[str, ...], above: tuple[tuple[str, ...], ...]) -> None:
        assert module not in above, " -> ".join(".".join(m) for m in (*above, module))
        if module not in done:
            for other in sorted(edges.get(module, ())):
                visit(other, (*above, module))
            done.add(module)

    for module in sorted(edges):
        visit(module, ())


def test_few_files_stand_at_the_root() -> None:
    assert len([*ROOT.glob("*.py")]) <= MOST_FILES_AT_THE_ROOT
    assert {stage(f.relative_to(ROOT).parts) for f in MODULES} == set(ORDER)
    assert {stage_in_explain(f.relative_to(EXPLAIN).parts) for f in EXPLAIN.rglob("*.py")} == set(ORDER_IN_EXPLAIN)
