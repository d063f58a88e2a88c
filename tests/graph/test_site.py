"""The documents as a site: what mkdocs.yml asks for is built, and what it must not let pass ends the build."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("mkdocs", reason="make site installs it")

ROOT = Path(__file__).parents[2]
BUILT_FROM = (
    *(path.name for path in ROOT.glob("*.md")),
    *("mkdocs.yml", "docs", "examples", "benchmarks", "tools", "attn_fuse/explain/reasons.md"),
)


def build(source: Path, into: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(into)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("site")
    done = build(ROOT, into)
    assert done.returncode == 0, done.stderr
    return into


class Links(HTMLParser):
    """What a page leads to, and what the browser fetches to show it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.fetched: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("href", "src") and value]
        self.fetched += [value for name, value in attrs if (tag == "link" or name == "src") and value]


def pages(site: Path) -> Iterator[Path]:
    return (page for page in site.rglob("*.html") if page.name != "404.html")


def test_every_page_is_there_and_found_by_the_search(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())["docs"]
    found = {entry["location"].partition("#")[0] for entry in index}
    assert found == {page.relative_to(site).as_posix() for page in pages(site)}
    documents = {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")}
    examples = {page.relative_to(ROOT).with_suffix(".html").as_posix() for page in (ROOT / "examples").rglob("*.py")}
    assert documents | examples | {"index.html", "CONTRIBUTING.html", "CHANGELOG.html", "benchmarks.html"} <= found


def test_the_page_of_every_program_shows_what_it_printed(site: Path) -> None:
    for source in (ROOT / "examples").rglob("*.py"):
        page = (site / source.relative_to(ROOT)).with_suffix(".html").read_text()
        assert ("What it prints" in page) == ("__main__" in source.read_text()), source


def test_every_link_and_picture_leads_somewhere(site: Path) -> None:
    for page in pages(site):
        for link in Links(page).found:
            if not link.startswith(("http", "data:", "#", "mailto:")):
                assert (page.parent / unquote(link.partition("#")[0])).exists(), (page, link)


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in pages(site):
        assert not [link for link in Links(page).fetched if link.startswith(("http:", "https:", "//"))], page


def test_mistakes_end_the_build(tmp_path: Path) -> None:
    for name in BUILT_FROM:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    for page, text in (
        ("docs/run.md", "[a](nowhere.md), [b](report.md#no-heading)"),
        ("README.md", "[c](docs/no-page.md)"),
        ("docs/forgotten.md", "# A page that the menu lacks"),
    ):
        with (tmp_path / page).open("a") as file:
            file.write(f"\n{text}\n")
    done = build(tmp_path, tmp_path / "site")
    warned = [line for line in done.stderr.splitlines() if line.startswith(("WARNING", "  - "))]
    assert done.returncode == 1 and len(warned) == 5, done.stderr
    for mistake in ("nowhere.md", "no-heading", "no-page.md", "forgotten.md"):
        assert any(mistake in line for line in warned)
