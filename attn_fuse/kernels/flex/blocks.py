"""Operators for the arguments of FlexAttention's templates: block tables, and copies of operands.

    flex_blocks(inputs, numbers, sizes, blocks, transposed, device, program) -> tables
    flex_operands(tensors, numbers) -> copies, tensors of one number

The block tables are those of a `torch.nn.attention.flex_attention.BlockMask`, made from the structure of the mask (see
`visibility`). Layers with the same mask share one call.

The copies are for the CPU, whose template identifies operands by their buffer: it ignores the storage offsets of views,
and takes two views of one buffer for the same (tried on torch 2.11, 2.13 and 2.15).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_fuse.emit.operators import operator
from attn_fuse.kernels.score.dependence import planes
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.score.visibility import visibility

# Part of the operator's name, by which torch's caches on disk know it. Raise it when its results or the text of score
# programs change.
VERSION = 2


def block_tables(
    inputs: Sequence[Tensor], numbers: Sequence[int], sizes: Sequence[int], blocks: Sequence[int], transposed: bool,
    device: torch.device, program: str,
) -> list[Tensor]:  # fmt: skip
    """For each block of queries, the number and the list of partly visible key blocks, then of wholly visible ones.

    sizes: batch, heads, q_len, kv_len. blocks: queries and keys in a block; one that reaches beyond the end is partly
    visible. program: the text of a score program, of which `visible`, `upper` and `lower` count.

    Returns int32 [B|1, H|1, query blocks] and [B|1, H|1, query blocks, key blocks], twice. If `transposed`, the same
    four tables for each block of keys follow. Dimensions on which the mask does not depend are 1.
    """
    how = tuple(numbers), tuple(sizes), tuple(blocks), transposed, device, program
    if inputs:
        return _tables(inputs, *how)
    # A caller may write into the outputs of an operator.
    return [table.clone() for table in _known_tables(*how)]


@functools.lru_cache(maxsize=64)
def _known_tables(*how: Any) -> list[Tensor]:
    return _tables((), *how)


def _tables(
    inputs: Sequence[Tensor], numbers: Any, sizes: Any, blocks: Any, transposed: bool, device: Any, program: str
) -> list[Tensor]:
    read = ScoreProgram.loads(program)
    (*_, q_len, kv_len), (rows, columns) = sizes, blocks
    seen = visibility(read, inputs, numbers, sizes, blocks, device)
    shape = (*planes(read.visible, [x.shape for x in inputs], *sizes[:2]), *seen.some.shape[2:])
    some = seen.some.expand(shape)
    # The scores of hidden keys that may count are right as they are, so no block needs a mask_mod.
    every = (some if read.hides_only_if_others_seen else seen.every.expand(shape)).clone()
    every[:, :, q_len // rows :] = False
    every[..., kv_len // columns :] = False
    found = [*_ordered(some & ~every), *_ordered(every)]
    return found if not transposed else [*found, *_ordered((some & ~every).mT), *_ordered(every.mT)]


def _ordered(table: Tensor) -> tuple[Tensor, Tensor]:
    """The number of True entries in each row of a Boolean table, and the indices of all entries, True ones first."""
    table = table.contiguous()
    places = torch.argsort(table.to(torch.int8), dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32), places.to(torch.int32)


def _fake_tables(
    inputs: Sequence[Tensor], numbers: Sequence[Any], sizes: Sequence[Any], blocks: Sequence[int], transposed: bool,
    device: torch.device, program: str,
) -> list[Tensor]:  # fmt: skip
    leading = planes(ScoreProgram.loads(program).visible, [x.shape for x in inputs], *sizes[:2])
    rows, columns = (-(-n // block) for n, block in zip(sizes[2:], blocks, strict=True))
    pairs = [(rows, columns)] * 2 + [(columns, rows)] * (2 * transposed)
    return [
        torch.empty((*leading, *shape), dtype=torch.int32, device=device)
        for outer, inner in pairs
        for shape in ((outer,), (outer, inner))
    ]


def operands(tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    """Contiguous copies of `tensors`, then each of `numbers` as an int64 tensor without dimensions."""
    device = tensors[0].device
    copies = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
    return [*copies, *(torch.full((), n, dtype=torch.int64, device=device) for n in numbers)]


def _fake_operands(tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
    copies = [x.new_empty(x.shape) for x in tensors]
    return [*copies, *(tensors[0].new_empty((), dtype=torch.int64) for _ in numbers)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.tensors, ctx.numbers = len(inputs[0]), len(inputs[1])


def _passed_on(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, Any]:
    return list(gradients[: ctx.tensors]), None if ctx.numbers else []


flex_blocks = operator(
    f"flex_blocks_v{VERSION}(Tensor[] inputs, SymInt[] numbers, SymInt[] sizes, int[] blocks, bool transposed, "
    "Device device, str program) -> Tensor[]",
    block_tables,
    _fake_tables,
    keeps_strides=True,
)
flex_operands = operator(
    f"flex_operands_v{VERSION}(Tensor[] tensors, SymInt[] numbers) -> Tensor[]",
    operands,
    _fake_operands,
    _passed_on,
    _save,
)
