"""Every reason that a refusal can carry, and every reason why a kernel says no, is named by a test and in the docs."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [file for stage in ("graph", "patterns") for file in sorted((ROOT / "attn_fuse" / stage).glob("*.py"))]
KERNELS = sorted((ROOT / "attn_fuse" / "kernels").rglob("*.py"))
# What makes a refusal of a text, in these files.
MAKERS = {"Refusal", "refused", "NotFunctional"}


def reasons(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each refusal; of a text with values in it, the longest part without."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS and node.args:
            yield from texts_of(node.args[0])


def reasons_of_kernels(file: Path) -> Iterator[tuple[int, str]]:
    """The same of each text that is yielded, or put into a list of reasons."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Yield(value=ast.Constant() | ast.JoinedStr() as said):
                yield from texts_of(said)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="reasons"), attr="append"), args=[said]):
                yield from texts_of(said)


def texts_of(node: ast.expr) -> Iterator[tuple[int, str]]:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
    if texts:
        yield node.lineno, max(texts, key=len).strip()


@functools.cache
def texts_of_tests() -> str:
    found: list[str] = []
    for file in sorted([*(ROOT / "tests").rglob("test_*.py"), ROOT / "tests" / "models" / "lookalikes.py"]):
        if file != Path(__file__):
            found += (
                node.value
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            )
    return "\n".join(found)


CASES = [
    *((f"{file.relative_to(ROOT)}: {text}", text) for file in FILES for _, text in reasons(file)),
    *((f"{file.relative_to(ROOT)}: {text}", text) for file in KERNELS for _, text in reasons_of_kernels(file)),
]


def test_reasons_are_found() -> None:
    assert len(CASES) >= 75
    assert {"draft.py", "region.py", "softmax.py", "weights.py", "fold.py", "memory.py"} <= {
        file.name for file in FILES if any(reasons(file))
    }
    assert {"kernels/kernel.py", "kernels/sdpa.py", "flex/kernel.py", "flash/kernel.py"} <= {
        f"{file.parent.name}/{file.name}" for file in KERNELS if any(reasons_of_kernels(file))
    }


@pytest.mark.parametrize("text", dict.fromkeys(text for _, text in CASES), ids=str)
def test_a_test_names_it(text: str) -> None:
    assert text in texts_of_tests(), [case for case, _ in CASES if case.endswith(text)]


@pytest.mark.parametrize("text", dict.fromkeys(text for _, text in CASES), ids=str)
def test_the_documents_say_what_to_do(text: str) -> None:
    page = (ROOT / "attn_fuse/explain/reasons.md").read_text()
    assert text.strip(" ,:") in page, [case for case, _ in CASES if case.endswith(text)]
