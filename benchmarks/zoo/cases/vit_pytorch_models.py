"""vit-pytorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.case import Build, Package, fitting

SIZES = {
    "image_size": 32, "patch_size": 8, "image_patch_size": 8, "num_classes": 10, "dim": 64, "depth": 2, "heads": 4,
    "mlp_dim": 128, "dim_head": 16, "frames": 4, "frame_patch_size": 2, "spatial_depth": 1, "temporal_depth": 1,
    "cls_depth": 1, "seq_len": 64, "dropout": 0.1, "emb_dropout": 0.1,
}  # fmt: skip


def of(path: str, *shape: int, **options: Any) -> Build:
    """A case of vit_pytorch.`path` on two images, or on two inputs of `shape`."""
    return fitting(f"vit_pytorch.{path}", SIZES, lambda: (torch.randn(2, *(shape or (3, 32, 32))),), **options)


def images() -> tuple[list[Tensor]]:
    """Images of several sizes, which NaViT packs."""
    return ([torch.randn(3, 16, 32), torch.randn(3, 32, 16), torch.randn(3, 32, 32)],)


CASES: dict[str, Build] = {
    "vit": of("vit.ViT"),
    "vit_mean": of("vit.ViT", pool="mean"),
    "vit_1d": of("vit_1d.ViT", 3, 64),
    "vit_3d": of("vit_3d.ViT", 3, 4, 32, 32),
    "vit_5": of("vit_5.ViT"),
    "vit_small_dataset": of("vit_for_small_dataset.ViT"),
    "vit_detpool": of("vit_detpool.ViTDetPool"),
    "vit_decorr": of("vit_with_decorr.ViT"),
    "vit_keel_post_norm": of("vit_with_keel_post_ln.ViT"),
    "vit_patch_dropout": of("vit_with_patch_dropout.ViT"),
    "vit_patch_merger": of("vit_with_patch_merger.ViT"),
    "vit_learnable_memory": of("learnable_memory_vit.ViT"),
    "simple_vit": of("simple_vit.SimpleViT"),
    "simple_vit_1d": of("simple_vit_1d.SimpleViT", 3, 64),
    "simple_vit_3d": of("simple_vit_3d.SimpleViT", 3, 4, 32, 32),
    "simple_vit_fft": of("simple_vit_with_fft.SimpleViT", freq_patch_size=8),
    "simple_vit_hyper_connections": of("simple_vit_with_hyper_connections.SimpleViT", num_residual_streams=2),
    "simple_vit_norm_qk": of("simple_vit_with_qk_norm.SimpleViT"),
    "simple_vit_registers": of("simple_vit_with_register_tokens.SimpleViT"),
    "simple_vit_relative_bias": of("simple_vit_with_relative_proj_pos_bias.SimpleViT"),
    "simple_vit_sparse_gating": of("simple_vit_with_sparse_gating.SimpleViTWithSparseGating"),
    "simple_vit_specialized": of("simple_vit_with_specialized_cls.SimpleViT"),
    "simple_vit_value_residual": of("simple_vit_with_value_residual.SimpleViT"),
    "simple_vit_orthogonal": of("simple_vit_orthog_residual_update.SimpleViT"),
    "simple_vit_attention_residual": of("simple_vit_attn_residual.SimpleViTAttnResidual"),
    "simple_vit_dca": of("attn_residual_with_dca_simple_vit.SimpleViT"),
    "simple_uvit": of("simple_uvit.SimpleUViT"),
    "ats_vit": of("ats_vit.ViT", max_tokens_per_depth=(12, 8)),
    "cait": of("cait.CaiT"),
    "cct": of("cct.CCT", img_size=32, embedding_dim=64, num_layers=2, num_heads=4),
    "cct_3d": of("cct_3d.CCT", 3, 4, 32, 32, img_size=32, num_frames=4, embedding_dim=64, num_layers=2, num_heads=4),
    "cross_vit": of("cross_vit.CrossViT", sm_dim=32, lg_dim=64, sm_patch_size=8, lg_patch_size=16, depth=1),
    "crossformer": of("crossformer.CrossFormer", 3, 224, 224, dim=(64, 64, 64, 64), depth=(1, 1, 1, 1)),
    "cvt": of("cvt.CvT", s1_emb_dim=16, s2_emb_dim=32, s3_emb_dim=64, s2_heads=2, s3_heads=2, s3_depth=1),
    "deepvit": of("deepvit.DeepViT"),
    "jet_vit": of("jet_vit.JetViT"),
    "jumbo_vit": of("jumbo_vit.JumboViT"),
    "levit": of("levit.LeViT", 3, 224, 224, image_size=224, dim=(32, 64), depth=1, heads=2, mlp_mult=2, stages=2),
    "look_vit": of("look_vit.LookViT", patch_size=8, highres_patch_size=4),
    "looped_vit": of("looped_vit.LoopedViT", pre_loop_depth=1, num_looped_blocks=1, post_loop_depth=1, loop_depth=2),
    "mae_encoder_mp3": of("mp3.ViT"),
    "max_vit": of("max_vit.MaxViT", 3, 64, 64, dim=32, depth=(1, 1), window_size=4, dim_conv_stem=16),
    "max_vit_registers": of(
        "max_vit_with_registers.MaxViT", 3, 64, 64, dim=32, depth=(1, 1), window_size=4, dim_conv_stem=16
    ),
    "mobile_vit": of(
        "mobile_vit.MobileViT",
        3,
        64,
        64,
        image_size=(64, 64),
        patch_size=(2, 2),
        dims=[32, 48, 64],
        channels=[8, 8, 16, 16, 24, 24, 32, 32, 40, 40, 64],
    ),
    "na_vit": fitting("vit_pytorch.na_vit.NaViT", SIZES, images),
    "nest": of("nest.NesT", num_hierarchies=2, block_repeats=(1, 1)),
    "normalized_vit": of("normalized_vit.nViT"),
    "parallel_vit": of("parallel_vit.ViT"),
    "pit": of("pit.PiT", depth=(1, 1), patch_size=8),
    "regionvit": of(
        "regionvit.RegionViT", 3, 64, 64, dim=(16, 32, 32, 64), depth=(1, 1, 1, 1), window_size=2, local_patch_size=4
    ),
    "rvt": of("rvt.RvT"),
    "scalable_vit": of(
        "scalable_vit.ScalableViT",
        3,
        64,
        64,
        depth=(1, 1),
        heads=(2, 4),
        reduction_factor=(4, 2),
        window_size=(4, None),
    ),
    "sep_vit": of("sep_vit.SepViT", 3, 56, 56, dim=16, depth=(1, 1), heads=(1, 2), dim_head=16),
    "t2t": of("t2t.T2TViT", t2t_layers=((7, 4), (3, 2))),
    "twins_svt": of(
        "twins_svt.TwinsSVT",
        3,
        64,
        64,
        s1_emb_dim=16,
        s2_emb_dim=32,
        s3_emb_dim=32,
        s4_emb_dim=64,
        s3_depth=1,
        s4_depth=1,
        s1_local_patch_size=4,
        s2_local_patch_size=4,
        s3_local_patch_size=2,
        s4_local_patch_size=2,
        s1_global_k=4,
        s2_global_k=4,
        s3_global_k=2,
        s4_global_k=2,
    ),
    "vivit": of("vivit.ViViT", 3, 4, 32, 32, use_flash_attn=False),
    "vivit_attention": of("vivit.ViViT", 3, 4, 32, 32, variant="factorized_self_attention", use_flash_attn=False),
    "vivit_moss": of("vivit_with_moss.ViViT", 3, 4, 32, 32, use_flash_attn=False),
    "wwt": of("wwt.WWT", num_slots=8),
    "xcit": of("xcit.XCiT"),
}
PACKAGES = (Package("vit-pytorch", CASES),)
