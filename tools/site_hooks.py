"""What mkdocs.yml cannot say: pages from files outside docs/, and links that lead out of docs/."""

from __future__ import annotations

import ast
import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Pages of the site, by their files in the repository.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
    "benchmarks/README.md": "benchmarks.md",
    "attn_fuse/explain/reasons.md": "reasons.md",
}
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages outside of docs/, and one for each example."""
    pages = {page: (ROOT / source).read_text() for source, page in OUTSIDE.items()}
    pages["examples/index.md"] = _list_of_examples()
    pages |= {_page_of(path.relative_to(ROOT).as_posix()): _example(path) for path in EXAMPLES}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """`markdown` with links to other pages of the site; of links to anything else in the repository only the text."""
    here = page.file.src_uri
    sources = {target: source for source, target in OUTSIDE.items()}
    folder = posixpath.dirname(sources.get(here, f"docs/{here}"))

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if here.startswith("examples/") or not (ROOT / path).exists():
            return found[0]
        there = _page_of(path)
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(here))}{anchor or ''})" if there else text

    return _LINK.sub(link, markdown)


def _page_of(path: str) -> str:
    """The page of a file or folder of the repository; empty if it has none."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("examples"):
        return re.sub(r"\.py$", ".md", path) if path.endswith(".py") else "examples/index.md"
    return OUTSIDE.get(path, "")


def _list_of_examples() -> str:
    lines = [f"* [{_name(path)}]({_name(path)[:-3]}.md): {_docstring(path).partition(chr(10))[0]}" for path in EXAMPLES]
    return f"# Examples\n\nCI runs each of these files, in small.\n\n{chr(10).join(lines)}\n"


def _example(path: Path) -> str:
    """The page of an example: its docstring, what it printed, and its source."""
    stored = json.loads((ROOT / "benchmarks/results/examples-cpu.json").read_text())
    machine, ran = stored["machine"], stored["programs"].get(_name(path))
    # A command stands in the docstring as a line of text.
    parts = [f"# {_name(path)}", re.sub(r"(?m)^(?=python )", "    ", _docstring(path))]
    if ran:
        parts += [
            f"## What it prints\n\n```\n$ {ran['command']}\n{ran['printed'].strip()}\n```",
            f"On {machine['threads']} threads of {machine['cpu']}, torch {machine['torch']}, {machine['date']}. The "
            "times are of a single run, so compare them only with each other.",
        ]
    return "\n\n".join([*parts, f"## Source\n\n```python\n{path.read_text()}```\n"])


def _name(path: Path) -> str:
    return path.relative_to(ROOT / "examples").as_posix()


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""
