"""The point-wise steps of one block, between the products: one pass over the scores each way, fused by Inductor.

A step is traced with sizes that stand for any, and compiled once for a score program and the dtypes it reads; blocks of
all sizes and places share it. Small attentions run the same steps uncompiled, and so does all where no compiler works.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_fuse.expression.nodes import Diagonal, Expr, Gather, Input, Score, distinct
from attn_fuse.kernels.chunked.dropout import kept
from attn_fuse.kernels.score.gradient import differentiable, gradients, needed
from attn_fuse.kernels.score.program import Block, Memo, ScoreProgram, evaluate, gathered, widened
from attn_fuse.torch_internals import compiled_for_any_size

log = logging.getLogger("attn_fuse")

# What the block sizes are while a step is traced: none equal to another, so that none is taken for another. Whether
# there are more queries or more keys may be compiled for; the larger number of them comes before the smaller.
_STAND_INS = (3, 7, 440, 120)


@dataclass(frozen=True, eq=False)
class Steps:
    """The point-wise steps of a score program.

    leaves: the nodes whose tensors are handed in, block by block; what is read along diagonals has its rows in
    reverse. A `Gather` that is no leaf is read in the step; sources: the inputs that these look up, handed in whole.
    wanted: those of the leaves and lookups whose gradient is, and is given; into: those whose gradient goes into memory
    handed in. drops: whether there is
    dropout. shares: whether values are centred, and weights do not sum to 1. dtype: of the scores and all that is
    computed; multiplied: of what a product is then made of.
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
        return self.multiplied != self.dtype

    @functools.cached_property
    def exprs(self) -> tuple[Expr, ...]:
        return (self.program.score,) if self.program.factor is None else (self.program.score, self.program.factor)

    @functools.cached_property
    def path(self) -> list[Expr]:
        return differentiable(self.exprs, [*_raw_scores(self.exprs), *self.wanted, *self.into])

    @functools.cached_property
    def _looked_up(self) -> set[int]:
        return {id(x) for node in self.wanted if isinstance(node, Gather) for x in node.index}

    def forward(self, raw: Tensor, row_max: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """raw [B, H, rows, columns] becomes exp(score - maximum), times factor and dropout.

        row_max [B, H, rows, 1]: the greatest score of the blocks before. tensors: where the steps round, memory that
        takes the place of raw; of the leaves, the sources, then those of the dropout. Gives the new maximum, the sum of
        exp(score - maximum), what sums so far shrink by, and where there are shares the sum of what raw becomes.
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
        """raw becomes its own gradient; dweights, grad_out times value, becomes the weights that met the value.

        shift, over_sum, delta [B, H, rows, 1]: the maximum, 1 / the sum, grad_out . out. tensors: where there are
        shares, they and their gradient, [B, H, rows, 1]; then as in `forward`, but for the memory for `into` after that
        for raw. Gives, for each of `wanted` in that order, its gradient, as
        large as what it reads, and behind that of a `Gather` the indices at which it read.
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
            # In this order: where one weight is all there is, the second term is exactly 0.
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
    """The maximum, 0 where it is -inf: -inf less -inf is NaN, and a query that sees no key has weights exp(-inf)."""
    return torch.where(row_max == -torch.inf, 0.0, row_max)


def _raw_scores(exprs: Sequence[Expr]) -> list[Expr]:
    return list({id(node): node for expr in exprs for node in distinct(expr) if isinstance(node, Score)}.values())


def run(steps: Steps, name: str, tensors: Sequence[Tensor], compiles: bool) -> Any:
    """One step, forward or backward; compiled, if that can be, for any sizes of its tensors but those that are 1."""
    if not compiles:
        return getattr(steps, name)(*tensors)
    # What Inductor compiles for: besides the tensors, the number of threads and what is to be deterministic.
    step = (steps, name, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    known = (*step, *((t.dtype, t.device, t.shape, t.stride()) for t in tensors))
    if known not in _chosen:
        if len(_chosen) >= _MOST_CHOSEN:
            _chosen.clear()
        kind = (*step, *((t.dtype, t.device, *(min(n, 2) for n in t.shape)) for t in tensors))
        made = _compiled.setdefault(kind, [])
        try:
            _chosen[known] = _choose(getattr(steps, name), tensors, made)
        except Exception as problem:
            log.warning("chunked attention runs uncompiled: %s", str(problem).partition("\n")[0])
            made.append(_Compiled(getattr(steps, name), lambda tensors: True))
            _chosen[known] = made[-1].function
    return _chosen[known](*tensors)


@dataclass(frozen=True)
class _Compiled:
    """A step, and whether it takes tensors of given sizes and strides."""

    function: Callable[..., Any]
    takes: Callable[[Sequence[Tensor]], bool]


# By what they were compiled for; and which of them, by the sizes and strides of the tensors.
_compiled: dict[Any, list[_Compiled]] = {}
_chosen: dict[Any, Callable[..., Any]] = {}
_MOST_CHOSEN = 1 << 12


def _choose(step: Callable[..., Any], tensors: Sequence[Tensor], made: list[_Compiled]) -> Callable[..., Any]:
    for known in made:
        if known.takes(tensors):
            return known.function
    # Sizes that are all different leave the most open; where they do not fit, the tensors themselves do.
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
    """One for a tensor that spans a block's dimensions or some of them, as far apart in memory; any other itself."""
    if tensor.ndim != 4 or any(n not in (1, whole) for n, whole in zip(tensor.shape, block, strict=True)):
        return tensor
    shape = [1 if n == 1 else size for n, size in zip(tensor.shape, sizes, strict=True)]
    steps, dense, dense_here = [0] * 4, 1, 1
    for dim in reversed(range(4)):
        steps[dim] = tensor.stride(dim) if tensor.stride(dim) < dense_here else dense + tensor.stride(dim) - dense_here
        dense, dense_here = shape[dim] * steps[dim], tensor.shape[dim] * tensor.stride(dim)
    return torch.empty_strided(shape, steps, dtype=tensor.dtype, device=tensor.device).zero_()
