"""Packages with few models: vision, and vision with text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zoo.case import Build, Made, Package, fitting


def images(size: int, channels: int = 3) -> Callable[[], tuple[torch.Tensor]]:
    return lambda: (torch.randn(2, channels, size, size),)


def pair(size: int, vocabulary: int = 50, length: int = 16) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Texts that end in the largest token, which is where open_clip looks for the end, and images."""

    def inputs() -> tuple[torch.Tensor, ...]:
        return torch.randn(2, 3, size, size), torch.randint(1, vocabulary, (2, length))

    return inputs


def torchvision_model(name: str, size: int, **options: Any) -> Build:
    def build() -> Made:
        from torchvision import models

        return getattr(models, name)(num_classes=8, **options), images(size)(), {}

    return build


def vision_transformer(**options: Any) -> Build:
    """torchvision's ViT writes no attention out but for nn.MultiheadAttention."""
    return fitting(
        "torchvision.models.vision_transformer.VisionTransformer", {}, images(32), image_size=32, patch_size=8,
        num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, **options,
    )  # fmt: skip


def mvit() -> Made:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    shape = {"kernel_q": [3, 3, 3], "kernel_kv": [3, 3, 3], "stride_kv": [1, 2, 2]}
    blocks = [
        MSBlockConfig(num_heads=2, input_channels=32, output_channels=32, stride_q=[1, 1, 1], **shape),
        MSBlockConfig(num_heads=4, input_channels=32, output_channels=64, stride_q=[1, 2, 2], **shape),
    ]
    options = {"residual_pool": True, "residual_with_cls_embed": False, "rel_pos_embed": True, "proj_after_attn": True}
    model = MViT(spatial_size=(32, 32), temporal_size=4, block_setting=blocks, **options, num_classes=8)
    return model, (torch.randn(1, 3, 4, 32, 32),), {}


TORCHVISION: dict[str, Build] = {
    "vit": vision_transformer(dropout=0.1),
    "swin": fitting(
        "torchvision.models.swin_transformer.SwinTransformer",
        {},
        images(32),
        patch_size=[2, 2],
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
    ),
    "swin_v2": torchvision_model("swin_v2_t", 64),
    "swin3d": fitting(
        "torchvision.models.video.swin_transformer.SwinTransformer3d",
        {},
        lambda: (torch.randn(1, 3, 4, 32, 32),),
        patch_size=[2, 4, 4],
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[2, 4, 4],
    ),
    "maxvit": fitting(
        "torchvision.models.maxvit.MaxVit",
        {},
        images(64),
        input_size=(64, 64),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
    ),
    "mvit_v2": mvit,
}
ENCODER = {"img_size": 64, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "out_chans": 32}
WINDOWS = {"use_rel_pos": True, "rel_pos_zero_init": False, "window_size": 3, "global_attn_indexes": (1,)}
SAM: dict[str, Build] = {
    "image_encoder": fitting("segment_anything.modeling.image_encoder.ImageEncoderViT", {}, images(64), **ENCODER),
    "image_encoder_windows": fitting(
        "segment_anything.modeling.image_encoder.ImageEncoderViT", {}, images(64), **ENCODER, **WINDOWS
    ),
    "two_way_transformer": fitting(
        "segment_anything.modeling.transformer.TwoWayTransformer",
        {},
        lambda: (torch.randn(2, 64, 4, 4), torch.randn(2, 64, 4, 4), torch.randn(2, 5, 64)),
        depth=2,
        embedding_dim=64,
        num_heads=4,
        mlp_dim=128,
    ),
}
KORNIA: dict[str, Build] = {
    "vit": fitting(
        "kornia.models.vit.VisionTransformer",
        {},
        images(32),
        image_size=32,
        patch_size=8,
        embed_dim=64,
        depth=2,
        num_heads=4,
        dropout_rate=0.1,
        dropout_attn=0.1,
    ),
    "tiny_vit": fitting(
        "kornia.models.tiny_vit.TinyViT",
        {},
        images(64),
        img_size=64,
        num_classes=8,
        embed_dims=[16, 32, 32, 64],
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 2, 4],
        window_sizes=[4, 4, 4, 2],
    ),
    "sam_encoder": fitting(
        "kornia.models.sam.architecture.image_encoder.ImageEncoderViT", {}, images(64), **ENCODER, **WINDOWS
    ),
    "dedode_attention": fitting(
        "kornia.feature.dedode.transformer.layers.attention.Attention",
        {},
        lambda: (torch.randn(2, 24, 64),),
        dim=64,
        num_heads=4,
        attn_drop=0.1,
    ),
}
VISION = {"image_size": 32, "patch_size": 8, "width": 64, "layers": 2, "head_width": 16}
TEXT = {"context_length": 16, "vocab_size": 50, "width": 64, "heads": 4, "layers": 2}


def open_clip(**options: Any) -> Build:
    """CLIP of open_clip with the towers of `options`."""
    vision, text = VISION | options.pop("vision", {}), TEXT | options.pop("text", {})
    return fitting("open_clip.model.CLIP", {}, pair(32), embed_dim=32, vision_cfg=vision, text_cfg=text, **options)


OPEN_CLIP: dict[str, Build] = {
    "clip": open_clip(),
    "clip_pooler": open_clip(vision={"attentional_pool": True, "attn_pooler_queries": 8, "attn_pooler_heads": 4}),
    "custom_transformer": fitting(
        "open_clip.transformer.CustomTransformer",
        {},
        lambda: (torch.randn(2, 24, 64),),
        width=64,
        layers=2,
        heads=4,
        block_types="CustomResidualAttentionBlock",
    ),
    "clip_bidirectional": open_clip(text={"no_causal_mask": True}),
    "attention": fitting(
        "open_clip.transformer.Attention", {}, lambda: (torch.randn(2, 24, 64),), dim=64, num_heads=4, attn_drop=0.1
    ),
    "attention_causal": fitting(
        "open_clip.transformer.Attention",
        {},
        lambda: (torch.randn(2, 24, 64), torch.full((24, 24), -torch.inf).triu_(1)),
        dim=64,
        num_heads=4,
    ),
}
TIMESFORMER: dict[str, Build] = {
    "timesformer": fitting(
        "timesformer_pytorch.TimeSformer",
        {},
        lambda: (torch.randn(2, 3, 3, 32, 32),),
        dim=64,
        num_frames=3,
        num_classes=8,
        image_size=32,
        patch_size=8,
        depth=2,
        heads=4,
        dim_head=16,
        attn_dropout=0.1,
    ),
    "timesformer_mask": fitting(
        "timesformer_pytorch.TimeSformer",
        {},
        lambda: (torch.randn(2, 3, 3, 32, 32), torch.tensor([[True, True, True], [True, True, False]])),
        dim=64,
        num_frames=3,
        num_classes=8,
        image_size=32,
        patch_size=8,
        depth=2,
        heads=4,
        dim_head=16,
        rotary_emb=False,
    ),
}
AXIAL: dict[str, Build] = {
    "attention": fitting("axial_attention.AxialAttention", {}, lambda: (torch.randn(2, 8, 8, 32),), dim=32, heads=4),
    "attention_3d": fitting(
        "axial_attention.AxialAttention",
        {},
        lambda: (torch.randn(2, 4, 6, 8, 32),),
        dim=32,
        heads=4,
        num_dimensions=3,
        sum_axial_out=False,
    ),
    "image_transformer": fitting(
        "axial_attention.AxialImageTransformer",
        {},
        images(8, 32),
        dim=32,
        depth=2,
        heads=4,
        reversible=False,
        axial_pos_emb_shape=(8, 8),
    ),
}
X_CLIP: dict[str, Build] = {
    "text": fitting(
        "x_clip.x_clip.TextTransformer",
        {},
        lambda: (torch.randint(0, 50, (2, 16)), torch.arange(16) < torch.tensor([[16], [11]])),
        dim=64,
        num_tokens=50,
        max_seq_len=16,
        dim_head=16,
        depth=2,
        heads=4,
    ),
    "text_causal": fitting(
        "x_clip.x_clip.TextTransformer",
        {},
        lambda: (torch.randint(0, 50, (2, 16)),),
        dim=64,
        num_tokens=50,
        max_seq_len=16,
        dim_head=16,
        depth=2,
        heads=4,
        causal=True,
    ),
    "vision": fitting(
        "x_clip.x_clip.VisionTransformer",
        {},
        images(32),
        dim=64,
        image_size=32,
        patch_size=8,
        channels=3,
        depth=2,
        heads=4,
        dim_head=16,
    ),
}
DALLE2: dict[str, Build] = {
    "causal_transformer": fitting(
        "dalle2_pytorch.dalle2_pytorch.CausalTransformer",
        {},
        lambda: (torch.randn(2, 16, 64),),
        dim=64,
        depth=2,
        heads=4,
        dim_head=16,
    ),
    "attention": fitting(
        "dalle2_pytorch.dalle2_pytorch.Attention",
        {},
        lambda: (torch.randn(2, 16, 64), torch.arange(16) < torch.tensor([[16], [11]])),
        dim=64,
        heads=4,
        dim_head=16,
        causal=True,
        dropout=0.1,
    ),
    "cross_attention": fitting(
        "dalle2_pytorch.dalle2_pytorch.CrossAttention",
        {},
        lambda: (torch.randn(2, 16, 64), torch.randn(2, 7, 32)),
        dim=64,
        context_dim=32,
        heads=4,
        dim_head=16,
    ),
    "cross_attention_cosine": fitting(
        "dalle2_pytorch.dalle2_pytorch.CrossAttention",
        {},
        lambda: (torch.randn(2, 16, 64), torch.randn(2, 7, 32)),
        dim=64,
        context_dim=32,
        heads=4,
        dim_head=16,
        cosine_sim=True,
    ),
    "linear_attention": fitting(
        "dalle2_pytorch.dalle2_pytorch.LinearAttention", {}, images(8, 32), dim=32, heads=4, dim_head=16
    ),
}
PACKAGES = (
    Package("torchvision", TORCHVISION),
    Package("segment-anything", SAM),
    Package("kornia", KORNIA),
    Package("open_clip_torch", OPEN_CLIP),
    Package("timesformer-pytorch", TIMESFORMER),
    Package("axial-attention", AXIAL),
    Package("x-clip", X_CLIP),
    Package("dalle2-pytorch", DALLE2),
)
