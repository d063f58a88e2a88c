"""Packages with few models: text, speech, proteins, tables, time series."""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import nn

from zoo.case import Build, Made, Package, fitting


def alphabet() -> object:
    from esm.data import Alphabet

    return Alphabet.from_architecture("msa_transformer")


ESM = Namespace(
    arch="roberta_large", embed_dim=64, ffn_embed_dim=128, attention_heads=4, layers=2, max_positions=64, dropout=0.1,
    attention_dropout=0.1, activation_dropout=0.1, max_tokens=2**14, max_tokens_per_msa=2**14, final_bias=True,
    emb_layer_norm_before=True, token_dropout=False, embed_positions_msa=True,
)  # fmt: skip


def padded_residues(*shape: int) -> torch.Tensor:
    residues = torch.randint(4, 24, shape)
    residues[..., 0, -3:] = 1  # the padding index
    return residues


def esm1(arch: str) -> Build:
    def build() -> Made:
        from esm.model.esm1 import ProteinBertModel

        return ProteinBertModel(Namespace(**{**vars(ESM), "arch": arch}), alphabet()), (padded_residues(2, 24),), {}

    return build


def esm2() -> Made:
    from esm.model.esm2 import ESM2

    return ESM2(num_layers=2, embed_dim=64, attention_heads=4, alphabet=alphabet()), (padded_residues(2, 24),), {}


def esm2_contacts() -> Made:
    model, args, _ = esm2()
    return model, args, {"need_head_weights": True}


def msa() -> Made:
    from esm.model.msa_transformer import MSATransformer

    return MSATransformer(ESM, alphabet()), (padded_residues(2, 5, 24),), {}


def axial(kind: str) -> Build:
    """ESM's attention over rows or columns of aligned sequences; [rows, columns, batch, features]."""
    return fitting(
        f"esm.axial_attention.{kind}", {}, lambda: (torch.randn(5, 24, 2, 64),), embed_dim=64, num_heads=4, dropout=0.1
    )


class Esm(nn.Module):
    """ESM's attention module, for its output alone."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        from esm.multihead_attention import MultiheadAttention

        self.attention = MultiheadAttention(64, 4, dropout=0.1, **options)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, key_padding_mask=padding)[0]


def esm_attention(**options: bool) -> Build:
    return lambda: (Esm(**options), (torch.randn(24, 2, 64), torch.arange(24) >= torch.tensor([[24], [17]])), {})


def whisper() -> Made:
    from whisper.model import ModelDimensions, MultiHeadAttention, Whisper

    MultiHeadAttention.use_sdpa = False
    sizes = ModelDimensions(
        n_mels=16, n_audio_ctx=24, n_audio_state=64, n_audio_head=4, n_audio_layer=2, n_vocab=50, n_text_ctx=32,
        n_text_state=64, n_text_head=4, n_text_layer=2,
    )  # fmt: skip
    model = Whisper(sizes)
    torch.nn.init.normal_(model.decoder.positional_embedding)  # it comes as whatever lay in memory
    return model, (torch.randn(2, 16, 48), torch.randint(0, 50, (2, 12))), {}


def qkv(heads: int = 4, length: int = 32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, heads, length, 16) for _ in range(3))


def windows(**options: object) -> Build:
    return fitting(
        "local_attention.LocalAttention", {}, qkv, **{"window_size": 8, "dim": 16, "dropout": 0.1, **options}
    )


def local_transformer(**options: object) -> Build:
    return fitting(
        "local_attention.transformer.LocalTransformer", {}, lambda: (torch.randint(0, 50, (2, 24)),), num_tokens=50,
        max_seq_len=32, dim=64, depth=2, local_attn_window_size=8, dim_head=16, heads=4, **options,
    )  # fmt: skip


def reformer(**options: object) -> Build:
    sizes = {"dim": 64, "depth": 2, "max_seq_len": 32, "heads": 4, "dim_head": 16, "bucket_size": 8, "n_hashes": 2}
    return fitting(
        "reformer_pytorch.ReformerLM", sizes, lambda: (torch.randint(0, 50, (2, 32)),), num_tokens=50, ff_chunks=1,
        **options,
    )  # fmt: skip


LATENTS = {
    "num_latents": 12, "latent_dim": 64, "cross_heads": 1, "latent_heads": 4, "cross_dim_head": 16,
    "latent_dim_head": 16, "depth": 2,
}  # fmt: skip
PERCEIVER: dict[str, Build] = {
    "perceiver": fitting(
        "perceiver_pytorch.Perceiver",
        LATENTS,
        lambda: (torch.randn(2, 8, 8, 3),),
        input_channels=3,
        input_axis=2,
        num_freq_bands=4,
        max_freq=8.0,
        num_classes=8,
        attn_dropout=0.1,
        self_per_cross_attn=2,
    ),
    "perceiver_mask": fitting(
        "perceiver_pytorch.Perceiver",
        LATENTS,
        lambda: (torch.randn(2, 24, 3), torch.arange(24) < torch.tensor([[24], [17]])),
        input_channels=3,
        input_axis=1,
        num_freq_bands=4,
        max_freq=8.0,
        num_classes=8,
    ),
    "perceiver_io": fitting(
        "perceiver_pytorch.PerceiverIO",
        LATENTS,
        lambda: (torch.randn(2, 24, 32), None, torch.randn(5, 24)),
        dim=32,
        queries_dim=24,
        logits_dim=8,
    ),
}
TABLE = {"categories": (5, 4, 3), "num_continuous": 4, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}


def table() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 3, (4, 3)), torch.randn(4, 4)


def forecast(**options: object) -> Build:
    """neuralforecast's attention on [batch, length, heads, features]."""

    def inputs() -> tuple[torch.Tensor | None, ...]:
        return (*(torch.randn(2, 24, 4, 16) for _ in range(3)), None)

    return fitting("neuralforecast.common._modules.FullAttention", {}, inputs, **options)


PACKAGES = (
    Package(
        "fair-esm",
        {
            "esm1": esm1("protein_bert_base"),
            "esm1b": esm1("roberta_large"),
            "esm2": esm2,
            "esm2_contacts": esm2_contacts,
            "msa_transformer": msa,
            "row_attention": axial("RowSelfAttention"),
            "column_attention": axial("ColumnSelfAttention"),
            "attention": esm_attention(),
            "attention_rotary": esm_attention(use_rotary_embeddings=True),
            "attention_bias_kv": esm_attention(add_bias_kv=True),
            "attention_zero": esm_attention(add_zero_attn=True),
        },
    ),
    Package(
        "enformer-pytorch",
        {
            "attention": fitting(
                "enformer_pytorch.modeling_enformer.Attention", {}, lambda: (torch.randn(2, 24, 64),), dim=64, heads=4,
                num_rel_pos_features=24, dim_key=16, dim_value=16, dropout=0.1, pos_dropout=0.01,
            )
        },
    ),
    Package("openai-whisper", {"whisper": whisper}),
    Package(
        "local-attention",
        {
            "windows": windows(),
            "windows_causal": windows(causal=True),
            "windows_exact": windows(causal=True, exact_windowsize=True),
            "windows_xpos": windows(causal=True, use_xpos=True),
            "windows_shared_qk": windows(causal=True, shared_qk=True),
            "windows_not_rotary": windows(use_rotary_pos_emb=False),
            "transformer": local_transformer(),
            "transformer_bias": local_transformer(use_dynamic_pos_bias=True),
        },
    ),
    Package(
        "reformer-pytorch",
        {
            "full": reformer(use_full_attn=True),
            "full_causal": reformer(use_full_attn=True, causal=True),
            "hashed": reformer(causal=True),
            "local": reformer(n_local_attn_heads=3, causal=True),
        },
    ),
    Package("perceiver-pytorch", PERCEIVER),
    Package(
        "tab-transformer-pytorch",
        {
            "tab_transformer": fitting(
                "tab_transformer_pytorch.TabTransformer", TABLE, table, mlp_act=nn.ReLU()
            ),
            "ft_transformer": fitting("tab_transformer_pytorch.FTTransformer", TABLE, table, attn_dropout=0.1),
        },
    ),
    Package(
        "neuralforecast",
        {
            "full": forecast(mask_flag=False),
            "full_causal": forecast(mask_flag=True),
            "full_weights": forecast(mask_flag=False, output_attention=True),
            "patch_tst": fitting(
                "neuralforecast.models.patchtst._ScaledDotProductAttention", {},
                lambda: (torch.randn(2, 4, 24, 16), torch.randn(2, 4, 16, 24), torch.randn(2, 4, 24, 16)),
                hidden_size=64, n_heads=4, attn_dropout=0.1,
            ),
            "patch_tst_residual": fitting(
                "neuralforecast.models.patchtst._ScaledDotProductAttention", {},
                lambda: (
                    torch.randn(2, 4, 24, 16), torch.randn(2, 4, 16, 24), torch.randn(2, 4, 24, 16),
                    torch.randn(2, 4, 24, 24),
                ),
                hidden_size=64, n_heads=4, res_attention=True, lsa=True,
            ),
            "tft_attention": fitting(
                "neuralforecast.models.tft.InterpretableMultiHeadAttention", {}, lambda: (torch.randn(2, 24, 64),),
                n_head=4, hidden_size=64, example_length=24, attn_dropout=0.1, dropout=0.1,
            ),
        },
    ),
    Package(
        "pytorch-forecasting",
        {
            "tft_attention": fitting(
                "pytorch_forecasting.models.temporal_fusion_transformer.sub_modules.InterpretableMultiHeadAttention",
                {}, lambda: (*(torch.randn(2, 24, 64) for _ in range(3)), torch.ones(2, 24, 24).triu(1).bool()),
                n_head=4, d_model=64, dropout=0.1,
            )
        },
    ),
)  # fmt: skip
