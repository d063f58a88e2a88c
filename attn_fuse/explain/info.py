"""Info: the versions, the device and the kernels of this machine, for ``python -m attn_fuse info``."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_fuse.explain import explanation_of
from attn_fuse.explain.inputs import Inputs
from attn_fuse.kernels import KERNELS
from attn_fuse.picker.timing import this_device
from attn_fuse.report import version

# A kernel runs here if it takes the plainest attention in one of these dtypes.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m attn_fuse info", description=__doc__)
    parser.parse_args(argv)
    print(table())
    return 0


def table() -> str:
    """The table: a line for each version and for the device, then a line for each kernel and why it cannot run here."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [
        f"{'attn_fuse':<16}{version()}",
        f"{'Python':<16}{platform.python_version()}",
        f"{'torch':<16}{torch.__version__}",
        f"{'Triton':<16}{_triton()}",
        f"{'device':<16}{device.type}: {this_device(device)}",
        "",
        f"{'kernel':<16}{'runs here':<12}in, or why not",
    ]
    for kernel in KERNELS:
        refused = {dtype: why_not(kernel.name, dtype, device) for dtype in _DTYPES}
        taken = [str(dtype).removeprefix("torch.") for dtype, reasons in refused.items() if not reasons]
        said = ", ".join(taken) or "; ".join(dict.fromkeys(r for reasons in refused.values() for r in reasons))
        lines.append(f"{kernel.name:<16}{'yes' if taken else 'no':<12}{said}")
    return "\n".join(lines)


def why_not(kernel: str, dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """Every reason why the kernel of this name cannot run the plainest attention here, without gradients."""
    operands = [torch.zeros(1, 8, 256, 64, dtype=dtype, device=device) for _ in range(3)]
    with torch.no_grad():
        found = explanation_of(_plain, Inputs(tuple(operands)), lambda run: run(*operands), {"kernels": [kernel]})
    (site,) = found.sites
    return () if site.fused else site.why_not.get(kernel, ("it cannot be asked",))


def _plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * 64**-0.5).softmax(-1) @ value


def _triton() -> str:
    for name in ("triton", "pytorch-triton"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"
