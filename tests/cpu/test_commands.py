"""``python -m attn_fuse``: the commands, and what `info` says of this machine."""

from __future__ import annotations

import subprocess
import sys

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
    rows = (Row(case, {AS_WRITTEN: 2.0, "cudnn": 1.0}, {"cudnn": 9.0}), Row(case, {AS_WRITTEN: 2.0}))
    tables = (Table(Device("cuda", "A GPU"), "2.11.0", rows), Table(Device("cuda", "B"), "2.10.0", rows[1:], own=True))
    monkeypatch.setattr(info.evidence, "tables", lambda: tables)
    assert info.evidence_on("cuda") == [
        "2 attentions on A GPU, torch 2.11.0, by GPU time",
        "1 attentions on B, torch 2.10.0, by GPU time, its waits for the host included, measured here",
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
