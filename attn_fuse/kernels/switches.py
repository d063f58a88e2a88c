"""Switches: torch's settings that rule out kernels.

`torch.nn.attention.sdpa_kernel` and `torch.backends.cuda.enable_*_sdp` rule out kernels behind
`scaled_dot_product_attention`, never ours. `torch.use_deterministic_algorithms` rules out kernels whose gradients
depend on the order in which threads finish. The float32 matmul precision rules none out, since every kernel here keeps
it. `float32_precision` reads it through torch's newer interface, which also sees settings of the older one; the older
one raises once the newer was used.

Dynamo recompiles when determinism or matmul precision changes, but not for the SDPA switches (tried on 2.11, 2.13,
2.15), so `guard` compares the SDPA switches on every call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from attn_fuse.attention.facts import Facts
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.torch_internals import sdpa_switches


class Switches(NamedTuple):
    """torch's settings. flash, efficient, math, cudnn: whether SDPA may run that backend.

    deterministic: whether algorithms must be deterministic. warns_only: whether torch only warns otherwise.
    """

    flash: bool = True
    efficient: bool = True
    math: bool = True
    cudnn: bool = True
    deterministic: bool = False
    warns_only: bool = False


def current() -> Switches:
    """torch's settings now."""
    return Switches(
        *sdpa_switches(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def float32_precision(device: torch.device) -> str:
    """The precision of torch's float32 products: "ieee" (full float32), "tf32" or, on a CPU only, "bf16"."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    said = backend.matmul.fp32_precision
    return "ieee" if said == "none" else said


def switch(switches: Switches, precision: str, device: torch.device) -> None:
    """Restore settings that `current` and `float32_precision` read, in a process of ours."""
    cuda = torch.backends.cuda
    sdpa = (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp, cuda.enable_cudnn_sdp)
    for enable, on in zip(sdpa, switches[:4], strict=True):
        enable(on)
    torch.use_deterministic_algorithms(switches.deterministic, warn_only=switches.warns_only)
    (cuda if device.type == "cuda" else torch.backends.mkldnn).matmul.fp32_precision = precision


_OFF_BY = {"flash": "enable_flash_sdp", "efficient": "enable_mem_efficient_sdp", "cudnn": "enable_cudnn_sdp"}


def forbidden(kernel: Kernel, facts: Facts, switches: Switches) -> Iterator[str]:
    """Every reason for which torch's settings rule out `kernel`."""
    if kernel.switch and not getattr(switches, kernel.switch):
        yield (
            f"{kernel.switch} attention is switched off (torch.nn.attention.sdpa_kernel or "
            f"torch.backends.cuda.{_OFF_BY[kernel.switch]})"
        )
    if switches.deterministic and (facts.training or facts.bias_needs_grad):
        reason = kernel.nondeterministic(facts, switches.warns_only)
        if reason:
            yield f"torch.use_deterministic_algorithms is on, and {reason}"
