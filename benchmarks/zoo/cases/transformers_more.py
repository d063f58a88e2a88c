"""The encoder-decoders, audio models, decoding steps of transformers, attention written out ("eager")."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.clvp import modeling_clvp
from transformers.models.moshi import modeling_moshi

from zoo.case import Build, Made
from zoo.cases.transformers_small import (
    CONV,
    ids,
    image,
    large_image,
    masked_pair,
    of,
    padded,
    pair,
    part,
    small,
    step_of,
    text,
    text_alone,
    wave,
)


def fastspeech2() -> Made:
    config = small(
        "FastSpeech2ConformerConfig", encoder_linear_units=64, decoder_linear_units=64, encoder_num_attention_heads=4,
        decoder_num_attention_heads=4, speech_decoder_postnet_units=32,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return transformers.FastSpeech2ConformerModel(config).encoder, (ids(12), padded(12, 9)[:, None]), {}


SERIES = {"prediction_length": 6, "context_length": 12, "num_time_features": 1}


def series(config: Any) -> dict[str, Any]:
    past = {"past_values": torch.randn(2, 19), "past_time_features": torch.randn(2, 19, 1)}
    future = {"future_values": torch.randn(2, 6), "future_time_features": torch.randn(2, 6, 1)}
    return {**past, "past_observed_mask": torch.ones(2, 19), **future}


def detr(name: str, **options: Any) -> Any:
    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    if "use_timm_backbone" in getattr(transformers, name).__dataclass_fields__:
        options["use_timm_backbone"] = False
    return small(name, backbone_config=backbone, num_queries=9, **options)


PAIRS: dict[str, Build] = {
    "t5": of("T5Config", "T5ForConditionalGeneration", pair),
    "bart": of("BartConfig", "BartForConditionalGeneration", pair),
    "pegasus": of("PegasusConfig", "PegasusForConditionalGeneration", pair),
    "blenderbot": of("BlenderbotConfig", "BlenderbotForConditionalGeneration", pair),
    "m2m100": of("M2M100Config", "M2M100ForConditionalGeneration", pair),
    "mt5": of("MT5Config", "MT5ForConditionalGeneration", masked_pair),
    "umt5": of("UMT5Config", "UMT5ForConditionalGeneration", pair),
    "longt5_local": of("LongT5Config", "LongT5ForConditionalGeneration", pair, local_radius=7),
    "longt5_tglobal": of(
        "LongT5Config",
        "LongT5ForConditionalGeneration",
        pair,
        local_radius=7,
        global_block_size=4,
        encoder_attention_type="transient-global",
    ),
    "switch_transformers": of(
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        pair,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=16,
    ),
    "mbart": of("MBartConfig", "MBartForConditionalGeneration", masked_pair),
    "marian": of("MarianConfig", "MarianMTModel", pair),
    "led": of(
        "LEDConfig",
        "LEDForConditionalGeneration",
        pair,
        attention_window=[8, 8],
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    "bigbird_pegasus_full": of(
        "BigBirdPegasusConfig", "BigBirdPegasusForConditionalGeneration", pair, attention_type="original_full"
    ),
    "pegasus_x": of("PegasusXConfig", "PegasusXForConditionalGeneration", pair, block_size=8, num_global_tokens=4),
    "fsmt": of(
        "FSMTConfig", "FSMTForConditionalGeneration", pair, langs=["en", "de"], src_vocab_size=100, tgt_vocab_size=100
    ),
    "prophetnet": of(
        "ProphetNetConfig",
        "ProphetNetForConditionalGeneration",
        pair,
        num_encoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        ngram=2,
        num_buckets=8,
        relative_max_distance=16,
    ),
    "mvp": of("MvpConfig", "MvpForConditionalGeneration", pair, use_prompt=True, prompt_length=4, prompt_mid_dim=16),
    "plbart": of("PLBartConfig", "PLBartForConditionalGeneration", pair),
    "udop": of(
        "UdopConfig",
        "UdopForConditionalGeneration",
        lambda config: {**text(config), "bbox": torch.rand(2, 24, 4), "decoder_input_ids": ids(16)},
        max_2d_position_embeddings=64,
    ),
    "time_series_transformer": of("TimeSeriesTransformerConfig", "TimeSeriesTransformerModel", series, **SERIES),
    "informer": of("InformerConfig", "InformerModel", series, **SERIES, attention_type="full", distil=False),
    "patchtst": of(
        "PatchTSTConfig",
        "PatchTSTModel",
        lambda config: {"past_values": torch.randn(2, 32, 3)},
        num_input_channels=3,
        context_length=32,
        patch_length=8,
        patch_stride=4,
        channel_attention=True,
    ),
}
AUDIO: dict[str, Build] = {
    "whisper": of(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        lambda config: {"input_features": torch.randn(2, 16, 48), "decoder_input_ids": ids(12)},
        max_source_positions=24,
        max_target_positions=32,
    ),
    "wav2vec2": of("Wav2Vec2Config", "Wav2Vec2Model", wave, **CONV),
    "hubert": of("HubertConfig", "HubertModel", wave, **CONV),
    "wavlm": of("WavLMConfig", "WavLMModel", wave, **CONV, num_buckets=16, max_bucket_distance=32),
    "sew_d": of(
        "SEWDConfig", "SEWDModel", wave, **CONV, squeeze_factor=2, position_buckets=8, pos_att_type=("p2c", "c2p")
    ),
    "wav2vec2_bert_relkey": of(
        "Wav2Vec2BertConfig",
        "Wav2Vec2BertModel",
        lambda config: {"input_features": torch.randn(2, 24, 16), "attention_mask": padded()},
        feature_projection_input_dim=16,
        left_max_position_embeddings=8,
        right_max_position_embeddings=4,
        position_embeddings_type="relative_key",
    ),
    "wav2vec2_conformer_rel": of(
        "Wav2Vec2ConformerConfig",
        "Wav2Vec2ConformerModel",
        wave,
        **CONV,
        position_embeddings_type="relative",
        max_source_positions=64,
    ),
    "wav2vec2_conformer_rotary": of(
        "Wav2Vec2ConformerConfig",
        "Wav2Vec2ConformerModel",
        wave,
        **CONV,
        position_embeddings_type="rotary",
        max_source_positions=64,
    ),
    "speecht5": of(
        "SpeechT5Config",
        "SpeechT5ForSpeechToText",
        lambda config: {**wave(config), "decoder_input_ids": ids(12)},
        **CONV,
        encoder_max_relative_position=16,
    ),
    "fastspeech2_conformer_encoder": fastspeech2,
    "speech_to_text": of(
        "Speech2TextConfig",
        "Speech2TextForConditionalGeneration",
        lambda config: {
            "input_features": torch.randn(2, 40, 16),
            "attention_mask": padded(40, 30),
            "decoder_input_ids": ids(12),
        },
        input_feat_per_channel=16,
        max_source_positions=64,
        max_target_positions=32,
        conv_channels=32,
    ),
    "seamless_m4t_text": of(
        "SeamlessM4TConfig",
        "SeamlessM4TForTextToText",
        pair,
        speech_encoder_layers=1,
        speech_encoder_attention_heads=4,
        speech_encoder_intermediate_size=64,
        t2u_encoder_layers=1,
        t2u_decoder_layers=1,
        t2u_encoder_attention_heads=4,
        t2u_decoder_attention_heads=4,
    ),
    "audio_spectrogram": of(
        "ASTConfig",
        "ASTModel",
        lambda config: {"input_values": torch.randn(2, 40, 16)},
        max_length=40,
        frequency_stride=8,
        time_stride=8,
    ),
    "musicgen_decoder": of(
        "MusicgenDecoderConfig",
        "MusicgenForCausalLM",
        lambda config: {"input_ids": torch.randint(3, 90, (4, 16))},
        num_codebooks=2,
    ),
    "vits_text": of(
        "VitsConfig",
        "VitsModel",
        text,
        ffn_dim=64,
        flow_size=32,
        spectrogram_bins=17,
        upsample_initial_channel=32,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        use_stochastic_duration_prediction=False,
        prior_encoder_num_flows=1,
        window_size=4,
        noise_scale=0.0,
    ),
    "moonshine": of(
        "MoonshineConfig",
        "MoonshineForConditionalGeneration",
        lambda config: {"input_values": torch.randn(2, 4000), "decoder_input_ids": ids(12)},
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=1,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        encoder_num_key_value_heads=4,
        decoder_num_key_value_heads=4,
    ),
}
MORE: dict[str, Build] = {
    "granite_swa_lse_gate": of("GraniteSWAConfig", "GraniteSWAForCausalLM", num_key_value_heads=2),
    "mimo_v2_flash_sink": of(
        "MiMoV2FlashConfig",
        "MiMoV2FlashForCausalLM",
        num_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "dense"],
    ),
    "openai_privacy_filter": of("OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterModel", num_key_value_heads=2),
    "flint_sink": of("FlintConfig", "FlintForCausalLM", num_key_value_heads=2),
    "modernbert_decoder": of(
        "ModernBertDecoderConfig",
        "ModernBertDecoderForCausalLM",
        local_attention=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "t5gemma": of(
        lambda: transformers.T5GemmaConfig(
            encoder=part("T5GemmaModuleConfig", num_key_value_heads=2),
            decoder=part("T5GemmaModuleConfig", num_key_value_heads=2),
            vocab_size=100,
        ),
        "T5GemmaForConditionalGeneration",
        pair,
    ),
    "dia": of(
        lambda: transformers.DiaConfig(
            encoder_config=part("DiaEncoderConfig", num_key_value_heads=2),
            decoder_config=part(
                "DiaDecoderConfig",
                num_key_value_heads=2,
                cross_num_attention_heads=4,
                cross_head_dim=16,
                cross_num_key_value_heads=4,
                cross_hidden_size=64,
                num_channels=3,
            ),
            delay_pattern=[0, 1, 2],
        ),
        "DiaModel",
        lambda config: {
            "input_ids": ids(),
            "attention_mask": padded(),
            "decoder_input_ids": torch.randint(3, 90, (2, 12, 3)),
        },
    ),
    "moshi_depth_decoder": of(
        "MoshiDepthConfig",
        lambda: modeling_moshi.MoshiDepthDecoder,
        lambda config: {"input_ids": torch.randint(3, 90, (2, 3)), "last_hidden_state": torch.randn(2, 3, 64)},
        input_size=64,
        num_codebooks=4,
        audio_vocab_size=100,
        num_key_value_heads=4,
    ),
    "mimi": of(
        "MimiConfig",
        "MimiModel",
        lambda config: {"input_values": torch.randn(2, 1, 3840)},
        num_filters=4,
        num_quantizers=2,
        codebook_dim=16,
        codebook_size=32,
        vector_quantization_hidden_dimension=16,
        upsample_groups=64,
        num_key_value_heads=4,
    ),
    "nomic_bert": of("NomicBertConfig", "NomicBertModel"),
    "gte": of("GteConfig", "GteModel"),
    "xlm_roberta_xl": of("XLMRobertaXLConfig", "XLMRobertaXLModel"),
    "bark_semantic": of(
        "BarkSemanticConfig", "BarkSemanticModel", block_size=64, input_vocab_size=100, output_vocab_size=100
    ),
    "clvp_encoder_rotary": of("ClvpEncoderConfig", lambda: modeling_clvp.ClvpEncoder, text, num_attention_heads=2),
    "mgp_str": of(
        "MgpstrConfig",
        "MgpstrModel",
        lambda config: {"pixel_values": torch.randn(2, 3, 16, 32)},
        image_size=(16, 32),
        patch_size=4,
        num_hidden_layers=2,
    ),
    "seggpt_relpos": of(
        "SegGptConfig",
        "SegGptModel",
        lambda config: {
            "pixel_values": torch.randn(1, 3, 32, 32),
            "prompt_pixel_values": torch.randn(1, 3, 32, 32),
            "prompt_masks": torch.randn(1, 3, 32, 32),
        },
        image_size=(64, 32),
        patch_size=8,
        pretrain_image_size=32,
        intermediate_hidden_state_indices=(0, 1),
        merge_index=0,
        mlp_dim=128,
    ),
    "detr": of(lambda: detr("DetrConfig"), "DetrModel", large_image),
    "conditional_detr": of(lambda: detr("ConditionalDetrConfig"), "ConditionalDetrModel", large_image),
    "dab_detr": of(lambda: detr("DabDetrConfig"), "DabDetrModel", large_image),
    "deformable_detr": of(
        lambda: detr("DeformableDetrConfig", num_feature_levels=1), "DeformableDetrModel", large_image
    ),
    "table_transformer": of(lambda: detr("TableTransformerConfig"), "TableTransformerModel", large_image),
    "neg_reformer_local": of(
        "ReformerConfig",
        "ReformerModel",
        lambda config: {"input_ids": ids(32), "attention_mask": padded(32, 25)},
        attn_layers=["local", "local"],
        attention_head_size=16,
        axial_pos_embds=False,
        local_attn_chunk_length=8,
        feed_forward_size=128,
        is_decoder=True,
    ),
    "vjepa2_rope3d": of(
        "VJEPA2Config",
        "VJEPA2Model",
        lambda config: {"pixel_values_videos": torch.randn(2, 4, 3, 32, 32), "skip_predictor": True},
        crop_size=32,
        patch_size=8,
        frames_per_clip=4,
        num_attention_heads=2,
        hidden_size=64,
        pred_hidden_size=48,
        pred_num_attention_heads=2,
        pred_num_hidden_layers=1,
    ),
    "internvl_vision": of(
        "InternVLVisionConfig", "InternVLVisionModel", image, image_size=[32, 32], patch_size=[8, 8], use_qk_norm=True
    ),
    "neg_fnet": of("FNetConfig", "FNetModel", text_alone, type_vocab_size=2),
    "neg_swiftformer": of(
        "SwiftFormerConfig",
        "SwiftFormerModel",
        large_image,
        image_size=64,
        depths=[1, 1, 1, 1],
        embed_dims=[16, 24, 32, 48],
    ),
    "neg_mamba2": of(
        "Mamba2Config",
        "Mamba2Model",
        text_alone,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=1,
        expand=2,
        chunk_size=8,
    ),
    "neg_reformer_lsh": of(
        "ReformerConfig",
        "ReformerModel",
        lambda config: {"input_ids": ids(32), "attention_mask": padded(32, 25)},
        attn_layers=["lsh", "lsh"],
        attention_head_size=16,
        axial_pos_embds=False,
        lsh_attn_chunk_length=8,
        num_buckets=4,
        feed_forward_size=128,
        hash_seed=1,
    ),
}
STEPS: dict[str, Build] = {
    "llama_static_decode": step_of("LlamaConfig", "LlamaForCausalLM", static=True, num_key_value_heads=2),
    "llama_dynamic_decode": step_of("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=4),
    "qwen3_static_decode": step_of("Qwen3Config", "Qwen3ForCausalLM", static=True, num_key_value_heads=2),
    "gemma2_dynamic_decode": step_of(
        "Gemma2Config", "Gemma2ForCausalLM", num_key_value_heads=2, query_pre_attn_scalar=16, sliding_window=32
    ),
    "gpt2_dynamic_decode": step_of("GPT2Config", "GPT2LMHeadModel"),
    "mistral_dynamic_chunk4_decode": step_of("MistralConfig", "MistralForCausalLM", length=4, num_key_value_heads=2),
    "bloom_dynamic_decode": step_of("BloomConfig", "BloomForCausalLM"),
    "falcon_mqa_dynamic_decode": step_of("FalconConfig", "FalconForCausalLM", alibi=False, multi_query=True),
    "phi3_static_decode": step_of(
        "Phi3Config", "Phi3ForCausalLM", static=True, num_key_value_heads=2, sliding_window=None
    ),
    "gpt_oss_dynamic_decode": step_of("GptOssConfig", "GptOssForCausalLM", num_key_value_heads=2, sliding_window=32),
}
