"""The versions, the device and the kernels of this machine, for ``python -m attn_fuse info``."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from attn_fuse import backend
from attn_fuse.explain import compiled_apart
from attn_fuse.kernels import KERNELS, triton
from attn_fuse.picker import evidence
from attn_fuse.picker.timing import this_device
from attn_fuse.report import collecting, version

# A kernel runs here if it takes the plainest attention in one of these dtypes.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m attn_fuse info", description=__doc__)
    parser.parse_args(argv)
    print(table())
    return 0


def table() -> str:
    """Lines for the versions, the device and its evidence; then one for each kernel, with the dtypes or reasons."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [
        f"{'attn_fuse':<16}{version()}",
        f"{'Python':<16}{platform.python_version()}",
        f"{'torch':<16}{torch.__version__}",
        f"{'Triton':<16}{triton.version() or 'not installed'}",
        f"{'device':<16}{device.type}: {this_device(device)}",
        *(f"{'evidence' if not n else '':<16}{line}" for n, line in enumerate(evidence_on(device.type))),
        f"{'explain --on':<16}{', '.join(gpu.name for gpu in evidence.gpus())}",
        "",
        f"{'kernel':<16}{'runs here':<12}in, or why not",
    ]
    refused = {dtype: why_not(dtype, device) for dtype in _DTYPES}
    for kernel in KERNELS:
        taken = [str(dtype).removeprefix("torch.") for dtype in _DTYPES if not refused[dtype][kernel.name]]
        said = ", ".join(taken) or "; ".join(dict.fromkeys(r for of in refused.values() for r in of[kernel.name]))
        lines.append(f"{kernel.name:<16}{'yes' if taken else 'no':<12}{said}")
    return "\n".join(lines)


def evidence_on(device_type: str) -> list[str]:
    """A line for each table of measured times that the picker uses on this type of device."""
    return [
        f"{len(known.rows)} attentions on {known.device}, torch {known.torch}{', measured here' if known.own else ''}"
        for known in evidence.tables()
        if known.device.type == device_type
    ] or ["none: the picker estimates"]


def why_not(dtype: torch.dtype, device: torch.device) -> dict[str, tuple[str, ...]]:
    """By kernel: every reason why it cannot run the plainest attention here, without gradients."""
    found: dict[str, tuple[str, ...]] = {}

    # The graph runs as written, so that no kernel is compiled for the question.
    def ask(graph: GraphModule, operands: Sequence[Any]) -> GraphModule:
        for kernel in KERNELS:
            with collecting() as reports:
                backend.analyze_only(graph, operands, options={"kernels": [kernel.name]})
            (site,) = reports[0].sites
            found[kernel.name] = () if site.fused else site.why_not.get(kernel.name, ("it cannot be asked",))
        return graph

    with torch.no_grad():
        compiled_apart(_plain, ask)(*(torch.zeros(1, 8, 256, 64, dtype=dtype, device=device) for _ in range(3)))
    return found


def _plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) / 8).softmax(-1) @ value
