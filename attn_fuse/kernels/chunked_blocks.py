"""Memory-efficient attention in plain torch operations, over blocks of queries and keys.

Online softmax (Rabe and Staats, arXiv 2112.05682), and a backward that computes the scores of each block again
(FlashAttention-2, arXiv 2307.08691). It runs on any device and takes any score function, as a `ScoreProgram`. Memory
is linear in q_len and in kv_len: nothing is as large as the scores but an input that comes so and its gradient.

A softmax over scores that are all equal and huge, as a finite fill makes them, must stay the mean of the values.
There log(sum) is lost in the rounding of max + log(sum), so the two are kept apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_fuse.kernels.score_gradient import differentiable, gradients, needed
from attn_fuse.kernels.score_program import (
    POSITIONS,
    Block,
    Memo,
    ScoreProgram,
    Tree,
    accumulate,
    bound,
    evaluate,
    nodes,
)

QUERY_BLOCK = 512
KEY_BLOCK = 512
SMALLEST_BLOCK = 64
# Scores in one block, over all batches and heads.
BLOCK_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class _Attention:
    """One call: the tensors as they came, what they are called for, and the dtype that it is computed in."""

    query: Tensor
    key: Tensor
    value: Tensor
    inputs: Sequence[Tensor]
    numbers: Sequence[int]
    seed: Tensor | None
    dropout_p: float
    program: ScoreProgram
    dtype: torch.dtype


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    seed: Tensor | None,
    dropout_p: float,
    program: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax over the final scores, times the factor, times value.

    query [B, H, Lq, D], key [B, Hkv, Lk, D], value [B, Hkv, Lk, Dv], H a multiple of Hkv, any strides; float16 and
    bfloat16 are computed in float32. inputs, numbers: what the program reads. seed: int64, one element, where
    dropout_p is not 0; the same seed drops the same weights whatever the blocks are.

    Gives out [B, H, Lq, Dv] in query's dtype, and for each query the greatest score and the sum of exp(score - that),
    the sink among them, [B, H, Lq] in the compute dtype. A query whose scores are all -inf gives 0, with maximum -inf
    (unless there is a sink) and sum 0; NaN and +inf come out as NaN.

    Raises ValueError for shapes, dtypes or a program that do not fit.
    """
    call = _call(query, key, value, inputs, numbers, seed, dropout_p, program)
    batch, heads, q_len, _ = query.shape
    out = query.new_empty(batch, heads, q_len, value.shape[-1])
    row_max = query.new_empty(batch, heads, q_len, dtype=call.dtype)
    row_sum = torch.empty_like(row_max)
    with torch.no_grad(), _no_autocast(query.device):
        for start, stop in _query_blocks(call):
            rows = slice(start, stop)
            block_out, block_max, block_sum = _attend_rows(call, start, stop)
            out[:, :, rows].copy_(block_out)
            row_max[:, :, rows].copy_(block_max.squeeze(-1))
            row_sum[:, :, rows].copy_(block_sum.squeeze(-1))
    return out, row_max, row_sum


def _attend_rows(call: _Attention, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """out, the maximum and the sum of queries [start, stop), all [B, H, stop - start, ...]."""
    query = _grouped(call.query[:, :, start:stop].to(call.dtype), call)
    whole = _block(call, (start, stop), (0, 1))
    row_max = torch.full(whole.shape, -torch.inf, dtype=call.dtype, device=whole.device)
    if call.program.sink is not None:
        sink = evaluate(call.program.sink, None, call.inputs, call.numbers, whole)
        row_max = sink.to(call.dtype).expand(whole.shape)
    row_sum = (row_max - _shift(row_max)).exp_()
    out = row_sum.new_zeros(*whole.shape[:3], call.value.shape[-1])
    for keys in _key_blocks(call, start, stop):
        block = _block(call, (start, stop), keys)
        memo: Memo = dict.fromkeys(call.program.shared)
        raw = (query @ _keys(call.key, keys, call).mT).view(block.shape)
        scores = _final(call.program.score, raw, call, block, memo)
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        shift = _shift(new_max)
        weights = (scores - shift).exp_()
        shrink = (row_max - shift).exp_()
        row_max, row_sum = new_max, row_sum * shrink + weights.sum(-1, keepdim=True)
        if call.program.factor is not None:
            weights = weights * _final(call.program.factor, None, call, block, memo)
        if call.dropout_p:
            weights.mul_(_kept(call, block))
        product = _grouped(weights, call) @ _keys(call.value, keys, call)
        out = (out * shrink).add_(product.view(out.shape))
    return torch.where(row_sum == 0, 0.0, out / row_sum), row_max, row_sum


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    seed: Tensor | None,
    dropout_p: float,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    program: str,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of query, key, value and of each input, contiguous, each in its own dtype.

    out, row_max, row_sum: what `attend` gave. wanted: one for each input; those not wanted, and those that are not
    floating, get an empty tensor. Accumulated in the compute dtype, always in the same order.
    """
    call = _call(query, key, value, inputs, numbers, seed, dropout_p, program)
    dquery = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    sums = _Sums(
        key=torch.zeros(key.shape, dtype=call.dtype, device=key.device),
        value=torch.zeros(value.shape, dtype=call.dtype, device=value.device),
        inputs={
            n: torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, call.dtype), device=x.device)
            for n, x in enumerate(inputs)
            if wanted[n] and x.is_floating_point()
        },
    )
    with torch.no_grad(), _no_autocast(query.device):
        for start, stop in _query_blocks(call):
            part = slice(start, stop)
            grad_rows, block_sum = grad_out[:, :, part].to(call.dtype), row_sum[:, :, part, None]
            rows = _Rows(
                span=(start, stop),
                query=_grouped(query[:, :, part].to(call.dtype), call),
                grad_out=_grouped(grad_rows, call),
                # With weights w, factors f, dropout m: sum_j w_j f_j m_j (grad_out . value_j) = grad_out . out.
                delta=(grad_rows * out[:, :, part]).sum(-1, keepdim=True),
                shift=_shift(row_max[:, :, part, None]),
                over_sum=torch.where(block_sum == 0, 0.0, 1 / block_sum),
            )
            dquery[:, :, part].copy_(_rows_backward(call, rows, sums).view(dquery[:, :, part].shape))
            _sink_backward(call, rows, sums)
    dinputs = [sums.inputs[n].to(x.dtype) if n in sums.inputs else x.new_empty(0) for n, x in enumerate(inputs)]
    return dquery, sums.key.to(key.dtype), sums.value.to(value.dtype), dinputs


@dataclass(frozen=True)
class _Rows:
    """Some queries on the way back. query, grad_out: [B, Hkv, groups * rows, D or Dv]; the others [B, H, rows, 1]."""

    span: tuple[int, int]
    query: Tensor
    grad_out: Tensor
    delta: Tensor
    shift: Tensor
    over_sum: Tensor


@dataclass(frozen=True)
class _Sums:
    """Gradients that are added to, in the compute dtype; of the inputs, those that are wanted."""

    key: Tensor
    value: Tensor
    inputs: dict[int, Tensor]


def _rows_backward(call: _Attention, rows: _Rows, sums: _Sums) -> Tensor:
    """The gradient of `rows.query`."""
    program = call.program
    trees = [program.score] if program.factor is None else [program.score, program.factor]
    wanted = _wanted(trees, sums)
    path = differentiable(trees, wanted)
    dquery = torch.zeros_like(rows.query)
    for keys in _key_blocks(call, *rows.span):
        block = _block(call, rows.span, keys)
        memo: Memo = dict.fromkeys(program.shared | needed(path))
        key_block, value_block = _keys(call.key, keys, call), _keys(call.value, keys, call)
        raw = (rows.query @ key_block.mT).view(block.shape)
        scores, *factors = (_final(tree, raw, call, block, memo) for tree in trees)
        weights = (scores - rows.shift).exp_().mul_(rows.over_sum)
        dweights = (rows.grad_out @ value_block.mT).view(block.shape)
        used, given = weights, []
        if call.dropout_p:
            kept = _kept(call, block)
            dweights, used = dweights.mul_(kept), used * kept
        for factor in factors:
            given.append((trees[1], weights * dweights))
            dweights, used = dweights.mul_(factor), used * factor
        sums.value[:, :, slice(*keys)].add_(_grouped(used, call).mT @ rows.grad_out)
        given.append((program.score, dweights.sub_(rows.delta).mul_(weights)))
        draw = _pull_back(path, wanted, given, call, block, memo, sums)
        if draw is not None:
            draw = _grouped(draw, call)
            dquery += draw @ key_block
            sums.key[:, :, slice(*keys)].add_(draw.mT @ rows.query)
    return dquery


def _sink_backward(call: _Attention, rows: _Rows, sums: _Sums) -> None:
    tree = call.program.sink
    if tree is None:
        return
    wanted = _wanted([tree], sums)
    path = differentiable([tree], wanted)
    memo: Memo = dict.fromkeys(needed(path))
    block = _block(call, rows.span, (0, 1))
    weight = (_final(tree, None, call, block, memo) - rows.shift).exp_().mul_(rows.over_sum)
    _pull_back(path, wanted, [(tree, weight.mul_(rows.delta).neg_())], call, block, memo, sums)


def _wanted(trees: Sequence[Tree], sums: _Sums) -> list[Tree]:
    """The nodes whose gradient is: the raw score, and what reads an input whose gradient is."""
    distinct = {id(node): node for tree in trees for node in nodes(tree)}.values()
    reads = [node for node in distinct if node[0] in ("input", "gather") and node[1] in sums.inputs]
    return [*(node for node in distinct if node[0] == "score"), *reads]


def _pull_back(
    path: Sequence[Tree],
    wanted: Sequence[Tree],
    given: Sequence[tuple[Tree, Tensor]],
    call: _Attention,
    block: Block,
    memo: Memo,
    sums: _Sums,
) -> Tensor | None:
    """The gradient of the raw scores, None where nothing depends on them; those of inputs are added to `sums`."""
    draw = None
    found = gradients(path, wanted, given, call.numbers, block, memo)
    for node in wanted:
        gradient = found.get(id(node))
        if node[0] == "score":
            draw = gradient
        elif gradient is not None:
            accumulate(node, gradient, sums.inputs[node[1]], call.inputs, call.numbers, block, memo)
    return draw


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    seed: Tensor | None,
    dropout_p: float,
    program: str,
) -> _Attention:
    if not (query.ndim == key.ndim == value.ndim == 4):
        raise ValueError("query, key and value need four dimensions")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"shapes do not fit: {[*query.shape]}, {[*key.shape]}, {[*value.shape]}")
    if query.shape[1] != key.shape[1] and (key.shape[1] == 0 or query.shape[1] % key.shape[1]):
        raise ValueError(f"{query.shape[1]} query heads are no multiple of {key.shape[1]} key heads")
    if not 0.0 <= dropout_p <= 1.0 or (dropout_p > 0.0 and (seed is None or seed.numel() != 1)):
        raise ValueError("dropout needs a probability and a seed of one element")
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    if not dtype.is_floating_point:
        raise ValueError(f"attention is not computed in {dtype}")
    dtype = torch.promote_types(dtype, torch.float32)
    return _Attention(query, key, value, inputs, numbers, seed, dropout_p, ScoreProgram.loads(program), dtype)


def _block(call: _Attention, queries: tuple[int, int], keys: tuple[int, int]) -> Block:
    return Block(call.query.shape[0], call.query.shape[1], queries, keys, call.query.device, call.dtype)


def _block_sizes(call: _Attention) -> tuple[int, int]:
    rows, columns = QUERY_BLOCK, KEY_BLOCK
    planes = call.query.shape[0] * call.query.shape[1]
    while planes * rows * columns > BLOCK_ELEMENTS and max(rows, columns) > SMALLEST_BLOCK:
        rows, columns = (rows // 2, columns) if rows >= columns else (rows, columns // 2)
    return rows, columns


def _query_blocks(call: _Attention) -> Iterator[tuple[int, int]]:
    size, q_len = _block_sizes(call)[0], call.query.shape[2]
    return ((start, min(start + size, q_len)) for start in range(0, q_len, size))


def _key_blocks(call: _Attention, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The keys that queries [start, stop) may see."""
    lower, upper = bound(call.program.lower, call.numbers), bound(call.program.upper, call.numbers)
    first = 0 if lower is None else max(0, start + lower)
    last = call.key.shape[2] if upper is None else min(call.key.shape[2], stop + upper)
    size = _block_sizes(call)[1]
    return ((j, min(j + size, last)) for j in range(first, last, size))


def _grouped(x: Tensor, call: _Attention) -> Tensor:
    """[B, H, rows, n] as [B, Hkv, groups * rows, n]: one product for all query heads that share a key head."""
    batch, heads, rows, n = x.shape
    kv_heads = call.key.shape[1]
    return x.reshape(batch, kv_heads, heads // max(kv_heads, 1) * rows, n)


def _keys(x: Tensor, keys: tuple[int, int], call: _Attention) -> Tensor:
    return x[:, :, slice(*keys)].to(call.dtype)


def _final(tree: Tree, raw: Tensor | None, call: _Attention, block: Block, memo: Memo) -> Tensor:
    return evaluate(tree, raw, call.inputs, call.numbers, block, memo).to(call.dtype).expand(block.shape)


def _shift(row_max: Tensor) -> Tensor:
    # -inf less -inf is NaN, and a query that sees no key has a weight of exp(-inf) for each.
    return torch.where(row_max == -torch.inf, 0.0, row_max)


def _kept(call: _Attention, block: Block) -> Tensor:
    """What dropout multiplies the weights of a block by: 0 or 1 / (1 - p), from a hash of seed and position.

    Four rounds of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), one for each of seed, head, query and key.
    """
    assert call.seed is not None
    if call.dropout_p == 1.0:
        return torch.zeros(block.shape, dtype=call.dtype, device=block.device)
    b, h, i, j = (evaluate((name,), None, (), (), block) for name in POSITIONS)
    state = _hashed(call.seed.reshape(()).to(torch.int64) + _GOLDEN)
    for counter in (b * block.heads + h, i, j):
        state = _hashed(state + (counter + 1) * _GOLDEN)
    kept = _shifted(state, 11) >= round(call.dropout_p * 2**53)
    return kept.to(call.dtype).mul_(1.0 / (1.0 - call.dropout_p))


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)


def _hashed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    x = x.bitwise_xor_(_shifted(x, 27)).mul_(_signed(0x94D049BB133111EB))
    return x.bitwise_xor_(_shifted(x, 31))


def _shifted(x: Tensor, bits: int) -> Tensor:
    # torch shifts copies of the sign in; a logical shift has zeros there.
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    # Autocast reaches into an operator, and would round the float32 products.
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
