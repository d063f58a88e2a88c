"""timm, with its fused attention off, so that the models write their attention out."""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.layers import set_fused_attn

from zoo.case import Build, Package, case

set_fused_attn(False)

VIT = {"embed_dim": 64, "depth": 2, "num_heads": 4}
SMALL_VIT = {"img_size": 32, "patch_size": 8, **VIT}


def of(name: str, size: int = 32, **options: Any) -> Build:
    """A case of timm's model `name` on two images of `size`."""
    return case(timm.create_model, lambda: (torch.randn(2, 3, size, size),), name, num_classes=8, **options)


CASES: dict[str, Build] = {
    "vit": of("vit_tiny_patch16_224", **SMALL_VIT),
    "vit_norm_qk": of("vit_tiny_patch16_224", **SMALL_VIT, qk_norm=True),
    "vit_pool_attention": of("vit_base_patch16_siglip_224", **SMALL_VIT),
    "vit_registers": of("vit_base_patch14_reg4_dinov2", **SMALL_VIT),
    "vit_parallel": of(
        "vit_tiny_patch16_224", **SMALL_VIT, block_fn=timm.models.vision_transformer.ParallelThingsBlock
    ),
    "vit_relpos": of("vit_relpos_small_patch16_224", **SMALL_VIT),
    "vit_relpos_mlp": of("vit_relpos_base_patch16_rpn_224", **SMALL_VIT),
    "vit_srelpos": of("vit_srelpos_small_patch16_224", **SMALL_VIT),
    "vit_hybrid": of("vit_tiny_r_s16_p8_224", 64, img_size=64, **VIT),
    "vit_diff": of("vit_dpwee_patch16_reg1_gap_256", **SMALL_VIT),
    "naflexvit": of("naflexvit_base_patch16_gap", **VIT),
    "deit": of("deit_tiny_patch16_224", **SMALL_VIT),
    "deit_distilled": of("deit_tiny_distilled_patch16_224", **SMALL_VIT),
    "deit3": of("deit3_small_patch16_224", **SMALL_VIT),
    "beit": of("beit_base_patch16_224", **SMALL_VIT),
    "beit3": of("beit3_base_patch16_224", **SMALL_VIT),
    "aimv2": of("aimv2_large_patch14_224", **SMALL_VIT),
    "eva": of("eva_giant_patch14_224", **SMALL_VIT),
    "eva02": of("eva02_tiny_patch14_224", **SMALL_VIT),
    "samvit": of(
        "samvit_base_patch16_224",
        64,
        img_size=64,
        patch_size=8,
        embed_dim=64,
        depth=2,
        num_heads=4,
        window_size=3,
        global_attn_indexes=(1,),
    ),
    "cait": of("cait_xxs24_224", **SMALL_VIT),
    "xcit": of("xcit_nano_12_p16_224", img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4),
    "convit": of("convit_tiny", img_size=32, patch_size=8, depth=3, local_up_to_layer=2),
    "tnt": of(
        "tnt_s_patch16_224", img_size=32, embed_dim=64, inner_dim=16, depth=2, num_heads_inner=2, num_heads_outer=4
    ),
    "crossvit": of("crossvit_tiny_240", 240, depth=[[1, 1, 0], [1, 1, 0], [1, 1, 0]]),
    "swin": of(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(2, 2), embed_dim=32, num_heads=(2, 4)
    ),
    "swin_s3": of(
        "swin_s3_tiny_224", 64, img_size=64, window_size=(4, 4), depths=(2, 2), embed_dim=32, num_heads=(2, 4)
    ),
    "swinv2": of("swinv2_tiny_window8_256", img_size=32, window_size=4, depths=(2, 2), embed_dim=32, num_heads=(2, 4)),
    "swinv2_cr": of("swinv2_cr_tiny_224", img_size=32, window_size=4, depths=(2, 2), embed_dim=32, num_heads=(2, 4)),
    "maxvit": of("maxvit_pico_rw_256", 64, img_size=64, stem_width=16, depths=(1, 1), embed_dim=(32, 64)),
    "maxvit_rmlp": of("maxvit_rmlp_pico_rw_256", 64, img_size=64, depths=(1, 1), embed_dim=(32, 64)),
    "coatnet": of("coatnet_pico_rw_224", 64, img_size=64),
    "coatnet_rmlp": of("coatnet_rmlp_nano_rw_224", 64, img_size=64),
    "coatnext": of("coatnext_nano_rw_224", 64, img_size=64),
    "nest": of("nest_tiny", 128, img_size=128),
    "twins_pcpvt": of("twins_pcpvt_small", 64, img_size=64, depths=(1, 1, 1, 1)),
    "twins_svt": of("twins_svt_small", 64, img_size=64, depths=(1, 1, 1, 1)),
    "pit": of("pit_ti_224", 64, img_size=64, depth=(1, 1, 1)),
    "pvt_v2": of("pvt_v2_b0", 64, depths=(1, 1, 1, 1)),
    "pvt_v2_linear": of("pvt_v2_b2_li", 64, depths=(1, 1, 1, 1)),
    "levit": of("levit_128s", 128, img_size=128),
    "levit_conv": of("levit_conv_128s", 128, img_size=128),
    "coat_lite": of("coat_lite_tiny", 64, img_size=64),
    "coat": of("coat_tiny", 64, img_size=64),
    "davit": of("davit_tiny", 64, depths=(1, 1), embed_dims=(32, 64), num_heads=(2, 4)),
    "edgenext": of("edgenext_xx_small", 64),
    "efficientformer": of("efficientformer_l1", 224),
    "efficientformer_v2": of("efficientformerv2_s0", 224),
    "fastvit": of("fastvit_sa12", 64),
    "gcvit": of("gcvit_xxtiny", 224),
    "hiera": of("hiera_tiny_224", 64, img_size=(64, 64), embed_dim=32, stages=(1, 1, 1), q_pool=2, num_heads=1),
    "hieradet_sam2": of("sam2_hiera_tiny", 64, embed_dim=32, num_heads=1, stages=(1, 1, 2, 1), global_att_blocks=(3,)),
    "iformer": of("iformer_t", 64),
    "lowformer": of("lowformer_b0", 64),
    "cpubone": of("cpubone_nano", 64),
    "csatv2": of("csatv2", 128),
    "caformer": of("caformer_s18", 64),
    "mobilevit": of("mobilevit_xxs", 64),
    "mobilevitv2": of("mobilevitv2_050", 64),
    "mvitv2": of("mvitv2_tiny", 64, img_size=64),
    "nextvit": of("nextvit_small", 64, depths=(1, 1, 5, 1)),
    "shvit": of("shvit_s1", 128),
    "tiny_vit": of("tiny_vit_5m_224", 224),
    "visformer": of("visformer_tiny", 64, img_size=64),
    "volo": of("volo_d1_224", 64, img_size=64),
    "efficientvit_msra": of("efficientvit_m0", 64, img_size=64, window_size=(2, 2, 2)),
    "vitamin": of("vitamin_small_224", 64, img_size=64, depth=2),
    "botnet": of("botnet26t_256", 64, img_size=64),
    "halonet": of("halonet26t", 256),
    "lambda_resnet": of("lambda_resnet26t", 64),
    "bat_resnext": of("bat_resnext26ts", 256),
    "gc_resnet": of("gcresnext26ts", 64),
}
PACKAGES = (Package("timm", CASES),)
