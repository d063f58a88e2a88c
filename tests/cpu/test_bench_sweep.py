"""`python -m attn_fuse.bench sweep` and `nanogpt`: their tables, files, plots and errors, and the progress line."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_fuse.backend import attn_fuse
from attn_fuse.bench import gpt, measure, nanogpt, nanogpt_command, plot, sweep_command
from attn_fuse.bench.command import main
from attn_fuse.bench.measure import Effort
from attn_fuse.bench.nanogpt import Sizes, Step, Table
from attn_fuse.bench.progress import Progress
from attn_fuse.bench.sweep import MASKS, Swept, cases, swept
from attn_fuse.bench.ways import EAGER, INDUCTOR, Way, compiled_apart
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.picker.timing import Timing, interleaved

CPU = torch.device("cpu")


def timing(seconds: float) -> Timing:
    return Timing(seconds, 0.9 * seconds, 1.2 * seconds, 9)


def found(case: Case) -> Swept:
    times = {AS_WRITTEN: timing(case.q_len * 1e-6), "cpu_flash": timing(case.q_len * 0.5e-6)}
    return Swept(case=case, timings=times, peaks={AS_WRITTEN: 4 << 20, "cpu_flash": 1 << 20}, why_not={"flex": "why"})


def asked(*masks: str, training: bool = False) -> list[Case]:
    return cases([64, 32], [16], [1], 2, masks, ["float32"], [training])


def test_the_cases_are_all_combinations_short_ones_first() -> None:
    every = cases([64, 32], [16, 32], [1, 2], 4, MASKS, ["float32", "bfloat16"], [False, True], window=8)
    assert len(every) == 2 * 2 * 2 * 5 * 2 * 2 == len({*every})
    assert [case.q_len for case in every] == sorted(case.q_len for case in every)
    shares = {(case.mask, case.q_len): case.visible for case in every}
    assert shares["none", 32] == shares["dense", 32] == 1.0
    assert shares["causal", 32] == pytest.approx(33 / 64, abs=1e-3)
    assert shares["window", 32] == pytest.approx((8 * 32 - 28) / 32**2, abs=1e-3), "eight keys, fewer at the start"


@pytest.mark.thorough
def test_a_case_is_measured_on_each_kernel() -> None:
    case = Case("float32", False, 1, 2, 32, 32, 16)
    seen = swept(["cpu_flash", "cudnn"], case, CPU, Effort(3, 0.05, 0.0))
    assert {*seen.timings} == {*seen.peaks} == {AS_WRITTEN, "cpu_flash"} and "cudnn" in seen.why_not
    assert seen.case == case and not seen.problem and json.dumps(seen.as_json())


def test_a_wrong_kernel_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = lambda: torch.ones(1)  # noqa: E731
    reason = {"cpu_flash": "its result differs from that as written"}
    monkeypatch.setattr("attn_fuse.bench.sweep.prepared", lambda *_: ({AS_WRITTEN: run}, reason))
    seen = swept(["cpu_flash"], Case("float32", False, 1, 2, 32, 32, 16), CPU, Effort(3, 0.05, 0.0))
    assert {*seen.timings} == {AS_WRITTEN}
    assert "note: cpu_flash, inference, mask none: its result differs" in sweep_command.as_text([seen], CPU)


def test_a_case_that_fits_no_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_fuse.bench.sweep.free_memory", lambda device: 2**20)
    seen = swept([], Case("float32", True, 4, 16, 8192, 8192, 64), CPU, measure.QUICK)
    assert not seen.timings and seen.problem.startswith("as written it takes 96.8 GiB")
    assert "left out: as written it takes" in sweep_command.as_text([seen], CPU)


def test_the_tables_have_what_the_files_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_command, "sweep", lambda cases, *_: map(found, cases))
    arguments = "sweep --lengths 64 32 --heads 2 --head-dims 16 --masks causal window --device cpu"
    files = f" --json {tmp_path / 'out.json'} --csv {tmp_path / 'out.csv'}"
    assert main((arguments + files).split()) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^mask: causal +as written \(Inductor\) +cpu_flash +fastest$", printed, re.M)
    assert printed.count("cpu_flash, 0.50 of as written") == 4 and "32 µs, 4.0 MiB" in printed
    assert "note: flex, inference, mask window: why" in printed
    data = json.loads((tmp_path / "out.json").read_text())
    assert [Case.from_json(one["case"]).q_len for one in data["cases"]] == [32, 32, 64, 64]
    assert data["cases"][0]["seconds"]["cpu_flash"]["median"] == 16e-6 and data["machine"]["torch"]
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert len(rows) == 8 and {row["kernel"] for row in rows} == {AS_WRITTEN, "cpu_flash"}
    assert float(rows[1]["over_as_written"]) == 0.5 and int(rows[1]["peak_bytes"]) == 1 << 20


def test_interrupted_it_keeps_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def two(cases: Sequence[Case], *_: Any) -> Iterator[Swept]:
        yield from map(found, cases[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_command, "sweep", two)
    path = tmp_path / "out.csv"
    assert main(["sweep", "--device", "cpu", "--csv", str(path)]) == 130
    captured = capsys.readouterr()
    assert "interrupted; 2 of 8 cases are kept" in captured.err and "mask: causal" in captured.out
    assert len(list(csv.DictReader(path.open()))) == 4


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_a_plot_of_the_sweep(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"sweep{suffix}"
    sweep_command.draw(
        path, [found(case) for training in (False, True) for case in asked(*MASKS, training=training)], CPU
    )
    data = path.read_bytes()
    if suffix == ".svg":
        assert b"</svg>" in data
        return
    width, height = (int.from_bytes(data[place : place + 4], "big") for place in (16, 20))
    assert data.startswith(b"\x89PNG\r\n") and width == 5 * 4.6 * 120 and height == (4 * 3.4 + 0.8) * 120


def test_a_line_of_one_point_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "_save", lambda figure, *_: drawn.append(figure))
    panel = plot.Lines("loss", "step", "cross entropy", {"eager": [(26, 2.9)], "sdpa": [(26, 2.9), (52, 2.8)]})
    plot.lines(Path("loss.svg"), "a GPT", [[panel]], logarithmic=False)
    dot, line = drawn[0].axes[0].lines
    assert dot.get_marker() == "o" and line.get_marker() == "None"


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("sweep --lengths 0", "'0' is not a whole number above 0"),
        ("sweep --masks diagonal", "invalid choice: 'diagonal'"),
        ("sweep --dtype int8", "invalid choice: 'int8'"),
        ("sweep --device tpu", "--device tpu: it is cpu or cuda"),
        ("sweep --device cpu --kernels cudnn", "--kernels cudnn: it does not run on this device"),
        ("sweep --device cpu --kernels chunk", "attn_fuse has no kernel 'chunk'. Did you mean 'chunked'?"),
        ("sweep --csv /nowhere/a.csv", "--csv /nowhere/a.csv: it cannot be written"),
        ("sweep --seconds nan", "'nan' is not a number of seconds above 0"),
        ("nanogpt --width 30 --heads 4 --device cpu", "--width 30: it is a multiple of --heads, which is 4"),
        ("nanogpt --layers few", "'few' is not a whole number above 0"),
        ("nanogpt --plot gpt.jpg", "--plot gpt.jpg: it is a .png or .svg"),
        ("sweeps", "there is no command 'sweeps'. Did you mean 'sweep'?"),
    ],
)
def test_errors_are_one_line(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("attn_fuse.bench: ") and words in captured.err


SMALL = Sizes(layers=1, heads=2, width=16, length=32, batch=2, vocabulary=65, dtype="float32")


def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nanogpt, "_ROUNDS", 3)

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
    table = nanogpt.measure(SMALL, CPU, 0.05, Progress(1))
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
    text = nanogpt_command.as_text(table, SMALL, CPU)
    rows = nanogpt.as_csv(table.rows, SMALL)
    for row in rows:
        assert f"{row['tokens_per_second']:,.0f}" in text and row["first_loss"] == pytest.approx(4.4, abs=0.8)
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

    monkeypatch.setattr(nanogpt_command, "measure", interrupted)
    assert main(["nanogpt", "--device", "cpu"]) == 130
    assert capsys.readouterr().err.strip() == "attn_fuse.bench: interrupted"


def test_a_gpt_that_computes_another_loss_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    without_inductor(monkeypatch)
    right = Way.compiled

    def wrong(self: Way, model: Any) -> Any:
        run = right(self, model)
        return (lambda *a: (None, run(*a)[1] * 1.01)) if "flash" in self.name else run

    monkeypatch.setattr(Way, "compiled", wrong)
    some = [p for p in nanogpt.programs_of(CPU, SMALL) if p.name in (EAGER, "attn_fuse, SDPA flash")]
    monkeypatch.setattr(nanogpt, "programs_of", lambda *_: some)
    table = nanogpt.measure(SMALL, CPU, 0.05, Progress(1))
    assert [bool(row.timing) for row in table.rows] == [True, False]
    assert table.rows[1].problem.startswith("WRONG: the loss of the first step is ")
    assert "note: attn_fuse, SDPA flash: WRONG" in nanogpt_command.as_text(table, SMALL, CPU)


def test_what_is_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    without_inductor(monkeypatch)
    clock, right = [0.0], nanogpt._prepared

    def slow(*arguments: Any) -> Any:
        clock[0] += 40.0
        return right(*arguments)

    monkeypatch.setattr(nanogpt, "_prepared", slow)
    monkeypatch.setattr(nanogpt.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(nanogpt, "interleaved", lambda runs, *_, **__: dict.fromkeys(runs, timing(1e-3)))
    # Two fit, with the 10 seconds of timing of each.
    table = nanogpt.measure(SMALL, CPU, 10.0, Progress(1), within=95.0)
    assert [row.problem for row in table.rows] == [""] * 2 + ["no time was left"] * 7
    assert [row.timing is not None for row in table.rows] == [True] * 2 + [False] * 7


def test_a_first_step_is_that_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    without_inductor(monkeypatch)
    by_hand = nanogpt.first_step("edited by hand to SDPA, Inductor", SMALL, CPU)
    assert by_hand == pytest.approx(nanogpt.first_step(EAGER, SMALL, CPU), rel=1e-3)


def test_the_gpt_is_the_one_of_the_example() -> None:
    example = Path(__file__).parents[2] / "examples" / "nanogpt" / "model.py"
    assert Path(str(gpt.__file__)).read_text() == example.read_text()


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
    pytest.importorskip("matplotlib")
    rows = (Step(EAGER, 65, 0, 1, 4.2, 0.1, timing(2e-3), 2 << 20), Step("flash", 65, 1, 1, problem="it fails"))
    monkeypatch.setattr(nanogpt_command, "measure", lambda *_: Table(rows, 0.0))
    files = f"--json {tmp_path / 'a.json'} --csv {tmp_path / 'a.csv'} --plot {tmp_path / 'a.svg'}"
    assert main(f"nanogpt --device cpu --length 64 {files}".split()) == 0
    assert "32,000" in capsys.readouterr().out  # tokens a second: 64 in 2 ms
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["sizes"]["length"] == 64 and data["rows"][0]["timing"]["median"] == 2e-3
    assert [row["problem"] for row in csv.DictReader((tmp_path / "a.csv").open())] == ["", "it fails"]
    assert "</svg>" in (tmp_path / "a.svg").read_text()


def test_without_matplotlib_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sweep_command, "sweep", lambda *_: pytest.fail("it was measured"))
    assert main(["sweep", "--plot", "sweep.svg"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("attn_fuse.bench.progress.time.perf_counter", lambda: clock[0])
    out = Terminal()
    with Progress(4, out) as progress:
        assert progress.left() is None
        progress.step("compiling")
        clock[0] += 30
        progress.advance()
        assert progress.left() == 90
    lines = [line for line in out.getvalue().split("\r") if line.strip()]
    assert lines[-1].startswith("[######                  ]  25%, 90 s left  compiling") and "\n" not in out.getvalue()


def test_progress_into_a_file_is_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("attn_fuse.bench.progress.time.perf_counter", lambda: clock[0])
    out = io.StringIO()
    with Progress(100, out) as progress:
        for _ in range(100):
            clock[0] += 1
            progress.step("timing")
            progress.advance()
    assert 4 <= out.getvalue().count("\n") <= 6 and "\r" not in out.getvalue()


def test_time_is_counted_while_rounds_are_measured() -> None:
    shares: list[float] = []
    interleaved({"a": lambda: None}, CPU, rounds=4, seconds=60, done=shares.append)
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_steps_that_are_counted_in_parts() -> None:
    out = io.StringIO()
    with Progress(4, out) as progress:
        progress.advance()
        part = progress.within(2)
        for share, done in ((0.25, 1.5), (0.5, 2.0), (1.0, 3.0)):
            part(share)
            assert progress._done == done
        progress.advance()
        assert progress._done == 4.0
