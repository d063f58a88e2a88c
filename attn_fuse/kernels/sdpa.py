"""torch's own fused kernels behind `F.scaled_dot_product_attention`: flash on CPU; cuDNN, flash and efficient on CUDA.

Taken: what torch itself says a kernel can run, asked with tensors of the same shapes. Declined: what torch would run
unfused, and masks whose fully masked rows would get another value. Flash on CPU needs head_dim equal to value_dim, so
the smaller is padded with zeros, which add nothing to a product.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.emit.builder import size_expr, tensor
from attn_fuse.errors import first_line
from attn_fuse.kernels.elsewhere import rule_of
from attn_fuse.kernels.kernel import Kernel, beyond_masks_and_biases
from attn_fuse.kernels.operands import within_exp2
from attn_fuse.torch_internals import FakeTensorMode, sdpa_choice

if TYPE_CHECKING:
    from attn_fuse.emit.call import Call

# Unless a mask is added, torch's flash attention on the CPU finds NaN scores of a query only in whole vectors, of 16
# floats with AVX-512 (torch 2.13).
_A_VECTOR = 16
_HALF = frozenset({torch.float16, torch.bfloat16})


def cpu_limits(attention: Attention, facts: Facts) -> Iterator[str]:
    """The reasons against flash attention on CPU besides device type and dtype."""
    # torch's answer covers every case but gives no reason, so it comes last.
    reasons = [*_common_limits(attention, facts)]
    if attention.dropout_p is not None:
        reasons.append("torch has no fused attention with dropout on CPU")
    if facts.bias_needs_grad:
        reasons.append("a bias needs a gradient, which this kernel does not give")
    if facts.nan_read and facts.kv_len < _A_VECTOR and "kv_len" not in facts.symbolic and is_plain(attention):
        reasons.append(f"a query that is NaN would get 0 of so few keys, which {facts.nan_read} tells apart")
    if facts.value_dim != facts.head_dim and facts.symbolic & {"head_dim", "value_dim"}:
        reasons.append("value_dim differs from head_dim, and they may change from call to call")
    yield from reasons
    if not reasons and facts.device.type == "cpu":
        width = max(facts.head_dim, facts.value_dim)
        query, key, value, mask = _stand_ins(attention, replace(facts, head_dim=width, value_dim=width))
        chosen = sdpa_choice(
            query, key, value, mask, 0.0, attention.mask.is_causal and mask is None, is_grouped(attention, facts)
        )
        if chosen != SDPBackend.FLASH_ATTENTION.value:
            yield "torch would not run flash attention here (is it switched off?)"


def cuda_limits(
    can_use: Callable[[Any, bool], bool], takes_gqa: bool, keeps_mean: bool, attention: Attention, facts: Facts
) -> Iterator[str]:
    """The reasons against one of torch's kernels on CUDA besides device type and dtype.

    can_use: torch's test, given `SDPAParams` and whether to warn of reasons. takes_gqa: whether heads may be grouped.
    keeps_mean: whether a row fully masked by a large finite number gets the mean of the values.
    """
    yield from _common_limits(attention, facts)
    if not keeps_mean and (attention.mask.empty_rows == "mean" or facts.bias_may_hide):
        yield "a query that sees no key would not get the mean of the values on CUDA"
    if attention.biases and (facts.bias_dtype or torch.float32) != facts.dtype:
        yield f"a bias in {facts.bias_dtype or torch.float32} would be rounded to {facts.dtype}"
    if is_grouped(attention, facts) and not takes_gqa:
        yield "takes no grouped queries"
    if attention.mask.is_causal and not attention.biases and not _is_square(attention, facts):
        yield "takes a causal mask only where q_len equals kv_len"
    if facts.device.type != "cuda":
        return
    with FakeTensorMode():
        query, key, value, mask = _stand_ins(attention, facts)
        parameters = torch.backends.cuda.SDPAParams(
            query, key, value, mask, _probability(attention), attention.mask.is_causal and mask is None,
            is_grouped(attention, facts),
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                able = rule_of(can_use)(parameters, True)
            except RuntimeError as problem:  # a CUDA build without a driver, since torch 2.14
                yield first_line(problem)
                return
    if not able:
        yield from {first_line(w.message).partition(" (Triggered")[0] for w in said} or {"torch says that it cannot"}


def _common_limits(attention: Attention, facts: Facts) -> Iterator[str]:
    yield from beyond_masks_and_biases(attention)
    if facts.dtype == torch.float16 and (attention.mask.empty_rows == "mean" or facts.bias_may_hide):
        yield "a query that sees no key would not get the mean of the values in float16"
    if attention.mask.empty_rows == "mean" and facts.training:
        yield "a query that sees no key would get a gradient, which the program's fill value stops"
    if facts.bias_may_hide and facts.training:
        # The backward takes exp(score - lse). At scores like -1e9, rounding loses the number of keys from the lse.
        yield "a bias that may hide every key of a query, as padding does, would get a wrong gradient"
    tags = torch.ops.aten.scaled_dot_product_attention.default.tags
    if facts.checkpointed and torch.Tag.nondeterministic_seeded in tags:
        yield "torch takes it for random, and has nothing random in a checkpoint of a graph without gradients"
    if facts.q_len == 0 or facts.kv_len == 0 or facts.batch == 0:
        yield "takes no empty sequence"


def _stand_ins(
    attention: Attention, facts: Facts
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Stand-ins for query, key, value and mask with their shapes and dtypes, without contents."""

    def empty(*shape: int, dtype: torch.dtype = facts.dtype, requires_grad: bool = facts.training) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=facts.device, requires_grad=requires_grad)

    query = empty(facts.batch, facts.heads, facts.q_len, facts.head_dim)
    key = empty(facts.batch, facts.kv_heads, facts.kv_len, facts.head_dim)
    value = empty(facts.batch, facts.kv_heads, facts.kv_len, facts.value_dim)
    if is_plain(attention):
        return query, key, value, None
    dtype = torch.bool if _is_boolean(attention) else facts.dtype
    shape = (facts.batch, facts.heads, facts.q_len, facts.kv_len)
    mask = empty(*shape, dtype=dtype, requires_grad=facts.bias_needs_grad)
    return query, key, value, mask


def is_plain(attention: Attention) -> bool:
    """Whether SDPA needs no mask argument: there is no bias, and no mask other than the causal one."""
    return not attention.biases and (attention.mask.is_causal or not attention.mask.parts)


def is_grouped(attention: Attention, facts: Facts) -> bool:
    """Whether query heads may share a head of key and value on any call."""
    return facts.heads != facts.kv_heads or not attention.same_length(attention.head_axes, attention.axes.kv_heads)


def _is_square(attention: Attention, facts: Facts) -> bool:
    """Whether q_len equals kv_len on every call."""
    return facts.q_len == facts.kv_len and attention.same_length(attention.axes.query, attention.axes.key)


def _is_boolean(attention: Attention) -> bool:
    return not attention.biases and attention.mask.empty_rows != "mean"


def _probability(attention: Attention) -> float:
    number = getattr(attention.dropout_p, "value", None)
    return 0.0 if attention.dropout_p is None else 0.1 if number is None else float(number)


def emit(backend: SDPBackend, call: Call) -> Node:
    """Build the call of SDPA, limited to `backend` on CUDA; return the node of [batch, heads, q_len, value_dim]."""
    facts, (query, key, value) = call.facts, (call.query(), call.key(), call.value())
    wider = facts.value_dim - facts.head_dim if facts.device.type == "cpu" else 0
    if wider > 0:
        query, key = (call.node(F.pad, x, (0, wider)) for x in (query, key))
    elif wider < 0:
        value = call.node(F.pad, value, (0, -wider))
    mask = _mask(call) if backend != SDPBackend.CUDNN_ATTENTION else _mask_of_rows(call)
    if mask is not None and tensor(mask).is_floating_point() and not facts.bias_needs_grad:
        # A view of a parameter requires a gradient even under no_grad, which rules out torch's fused kernels.
        mask = call.node("detach", mask)
    function = F.scaled_dot_product_attention if facts.device.type == "cpu" else PINNED[backend]
    out = call.node(
        function,
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=call.dropout_p(),
        is_causal=call.attention.mask.is_causal and not call.attention.biases,
        scale=call.scale(),
        enable_gqa=is_grouped(call.attention, facts),
    )
    return out if wider >= 0 else call.node(torch.narrow, out, -1, 0, facts.value_dim)


def _mask_of_rows(call: Call) -> Node | None:
    """The mask in the form with which cuDNN is correct: floating-point, with one element for each key.

    cuDNN 9.19 turns a Boolean mask into finite numbers, so a fully masked row gets the mean of the values and sends
    gradients. One element for all keys gives a misaligned address (torch 2.11, H100).
    """
    mask = _mask(call, boolean=False)
    if mask is None or size_expr(tensor(mask).shape[-1]) != 1:
        return mask
    kv_len = call.size(sympy.Mul(*map(call.attention.size, call.attention.axes.key)))
    return call.node("contiguous", call.node("expand", mask, -1, -1, -1, kv_len))


def _mask(call: Call, boolean: bool = True) -> Node | None:
    """boolean: whether a mask without biases may stay Boolean."""
    attention, facts = call.attention, call.facts
    if is_plain(attention):
        return None
    keep = call.keep()
    if boolean and _is_boolean(attention):
        return keep
    dtype = facts.dtype
    if facts.device.type == "cpu" and attention.biases:
        dtype = torch.promote_types(dtype, facts.bias_dtype or torch.float32)
    bias = call.bias(dtype)
    on_cuda = facts.device.type == "cuda"
    if on_cuda and bias is not None and facts.bias_may_hide:
        bias = call.node(within_exp2, bias)
    if keep is None:
        return bias
    # The min of the dtype absorbs the score it is added to, in effect replacing it; -inf hides the key.
    least = torch.finfo(dtype).min
    fill = -math.inf if attention.mask.empty_rows != "mean" else least / 4 if on_cuda else least
    none = call.node(torch.zeros, [], dtype=dtype, device=facts.device) if bias is None else bias
    return call.node(torch.where, keep, none, fill)


# `F.scaled_dot_product_attention` pinned to one backend while it is traced. torch's caches store functions by name, so
# these are top-level functions.


def cudnn_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`F.scaled_dot_product_attention` on cuDNN only."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(*args, **kwargs)


def flash_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`F.scaled_dot_product_attention` on flash attention only."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*args, **kwargs)


def efficient_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`F.scaled_dot_product_attention` on memory-efficient attention only."""
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(*args, **kwargs)


PINNED: dict[SDPBackend, Callable[..., torch.Tensor]] = {
    SDPBackend.CUDNN_ATTENTION: cudnn_attention,
    SDPBackend.FLASH_ATTENTION: flash_attention,
    SDPBackend.EFFICIENT_ATTENTION: efficient_attention,
}


def _cuda(backend: SDPBackend, can_use: Any, takes_gqa: bool, keeps_mean: bool = True, **fields: Any) -> Kernel:
    return Kernel(
        devices=frozenset({"cuda"}),
        limits=functools.partial(cuda_limits, can_use, takes_gqa, keeps_mean),
        emit=functools.partial(emit, backend),
        **fields,
    )


CPU_FLASH = Kernel(
    name="cpu_flash",
    devices=frozenset({"cpu"}),
    dtypes=_HALF | {torch.float32, torch.float64},
    limits=cpu_limits,
    emit=functools.partial(emit, SDPBackend.FLASH_ATTENTION),
    block=(256, 512),
    switch="flash",
)
CUDNN = _cuda(
    SDPBackend.CUDNN_ATTENTION,
    torch.backends.cuda.can_use_cudnn_attention,
    takes_gqa=True,
    # cuDNN 9.19 gave another value with the min of bfloat16 on an H100.
    keeps_mean=False,
    name="cudnn",
    dtypes=_HALF,
    # torch 2.11, modelscope/FunASR#3704.
    plan_seconds=(0.44, 0.55),
    switch="cudnn",
    nondeterministic=lambda facts, only_warns: "its backward is not deterministic",
)
CUDA_FLASH = _cuda(
    SDPBackend.FLASH_ATTENTION,
    torch.backends.cuda.can_use_flash_attention,
    takes_gqa=True,
    name="cuda_flash",
    dtypes=_HALF,
    # It chooses a deterministic backward by itself when torch asks for determinism.
    switch="flash",
)
CUDA_EFFICIENT = _cuda(
    SDPBackend.EFFICIENT_ATTENTION,
    torch.backends.cuda.can_use_efficient_attention,
    takes_gqa=False,
    name="cuda_efficient",
    dtypes=_HALF | {torch.float32},
    switch="efficient",
    nondeterministic=lambda facts, only_warns: (
        "its backward is not deterministic while torch is only to warn" if only_warns else ""
    ),
)
