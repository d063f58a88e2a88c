"""diffusers: a UNet and a transformer by the library's hand-written processor, compiled as its documents say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attn_fuse
from tests.ecosystem.tiny import FUSED, WHY, all_fused

diffusers = pytest.importorskip("diffusers", reason=f"diffusers {WHY}")

QUICK = FUSED | {"inner_backend": "aot_eager"}


def unet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    net = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24, attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip
    return written_out(net), (torch.randn(2, 4, 8, 8), torch.tensor(3), torch.randn(2, 7, 24))


def transformer() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    net = diffusers.Transformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, cross_attention_dim=24,
        norm_num_groups=4,
    )  # fmt: skip
    return written_out(net), (torch.randn(2, 4, 8, 8), torch.randn(2, 7, 24))


def written_out(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, diffusers.models.attention_processor.Attention):
            module.set_processor(diffusers.models.attention_processor.AttnProcessor())
    return net.eval()


@pytest.mark.parametrize("make", [unet, transformer])
def test_inference(make) -> None:
    net, inputs = make()
    with torch.no_grad():
        wanted = net(*inputs).sample
        with attn_fuse.install(FUSED), all_fused(4):  # attention to itself and to the words, twice
            net.compile()
            got = net(*inputs).sample
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_training() -> None:
    net, inputs = transformer()
    gradients = []
    for run in (net, torch.compile(net, backend="attn_fuse", options=QUICK)):
        net.zero_grad()
        if run is net:
            run(*inputs).sample.square().mean().backward()
        else:
            with all_fused(4):
                run(*inputs).sample.square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-3)


def test_a_pipeline() -> None:
    """Two steps of denoising, guided: the pipeline calls the compiled UNet."""
    net, (_, _, words) = unet()
    scheduler = diffusers.DDIMScheduler(num_train_timesteps=10)

    def denoised() -> Tensor:
        scheduler.set_timesteps(2)
        sample = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for time in scheduler.timesteps:
                sample = scheduler.step(net(sample, time, words).sample, time, sample).prev_sample
        return sample

    wanted = denoised()
    with all_fused(4):
        net.compile(backend="attn_fuse", options=QUICK)
        got = denoised()
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)
