"""Facts: everything about a call of the flash kernels that follows from shapes, strides and dtypes."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from attn_fuse.kernels.operands import Operands, strides_inside
from attn_fuse.kernels.score.program import bound
from attn_fuse.kernels.switches import float32_precision
from attn_fuse.kernels.triton import WIDEST
from attn_fuse.kernels.triton.assembled import MisassembledError
from attn_fuse.kernels.triton.emitter import LONGEST
from attn_fuse.kernels.triton.flash.bulk import Bulk, bulk
from attn_fuse.kernels.triton.flash.configs import Config, Taken, block_of, config, together_or_apart, without_groups
from attn_fuse.kernels.triton.launch import KEPT, Launch
from attn_fuse.kernels.triton.scores import LOG2E, score_code
from attn_fuse.report import log

# The results of the operator `spans`, for queries and for keys.
Spans = Sequence[Tensor | None]
# The elements of the output that one program of `statistics` reads.
_STATISTICS = 4096
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class CallFacts:
    """The facts shared by calls of the same shapes, strides and dtypes.

    query, key: shapes. widths: head_dim and value_dim. strides: of query, key and value as the kernels read them.
    made: shape and strides of the output, and of the gradients of query, key and value.
    spans: the strides of both spans over batch entries and heads, or None. inner: whether the spans also say where
        every query sees every key.
    reads, numbers: strides and sizes of the inputs, and the numbers of the score program, as the kernels take them.
    shared: whether all batch entries read the same tensor for each element of the scores.
    of_keys: the kernels for the gradients of key and value.
    configs: the config of each kernel. bulk: the tiles of the kernels that use bulk copies for these calls.
    launches: the launches kept for similar calls, by the differences of these calls, then by kernel.

    Raises ValueError for invalid operands or an invalid program.
    """

    def __init__(self, given: Operands, spans: Spans, centred: bool) -> None:
        given.check()
        query, key, value, inputs, numbers = given.query, given.key, given.value, given.inputs, given.numbers
        if not query.dtype == key.dtype == value.dtype or query.dtype not in DTYPES:
            raise ValueError(f"not computed in {query.dtype}, {key.dtype}, {value.dtype}")
        if max(query.shape[3], value.shape[3]) > WIDEST or max(query.shape[2], key.shape[2]) >= LONGEST:
            raise ValueError(f"shapes are too large: {[*query.shape]}, {[*value.shape]}")
        self.dtype, self.device, self.capability = query.dtype, query.device, _capability(query.device)
        self.query, self.key, self.widths = query.shape, key.shape, (query.shape[3], value.shape[3])
        self.inner = spans[0] is not None and spans[0].shape[-1] == 4
        self.spans = [None if x is None else tuple(x.stride(d) if x.shape[d] > 1 else 0 for d in (0, 1)) for x in spans]
        # Centred values are a contiguous copy.
        of_value = torch.empty(value.shape, device="meta").stride() if centred else value.stride()
        self.strides = query.stride(), key.stride(), of_value
        shapes = (*query.shape[:3], value.shape[3]), query.shape, key.shape, value.shape
        self.made = [(shape, strides_inside(shape)) for shape in shapes]

        self.code = score_code(given.program, inputs, numbers, max(given.sizes), query.dtype.itemsize == 2, self.inner)
        _, self.reads, self.numbers = self.code.kernel_args(inputs, numbers)
        self.rescaled = self.code.unit_whole != self.code.unit
        tiles = [x.shape for x in inputs if x.ndim == 4 and 1 not in x.shape[2:]]
        self.shared = bool(tiles) and query.shape[0] > 1 and all(shape[0] == 1 for shape in tiles)
        self.taken = Taken(
            element=bool(tiles),
            looked_up=self.code.looks_up,
            drops=given.dropout_p > 0,
            again=self.code.score_backward is not None or self.code.factor is not None,
        )
        bounds = (bound(tree, numbers) for tree in (self.code.program.lower, self.code.program.upper))
        self._lower, self._upper = (None if n is None else max(-LONGEST, min(n, LONGEST)) for n in bounds)
        self._dropout_p = given.dropout_p

        self.of_keys = together_or_apart(self.dtype, self.widths)
        self.configs = {kernel: self.config(kernel) for kernel in ("forward", "query", *self.of_keys, "input")}
        self.configs["statistics"] = Config(max(1, _STATISTICS // block_of(self.widths[1])), 1, 4, 3)
        self.bulk: dict[str, Bulk] = bulk(self)
        self.launches: dict[Hashable, dict[Hashable, Launch]] = {}

    def config(self, kernel: str) -> Config:
        """The first config of `kernel`, before `give_up` changes it."""
        return config(kernel, self.dtype, self.widths, self.capability, self.taken)

    def give_up(self, kernel: str, error: Exception) -> None:
        """Make `kernel` run in another way, because its present way raised `error`. Raise `error` if no way is left.

        The first step drops the bulk copies. After that a misassembled kernel gets few enough rows that each warp
        multiplies alone, and a kernel too large for the device loses one stage.
        """
        if self.bulk.pop(kernel, None) is None:
            before = after = self.configs[kernel]
            if isinstance(error, MisassembledError):
                after = without_groups(before, kernel)
            elif isinstance(error, OutOfResources):
                after = replace(before, num_stages=max(1, before.num_stages - 1))
            if after == before:
                raise error
            self.configs[kernel] = after
        log.info("%s runs in other tiles from now on: %s", kernel, error)
        # Not a walk over the dict itself, because another thread may add to it.
        for launches in [*self.launches.values()]:
            launches.clear()

    def constants(self, tile: Config | Bulk) -> dict[str, Any]:
        """The arguments of the kernels other than tensors, by parameter name."""
        code, (head_dim, value_dim), groups = self.code, self.widths, self.query[1] // max(self.key[1], 1)
        return {
            "lower": self._lower, "upper": self._upper, "heads": self.query[1], "groups": groups,
            "q_len": self.query[2], "kv_len": self.key[2], "batch": self.query[0],
            # A weight is dropped if its 32-bit random number is below this threshold, written as int32.
            "dropout": (min(round(self._dropout_p * 2**32), 2**32 - 1) + 2**31) % 2**32 - 2**31,
            # At p = 1 every weight counts as dropped, whatever its random number.
            "dropout_scale": 0.0 if self._dropout_p == 1.0 else 1.0 / (1.0 - self._dropout_p),
            "SCORE": code.score, "SCORE_INSIDE": code.score_whole, "SLOPE": code.slope, "FACTOR": code.factor,
            "SINK": code.sink, "BACKWARD": code.score_backward, "BACKWARD_INSIDE": code.backward_whole,
            "TIMES": code.backward_factor, "TO_LOG2": LOG2E / code.unit,
            "INNER": self.inner, "RESCALED": self.rescaled, "SHARED": self.shared,
            # Whether to compile for a multiple of 16 keys, which helps where a tensor is read for each key.
            "EVEN": (self.taken.element or self.taken.looked_up) and self.key[2] % 16 == 0,
            "HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "BLOCK_D": block_of(head_dim), "BLOCK_V": block_of(value_dim),
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STAGES": tile.num_stages,
            "STATISTICS": tile.statistics, "GROUPED": groups != 1,
            "PRECISION": _precision(self.device, self.dtype, max(self.widths)),
        }  # fmt: skip


def call_facts(given: Operands, spans: Spans = (None, None), centred: bool = False) -> CallFacts:
    """The facts of a call, made once for all similar calls. centred: whether the values are centred.

    Raises ValueError like `CallFacts`.
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
        found = CallFacts(given, spans, centred)
        if len(_known) >= KEPT:
            _known.clear()
        _known[alike] = found
    return found


_known: dict[Hashable, CallFacts] = {}


def _precision(device: torch.device, dtype: torch.dtype, width: int) -> str:
    """The input precision of tl.dot: TF32 where torch's own float32 products may use it, else about float32."""
    if dtype != torch.float32 or float32_precision(device) != "ieee":
        return "tf32"
    # tf32x3 splits each number into two TF32 halves and is about as precise as float32. Wider rows would not fit the
    # registers.
    return "tf32x3" if width <= 64 else "ieee"


@functools.cache
def _capability(device: torch.device) -> int:
    """The major compute capability of `device`, or 0 if it is not a CUDA device."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0]
    return 0
