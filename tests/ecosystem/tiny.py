"""Small random models of transformers whose attention is written out, and what became of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.report import GraphReport, SiteReport, as_text, collecting

WHY = "is not installed: `make test-ecosystem` does it"
transformers = pytest.importorskip("transformers", reason=f"transformers {WHY}")

LAYERS, HIDDEN, HEADS, WORDS, LENGTH = 2, 32, 4, 64, 16
FUSED = {"pick": "fused"}

_TOKENS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 4 * LENGTH}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_LLAMA = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 4 * LENGTH,
}
_GROUPED = _LLAMA | {"num_key_value_heads": HEADS // 2}
_BART = {
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
    "max_position_embeddings": 4 * LENGTH,
    "decoder_start_token_id": 1,
    "dropout": 0.0,
}
SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": _GPT2,
    "BertForMaskedLM": _LLAMA | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "LlamaForCausalLM": _GROUPED,
    "MistralForCausalLM": _GROUPED | {"sliding_window": LENGTH // 2},
    "Gemma2ForCausalLM": _GROUPED | {"head_dim": HIDDEN // HEADS, "sliding_window": LENGTH // 2},
    "GPTNeoXForCausalLM": _LLAMA,
    "BloomForCausalLM": {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS},
    "BartForConditionalGeneration": _BART,
}


def model(kind: str, seed: int = 0, **settings: Any) -> nn.Module:
    """A random model of transformers with its attention written out, in float32, and weights so large that scores
    differ. settings: more of its configuration."""
    maker = getattr(transformers, kind)
    config = maker.config_class(**_TOKENS | SIZES[kind] | settings)
    torch.manual_seed(seed)
    made: nn.Module = maker._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    return made


def padded(length: int = LENGTH, batch: int = 3) -> tuple[Tensor, Tensor]:
    """Token ids and their mask, int64 [batch, length]: the first sentence is padded on the left."""
    torch.manual_seed(1)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, : length // 3] = 0
    return torch.randint(3, WORDS, mask.shape) * mask, mask


def sites(graphs: list[GraphReport]) -> list[SiteReport]:
    """Every attention of every graph."""
    return [site for graph in graphs for site in graph.sites]


@contextlib.contextmanager
def all_fused(at_least: int = LAYERS) -> Iterator[list[GraphReport]]:
    """A block in which this many attentions or more are compiled, and all of them fused; their reports at its end."""
    with collecting() as graphs:
        yield graphs
    said = "\n".join(as_text(graph, plain=True) for graph in graphs)
    found = sites(graphs)
    assert len(found) >= at_least and all(site.fused for site in found), said or "nothing was compiled"
