"""Misassembled kernels: how they are detected, and which tiles run in their place."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attn_fuse.kernels.triton import assembled
from attn_fuse.kernels.triton.assembled import MisassembledError, is_misassembled, misdescribed

SCRIPT = Path(__file__).with_name("misassembled.py")
TRITON = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else ""
needs_triton = pytest.mark.skipif(not TRITON, reason="needs Triton")

if TRITON:
    from attn_fuse.kernels.triton.launch import Launch, misaligned


def code(*lines: str) -> str:
    return "\n".join(
        f"        /*{16 * n:04x}*/                   {line} ;   /* 0x00 */" for n, line in enumerate(lines)
    )


LOW, HIGH = "UIADD3 UR54, UP0, UR4, 0x20, URZ", "UIADD3.X UR55, UR4, -0x3ffffff0, URZ, UP0, !UPT"


@pytest.mark.parametrize(
    "lines",
    [
        [LOW, HIGH],
        [LOW, "IMAD R1, R2, R3, R4", "UMOV UR8, URZ", HIGH],
        [LOW, "@P1 R2UR UR5, R8", HIGH],
        ["UIADD3 UR54, UP1, UR4, 0x2, URZ", HIGH.replace("UP0", "UP1")],
    ],
)
def test_one_register_for_both_words_is_wrong(lines: list[str]) -> None:
    assert misdescribed(code(*lines)) == [lines[-1]]


@pytest.mark.parametrize(
    "lines",
    [
        [LOW, HIGH.replace("UR4", "URZ")],
        [LOW, HIGH.replace("UR4", "UR5")],
        [LOW, "UMOV UR4, URZ", HIGH],
        [LOW, "ULDC.64 UR4, c[0x0][0x288]", HIGH],
        [LOW, "@!P2 R2UR UR4, R8", HIGH],
        ["UIADD3 UR4, UP0, UR4, 0x20, URZ", HIGH],
        [LOW, "UIADD3 UR6, UP0, UR7, 0x20, URZ", HIGH],
        [HIGH, LOW],
    ],
)
def test_others_are_not(lines: list[str]) -> None:
    assert not misdescribed(code(*lines))


class Kernel:
    """The parts of a compiled kernel that the check reads, and a counter of launches."""

    def __init__(self, sass: str | None, ptx: str | None = "wgmma", spills: int = 8) -> None:
        self.asm = {"cubin": b""} | ({} if ptx is None else {"ptx": ptx})
        self.sass, self.n_spills, self.launched = sass, spills, 0
        self.function, self.packed_metadata = None, None
        self.__name__ = "kernel"

    def warmup(self, *_: Any, **__: Any) -> Kernel:
        return self

    def run(self, *_: Any) -> None:
        self.launched += 1


def is_wrong(kernel: Kernel, monkeypatch) -> bool:
    monkeypatch.setattr(assembled, "_machine_code", lambda cubin: kernel.sass)
    return is_misassembled(kernel)


def test_only_what_puts_registers_away_and_multiplies_by_groups_is_looked_at(monkeypatch) -> None:
    wrong = code(LOW, HIGH)
    assert is_wrong(Kernel(wrong), monkeypatch)
    assert not is_wrong(Kernel(wrong, ptx="mma.sync"), monkeypatch)
    assert not is_wrong(Kernel(wrong, spills=0), monkeypatch)
    assert not is_wrong(Kernel(code(LOW)), monkeypatch)
    # A kernel that cannot be checked is not trusted. A packed cache may lack the PTX.
    assert is_wrong(Kernel(None), monkeypatch)
    assert is_wrong(Kernel(wrong, ptx=None), monkeypatch)
    other = Kernel(wrong)
    other.asm = {"amdgcn": ""}
    assert not is_wrong(other, monkeypatch)


@needs_triton
def test_a_wrong_kernel_is_never_launched(monkeypatch) -> None:
    wrong, looked = Kernel(code(LOW, HIGH)), []  # type: Kernel, list[bytes]

    def machine_code(cubin: bytes) -> str | None:
        looked.append(cubin)
        return wrong.sass

    monkeypatch.setattr(assembled, "_machine_code", machine_code)
    launch = Launch(wrong, 1, ())
    for again in (launch, launch, Launch(wrong, 1, ())):
        with pytest.raises(MisassembledError, match="kernel was assembled wrongly by ptxas"):
            again(0, ())
    assert not wrong.launched
    # Decoding uses its kernel for every token, so the code is checked once only.
    assert len(looked) == 1
    right = Kernel(code(LOW))
    monkeypatch.setattr(assembled, "_machine_code", lambda cubin: right.sass)
    launch = Launch(right, 1, ())
    for _ in range(2):
        launch(0, ())
    assert right.launched == 2


@needs_triton
def test_tensors_that_are_not_aligned_have_a_kernel_of_their_own(monkeypatch) -> None:
    monkeypatch.setattr(assembled, "_machine_code", lambda cubin: code(LOW))
    made: list[Kernel] = []

    def warmup(*_: Any, **__: Any) -> Kernel:
        made.append(Kernel(code(LOW)))
        return made[-1]

    launch = Launch(SimpleNamespace(warmup=warmup), 1, ())
    aligned, shifted = (SimpleNamespace(data_ptr=lambda at=at: at) for at in (32, 34))
    for pointers in ((aligned, None), (shifted, None), (aligned, shifted), (shifted, None)):
        launch(0, misaligned(*pointers))
    assert [kernel.launched for kernel in made] == [1, 2, 1]
    assert misaligned(aligned, None) == () != misaligned(aligned, shifted)


@needs_triton
def test_an_empty_grid_is_not_launched() -> None:
    Launch(None, 0, ())(0, ())


@pytest.mark.thorough
@pytest.mark.skipif(not TRITON.startswith("3.6."), reason="the mistake is of Triton 3.6's ptxas")
def test_smaller_tiles_run_in_its_place(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = SCRIPT.parents[2]
    environment |= {
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'benchmarks'}",
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    # Both calls, with random values and with columns of the identity, began with wide tiles.
    assert said["wrong"] >= 1 and said["compiled"] > said["wrong"], said
    assert said["rows of a tile"] == [32], said
