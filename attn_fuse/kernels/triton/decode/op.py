"""The split-KV attention of `decode` as an operator, which torch.compile and its caches take as it is.

    decode(query, key, value, inputs, numbers, program, splits=None) -> out

It has no gradient: its backward raises RuntimeError. On a CPU it runs only under Triton's interpreter. The first call
imports Triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_fuse.emit.operators import operator
from attn_fuse.kernels.triton import OPERATOR_DEVICES

# torch's caches on disk know an operator by its name only: raise this with every change in what it computes, or in
# the text of a score program.
VERSION = 3


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    program: str,
    splits: int | None = None,
) -> Tensor:
    from attn_fuse.kernels.chunked.op import chunked
    from attn_fuse.kernels.triton.assembled import MisassembledError
    from attn_fuse.kernels.triton.decode.launch import attend

    # Triton launches on the current device, which may not be that of the tensors.
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        try:
            return attend(query, key, value, inputs, numbers, program, splits)
        except MisassembledError:
            return chunked(query, key, value, inputs, numbers, None, 0.0, program, False)[0]


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


def _no_gradient(ctx: Any, grad_out: Tensor) -> Any:
    raise RuntimeError("triton_decode is attention for inference: it has no gradient")


decode = operator(
    f"triton_decode_v{VERSION}(Tensor query, Tensor key, Tensor value, Tensor[] inputs, SymInt[] numbers, str program, "
    "int? splits=None) -> Tensor",
    _run,
    _fake,
    _no_gradient,
    devices=OPERATOR_DEVICES,
)
