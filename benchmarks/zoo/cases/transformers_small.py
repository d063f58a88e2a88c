"""Tiny models of transformers, and their inputs: `small` knows what most configurations call their sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from zoo.case import Build, Made

SMALL = {
    "vocab_size": 100, "hidden_size": 64, "d_model": 64, "n_embd": 64, "emb_dim": 64, "embed_dim": 64, "embedding_size":
    64, "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "attention_heads": 4, "intermediate_size": 128,
    "ffn_dim": 128, "d_ff": 128, "dff": 128, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "ffn_hidden_size": 128,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "d_kv": 16, "head_dim": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "kv_lora_rank": 32,
    "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "image_size": 32, "patch_size": 8, "num_mel_bins": 16, "sliding_window": 8,
    "projection_dim": 32, "apply_spec_augment": False, "num_channels": 3, "decoder_start_token_id": 2,
    "word_embed_proj_dim": 64, "type_vocab_size": 2, "rotary_dim": 8, "encoder_layerdrop": 0.0, "decoder_layerdrop":
    0.0, "layerdrop": 0.0,
}  # fmt: skip
CONV = {
    "conv_dim": (32, 32), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip

Inputs = Callable[[Any], dict[str, Tensor]]


def small(config: str, **options: Any) -> Any:
    """A configuration of transformers: of SMALL what it knows, then `options`."""
    kind = getattr(transformers, config)
    known = {name: size for name, size in SMALL.items() if name in kind.__dataclass_fields__}
    return kind(**{**known, **options})


def part(config: str, **options: Any) -> dict[str, Any]:
    """A configuration as a dictionary, which one made of several takes."""
    return small(config, **options).to_dict()


def of(
    config: str | Callable[[], Any], model: str | Callable[[], Any], inputs: Inputs | None = None, **options: Any
) -> Build:
    """A case of `model`, written-out attention, on `inputs` of its configuration (text with padding)."""

    def build() -> Made:
        chosen = small(config, **options) if isinstance(config, str) else config()
        if hasattr(chosen, "use_cache"):
            chosen.use_cache = False
        kind = getattr(transformers, model) if isinstance(model, str) else model()
        return kind._from_config(chosen, attn_implementation="eager"), (), (inputs or text)(chosen)

    return build


def ids(length: int = 24, batch: int = 2) -> Tensor:
    return torch.randint(3, 90, (batch, length))


def padded(length: int = 24, kept: int = 17) -> Tensor:
    return torch.tensor([[1] * length, [1] * kept + [0] * (length - kept)])


def text(config: Any) -> dict[str, Tensor]:
    return {"input_ids": ids(), "attention_mask": padded()}


def text_alone(config: Any) -> dict[str, Tensor]:
    return {"input_ids": ids()}


def pair(config: Any) -> dict[str, Tensor]:
    return {**text(config), "decoder_input_ids": ids(16)}


def masked_pair(config: Any) -> dict[str, Tensor]:
    return {**pair(config), "decoder_attention_mask": padded(16, 11)}


def image(config: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def large_image(config: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 64, 64)}


def film(config: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 4, 3, 32, 32)}


def wave(config: Any) -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 400), "attention_mask": padded(400, 300)}


def boxes(config: Any) -> dict[str, Tensor]:
    corners = torch.randint(0, 40, (2, 24, 2)).repeat(1, 1, 2) + torch.tensor([0, 0, 9, 9])
    return {**text(config), "bbox": corners}


def text_and_image(config: Any) -> dict[str, Tensor]:
    return {**text(config), **image(config)}


class Step(nn.Module):
    """A step of `length` tokens after CACHED of them, whose keys and values are there."""

    CACHED = 10

    def __init__(self, config: Any, model: Any, static: bool, length: int) -> None:
        super().__init__()
        self.config, self.model, self.static = config, model.eval(), static
        self.positions = self.CACHED + torch.arange(length).repeat(2, 1)
        cache = self.empty()
        mask = torch.ones(2, self.CACHED, dtype=torch.long)
        with torch.no_grad():
            model(input_ids=ids(self.CACHED), attention_mask=mask, past_key_values=cache, use_cache=True)
        self.saved = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]

    def empty(self) -> Any:
        if self.static:
            return transformers.StaticCache(config=self.config, max_cache_len=32)
        return transformers.DynamicCache(config=self.config)

    def filled(self) -> Any:
        if not self.static:
            return transformers.DynamicCache([(key, value) for key, value in self.saved])
        cache = self.empty()
        heads, dim = self.saved[0][0].shape[1], self.saved[0][0].shape[3]
        cache.early_initialization(2, heads, dim, torch.float32, torch.device("cpu"))
        for layer, (key, value) in zip(cache.layers, self.saved, strict=True):
            layer.keys, layer.values = key.clone(), value.clone()
            if hasattr(layer, "cumulative_length"):
                length = layer.cumulative_length
                layer.cumulative_length = torch.tensor([self.CACHED]) if torch.is_tensor(length) else self.CACHED
        return cache

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        positions, cache = self.positions, self.filled()
        out = self.model(
            input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, position_ids=positions
        )
        return out.logits


def step_of(config: str, model: str, static: bool = False, length: int = 1, **options: Any) -> Build:
    """A case of one decoding step, the second sequence padded on the left; the cache static or growing."""

    def build() -> Made:
        chosen = small(config, **options)
        chosen.use_cache = True
        made = getattr(transformers, model)._from_config(chosen, attn_implementation="eager")
        mask = torch.tensor([[1] * (Step.CACHED + length), [0] * 4 + [1] * (Step.CACHED - 4 + length)])
        return Step(chosen, made, static, length), (ids(length), mask), {}

    return build
