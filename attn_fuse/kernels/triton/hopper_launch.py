"""Launches the kernels of `hopper_kernels`: tensor descriptors, block sizes, and outputs written where they are wanted.

The copy engine reads tensors whose last dimension is dense, whose other steps are multiples of 16 bytes and whose first
element stands at one. What does not lie so is copied.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_fuse.kernels.operands import check_shapes
from attn_fuse.kernels.score_program import ScoreProgram, Tree, bound, nodes
from attn_fuse.kernels.triton.emitter import LONGEST
from attn_fuse.kernels.triton.hopper_kernels import delta_kernel, forward_kernel, key_value_kernel, query_kernel
from attn_fuse.kernels.triton.scores import LOG2E, ScoreCode, score_code

ALIGNMENT = 16
SMALLEST_BLOCK = 64
WIDEST = 256


@dataclass(frozen=True)
class Score:
    """What becomes of the product of query and key.

    scale: where it is greater than 0, no more than multiplied with it where lower <= j - i <= upper, and hidden
    elsewhere; `code` is then None. lower, upper: None for no bound. reads: what the functions of `code` read.
    """

    scale: float
    lower: int | None
    upper: int | None
    code: ScoreCode | None
    reads: tuple[Any, ...]

    @property
    def is_curved(self) -> bool:
        """Whether its derivative depends on the product, which then has to be kept."""
        return self.code is not None and _is_curved(self.code.program)

    def arguments(self, q_len: int, kv_len: int) -> tuple[Any, ...]:
        """lower, upper, scale and reads as the kernels take them; a bound is no wider than the scores are."""
        lower = -q_len if self.lower is None else min(max(self.lower, -q_len), kv_len)
        upper = kv_len if self.upper is None else min(max(self.upper, -q_len), kv_len)
        return lower, upper, self.scale, self.reads

    def constants(self, backward: bool) -> dict[str, Any]:
        masked = self.lower is not None or self.upper is not None
        code = self.code
        found = {"MASKED": masked, "SCORE": code and code.score, "TO_LOG2": LOG2E / code.unit if code else LOG2E}
        return found | ({"SCORE_BACKWARD": code and code.score_backward} if backward else {})


def score_of(program: str, inputs: Sequence[Tensor], numbers: Sequence[int], scale: float) -> Score:
    """scale: greater than 0 where the program does no more than scale and hide what is out of its bounds; or else 0."""
    parsed = ScoreProgram.loads(program)
    code = None if scale > 0 else score_code(program, inputs, numbers)
    reads: tuple[Any, ...] = ((), (), ()) if code is None else code.reads(inputs, numbers)
    return Score(scale, bound(parsed.lower, numbers), bound(parsed.upper, numbers), code, reads)


@dataclass(frozen=True)
class Blocks:
    """queries, keys: in one block."""

    queries: int
    keys: int
    warps: int
    stages: int


# By kernel and by the larger of head_dim and value_dim as padded. Each compiles for sm_90a on Triton 3.6.0 without a
# spill; which is the fastest is for a GPU to say.
BLOCKS: Mapping[tuple[str, int], Blocks] = {
    ("forward", 64): Blocks(128, 128, 8, 3),
    ("forward", 128): Blocks(128, 128, 8, 2),
    ("forward", 256): Blocks(128, 64, 8, 2),
    ("key_value", 64): Blocks(64, 128, 8, 3),
    ("key_value", 128): Blocks(64, 128, 8, 2),
    ("key_value", 256): Blocks(32, 64, 8, 2),
    ("query", 64): Blocks(128, 64, 8, 3),
    ("query", 128): Blocks(128, 64, 8, 3),
    ("query", 256): Blocks(64, 64, 8, 2),
}


# Where the product of query and key has to be kept until its gradient is there.
BLOCKS_OF_CURVED: Mapping[tuple[str, int], Blocks] = {
    ("key_value", 128): Blocks(32, 128, 8, 2),
}


def blocks_of(kernel: str, dim: int, score: Score) -> Blocks:
    return (BLOCKS_OF_CURVED.get((kernel, dim)) if score.is_curved else None) or BLOCKS[kernel, dim]


def rows_of(q_len: int) -> int:
    """The length of the rows of `lse`: the copy engine wants a multiple of 16 bytes."""
    return cdiv(q_len, ALIGNMENT // 4) * (ALIGNMENT // 4)


def attend(query: Tensor, key: Tensor, value: Tensor, score: Score, out: Tensor) -> Tensor:
    """Writes `out` and gives the log-sum-exp of the scores in base 2, float32 [B, H, rows_of(Lq)].

    query [B, H, Lq, D], key [B, Hkv, Lk, D], value [B, Hkv, Lk, Dv], out [B, H, Lq, Dv] with a dense last dimension;
    one dtype. A query that sees no key gives 0, and so does its log-sum-exp.
    """
    _check(query, key, value)
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, value_dim) = query.shape, value.shape
    rows = rows_of(q_len)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=query.device)
    if 0 in (batch, heads, q_len, kv_len):
        out.zero_()
        return lse.zero_()
    head, wide = _padded(head_dim), _padded(value_dim)
    blocks = blocks_of("forward", max(head, wide), score)
    with _on(query.device):
        forward_kernel[(cdiv(q_len, blocks.queries) * heads * batch,)](
            _described(_readable(query), blocks.queries, head),
            _described(_readable(key), blocks.keys, head),
            _described(_readable(value), blocks.keys, wide),
            out, lse, heads, heads // kv_heads, q_len, kv_len, rows, *out.stride()[:3], *score.arguments(q_len, kv_len),
            HEAD_DIM=head_dim, HEAD_BLOCK=head, VALUE_DIM=value_dim, VALUE_BLOCK=wide,
            BLOCK_M=blocks.queries, BLOCK_N=blocks.keys, RAGGED=kv_len % blocks.keys != 0,
            **score.constants(backward=False), num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    return lse


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    score: Score,
    into: Sequence[Tensor],
) -> None:
    """Writes the gradients of query, key and value `into` three tensors of their shapes, each with a dense last
    dimension. Always summed in the same order."""
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, value_dim) = query.shape, value.shape
    dquery, dkey, dvalue = into
    if 0 in (batch, heads, q_len, kv_len):
        for gradient in into:
            gradient.zero_()
        return
    rows = lse.shape[-1]
    head, wide = _padded(head_dim), _padded(value_dim)
    delta = torch.empty_like(lse)
    readable = [*map(_readable, (query, key, value, grad_out))]
    arguments = score.arguments(q_len, kv_len)

    def operands(blocks: Blocks) -> list[TensorDescriptor]:
        lengths, widths = (blocks.queries, blocks.keys, blocks.keys, blocks.queries), (head, head, wide, wide)
        found = [_described(*each) for each in zip(readable, lengths, widths, strict=True)]
        return [*found, _described(lse, blocks.queries), _described(delta, blocks.queries)]

    with _on(query.device):
        delta_kernel[(cdiv(rows, SMALLEST_BLOCK) * heads * batch,)](
            out, grad_out, delta, heads, q_len, rows, *out.stride()[:3], *grad_out.stride(),
            VALUE_DIM=value_dim, VALUE_BLOCK=wide, BLOCK_M=SMALLEST_BLOCK,
        )  # fmt: skip
        blocks = blocks_of("key_value", max(head, wide), score)
        key_value_kernel[(cdiv(kv_len, blocks.keys) * kv_heads * batch,)](
            *operands(blocks), dkey, dvalue, kv_heads, heads // kv_heads, q_len, kv_len,
            *dkey.stride()[:3], *dvalue.stride()[:3], *arguments,
            HEAD_DIM=head_dim, HEAD_BLOCK=head, VALUE_DIM=value_dim, VALUE_BLOCK=wide,
            BLOCK_M=blocks.queries, BLOCK_N=blocks.keys, RAGGED=q_len % blocks.queries != 0,
            **score.constants(backward=True), num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
        blocks = blocks_of("query", max(head, wide), score)
        query_kernel[(cdiv(q_len, blocks.queries) * heads * batch,)](
            *operands(blocks), dquery, heads, heads // kv_heads, q_len, kv_len, *dquery.stride()[:3], *arguments,
            HEAD_DIM=head_dim, HEAD_BLOCK=head, VALUE_BLOCK=wide,
            BLOCK_M=blocks.queries, BLOCK_N=blocks.keys, RAGGED=kv_len % blocks.keys != 0,
            **score.constants(backward=True), num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip


@functools.cache
def _is_curved(program: ScoreProgram) -> bool:
    depend: set[int] = set()
    for node in nodes(program.score):
        parts = [part for part in node[1:] if isinstance(part, tuple) and id(part) in depend]
        if node[0] == "score" or parts:
            depend.add(id(node))
        if parts and not _is_straight(node, parts):
            return True
    return False


def _is_straight(node: Tree, parts: list[Tree]) -> bool:
    """Whether the derivative of a node by `parts`, the operands that depend on the product, is free of it."""
    match node:
        case ("add" | "sub" | "neg" | "cast", *_):
            return True
        case ("where", condition, *_):
            return all(part is not condition for part in parts)
        case ("mul", _, _):
            return len(parts) == 1 and node[1] is not node[2]
        case ("div", top, bottom):
            return all(part is top for part in parts) and top is not bottom
    return False


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    check_shapes(query, key, value)
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"not computed in {query.dtype}, {key.dtype}, {value.dtype}")
    if max(query.shape[3], value.shape[3]) > WIDEST or max(query.shape[2], key.shape[2]) >= LONGEST:
        raise ValueError(f"shapes are too large: {[*query.shape]}, {[*value.shape]}")
    size = query.element_size()
    if query.shape[3] * size % ALIGNMENT or value.shape[3] * size % ALIGNMENT:
        raise ValueError(f"head_dim {query.shape[3]} and value_dim {value.shape[3]} are no multiples of 16 bytes")


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    # Triton launches on the current device.
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _padded(dim: int) -> int:
    """The width of a block for head_dim or value_dim; the copy engine fills up with 0."""
    return max(next_power_of_2(dim), SMALLEST_BLOCK)


def _readable(x: Tensor) -> Tensor:
    """`x`, or a copy that the copy engine can read."""
    steps = [step * x.element_size() for step, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    dense = x.stride(-1) == 1 or x.shape[-1] == 1
    if dense and all(step > 0 and step % ALIGNMENT == 0 for step in steps) and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _described(x: Tensor, rows: int, width: int | None = None) -> TensorDescriptor:
    """[B, H, L, D] in blocks of `rows` and `width`, or [B, H, L] in blocks of `rows`."""
    block = [1, 1, rows] if width is None else [1, 1, rows, width]
    # A dimension of one element may have any step; it is given one that the descriptor takes.
    fine = ALIGNMENT // x.element_size()
    steps = [step if n > 1 else fine for step, n in zip(x.stride()[:-1], x.shape[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*steps, 1], block)
