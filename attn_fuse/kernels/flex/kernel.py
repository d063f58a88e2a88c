"""flex: torch's FlexAttention (arXiv 2412.05496), with the score function and the block mask of the score program.

Taken: any function of the scores, any mask, biases, grouped queries, another value_dim; sinks where FlexAttention gives
its log-sum-exp. Declined: dropout and factors on the weights, for which it has no place; gradients on the CPU; before
torch 2.15, gradients of what the score function reads; graphs that Inductor does not compile, where torch stores every
score.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.attention.flex_attention import BlockMask

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.emit.builder import NotEmitted, tensor
from attn_fuse.graph.names import value_of
from attn_fuse.kernels.flex.blocks import flex_blocks, flex_operands
from attn_fuse.kernels.flex.mods import (
    blocks_part,
    mask_mod,
    mask_part,
    over_queries,
    scaled,
    score_mod,
    score_part,
    sink_part,
    with_exact_fills,
)
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.score.write import score_call
from attn_fuse.torch_internals import flex_attention, flex_differentiates_what_it_reads, flex_runs_on_cpu

if TYPE_CHECKING:
    from attn_fuse.emit.call import Call

# Queries and keys in a block of the mask.
BLOCKS = (128, 128)
# For one query, torch's C++ template has a second form, which it takes where the keys of a block divide 128. This form
# gives 0 for scores far below 0 where some of the keys are hidden.
ONE_QUERY_BLOCKS = (128, 256)
# Below this head_dim, torch's C++ template multiplies the keys after the last multiple of 16 by a form for 16 keys, if
# their number and head_dim fit into whole vectors of less than 16 floats (AVX2, NEON). This form reads beyond the keys,
# and it writes over the maxima of the softmax (torch 2.13).
_CPU_LEAST_HEAD_DIM = 24
# The tables of a BlockMask, in the order of `flex_blocks`.
_TABLES = tuple(f"{kind}_{what}" for kind in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices"))
_NOT_DIFFERENTIATED = "gives no gradient to what a function of the scores reads before torch 2.15"
NO_MEAN = "a query that sees no key would not get the mean of the values on CUDA"
# The min head_dim and value_dim of torch's Triton template.
_LEAST_DIM = 16


def limits(attention: Attention, facts: Facts) -> Iterator[str]:
    """The reasons beside device type and dtype, such as no Inductor, dropout, or gradients on CPU."""
    on_cpu = facts.device.type == "cpu"
    if not facts.compiled:
        yield "stores every score where the graph is not compiled by Inductor"
    if attention.dropout_p is not None:
        yield "takes no dropout"
    if attention.factor is not None:
        yield "takes no factor on the weights that differs from key to key"
    if facts.symbolic & {"heads", "kv_heads", "head_dim", "value_dim"}:
        yield "needs numbers of heads and head_dims that stay the same"
    if facts.q_len == 0 or facts.kv_len == 0 or facts.batch == 0:
        yield "takes no empty sequence"
    if on_cpu and facts.training:
        yield "gives no gradients on CPU"
    if on_cpu and attention.sink is not None:
        yield "gives no log-sum-exp on CPU, which a sink needs"
    if on_cpu and facts.compiled and not flex_runs_on_cpu():
        yield "torch has it on CPU only with AVX2, and not on macOS"
    if not on_cpu and min(facts.head_dim, facts.value_dim) < _LEAST_DIM:
        yield f"takes no head_dim or value_dim below {_LEAST_DIM}"
    if facts.bias_needs_grad and not flex_differentiates_what_it_reads():
        yield _NOT_DIFFERENTIATED
    # The backward takes exp(score - lse): at scores like -1e9, rounding has lost the number of keys from the lse.
    if facts.training and attention.mask.empty_rows == "mean":
        yield "a query that sees no key would get a wrong gradient"
    if facts.training and facts.bias_may_hide:
        yield "a bias that may hide every key of a query, as padding does, would get a wrong gradient"
    if not on_cpu and not facts.training and facts.bias_may_hide:
        yield NO_MEAN


def emit(call: Call) -> Node:
    """Build the call of `attend`, and return the node of [batch, heads, q_len, value_dim].

    Raises NotEmitted where the score reads a tensor that needs a gradient torch does not give; on a CPU under Inductor,
    where score or mask reads one of symbolic sizes; on CUDA, for fills that `with_exact_fills` cannot make exact.
    """
    facts, attention, score = call.facts, call.attention, score_call(call)
    on_cpu = facts.device.type == "cpu"
    blocks = ONE_QUERY_BLOCKS if on_cpu and facts.q_len == 1 and "q_len" not in facts.symbolic else BLOCKS
    of_score = score_part(score.program)
    if not on_cpu:
        exact = with_exact_fills(of_score.program.score)
        if exact is None:
            raise NotEmitted(NO_MEAN)
        of_score = replace(of_score, program=replace(of_score.program, score=exact))
    parts = (of_score, mask_part(score.program), sink_part(score.program))
    learns = facts.training and any(tensor(score.inputs[n]).requires_grad for n in parts[0].inputs)
    if learns and not flex_differentiates_what_it_reads():
        raise NotEmitted(_NOT_DIFFERENTIATED)
    seen = blocks_part(score.program)
    axes = (attention.batch_axes, attention.head_axes, attention.axes.query, attention.axes.key)
    tables = call.node_once(
        flex_blocks,
        [score.inputs[n] for n in seen.inputs],
        [score.numbers[n] for n in seen.numbers],
        [call.size(attention.length(symbols)) for symbols in axes],
        list(blocks),
        facts.training,
        facts.device,
        seen.program.dumps(),
    )
    query, key, value = call.query(scaled=False), call.key(), call.value()
    if on_cpu and facts.head_dim < _CPU_LEAST_HEAD_DIM:
        zeros = [0, _CPU_LEAST_HEAD_DIM - facts.head_dim]
        query, key = (call.node(torch.nn.functional.pad, x, zeros) for x in (query, key))
    operands = [query, key, value]
    inputs = [score.inputs[n] for part in parts for n in part.inputs]
    if on_cpu and facts.compiled and any(map(_has_symbolic_size, inputs)):
        # The C++ template names sizes that it does not declare (torch 2.11 to 2.15).
        raise NotEmitted("takes no tensor of symbolic sizes in a function of the scores or a mask on CPU")
    numbers = [score.numbers[n] for part in parts for n in part.numbers]
    if on_cpu:
        copies = call.node(flex_operands, [*operands, *inputs], numbers)
        everything = iter([call.node(operator.getitem, copies, n) for n in range(3 + len(inputs) + len(numbers))])
    else:
        made = [call.node(torch.full, [], n, dtype=torch.int64, device=facts.device) for n in numbers]
        everything = iter([*operands, *inputs, *made])
    query, key, value = itertools.islice(everything, 3)
    read = [list(itertools.islice(everything, len(part.inputs))) for part in parts]
    counts = [list(itertools.islice(everything, len(part.numbers))) for part in parts]
    out = call.node(
        attend,
        query,
        key,
        value,
        list(zip(read, counts, strict=True)),
        [call.node_once(operator.getitem, tables, n) for n in range(8 if facts.training else 4)],
        blocks=blocks,
        programs=[part.program.dumps() for part in parts],
    )
    # Inductor would fuse later operations into its C++ template, which raises.
    return call.node(operator.getitem, call.node(flex_operands, [out], []), 0) if on_cpu else out


def _has_symbolic_size(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    read: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]],
    tables: Sequence[Tensor],
    blocks: tuple[int, int],
    programs: Sequence[str],
) -> Tensor:
    """The attention by FlexAttention, [B, H, Lq, Dv] in query's dtype; the graph calls this function by name.

    query [B, H, Lq, D], key [B, Hkv, Lk, D], value [B, Hkv, Lk, Dv]: of one dtype, H a multiple of Hkv.
    programs: the texts of the programs of `score_part`, `mask_part` and `sink_part`. read: the inputs and the numbers
    (int64, no dimensions) of each. tables: what `flex_blocks` gave for these `blocks`. A fully masked row gives 0.
    """
    score, mask, of_sink = (ScoreProgram.loads(text) for text in programs)
    (inputs, numbers), mask_read, sink_read = read
    factor, expr = scaled(score)
    given: dict[str, Any] = dict.fromkeys(_TABLES) | dict(zip(_TABLES, tables, strict=False))
    visible = mask_mod(mask.visible, len(mask_read[0]))
    out, lse = flex_attention(
        query,
        key,
        value,
        score_mod(expr, len(inputs)),
        BlockMask((query.shape[2], key.shape[2]), **given, BLOCK_SIZE=blocks, mask_mod=visible),
        factor,
        (*map(_summed_wide, inputs), *numbers),
        (*mask_read[0], *mask_read[1]),
        lse=of_sink.sink is not None,
    )
    if of_sink.sink is None:
        return out
    sink = over_queries(of_sink.sink, *sink_read, query)
    # exp(lse) / (exp(lse) + exp(sink)); in a fully masked row both may be -inf.
    kept = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - sink))
    return (out * kept.unsqueeze(-1)).to(out.dtype)


def _summed_wide(x: Tensor) -> Tensor:
    # FlexAttention sums the gradient of a tensor in the tensor's dtype.
    narrow = x.requires_grad and x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if narrow else x


FLEX = Kernel(
    name="flex",
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
    limits=limits,
    emit=emit,
    templated=True,
    skips_hidden=True,
    nondeterministic=lambda facts, only_warns: (
        "it adds up the gradient of a bias by atomics" if facts.bias_needs_grad else ""
    ),
)
