"""Seen: a tensor to be recognised later, with the same contents, without a reference to it, strong or weak.

A strong reference keeps the tensor's memory; `torch.utils.swap_tensors` refuses a tensor with a weak one, and moves of
a module whose weights are of a subclass swap them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from attn_fuse.torch_internals import StorageWeakRef


@dataclass(frozen=True, slots=True)
class Seen:
    """What tells one plain tensor, as it is now, from all others that will ever be.

    attributes: its dictionary of attributes. No other tensor has it, and `swap_tensors` moves it with the contents.
    version: the number of writes into the tensor and its views; None where torch does not count them.
    memory: its storage; while this is held, no other storage gets its id, though it may get its address.
    """

    attributes: dict[str, Any] = field(repr=False)
    version: int | None
    address: int
    memory: StorageWeakRef

    @classmethod
    def now(cls, tensor: torch.Tensor) -> Seen:
        """`tensor` as it is now."""
        memory = StorageWeakRef(tensor.untyped_storage())
        return cls(tensor.__dict__, _version_of(tensor), tensor.data_ptr(), memory)

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is this one, and nothing was written into it since that torch counts."""
        return (
            tensor.__dict__ is self.attributes
            and _version_of(tensor) == self.version
            and tensor.data_ptr() == self.address
            and tensor.untyped_storage()._cdata == self.memory.cdata
        )


def _version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
