"""Private parts of torch's attention kernels and devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def cuda_driver() -> str:
    """The system's line on NVIDIA's driver, or else the driver's CUDA version; "" without one."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return str(getattr(torch._C, "_cuda_getDriverVersion", str)())


def cuda_sleep(cycles: int) -> None:
    """Idle the current GPU for `cycles` of its clock, on the current stream."""
    torch.cuda._sleep(cycles)


def sdpa_choice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> int:
    """The `torch.nn.attention.SDPBackend` that SDPA would run on these real tensors."""
    return int(torch._fused_sdp_choice(query, key, value, mask, dropout_p, is_causal, enable_gqa=enable_gqa))


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: Any,
    scale: float,
    score_read: Sequence[torch.Tensor],
    mask_read: Sequence[torch.Tensor],
    lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention's (out, lse), traceable, unlike `torch.nn.attention.flex_attention`, which compiles itself.

    out: [batch, heads, q_len, value_dim]. lse: [batch, heads, q_len], natural logarithm, valid only if `lse`.
    block_mask: a `BlockMask`. score_read, mask_read: further tensors for `score_mod` and the mask_mod of `block_mask`.
    """
    on_cpu = query.device.type == "cpu"
    queries = query.shape[2] * (query.shape[1] // key.shape[1])
    # Its kernel for few queries has one tile for all queries of a key head, which must fit into a block of the mask
    # (torch 2.11 to 2.15: NoValidChoicesError).
    fits = on_cpu or (isinstance(queries, int) and queries <= block_mask.BLOCK_SIZE[0])
    options = {
        "BACKEND": "AUTO" if fits else "TRITON",
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": not on_cpu and (lse or torch.is_grad_enabled()),
        "OUTPUT_MAX": False,
    }
    # Autocast would round query, key and value inside the operator.
    with torch.autocast(query.device.type, enabled=False):
        out, log2_sum, *_ = torch.ops.higher_order.flex_attention(
            query, key, value, score_mod, block_mask.as_tuple(), scale, options, tuple(score_read), tuple(mask_read)
        )
    return out, log2_sum * math.log(2.0) if lse else log2_sum


def flex_differentiates_what_it_reads() -> bool:
    """Whether traced FlexAttention gives gradients to tensors read by its score function (since torch 2.15)."""
    return bool(torch.__version__ >= "2.15")


def flex_runs_on_cpu() -> bool:
    """Whether Inductor supports FlexAttention on this CPU."""
    from torch._inductor.kernel.flex.flex_cpu import check_cpu_supported

    return bool(check_cpu_supported())


def sdpa_switches() -> tuple[bool, bool, bool, bool]:
    """Whether SDPA may run flash, efficient, math, cuDNN; the public names are 4 times as slow on every call."""
    c = torch._C
    return (
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
    )
