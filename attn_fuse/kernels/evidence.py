"""Evidence: measured times of an attention as written and on a kernel, from which the picker estimates.

The tables lie beside this file, by device, as benchmarks/crossover.py and benchmarks/chunked.py write them.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attn_fuse.attention import Attention
from attn_fuse.facts import Facts

# What a graph with growing sequences is judged at: its first call is short, but its time goes into the long ones.
_TYPICAL_LENGTH = 1024


@dataclass(frozen=True)
class Comparison:
    """A kernel's time over the time as written, where it was measured nearest to the attention asked about."""

    ratio: float
    where: str


def compare(kernel: str, attention: Attention, facts: Facts) -> Comparison | None:
    """The nearest measurement of `kernel`, or None where nothing like it was measured on this kind of device."""
    rows = [row for row in table(facts.device.type) if f"{kernel}_us" in row]
    if not rows:
        return None
    row = min(rows, key=lambda r: _distance(r, attention, facts))
    where = (
        f"{row['mask']} mask, {'training' if row['training'] else 'inference'}, {row['dtype']}, "
        f"{row['batch']} x {row['heads']} heads, q_len {row['q_len']}, kv_len {row['kv_len']}"
    )
    return Comparison(row[f"{kernel}_us"] / row["as_written_us"], where)


@functools.cache
def table(device: str) -> tuple[dict[str, Any], ...]:
    """The measurements on this kind of device; none if there is no table."""
    paths = sorted(Path(__file__).parent.glob(f"evidence_{device}*.json"))
    return tuple(row for path in paths for row in json.loads(path.read_text())["rows"])


def _distance(row: dict[str, Any], attention: Attention, facts: Facts) -> float:
    lengths = {
        name: max(getattr(facts, name), _TYPICAL_LENGTH) if name in facts.symbolic else getattr(facts, name)
        for name in ("q_len", "kv_len")
    }
    q_len, kv_len = (max(length, 1) for length in lengths.values())
    # What decides is whether the scores stay in cache, so their number counts most; then how many keys a query has.
    scores = facts.batch * facts.heads * q_len * kv_len
    apart = abs(math.log2(row["batch"] * row["heads"] * row["q_len"] * row["kv_len"] / max(scores, 1)))
    apart += abs(math.log2((row["q_len"] / row["kv_len"]) / (q_len / kv_len)))
    apart += 0.25 * abs(math.log2(row["kv_len"] / kv_len))
    apart += 4.0 * (row["mask"] != _mask_kind(attention))
    apart += 4.0 * (row.get("beyond", "") != _beyond_sdpa(attention, facts))
    apart += 8.0 * (row["training"] != facts.training)
    apart += 2.0 * ((row["dtype"] in ("bfloat16", "float16")) != (facts.dtype in (torch.bfloat16, torch.float16)))
    return apart


def _mask_kind(attention: Attention) -> str:
    if attention.biases:
        return "bias"
    if attention.mask.is_causal:
        return "causal"
    return "bool" if attention.mask.parts else "none"


def _beyond_sdpa(attention: Attention, facts: Facts) -> str:
    """What of `attention` the kernels of SDPA do not take everywhere."""
    if attention.score_mod is not None or attention.softcap is not None or attention.factor is not None:
        return "function"
    if attention.dropout_p is not None:
        return "dropout"
    return "gradient" if facts.bias_needs_grad else ""
