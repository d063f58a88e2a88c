"""The operator for a whole `nn.TransformerEncoderLayer`, torch's fast path in inference, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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

    src: [batch, len, embed_dim], not nested.
    mask: [len, len], [batch, len] or [batch, heads, len, len] for `mask_type` 0, 1, or 2 and None. Every entry but 0
    hides its key, and fully masked queries get NaN.
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
        # On a GPU torch fuses a different GELU into the product; its operator knows which.
        inner = torch._addmm_activation(ffn_bias_1, x.flatten(0, 1), ffn_weight_1.t(), use_gelu=use_gelu)
        return F.linear(inner.unflatten(0, x.shape[:2]), ffn_weight_2, ffn_bias_2)

    if norm_first:
        attended = src + attend(norm(src, norm_weight_1, norm_bias_1))
        return attended + feed_forward(norm(attended, norm_weight_2, norm_bias_2))
    attended = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return norm(attended + feed_forward(attended), norm_weight_2, norm_bias_2)


def _hidden(mask: Tensor, mask_type: int | None) -> Tensor:
    hidden = mask.to(torch.bool)
    if hidden.dim() != {0: 2, 1: 2, 2: 4, None: 4}.get(mask_type):
        raise TypeError(f"a mask of {hidden.dim()} axes is of no known kind")
    return hidden[:, None, None, :] if mask_type == 1 else hidden
