"""The plan of one call of chunked attention: its blocks, which of them the mask hides, and what each of them reads.

Blocks are sized for the cache that a thread has to itself. Heads are taken together as far as blocks of all of them
fit, so that the products find work for every thread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_fuse.expression.nodes import Diagonal, Expr, Gather, Input, Number, Position, distinct
from attn_fuse.kernels.centring import centre_of, less_centre
from attn_fuse.kernels.chunked.diagonals import DiagonalBuffer, diagonal_buffer
from attn_fuse.kernels.chunked.dropout import Dropout, dropout
from attn_fuse.kernels.chunked.hoisted import Hoisted, hoisted
from attn_fuse.kernels.chunked.steps import Steps
from attn_fuse.kernels.operands import check_dropout, check_shapes
from attn_fuse.kernels.score.dependence import POSITIONS, dependences, varying
from attn_fuse.kernels.score.gradient import differentiable
from attn_fuse.kernels.score.lookup import head_dimension, look_up, places, rest, rows_of
from attn_fuse.kernels.score.program import (
    Block,
    Memo,
    ScoreProgram,
    bound,
    evaluate,
    narrowed,
    widened,
)
from attn_fuse.kernels.score.visibility import visibility

# Queries in one block: these, up to so many where heads are too few to fill one or no key is hidden; fewer in a window.
QUERY_BLOCK, MOST_QUERIES = 256, 512
KEY_BLOCK = 256
# Scores in one block for each thread: with what is computed from them they stay in a core's own cache.
ELEMENTS_PER_THREAD = 1 << 18
# A GPU is one thread here.
ELEMENTS_ON_GPU = 1 << 23
# Keys by which the mask is asked what it hides.
MASK_TILE = 128
# Below so many scores, compiling the steps takes longer than it could save in a thousand calls.
COMPILE_FROM = 1 << 19


@dataclass(frozen=True)
class Part:
    """Some heads of some batch entries. key, value: [their key heads, Lk, D or Dv], in the dtype that is multiplied."""

    batch: slice
    heads: slice
    kv_heads: slice
    key: Tensor
    value: Tensor

    @property
    def keys(self) -> tuple[slice, slice]:
        return self.batch, self.kv_heads

    def rows(self, start: int, stop: int) -> tuple[slice, slice, slice]:
        return self.batch, self.heads, slice(start, stop)


@dataclass(frozen=True)
class Plan:
    """One call. inputs: the caller's, then what is hoisted. wanted: the numbers of those with a gradient.

    multiplied: the dtype of what is multiplied, but for the scores; all else is computed in `dtype`, the compute dtype.
    centre: what values are taken less, [B, H, 1, Dv], the same for heads that share a key head.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    inputs: list[Tensor]
    numbers: Sequence[int]
    wanted: frozenset[int]
    hoisted: Hoisted
    steps: Steps
    dropout: Dropout | None
    compiles: bool
    positions: list[Tensor]
    constants: list[Tensor]
    centre: Tensor | None = None
    buffers: dict[tuple[object, torch.dtype], Tensor] = field(default_factory=dict)
    skews: dict[tuple[int, ...], DiagonalBuffer] = field(default_factory=dict)
    tables: dict[int, Tensor] = field(default_factory=dict)
    at: dict[int, tuple[Block, Tensor]] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return self.steps.dtype

    @property
    def multiplied(self) -> torch.dtype:
        return self.steps.multiplied

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """batch, heads, q_len, kv_len"""
        return (*self.query.shape[:3], self.key.shape[2])

    @property
    def groups(self) -> int:
        return self.query.shape[1] // max(self.key.shape[1], 1)

    @functools.cached_property
    def block_sizes(self) -> tuple[int, int, int]:
        """The most planes (heads of batch entries), queries and keys in one block."""
        batch, heads, _, _ = self.sizes
        on_cpu = self.query.device.type == "cpu"
        most = ELEMENTS_PER_THREAD * torch.get_num_threads() if on_cpu else ELEMENTS_ON_GPU
        rows, columns = QUERY_BLOCK, KEY_BLOCK
        program = self.steps.program
        lower, upper = bound(program.lower, self.numbers), bound(program.upper, self.numbers)
        # Long blocks waste what a mask hides; and where heads look up the same places, a block of all finds them once.
        long = lower is None and upper is None and program.visible is None
        long = long and not any(isinstance(node, Gather) for node in self.steps.leaves)
        while rows * 2 <= MOST_QUERIES and (long or batch * heads * rows * columns * 2 <= most):
            rows *= 2
        if lower is not None and upper is not None and upper - lower < 4 * rows:
            rows = max(1, rows // 2)
        return max(1, most // (rows * columns)), rows, columns

    # ---- blocks

    def parts(self) -> Iterator[Part]:
        batch, heads, _, _ = self.sizes
        together = _evenly(batch, self.block_sizes[0] // max(heads, 1))
        kv_heads = _evenly(self.key.shape[1], self.block_sizes[0] // max(self.groups, 1))
        for b in range(0, batch, together):
            for h in range(0, self.key.shape[1], kv_heads):
                entries, of_keys = slice(b, min(b + together, batch)), slice(h, min(h + kv_heads, self.key.shape[1]))
                of_queries = slice(of_keys.start * self.groups, of_keys.stop * self.groups)
                key, value = self.key[entries, of_keys], self.value[entries, of_keys]
                if self.centre is not None:
                    value = less_centre(value, self.centre[entries, of_queries], self.dtype)
                key, value = (x.to(self.multiplied).flatten(0, 1) for x in (key, value))
                yield Part(entries, of_queries, of_keys, key, value)

    def query_blocks(self) -> Iterator[tuple[int, int]]:
        q_len, size = self.sizes[2], self.block_sizes[1]
        return ((start, min(start + size, q_len)) for start in range(0, q_len, size))

    def key_blocks(self, part: Part, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The keys that queries [start, stop) may see."""
        program, kv_len = self.steps.program, self.sizes[3]
        lower, upper = bound(program.lower, self.numbers), bound(program.upper, self.numbers)
        first = 0 if lower is None else max(0, start + lower)
        last = kv_len if upper is None else min(kv_len, stop + upper)
        for begin, end in self._visible(part, start) if self._table is not None else [(0, kv_len)]:
            begin, end = max(begin, first), min(end, last)
            size = self.block_sizes[2]
            yield from ((j, min(j + size, end)) for j in range(begin, end, size))

    def _visible(self, part: Part, start: int) -> Iterator[tuple[int, int]]:
        """The stretches of keys of which the mask shows some to the queries of the block at `start`."""
        assert self._table is not None
        table = self._table
        for dim, span in ((0, part.batch), (1, part.heads)):
            table = table[(slice(None),) * dim + (span,)] if table.shape[dim] != 1 else table
        seen = table.flatten(0, 1).any(0)[start // self.block_sizes[1]].tolist()
        begin = None
        for tile, some in enumerate([*seen, False]):
            if some and begin is None:
                begin = tile
            elif not some and begin is not None:
                yield begin * MASK_TILE, min(tile * MASK_TILE, self.sizes[3])
                begin = None

    @functools.cached_property
    def _table(self) -> Tensor | None:
        """Bool [B|1, H|1, query blocks, tiles of keys]: whether the mask shows any; None where it is not asked."""
        program, device = self.steps.program, self.query.device
        if program.visible is None or device.type != "cpu" or self.sizes[3] <= MASK_TILE:
            return None
        tiles = (self.block_sizes[1], MASK_TILE)
        return visibility(program, self.inputs, self.numbers, self.sizes, tiles, device, self.dtype).some

    def block(self, part: Part, queries: tuple[int, int], keys: tuple[int, int]) -> Block:
        batch, heads = part.batch.stop - part.batch.start, part.heads.stop - part.heads.start
        origin = (part.batch.start, part.heads.start)
        return Block(batch, heads, queries, keys, self.query.device, self.dtype, origin)

    # ---- what they read

    def rows_of(self, x: Tensor, part: Part, start: int, stop: int) -> Tensor:
        """Queries of a part, or what is shaped like them: [key heads, groups * rows, n].

        So one product serves all query heads that share a key head.
        """
        return x[part.rows(start, stop)].reshape(len(part.key), -1, x.shape[-1])

    def scores(self, part: Part, block: Block, query: Tensor, key: Tensor) -> Tensor:
        """query times key on a block, [key heads, groups * rows, columns] in the compute dtype."""
        memory = self.memory(part, block, 0, self.dtype)
        return torch.bmm(query.to(self.dtype), key.to(self.dtype).mT, out=memory)

    def memory(self, part: Part, block: Block, which: int, dtype: torch.dtype) -> Tensor:
        """For something as large as the scores of a block, [key heads, groups * rows, columns]; `which` of several."""
        return self._room(which, block.shape, dtype).view(len(part.key), -1, block.shape[3])

    def _room(self, which: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of this shape that the next block with the same `which` writes over."""
        count = math.prod(shape)
        if (which, dtype) not in self.buffers or self.buffers[which, dtype].numel() < count:
            self.buffers[which, dtype] = self.query.new_empty(count, dtype=dtype)
        return self.buffers[which, dtype][:count].view(shape)

    def scratch(self, part: Part, block: Block) -> list[Tensor]:
        """Memory for what the steps make of the scores, where it is of another dtype than they are."""
        return [self.memory(part, block, 2, self.multiplied)] if self.steps.rounds else []

    def read(self, block: Block) -> list[Tensor]:
        """What the steps take after their own tensors."""
        tensors = [self._leaf(node, block) for node in self.steps.leaves]
        tensors += [self.inputs[n] for n in self.steps.sources]
        if self.dropout is not None:
            d = self.dropout
            tensors += [_small(narrowed(d.rows, block)), _small(narrowed(d.keys, block)), d.threshold, d.scale]
        return tensors

    def _leaf(self, node: Expr, block: Block) -> Tensor:
        match node:
            case Number(n):
                return self.constants[n]
            case Diagonal(n):
                return _small(self.diagonal(self.inputs[n], block)).squeeze(-2).unfold(-1, block.shape[3], 1)
            case Input(n):
                return _small(narrowed(self.inputs[n], block))
            case Gather():
                return self._looked_up(node, block)
            case Position(name):
                return _small(narrowed(self.positions[POSITIONS.index(name)], block))
        raise AssertionError("a step has no other leaves")

    def _looked_up(self, node: Gather, block: Block) -> Tensor:
        """What a lookup reads on a block: [B|1, H|1, rows, columns]."""
        table = self.inputs[node.leaf]
        if id(node) not in self.tables:
            self.tables[id(node)] = widened(rows_of(head_dimension(node), table), block)
        rows, at = self.tables[id(node)], self.places(node, block)
        if head_dimension(node) is not None:
            rows = rows[slice(*block.spans[1])]
        out = self._room(node, (len(at), len(rows), *block.shape[2:]), rows.dtype)
        look_up(rows, at, out)
        return out

    def places(self, node: Gather, block: Block) -> Tensor:
        """Where a lookup reads on a block."""
        if id(node) not in self.at or self.at[id(node)][0] != block:
            hoisted = (part for part in distinct(node) if isinstance(part, Diagonal))
            memo: Memo = {id(part): self._leaf(part, block).flip(-2) for part in hoisted}
            indices = [
                evaluate(x, None, self.inputs, self.numbers, block, memo).long()
                for x in rest(head_dimension(node), node.index)
            ]
            shape = (max(map(len, indices)), 1, *block.shape[2:])
            self.at[id(node)] = block, places(rest(head_dimension(node), self.inputs[node.leaf].shape), indices, shape)
        return self.at[id(node)][1]

    def gradient_of(self, node: Gather | Diagonal, block: Block, value: Tensor) -> DiagonalBuffer | Tensor:
        """Memory for the gradient of what is read on a block, `value`, along diagonals or from a table."""
        dtype = torch.promote_types(value.dtype, self.dtype)
        if isinstance(node, Gather):
            return self._room(("gradient", node), value.shape, dtype)
        key = (node.leaf, *value.shape)
        if key not in self.skews:
            self.skews[key] = diagonal_buffer(value.to(dtype))
        return self.skews[key]

    def diagonal(self, values: Tensor, block: Block) -> Tensor:
        """Of values for each difference of positions, [B|1, H|1, 1, Lq + Lk - 1], those that a block has."""
        first = block.keys[0] - block.queries[1] + self.sizes[2]
        whole = Block(block.batch, block.heads, (0, 1), (first, first + sum(block.shape[2:]) - 1), block.device,
                      block.dtype, block.origin)  # fmt: skip
        return narrowed(values, whole)


def _evenly(count: int, most: int) -> int:
    """How many of `count` go together: at most `most`, no few left over, and as many for each thread."""
    parts, threads = math.ceil(count / max(1, most)), torch.get_num_threads()
    even = math.ceil(count / max(1, parts) / threads) * threads
    return max(1, min(even, most))


def _small(part: Tensor) -> Tensor:
    """A copy of what is no larger than a side of a block: views that begin elsewhere would each be compiled for."""
    return part if part.shape[2] > 1 and part.shape[3] > 1 else part.clone(memory_format=torch.contiguous_format)


def planned(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    seed: Tensor | None,
    dropout_p: float,
    program: str,
    wanted: Sequence[bool] = (),
    centre: Tensor | None = None,
    centred: bool = False,
) -> Plan:
    """wanted: whether each input's gradient is. centre: as in `Plan`; centred: whether it is to be found.

    Raises ValueError for shapes, dtypes or a program that do not fit.
    """
    given, dtype = _checked(query, key, value, seed, dropout_p)
    sizes = (*query.shape[:3], key.shape[2])
    batch, heads, q_len, kv_len = sizes
    device = query.device
    multiplied = given if given == torch.bfloat16 and _multiplies_bfloat16(device) else dtype
    found = hoisted(program, [x.shape for x in inputs])
    before = []
    for part in found.parts:
        block = part.block(q_len, kv_len, batch, heads, device, dtype)
        values = evaluate(part.expr, None, inputs, numbers, block)
        # What depends on neither position, as i - i, is one number for all differences.
        before.append(values.expand(*values.shape[:3], block.shape[3]) if part.of == "j - i" else values)
    grows = {n for n, want in enumerate(wanted) if want and inputs[n].is_floating_point()}
    exprs = [part.expr for part in found.parts]
    grows |= {found.first + n for n, expr in enumerate(exprs) if differentiable([expr], reads(expr, grows))}
    on_cpu = device.type == "cpu"
    varies = tuple(varying(x.shape) for x in (*inputs, *before)) if on_cpu else None
    drops = _drops(seed, dropout_p)
    shared = (centred or centre is not None) and shares(found.program, seed, dropout_p)
    return Plan(
        query=query,
        key=key,
        value=value,
        inputs=[*inputs, *before],
        numbers=numbers,
        wanted=frozenset(grows),
        hoisted=found,
        steps=_steps(found, varies, frozenset(grows), drops, shared, dtype, multiplied),
        dropout=dropout(seed, dropout_p, batch, heads, q_len, kv_len, dtype) if drops and seed is not None else None,
        compiles=math.prod(sizes) >= COMPILE_FROM,
        positions=[_along(torch.arange(n, device=device), dim) for dim, n in enumerate(sizes)],
        constants=[_along(torch.full((1,), int(n), dtype=torch.int64, device=device), 0) for n in numbers],
        centre=centre_of(query, value) if centred else centre,
    )


def shares(program: ScoreProgram, seed: Tensor | None, dropout_p: float) -> bool:
    """Whether the weights that meet the values may sum to something else than 1."""
    return program.factor is not None or program.sink is not None or _drops(seed, dropout_p)


def _drops(seed: Tensor | None, dropout_p: float) -> bool:
    return dropout_p > 0 and seed is not None


def reads(expr: Expr, wanted: Container[int]) -> list[Input | Gather]:
    """The nodes of `expr` that read an input whose number is in `wanted`."""
    return [node for node in distinct(expr) if isinstance(node, (Input, Gather)) and node.leaf in wanted]


@functools.cache
def _steps(
    found: Hoisted,
    varies: tuple[frozenset[str], ...] | None,
    wanted: frozenset[int],
    drops: bool,
    shares: bool,
    dtype: torch.dtype,
    multiplied: torch.dtype,
) -> Steps:
    """varies: as for `dependences`, where tables are looked up before the steps."""
    program = found.program
    exprs = [program.score] if program.factor is None else [program.score, program.factor]
    outside = set() if varies is None else {id(node) for expr in exprs for node in _lookups(expr, varies)}
    every = (node for expr in exprs for node in distinct(expr, lambda node: id(node) in outside))
    once = list({id(node): node for node in every}.values())
    read = [node for node in once if isinstance(node, (Input, Diagonal, Gather)) and node.leaf in wanted]
    into = tuple(node for node in read if isinstance(node, Diagonal | Gather) and _is_given(node, outside))
    in_steps = [node for node in once if isinstance(node, Gather) and id(node) not in outside]
    return Steps(
        program=program,
        leaves=tuple(n for n in once if isinstance(n, (Number, Input, Diagonal, Position)) or id(n) in outside),
        sources=tuple(sorted({node.leaf for node in in_steps})),
        wanted=tuple(node for node in read if isinstance(node, Input | Gather) and not _is_given(node, outside)),
        into=into,
        drops=drops,
        shares=shares,
        dtype=dtype,
        multiplied=multiplied,
    )


def _is_given(node: Expr, outside: Container[int]) -> bool:
    """Whether a step is handed memory for the gradient of `node`. outside: the lookups that are no part of the step."""
    return isinstance(node, Diagonal) or id(node) in outside


def _lookups(expr: Expr, varies: tuple[frozenset[str], ...]) -> list[Gather]:
    """The nodes that read, for each query and key, a table at a place which is the same for all heads.

    Inductor's code for a CPU finds the place anew for each head, and reads element for element.
    """
    known = dependences(expr, varies)

    def is_one(node: Gather) -> bool:
        on = frozenset().union(*(known[id(place)] for place in rest(head_dimension(node), node.index)))
        return {"i", "j"} <= on and not on & {"h", "score"}

    return [node for node in distinct(expr) if isinstance(node, Gather) and is_one(node)]


def _along(values: Tensor, dim: int) -> Tensor:
    return values.view([-1 if at == dim else 1 for at in range(4)])


def _multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for products of bfloat16, with sums in float32, and bmm makes use of them."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def _checked(
    query: Tensor, key: Tensor, value: Tensor, seed: Tensor | None, dropout_p: float
) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of query, key and value together, and the one that the attention is computed in."""
    check_shapes(query, key, value)
    check_dropout(seed, dropout_p)
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    if not dtype.is_floating_point:
        raise ValueError(f"attention is not computed in {dtype}")
    return dtype, torch.promote_types(dtype, torch.float32)
