"""The arguments of a model, written as dtypes and shapes, or as Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_fuse.graph.names import tensors_of


@dataclass(frozen=True)
class Inputs:
    """The arguments of a model, by position and by name. As text: their dtypes and shapes."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join([*map(_in_words, self.args), *(f"{name}={_in_words(v)}" for name, v in self.kwargs.items())])


def in_python(value: Any, vocabulary: int) -> str:
    """An expression for a value with the dtypes and shapes of `value`, and integers below `vocabulary`."""
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        if value.is_floating_point():
            return f"torch.randn({', '.join(map(str, shape))})"
        if value.dtype == torch.bool:
            return f"torch.zeros({shape}, dtype=torch.bool)"
        return f"torch.randint({vocabulary}, {shape})"
    return repr(value)


def _in_words(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list):
        return f"[{', '.join(map(_in_words, value))}]"
    if type(value) is tuple and tensors_of(value):
        return f"({', '.join(map(_in_words, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_in_words(item)}' for key, item in value.items())}}}"
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__
