"""What shapes, strides and dtypes fix of a call of the flash kernels, worked out once for all calls that are alike."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from attn_fuse.kernels.operands import Operands, strides_inside
from attn_fuse.kernels.score.program import bound
from attn_fuse.kernels.switches import float32_precision
from attn_fuse.kernels.triton import WIDEST
from attn_fuse.kernels.triton.assembled import MisassembledError
from attn_fuse.kernels.triton.emitter import LONGEST
from attn_fuse.kernels.triton.flash.bulk import Bulk, bulk
from attn_fuse.kernels.triton.flash.configs import Config, Taken, config, together_or_apart, without_groups
from attn_fuse.kernels.triton.launch import KEPT, Launch
from attn_fuse.kernels.triton.scores import LOG2E, ScoreCode, score_code

log = logging.getLogger("attn_fuse")

# What the operator `spans` gave, of queries and of keys.
Spans = tuple[Tensor | None, Tensor | None]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, eq=False)
class CallFacts:
    """The facts that calls of the same shapes, strides and dtypes share.

    query, key: shapes. lower, upper: bounds of j - i, or None. reads: strides and sizes of the inputs.
    numbers: those of the score program, as kernels take them. capability: the major one of the device.
    drops: whether there is dropout. threshold: as int32, the 32-bit number below which dropout drops a weight.
    scale: what dropout multiplies the other weights by.
    inner: whether spans say where every query sees every key.
    shared: whether batch entries share what is read for each element of the scores.
    strides: of query, key and value as the kernels read them. spans: the strides of those of queries and of keys, or
        None.
    """

    dtype: torch.dtype
    device: torch.device
    query: torch.Size
    key: torch.Size
    value_dim: int
    code: ScoreCode
    taken: Taken
    drops: bool
    threshold: int
    scale: float
    lower: int | None
    upper: int | None
    numbers: tuple[int, ...]
    reads: tuple[int, ...]
    capability: int
    inner: bool
    shared: bool
    strides: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[int, int] | None, ...]
    _launches: dict[Hashable, dict[Hashable, Launch]] = field(default_factory=dict)

    def launches(self, *how: Hashable) -> dict[Hashable, Launch]:
        """The launches kept for calls of these facts that are alike in `how`, by kernel."""
        found = self._launches.get(how)
        if found is None:
            if len(self._launches) >= KEPT:
                self._launches.clear()
            found = self._launches[how] = {}
        return found

    @property
    def lengths(self) -> tuple[int, int]:
        """q_len and kv_len."""
        return self.query[2], self.key[2]

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads, and how many of them share a key head."""
        return self.query[1], self.query[1] // max(self.key[1], 1)

    @property
    def widths(self) -> tuple[int, int]:
        """head_dim and value_dim."""
        return self.query[3], self.value_dim

    @functools.cached_property
    def made(self) -> tuple[tuple[Sequence[int], Sequence[int]], ...]:
        """Shape and strides of the output, and of the gradients of query, key and value."""
        shapes = (*self.query[:3], self.value_dim), self.query, self.key, (*self.key[:3], self.value_dim)
        return tuple((shape, strides_inside(shape)) for shape in shapes)

    @functools.cached_property
    def of_keys(self) -> tuple[str, ...]:
        """The kernels for the gradients of key and value."""
        return together_or_apart(self.dtype, self.widths)

    @functools.cached_property
    def scalars(self) -> tuple[int | None, ...]:
        """lower, upper, heads, groups, q_len, kv_len, dropout, as the kernels take them."""
        return self.lower, self.upper, *self.heads, *self.lengths, self.threshold

    @functools.cached_property
    def bulk(self) -> dict[str, Bulk]:
        """How a kernel computes such calls by bulk copies, by its name; missing where it does not."""
        return bulk(self)

    def give_up(self, kernel: str, error: Exception) -> None:
        """From here on `kernel` runs in another way than the one that gave `error`, which is raised if there is none.

        First without bulk copies; then with fewer rows, of which each warp multiplies its own, where the assembler made
        a mistake, and with one stage less where the device did not hold it.
        """
        if self.bulk.pop(kernel, None) is None:
            before = self.configs[kernel]
            after = before
            if isinstance(error, MisassembledError):
                after = without_groups(before, kernel)
            elif isinstance(error, OutOfResources):
                after = replace(before, num_stages=max(1, before.num_stages - 1))
            if after == before:
                raise error
            self.configs[kernel] = after
        log.info("%s from here on in other tiles: %s", kernel, error)
        # Another thread may keep a launch meanwhile, so there is no walk over the table itself.
        for launches in [*self._launches.values()]:
            launches.clear()

    @property
    def rescaled(self) -> bool:
        """Whether the scores of whole blocks are in another unit than the others."""
        return self.code.unit_whole != self.code.unit

    @property
    def even(self) -> bool:
        """Whether the kernels are compiled for a multiple of 16 keys, where a tensor is read for each of them."""
        return (self.taken.element or self.taken.looked_up) and self.key[2] % 16 == 0

    def config(self, kernel: str) -> Config:
        """The config of `kernel`."""
        return config(kernel, self.dtype, self.widths, self.capability, self.taken)

    @functools.cached_property
    def configs(self) -> dict[str, Config]:
        """The config of each kernel, by its name."""
        return _Configs(self.config)

    @functools.cached_property
    def precision(self) -> str:
        """What tl.dot computes products in: "tf32", "tf32x3" or "ieee"; it matters for float32 alone."""
        return _precision(self.device, self.dtype, max(self.widths))

    def sizes(self, kernel: str) -> tuple[Any, ...]:
        """HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N and PRECISION of `kernel`."""
        chosen = self.configs[kernel]
        blocks = (max(16, triton.next_power_of_2(width)) for width in self.widths)
        return *self.widths, *blocks, chosen.block_m, chosen.block_n, self.precision

    @property
    def forward_constants(self) -> tuple[Any, ...]:
        """The constants of the forward kernel, from SCORE to PRECISION."""
        code = self.code
        functions = code.score, code.score_whole, code.slope, code.factor, code.sink, LOG2E / code.unit
        return *functions, self.inner, self.rescaled, self.even, self.shared, *self.sizes("forward")

    def backward_constants(self, kernel: str) -> tuple[Any, ...]:
        """The constants of `kernel`, for the gradient of query, key or value, from SCORE to PRECISION."""
        code = self.code
        of_score = code.score, code.score_whole, code.factor
        of_gradient = code.score_backward, code.backward_whole, code.backward_factor
        how = LOG2E / code.unit, self.inner, self.rescaled, self.even, self.shared
        return *of_score, *of_gradient, *how, *self.sizes(kernel)

    def options(self, kernel: str) -> dict[str, int]:
        """num_warps and num_stages of `kernel`."""
        chosen = self.configs[kernel]
        return {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}


class _Configs(dict[str, Config]):
    def __init__(self, usual: Callable[[str], Config]) -> None:
        super().__init__()
        self._usual = usual

    def __missing__(self, kernel: str) -> Config:
        self[kernel] = self._usual(kernel)
        return self[kernel]


def call_facts(given: Operands, spans: Spans = (None, None), centred: bool = False) -> CallFacts:
    """The facts of a call. centred: whether a centre is taken from the values.

    Raises ValueError for operands or a program that do not fit.
    """
    query, key, value, inputs = given.query, given.key, given.value, given.inputs
    precision = float32_precision(query.device) if query.dtype == torch.float32 else None
    alike: Hashable = (
        given.program, query.dtype, key.dtype, value.dtype, query.device, query.shape, key.shape, value.shape,
        query.stride(), key.stride(), value.stride(), (*given.numbers,), given.dropout_p, given.seed is None, precision,
        centred, *[None if x is None else (x.shape, x.stride()) for x in spans],
        *[(x.dtype, x.shape, x.stride()) for x in inputs],
    )  # fmt: skip
    found = _known.get(alike)
    if found is None:
        found = _worked_out(given, spans, centred)
        if len(_known) >= KEPT:
            _known.clear()
        _known[alike] = found
    return found


_known: dict[Hashable, CallFacts] = {}


def _worked_out(given: Operands, spans: Spans, centred: bool) -> CallFacts:
    given.check()
    query, key, value, inputs, numbers = given.query, given.key, given.value, given.inputs, given.numbers
    if not query.dtype == key.dtype == value.dtype or query.dtype not in DTYPES:
        raise ValueError(f"not computed in {query.dtype}, {key.dtype}, {value.dtype}")
    if max(query.shape[3], value.shape[3]) > WIDEST or max(query.shape[2], key.shape[2]) >= LONGEST:
        raise ValueError(f"shapes are too large: {[*query.shape]}, {[*value.shape]}")
    inner = spans[0] is not None and spans[0].shape[-1] == 4
    longest, half, dropout_p = max(given.sizes), query.dtype.itemsize == 2, given.dropout_p
    code = score_code(given.program, inputs, numbers, longest, half, inner)
    bounds = (bound(tree, numbers) for tree in (code.program.lower, code.program.upper))
    lower, upper = (None if n is None else max(-LONGEST, min(n, LONGEST)) for n in bounds)
    tiles = [x.shape for x in inputs if x.ndim == 4 and 1 not in x.shape[2:]]
    _, strides, whole = code.kernel_args(inputs, numbers)
    return CallFacts(
        dtype=query.dtype,
        device=query.device,
        query=query.shape,
        key=key.shape,
        value_dim=value.shape[3],
        code=code,
        taken=Taken(
            element=bool(tiles),
            looked_up=code.looks_up,
            drops=dropout_p > 0,
            again=code.score_backward is not None or code.factor is not None,
        ),
        drops=dropout_p > 0,
        threshold=_signed(min(round(dropout_p * 2**32), 2**32 - 1)),
        # At p = 1 every weight is dropped, whatever is drawn.
        scale=0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p),
        lower=lower,
        upper=upper,
        numbers=whole,
        reads=strides,
        capability=_capability(query.device),
        inner=inner,
        shared=bool(tiles) and query.shape[0] > 1 and all(shape[0] == 1 for shape in tiles),
        # Values less their centre are a contiguous copy.
        strides=(
            query.stride(),
            key.stride(),
            torch.empty(value.shape, device="meta").stride() if centred else value.stride(),
        ),
        spans=tuple(map(_of_table, spans)),
    )


def _of_table(spans: Tensor | None) -> tuple[int, int] | None:
    """The strides of spans over batch entries and heads, 0 where all share them."""
    if spans is None:
        return None
    batch, heads = (0 if spans.shape[d] == 1 else spans.stride(d) for d in (0, 1))
    return batch, heads


def _precision(device: torch.device, dtype: torch.dtype, width: int) -> str:
    """The precision of float32 products: TF32 where torch's own products may use it, else about float32."""
    if dtype != torch.float32 or float32_precision(device) != "ieee":
        return "tf32"
    # Three TF32 products of the halves of each number, about as precise as float32; wider rows would not fit the
    # registers.
    return "tf32x3" if width <= 64 else "ieee"


@functools.cache
def _capability(device: torch.device) -> int:
    """The major compute capability of `device`; 0 where it is no CUDA device."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0]
    return 0


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
