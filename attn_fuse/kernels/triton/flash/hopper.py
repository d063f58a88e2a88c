"""triton_flash_hopper: the kernels of triton_flash, reading through tensor descriptors, for Hopper GPUs.

Taken: what triton_flash takes, with 16-bit operands; where the copy engine cannot read an operand in place, a call
reads all by pointers. Declined: rows that are no multiple of 16 bytes. Descriptors need fewer registers for addresses,
so that some kernels have larger tiles; which of the two is faster has to be measured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.kernels.kernel import Kernel, Reach
from attn_fuse.kernels.triton import INTERPRETED
from attn_fuse.kernels.triton.flash import kernel as triton_flash

HOPPER = (9, 0)


def limits(attention: Attention, facts: Facts) -> Iterator[str]:
    """The reasons of triton_flash, another capability, and rows that are no multiple of 16 bytes."""
    if facts.device.type == "cuda" and torch.cuda.get_device_capability(facts.device) != HOPPER:
        yield "runs on GPUs of compute capability 9.0 only"
    for name in ("head_dim", "value_dim"):
        size = getattr(facts, name)
        if name not in facts.symbolic and size * facts.dtype.itemsize % 16:
            yield f"takes a {name} of a multiple of 16 bytes, not {size}"
    yield from triton_flash.limits(attention, facts)


_HALF = {torch.float16, torch.bfloat16}
TRITON_FLASH_HOPPER = Kernel(
    name="triton_flash_hopper",
    devices=triton_flash.TRITON_FLASH.devices,
    dtypes=frozenset(_HALF | {torch.float32} if INTERPRETED else _HALF),
    limits=limits,
    emit=functools.partial(triton_flash.emit, descriptors=True),
    needs_evidence=True,
    reach={"cuda": Reach(0.47, 0.38, launches=2, dropout=1.5)},
)
