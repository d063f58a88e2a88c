"""x-transformers: one wrapper, and the many switches of its attention layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from x_transformers import (
    ContinuousTransformerWrapper,
    CrossAttender,
    Decoder,
    Encoder,
    TransformerWrapper,
    ViTransformerWrapper,
    XTransformer,
)

from zoo.case import Build, Made, Package

LAYERS = {"dim": 64, "depth": 2, "heads": 4, "attn_dim_head": 16, "attn_dropout": 0.1}


class Whole(nn.Module):
    """A wrapper called with a mask, or with memories and the like: the arguments by name."""

    def __init__(self, model: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.model, self.arguments = model, arguments

    def forward(self, x: Tensor) -> Any:
        return self.model(x, **self.arguments)


def tokens(length: int = 24) -> Tensor:
    return torch.randint(0, 90, (2, length))


def kept(length: int = 24) -> Tensor:
    return torch.arange(length) < torch.tensor([[length], [17]])


def text(kind: Callable[..., nn.Module], wrapper: dict[str, Any] | None = None, **options: Any) -> Build:
    """A case of layers of `kind` on two texts with padding; `wrapper` are options of the wrapper."""

    def build() -> Made:
        layers = kind(**{**LAYERS, **options})
        model = TransformerWrapper(num_tokens=100, max_seq_len=64, attn_layers=layers, **(wrapper or {}))
        return Whole(model, mask=kept()), (tokens(),), {}

    return build


def decoder(wrapper: dict[str, Any] | None = None, **options: Any) -> Build:
    return text(Decoder, wrapper, **options)


def encoder(wrapper: dict[str, Any] | None = None, **options: Any) -> Build:
    return text(Encoder, wrapper, **options)


def pair() -> Made:
    model = XTransformer(
        dim=64, enc_num_tokens=100, enc_depth=2, enc_heads=4, enc_max_seq_len=64, dec_num_tokens=100, dec_depth=2,
        dec_heads=4, dec_max_seq_len=64,
    )  # fmt: skip
    return Whole(model, tgt=tokens(16), mask=kept()), (tokens(),), {}


def image() -> Made:
    model = ViTransformerWrapper(image_size=32, patch_size=8, num_classes=10, attn_layers=Encoder(**LAYERS))
    return model, (torch.randn(2, 3, 32, 32),), {}


def continuous() -> Made:
    model = ContinuousTransformerWrapper(dim_in=16, dim_out=8, max_seq_len=64, attn_layers=Encoder(**LAYERS))
    return Whole(model, mask=kept()), (torch.randn(2, 24, 16),), {}


def cross() -> Made:
    model = CrossAttender(**LAYERS)
    return Whole(model, context=torch.randn(2, 16, 64), context_mask=kept(16)), (torch.randn(2, 24, 64),), {}


CASES: dict[str, Build] = {
    "encoder": encoder(),
    "decoder": decoder(),
    "cross_attender": cross,
    "encoder_decoder": pair,
    "vit": image,
    "continuous": continuous,
    "alibi": decoder(alibi_pos_bias=True, alibi_num_heads=2),
    "alibi_encoder": encoder(alibi_pos_bias=True),
    "t5_bias": decoder(rel_pos_bias=True),
    "t5_bias_encoder": encoder(rel_pos_bias=True),
    "dynamic_bias": decoder(dynamic_pos_bias=True, dynamic_pos_bias_log_distance=True),
    "rotary": decoder(rotary_pos_emb=True),
    "rotary_xpos": decoder(rotary_xpos=True),
    "rotary_half": encoder(rotary_pos_emb=True, rotary_emb_dim=8),
    "norm_qk": decoder(attn_qk_norm=True),
    "norm_qk_scale": decoder(attn_qk_norm=True, attn_qk_norm_dim_scale=True),
    "rms_norm_qk": decoder(attn_qk_rmsnorm=True),
    "one_kv_head": decoder(attn_one_kv_head=True),
    "kv_heads": decoder(attn_kv_heads=2),
    "memory_kv": encoder(attn_num_mem_kv=4),
    "memory_kv_decoder": decoder(attn_num_mem_kv=4),
    "memory_tokens": encoder({"num_memory_tokens": 4}),
    "memory_tokens_decoder": decoder({"num_memory_tokens": 4}),
    "gate_values": decoder(attn_gate_values=True),
    "gate_heads": decoder(attn_gate_value_heads=True),
    "head_scale": decoder(attn_head_scale=True),
    "on_attention": decoder(attn_on_attn=True),
    "softclamp": decoder(attn_softclamp_logits=True),
    "sink": decoder(attn_head_learned_sink=True),
    "zero_kv": decoder(attn_add_zero_kv=True),
    "max_past": decoder(attn_max_attend_past=8),
    "top_k": decoder(attn_sparse_topk=4),
    "hard": decoder(attn_hard=True),
    "talking_heads_before": decoder(attn_pre_talking_heads=True),
    "talking_heads_after": decoder(attn_post_talking_heads=True),
    "l2_distance": decoder(attn_l2_distance=True),
    "sigmoid": decoder(attn_sigmoid=True),
    "cog_signed": decoder(attn_cog_signed=True),
    "selective": decoder(attn_selective=True),
    "cope": decoder(attn_use_cope=True, attn_cope_max_pos=8, attn_cope_talking_heads=False),
    "cope_talking": decoder(attn_use_cope=True, attn_cope_max_pos=8),
    "data_dependent_alibi": decoder(attn_data_dependent_alibi=True),
    "laser": decoder(attn_laser=True),
    "value_residual": decoder(add_value_residual=True),
    "hyper_connections": decoder(num_residual_streams=2),
    "shift_tokens": decoder(shift_tokens=1),
    "sandwich": decoder(sandwich_coef=1),
    "macaron": encoder(macaron=True),
    "sandwich_norm": decoder(sandwich_norm=True),
    "residual_attention": encoder(residual_attn=True),
    "residual_attention_decoder": decoder(residual_attn=True),
    "pre_norm_off": encoder(pre_norm=False),
    "rms_norm": decoder(use_rmsnorm=True, ff_glu=True),
    "scale_norm": encoder(use_scalenorm=True),
    "value_dim": decoder(attn_value_dim_head=32),
}
PACKAGES = (Package("x-transformers", CASES),)
