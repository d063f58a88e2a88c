"""Picture: the keys that each query sees and the biases of the scores, in few cells, for the report.

Both lengths are cut into at most 32 cells. The mask is computed at every position of the first batch entry and head, by
the operations that a kernel would get, and so are the biases, of which each cell has the value at its first position.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.emit.builder import NotEmitted
from attn_fuse.emit.call import Call
from attn_fuse.expression import nodes as ex
from attn_fuse.expression import simplify as al
from attn_fuse.expression.nodes import Expr
from attn_fuse.graph.region import Region, alone
from attn_fuse.torch_internals import FakeTensorMode

ALL, SOME, NONE = "#", "+", "."
# Cells along one side, and the max length.
_CELLS, _LONGEST = 32, 4096


Picture: TypeAlias = tuple[tuple[str, ...], tuple[tuple[float | None, ...], ...]]


def picture(
    region: Region, attention: Attention, facts: Facts, mode: FakeTensorMode, values: Mapping[Node, Any]
) -> Picture:
    """The pictures of the mask and of the biases, a row for each cell of queries. values: the contents of leaves.

    The mask's rows have a character for each cell of keys: ALL, SOME or NONE are seen. The biases' rows have a number;
    None for a hidden position or a bias that is not finite. A picture is empty without a mask or biases, where a length
    is dynamic or above 4096, and where the expression reads more than tensors with contents. The biases' is also empty
    if all are the same.
    """
    axes = attention.axes
    lengths = [attention.length(side) for side in (axes.query, axes.key)]
    if not all(n.is_Integer and 0 < n <= _LONGEST for n in lengths):
        return (), ()
    first = dict.fromkeys((*axes.batch, *attention.head_axes), sympy.Integer(0))

    def computed(x: Expr, dtype: torch.dtype) -> Tensor | None:
        module, inside = alone(region)
        with module.graph.inserting_before(inside.output):
            call, at_first = Call(inside, attention, facts, mode), al.substitute(x, first, attention.space)
            try:
                module.graph.output_node().args = (call.over_scores(at_first, dtype),)
            except NotEmitted:
                return None
        module.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        module.recompile()
        given = [values.get(leaf) for leaf in region.leaves]
        read = [value for copy, value in zip(inside.leaves, given, strict=True) if copy.users]
        if any(type(value) not in (Tensor, torch.nn.Parameter) for value in read):
            return None
        with torch.no_grad():
            found: Tensor = module(*given)[0, 0].expand(*map(int, lengths)).cpu()
        return found

    mask, biases = attention.mask, attention.biases
    parts = [part.keep for part in mask.parts or mask.parts_if_others_seen]
    kept = computed(functools.reduce(al.logical_and, parts), torch.bool) if parts else None
    seen = () if kept is None else tuple("".join(map(_seen, row)) for row in _cells(kept))
    added = computed(functools.reduce(ex.Add, biases), torch.float32) if biases else None
    if added is None or (parts and kept is None):
        return seen, ()
    if kept is not None:
        added = added.masked_fill(~kept, math.nan)
    numbers = tuple(tuple(_number(cell[0, 0].item()) for cell in row) for row in _cells(added))
    distinct = {number for row in numbers for number in row} - {None}
    return seen, numbers if len(distinct) > 1 else ()


def _cells(computed: Tensor) -> list[tuple[Tensor, ...]]:
    rows = computed.tensor_split(min(_CELLS, computed.shape[0]))
    return [row.tensor_split(min(_CELLS, computed.shape[1]), 1) for row in rows]


def _seen(cell: Tensor) -> str:
    return ALL if cell.all() else SOME if cell.any() else NONE


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
