"""Picture: the keys that each query sees, as characters in rows, for the report.

Both lengths are cut into at most 32 cells. The mask is computed at every position, for the first batch entry and the
first head, by the operations that a kernel would be given.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.emit.call import Call
from attn_fuse.expression import simplify as al
from attn_fuse.graph.alone import alone
from attn_fuse.graph.region import Region
from attn_fuse.torch_internals import FakeTensorMode

ALL, SOME, NONE = "#", "+", "."
# Cells along one side, and the max length that is drawn.
_CELLS, _LONGEST = 32, 4096


def picture(
    region: Region, attention: Attention, facts: Facts, mode: FakeTensorMode, values: Mapping[Node, Any]
) -> tuple[str, ...]:
    """A row for each cell of queries, a character for each cell of keys: whether ALL, SOME or NONE are seen.

    values: the contents of leaves. Empty where there is no mask, where a length changes from call to call or is above
    4096, and where the mask reads anything but a tensor with contents.
    """
    mask, axes = attention.mask, attention.axes
    parts = [part.keep for part in mask.parts or mask.parts_if_others_seen]
    lengths = [attention.length(side) for side in (axes.query, axes.key)]
    if not parts or not all(n.is_Integer and 0 < n <= _LONGEST for n in lengths):
        return ()
    first = dict.fromkeys((*axes.batch, *attention.head_axes), sympy.Integer(0))
    keep = al.substitute(functools.reduce(al.logical_and, parts), first, attention.space)
    module, inside = alone(region)
    with module.graph.inserting_before(inside.output):
        module.graph.output_node().args = (Call(inside, attention, facts, mode).over_scores(keep, torch.bool),)
    module.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    module.recompile()
    given = [values.get(leaf) for leaf in region.leaves]
    if any(copy.users and type(x) is not torch.Tensor for copy, x in zip(inside.leaves, given, strict=True)):
        return ()
    with torch.no_grad():
        kept = module(*given)[0, 0].expand(*map(int, lengths)).cpu()
    cells = [row.tensor_split(min(_CELLS, kept.shape[1]), 1) for row in kept.tensor_split(min(_CELLS, kept.shape[0]))]
    return tuple("".join(ALL if c.all() else SOME if c.any() else NONE for c in row) for row in cells)
