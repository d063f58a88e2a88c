"""Steps: the forward and the backward of one block, each fused by Inductor into products and a pass over the scores.

A step is traced with stand-in sizes and compiled once for a score program and the dtypes that it reads; blocks of all
sizes and places share it. Small attentions run the steps uncompiled, and so do all attentions without a compiler.
"""

from __future__ import annotations

import functools
import itertools
import math
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
from attn_fuse.report import log
from attn_fuse.torch_internals import compiled_for_any_size

# Batch, key heads, and the larger and smaller of rows and columns while a step is traced. They all differ, or tracing
# would take one for another. Inductor may compile for more rows than columns or the opposite.
_STAND_INS = (3, 7, 440, 120)
# Whether the operands of the steps, which have three dimensions, lie along the block's queries or its keys.
_OPERANDS = ("rows", "columns", "columns", "rows", "rows", "columns", "columns")


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of a score program.

    leaves: the nodes whose tensors each block passes in; those of a `Diagonal` have their rows in reverse.
    sources: the inputs, passed in whole, in which a step looks up each `Gather` that is no leaf.
    wanted: the leaves and lookups whose gradient a step returns. into: those whose gradient it writes to given memory.
    drops: whether there is dropout. shares: whether values are centred and weights may not sum to 1.
    dtype: the compute dtype. multiplied: the dtype of the operands of products, except query and key.
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

    @functools.cached_property
    def raw(self) -> list[Expr]:
        """The raw score, unless the program reads none."""
        return [node for node in distinct(self.program.score) if isinstance(node, Score)]

    @functools.cached_property
    def path(self) -> list[Expr]:
        """The nodes through which gradients flow, by `differentiable`."""
        return differentiable(self.program.weighing, [*self.raw, *self.wanted, *self.into])

    @functools.cached_property
    def _looked_up(self) -> set[int]:
        return {id(x) for node in self.wanted if isinstance(node, Gather) for x in node.index}

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, row_max: Tensor, row_sum: Tensor, *rest: Tensor
    ) -> None:
        """Add one block to the sums of its queries, which are rescaled to their new max.

        query [planes, groups * rows, D]; key and value [planes, columns, D or Dv], a plane for each key head of each
        batch entry. out [planes, groups * rows, Dv]: the sum of exp(score - max) times factor, dropout and value.
        row_max, row_sum [B, H, rows, 1]: the max score and the sum of exp(score - max). rest: with shares, the sum of
        the weights of the values, [B, H, rows, 1]; then what the block reads (`Worker`).
        """
        met, tensors = (rest[:1], rest[1:]) if self.shares else ((), rest)
        raw = self._raw(query, key, row_max)
        block, memo = self._read(raw, tensors, set(self.program.shared))
        scores = self._final(self.program.weighing[0], raw, tensors, block, memo)
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        shift = shift_of(new_max)
        shrink = (row_max - shift).exp()
        weights = (scores - shift).exp()
        total = weights.sum(-1, keepdim=True)
        for expr in self.program.weighing[1:]:
            weights = weights * self._final(expr, None, tensors, block, memo)
        if self.drops:
            weights = weights * kept(*tensors[-4:])
        for sums, more in ((row_sum, total), *((sums, weights.sum(-1, keepdim=True)) for sums in met)):
            sums.copy_(sums * shrink + more)
        found = torch.bmm(weights.to(self.multiplied).reshape(*query.shape[:2], -1), value)
        out.copy_(out * shrink.reshape(*query.shape[:2], 1) + found)
        row_max.copy_(new_max)

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, dquery: Tensor, dkey: Tensor, dvalue: Tensor,
        shift: Tensor, over_sum: Tensor, delta: Tensor, *rest: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        """Add one block to the gradients dquery, dkey and dvalue of its queries, keys and values.

        query, key, value and their gradients as in `forward`; grad [planes, groups * rows, Dv]: that of out. shift,
        over_sum, delta [B, H, rows, 1]: `shift_of` the max, 1 / sum, grad . out. rest: with shares, the shares and
        their gradient, [B, H, rows, 1]; memory for the gradients of `into`; then what the block reads. Returns the
        gradient of each of `wanted`, in the shape of what it reads, each `Gather`'s followed by its indices.
        """
        share, grad_share = rest[:2] if self.shares else (None, None)
        tensors = rest[2:] if self.shares else rest
        memory, tensors = tensors[: len(self.into)], tensors[len(self.into) :]
        raw = self._raw(query, key, shift)
        block, memo = self._read(raw, tensors, set(self.program.shared) | needed(self.path) | self._looked_up)
        scores, *factors = (self._final(expr, raw, tensors, block, memo) for expr in self.program.weighing)
        weights = (scores - shift).exp() * over_sum
        used, flowing, given = weights, torch.bmm(grad, value.mT).view(raw.shape).to(self.dtype), []
        passes = torch.ones_like(shift)
        if self.drops:
            keep = kept(*tensors[-4:])
            used, flowing, passes = used * keep, flowing * keep, passes * keep
        for expr, factor in zip(self.program.weighing[1:], factors, strict=True):
            given.append((expr, weights * (flowing if grad_share is None else flowing + passes * grad_share)))
            used, flowing, passes = used * factor, flowing * factor, passes * factor
        flowing = flowing - delta
        if share is not None and grad_share is not None:
            # In this order, the second term is exactly 0 for a row with a single weight.
            flowing = flowing + (passes - share) * grad_share
        given.append((self.program.weighing[0], flowing * weights))
        found = gradients(self.path, [*self.raw, *self.wanted, *self.into], given, (), block, memo)
        nothing = raw.new_zeros(1, 1, 1, 1)
        results = []
        for node in self.wanted:
            results.append(found.get(id(node), nothing))
            if isinstance(node, Gather):
                results += gathered(node, self._whole(tensors), (), block, memo)
        for leaf, place in zip(self.into, memory, strict=True):
            place.copy_(found.get(id(leaf), nothing))
        used = used.to(self.multiplied).reshape(*query.shape[:2], -1)
        dvalue.add_(torch.bmm(used.mT, grad))
        if self.raw and id(self.raw[0]) in found:
            draw = found[id(self.raw[0])].to(self.multiplied).expand(raw.shape).reshape(used.shape)
            dkey.add_(torch.bmm(draw.mT, query.to(self.multiplied)))
            dquery.add_(torch.bmm(draw, key))
        return results

    def _raw(self, query: Tensor, key: Tensor, column: Tensor) -> Tensor:
        """The raw scores [B, H, rows, columns] in the compute dtype. column [B, H, rows, 1]."""
        return torch.bmm(query.to(self.dtype), key.to(self.dtype).mT).view(*column.shape[:3], -1)

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
    """`row_max`, or 0 where it is -inf: a fully masked row then has the weights exp(-inf) = 0 instead of NaN."""
    return torch.where(row_max == -torch.inf, 0.0, row_max)


def run(steps: Steps, name: str, tensors: Sequence[Tensor], compiles: bool, threads: int | None = None) -> Any:
    """The result of the step `name`, "forward" or "backward".

    compiles: whether to compile the step for all sizes of its tensors except 1; if that fails, it runs uncompiled.
    threads: the number of threads of the step, which then runs in several workers at once, without the interpreter's
    lock; None for a single worker, with all threads of torch.
    """
    if not compiles:
        return getattr(steps, name)(*tensors)
    # Inductor's code also depends on the number of threads and on determinism.
    step = (steps, name, threads, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    known = (*step, *((t.dtype, t.device, t.shape, t.stride()) for t in tensors))
    chosen = _chosen.get(known)
    if chosen is None:
        kind = (*step, *((t.dtype, t.device, *(min(n, 2) for n in t.shape)) for t in tensors))
        with _one_at_a_time:
            chosen = _chosen.get(known) or _choose(
                getattr(steps, name), tensors, threads, _compiled.setdefault(kind, [])
            )
            if len(_chosen) >= _MOST_CHOSEN:
                _chosen.clear()
            _chosen[known] = chosen
    return chosen(*tensors)


# The steps by what they were compiled for, with tests of whether they take given tensors; and the step to run, by the
# sizes and strides of its tensors, too.
_Step = Callable[..., Any]
_Takes = Callable[[Sequence[Tensor]], bool]
_compiled: dict[Any, list[tuple[_Step, _Takes]]] = {}
_chosen: dict[Any, _Step] = {}
_MOST_CHOSEN = 1 << 12
# Several threads may run a step for the first time at once, and tracing is not thread-safe.
_one_at_a_time = threading.RLock()


def _choose(step: _Step, tensors: Sequence[Tensor], threads: int | None, made: list[tuple[_Step, _Takes]]) -> _Step:
    try:
        for compiled, takes in made:
            if takes(tensors):
                return compiled
        # Stand-ins make the fewest assumptions about sizes. If the result does not take the tensors, compile for them.
        for examples in (_stand_ins(tensors), [_laid_out(t, t.shape) for t in tensors]):
            compiled, takes = compiled_for_any_size(step, examples, threads)
            made.append((compiled, takes))
            if takes(tensors):
                return compiled
        raise RuntimeError(f"the compiled step does not take blocks of {list(tensors[0].shape)}")
    except Exception as problem:
        log.warning("chunked attention runs uncompiled: %s", first_line(problem))
        made.append((step, lambda tensors: True))
        return step


def _stand_ins(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`tensors`, with stand-ins in the same layout for those that span a block or some of its dimensions."""
    query, key, column = tensors[0], tensors[1], next(t for t in tensors if t.ndim == 4)
    taken = {n for t in tensors for n in t.shape}
    batch, kv_heads, more, fewer = (next(n for n in itertools.count(at) if n not in taken) for at in _STAND_INS)
    rows, columns = column.shape[2], key.shape[1]
    groups = query.shape[1] // rows
    block, other = (*column.shape[:3], columns), (more, fewer) if rows >= columns else (fewer, more)
    of_planes = [1 if n == 1 else size for n, size in ((block[0], batch), (block[1] // groups, kv_heads))]
    rows, columns = (1 if n == 1 else size for n, size in zip((rows, columns), other, strict=True))
    sizes = (of_planes[0], of_planes[1] * groups, rows, columns)

    def stand_in(at: int, t: Tensor) -> Tensor:
        if at < len(_OPERANDS) and t.ndim == 3:
            length = groups * rows if _OPERANDS[at] == "rows" else columns
            return _laid_out(t, [math.prod(of_planes), length, t.shape[2]])
        if t.ndim == 4 and all(n in (1, whole) for n, whole in zip(t.shape, block, strict=True)):
            return _laid_out(t, [1 if n == 1 else size for n, size in zip(t.shape, sizes, strict=True)])
        return t

    return list(itertools.starmap(stand_in, enumerate(tensors)))


def _laid_out(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of this shape, with the gaps between dimensions and the repetitions along them that `like` has."""
    steps, dense, dense_here = [0] * like.ndim, 1, 1
    for dim in reversed(range(like.ndim)):
        steps[dim] = like.stride(dim) if like.stride(dim) < dense_here else dense + like.stride(dim) - dense_here
        dense, dense_here = shape[dim] * steps[dim], like.shape[dim] * like.stride(dim)
    return torch.empty_strided(shape, steps, dtype=like.dtype, device=like.device).zero_()
