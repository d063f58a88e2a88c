"""``--on``: the report as on a GPU that is not here. tests/graph/test_picker_h200.py holds the choices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attn_fuse.explain.command import main
from attn_fuse.kernels.elsewhere import elsewhere
from tests.explain.sources import GPT

ModelFile = Callable[[str], str]


def test_the_report_is_of_the_gpu(model_file: ModelFile, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([model_file(GPT), "--on", "h200", "--dtype", "bfloat16", "--length", "32", "--pick", "fused"]) == 0
    said = capsys.readouterr().out
    assert "as on an NVIDIA H200" in said and "not cpu_flash: runs on cpu, not on cuda" in said
    assert "FUSED on cudnn" in said
    assert elsewhere() is None


def test_what_this_machine_would_check_is_not_run_for_it(
    model_file: ModelFile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_fuse.backend.SiteRun.times", lambda *_: pytest.fail("measured"))
    assert main([model_file(GPT), "--on", "h200", "--pick", "measured"]) == 0


@pytest.mark.parametrize("name", ["a100", ""])
def test_a_gpu_without_evidence(name: str, model_file: ModelFile, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([model_file(GPT), "--on", name]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "NVIDIA H200" in said and "Traceback" not in said
