"""monai."""

from __future__ import annotations

from typing import Any

import torch

from zoo.case import Build, Package, fitting

SIZES = {
    "in_channels": 1, "out_channels": 2, "img_size": (16, 16, 16), "patch_size": (8, 8, 8), "hidden_size": 64,
    "mlp_dim": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.1, "feature_size": 12,
    "decoder_hidden_size": 32, "decoder_mlp_dim": 64, "decoder_num_layers": 1, "decoder_num_heads": 4,
}  # fmt: skip
UNET = {
    "spatial_dims": 2, "num_res_blocks": (1, 1), "channels": (16, 32), "attention_levels": (False, True),
    "norm_num_groups": 8,
}  # fmt: skip


def of(path: str, *shape: int, **options: Any) -> Build:
    """A case of monai.networks.`path` on two volumes, or on two inputs of `shape`."""
    return fitting(f"monai.networks.{path}", SIZES, lambda: (torch.randn(2, *(shape or (1, 16, 16, 16))),), **options)


def steps(*shape: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, *shape), torch.tensor([3, 5])


CASES: dict[str, Build] = {
    "vit": of("nets.ViT"),
    "vit_2d_classification": of(
        "nets.ViT", 1, 32, 32, img_size=(32, 32), patch_size=(8, 8), spatial_dims=2, classification=True
    ),
    "vit_save_weights": of("nets.ViT", save_attn=True),
    "vit_autoencoder": of("nets.ViTAutoEnc", img_size=(16, 16, 16), patch_size=(4, 4, 4)),
    "masked_autoencoder": of("nets.MaskedAutoEncoderViT", hidden_size=48, decoder_hidden_size=24),
    "unetr": of("nets.UNETR", 1, 32, 32, 32, img_size=(32, 32, 32)),
    "swin_unetr": of("nets.SwinUNETR", 1, 64, 64, 64, patch_size=2, num_heads=(3, 6, 12, 24), depths=(2, 1, 1, 1)),
    "swin_unetr_2d": of(
        "nets.SwinUNETR", 1, 64, 64, spatial_dims=2, patch_size=2, num_heads=(3, 6, 12, 24), depths=(2, 1, 1, 1)
    ),
    "restormer": of("nets.restormer.Restormer", 1, 16, 16, out_channels=1, dim=16, num_refinement_blocks=1),
    "autoencoder_kl": of("nets.AutoencoderKL", 1, 16, 16, **UNET),
    "diffusion_unet": fitting(
        "monai.networks.nets.DiffusionModelUNet", SIZES, lambda: steps(1, 16, 16), **UNET, num_head_channels=8
    ),
    "diffusion_unet_text": fitting(
        "monai.networks.nets.DiffusionModelUNet",
        SIZES,
        lambda: (*steps(1, 16, 16), torch.randn(2, 5, 24)),
        **UNET,
        num_head_channels=8,
        with_conditioning=True,
        cross_attention_dim=24,
        upcast_attention=True,
    ),
    "diffusion_unet_fused_projection": fitting(
        "monai.networks.nets.DiffusionModelUNet",
        SIZES,
        lambda: steps(1, 16, 16),
        **UNET,
        num_head_channels=8,
        use_combined_linear=True,
    ),
    "decoder_only": fitting(
        "monai.networks.nets.DecoderOnlyTransformer",
        SIZES,
        lambda: (torch.randint(0, 50, (2, 24)),),
        num_tokens=50,
        max_seq_len=32,
        attn_layers_dim=64,
        attn_layers_depth=2,
        attn_layers_heads=4,
    ),
    "decoder_only_cross": fitting(
        "monai.networks.nets.DecoderOnlyTransformer",
        SIZES,
        lambda: (torch.randint(0, 50, (2, 24)), torch.randn(2, 7, 64)),
        num_tokens=50,
        max_seq_len=32,
        attn_layers_dim=64,
        attn_layers_depth=2,
        attn_layers_heads=4,
        with_cross_attention=True,
    ),
    "self_attention_block": of("blocks.SABlock", 24, 64, causal=True, sequence_length=24),
    "self_attention_rel_pos": of(
        "blocks.SABlock", 16, 64, rel_pos_embedding="decomposed", input_size=(4, 4), include_fc=False
    ),
    "cross_attention_block": fitting(
        "monai.networks.blocks.CrossAttentionBlock", SIZES, lambda: (torch.randn(2, 24, 64), torch.randn(2, 7, 64))
    ),
    "spatial_attention": of(
        "blocks.SpatialAttentionBlock", 16, 8, 8, spatial_dims=2, num_channels=16, norm_num_groups=8
    ),
}
PACKAGES = (Package("monai", CASES),)
