"""``--code``: the code to write by hand, in the report, on the page and in a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_fuse.explain.command import main
from tests.explain.sources import GPT

CALL = "F.scaled_dot_product_attention(q, k, v, is_causal=True"


def test_in_the_report(model_file: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([model_file(GPT), "--code"]) == 0
    said = capsys.readouterr().out
    assert CALL in said and "by hand, in place of line" in said


def test_without_the_flag(model_file: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([model_file(GPT)]) == 0
    assert "by hand" not in capsys.readouterr().out


def test_in_a_file(model_file: Callable[[str], str], tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    assert main([model_file(GPT), "--code", str(file)]) == 0
    text = file.read_text()
    ast.parse(text)
    # Layers that are alike share their code.
    assert text.count(CALL) == 1 and "# In place of line" in text and "import torch.nn.functional as F" in text


def test_a_file_that_cannot_be_written(
    model_file: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([model_file(GPT), "--code", str(tmp_path)]) == 2
    assert "--code" in capsys.readouterr().err


def test_no_file_of_the_user_is_overwritten(
    model_file: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("x = 1")
    assert main([model_file(GPT), "--code", str(file)]) == 2
    assert file.read_text() == "x = 1" and "did not write it" in capsys.readouterr().err


def test_on_the_page(model_file: Callable[[str], str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main([model_file(GPT), "--code", "--html", str(page)]) == 0
    # Colours stand between the words of the code.
    text = re.sub(r"<[^>]+>", "", page.read_text())
    assert CALL in text and "By hand, in place of line" in text
