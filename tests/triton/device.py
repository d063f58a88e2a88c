"""A pretended Hopper GPU for Triton's own launcher: `driver.c`, built with the C compiler that Triton needs.

    environment = pretend(folder)     # for a process that imports torch and Triton anew, and then calls `use()`

In that process Triton compiles for sm_90 and launches on tensors of the CPU. Nothing runs, but launches that a real
driver would refuse raise.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton

SOURCE = Path(__file__).with_name("driver.c")
ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path) -> Path:
    """Build the driver as a library in `folder`, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    built = folder / "libcuda.so.1"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, str(SOURCE), "-o", str(built)], check=True, capture_output=True, text=True)
    # Triton's helper links against this name.
    (folder / "libcuda.so").unlink(missing_ok=True)
    (folder / "libcuda.so").symlink_to(built)
    return built


def pretend(folder: Path) -> dict[str, str]:
    """Build the driver in `folder`, and return the environment of a process that uses it. folder/log logs launches."""
    build(folder)
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return found | {
        "LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder), "FAKE_CUDA_LOG": str(folder / "log"),
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip


def use() -> None:
    """Make Triton and our package believe in that GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
    from triton.runtime import driver

    from attn_fuse.kernels.triton.flash import facts as flash_facts

    made: Any = SimpleNamespace(
        utils=CudaUtils(),
        launcher_cls=CudaLauncher,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_device_interface=lambda: torch.cuda,
    )
    driver.set_active(made)
    flash_facts._capability = lambda device: 9  # type: ignore[assignment]


def launches(folder: Path) -> list[tuple[str, int]]:
    """The kernels launched so far, each with its number of programs."""
    words = (line.split() for line in _log(folder))
    return [(of[1], int(of[2]) * int(of[3]) * int(of[4])) for of in words]


def threads(folder: Path) -> list[int]:
    """The number of threads per program of each launch so far."""
    return [int(line.split()[5]) for line in _log(folder)]


def _log(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
