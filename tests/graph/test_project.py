"""What CI runs, what pyproject.toml supports and what the README promises agree; a release has its notes."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import versions  # noqa: E402
from tools import commit_message, release_notes  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
(TORCH,) = (d.removeprefix("torch") for d in PROJECT["dependencies"] if d.startswith("torch"))
OLDEST, BEYOND = map(int, re.findall(r"2\.(\d+)", TORCH))
PYTHONS = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.fullmatch(r".*Python :: 3\.\d+", c)]


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def commands(name: str) -> list[str]:
    return [step["run"] for job in workflow(name)["jobs"].values() for step in job.get("steps", ()) if "run" in step]


def test_ci_runs_both_ends_of_what_is_supported() -> None:
    matrix = workflow("tests")["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == PYTHONS and PROJECT["requires-python"] == f">={PYTHONS[0]}"
    minors = [int(version.split(".")[1]) for version in matrix["torch"]]
    assert (minors[0], minors[-1]) == (OLDEST, BEYOND - 1)
    assert set(matrix["torch"]) <= set(versions.VERSIONS)
    assert [int(version.split(".")[1]) for version in versions.VERSIONS] == [*range(OLDEST, BEYOND)]


def test_setup_and_readme_name_the_same_versions() -> None:
    setup, readme = (ROOT / "tools" / "setup.sh").read_text(), (ROOT / "README.md").read_text()
    assert f"supported='(2, {OLDEST}) <= " in setup and f" < (2, {BEYOND})'" in setup
    assert f"2.{OLDEST} to 2.{BEYOND - 1}" in setup
    assert f"Python {PYTHONS[0]} or later, torch 2.{OLDEST} to 2.{BEYOND - 1};" in readme
    assert all(f"python{version}" in setup for version in PYTHONS)


def test_workflows_run_what_a_developer_runs() -> None:
    assert ".ci/run" in commands("tests") and "make docs" in commands("tests")
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text())
    made = [
        word for file in WORKFLOWS for command in commands(file.stem) for word in re.findall(r"make (\S+)", command)
    ]
    assert made and set(made) <= set(targets)
    for file in WORKFLOWS:
        for path in re.findall(r"(?:\.ci|tools)/[\w.]+", file.read_text()):
            assert (ROOT / path).exists(), f"{file.name} names {path}"


def test_no_workflow_may_write_but_where_it_says_so() -> None:
    for file in WORKFLOWS:
        assert workflow(file.stem)["permissions"] == {"contents": "read"}, file.name
        # An expression within a script is text that whoever opens a pull request may have written.
        assert not any("${{" in command for command in commands(file.stem)), file.name


CHANGELOG = "# Changelog\n\n## 0.2.0, 2027-01-31\n\n* New.\n\n## 0.1.0, 2026-12-01\n\n* First.\n  Longer.\n"


def test_the_notes_are_the_section_of_the_version() -> None:
    project = '[project]\nversion = "0.1.0"\n'
    assert release_notes.notes("v0.1.0", project, CHANGELOG) == "* First.\n  Longer.\n"
    assert release_notes.notes("v0.2.0", project.replace("0.1.0", "0.2.0"), CHANGELOG) == "* New.\n"


@pytest.mark.parametrize(
    ("tag", "changelog", "said"),
    [
        ("0.1.0", CHANGELOG, "the tag must be v0.1.0"),
        ("v0.2.0", CHANGELOG, "the tag must be v0.1.0"),
        ("v0.1.0", CHANGELOG.replace("## 0.1.0", "## 0.0.9"), "has 0 sections of 0.1.0"),
        ("v0.1.0", CHANGELOG.replace("2026-12-01", "not released yet"), "write the day"),
        ("v0.1.0", "## 0.1.0, 2026-12-01\n\n## 0.0.9, 2026-11-01\n\n* Old.\n", "says nothing of 0.1.0"),
    ],
)
def test_a_version_that_is_not_ready_has_no_notes(tag: str, changelog: str, said: str) -> None:
    with pytest.raises(release_notes.NotReady, match=said):
        release_notes.notes(tag, '[project]\nversion = "0.1.0"\n', changelog)


def test_the_changelog_has_a_section_of_the_version() -> None:
    assert re.findall(
        rf"(?m)^## {re.escape(PROJECT['version'])}, (?:not released yet|\d{{4}}-\d{{2}}-\d{{2}})$",
        (ROOT / "CHANGELOG.md").read_text(),
    )


def test_hooks_run_what_ci_runs() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    before, message = ([h for h in local["hooks"] if ("stages" in h) == late] for late in (False, True))
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [hook["entry"] for hook in before] == ["make lint", "make types"]
    assert all(any(line.startswith(f"{hook['entry']} ||") for line in ci) for hook in before)
    assert [hook["stages"] for hook in message] == [["commit-msg"]]
    assert "tools/commit_message.py" in message[0]["entry"]
    assert any("tools/commit_message.py" in command for command in commands("tests"))


WHY = "\n\nA reader wants to know why.\n"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Fuse caches made by zeros_like" + WHY, ()),
        ("x" * 72 + WHY, ()),
        ("x" * 73 + WHY, ("73 characters",)),
        ("Fuse caches" + WHY + "# Please enter the commit message\n", ()),
        ("Fuse caches\n\n# Please enter the commit message\n", ("no body",)),
        ("Fuse caches\n\n# ------------------------ >8 ------------------------\ndiff --git a/x b/x\n", ("no body",)),
        ("Fuse caches\nmade by zeros_like" + WHY, ("line after the subject",)),
        ("Fuse caches.\n", ("full stop", "no body")),
        ("# a comment alone\n", ("empty",)),
        ("Merge branch 'main' into hooks\n", ()),
        ("fixup! Fuse caches made by zeros_like\n", ()),
    ],
)
def test_messages_of_commits(message: str, said: tuple[str, ...]) -> None:
    found = commit_message.objections(message)
    assert len(found) == len(said) and all(words in sentence for words, sentence in zip(said, found, strict=True))
