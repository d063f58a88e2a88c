"""Tensor descriptors: what Hopper's copy engine reads blocks of a tensor through, with 0 for what is beyond its end.

It reads tensors that have elements, whose last dimension is dense and a multiple of 16 bytes wide, whose other steps
are such multiples, and whose first element stands at one.
"""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_fuse.kernels.triton.launch import ALIGNMENT


def is_readable(x: Tensor) -> bool:
    size, (*shape, width), (*steps, last) = x.element_size(), x.shape, x.stride()
    return (
        x.numel() > 0
        and (last == 1 or width == 1)
        and width * size % ALIGNMENT == 0
        and all(n == 1 or (step > 0 and step * size % ALIGNMENT == 0) for n, step in zip(shape, steps, strict=True))
        and x.data_ptr() % ALIGNMENT == 0
    )


def described(x: Tensor, *block: int) -> TensorDescriptor:
    """`x`, which is readable, in blocks of [1, 1, *block]."""
    # A dimension of one element may have any step; it is given one that the descriptor takes.
    least = ALIGNMENT // x.element_size()
    steps = [step if n > 1 else least for n, step in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*steps[:-1], 1], [1, 1, *block])
