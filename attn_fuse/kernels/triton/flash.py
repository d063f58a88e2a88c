"""Launching the flash kernels: forward, and the gradients of query, key, value and of what the scores read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from attn_fuse.kernels.centring import centre_of, less_centre
from attn_fuse.kernels.operands import check_dropout, check_shapes
from attn_fuse.kernels.score_gradient import differentiable, gradients, needed
from attn_fuse.kernels.score_program import Block, Memo, accumulate, bound, evaluate, gathered, nodes
from attn_fuse.kernels.switches import float32_precision
from attn_fuse.kernels.triton import flash_backward, flash_forward
from attn_fuse.kernels.triton.emitter import LONGEST
from attn_fuse.kernels.triton.flash_configs import Config, config
from attn_fuse.kernels.triton.scores import LOG2E, Gradient, ScoreCode, score_code

# Programs that fill any device, where a sum is cut into parts for them; and elements of a gradient kept between what
# looks up a table and the table.
_PROGRAMS = 512
_STRIP = 1 << 25


@dataclass(frozen=True)
class _Call:
    """One call: the tensors as they came, what the kernels are given, and the code of its score function."""

    query: Tensor
    key: Tensor
    value: Tensor
    inputs: Sequence[Tensor]
    numbers: Sequence[int]
    seed: Tensor | None
    dropout_p: float
    code: ScoreCode

    @property
    def dropout(self) -> tuple[float, float]:
        """The probability, and what kept weights are multiplied by. At 1 none is kept, whatever is drawn."""
        return self.dropout_p, 0.0 if self.dropout_p == 1.0 else 1.0 / (1.0 - self.dropout_p)

    @property
    def lengths(self) -> tuple[int, int]:
        return self.query.shape[2], self.key.shape[2]

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads, and how many of them share a key head."""
        heads = self.query.shape[1]
        return heads, heads // max(self.key.shape[1], 1)

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        program = self.code.program
        found = (bound(tree, self.numbers) for tree in (program.lower, program.upper))
        lower, upper = (None if n is None else max(-LONGEST, min(n, LONGEST)) for n in found)
        return lower, upper

    @property
    def _is_heavy(self) -> bool:
        """Whether dropout or what the scores read for each element takes registers that a tile has not left."""
        tiles = any(x.ndim == 4 and 1 not in x.shape[2:] for x in self.inputs)
        looks_up = any(node[0] == "gather" for node in nodes(self.code.program.score))
        return self.seed is not None or tiles or looks_up

    def config(self, kernel: str) -> Config:
        widths = (self.query.shape[3], self.value.shape[3])
        return config(kernel, self.query.dtype, widths, _capability(self.query.device), self._is_heavy)

    def constants(self, kernel: str) -> dict[str, Any]:
        head_dim, value_dim = self.query.shape[3], self.value.shape[3]
        chosen = self.config(kernel)
        return {
            "SCORE": self.code.score,
            "FACTOR": self.code.factor,
            "TO_LOG2": LOG2E / self.code.unit,
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
            "BLOCK_V": max(16, triton.next_power_of_2(value_dim)),
            "BLOCK_M": chosen.block_m,
            "BLOCK_N": chosen.block_n,
            "PRECISION": _precision(self.query.device, self.query.dtype, max(head_dim, value_dim)),
            "num_warps": chosen.num_warps,
            "num_stages": chosen.num_stages,
        }


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
    """softmax over the final scores, times the factor, times value, as `chunked_blocks.attend` has it.

    query [B, H, Lq, D], key [B, Hkv, Lk, D], value [B, Hkv, Lk, Dv] of one dtype, float16, bfloat16 or float32, D and
    Dv up to 256, any strides. of_queries, of_keys: what `spans` gave, or None.

    Gives out [B, H, Lq, Dv], in memory [B, Lq, H, Dv], and for each query the greatest score, in the unit of its
    `ScoreCode`, and the sum, float32 [B, H, Lq]; the last is `centre_of` the values where `centred` is set, and out is
    then over values less the centre. Raises ValueError for what does not fit.
    """
    call = _call(query, key, value, inputs, numbers, seed, dropout_p, program)
    centre = centre_of(query, value) if centred else value.new_empty(0)
    value = less_centre(value, centre, value.dtype)
    (batch, heads, q_len, _), value_dim = query.shape, value.shape[3]
    out = _laid_out(query, value_dim)
    row_max = query.new_empty(batch, heads, q_len, dtype=torch.float32)
    row_sum = torch.empty_like(row_max)
    constants = call.constants("forward")
    programs = triton.cdiv(q_len, constants["BLOCK_M"]) * heads * batch
    with _on(query.device):
        if programs:
            flash_forward.forward[(programs,)](
                *map(_strided, (query, key, value, out)), row_max, row_sum, seed, _table(of_queries),
                call.code.reads(inputs, numbers), *call.bounds, *call.heads, *call.lengths, *call.dropout,
                SCORE_INSIDE=call.code.score_inside, SINK=call.code.sink, **constants,
            )  # fmt: skip
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
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of query, key, value, in memory [B, L, H, D], and of each input, contiguous; each in its own dtype.

    out, row_max, row_sum, centre: what `attend` gave. wanted: one for each input; those not wanted, and those that are
    not floating, get an empty tensor. into: where to write the first three instead. Every sum has one order: results do
    not change from run to run.
    """
    value = less_centre(value, centre, value.dtype)
    call = _call(query, key, value, inputs, numbers, seed, dropout_p, program)
    batch, heads, q_len, _ = query.shape
    dquery, dkey, dvalue = into or (_laid_out(x, x.shape[3]) for x in (query, key, value))
    delta = torch.empty_like(row_max)
    saved = (row_max, row_sum, delta)
    tensors = [*map(_strided, (grad_out, query, key, value))]
    scalars = (*call.bounds, *call.heads, *call.lengths, *call.dropout)
    reads, inside = call.code.reads(inputs, numbers), call.code.score_inside
    with _on(query.device):
        constants = call.constants("query") | {"SCORE_INSIDE": inside, "BACKWARD": call.code.score_backward}
        programs = triton.cdiv(q_len, constants["BLOCK_M"]) * heads * batch
        if programs:
            flash_backward.sum_of_products[(programs,)](
                tensors[0], _strided(out), delta, heads, q_len,
                **{name: constants[name] for name in ("VALUE_DIM", "BLOCK_V", "BLOCK_M")},
            )  # fmt: skip
            flash_backward.backward_query[(programs,)](
                *tensors, _strided(dquery), *saved, seed, _table(of_queries), reads, *scalars, **constants
            )
        constants = call.constants("key_value") | {"SCORE_INSIDE": inside, "BACKWARD": call.code.score_backward}
        programs = triton.cdiv(key.shape[2], constants["BLOCK_N"]) * key.shape[1] * batch
        if programs:
            flash_backward.backward_key_value[(programs,)](
                *tensors, _strided(dkey), _strided(dvalue), *saved, seed, _table(of_keys), reads, *scalars, **constants
            )
        dinputs = _input_gradients(call, grad_out, saved, wanted)
    return dquery, dkey, dvalue, dinputs


def _input_gradients(
    call: _Call, grad_out: Tensor, saved: tuple[Tensor, Tensor, Tensor], wanted: Sequence[bool]
) -> list[Tensor]:
    is_wanted = [want and x.is_floating_point() for want, x in zip(wanted, call.inputs, strict=True)]
    found: dict[int, Tensor] = {}
    for gradient in call.code.gradients:
        number = gradient.node[1]
        if not is_wanted[number]:
            continue
        made = (_of_element if gradient.node[0] == "input" else _of_lookup)(call, gradient, grad_out, saved)
        found[number] = found[number] + made if number in found else made
    _add_sink_gradients(call, saved, is_wanted, found)
    return [
        (found[n] if n in found else torch.zeros_like(x)).to(x.dtype).contiguous() if want else x.new_empty(0)
        for n, (x, want) in enumerate(zip(call.inputs, is_wanted, strict=True))
    ]


def _of_element(call: _Call, gradient: Gradient, grad_out: Tensor, saved: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return _of_node(call, gradient, grad_out, saved, 0, call.query.shape[2], call.inputs[gradient.node[1]].dtype)


def _of_lookup(call: _Call, gradient: Gradient, grad_out: Tensor, saved: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """By way of the gradient of each element looked up, of a strip of queries at a time."""
    source, (batch, heads, q_len, _) = call.inputs[gradient.node[1]], call.query.shape
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
    saved: tuple[Tensor, Tensor, Tensor],
    first: int,
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """What the node reads has this gradient, [B|1, H|1, rows|1, Lk|1], for queries from `first` on."""
    (batch, heads, _, _), kv_len = call.query.shape, call.key.shape[2]
    constants = call.constants("input")
    blocks = (batch, heads, triton.cdiv(rows, constants["BLOCK_M"]), triton.cdiv(kv_len, constants["BLOCK_N"]))
    shape, own, count = [], 1, 1
    for name, size, programs in zip("bhij", (batch, heads, rows, kv_len), blocks, strict=True):
        shape.append(size if name in gradient.along else 1)
        own, count = (own * programs, count) if name in gradient.along else (own, count * programs)
    if not own or not count:
        return call.query.new_zeros(shape, dtype=dtype)
    parts = max(1, min(count, _PROGRAMS // own))
    made = call.query.new_empty([parts, *shape], dtype=dtype if parts == 1 else torch.float32)
    flash_backward.backward_input[(own * parts,)](
        *map(_strided, (grad_out, call.query, call.key, call.value)), made, *saved, call.seed,
        call.code.reads(call.inputs, call.numbers), *call.bounds, batch, *call.heads, *call.lengths, first, rows, parts,
        *call.dropout, GRADIENT=gradient.function, **{f"ALONG_{n.upper()}": n in gradient.along for n in "bhij"},
        **constants,
    )  # fmt: skip
    return made[0] if parts == 1 else made.sum(0)


def _add_sink_gradients(
    call: _Call, saved: tuple[Tensor, Tensor, Tensor], is_wanted: Sequence[bool], found: dict[int, Tensor]
) -> None:
    """Of a number for each query: nothing that needs a kernel."""
    program, unit = call.code.program, call.code.unit
    if program.sink is None:
        return
    wanted = [node for node in nodes(program.sink) if node[0] in ("input", "gather") and is_wanted[node[1]]]
    path = differentiable([program.sink], wanted)
    if not path:
        return
    memo: Memo = dict.fromkeys(needed(path))
    row_max, row_sum, delta = (x.unsqueeze(-1) for x in saved)
    batch, heads, q_len, _ = call.query.shape
    block = Block(batch, heads, (0, q_len), (0, 1), call.query.device, torch.float32)
    sink = evaluate(program.sink, None, call.inputs, call.numbers, block, memo).float()
    shift = torch.where(row_max == -torch.inf, 0.0, row_max)
    weight = torch.exp2((sink * unit - shift) * (LOG2E / unit)) * torch.where(row_sum == 0, 0.0, 1 / row_sum)
    for node in wanted:
        source = call.inputs[node[1]]
        wide = torch.promote_types(source.dtype, torch.float32)
        into = found.get(node[1], torch.zeros(source.shape, dtype=wide, device=source.device)).to(wide)
        gradient = gradients(path, wanted, [(program.sink, -weight * delta)], call.numbers, block, memo).get(id(node))
        if gradient is not None:
            indices = gathered(node, call.inputs, call.numbers, block, memo)
            accumulate(node, gradient, into, indices, block)
            found[node[1]] = into


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    seed: Tensor | None,
    dropout_p: float,
    program: str,
) -> _Call:
    check_shapes(query, key, value)
    check_dropout(seed, dropout_p)
    if not query.dtype == key.dtype == value.dtype or query.dtype not in DTYPES:
        raise ValueError(f"not computed in {query.dtype}, {key.dtype}, {value.dtype}")
    if max(query.shape[3], value.shape[3]) > WIDEST or max(query.shape[2], key.shape[2]) >= LONGEST:
        raise ValueError(f"shapes are too large: {[*query.shape]}, {[*value.shape]}")
    code = score_code(program, inputs, numbers)
    return _Call(query, key, value, inputs, numbers, seed if dropout_p else None, dropout_p, code)


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 256


def _laid_out(like: Tensor, width: int) -> Tensor:
    """[B, H, L, width] as a projection of all heads has it in memory: [B, L, H, width]."""
    batch, heads, length, _ = like.shape
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def _strided(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    return x, x.stride()


def _table(spans: Tensor | None) -> tuple[Tensor, tuple[int, ...]] | None:
    return None if spans is None else (spans, tuple(0 if spans.shape[d] == 1 else spans.stride(d) for d in (0, 1)))


def _precision(device: torch.device, dtype: torch.dtype, width: int) -> str:
    """How tensor cores take float32: as torch's own products do, as far as they are allowed to."""
    if dtype != torch.float32 or float32_precision(device) != "ieee":
        return "tf32"
    # Three products of the halves of each number, about as precise as float32; wider rows would not fit the registers.
    return "tf32x3" if width <= 64 else "ieee"


@functools.cache
def _capability(device: torch.device) -> int:
    """The major one; of the device that Triton compiles for where the tensors are on none."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0]
    return 0


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    # Triton launches on the current device.
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
