"""Launches of the flash kernels: forward, and the gradients of query, key, value and what the scores read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from attn_fuse.expression.nodes import Cast, Gather, Input, Position, distinct
from attn_fuse.kernels.centring import centre_of, less_centre
from attn_fuse.kernels.score.gradient import differentiable, gradients, needed
from attn_fuse.kernels.score.program import Block, Memo, accumulate, evaluate, gathered
from attn_fuse.kernels.triton.assembled import MisassembledError
from attn_fuse.kernels.triton.flash import backward as flash_backward
from attn_fuse.kernels.triton.flash import forward as flash_forward
from attn_fuse.kernels.triton.flash.configs import OF_KEYS, together_or_apart
from attn_fuse.kernels.triton.flash.facts import CallFacts, call_facts
from attn_fuse.kernels.triton.flash.op import heads_inside
from attn_fuse.kernels.triton.launch import ALIGNMENT, ceil_div, launch, launch_once, on
from attn_fuse.kernels.triton.scores import LOG2E, Gradient, readable

# Programs that fill any device, up to which a sum is cut into parts; elements of an output that a program of
# `statistics` reads; and elements that the gradient of a lookup may have before it is added to the table.
_PROGRAMS = 512
_STATISTICS = 4096
_USUAL = {"num_warps": 4, "num_stages": 3}
_STRIP = 1 << 25


@dataclass(frozen=True)
class _Call:
    """One call: its tensors, and the facts that calls like it share."""

    query: Tensor
    key: Tensor
    value: Tensor
    inputs: Sequence[Tensor]
    numbers: Sequence[int]
    seed: Tensor | None
    facts: CallFacts

    def operands(self, grad_out: Tensor | None = None) -> tuple[Any, ...]:
        """query, key and value as kernels read them, after grad_out if that is given."""
        tensors = (self.query, self.key, self.value)
        return tuple(map(_strided, tensors if grad_out is None else (grad_out, *tensors)))

    @property
    def reads(self) -> tuple[Any, ...]:
        """The inputs, then their strides and sizes; and the numbers, for which no kernel is compiled anew."""
        return (readable(self.inputs), self.facts.reads), self.facts.numbers


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    seed: Tensor | None,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    dropout_p: float,
    program: str,
    centred: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """softmax over the final scores, times the factor, times value, as `chunked.attend` has it.

    query [B, H, Lq, D], key [B, Hkv, Lk, D], value [B, Hkv, Lk, Dv]: of one dtype, float16, bfloat16 or float32, D and
    Dv up to 256, any strides. inputs, numbers: what the program reads. seed: int64, one element; None without dropout.
    of_queries, of_keys: what `spans` gave, or None.

    Gives out [B, H, Lq, Dv], in memory [B, Lq, H, Dv]; for each query the max score, in the unit of its `ScoreCode`,
    and the sum of exp(score - max), the sink among them, float32 [B, H, Lq]; and the centre. Where `centred` is set,
    the centre is `centre_of` the values, and out is over values less the centre; else it is empty. Raises ValueError
    for shapes, dtypes, dropout or a program that do not fit.
    """
    facts = call_facts(query, key, value, inputs, numbers, seed, dropout_p, program, of_queries)
    centre = centre_of(query, value) if centred else value.new_empty(0)
    (batch, heads, q_len, _), value_dim = query.shape, value.shape[3]
    out = heads_inside(query, (*query.shape[:3], value_dim))
    row_max = torch.empty((batch, heads, q_len), dtype=torch.float32, device=query.device)
    row_sum = torch.empty_like(row_max)
    if not key.shape[2] and facts.code.sink is None:
        # Over no keys at all the product of no weights is 0, and no row is NaN for it.
        return out.zero_(), row_max.fill_(-torch.inf), row_sum.fill_(torch.nan), centre.zero_()
    if q_len * heads * batch:
        value = less_centre(value, centre, value.dtype)
        call = _Call(query, key, value, inputs, numbers, seed if facts.drops else None, facts)
        on_queries = _table(of_queries)

        def run() -> None:
            programs = ceil_div(q_len, facts.configs["forward"].block_m) * heads * batch
            launch(
                facts.kept, ("forward", value.stride(), on_queries and on_queries[1]),
                flash_forward.forward, (programs, 1, 1),
                (*call.operands(), _strided(out), row_max, row_sum, call.seed, on_queries, *call.reads,
                 *facts.scalars, facts.scale, *facts.forward_constants),
                facts.options["forward"], query, key, value, of_queries, *inputs,
            )  # fmt: skip

        with on(query.device):
            _assembled(facts, "forward", run)
    return out, row_max, row_sum, centre


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    seed: Tensor | None,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    dropout_p: float,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    centre: Tensor,
    program: str,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of query, key and value, in memory [B, L, H, D], and of each input, contiguous, each in its dtype.

    out, row_max, row_sum, centre: what `attend` gave.
    wanted: whether an input needs a gradient; one that does not, or is not floating-point, gets an empty tensor.
    Every sum has one order: results do not change from run to run. Raises ValueError as `attend` does.
    """
    facts = call_facts(query, key, value, inputs, numbers, seed, dropout_p, program, of_queries)
    value = less_centre(value, centre, value.dtype)
    call = _Call(query, key, value, inputs, numbers, seed if facts.drops else None, facts)
    batch, heads, q_len, _ = query.shape
    dquery, dkey, dvalue = (heads_inside(x, x.shape) for x in (query, key, value))
    saved = torch.empty((batch, heads, 4, _padded(q_len)), dtype=torch.float32, device=query.device)
    on_queries, on_keys = _table(of_queries), _table(of_keys)
    pointers = (grad_out, query, key, value, of_queries, of_keys, *inputs)
    strides = tuple(x.stride() for x in (grad_out, value, out))
    tables = on_queries and on_queries[1], on_keys and on_keys[1]
    is_wanted = [want and x.is_floating_point() for want, x in zip(wanted, inputs, strict=True)]
    of_scores = _of_scores(call, is_wanted)
    found: dict[int, Tensor] = {}

    def run(name: str, kernel: Any, made: tuple[Any, ...], of_other: Any) -> None:
        chosen = facts.configs[name]
        if name in OF_KEYS:
            programs = ceil_div(key.shape[2], chosen.block_n) * key.shape[1] * batch
            constants: tuple[Any, ...] = (chosen.statistics, facts.heads[1] != 1)
        else:
            programs = ceil_div(q_len, chosen.block_m) * heads * batch
            constants = (None if of_scores is None else of_scores.function,)
        if programs:
            arguments = (
                *call.operands(grad_out), *made, saved, saved.shape[3], call.seed,
                of_other, *call.reads, *facts.scalars, *facts.backward_constants[name], *constants,
            )  # fmt: skip
            of = name, strides, tables, of_scores is None
            launch(facts.kept, of, kernel, (programs, 1, 1), arguments, facts.options[name], *pointers)

    with on(query.device):
        _, value_dim, _, block_v, *_ = facts.sizes("query")
        rows = max(1, _STATISTICS // block_v)
        if batch * heads * q_len:
            launch(
                facts.kept, ("statistics", strides, any(wanted)), flash_backward.statistics,
                (ceil_div(q_len, rows) * heads * batch, 1, 1),
                (_strided(grad_out), _strided(out), row_max, row_sum, saved, saved.shape[3], *call.reads, heads, q_len,
                 facts.lengths[1], facts.scale, facts.code.sink if any(wanted) else None, LOG2E / facts.code.unit,
                 value_dim, block_v, rows),
                _USUAL, grad_out, out, *inputs,
            )  # fmt: skip
        made: tuple[Any, ...] = (_strided(dquery), None)
        if of_scores is not None:
            read, scores = inputs[of_scores.node.leaf], (batch, heads, q_len, key.shape[2])
            # Blocks that no query sees are not computed.
            found[of_scores.node.leaf] = dinput = torch.zeros(scores, dtype=read.dtype, device=read.device)
            made = (_strided(dquery), _strided(dinput))
        _assembled(facts, "query", functools.partial(run, "query", flash_backward.backward_query, made, on_queries))
        for name in together_or_apart(query.dtype, facts.widths):
            made = (_strided(dkey) if name != "value" else None, _strided(dvalue) if name != "key" else None)
            of_keys_or_values = functools.partial(run, name, flash_backward.backward_key_value, made, on_keys)
            _assembled(facts, name, of_keys_or_values)
        _add_input_gradients(call, grad_out, saved, is_wanted, of_scores, found)
    dinputs = [
        (found[n] if n in found else torch.zeros_like(x)).to(x.dtype).contiguous() if want else x.new_empty(0)
        for n, (x, want) in enumerate(zip(inputs, is_wanted, strict=True))
    ]
    return dquery, dkey, dvalue, dinputs


def _of_scores(call: _Call, is_wanted: Sequence[bool]) -> Gradient | None:
    """The gradient, if there is one, of a tensor with an element for each score: the kernel for query writes it."""
    scores = (*call.query.shape[:3], call.key.shape[2])
    for gradient in call.facts.code.gradients:
        leaf = gradient.node.leaf
        if isinstance(gradient.node, Input) and is_wanted[leaf] and call.inputs[leaf].shape == scores:
            return gradient
    return None


def _add_input_gradients(
    call: _Call,
    grad_out: Tensor,
    saved: Tensor,
    is_wanted: Sequence[bool],
    done: Gradient | None,
    found: dict[int, Tensor],
) -> None:
    """Add to `found` the gradients of what the scores read, by input, but that of `done`, which is there."""
    for gradient in call.facts.code.gradients:
        number = gradient.node.leaf
        if not is_wanted[number] or gradient is done:
            continue
        made = (_of_element if isinstance(gradient.node, Input) else _of_lookup)(call, gradient, grad_out, saved)
        found[number] = found[number] + made if number in found else made
    _add_sink_gradients(call, saved, is_wanted, found)


def _of_element(call: _Call, gradient: Gradient, grad_out: Tensor, saved: Tensor) -> Tensor:
    return _of_node(call, gradient, grad_out, saved, 0, call.query.shape[2], call.inputs[gradient.node.leaf].dtype)


def _of_lookup(call: _Call, gradient: Gradient, grad_out: Tensor, saved: Tensor) -> Tensor:
    """The gradient of a table, by way of that of each element looked up, for a strip of queries at a time."""
    source, (batch, heads, q_len, _) = call.inputs[gradient.node.leaf], call.query.shape
    into = torch.zeros(source.shape, dtype=torch.promote_types(source.dtype, torch.float32), device=source.device)
    kv_len = call.key.shape[2]
    in_row = (batch if "b" in gradient.along else 1) * (heads if "h" in gradient.along else 1)
    in_row *= kv_len if "j" in gradient.along else 1
    strip = max(1, _STRIP // max(in_row, 1)) if "i" in gradient.along else max(q_len, 1)
    for first in range(0, q_len, strip):
        last = min(first + strip, q_len)
        rows = _of_node(call, gradient, grad_out, saved, first, last - first, into.dtype)
        block = Block(batch, heads, (first, last), (0, kv_len), source.device, torch.float32)
        indices = gathered(gradient.node, call.inputs, call.numbers, block, {})
        accumulate(gradient.node, rows, into, indices, block)
    return into


def _of_node(
    call: _Call,
    gradient: Gradient,
    grad_out: Tensor,
    saved: Tensor,
    first: int,
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of what the node reads, [B|1, H|1, rows|1, Lk|1], for `rows` queries from `first` on."""
    made: list[Tensor] = []

    def run() -> None:
        made[:] = [_once_of_node(call, gradient, grad_out, saved, first, rows, dtype)]

    _assembled(call.facts, "input", run)
    return made[0]


def _once_of_node(
    call: _Call, gradient: Gradient, grad_out: Tensor, saved: Tensor, first: int, rows: int, dtype: torch.dtype
) -> Tensor:
    (batch, heads, _, _), kv_len, facts = call.query.shape, call.key.shape[2], call.facts
    tile, code = facts.configs["input"], facts.code
    blocks = (batch, heads, ceil_div(rows, tile.block_m), ceil_div(kv_len, tile.block_n))
    shape, own, count = [], 1, 1
    for name, size, programs in zip("bhij", (batch, heads, rows, kv_len), blocks, strict=True):
        shape.append(size if name in gradient.along else 1)
        own, count = (own * programs, count) if name in gradient.along else (own, count * programs)
    if not own or not count:
        return call.query.new_zeros(shape, dtype=dtype)
    parts = max(1, min(count, _PROGRAMS // own))
    made = call.query.new_empty([parts, *shape], dtype=dtype if parts == 1 else torch.float32)
    launch_once(
        flash_backward.backward_input, (own * parts, 1, 1),
        (*map(_strided, (grad_out, call.query, call.key, call.value)), made, saved, saved.shape[3], call.seed,
         *call.reads, *facts.scalars,
         batch, first, rows, parts, code.score, code.factor, gradient.function, LOG2E / code.unit,
         *(name in gradient.along for name in "bhij"), facts.even, *facts.sizes("input")),
        facts.options["input"],
    )  # fmt: skip
    return made[0] if parts == 1 else made.sum(0)


def _add_sink_gradients(call: _Call, saved: Tensor, is_wanted: Sequence[bool], found: dict[int, Tensor]) -> None:
    """Add to `found` the gradients of what the sink reads, from that of its logit, which `statistics` has written."""
    sink = call.facts.code.program.sink
    if sink is None:
        return
    batch, heads, q_len, _ = call.query.shape
    of_sink = saved[:, :, 3, :q_len, None]
    read = sink.x if isinstance(sink, Cast) and sink.dtype.is_floating_point else sink
    if isinstance(read, (Input, Gather)) and _is_of_heads(read, source := call.inputs[read.leaf], heads):
        if is_wanted[read.leaf]:
            of_heads = of_sink.sum((0, 2)).view(source.shape)
            found[read.leaf] = found[read.leaf] + of_heads if read.leaf in found else of_heads
        return
    wanted = [n for n in distinct(sink) if isinstance(n, (Input, Gather)) and is_wanted[n.leaf]]
    path = differentiable([sink], wanted)
    if not path:
        return
    memo: Memo = dict.fromkeys(needed(path))
    block = Block(batch, heads, (0, q_len), (0, 1), call.query.device, torch.float32)
    evaluate(sink, None, call.inputs, call.numbers, block, memo)
    for node in wanted:
        source = call.inputs[node.leaf]
        wide = torch.promote_types(source.dtype, torch.float32)
        into = found.get(node.leaf, torch.zeros(source.shape, dtype=wide, device=source.device)).to(wide)
        gradient = gradients(path, wanted, [(sink, of_sink)], call.numbers, block, memo).get(id(node))
        if gradient is not None:
            indices = gathered(node, call.inputs, call.numbers, block, memo)
            accumulate(node, gradient, into, indices, block)
            found[node.leaf] = into


def _is_of_heads(node: Input | Gather, source: Tensor, heads: int) -> bool:
    """Whether `node` reads one element of `source` for each head, and all of them, as most sinks do."""
    if isinstance(node, Gather):
        return node.index == (Position("h"),) and source.shape == (heads,)
    return source.shape == (1, heads, 1, 1)


def _assembled(facts: CallFacts, kernel: str, run: Callable[[], None]) -> None:
    """Run it: again with smaller tiles where the assembler made a mistake with these, and with fewer stages for as long
    as the device's shared memory does not hold them."""
    while True:
        try:
            return run()
        except MisassembledError:
            facts.give_up_groups(kernel)
        except OutOfResources:
            facts.give_up_stage(kernel)


def _padded(length: int) -> int:
    return ceil_div(length, ALIGNMENT) * ALIGNMENT


def _strided(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    return x, x.stride()


def _table(spans: Tensor | None) -> tuple[Tensor, tuple[int, ...]] | None:
    return None if spans is None else (spans, tuple(0 if spans.shape[d] == 1 else spans.stride(d) for d in (0, 1)))
