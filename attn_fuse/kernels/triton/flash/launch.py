"""Launches of the flash kernels: forward, and the gradients of query, key, value and what the scores read."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from attn_fuse.expression.nodes import Gather, Input, distinct
from attn_fuse.kernels.centring import centre_of, less_centre
from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.gradient import pull_back
from attn_fuse.kernels.score.program import Block, of_table
from attn_fuse.kernels.triton.flash import backward as flash_backward
from attn_fuse.kernels.triton.flash import forward as flash_forward
from attn_fuse.kernels.triton.flash.bulk import forward_in_bulk, is_copied, query_in_bulk
from attn_fuse.kernels.triton.flash.facts import CallFacts, Spans, call_facts
from attn_fuse.kernels.triton.launch import ALIGNMENT, Launch, ceil_div, misaligned, on, stream_of
from attn_fuse.kernels.triton.scores import LOG2E, Gradient, readable

# Programs that fill any device, up to which a sum is cut into parts; and elements of an output that a program of
# `statistics` reads.
_PROGRAMS = 512
_STATISTICS = 4096
_USUAL = {"num_warps": 4, "num_stages": 3}


class Call(NamedTuple):
    """One call: what it is given, and the facts that calls like it share.

    operands: query, key and value, the last less its centre, with their strides. seed: None without dropout.
    reads: the inputs, then their strides and sizes; and the numbers, for which no kernel is compiled anew.
    lie: see `misaligned`.
    """

    given: Operands
    facts: CallFacts
    operands: tuple[tuple[Tensor, tuple[int, ...]], ...]
    seed: Tensor | None
    reads: tuple[Any, ...]
    stream: int
    lie: tuple[bool, ...]


def _call(given: Operands, value: Tensor, facts: CallFacts, *others: Tensor | None) -> Call:
    """others: what else may lie anywhere."""
    query, key, inputs = given.query, given.key, given.inputs
    operands = tuple(zip((query, key, value), facts.strides, strict=True))
    reads = (readable(inputs), facts.reads), facts.numbers
    lie = misaligned(query, key, value, *others, *inputs)
    seed = given.seed if facts.drops else None
    return Call(given, facts, operands, seed, reads, stream_of(query.device), lie)


def attend(
    given: Operands, spans: Spans = (None, None), centred: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """softmax over the final scores, times the factor, times value, as `chunked.attend` has it.

    given: query, key and value of one dtype, float16, bfloat16 or float32, in rows of up to 256.

    Gives out [B, H, Lq, Dv], in memory [B, Lq, H, Dv]; for each query the max score, in the unit of its `ScoreCode`,
    and the sum of exp(score - max), the sink among them, float32 [B, H, Lq]; and the centre. Where `centred` is set,
    the centre is `centre_of` the values, and out is over values less the centre; else it is empty. Raises ValueError
    for shapes, dtypes, dropout or a program that do not fit.
    """
    query, value, facts = given.query, given.value, call_facts(given, spans, centred)
    centre = centre_of(query, value) if centred else value.new_empty(0)
    out = query.new_empty_strided(*facts.made[0])
    row_max = query.new_empty(facts.query[:3], dtype=torch.float32)
    row_sum = torch.empty_like(row_max)
    if not facts.key[2] and facts.code.sink is None:
        # Over no keys at all the product of no weights is 0, and no row is NaN for it.
        return out.zero_(), row_max.fill_(-torch.inf), row_sum.fill_(torch.nan), centre.zero_()
    value = less_centre(value, centre, value.dtype)
    with on(query.device):
        call = _call(given, value, facts, spans[0])
        _run(facts, "forward", _forward, call, out, row_max, row_sum, _table(spans[0], facts.spans[0]))
    return out, row_max, row_sum, centre


def _forward(call: Call, out: Tensor, row_max: Tensor, row_sum: Tensor, spans: Table) -> None:
    facts = call.facts
    how = facts.bulk.get("forward")
    # The engine copies from addresses that are multiples of 16 bytes.
    if how is not None and not any(call.lie[:3]):
        forward_in_bulk(call, how, out, row_max, row_sum, spans)
        return
    launches = facts.launches()
    launch = launches.get("forward")
    if launch is None:
        programs = ceil_div(facts.query[2], facts.configs["forward"].block_m) * facts.query[0] * facts.query[1]
        constants = *facts.scalars, facts.scale, *facts.forward_constants
        options = facts.options("forward")
        launch = launches["forward"] = Launch(flash_forward.forward, programs, constants, **options)
    launch(
        call.stream, call.lie, *call.operands, (out, facts.made[0][1]), row_max, row_sum, call.seed, spans, *call.reads
    )  # fmt: skip


def attend_backward(
    given: Operands, spans: Spans, made: Sequence[Tensor], grad_out: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of query, key and value, in memory [B, L, H, D], and of each input, contiguous, each in its dtype.

    made: what `attend` gave.
    wanted: whether an input needs a gradient; one that does not, or is not floating-point, gets an empty tensor.
    Every sum has one order: results do not change from run to run. Raises ValueError as `attend` does.
    """
    query, inputs, (out, row_max, row_sum, centre) = given.query, given.inputs, made
    facts = call_facts(given, spans, centre.dim() == 4)
    value = less_centre(given.value, centre, given.value.dtype)
    (batch, heads, q_len, _), kv_len = facts.query, facts.key[2]
    is_wanted = [want and x.is_floating_point() for want, x in zip(wanted, inputs, strict=True)]
    dquery, dkey, dvalue = (query.new_empty_strided(*shape) for shape in facts.made[1:])
    saved = query.new_empty((batch, heads, 4, _padded(q_len)), dtype=torch.float32)
    found: dict[int, Tensor] = {}
    with on(query.device):
        call = _call(given, value, facts, grad_out, *spans, out, row_max, row_sum)
        pulled, of_out = (grad_out, grad_out.stride()), (out, out.stride())
        back = Backward(call, pulled, saved, facts.launches(pulled[1], of_out[1], *is_wanted))
        _statistics(back, of_out, row_max, row_sum, any(is_wanted))
        dinput, of_scores = None, _of_scores(call, is_wanted) if any(is_wanted) else None
        if of_scores is not None:
            read, scores = inputs[of_scores.node.leaf], (batch, heads, q_len, kv_len)
            # Blocks that no query sees are not computed.
            found[of_scores.node.leaf] = dinput = torch.zeros(scores, dtype=read.dtype, device=read.device)
        _run(facts, "query", _query, back, dquery, dinput, of_scores, _table(spans[0], facts.spans[0]))
        table = _table(spans[1], facts.spans[1])
        for name in facts.of_keys:
            sums = None if name == "value" else dkey, None if name == "key" else dvalue
            _run(facts, name, _key_value, back, name, *sums, table)
        if any(is_wanted):
            _add_input_gradients(back, is_wanted, of_scores, found)
    dinputs = [
        (found[n] if n in found else torch.zeros_like(x)).to(x.dtype).contiguous() if want else x.new_empty(0)
        for n, (x, want) in enumerate(zip(inputs, is_wanted, strict=True))
    ]
    return dquery, dkey, dvalue, dinputs


class Backward(NamedTuple):
    """What the kernels of a backward share: the call, grad_out with its strides, what `statistics` writes, and the
    launches that are kept for such a backward."""

    call: Call
    grad_out: tuple[Tensor, tuple[int, ...]]
    saved: Tensor
    launches: dict[Hashable, Launch]

    @property
    def is_copied(self) -> bool:
        """Whether the bulk copy engine copies grad_out, and all lie where it copies from."""
        return not any(self.call.lie[:4]) and is_copied(self.grad_out[0].shape, self.grad_out[1])


def _statistics(
    back: Backward, out: tuple[Tensor, tuple[int, ...]], row_max: Tensor, row_sum: Tensor, of_sink: bool
) -> None:
    call, grad_out, saved, launches = back
    facts = call.facts
    launch = launches.get("statistics")
    if launch is None:
        _, value_dim, _, block_v, *_ = facts.sizes("query")
        rows, (batch, heads, q_len, _) = max(1, _STATISTICS // block_v), facts.query
        sink, unit = facts.code.sink if of_sink else None, LOG2E / facts.code.unit
        constants = heads, *facts.lengths, facts.scale, sink, unit, value_dim, block_v, rows
        programs = ceil_div(q_len, rows) * heads * batch
        launch = launches["statistics"] = Launch(flash_backward.statistics, programs, constants, **_USUAL)
    launch(call.stream, call.lie, grad_out, out, row_max, row_sum, saved, saved.shape[3], *call.reads)


def _query(back: Backward, dquery: Tensor, dinput: Tensor | None, of_scores: Gradient | None, spans: Table) -> None:
    call, grad_out, saved, launches = back
    facts = call.facts
    how = facts.bulk.get("query")
    if how is not None and dinput is None and back.is_copied:
        query_in_bulk(back, how, dquery, spans)
        return
    launch = launches.get("query")
    if launch is None:
        programs = ceil_div(facts.query[2], facts.configs["query"].block_m) * facts.query[1] * facts.query[0]
        gradient = None if of_scores is None else of_scores.function
        constants = *facts.scalars, *facts.backward_constants("query"), gradient
        launch = launches["query"] = Launch(
            flash_backward.backward_query, programs, constants, **facts.options("query")
        )  # fmt: skip
    of_input = None if dinput is None else (dinput, dinput.stride())
    launch(
        call.stream, call.lie, grad_out, *call.operands, (dquery, facts.made[1][1]), of_input, saved, saved.shape[3],
        call.seed, spans, *call.reads,
    )  # fmt: skip


def _key_value(back: Backward, name: str, dkey: Tensor | None, dvalue: Tensor | None, spans: Table) -> None:
    call, grad_out, saved, launches = back
    facts = call.facts
    launch = launches.get(name)
    if launch is None:
        chosen, (batch, kv_heads, kv_len, _) = facts.configs[name], facts.key
        grouped = facts.heads[1] != 1
        constants = *facts.scalars, *facts.backward_constants(name), chosen.statistics, grouped
        programs = ceil_div(kv_len, chosen.block_n) * kv_heads * batch
        launch = launches[name] = Launch(
            flash_backward.backward_key_value, programs, constants, **facts.options(name)
        )  # fmt: skip
    of_key = None if dkey is None else (dkey, facts.made[2][1])
    of_value = None if dvalue is None else (dvalue, facts.made[3][1])
    launch(
        call.stream, call.lie, grad_out, *call.operands, of_key, of_value, saved, saved.shape[3], call.seed, spans,
        *call.reads,
    )  # fmt: skip


def _of_scores(call: Call, is_wanted: Sequence[bool]) -> Gradient | None:
    """The gradient, if there is one, of a tensor with an element for each score: the kernel for query writes it."""
    scores = call.given.sizes
    for gradient in call.facts.code.gradients:
        leaf = gradient.node.leaf
        if isinstance(gradient.node, Input) and is_wanted[leaf] and call.given.inputs[leaf].shape == scores:
            return gradient
    return None


def _add_input_gradients(
    back: Backward, is_wanted: Sequence[bool], done: Gradient | None, found: dict[int, Tensor]
) -> None:
    """Add to `found` the gradients of what the scores read, by input, but that of `done`, which is there."""
    for which, gradient in enumerate(back.call.facts.code.gradients):
        number = gradient.node.leaf
        if not is_wanted[number] or gradient is done:
            continue
        made = _of_read(back, which)
        found[number] = found[number] + made if number in found else made
    _add_sink_gradients(back.call, back.saved, is_wanted, found)


def _of_read(back: Backward, which: int) -> Tensor:
    """The gradient of the input that the node of gradient `which` reads: of a table a strip of queries at a time."""
    given, gradient = back.call.given, back.call.facts.code.gradients[which]
    node, (batch, heads, q_len, kv_len) = gradient.node, given.sizes

    def of_rows(first: int, last: int, dtype: torch.dtype) -> Tensor:
        made: Tensor = _run(back.call.facts, "input", _of_rows, back, which, first, last - first, dtype)
        return made

    if isinstance(node, Input):
        return of_rows(0, q_len, given.inputs[node.leaf].dtype)
    along = (n if name in gradient.along else 1 for name, n in zip("bhj", (batch, heads, kv_len), strict=True))
    in_row = math.prod(along) if "i" in gradient.along else 0
    return of_table(node, of_rows, in_row, given.inputs, given.numbers, given.sizes)


def _of_rows(back: Backward, which: int, first: int, rows: int, dtype: torch.dtype) -> Tensor:
    """The gradient of what the node of gradient `which` reads, [B|1, H|1, rows|1, Lk|1], for `rows` queries from
    `first` on."""
    call, grad_out, saved, launches = back
    facts = call.facts
    (batch, heads, _, _), kv_len, gradient = facts.query, facts.key[2], facts.code.gradients[which]
    tile, code = facts.configs["input"], facts.code
    blocks = (batch, heads, ceil_div(rows, tile.block_m), ceil_div(kv_len, tile.block_n))
    shape, own, count = [], 1, 1
    for name, size, programs in zip("bhij", (batch, heads, rows, kv_len), blocks, strict=True):
        shape.append(size if name in gradient.along else 1)
        own, count = (own * programs, count) if name in gradient.along else (own, count * programs)
    if not own or not count:
        return call.given.query.new_zeros(shape, dtype=dtype)
    parts = max(1, min(count, _PROGRAMS // own))
    made = call.given.query.new_empty([parts, *shape], dtype=dtype if parts == 1 else torch.float32)
    launch = launches.get(("input", which, rows))
    if launch is None:
        along = (name in gradient.along for name in "bhij")
        constants = (
            code.score, code.factor, gradient.function, LOG2E / code.unit, *along, facts.even, *facts.sizes("input"),
        )  # fmt: skip
        launch = Launch(flash_backward.backward_input, own * parts, constants, **facts.options("input"))
        launches["input", which, rows] = launch
    launch(
        call.stream, call.lie, grad_out, *call.operands, made, saved, saved.shape[3], call.seed, *call.reads,
        *facts.scalars, batch, first, rows, parts,
    )  # fmt: skip
    return made[0] if parts == 1 else made.sum(0)


def _add_sink_gradients(call: Call, saved: Tensor, is_wanted: Sequence[bool], found: dict[int, Tensor]) -> None:
    """Add to `found` the gradients of what the sink reads, from that of its logit, which `statistics` has written."""
    sink = call.facts.code.program.sink
    if sink is None:
        return
    batch, heads, q_len, _ = call.given.query.shape
    of_sink = saved[:, :, 3, :q_len, None]
    wide = {}
    for leaf in {node.leaf for node in distinct(sink) if isinstance(node, (Input, Gather)) and is_wanted[node.leaf]}:
        source = call.given.inputs[leaf]
        dtype = torch.promote_types(source.dtype, torch.float32)
        wide[leaf] = found[leaf].to(dtype) if leaf in found else source.new_zeros(source.shape, dtype=dtype)
    block = Block(batch, heads, (0, q_len), (0, 1), of_sink.device, torch.float32)
    pull_back(sink, of_sink, call.given.inputs, call.given.numbers, block, wide)
    found |= wide


def _run(facts: CallFacts, kernel: str, run: Callable[..., Any], *arguments: Any) -> Any:
    """Run it, and where that fails again in another way, for as long as there is one."""
    while True:
        try:
            return run(*arguments)
        except (TritonError, RuntimeError) as error:
            facts.give_up(kernel, error)


def _padded(length: int) -> int:
    return ceil_div(length, ALIGNMENT) * ALIGNMENT


# Spans as kernels take them, with the strides of their first two dimensions.
Table = tuple[Tensor, tuple[int, int]] | None


def _table(spans: Tensor | None, strides: tuple[int, int] | None) -> Table:
    return None if spans is None or strides is None else (spans, strides)
