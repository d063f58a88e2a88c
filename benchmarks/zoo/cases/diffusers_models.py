"""diffusers, with the attention processors that write attention out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import diffusers.models.unets.unet_3d_condition
import torch
from diffusers.models.attention_processor import Attention, AttnAddedKVProcessor, AttnProcessor
from torch import Tensor, nn

from zoo.case import Build, Made, Package

UNET = {
    "sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 16,
}  # fmt: skip


class Output(nn.Module):
    """A model of diffusers, called for a tuple."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, return_dict=False, **kwargs)


def of(name: str, inputs: Callable[[], tuple[Any, ...]], processor: type = AttnProcessor, **options: Any) -> Build:
    """A case of diffusers' `name` with `processor` in each attention."""

    def build() -> Made:
        model = getattr(diffusers, name)(**options)
        for module in model.modules():
            if isinstance(module, Attention):
                module.set_processor(processor())
        return Output(model), inputs(), {}

    return build


def noisy(channels: int = 4, size: int = 16, context: int | None = 32) -> Callable[[], tuple[Tensor, ...]]:
    """A sample, the step, and a text of `context` features."""

    def inputs() -> tuple[Tensor, ...]:
        sample = torch.randn(2, channels, size, size), torch.tensor([3, 5])
        return sample if context is None else (*sample, torch.randn(2, 12, context))

    return inputs


def picture(channels: int = 3, size: int = 16) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(2, channels, size, size),)


DOWN_UP = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32, "attention_head_dim": 8,
}  # fmt: skip
DIT = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8, "norm_num_groups": 1}

CASES: dict[str, Build] = {
    "unet_2d": of(
        "UNet2DModel",
        noisy(3, context=None),
        **UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    ),
    "unet_condition": of("UNet2DConditionModel", noisy(), **UNET, **DOWN_UP),
    "unet_condition_upcast": of("UNet2DConditionModel", noisy(), **UNET, **DOWN_UP, upcast_attention=True),
    "unet_condition_linear": of("UNet2DConditionModel", noisy(), **UNET, **DOWN_UP, use_linear_projection=True),
    "unet_condition_dual": of("UNet2DConditionModel", noisy(), **UNET, **DOWN_UP, only_cross_attention=True),
    "unet_added_kv": of(
        "UNet2DConditionModel",
        noisy(),
        AttnAddedKVProcessor,
        **UNET,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("SimpleCrossAttnDownBlock2D",) * 2,
        up_block_types=("SimpleCrossAttnUpBlock2D",) * 2,
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
    ),
    "unet_3d": of(
        "UNet3DConditionModel",
        lambda: (torch.randn(1, 4, 3, 16, 16), torch.tensor([3]), torch.randn(1, 12, 32)),
        **UNET,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    ),
    "autoencoder_kl": of(
        "AutoencoderKL",
        picture(),
        block_out_channels=(32, 64),
        norm_num_groups=16,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "vq_model": of("VQModel", picture(), block_out_channels=(32,), norm_num_groups=16, num_vq_embeddings=16),
    "prior": of(
        "PriorTransformer",
        lambda: (torch.randn(2, 32), torch.tensor([3, 5]), torch.randn(2, 32), torch.randn(2, 7, 32)),
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=32,
        num_embeddings=7,
    ),
    "transformer_2d": of(
        "Transformer2DModel",
        lambda: (torch.randn(2, 32, 8, 8), torch.randn(2, 12, 32)),
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=32,
        num_layers=1,
        norm_num_groups=16,
        cross_attention_dim=32,
    ),
    "dual_transformer": of(
        "Transformer2DModel",
        lambda: (torch.randn(2, 32, 8, 8),),
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=32,
        num_layers=2,
        norm_num_groups=16,
        double_self_attention=True,
    ),
}
PACKAGES = (Package("diffusers", CASES),)
