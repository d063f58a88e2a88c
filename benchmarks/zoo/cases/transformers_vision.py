"""The vision models of transformers, attention written out ("eager")."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from zoo.case import Build
from zoo.cases.transformers_small import film, image, large_image, of, padded, part, small, text, text_and_image


def swin(**options: Any) -> dict[str, Any]:
    return dict(embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4, patch_size=4, image_size=32, **options)


PYRAMID = {
    "num_encoder_blocks": 3,
    "depths": [1, 1, 1],
    "hidden_sizes": [16, 32, 64],
    "strides": [4, 2, 2],
    "num_attention_heads": [1, 2, 4],
    "mlp_ratios": [2, 2, 2],
}
VISION: dict[str, Build] = {
    "vit": of("ViTConfig", "ViTModel", image),
    "deit": of("DeiTConfig", "DeiTModel", image),
    "beit_relbias": of("BeitConfig", "BeitModel", image, use_relative_position_bias=True),
    "data2vec_vision": of("Data2VecVisionConfig", "Data2VecVisionModel", image, use_shared_relative_position_bias=True),
    "dinov2": of("Dinov2Config", "Dinov2Model", image),
    "dinov3_vit": of("DINOv3ViTConfig", "DINOv3ViTModel", image),
    "ijepa": of("IJepaConfig", "IJepaModel", image),
    "swin": of("SwinConfig", "SwinModel", image, **swin()),
    "swinv2": of("Swinv2Config", "Swinv2Model", image, **swin()),
    "donut_swin": of("DonutSwinConfig", "DonutSwinModel", image, **swin()),
    "maskformer_swin": of("MaskFormerSwinConfig", "MaskFormerSwinModel", image, **swin()),
    "swin2sr": of(
        "Swin2SRConfig",
        "Swin2SRModel",
        image,
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        image_size=16,
        patch_size=1,
    ),
    "cvt": of("CvtConfig", "CvtModel", large_image, embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3]),
    "pvt": of(
        "PvtConfig",
        "PvtModel",
        large_image,
        image_size=64,
        sequence_reduction_ratios=[4, 2, 1],
        patch_sizes=[4, 2, 2],
        **PYRAMID,
    ),
    "pvt_v2": of(
        "PvtV2Config", "PvtV2Model", large_image, image_size=64, sr_ratios=[4, 2, 1], patch_sizes=[7, 3, 3], **PYRAMID
    ),
    "segformer": of(
        "SegformerConfig", "SegformerModel", large_image, sr_ratios=[4, 2, 1], patch_sizes=[7, 3, 3], **PYRAMID
    ),
    "glpn": of("GLPNConfig", "GLPNModel", large_image, sr_ratios=[4, 2, 1], patch_sizes=[7, 3, 3], **PYRAMID),
    "levit": of(
        "LevitConfig",
        "LevitModel",
        large_image,
        image_size=64,
        patch_size=16,
        hidden_sizes=[32, 48, 64],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[16, 16, 16],
    ),
    "mobilevit": of(
        "MobileViTConfig",
        "MobileViTModel",
        large_image,
        image_size=64,
        hidden_sizes=[32, 48, 64],
        neck_hidden_sizes=[8, 16, 24, 32, 40, 48, 64],
        patch_size=2,
    ),
    "hiera": of(
        "HieraConfig",
        "HieraModel",
        large_image,
        image_size=[64, 64],
        patch_size=[7, 7],
        patch_stride=[4, 4],
        embed_dim=32,
        depths=[1, 1, 1],
        num_heads=[1, 2, 4],
        num_query_pool=1,
        masked_unit_size=[4, 4],
        masked_unit_attention=[True, True, False],
    ),
    "vitdet_relpos": of(
        "VitDetConfig",
        "VitDetModel",
        image,
        use_relative_position_embeddings=True,
        window_block_indices=[0],
        window_size=2,
    ),
    "timesformer": of("TimesformerConfig", "TimesformerModel", film, num_frames=4),
    "vivit": of("VivitConfig", "VivitModel", film, num_frames=4, tubelet_size=[2, 16, 16]),
    "videomae": of("VideoMAEConfig", "VideoMAEModel", film, num_frames=4),
    "dpt": of("DPTConfig", "DPTModel", image, backbone_out_indices=[0, 1]),
    "yolos": of("YolosConfig", "YolosModel", image, image_size=[32, 32], num_detection_tokens=4),
    "groupvit_text_vision": of(
        lambda: transformers.GroupViTConfig(
            text_config=part("GroupViTTextConfig"),
            vision_config=part(
                "GroupViTVisionConfig", depths=[1, 1], num_group_tokens=[8, 0], num_output_groups=[8, 4], hidden_size=64
            ),
            projection_dim=32,
            projection_intermediate_dim=64,
        ),
        "GroupViTModel",
        text_and_image,
    ),
    "clip": of(
        lambda: transformers.CLIPConfig(
            text_config=part("CLIPTextConfig"), vision_config=part("CLIPVisionConfig"), projection_dim=32
        ),
        "CLIPModel",
        text_and_image,
    ),
    "siglip": of(
        lambda: transformers.SiglipConfig(
            text_config=part("SiglipTextConfig", projection_size=64), vision_config=part("SiglipVisionConfig")
        ),
        "SiglipModel",
        text_and_image,
    ),
    "blip": of(
        lambda: transformers.BlipConfig(
            text_config=part("BlipTextConfig", encoder_hidden_size=64),
            vision_config=part("BlipVisionConfig"),
            projection_dim=32,
            image_text_hidden_size=32,
        ),
        "BlipForConditionalGeneration",
        text_and_image,
    ),
    "owlvit": of(
        lambda: transformers.OwlViTConfig(
            text_config=part("OwlViTTextConfig", max_position_embeddings=24),
            vision_config=part("OwlViTVisionConfig"),
            projection_dim=32,
        ),
        "OwlViTModel",
        text_and_image,
    ),
    "altclip_text": of("AltCLIPTextConfig", "AltCLIPTextModel", text, project_dim=32),
    "flava_text": of("FlavaTextConfig", "FlavaTextModel", text),
    "blip2_qformer": of(
        "Blip2QFormerConfig",
        "Blip2QFormerModel",
        lambda config: {"query_embeds": torch.randn(2, 8, 64), "encoder_hidden_states": torch.randn(2, 20, 64)},
        encoder_hidden_size=64,
        cross_attention_frequency=1,
    ),
    "git": of(lambda: small("GitConfig", vision_config=part("GitVisionConfig")), "GitModel", text_and_image),
    "qwen2_vl_text": of(
        "Qwen2VLTextConfig",
        "Qwen2VLTextModel",
        text,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    ),
    "pix2struct_vision": of(
        "Pix2StructVisionConfig",
        "Pix2StructVisionModel",
        lambda config: {
            "flattened_patches": torch.cat(
                [torch.randint(1, 5, (2, 12, 2)).float(), torch.randn(2, 12, 3 * 8 * 8)], -1
            ),
            "attention_mask": padded(12, 9),
        },
        patch_embed_hidden_size=192,
        seq_len=16,
    ),
    "sam_vision": of(
        "SamVisionConfig",
        "SamVisionModel",
        lambda config: {"pixel_values": torch.randn(1, 3, 64, 64)},
        image_size=64,
        patch_size=8,
        window_size=3,
        global_attn_indexes=[1],
        output_channels=16,
    ),
    "sam": of(
        lambda: transformers.SamConfig(
            vision_config=part(
                "SamVisionConfig",
                image_size=64,
                patch_size=8,
                window_size=4,
                global_attn_indexes=[1],
                output_channels=32,
                num_pos_feats=16,
            ),
            prompt_encoder_config={"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 8},
            mask_decoder_config={"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 4, "iou_head_hidden_dim": 32},
        ),
        "SamModel",
        lambda config: {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": torch.rand(1, 1, 2, 2) * 60},
    ),
}
