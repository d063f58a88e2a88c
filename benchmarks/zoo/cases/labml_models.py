"""labml-nn: annotated implementations of papers; sequences go first."""

from __future__ import annotations

from typing import Any

import torch
from labml import tracker
from torch import Tensor, nn

from zoo.case import Build, Made, Package, fitting

tracker.debug = lambda *_: None  # a log of weights, which newer versions of labml do not have

SIZES = {"heads": 4, "n_heads": 4, "d_model": 64, "d_k": 16, "dropout_prob": 0.1}


class Named(nn.Module):
    """Calls a module whose arguments are keywords."""

    def __init__(self, module: nn.Module, *names: str) -> None:
        super().__init__()
        self.module, self.names = module, names

    def forward(self, *args: Tensor) -> Any:
        return self.module(**dict(zip(self.names, args, strict=True)))


def attention(path: str, masked: bool = True, **options: Any) -> Build:
    """A case of the attention module at labml_nn.`path`: a query, key and value of 24 positions."""

    def build() -> Made:
        x = torch.randn(24, 2, 64)
        mask = (torch.tril(torch.ones(24, 24)).bool()[:, :, None],) if masked else ()
        module, _, _ = fitting(f"labml_nn.{path}", SIZES, tuple, **options)()
        return Named(module, "query", "key", "value", *["mask"] * masked), (x, x.clone(), x.clone(), *mask), {}

    return build


def of(path: str, *shape: int, **options: Any) -> Build:
    return fitting(f"labml_nn.{path}", SIZES, lambda: (torch.randn(*shape),), **options)


def feedback() -> Made:
    module, _, _ = fitting("labml_nn.transformers.feedback.FeedbackAttention", SIZES, tuple)()
    memory = torch.randn(12, 2, 64)
    return Named(module, "query", "key", "value"), (torch.randn(2, 64), memory, memory.clone()), {}


def encoder_decoder() -> Made:
    from labml_nn.transformers.configs import TransformerConfigs

    configs = TransformerConfigs()
    configs.n_heads, configs.d_model, configs.n_layers = 4, 64, 2
    configs.n_src_vocab = configs.n_tgt_vocab = 50
    configs.ffn.d_ff = 128
    mask = torch.tril(torch.ones(12, 12)).bool()[:, :, None]
    everything = torch.ones(1, 16, 1, dtype=torch.bool)
    texts = torch.randint(0, 50, (16, 2)), torch.randint(0, 50, (12, 2))
    return configs.encoder_decoder, (*texts, everything, mask), {}


CASES: dict[str, Build] = {
    "attention": attention("transformers.mha.MultiHeadAttention"),
    "attention_unmasked": attention("transformers.mha.MultiHeadAttention", masked=False),
    "attention_xl": attention("transformers.xl.relative_mha.RelativeMultiHeadAttention"),
    "alibi": attention("transformers.alibi.AlibiMultiHeadAttention"),
    "rotary": attention("transformers.rope.RotaryPEMultiHeadAttention"),
    "rotary_values": attention("transformers.rope.value_pe.RotaryValuePEMultiHeadAttention"),
    "primer": attention("transformers.primer_ez.MultiDConvHeadAttention"),
    "feedback": feedback,
    "retro_self": of("transformers.retro.model.SelfAttention", 2, 24, 64, is_causal=True),
    "retro_self_bidirectional": of("transformers.retro.model.SelfAttention", 2, 24, 64, is_causal=False),
    "retro_cross": fitting(
        "labml_nn.transformers.retro.model.CrossAttention",
        SIZES,
        lambda: (torch.randn(2, 3, 2, 8, 64), torch.randn(2, 3, 8, 64)),
    ),
    "retro_chunked": fitting(
        "labml_nn.transformers.retro.model.ChunkedCrossAttention",
        SIZES,
        lambda: (torch.randn(2, 24, 64), torch.randn(2, 3, 2, 8, 64)),
        chunk_len=8,
    ),
    "ddpm_unet": fitting(
        "labml_nn.diffusion.ddpm.unet.UNet",
        {},
        lambda: (torch.randn(2, 3, 16, 16), torch.tensor([3, 5])),
        n_channels=32,
        ch_mults=(1, 2),
        is_attn=(False, True),
        n_blocks=1,
    ),
    "stable_diffusion_self": of(
        "diffusion.stable_diffusion.model.unet_attention.CrossAttention", 2, 24, 64, d_cond=64, d_head=16
    ),
    "stable_diffusion_self_not_in_place": of(
        "diffusion.stable_diffusion.model.unet_attention.CrossAttention",
        2,
        24,
        64,
        d_cond=64,
        d_head=16,
        is_inplace=False,
    ),
    "stable_diffusion_cross": fitting(
        "labml_nn.diffusion.stable_diffusion.model.unet_attention.CrossAttention",
        SIZES,
        lambda: (torch.randn(2, 24, 64), torch.randn(2, 7, 48)),
        d_cond=48,
        d_head=16,
    ),
    "stable_diffusion_spatial": fitting(
        "labml_nn.diffusion.stable_diffusion.model.unet_attention.SpatialTransformer",
        SIZES,
        lambda: (torch.randn(2, 64, 4, 4), torch.randn(2, 7, 48)),
        channels=64,
        n_layers=1,
        d_cond=48,
    ),
    "stable_diffusion_autoencoder": of(
        "diffusion.stable_diffusion.model.autoencoder.AttnBlock", 2, 32, 8, 8, channels=32
    ),
    "neox_attention": of("neox.model.AttentionLayer", 2, 24, 64, n_hidden=64),
    "hour_glass": of("transformers.hour_glass.HourGlass", 24, 2, 64, dropout=0.1, d_ff=128, shortening_factors=[2, 2]),
    "graph_attention": fitting(
        "labml_nn.graphs.gat.GraphAttentionLayer",
        SIZES,
        lambda: (torch.randn(12, 16), torch.ones(12, 12, 1) > 0),
        in_features=16,
        out_features=32,
    ),
    "encoder_decoder": encoder_decoder,
}
PACKAGES = (Package("labml-nn", CASES),)
