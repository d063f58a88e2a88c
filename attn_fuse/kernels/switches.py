"""Switches: torch's own settings that a choice of kernel has to honour, and why they rule a kernel out.

`torch.nn.attention.sdpa_kernel` and `torch.backends.cuda.enable_*_sdp` rule out the kernels behind
`scaled_dot_product_attention` that they switch off; ours are none of these. `torch.use_deterministic_algorithms` rules
out kernels whose gradients depend on the order in which threads finish. The float32 matmul precision rules nothing
out: no kernel here goes below it. `float32_precision` asks for it by the newer of torch's two ways, which also knows
what was set by the older; the older raises once the newer was used.

Dynamo compiles again when the determinism or the matmul precision changes, but not for the SDPA switches (tried on
2.11, 2.13, 2.15), so these are compared on every call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from attn_fuse.attention.facts import Facts
from attn_fuse.torch_internals import sdpa_switches


class Switches(NamedTuple):
    """Which backends of SDPA may run; whether algorithms have to be deterministic, and whether others only warn."""

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
    """What torch's float32 products are computed in: "ieee" (all of float32), "tf32" or, on a CPU alone, "bf16"."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    said = backend.matmul.fp32_precision
    return "ieee" if said == "none" else said


# The switch that each kernel of SDPA is behind.
_BEHIND = {"cpu_flash": "flash", "cuda_flash": "flash", "cuda_efficient": "efficient", "cudnn": "cudnn"}
_OFF_BY = {"flash": "enable_flash_sdp", "efficient": "enable_mem_efficient_sdp", "cudnn": "enable_cudnn_sdp"}


def forbidden(kernel: str, facts: Facts, switches: Switches) -> Iterator[str]:
    """The reasons why torch's settings keep `kernel` from running."""
    behind = _BEHIND.get(kernel)
    if behind is not None and not getattr(switches, behind):
        yield (
            f"{behind} attention is switched off (torch.nn.attention.sdpa_kernel or "
            f"torch.backends.cuda.{_OFF_BY[behind]})"
        )
    if switches.deterministic and (facts.training or facts.bias_needs_grad):
        reason = _not_deterministic(kernel, facts, switches)
        if reason:
            yield f"torch.use_deterministic_algorithms is on, and {reason}"


def _not_deterministic(kernel: str, facts: Facts, switches: Switches) -> str:
    # FA2 and, unless it is only to warn, the efficient kernel go over to a deterministic backward by themselves; CPU
    # flash, chunked and the Triton kernels never had another.
    match kernel:
        case "cudnn":
            return "its backward is not deterministic"
        case "cuda_efficient" if switches.warns_only:
            return "its backward is not deterministic while torch is only to warn"
        case "flex" if facts.bias_needs_grad:
            return "it adds up the gradient of a bias by atomics"
    return ""
