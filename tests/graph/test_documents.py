"""The documents: links lead somewhere, Python in them is Python, and what the code has by name is described."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch

# Before the tests, which have a `harness`, too.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import results_page
from attn_fuse.explain import command as explain
from attn_fuse.kernels import KERNELS
from attn_fuse.options import Options
from attn_fuse.run import command as run
from tools import api, gallery

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[str]:
    yield from re.findall(r"\]\(([^)\s]+)\)", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_python_is_python(page: Path) -> None:
    for block in re.findall(r"(?ms)^ *```python\n(.*?)^ *```", page.read_text()):
        ast.parse(textwrap.dedent(block))


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")}
    assert {page for page in PAGES if page.name != "README.md"} <= linked


def test_every_stored_result_is_asked_for_its_age() -> None:
    assert all(re.match(r"\S+\.json: measured at ", line) for line in results_page.outdated())


def test_the_readme_takes_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_api_page_is_what_the_docstrings_say() -> None:
    assert api.PAGE.read_text() == api.page(), "run `make docs`"


@pytest.mark.thorough
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the page is of torch 2.13, as `make docs` has it")
def test_the_gallery_is_what_its_programs_give() -> None:
    files = gallery.files()
    assert {*(gallery.DOCS / "masks").iterdir()} < files.keys()
    for path, text in files.items():
        assert path.read_text() == text and (path.suffix == ".md" or len(text) < 10_000), "run `make docs`"


def test_every_option_has_a_line() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert {f.name for f in fields(Options)} - {"compiles"} == set(re.findall(r"(?m)^\| `(\w+)` \|", page))


def test_every_kernel_has_a_line() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert {kernel.name for kernel in KERNELS} == set(re.findall(r"(?m)^\| `(\w+)` \|", page))


@pytest.mark.parametrize(("command", "name"), [(explain, "report.md"), (run, "run.md")])
def test_every_flag_has_a_line(command: types.ModuleType, name: str) -> None:
    page = (ROOT / "docs" / name).read_text()
    flags = {name for action in command._parser()._actions for name in action.option_strings if name.startswith("--")}
    assert flags - {"--help"} <= set(re.findall(r"--[a-z-]+", page))


@pytest.mark.parametrize("page", results_page.PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_figures_are_those_of_the_stored_results(page: Path) -> None:
    text = page.read_text()
    assert results_page.filled(text) == text, "run `make results`"
    assert text.count("<!-- result: ") == text.count("<!-- end -->") > 0
    emptied = results_page._BLOCK.sub(lambda found: f"{found[1]}{found[3]}", text)
    assert len(emptied) < len(text) and results_page.filled(emptied) == text
