"""Plan: the steps and blocks of one call of chunked attention, without the blocks that the mask hides.

Blocks are sized for a thread's own cache. Several heads share a block if they fit.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_fuse.expression.nodes import Diagonal, Expr, Gather, Input, Number, Position, distinct
from attn_fuse.kernels.centring import centre_of, less_centre
from attn_fuse.kernels.chunked.dropout import dropout
from attn_fuse.kernels.chunked.hoisted import Hoisted, hoisted
from attn_fuse.kernels.chunked.portions import MOST_SLICES, Portion, portions
from attn_fuse.kernels.chunked.steps import Steps, run
from attn_fuse.kernels.chunked.workers import workers_and_threads
from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.dependence import dependences, varying
from attn_fuse.kernels.score.gradient import differentiable, reads
from attn_fuse.kernels.score.lookup import head_dimension, rest
from attn_fuse.kernels.score.program import (
    Block,
    ScoreProgram,
    bound,
    evaluate,
)
from attn_fuse.kernels.score.visibility import visibility

# Queries in one block: up to the max if heads are too few to fill a block or no key is hidden, half in a window.
QUERY_BLOCK, MOST_QUERIES = 256, 512
KEY_BLOCK = 256
# Scores in one block for each thread; these and what is computed from them stay in a core's own cache.
ELEMENTS_PER_THREAD = 1 << 18
# The same for a GPU, which counts as one thread.
ELEMENTS_ON_GPU = 1 << 23
# Keys in one tile, the unit of the table of visible blocks.
MASK_TILE = 128
# With fewer scores, compiling the steps takes longer than it saves in a thousand calls.
COMPILE_FROM = 1 << 19
# With fewer scores, workers would have a block or two each and mostly wait for the interpreter's lock.
WORKERS_FROM = 1 << 22


@dataclass(frozen=True)
class Part:
    """Some heads of some batch entries.

    block: all of their queries and keys. of_keys: the index of their key heads into tensors [B, Hkv, ..].
    key, value: [key heads of all entries, Lk, D or Dv] in the dtype that products take, the value minus its centre.
    """

    block: Block
    of_keys: tuple[slice, slice]
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Plan:
    """One call, worked out.

    inputs: the caller's, then the values of the hoisted parts. wanted: the numbers of those that need a gradient.
    compiles: whether to compile the steps.
    centre: what to subtract from the values, [B, H, 1, Dv], the same for heads that share a key head; None for nothing.
    workers, threads: the number of workers, and of the threads of each.
    table: bool [B, H, query blocks, tiles of keys]: whether the mask may show any key; None where nobody asks.
    """

    given: Operands
    inputs: list[Tensor]
    wanted: frozenset[int]
    hoisted: Hoisted
    steps: Steps
    dropout: tuple[Tensor, ...]
    compiles: bool
    centre: Tensor | None
    workers: int
    threads: int
    table: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.steps.dtype

    @property
    def groups(self) -> int:
        """How many query heads share a key head."""
        return self.given.query.shape[1] // max(self.given.key.shape[1], 1)

    @functools.cached_property
    def bounds(self) -> tuple[int | None, int | None]:
        """(lower, upper): the bounds of j - i beyond which the mask hides the key; None for no bound."""
        program, numbers = self.steps.program, self.given.numbers
        return bound(program.lower, numbers), bound(program.upper, numbers)

    @functools.cached_property
    def block_sizes(self) -> tuple[int, int, int]:
        """The max numbers of planes (heads of batch entries), queries and keys in one block."""
        batch, heads, q_len, _ = self.given.sizes
        on_cpu = self.given.query.device.type == "cpu"
        most = ELEMENTS_PER_THREAD * self.threads if on_cpu else ELEMENTS_ON_GPU
        rows, columns = QUERY_BLOCK, KEY_BLOCK
        lower, upper = self.bounds
        planes = math.ceil(batch * heads / self.workers)
        # Long blocks compute more hidden scores. A block of all heads finds the places of a shared lookup once.
        long = lower is None and upper is None and self.steps.program.visible is None
        long = long and not any(isinstance(node, Gather) for node in self.steps.leaves)
        while rows * 2 <= MOST_QUERIES and (long or planes * rows * columns * 2 <= most):
            rows *= 2
        if lower is not None and upper is not None and upper - lower < 4 * rows:
            rows = max(1, rows // 2)
        # At least one block for each slice of the queries.
        slices = min(math.ceil(self.workers / max(self._planes, 1)), MOST_SLICES)
        rows = min(rows, max(1, math.ceil(q_len / slices)))
        return max(1, most // (rows * columns)), rows, columns

    # ---- the workers

    def portions(self) -> list[Portion]:
        """The work of each worker."""
        query_blocks = math.ceil(self.given.sizes[2] / self.block_sizes[1])
        return portions(self._planes, query_blocks, self.workers)

    def sums(self, portions: Sequence[Portion]) -> list[dict[int, Tensor]]:
        """Zeros for each portion to add the gradients of inputs to, by their numbers.

        Portions share the zeros of an input where they add to different places.
        """
        program, scores = self.steps.program, self.given.sizes
        exprs = [expr for expr in (program.score, program.factor, program.sink) if expr is not None]
        read = [node for expr in exprs for node in distinct(expr)]
        anywhere = {node.leaf for node in read if isinstance(node, Gather)}
        placed = {node.leaf for node in read if isinstance(node, Input | Diagonal)}
        found: list[dict[int, Tensor]] = [{} for _ in portions]
        for n in self.wanted:
            x, made = self.inputs[n], dict[tuple[int, int], Tensor]()
            planes_apart = n not in anywhere and (n not in placed or x.shape[:2] == scores[:2])
            queries_apart = n not in anywhere and (n not in placed or x.shape[2] == scores[2])
            for portion, own in zip(portions, found, strict=True):
                key = 0 if planes_apart else portion.group, 0 if queries_apart else portion.slice
                if key not in made:
                    made[key] = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, self.dtype))
                own[n] = made[key]
        return found

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

    def _part(self, batch: slice, kv_heads: slice) -> Part:
        start, stop = (n * self.groups for n in (kv_heads.start, kv_heads.stop))
        key, value = self.given.key[batch, kv_heads], self.given.value[batch, kv_heads]
        if self.centre is not None:
            value = less_centre(value, self.centre[batch, start:stop], self.dtype)
        key, value = (x.to(self.steps.multiplied).flatten(0, 1) for x in (key, value))
        _, _, q_len, kv_len = self.given.sizes
        count, device, origin = batch.stop - batch.start, key.device, (batch.start, start)
        block = Block(count, stop - start, (0, q_len), (0, kv_len), device, self.dtype, origin)
        return Part(block, (batch, kv_heads), key, value)

    def _evenly(self, count: int, most: int) -> int:
        """How many of `count` to take at a time: at most `most`, evenly, a multiple of the threads if that fits."""
        even = math.ceil(count / math.ceil(count / most) / self.threads) * self.threads
        return min(even, most, count)

    def rows(self, portion: Portion, part: Part) -> Iterator[Block]:
        """Each block of queries of a portion, with all keys, in one of its parts."""
        q_len, size = self.given.sizes[2], self.block_sizes[1]
        for start in range(portion.slice * size, q_len, portion.slices * size):
            yield replace(part.block, queries=(start, min(start + size, q_len)))

    def key_blocks(self, rows: Block) -> Iterator[Block]:
        """Each block of keys that the queries of `rows` may see."""
        (lower, upper), size = self.bounds, self.block_sizes[2]
        first = 0 if lower is None else max(0, rows.queries[0] + lower)
        last = rows.keys[1] if upper is None else min(rows.keys[1], rows.queries[1] + upper)
        for begin, end in self._visible(rows):
            begin, end = max(begin, first), min(end, last)
            for j in range(begin, end, size):
                yield replace(rows, keys=(j, min(j + size, end)))

    def _visible(self, rows: Block) -> Iterator[tuple[int, int]]:
        """(start, stop) of each stretch of keys of which the queries of `rows` may see some."""
        if self.table is None:
            yield rows.keys
            return
        batch, heads, queries = rows.index
        seen = self.table[batch, heads, queries.start // self.block_sizes[1]].flatten(0, 1).any(0).tolist()
        for some, tiles in itertools.groupby(range(len(seen)), seen.__getitem__):
            if some:
                starts = [tile * MASK_TILE for tile in tiles]
                yield starts[0], min(starts[-1] + MASK_TILE, rows.keys[1])

    def run(self, name: str, tensors: Sequence[Tensor]) -> Any:
        """The result of the step `name` on a block."""
        return run(self.steps, name, tensors, self.compiles, self.threads if self.workers > 1 else None)


def planned(given: Operands, wanted: Sequence[bool] = (), centre: Tensor | None = None, centred: bool = False) -> Plan:
    """The plan of a call. wanted: whether an input needs a gradient. centred: whether to compute the centre.

    centre: the one computed before, for a backward. Raises ValueError for operands or a program that do not fit.
    """
    given.check()
    query, inputs, sizes = given.query, given.inputs, given.sizes
    product = functools.reduce(torch.promote_types, (query.dtype, given.key.dtype, given.value.dtype))
    if not product.is_floating_point:
        raise ValueError(f"attention is not computed in {product}")
    dtype = torch.promote_types(product, torch.float32)
    multiplied = product if product == torch.bfloat16 and _multiplies_bfloat16(query.device) else dtype
    found = hoisted(given.program, tuple(varying(x.shape) for x in inputs))
    grows = {n for n, want in enumerate(wanted) if want and inputs[n].is_floating_point()}
    values = []
    for n, part in enumerate(found.parts, len(inputs)):
        block = part.block(given, dtype)
        value = evaluate(part.expr, None, inputs, given.numbers, block)
        # A part that depends on neither position, such as i - i, has one number for all differences.
        values.append(value.expand(*value.shape[:3], block.shape[3]) if part.of == "j - i" else value)
        if differentiable([part.expr], reads(part.expr, grows)):
            grows.add(n)
    all_inputs, on_cpu = [*inputs, *values], query.device.type == "cpu"
    varies = tuple(varying(x.shape) for x in all_inputs) if on_cpu else None
    shared = (centred or centre is not None) and shares(found.program, given.drops)
    divides = on_cpu and math.prod(sizes) >= WORKERS_FROM
    workers, threads = workers_and_threads() if divides else (1, torch.get_num_threads())
    plan = Plan(
        given=given,
        inputs=all_inputs,
        wanted=frozenset(grows),
        hoisted=found,
        steps=_steps(found, varies, frozenset(grows), given.drops, shared, dtype, multiplied),
        dropout=dropout(given, dtype),
        compiles=math.prod(sizes) >= COMPILE_FROM,
        centre=centre_of(query, given.value) if centred else centre,
        workers=workers,
        threads=threads,
    )
    program = plan.steps.program
    if program.visible is None or not on_cpu or sizes[3] <= MASK_TILE:
        return plan
    tiles = (plan.block_sizes[1], MASK_TILE)
    seen = visibility(program, plan.inputs, given.numbers, sizes, tiles, query.device, dtype).some
    return replace(plan, table=seen.expand(*sizes[:2], -1, -1))


def shares(program: ScoreProgram, drops: bool) -> bool:
    """Whether the weights that multiply the values may not sum to 1."""
    return program.factor is not None or program.sink is not None or drops


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
    """The steps of a call. varies: as for `dependences` if lookups may precede the steps, else None."""
    program, exprs = found.program, found.program.weighing
    outside = set() if varies is None else {id(node) for expr in exprs for node in _lookups(expr, varies)}
    every = (node for expr in exprs for node in distinct(expr, lambda node: id(node) in outside))
    once = list({id(node): node for node in every}.values())
    read = [node for node in once if isinstance(node, (Input, Diagonal, Gather)) and node.leaf in wanted]
    in_steps = [node for node in once if isinstance(node, Gather) and id(node) not in outside]
    return Steps(
        program=program,
        leaves=tuple(n for n in once if isinstance(n, (Number, Input, Diagonal, Position)) or id(n) in outside),
        sources=tuple(sorted({node.leaf for node in in_steps})),
        wanted=tuple(x for x in read if isinstance(x, Input) or (isinstance(x, Gather) and id(x) not in outside)),
        into=tuple(x for x in read if isinstance(x, Diagonal) or (isinstance(x, Gather) and id(x) in outside)),
        drops=drops,
        shares=shares,
        dtype=dtype,
        multiplied=multiplied,
    )


def _lookups(expr: Expr, varies: tuple[frozenset[str], ...]) -> list[Gather]:
    """The lookups at places that depend on query and key and are the same for all heads.

    On a CPU, Inductor's code would find the places again for each head and read element by element.
    """
    known = dependences(expr, varies)

    def is_one(node: Gather) -> bool:
        on = frozenset().union(*(known[id(place)] for place in rest(head_dimension(node), node.index)))
        return {"i", "j"} <= on and not on & {"h", "score"}

    return [node for node in distinct(expr) if isinstance(node, Gather) and is_one(node)]


def _multiplies_bfloat16(device: torch.device) -> bool:
    """Whether bmm uses the device's instructions for bfloat16 products with float32 sums."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
