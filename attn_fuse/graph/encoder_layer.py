"""torch's one operator for a whole `nn.TransformerEncoderLayer`, its fast path in inference, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# What `mask_type` says of the mask: which axes of the scores [batch, heads, len_q, len_k] it has.
_QUERIES_AND_KEYS, _KEYS_OF_A_BATCH, _ALL = 0, 1, 2


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """The same values as `torch._transformer_encoder_layer_fwd` (aten/src/ATen/native/transformers/transformer.cpp).

    src: [batch, len, embed_dim], not nested. mask: [len, len], [batch, len] or [batch, heads, len, len], as `mask_type`
    is 0, 1 or 2. Any entry that is not 0 hides its key, since the operator makes a Boolean of it; a query that sees no
    key gets NaN.
    Raises TypeError for a `src` or a mask of another kind.
    """
    if src.is_nested or src.dim() != 3:
        raise TypeError("the layer is not called with [batch, len, embed_dim]")

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    def attend(x: Tensor) -> Tensor:
        projected = F.linear(x, qkv_weight, qkv_bias).unflatten(-1, (3, num_heads, embed_dim // num_heads))
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (query * (embed_dim // num_heads) ** -0.5) @ key.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(_hidden(mask, mask_type), float("-inf"))
        return F.linear((scores.softmax(-1) @ value).transpose(1, 2).flatten(2), proj_weight, proj_bias)

    def feed_forward(x: Tensor) -> Tensor:
        # torch's GELU after a product is another one on a GPU, and its operator knows which.
        inner = torch._addmm_activation(ffn_bias_1, x.flatten(0, 1), ffn_weight_1.t(), use_gelu=use_gelu)
        return F.linear(inner.unflatten(0, x.shape[:2]), ffn_weight_2, ffn_bias_2)

    if norm_first:
        attended = src + attend(norm(src, norm_weight_1, norm_bias_1))
        return attended + feed_forward(norm(attended, norm_weight_2, norm_bias_2))
    attended = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return norm(attended + feed_forward(attended), norm_weight_2, norm_bias_2)


def _hidden(mask: Tensor, mask_type: int | None) -> Tensor:
    hidden = mask.to(torch.bool)
    rank = {_QUERIES_AND_KEYS: 2, _KEYS_OF_A_BATCH: 2, _ALL: 4}.get(_ALL if mask_type is None else mask_type)
    if hidden.dim() != rank:
        raise TypeError(f"a mask of {hidden.dim()} axes is of no known kind")
    return hidden[:, None, None, :] if mask_type == _KEYS_OF_A_BATCH else hidden
