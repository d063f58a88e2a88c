"""`python -m attn_fuse.bench model`: the contents of its tables and files, and the rows without a time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

from attn_fuse.bench import model_command, rows, ways
from attn_fuse.bench.command import main
from attn_fuse.bench.compare import Reference
from attn_fuse.bench.measure import kernels_on
from attn_fuse.bench.model import DIFFERS, Measured, measure
from attn_fuse.bench.rows import Row
from attn_fuse.bench.ways import EAGER, FUSED, INDUCTOR, PICKED, Held, Way
from attn_fuse.explain.explanation import Explanation
from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.page import Bar
from attn_fuse.explain.subject import Subject
from attn_fuse.picker.timing import Timing

CPU = torch.device("cpu")
FILE = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, dim: int = 16):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / x.shape[-1] ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ self.value(x)
"""


class Attention(nn.Module):
    """Two heads of 8, causal. dropout: of the output. calls_sdpa: whether the program calls it itself."""

    def __init__(self, dropout: float = 0.0, calls_sdpa: bool = False) -> None:
        super().__init__()
        self.heads = nn.Linear(16, 48)
        self.dropout, self.calls_sdpa = nn.Dropout(dropout), calls_sdpa
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        split = self.heads(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        if self.calls_sdpa:
            return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (query @ key.transpose(-2, -1) / 8**0.5).masked_fill(~mask, -math.inf)
        return self.dropout(scores.softmax(-1) @ value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "written.py"
    path.write_text(FILE)
    return path


def subject(train: bool = False, **how: Any) -> Subject:
    torch.manual_seed(0)
    model = Attention(**how).train(train)
    return Subject(model, Inputs((torch.randn(2, 32, 16),)), train, (), 120.0)


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Inductor, whose compiling takes seconds, and with few rounds."""
    monkeypatch.setattr(rows, "ROUNDS", 3)

    def compiled(self: Way, model: Callable[..., Any]) -> Callable[..., Any]:
        if self.name == EAGER:
            return model
        if self.options is None:
            return ways.compiled_apart(model, "aot_eager")
        return ways.compiled_apart(model, ways.attn_fuse, options={**self.options, "inner_backend": "aot_eager"})

    monkeypatch.setattr(Way, "compiled", compiled)


def measured(of: Subject, kernels: tuple[str, ...] = ("cpu_flash", "chunked")) -> Measured:
    return measure(of, kernels, 0.05)


@pytest.mark.thorough
def test_each_way_is_a_row_or_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    found = measured(subject(), tuple(kernels_on(CPU)))
    rows = {name: row for row in found.rows for name in row.names}
    assert {EAGER, INDUCTOR, PICKED, FUSED, "cpu_flash (SDPA flash)", "chunked", "SDPA math"} <= rows.keys() | {
        *found.left_out
    }
    assert rows[FUSED] is rows["cpu_flash (SDPA flash)"], "one program is measured once"
    assert rows[EAGER].fused == 0 and rows[EAGER].sites == 1 and rows[EAGER].difference == 0
    assert rows["chunked"].by_kernel == {"chunked": 1} and rows["chunked"].fused == 1
    for row in found.rows:
        assert not row.problem and row.timing is not None and row.timing.runs == 3, row
        assert row.peak and row.first_call and row.difference is not None and row.difference < 1e-5


@pytest.mark.thorough
def test_a_kernel_that_gives_no_gradients_is_left_out_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    found = measured(subject(train=True), ("flex", "chunked"))
    assert found.mode == "training" and found.left_out["flex"].startswith("fuses none of 1: ")
    assert any("chunked" in row.names and row.timing for row in found.rows)


def test_a_wrong_row_is_marked_and_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    right = Way.compiled

    def wrong(self: Way, model: Callable[..., Any]) -> Callable[..., Any]:
        run = right(self, model)
        return (lambda x: run(x) * 1.01) if self.name == "chunked" else run

    monkeypatch.setattr(Way, "compiled", wrong)
    found = measured(subject())
    row = rows.named(found.rows, "chunked")
    assert row is not None and row.problem == DIFFERS and row.timing is None and row.peak is None
    assert row.difference == pytest.approx(0.01, rel=0.01)
    assert all(other.timing for other in found.rows if other is not row)
    line = next(line for line in model_command._text(found).splitlines() if line.startswith("chunked "))
    assert line.split()[1:5] == ["-", "-", "-", "-"]
    assert f"note: chunked: {DIFFERS}" in model_command._text(found)


@pytest.mark.thorough
def test_a_row_that_raises_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    right = Way.compiled

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel\nat all")

    monkeypatch.setattr(Way, "compiled", lambda self, m: fails if self.name == INDUCTOR else right(self, m))
    row = rows.named(measured(subject(), ()).rows, INDUCTOR)
    assert row is not None and row.problem == "RuntimeError: no kernel" and row.timing is None


@pytest.mark.parametrize("train", [False, True])
def test_results_are_compared_from_the_same_state(train: bool) -> None:
    # The buffer counts calls: without the first state back, the second call would have another output.
    class Counts(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            return out * self.calls

    of = subject(train)
    of = Subject(Counts().train(train), of.inputs, train, (), 120.0)
    reference = Reference(of)
    assert not reference.random and reference.difference(reference.of(of.model)) == 0
    assert bool(reference.results[1]) == train


def test_a_model_that_draws_is_compared_with_two_draws() -> None:
    of = subject(train=True, dropout=0.5)
    reference = Reference(of)
    assert reference.random and reference.agrees(reference.of(of.model, seed=2))
    assert not reference.agrees(reference.of(lambda x: of.model(x) * 20, seed=2))


def test_a_way_that_draws_other_numbers_is_right() -> None:
    # The gradient of the key's bias is 0 but for rounding, which says nothing about how far two draws are apart.
    of = subject(train=True, dropout=0.5)
    run = ways.compiled_apart(of.model, ways.attn_fuse, options={"pick": "fused", "inner_backend": "aot_eager"})
    reference = Reference(of)
    assert all(reference.agrees(reference.of(run, seed)) for seed in range(2, 6))


def test_a_result_nearer_to_float64_than_eager_is_right() -> None:
    of = subject()

    class Rounds(nn.Module):
        """Rounds to 16 bits, except in float64."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight if x.dtype == torch.float64 else (x * self.weight).bfloat16().float()

    reference = Reference(Subject(Rounds(), of.inputs, False, (), 120.0))
    exactly = reference.of(lambda x: x.clone())
    assert reference.difference(exactly) > 1e-3 and reference.agrees(exactly)
    assert not reference.agrees(reference.of(lambda x: x * 1.1))
    assert not reference.agrees(reference.of(lambda x: x * math.nan))


def test_math_is_torchs_formula() -> None:
    of = subject()
    seen: list[str] = []

    def noting(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        monkey.setattr(ways, "compile_with", lambda backend, mode, graph, inputs: graph.forward)
        run = Held(SDPBackend.MATH)(graph, inputs)
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return run

    with pytest.MonkeyPatch.context() as monkey, torch.no_grad():
        options = {"pick": "fused", "kernels": ["cpu_flash"], "inner_backend": noting}
        run = ways.compiled_apart(of.model, ways.attn_fuse, options=options)
        torch.testing.assert_close(run(*of.inputs.args), of.model(*of.inputs.args))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as record:
            run(*of.inputs.args)
    assert any("math_attention" in name for name in seen)
    names = {event.name for event in record.events()}
    assert "aten::_scaled_dot_product_attention_math" in names
    assert not any("flash" in name for name in names)


@pytest.mark.thorough
def test_a_programs_own_calls_are_held_too(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    found = measured(subject(calls_sdpa=True), ("cpu_flash",))
    forced = {name: row for row in found.rows for name in row.names}
    assert forced["SDPA math"].fused == 1 and forced["cpu_flash (SDPA flash)"].fused == 1
    assert forced["SDPA math"] is not forced["cpu_flash (SDPA flash)"]


def one(mode: str = "inference") -> Measured:
    timing = Timing(2e-3, 1.9e-3, 2.2e-3, 9)
    rows = (
        Row((EAGER,), 0, 2, {}, 1e-3, 0.0, timing, 5 << 20),
        Row((INDUCTOR,), 0, 2, {}, 4.0, 1e-7, Timing(1e-3, 0.9e-3, 1.1e-3, 9), 3 << 20),
        Row((PICKED, FUSED), 2, 2, {"cpu_flash": 2}, 5.0, 2e-7, Timing(0.5e-3, 0.4e-3, 0.7e-3, 9), 1 << 20),
        Row(("chunked",), 2, 2, {"chunked": 2}, 5.0, 0.5, problem=DIFFERS),
    )
    words = "GPT(int64[1, 8]), inference, float32 on cpu"
    return Measured(mode, words, ("said",), rows, {"flex": "why"}, False, 0.5)


def test_the_table_has_what_the_json_has() -> None:
    text = model_command._text(one())
    for words in ("0.50", "0.25", "3.0 MiB", "2 of 2", "2.0e-07", "5.00 s", "note: flex is no row: why",
                  "note: other programs took 50% of the cores"):  # fmt: skip
        assert words in text, f"{words} is not in\n{text}"
    found = json.loads(json.dumps(one().as_json()))
    assert [row["timing"] and row["timing"]["median"] for row in found["rows"]] == [2e-3, 1e-3, 0.5e-3, None]
    assert found["rows"][2]["peak"] == 1 << 20 and found["rows"][2]["name"] == f"{PICKED} = {FUSED}"


def test_the_page_has_the_notes_and_a_bar_for_each_figure() -> None:
    figures = model_command._figures(one())
    assert "other programs took 50% of the cores meanwhile" in "".join(figures.notes)
    shares = [[cell.share for cell in row if isinstance(cell, Bar)] for row in figures.rows]
    assert shares == [[1.0, 1.0], [0.5, 0.6], [0.25, 0.2], []]
    page = Explanation("M()", ()).html([figures])
    assert "note" in page and "other programs took 50% of the cores" in page
    assert re.findall(r"width: ([\d.]+)%", page) == ["100", "100", "50", "60", "25", "20"]


def test_json_has_no_infinity() -> None:
    found = replace(one(), rows=(Row((EAGER,), difference=math.inf),))
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["rows"][0]["difference"] is None


def test_as_a_command(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    quick(monkeypatch)
    folder = file.parent
    arguments = f"model {file} --length 16 --kernels chunked --seconds 0.02"
    files = f" --json {folder / 'out.json'} --html {folder / 'out.html'}"
    assert main((arguments + files).split()) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Attention(float32[1, 16, 16]), inference, float32 on cpu")
    assert "), training, float32 on cpu" in captured.out and "Traceback" not in captured.err
    data = json.loads((folder / "out.json").read_text())
    assert data["machine"]["threads"] == torch.get_num_threads()
    found = data["measured"]
    assert [one["mode"] for one in found] == ["inference", "training"]
    for one_mode in found:
        for row in one_mode["rows"]:
            assert row["timing"], row
            line = next(line for line in captured.out.splitlines() if line.startswith(" = ".join(row["names"]) + " "))
            assert line
    page = unescape((folder / "out.html").read_text())
    assert "Inference, measured" in page and "A training step, measured" in page and "<h3>What is computed</h3>" in page
    assert all(f"<tr><th>{' = '.join(row['names'])}<td>" in page for row in found[0]["rows"])
    assert f"python -m attn_fuse.bench {arguments}" in page


def test_interrupted_it_keeps_the_first_mode(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def once(of: Subject, *_: Any) -> Measured:
        if of.train:
            raise KeyboardInterrupt
        return one()

    monkeypatch.setattr(model_command, "measure", once)
    path = file.parent / "out.json"
    assert main(["model", str(file), "--length", "16", "--json", str(path)]) == 130
    captured = capsys.readouterr()
    assert "interrupted" in captured.err and "median (quartiles)" in captured.out
    assert [m["mode"] for m in json.loads(path.read_text())["measured"]] == ["inference"]


def test_a_model_without_gradients_has_inference_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "frozen.py"
    frozen = FILE.replace("return scores", "return (scores").replace("@ self.value(x)", "@ self.value(x)).detach()")
    path.write_text(frozen)

    def once(of: Subject, *_: Any) -> Measured:
        of.call(of.model)
        return one()

    monkeypatch.setattr(model_command, "measure", once)
    assert main(["model", str(path), "--length", "16"]) == 0
    assert "note: training is left out: --train: no output needs a gradient" in capsys.readouterr().out
    assert main(["model", str(path), "--length", "16", "--train"]) == 2
