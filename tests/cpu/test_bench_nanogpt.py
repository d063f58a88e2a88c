"""`python -m attn_fuse.bench nanogpt`: its rows, table, files and errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# Before the tests, which have a `harness`, too.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import nanogpt
from attn_fuse.backend import attn_fuse
from attn_fuse.bench import command, rows
from attn_fuse.bench.command import main
from attn_fuse.bench.ways import EAGER, INDUCTOR, Way, compiled_apart
from attn_fuse.picker.timing import Timing
from nanogpt import Sizes, Step, Table

CPU = torch.device("cpu")


def timing(seconds: float) -> Timing:
    return Timing(seconds, 0.9 * seconds, 1.2 * seconds, 9)


SMALL = Sizes(layers=1, heads=2, width=16, length=32, batch=2, vocabulary=65, dtype="float32")


def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROUNDS", 3)

    def compiled(self: Way, model: Any) -> Any:
        if self.name == EAGER:
            return model
        if self.options is None:
            return compiled_apart(model, "aot_eager")
        return compiled_apart(model, attn_fuse, options={**self.options, "inner_backend": "aot_eager"})

    monkeypatch.setattr(Way, "compiled", compiled)


@pytest.mark.thorough
def test_the_rows_of_a_gpt(monkeypatch: pytest.MonkeyPatch) -> None:
    without_inductor(monkeypatch)
    table = nanogpt.measure(SMALL, CPU, 0.05)
    assert [(row.name, row.vocabulary) for row in table.rows] == [
        (EAGER, 65),
        (INDUCTOR, 65),
        ("attn_fuse, SDPA math", 65),
        ("attn_fuse, SDPA flash", 65),
        ("attn_fuse, its own choice", 65),
        ("edited by hand to SDPA, Inductor", 65),
        ("attn_fuse, SDPA flash + padded vocabulary", 128),
        ("Inductor, dropout 0.1", 65),
        ("attn_fuse, its own choice, dropout 0.1", 65),
    ]
    assert [row.dropout for row in table.rows] == [0.0] * 7 + [0.1] * 2
    for row in table.rows:
        assert not row.problem and row.timing is not None and row.timing.runs == 3 and row.peak and row.sites == 1, row
    fused = {row.name: row.fused for row in table.rows}
    assert fused["attn_fuse, SDPA flash"] == fused["attn_fuse, SDPA flash + padded vocabulary"] == 1
    assert fused[EAGER] == 0
    losses = {row.name: row.loss for row in table.rows}
    assert losses["edited by hand to SDPA, Inductor"] == pytest.approx(losses[EAGER], rel=1e-3)
    assert losses["Inductor, dropout 0.1"] != pytest.approx(losses[EAGER], rel=1e-6)
    text = nanogpt.as_text(table, SMALL, CPU)
    for row in table.rows:
        assert f"{SMALL.tokens / row.timing.median:,.0f}" in text and row.loss == pytest.approx(4.4, abs=0.8)
    assert "torch has no efficient kernel on the CPU" in text


def test_a_gpt_that_does_not_fit_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory\nis left")

    monkeypatch.setattr(nanogpt, "_step", full)
    assert main(["nanogpt", "--device", "cpu"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("attn_fuse.bench: the GPT does not run here: OutOfMemoryError: no memory; make it smaller")


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(nanogpt, "measure", interrupted)
    assert main(["nanogpt", "--device", "cpu"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "attn_fuse.bench: interrupted"


def test_a_gpt_that_computes_another_loss_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    without_inductor(monkeypatch)
    right = Way.compiled

    def wrong(self: Way, model: Any) -> Any:
        run = right(self, model)
        return (lambda *a: (None, run(*a)[1] * 1.01)) if "flash" in self.name else run

    monkeypatch.setattr(Way, "compiled", wrong)
    some = [p for p in nanogpt.programs_of(CPU, SMALL) if p.name in (EAGER, "attn_fuse, SDPA flash")]
    monkeypatch.setattr(nanogpt, "programs_of", lambda *_: some)
    table = nanogpt.measure(SMALL, CPU, 0.05)
    assert [bool(row.timing) for row in table.rows] == [True, False]
    assert table.rows[1].problem.startswith("WRONG: the loss of the first step is ")
    assert "note: attn_fuse, SDPA flash: WRONG" in nanogpt.as_text(table, SMALL, CPU)


def test_what_is_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    without_inductor(monkeypatch)
    clock, right = [0.0], nanogpt._prepared

    def slow(*arguments: Any) -> Any:
        clock[0] += 40.0
        return right(*arguments)

    monkeypatch.setattr(nanogpt, "_prepared", slow)
    monkeypatch.setattr(nanogpt.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(rows, "interleaved", lambda runs, *_, **__: dict.fromkeys(runs, timing(1e-3)))
    # Two fit, with the 10 seconds of timing of each.
    table = nanogpt.measure(SMALL, CPU, 10.0, within=95.0)
    assert [row.problem for row in table.rows] == [""] * 2 + ["no time was left"] * 7
    assert [row.timing is not None for row in table.rows] == [True] * 2 + [False] * 7


def test_a_first_step_is_that_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    without_inductor(monkeypatch)
    by_hand = nanogpt.first_step("edited by hand to SDPA, Inductor", SMALL, CPU)
    assert by_hand == pytest.approx(nanogpt.first_step(EAGER, SMALL, CPU), rel=1e-3)


@pytest.mark.parametrize("name", ["nanogpt", "sweep"])
def test_outside_of_a_clone_it_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "BENCHMARKS", tmp_path)
    assert main([name]) == 2
    said = f"attn_fuse.bench: {name} is in benchmarks/, which only a clone of the repository has: run it there\n"
    assert capsys.readouterr().err == said


def test_on_cuda_the_efficient_kernel_has_a_row() -> None:
    programs = nanogpt.programs_of(torch.device("cuda"), Sizes())
    assert [(program.name, program.vocabulary) for program in programs][3:] == [
        ("attn_fuse, SDPA efficient", 50257),
        ("attn_fuse, SDPA flash", 50257),
        ("attn_fuse, its own choice", 50257),
        ("edited by hand to SDPA, Inductor", 50257),
        ("attn_fuse, SDPA flash + padded vocabulary", 50304),
        ("Inductor, dropout 0.1", 50257),
        ("attn_fuse, its own choice, dropout 0.1", 50257),
    ]


def test_the_gpt_as_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Step((EAGER,), 0, 1, first_call=0.1, timing=timing(2e-3), peak=2 << 20, vocabulary=65, loss=4.2)
    wrong = Step(("flash",), 1, 1, problem="it fails", vocabulary=65)
    monkeypatch.setattr(nanogpt, "measure", lambda *_: Table((right, wrong), 0.0))
    files = f"--json {tmp_path / 'a.json'}"
    assert main(f"nanogpt --device cpu --length 64 {files}".split()) == 0
    assert "32,000" in capsys.readouterr().out  # tokens a second: 64 in 2 ms
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["sizes"]["length"] == 64 and data["rows"][0]["timing"]["median"] == 2e-3
    assert [(row["name"], row["problem"]) for row in data["rows"]] == [(EAGER, ""), ("flash", "it fails")]
