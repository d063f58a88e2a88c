"""flex: torch's FlexAttention (arXiv 2412.05496), with the score function and the block mask of the score program.

Taken: any function of the scores, any mask, biases, grouped queries, another value_dim; sinks on CUDA, where
FlexAttention returns its log-sum-exp. Declined: dropout and factors on the weights; gradients on the CPU; before torch
2.15, gradients of what the score function reads; graphs that Inductor does not compile, where torch stores every score.
"""

from __future__ import annotations

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
from attn_fuse.expression.nodes import Score
from attn_fuse.graph.names import value_of
from attn_fuse.kernels.flex.blocks import flex_blocks, flex_operands
from attn_fuse.kernels.flex.mods import inlined, mask_mod, over_queries, scaled, score_mod, with_exact_fills
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.score.write import ScoreCall, score_call
from attn_fuse.torch_internals import flex_attention, flex_differentiates_what_it_reads, flex_runs_on_cpu

if TYPE_CHECKING:
    from attn_fuse.emit.call import Call

# Queries and keys in a block of the mask.
BLOCKS = (128, 128)
# For one query, torch's C++ template has a second form, used if the number of keys in a block divides 128. It gives 0
# for scores far below 0 if some keys are hidden.
ONE_QUERY_BLOCKS = (128, 256)
# Below this head_dim, torch's C++ template multiplies the keys after the last multiple of 16 with code for 16 keys, if
# their number and head_dim fill vectors of less than 16 floats (AVX2, NEON). That code reads beyond the keys and writes
# over the maxima of the softmax (torch 2.13).
_CPU_LEAST_HEAD_DIM = 24
# The tables of a BlockMask, in the order of `flex_blocks`.
_TABLES = tuple(f"{kind}_{what}" for kind in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices"))
_NOT_DIFFERENTIATED = "gives no gradient to what a function of the scores reads before torch 2.15"
NO_MEAN = "a query that sees no key would not get the mean of the values on CUDA"
# The min head_dim and value_dim of torch's Triton template.
_LEAST_DIM = 16


def limits(attention: Attention, facts: Facts) -> Iterator[str]:
    """The reasons besides device type and dtype, such as no Inductor, dropout, or gradients on CPU."""
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
    # The backward takes exp(score - lse). At scores like -1e9, rounding loses the number of keys from the lse.
    if facts.training and attention.mask.empty_rows == "mean":
        yield "a query that sees no key would get a wrong gradient"
    if facts.training and facts.bias_may_hide:
        yield "a bias that may hide every key of a query, as padding does, would get a wrong gradient"
    if not on_cpu and not facts.training and facts.bias_may_hide:
        yield NO_MEAN


def emit(call: Call) -> Node:
    """Build the call of `attend`, and return the node of [batch, heads, q_len, value_dim].

    Raises NotEmitted if the score reads a tensor that needs a gradient which torch does not give, for tensors of
    symbolic sizes on a CPU under Inductor, and on CUDA for fills that `with_exact_fills` cannot make exact.
    """
    facts, attention, score = call.facts, call.attention, score_call(call)
    on_cpu = facts.device.type == "cpu"
    blocks = ONE_QUERY_BLOCKS if on_cpu and facts.q_len == 1 and "q_len" not in facts.symbolic else BLOCKS
    program = inlined(score.program)
    if not on_cpu:
        exact = with_exact_fills(program.score)
        if exact is None:
            raise NotEmitted(NO_MEAN)
        program = replace(program, score=exact)
    read = score.part(program)
    learns = facts.training and any(tensor(x).requires_grad for x in score.part(ScoreProgram(program.score)).inputs)
    if learns and not flex_differentiates_what_it_reads():
        raise NotEmitted(_NOT_DIFFERENTIATED)
    if on_cpu and facts.compiled and any(map(_has_symbolic_size, read.inputs)):
        # The C++ template names sizes that it does not declare (torch 2.11 to 2.15).
        raise NotEmitted("takes no tensor of symbolic sizes in a function of the scores or a mask on CPU")
    seen = score.part(replace(score.program, score=Score(), sink=None))
    axes = (attention.axes.batch, attention.head_axes, attention.axes.query, attention.axes.key)
    sizes = [call.size(attention.length(symbols)) for symbols in axes]
    how = (list(blocks), facts.training, facts.device, seen.program.dumps())
    tables = call.node_once(flex_blocks, seen.inputs, seen.numbers, sizes, *how)
    query, key, value = call.query(scaled=False), call.key(), call.value()
    if on_cpu and facts.head_dim < _CPU_LEAST_HEAD_DIM:
        zeros = [0, _CPU_LEAST_HEAD_DIM - facts.head_dim]
        query, key = (call.node(torch.nn.functional.pad, x, zeros) for x in (query, key))
    operands = [query, key, value, *read.inputs]
    if on_cpu:
        copies = call.node(flex_operands, operands, read.numbers)
        count = len(operands) + len(read.numbers)
        everything = [call.node(operator.getitem, copies, n) for n in range(count)]
    else:
        numbers = [call.node(torch.full, [], n, dtype=torch.int64, device=facts.device) for n in read.numbers]
        everything = [*operands, *numbers]
    out = call.node(
        attend,
        *everything[:3],
        everything[3 : len(operands)],
        everything[len(operands) :],
        [call.node_once(operator.getitem, tables, n) for n in range(8 if facts.training else 4)],
        blocks=blocks,
        program=read.program.dumps(),
    )
    # Inductor raises when it fuses later operations into its C++ template; the copy prevents that.
    return call.node(operator.getitem, call.node(flex_operands, [out], []), 0) if on_cpu else out


def _has_symbolic_size(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[Tensor],
    tables: Sequence[Tensor],
    blocks: tuple[int, int],
    program: str,
) -> Tensor:
    """The attention by FlexAttention, [B, H, Lq, Dv] in query's dtype. The graph calls this function by name.

    query [B, H, Lq, D], key [B, Hkv, Lk, D], value [B, Hkv, Lk, Dv]: of one dtype, H a multiple of Hkv.
    program: the text of an `inlined` program. inputs, numbers: the tensors that it reads, the numbers int64 without
    dimensions. tables: the result of `flex_blocks` for these `blocks`. A fully masked row gives 0.
    """
    whole = ScoreCall(ScoreProgram.loads(program), inputs, numbers)
    score = whole.part(ScoreProgram(whole.program.score))
    mask = whole.part(ScoreProgram(Score(), visible=whole.program.visible))
    sink = whole.program.sink
    factor, expr = scaled(score.program.score)
    given: dict[str, Any] = dict.fromkeys(_TABLES) | dict(zip(_TABLES, tables, strict=False))
    visible = mask_mod(mask.program.visible, len(mask.inputs))
    out, lse = flex_attention(
        query,
        key,
        value,
        score_mod(expr, len(score.inputs)),
        BlockMask((query.shape[2], key.shape[2]), **given, BLOCK_SIZE=blocks, mask_mod=visible),
        factor,
        (*map(_summed_wide, score.inputs), *score.numbers),
        (*mask.inputs, *mask.numbers),
        lse=sink is not None,
    )
    if sink is None:
        return out
    # exp(lse) / (exp(lse) + exp(sink)). In a fully masked row both may be -inf.
    kept = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - over_queries(sink, inputs, numbers, query)))
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
