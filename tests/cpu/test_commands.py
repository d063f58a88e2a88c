"""``python -m attn_fuse``: the commands, and what `info` says of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attn_fuse
from attn_fuse.__main__ import COMMANDS, main
from attn_fuse.bench import command as bench
from attn_fuse.explain import info
from attn_fuse.kernels import KERNELS
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN, Row, Table
from attn_fuse.picker.timing import Device


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_the_commands_are_listed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in ("explain", "bench", "info"))


def test_an_unknown_command_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explian"]) == 2
    assert capsys.readouterr().err == "attn_fuse: there is no command 'explian'. Did you mean 'explain'?\n"


@pytest.mark.parametrize(
    "command", [*([name] for name in COMMANDS if name != "bench"), *(["bench", name] for name in bench.COMMANDS)]
)
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main([*command, "--help"])
    assert exit.value.code == 0 and "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["bench"], ["bench", "--help"]])
def test_the_commands_of_bench_are_listed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in ("model", "sweep", "nanogpt", "calibrate"))


def test_a_command_gets_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "nothing_here.py"]) == 2
    assert "nothing_here.py: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--calibrate", "there is no command '--calibrate'. Did you mean 'calibrate'?"),
        ("calibrate --show --forget", "not allowed with"),
        ("calibrate --show --device tpu", "--device tpu: it is cpu or cuda"),
        ("calibrate --show --device meta", "--device meta: it is cpu or cuda"),
        ("calibrate --minutes 0", "argument --minutes: '0' is not a number above 0"),
        ("calibrate --minutes soon", "argument --minutes: 'soon' is not a number above 0"),
        ("calibrate --lengths 16 0", "argument --lengths: '0' is not a whole number above 0"),
        ("calibrate --heads 0", "argument --heads: '0' is not a whole number above 0"),
        ("calibrate --fast", "unrecognized arguments: --fast"),
        ("model", "the following arguments are required: path"),
        ("model nowhere.py", "nowhere.py: no such file"),
        ("model {file} --train --inference", "--train and --inference each ask for one of the two"),
        ("model {file} --seconds 0", "'0' is not a number above 0"),
        ("model {file} --length 16 --kernels flash", "attn_fuse has no kernel 'flash'."),
        ("model {file} --length 16 --kernels cudnn", "--kernels cudnn: it does not run on this device"),
        ("model {file} --json /nowhere/out.json", "--json /nowhere/out.json: it cannot be written"),
        ("model {file} --html /nowhere/out.html", "--html /nowhere/out.html: it cannot be written"),
        ("model {file} --device tpu", "--device 'tpu' cannot be used"),
        ("model {file} --fast", "unrecognized arguments: --fast"),
        ("nanogpt --width 30 --heads 4 --device cpu", "--width 30: it is a multiple of --heads, which is 4"),
        ("nanogpt --layers few", "'few' is not a whole number above 0"),
        ("sweep --lengths 0", "'0' is not a whole number above 0"),
        ("sweep --masks diagonal", "invalid choice: 'diagonal'"),
        ("sweep --dtype int8", "invalid choice: 'int8'"),
        ("sweep --device tpu", "--device tpu: it is cpu or cuda"),
        ("sweep --device cpu --kernels cudnn", "--kernels cudnn: it does not run on this device"),
        ("sweep --device cpu --kernels chunk", "attn_fuse has no kernel 'chunk'. Did you mean 'chunked'?"),
        ("sweep --json /nowhere/a.json", "--json /nowhere/a.json: it cannot be written"),
        ("sweep --seconds nan", "'nan' is not a number above 0"),
        ("sweeps", "there is no command 'sweeps'. Did you mean 'sweep'?"),
    ],
)
def test_an_error_of_bench_is_one_line(
    arguments: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "written.py"
    path.write_text("from torch import nn\n\nclass Layer(nn.Module):\n    def forward(self, x):\n        return x\n")
    assert bench.main(arguments.format(file=path).split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("attn_fuse.bench: ") and words in captured.err


def test_it_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "attn_fuse"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: python -m attn_fuse COMMAND")


def test_info_has_versions_and_every_kernel_with_the_reason_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuses_halves(dtype: torch.dtype, device: torch.device) -> dict[str, tuple[str, ...]]:
        asked.append((dtype, device.type))
        refused = () if dtype == torch.float32 else (f"does not take {dtype}",)
        return {kernel.name: refused for kernel in KERNELS} | {"cudnn": ("runs on cuda, not on cpu",)}

    monkeypatch.setattr(info, "why_not", refuses_halves)
    lines = info.table().splitlines()
    assert ["torch", torch.__version__] in [line.split() for line in lines]
    rows = {line.split()[0]: line for line in lines[lines.index("") + 2 :]}
    assert list(rows) == [kernel.name for kernel in KERNELS]
    assert rows["cudnn"].split(maxsplit=2) == ["cudnn", "no", "runs on cuda, not on cpu"]
    assert rows["chunked"].split(maxsplit=2) == ["chunked", "yes", "float32"]
    assert len(asked) == 4


def test_info_says_what_the_evidence_is(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("bfloat16", False, 1, 8, 64, 64, 64)
    rows = (Row(case, {AS_WRITTEN: 2.0, "cudnn": 1.0}), Row(case, {AS_WRITTEN: 2.0}))
    tables = (Table(Device("cuda", "A GPU"), "2.11.0", rows), Table(Device("cuda", "B"), "2.10.0", rows[1:], own=True))
    monkeypatch.setattr(info.evidence, "tables", lambda: tables)
    assert info.evidence_on("cuda") == [
        "2 attentions on A GPU, torch 2.11.0",
        "1 attentions on B, torch 2.10.0, measured here",
    ]
    assert info.evidence_on("cpu") == ["none: the picker estimates"]


def test_info_asks_the_kernels() -> None:
    refused = info.why_not(torch.float32, torch.device("cpu"))
    assert list(refused) == [kernel.name for kernel in KERNELS]
    assert refused["chunked"] == () and refused["cuda_flash"] == ("runs on cuda, not on cpu",)


def test_dir_has_the_public_names_alone() -> None:
    names = dir(attn_fuse)
    assert {"explain", "reports", "use_kernels", "__version__"} <= set(names)
    assert set(names) == set(attn_fuse.__all__) and all(hasattr(attn_fuse, name) for name in names)
    assert attn_fuse.__version__ == "unknown" or attn_fuse.__version__[0].isdigit()
