"""Tensor descriptors: through them Hopper's copy engine reads blocks of a tensor, with 0 beyond its end.

The copy engine reads tensors that are not empty, whose last dimension is dense and a multiple of 16 bytes wide, and
whose other strides and first address are multiples of 16 bytes.
"""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_fuse.kernels.triton.launch import ALIGNMENT


def is_readable(x: Tensor) -> bool:
    """Whether the copy engine can read `x`."""
    size, (*shape, width), (*steps, last) = x.element_size(), x.shape, x.stride()
    return (
        x.numel() > 0
        and (last == 1 or width == 1)
        and width * size % ALIGNMENT == 0
        and all(n == 1 or (step > 0 and step * size % ALIGNMENT == 0) for n, step in zip(shape, steps, strict=True))
        and x.data_ptr() % ALIGNMENT == 0
    )


def described(x: Tensor, *block: int) -> TensorDescriptor:
    """A descriptor of `x`, which is readable, for blocks of [1, 1, *block]."""
    # The stride of a dimension of size 1 does not matter, but the descriptor takes multiples of 16 bytes only.
    least = ALIGNMENT // x.element_size()
    steps = [step if n > 1 else least for n, step in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*steps[:-1], 1], [1, 1, *block])
