"""Steps: the point-wise work on one block between its products, one pass over the scores each way, fused by Inductor.

A step is traced with stand-in sizes, and compiled once for a score program and the dtypes that it reads; blocks of all
sizes and places share it. Small attentions run the steps uncompiled; where no compiler works, all attentions do.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_fuse.errors import first_line
from attn_fuse.expression.nodes import Diagonal, Expr, Gather, Input, Score, distinct
from attn_fuse.kernels.chunked.dropout import kept
from attn_fuse.kernels.score.gradient import differentiable, gradients, needed
from attn_fuse.kernels.score.program import Block, Memo, ScoreProgram, evaluate, gathered, widened
from attn_fuse.torch_internals import compiled_for_any_size

log = logging.getLogger("attn_fuse")

# Batch, heads, and the larger and the smaller of rows and columns while a step is traced. No two are equal, so that
# none is taken for another; Inductor may compile for whether rows or columns are more.
_STAND_INS = (3, 7, 440, 120)


@dataclass(frozen=True, eq=False)
class Steps:
    """The point-wise steps of a score program.

    leaves: the nodes whose tensors are handed in, block by block; that of a `Diagonal` has its rows in reverse.
    sources: the inputs, handed in whole, in which a step looks up each `Gather` that is no leaf.
    wanted: the leaves and lookups whose gradient a step gives. into: those whose gradient goes into memory handed in.
    drops: whether there is dropout. shares: whether values are centred and weights do not sum to 1.
    dtype: of the scores and all that is computed. multiplied: of the results that products take.
    """

    program: ScoreProgram
    leaves: tuple[Expr, ...]
    sources: tuple[int, ...]
    wanted: tuple[Input | Gather, ...]
    into: tuple[Diagonal | Gather, ...]
    drops: bool
    shares: bool
    dtype: torch.dtype
    multiplied: torch.dtype

    @property
    def rounds(self) -> bool:
        """Whether products take a narrower dtype than that of the scores; results then go into memory of their own."""
        return self.multiplied != self.dtype

    @functools.cached_property
    def exprs(self) -> tuple[Expr, ...]:
        """The score, and the factor where there is one."""
        return (self.program.score,) if self.program.factor is None else (self.program.score, self.program.factor)

    @functools.cached_property
    def path(self) -> list[Expr]:
        """The nodes through which gradients flow; see `differentiable`."""
        return differentiable(self.exprs, [*_raw_scores(self.exprs), *self.wanted, *self.into])

    @functools.cached_property
    def _looked_up(self) -> set[int]:
        return {id(x) for node in self.wanted if isinstance(node, Gather) for x in node.index}

    def forward(self, raw: Tensor, row_max: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Replace raw [B, H, rows, columns] by exp(score - max), times factor and dropout.

        row_max [B, H, rows, 1]: the max score of the blocks before. tensors: where the steps round, memory for the
        result in place of raw; then what `Plan.read` gives. Gives the new max, the sum of exp(score - max), what to
        multiply earlier sums by, and where there are shares the sum of the result.
        """
        becomes, tensors = self._becomes(raw, tensors)
        block, memo = self._read(raw, tensors, set(self.program.shared))
        scores = self._final(self.exprs[0], raw, tensors, block, memo)
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        shift = shift_of(new_max)
        weights = (scores - shift).exp()
        total = weights.sum(-1, keepdim=True)
        for expr in self.exprs[1:]:
            weights = weights * self._final(expr, None, tensors, block, memo)
        if self.drops:
            weights = weights * kept(*tensors[-4:])
        becomes.copy_(weights)
        met = [weights.sum(-1, keepdim=True)] if self.shares else []
        return new_max, total, (row_max - shift).exp(), *met

    def backward(
        self, raw: Tensor, dweights: Tensor, shift: Tensor, over_sum: Tensor, delta: Tensor, *tensors: Tensor
    ) -> list[Tensor]:
        """Replace raw by its gradient, and dweights, grad_out times value, by the weights that multiplied the value.

        shift, over_sum, delta [B, H, rows, 1]: `shift_of` the max, 1 / sum, grad_out . out. tensors: the shares and
        their gradient, [B, H, rows, 1], where there are any; then as in `forward`, but with the memory for `into` after
        that for raw. Gives for each of `wanted`, in order, its gradient, as large as what it reads, and after that of a
        `Gather` the indices at which it read.
        """
        share, grad_share = tensors[:2] if self.shares else (None, None)
        tensors = tensors[2:] if self.shares else tensors
        becomes, tensors = self._becomes(raw, tensors)
        memory, tensors = tensors[: len(self.into)], tensors[len(self.into) :]
        block, memo = self._read(raw, tensors, set(self.program.shared) | needed(self.path) | self._looked_up)
        scores, *factors = (self._final(expr, raw, tensors, block, memo) for expr in self.exprs)
        weights = (scores - shift).exp() * over_sum
        used, flowing, given = weights, dweights.to(self.dtype), []
        passes = torch.ones_like(shift)
        if self.drops:
            keep = kept(*tensors[-4:])
            used, flowing, passes = used * keep, flowing * keep, passes * keep
        for expr, factor in zip(self.exprs[1:], factors, strict=True):
            given.append((expr, weights * (flowing if grad_share is None else flowing + passes * grad_share)))
            used, flowing, passes = used * factor, flowing * factor, passes * factor
        flowing = flowing - delta
        if share is not None and grad_share is not None:
            # In this order, the second term is exactly 0 for a row of a single weight.
            flowing = flowing + (passes - share) * grad_share
        given.append((self.exprs[0], flowing * weights))
        score = _raw_scores(self.exprs)
        found = gradients(self.path, [*score, *self.wanted, *self.into], given, (), block, memo)
        nothing = raw.new_zeros(1, 1, 1, 1)
        results = []
        for node in self.wanted:
            results.append(found.get(id(node), nothing))
            if isinstance(node, Gather):
                results += gathered(node, self._whole(tensors), (), block, memo)
        for leaf, place in zip(self.into, memory, strict=True):
            place.copy_(found.get(id(leaf), nothing))
        draw = found.get(id(score[0]), nothing) if score else nothing
        dweights.copy_(used)
        becomes.copy_(draw)
        return results

    def _becomes(self, raw: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        return (tensors[0], tensors[1:]) if self.rounds else (raw, tensors)

    def _read(self, raw: Tensor, tensors: Sequence[Tensor], keep: set[int]) -> tuple[Block, Memo]:
        batch, heads, rows, columns = raw.shape
        block = Block(batch, heads, (0, rows), (0, columns), raw.device, self.dtype)
        memo: Memo = dict.fromkeys(keep)
        for node, tensor in zip(self.leaves, tensors, strict=False):
            memo[id(node)] = widened(tensor.flip(-2) if isinstance(node, Diagonal) else tensor, block)
        return block, memo

    def _final(self, expr: Expr, raw: Tensor | None, tensors: Sequence[Tensor], block: Block, memo: Memo) -> Tensor:
        return evaluate(expr, raw, self._whole(tensors), (), block, memo).to(self.dtype).expand(block.shape)

    def _whole(self, tensors: Sequence[Tensor]) -> Any:
        return dict(zip(self.sources, tensors[len(self.leaves) :], strict=False))


def shift_of(row_max: Tensor) -> Tensor:
    """`row_max`, or 0 where it is -inf: there -inf - -inf is NaN, and a fully masked row has weights exp(-inf)."""
    return torch.where(row_max == -torch.inf, 0.0, row_max)


def _raw_scores(exprs: Sequence[Expr]) -> list[Expr]:
    return list({id(node): node for expr in exprs for node in distinct(expr) if isinstance(node, Score)}.values())


def run(steps: Steps, name: str, tensors: Sequence[Tensor], compiles: bool) -> Any:
    """The result of the step `name`, "forward" or "backward".

    compiles: whether to compile the step for all sizes of its tensors except 1; where that fails, it runs uncompiled.
    """
    if not compiles:
        return getattr(steps, name)(*tensors)
    # Besides the tensors, Inductor compiles for the number of threads and for determinism.
    step = (steps, name, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    known = (*step, *((t.dtype, t.device, t.shape, t.stride()) for t in tensors))
    chosen = _chosen.get(known)
    if chosen is None:
        kind = (*step, *((t.dtype, t.device, *(min(n, 2) for n in t.shape)) for t in tensors))
        with _one_at_a_time:
            chosen = _chosen.get(known) or _choose(getattr(steps, name), tensors, _compiled.setdefault(kind, []))
            if len(_chosen) >= _MOST_CHOSEN:
                _chosen.clear()
            _chosen[known] = chosen
    return chosen(*tensors)


@dataclass(frozen=True)
class _Compiled:
    """A step. takes: whether `function` takes tensors of given sizes and strides."""

    function: Callable[..., Any]
    takes: Callable[[Sequence[Tensor]], bool]


# The steps, by what they were compiled for; and the one to run, also by the sizes and strides of its tensors.
_compiled: dict[Any, list[_Compiled]] = {}
_chosen: dict[Any, Callable[..., Any]] = {}
_MOST_CHOSEN = 1 << 12
# Threads that run a step for the first time at once compile it once, and tracing is not made for several.
_one_at_a_time = threading.RLock()


def _choose(step: Callable[..., Any], tensors: Sequence[Tensor], made: list[_Compiled]) -> Callable[..., Any]:
    try:
        return _compiled_for(step, tensors, made)
    except Exception as problem:
        log.warning("chunked attention runs uncompiled: %s", first_line(problem))
        made.append(_Compiled(step, lambda tensors: True))
        return step


def _compiled_for(step: Callable[..., Any], tensors: Sequence[Tensor], made: list[_Compiled]) -> Callable[..., Any]:
    for known in made:
        if known.takes(tensors):
            return known.function
    # Sizes that all differ assume the least. Where the result does not take the tensors, we compile for these.
    for examples in (_stand_ins(tensors), tensors):
        made.append(_Compiled(*compiled_for_any_size(step, examples)))
        if made[-1].takes(tensors):
            return made[-1].function
    raise RuntimeError(f"what was compiled does not take blocks of {list(tensors[0].shape)}")


def _stand_ins(tensors: Sequence[Tensor]) -> list[Tensor]:
    taken = {n for t in tensors for n in t.shape}
    batch, heads, more, fewer = (next(n for n in itertools.count(at) if n not in taken) for at in _STAND_INS)
    *_, rows, columns = tensors[0].shape
    sizes = (batch, heads, more, fewer) if rows >= columns else (batch, heads, fewer, more)
    return [_stand_in(t, tensors[0].shape, sizes) for t in tensors]


def _stand_in(tensor: Tensor, block: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A stand-in, laid out alike, for a tensor that spans a block or some of its dimensions; else the tensor itself."""
    if tensor.ndim != 4 or any(n not in (1, whole) for n, whole in zip(tensor.shape, block, strict=True)):
        return tensor
    shape = [1 if n == 1 else size for n, size in zip(tensor.shape, sizes, strict=True)]
    steps, dense, dense_here = [0] * 4, 1, 1
    for dim in reversed(range(4)):
        steps[dim] = tensor.stride(dim) if tensor.stride(dim) < dense_here else dense + tensor.stride(dim) - dense_here
        dense, dense_here = shape[dim] * steps[dim], tensor.shape[dim] * tensor.stride(dim)
    return torch.empty_strided(shape, steps, dtype=tensor.dtype, device=tensor.device).zero_()
