"""KERNELS: all kernels. Asked to fuse everything, the picker takes the first that can run an attention."""

from attn_fuse.kernels.chunked.kernel import CHUNKED
from attn_fuse.kernels.flex.kernel import FLEX
from attn_fuse.kernels.sdpa import CPU_FLASH, CUDA_EFFICIENT, CUDA_FLASH, CUDNN
from attn_fuse.kernels.triton.flash.kernel import TRITON_FLASH

__all__ = ["CHUNKED", "KERNELS"]

KERNELS = (
    CUDNN,
    CUDA_FLASH,
    CUDA_EFFICIENT,
    CPU_FLASH,
    FLEX,
    TRITON_FLASH,
    CHUNKED,
)
