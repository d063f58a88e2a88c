"""Plan: the blocks of one call of chunked attention, which of them the mask hides, and what each block reads.

Blocks are sized for the cache that a thread has to itself. Several heads share a block as far as they fit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_fuse.expression.nodes import Diagonal, Expr, Gather, Input, Number, Position, distinct
from attn_fuse.kernels.centring import centre_of, less_centre
from attn_fuse.kernels.chunked.dropout import Dropout, dropout
from attn_fuse.kernels.chunked.hoisted import Hoisted, hoisted
from attn_fuse.kernels.chunked.portions import MOST_SLICES, Portion, Sums, portions
from attn_fuse.kernels.chunked.steps import Steps, run
from attn_fuse.kernels.chunked.workers import workers_and_threads
from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.dependence import dependences, varying
from attn_fuse.kernels.score.gradient import differentiable
from attn_fuse.kernels.score.lookup import head_dimension, rest
from attn_fuse.kernels.score.program import (
    Block,
    ScoreProgram,
    bound,
    evaluate,
)
from attn_fuse.kernels.score.visibility import visibility

# Queries in one block; up to the max where heads are too few to fill a block or no key is hidden; half in a window.
QUERY_BLOCK, MOST_QUERIES = 256, 512
KEY_BLOCK = 256
# Scores in one block for each thread: these, and what is computed from them, stay in a core's own cache.
ELEMENTS_PER_THREAD = 1 << 18
# The same for a GPU, which counts as one thread.
ELEMENTS_ON_GPU = 1 << 23
# Keys in one tile, the unit in which the mask says what it hides.
MASK_TILE = 128
# With fewer scores, compiling the steps takes longer than it could save in a thousand calls.
COMPILE_FROM = 1 << 19
# With fewer scores, workers would have a block or two each, and wait longer for the interpreter's lock than for others.
WORKERS_FROM = 1 << 22


@dataclass(frozen=True)
class Part:
    """Some heads of some batch entries.

    kv_heads: the key heads of `heads`. key, value: [key heads of all entries, Lk, D or Dv] in the dtype that products
        take, the value minus its centre where there is one.
    """

    batch: slice
    heads: slice
    kv_heads: slice
    key: Tensor
    value: Tensor

    @property
    def keys(self) -> tuple[slice, slice]:
        """The part's index into key, value and their gradients, [B, Hkv, ..]."""
        return self.batch, self.kv_heads

    def rows(self, start: int, stop: int) -> tuple[slice, slice, slice]:
        """The index of queries [start, stop) of the part into tensors [B, H, Lq, ..]."""
        return self.batch, self.heads, slice(start, stop)


@dataclass(frozen=True)
class Plan:
    """One call, worked out.

    inputs: the caller's, then the values of the hoisted parts. wanted: the indices of those that need a gradient.
    compiles: whether to compile the steps. positions: for each dimension of the scores, int64, broadcasting to them.
    constants: the numbers as int64 tensors. centre: what to subtract from the values, [B, H, 1, Dv], the same for heads
        that share a key head; None for nothing.
    workers, threads: how many workers there are, and how many threads each has.
    table: bool [B|1, H|1, query blocks, tiles of keys]: whether the mask may show any key; None where we do not ask.
    """

    given: Operands
    inputs: list[Tensor]
    wanted: frozenset[int]
    hoisted: Hoisted
    steps: Steps
    dropout: Dropout | None
    compiles: bool
    positions: list[Tensor]
    constants: list[Tensor]
    centre: Tensor | None = None
    workers: int = 1
    threads: int = 1
    table: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.steps.dtype

    @property
    def multiplied(self) -> torch.dtype:
        """The dtype that products take, except that of query and key, which takes the compute dtype."""
        return self.steps.multiplied

    @property
    def groups(self) -> int:
        """How many query heads share a key head."""
        return self.given.query.shape[1] // max(self.given.key.shape[1], 1)

    @functools.cached_property
    def block_sizes(self) -> tuple[int, int, int]:
        """The max numbers of planes (heads of batch entries), queries and keys in one block."""
        batch, heads, q_len, _ = self.given.sizes
        on_cpu = self.given.query.device.type == "cpu"
        most = ELEMENTS_PER_THREAD * self.threads if on_cpu else ELEMENTS_ON_GPU
        rows, columns = QUERY_BLOCK, KEY_BLOCK
        program = self.steps.program
        lower, upper = bound(program.lower, self.given.numbers), bound(program.upper, self.given.numbers)
        planes = math.ceil(batch * heads / self.workers)
        # Long blocks compute more that a mask hides. Where heads look up the same places, a block of all heads finds
        # the places once.
        long = lower is None and upper is None and program.visible is None
        long = long and not any(isinstance(node, Gather) for node in self.steps.leaves)
        while rows * 2 <= MOST_QUERIES and (long or planes * rows * columns * 2 <= most):
            rows *= 2
        if lower is not None and upper is not None and upper - lower < 4 * rows:
            rows = max(1, rows // 2)
        # A block for each slice of the queries that the workers need.
        slices = min(math.ceil(self.workers / max(self._planes, 1)), MOST_SLICES)
        rows = min(rows, max(1, math.ceil(q_len / slices)))
        return max(1, most // (rows * columns)), rows, columns

    # ---- the workers

    def portions(self) -> list[Portion]:
        """What each worker goes through."""
        query_blocks = math.ceil(self.given.sizes[2] / self.block_sizes[1])
        return portions(self._planes, query_blocks, self.workers)

    def sums(self) -> dict[int, Sums]:
        """The gradients, all zero, of the inputs that need one."""
        program = self.steps.program
        exprs = [expr for expr in (program.score, program.factor, program.sink) if expr is not None]
        read = [node for expr in exprs for node in distinct(expr) if isinstance(node, Input | Diagonal | Gather)]
        anywhere = {node.leaf for node in read if isinstance(node, Gather)}
        at_its_place = {node.leaf for node in read} - anywhere

        def of(n: int, x: Tensor) -> Sums:
            zeros = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, self.dtype))
            planes_apart = n not in anywhere and (n not in at_its_place or x.shape[:2] == self.given.query.shape[:2])
            queries_apart = n not in anywhere and (n not in at_its_place or x.shape[2] == self.given.query.shape[2])
            return Sums(zeros, planes_apart, queries_apart)

        return {n: of(n, x) for n, x in enumerate(self.inputs) if n in self.wanted}

    @property
    def _planes(self) -> int:
        return self.given.sizes[0] * self.given.key.shape[1]

    # ---- blocks

    def parts(self, portion: Portion) -> Iterator[Part]:
        """The parts of a portion, each of as many planes as fit into a block: batch entries, or some heads of one."""
        most, kv_heads = max(1, self.block_sizes[0] // max(self.groups, 1)), self.given.key.shape[1]
        at, end = portion.planes
        while at < end:
            entry, head = divmod(at, kv_heads)
            if head == 0 and min(most, end - at) >= kv_heads:
                count, heads = self._evenly((end - at) // kv_heads, most // kv_heads), kv_heads
            else:
                count, heads = 1, self._evenly(min(kv_heads - head, end - at), most)
            yield self._part(slice(entry, entry + count), slice(head, head + heads))
            at += count * heads

    def _part(self, entries: slice, of_keys: slice) -> Part:
        of_queries = slice(of_keys.start * self.groups, of_keys.stop * self.groups)
        key, value = self.given.key[entries, of_keys], self.given.value[entries, of_keys]
        if self.centre is not None:
            value = less_centre(value, self.centre[entries, of_queries], self.dtype)
        key, value = (x.to(self.multiplied).flatten(0, 1) for x in (key, value))
        return Part(entries, of_queries, of_keys, key, value)

    def _evenly(self, count: int, most: int) -> int:
        """How many of `count` go together: at most `most`, evenly, a multiple of the threads where that fits."""
        even = math.ceil(count / math.ceil(count / most) / self.threads) * self.threads
        return min(even, most, count)

    def query_blocks(self, portion: Portion) -> Iterator[tuple[int, int]]:
        """(start, stop) of each block of queries of a portion."""
        q_len, size = self.given.sizes[2], self.block_sizes[1]
        first, step = portion.slice * size, portion.slices * size
        return ((start, min(start + size, q_len)) for start in range(first, q_len, step))

    def key_blocks(self, part: Part, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of each block of keys that queries [start, stop), one of `query_blocks`, may see."""
        program, kv_len = self.steps.program, self.given.sizes[3]
        lower, upper = bound(program.lower, self.given.numbers), bound(program.upper, self.given.numbers)
        first = 0 if lower is None else max(0, start + lower)
        last = kv_len if upper is None else min(kv_len, stop + upper)
        for begin, end in self._visible(part, start) if self.table is not None else [(0, kv_len)]:
            begin, end = max(begin, first), min(end, last)
            size = self.block_sizes[2]
            yield from ((j, min(j + size, end)) for j in range(begin, end, size))

    def _visible(self, part: Part, start: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of each stretch of tiles in which the queries of the block at `start` may see some key."""
        table = self.table
        assert table is not None
        for dim, span in ((0, part.batch), (1, part.heads)):
            table = table[(slice(None),) * dim + (span,)] if table.shape[dim] != 1 else table
        seen = table.flatten(0, 1).any(0)[start // self.block_sizes[1]].tolist()
        begin = None
        for tile, some in enumerate([*seen, False]):
            if some and begin is None:
                begin = tile
            elif not some and begin is not None:
                yield begin * MASK_TILE, min(tile * MASK_TILE, self.given.sizes[3])
                begin = None

    def block(self, part: Part, queries: tuple[int, int], keys: tuple[int, int]) -> Block:
        """The block of these queries and keys in a part."""
        batch, heads = part.batch.stop - part.batch.start, part.heads.stop - part.heads.start
        origin = (part.batch.start, part.heads.start)
        return Block(batch, heads, queries, keys, self.given.query.device, self.dtype, origin)

    def run(self, name: str, tensors: Sequence[Tensor]) -> Any:
        """The result of the step `name` on a block."""
        return run(self.steps, name, tensors, self.compiles, self.threads if self.workers > 1 else None)

    def rows_of(self, x: Tensor, part: Part, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of `x` [B, H, Lq, n] in a part, as contiguous [key heads, groups * rows, n].

        So one product serves all query heads that share a key head.
        """
        return x[part.rows(start, stop)].reshape(len(part.key), -1, x.shape[-1]).contiguous()


def planned(given: Operands, wanted: Sequence[bool] = (), centre: Tensor | None = None, centred: bool = False) -> Plan:
    """The plan of a call. wanted: whether an input needs a gradient. centred: whether to compute the centre.

    centre: the one computed before, for a backward. Raises ValueError for operands or a program that do not fit.
    """
    product, dtype = _dtypes(given)
    query, inputs, numbers, sizes = given.query, given.inputs, given.numbers, given.sizes
    batch, heads, q_len, kv_len = sizes
    device = query.device
    multiplied = product if product == torch.bfloat16 and _multiplies_bfloat16(device) else dtype
    found = hoisted(given.program, [x.shape for x in inputs])
    before = []
    for part in found.parts:
        block = part.block(q_len, kv_len, batch, heads, device, dtype)
        values = evaluate(part.expr, None, inputs, numbers, block)
        # A part that depends on neither position, such as i - i, has one number for all differences.
        before.append(values.expand(*values.shape[:3], block.shape[3]) if part.of == "j - i" else values)
    grows = {n for n, want in enumerate(wanted) if want and inputs[n].is_floating_point()}
    exprs = [part.expr for part in found.parts]
    grows |= {found.first + n for n, expr in enumerate(exprs) if differentiable([expr], reads(expr, grows))}
    on_cpu = device.type == "cpu"
    varies = tuple(varying(x.shape) for x in (*inputs, *before)) if on_cpu else None
    shared = (centred or centre is not None) and shares(found.program, given.drops)
    divides = on_cpu and math.prod(sizes) >= WORKERS_FROM
    workers, threads = workers_and_threads() if divides else (1, torch.get_num_threads())
    plan = Plan(
        given=given,
        inputs=[*inputs, *before],
        wanted=frozenset(grows),
        hoisted=found,
        steps=_steps(found, varies, frozenset(grows), given.drops, shared, dtype, multiplied),
        dropout=dropout(given, dtype) if given.drops else None,
        compiles=math.prod(sizes) >= COMPILE_FROM,
        positions=[_along(torch.arange(n, device=device), dim) for dim, n in enumerate(sizes)],
        constants=[_along(torch.full((1,), int(n), dtype=torch.int64, device=device), 0) for n in numbers],
        centre=centre_of(query, given.value) if centred else centre,
        workers=workers,
        threads=threads,
    )
    return dataclasses.replace(plan, table=_shown(plan))


def _shown(plan: Plan) -> Tensor | None:
    program, given, device = plan.steps.program, plan.given, plan.given.query.device
    if program.visible is None or device.type != "cpu" or given.sizes[3] <= MASK_TILE:
        return None
    tiles = (plan.block_sizes[1], MASK_TILE)
    return visibility(program, plan.inputs, given.numbers, given.sizes, tiles, device, plan.dtype).some


def shares(program: ScoreProgram, drops: bool) -> bool:
    """Whether the weights that multiply the values may sum to something else than 1."""
    return program.factor is not None or program.sink is not None or drops


def reads(expr: Expr, wanted: Container[int]) -> list[Input | Gather]:
    """The nodes of `expr` that read an input whose index is in `wanted`."""
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
    """The steps of a call. varies: as for `dependences` where tables are looked up before the steps, else None."""
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
    """Whether a step is handed memory for the gradient of `node`. outside: the lookups done before the step."""
    return isinstance(node, Diagonal) or id(node) in outside


def _lookups(expr: Expr, varies: tuple[frozenset[str], ...]) -> list[Gather]:
    """The lookups at places that depend on query and key, and are the same for all heads.

    Inductor's code for a CPU would find the places again for each head, and read element by element.
    """
    known = dependences(expr, varies)

    def is_one(node: Gather) -> bool:
        on = frozenset().union(*(known[id(place)] for place in rest(head_dimension(node), node.index)))
        return {"i", "j"} <= on and not on & {"h", "score"}

    return [node for node in distinct(expr) if isinstance(node, Gather) and is_one(node)]


def _along(values: Tensor, dim: int) -> Tensor:
    return values.view([-1 if at == dim else 1 for at in range(4)])


def _multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16 products with float32 sums, and bmm uses them."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def _dtypes(given: Operands) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of all operands, and the compute dtype. Raises ValueError for operands that do not fit."""
    given.check()
    dtype = functools.reduce(torch.promote_types, (given.query.dtype, given.key.dtype, given.value.dtype))
    if not dtype.is_floating_point:
        raise ValueError(f"attention is not computed in {dtype}")
    return dtype, torch.promote_types(dtype, torch.float32)
