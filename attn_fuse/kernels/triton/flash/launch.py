"""Launches of the flash kernels: forward, and the gradients of query, key, value and the inputs of the scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
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
from attn_fuse.kernels.triton.flash.bulk import Bulk, Strided, descriptors, is_copied
from attn_fuse.kernels.triton.flash.configs import OF_KEYS, Config
from attn_fuse.kernels.triton.flash.facts import CallFacts, Spans, call_facts
from attn_fuse.kernels.triton.launch import ALIGNMENT, KEPT, Launch, ceil_div, misaligned, on, stream_of
from attn_fuse.kernels.triton.scores import Gradient, readable

# Enough programs to fill any device; longer sums are cut into parts until this many run.
_PROGRAMS = 512

_KERNELS = {
    "forward": flash_forward.forward,
    "statistics": flash_backward.statistics,
    "query": flash_backward.backward_query,
    "input": flash_backward.backward_input,
    **dict.fromkeys(OF_KEYS, flash_backward.backward_key_value),
}


class Call(NamedTuple):
    """One call, and the facts it shares with similar calls.

    operands: query, key and the centred value. spans: each with the strides of its first two dimensions.
    seed: None without dropout. reads: the inputs with their strides and sizes, and the numbers.
    lie: from `misaligned`. launches: those kept for calls like this one.
    grad_out, saved: only in a backward; saved: the results of `statistics`, and the stride between two statistics.
    """

    given: Operands
    facts: CallFacts
    operands: Sequence[Strided]
    spans: Sequence[Any]
    seed: Tensor | None
    reads: tuple[Any, ...]
    stream: int
    lie: tuple[bool, ...]
    launches: dict[Hashable, Launch]
    grad_out: Any = None
    saved: tuple[Any, ...] = ()

    def launch(
        self,
        kernel: str,
        tile: Config | Bulk,
        arguments: tuple[Any, ...],
        constants: Mapping[str, Any] = MappingProxyType({}),
        which: Hashable = None,
        programs: int = 0,
    ) -> None:
        """Launch `kernel` on `arguments`, followed by its parameters named in the facts or in `constants`.

        which: a key for the values of `constants`. programs: the size of the grid, by default one program per tile.
        """
        launch = self.launches.get((kernel, type(tile), which))
        if launch is None:
            facts = self.facts
            batch, heads, length, _ = facts.key if kernel in OF_KEYS else facts.query
            tiles = ceil_div(length, tile.block_n if kernel in OF_KEYS else tile.block_m)
            function, known = _function(kernel, tile), {**facts.constants(tile), **constants}
            given = tuple(known[name] for name in function.arg_names if name in known)
            launch = Launch(function, programs or tiles * heads * batch, given, **tile.options)
            self.launches[kernel, type(tile), which] = launch
        launch(self.stream, self.lie, *arguments)


def _function(kernel: str, tile: Config | Bulk) -> Any:
    if not isinstance(tile, Bulk):
        return _KERNELS[kernel]
    from attn_fuse.kernels.triton.flash import hopper, hopper_backward

    return hopper.bulk_forward if kernel == "forward" else hopper_backward.bulk_query


def _call(
    given: Operands, spans: Spans, value: Tensor, facts: CallFacts, *others: Tensor, how: Hashable = (), **backward: Any
) -> Call:
    """The call with these operands. others: further tensors whose alignment matters.

    how: whatever else distinguishes the launches of calls with the same facts.
    """
    query, key, inputs, (of_query, of_key, of_value) = given.query, given.key, given.inputs, facts.strides
    operands = (query, of_query), (key, of_key), (value, of_value)
    tables = spans if spans[0] is None else tuple(zip(spans, facts.spans, strict=True))
    reads = (readable(inputs), facts.reads), facts.numbers
    lie = misaligned(query, key, value, *others, *spans, *inputs)
    seed = given.seed if facts.taken.drops else None
    launches = facts.launches.get(how)
    if launches is None:
        if len(facts.launches) >= KEPT:
            facts.launches.clear()
        launches = facts.launches[how] = {}
    return Call(given, facts, operands, tables, seed, reads, stream_of(query.device), lie, launches, **backward)


def attend(
    given: Operands, spans: Spans = (None, None), centred: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """softmax(final scores) * factor @ value, like `chunked.attend`: out, row_max, row_sum, centre.

    given: query, key and value in float16, bfloat16 or float32, all in one dtype, with rows of at most 256.
    out: [B, H, Lq, Dv], in memory [B, Lq, H, Dv].
    row_max, row_sum: float32 [B, H, Lq], the max score of each query in the unit of the `ScoreCode`, and the sum of
        exp(score - max); both include the sink.
    centre: `centre_of` the values if `centred`, and out is then computed from the centred values; else empty.

    Raises ValueError for invalid shapes, dtypes, dropout or programs.
    """
    query, value, facts = given.query, given.value, call_facts(given, spans, centred)
    centre = centre_of(query, value) if centred else value.new_empty(0)
    out = query.new_empty_strided(*facts.made[0])
    row_max = query.new_empty(facts.query[:3], dtype=torch.float32)
    row_sum = torch.empty_like(row_max)
    if not facts.key[2] and facts.code.sink is None:
        # Without keys the product is an empty sum, 0 rather than NaN.
        return out.zero_(), row_max.fill_(-torch.inf), row_sum.fill_(torch.nan), centre.zero_()
    value = less_centre(value, centre, value.dtype)
    with on(query.device):
        _run(facts, "forward", _forward, _call(given, spans, value, facts), out, row_max, row_sum)
    return out, row_max, row_sum, centre


def _forward(call: Call, out: Tensor, row_max: Tensor, row_sum: Tensor) -> None:
    facts, operands = call.facts, call.operands  # type: CallFacts, Sequence[Any]
    tile: Config | Bulk | None = facts.bulk.get("forward")
    # The bulk copy engine needs addresses that are multiples of 16 bytes.
    if isinstance(tile, Bulk) and not any(call.lie[:3]):
        operands = descriptors(operands, tile)
    else:
        tile = facts.configs["forward"]
    made = (out, facts.made[0][1]), row_max, row_sum
    call.launch("forward", tile, (*operands, *made, call.seed, call.spans[0], *call.reads))


def attend_backward(
    given: Operands, spans: Spans, made: Sequence[Tensor], grad_out: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of query, key and value, in memory [B, L, H, D], and of each input, contiguous, in their dtypes.

    made: the results of `attend`. wanted: whether each input needs a gradient; an input that needs none or is not
    floating-point gets an empty tensor.

    Every sum has a fixed order, so results do not change between runs. Raises ValueError like `attend`.
    """
    query, inputs, (out, row_max, row_sum, centre) = given.query, given.inputs, made
    facts = call_facts(given, spans, centre.dim() == 4)
    value = less_centre(given.value, centre, given.value.dtype)
    (batch, heads, q_len, _), kv_len = facts.query, facts.key[2]
    is_wanted = [want and x.is_floating_point() for want, x in zip(wanted, inputs, strict=True)]
    dquery, dkey, dvalue = (query.new_empty_strided(*shape) for shape in facts.made[1:])
    saved = query.new_empty((batch, heads, 4, ceil_div(q_len, ALIGNMENT) * ALIGNMENT), dtype=torch.float32)
    found: dict[int, Tensor] = {}
    with on(query.device):
        pulled, of_out = (grad_out, grad_out.stride()), (out, out.stride())
        backward = {"how": (pulled[1], of_out[1], *is_wanted), "grad_out": pulled, "saved": (saved, saved.shape[3])}
        call = _call(given, spans, value, facts, grad_out, out, row_max, row_sum, **backward)
        arguments = pulled, of_out, row_max, row_sum, *call.saved, *call.reads
        sink = facts.code.sink if any(is_wanted) else None
        call.launch("statistics", facts.configs["statistics"], arguments, {"SINK": sink})
        dinput, of_scores = None, _of_scores(call, is_wanted) if any(is_wanted) else None
        if of_scores is not None:
            read, scores = inputs[of_scores.node.leaf], (batch, heads, q_len, kv_len)
            # The kernel skips hidden blocks, whose gradients stay 0.
            found[of_scores.node.leaf] = dinput = torch.zeros(scores, dtype=read.dtype, device=read.device)
        _run(facts, "query", _query, call, dquery, dinput, of_scores)
        for name in facts.of_keys:
            sums = None if name == "value" else dkey, None if name == "key" else dvalue
            _run(facts, name, _key_value, call, name, *sums)
        if any(is_wanted):
            _add_input_gradients(call, is_wanted, of_scores, found)
    dinputs = [
        (found[n] if n in found else torch.zeros_like(x)).to(x.dtype).contiguous() if want else x.new_empty(0)
        for n, (x, want) in enumerate(zip(inputs, is_wanted, strict=True))
    ]
    return dquery, dkey, dvalue, dinputs


def _query(call: Call, dquery: Tensor, dinput: Tensor | None, of_scores: Gradient | None) -> None:
    facts, operands = call.facts, (call.grad_out, *call.operands)  # type: CallFacts, Sequence[Any]
    tile: Config | Bulk | None = facts.bulk.get("query") if dinput is None and not any(call.lie[:4]) else None
    if isinstance(tile, Bulk) and is_copied(call.grad_out[0].shape, call.grad_out[1]):
        operands = descriptors(operands, tile)
    else:
        tile = facts.configs["query"]
    of_input = None if dinput is None else (dinput, dinput.stride())
    made = (dquery, facts.made[1][1]), of_input, *call.saved
    gradient = None if of_scores is None else of_scores.function
    call.launch("query", tile, (*operands, *made, call.seed, call.spans[0], *call.reads), {"GRADIENT": gradient})


def _key_value(call: Call, name: str, dkey: Tensor | None, dvalue: Tensor | None) -> None:
    of_key = None if dkey is None else (dkey, call.facts.made[2][1])
    of_value = None if dvalue is None else (dvalue, call.facts.made[3][1])
    arguments = call.grad_out, *call.operands, of_key, of_value, *call.saved, call.seed, call.spans[1], *call.reads
    call.launch(name, call.facts.configs[name], arguments)


def _of_scores(call: Call, is_wanted: Sequence[bool]) -> Gradient | None:
    """The gradient, if wanted, of an input with one element for each score, which the kernel for query writes."""
    scores = call.given.sizes
    for gradient in call.facts.code.gradients:
        leaf = gradient.node.leaf
        if isinstance(gradient.node, Input) and is_wanted[leaf] and call.given.inputs[leaf].shape == scores:
            return gradient
    return None


def _add_input_gradients(
    call: Call, is_wanted: Sequence[bool], done: Gradient | None, found: dict[int, Tensor]
) -> None:
    """Add the gradients of the inputs to `found`, by input number. done: the gradient that is there already."""
    for which, gradient in enumerate(call.facts.code.gradients):
        number = gradient.node.leaf
        if is_wanted[number] and gradient is not done:
            made = _of_read(call, which)
            found[number] = found[number] + made if number in found else made
    _add_sink_gradients(call, is_wanted, found)


def _of_read(call: Call, which: int) -> Tensor:
    """The gradient of the input that the node of gradient `which` reads. Tables take a strip of queries at a time."""
    given, gradient = call.given, call.facts.code.gradients[which]
    node, (batch, heads, q_len, kv_len) = gradient.node, given.sizes

    def of_rows(first: int, last: int, dtype: torch.dtype) -> Tensor:
        made: Tensor = _run(call.facts, "input", _of_rows, call, which, first, last - first, dtype)
        return made

    if isinstance(node, Input):
        return of_rows(0, q_len, given.inputs[node.leaf].dtype)
    along = (n if name in gradient.along else 1 for name, n in zip("bhj", (batch, heads, kv_len), strict=True))
    in_row = math.prod(along) if "i" in gradient.along else 0
    return of_table(node, of_rows, in_row, given.inputs, given.numbers, given.sizes)


def _of_rows(call: Call, which: int, first: int, rows: int, dtype: torch.dtype) -> Tensor:
    """The gradient of the node of gradient `which`, [B|1, H|1, rows|1, Lk|1], for `rows` queries from `first` on."""
    query, (batch, heads, _, kv_len), gradient = call.given.query, call.given.sizes, call.facts.code.gradients[which]
    tile, along = call.facts.configs["input"], gradient.along
    sizes = {"b": batch, "h": heads, "i": rows, "j": kv_len}
    blocks = sizes | {"i": ceil_div(rows, tile.block_m), "j": ceil_div(kv_len, tile.block_n)}
    shape = [size if name in along else 1 for name, size in sizes.items()]
    own, count = (math.prod(n for name, n in blocks.items() if (name in along) is mine) for mine in (True, False))
    if not own or not count:
        return query.new_zeros(shape, dtype=dtype)
    parts = max(1, min(count, _PROGRAMS // own))
    made = query.new_empty([parts, *shape], dtype=dtype if parts == 1 else torch.float32)
    constants = {"row_count": rows, "parts": parts, "GRADIENT": gradient.function}
    constants |= {f"ALONG_{name.upper()}": name in along for name in sizes}
    arguments = call.grad_out, *call.operands, made, *call.saved, call.seed, *call.reads, first
    call.launch("input", tile, arguments, constants, (which, rows), own * parts)
    return made[0] if parts == 1 else made.sum(0)


def _add_sink_gradients(call: Call, is_wanted: Sequence[bool], found: dict[int, Tensor]) -> None:
    """Add the gradients of the sink's inputs to `found`. `statistics` has saved the gradient of the sink's logit."""
    sink = call.facts.code.program.sink
    if sink is None:
        return
    batch, heads, q_len, _ = call.given.sizes
    of_sink = call.saved[0][:, :, 3, :q_len, None]
    wide = {}
    for leaf in {node.leaf for node in distinct(sink) if isinstance(node, (Input, Gather)) and is_wanted[node.leaf]}:
        source = call.given.inputs[leaf]
        dtype = torch.promote_types(source.dtype, torch.float32)
        wide[leaf] = found[leaf].to(dtype) if leaf in found else source.new_zeros(source.shape, dtype=dtype)
    block = Block(batch, heads, (0, q_len), (0, 1), of_sink.device, torch.float32)
    pull_back(sink, of_sink, call.given.inputs, call.given.numbers, block, wide)
    found |= wide


def _run(facts: CallFacts, kernel: str, run: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `run`. If the kernel fails, it runs again in another way until no way is left."""
    while True:
        try:
            return run(*arguments)
        except (TritonError, RuntimeError) as error:
            facts.give_up(kernel, error)
