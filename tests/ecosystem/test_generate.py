"""`generate`: every cache, prefill and decoding fused, the tokens those of the model run eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attn_fuse
from attn_fuse.report import GraphReport, collecting
from tests.ecosystem.tiny import FUSED, LAYERS, all_fused, model, padded, sites, transformers

NEW = 8
KINDS = (
    "GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM", "GPTNeoXForCausalLM",
    "BloomForCausalLM",
)  # fmt: skip
QUICK = FUSED | {"inner_backend": "aot_eager"}


def generative(kind: str) -> nn.Module:
    """It never stops before its time."""
    net = model(kind, eos_token_id=None, forced_eos_token_id=None)
    net.generation_config.eos_token_id = net.generation_config.forced_eos_token_id = None
    return net.eval()


def generated(net: nn.Module, cache: str, **how: Any) -> Tensor:
    """Token ids, int64 [3, prompt + new], of prompts of which the first is padded on the left."""
    ids, mask = padded()
    torch.manual_seed(3)
    settings = {"max_new_tokens": NEW, "do_sample": False, "cache_implementation": cache} | how
    found: Tensor = net.generate(ids, attention_mask=mask, **settings)
    assert found.shape == (3, ids.shape[1] + NEW)
    return found


def config(**settings: Any) -> Any:
    """`generate` compiles on the CPU only when it is told so."""
    made = transformers.CompileConfig(**settings)
    made._compile_all_devices = True
    return made


# With one query a head, two heads that share their keys are read as one head of two queries.
ONE_QUERY = {"1", "2"}


def query_lengths(graphs: list[GraphReport]) -> set[str]:
    return {site.attention["q_len"] for site in sites(graphs)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_static_cache_by_compile_config(kind: str) -> None:
    """`generate` compiles the decoding step alone, and prefills eagerly."""
    net = generative(kind)
    wanted = generated(net, "static")
    with all_fused() as graphs:
        got = generated(net, "static", compile_config=config(backend="attn_fuse", mode=None, options=QUICK))
    assert torch.equal(got, wanted)
    assert query_lengths(graphs) <= ONE_QUERY


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_a_compiled_model_prefills_and_decodes(kind: str, cache: str) -> None:
    net = generative(kind)
    wanted = generated(net, cache)
    net.compile(backend="attn_fuse", options=QUICK)
    with all_fused(2 * LAYERS) as graphs:
        got = generated(net, cache)
    assert torch.equal(got, wanted)
    assert query_lengths(graphs) & ONE_QUERY and query_lengths(graphs) - ONE_QUERY


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM"])
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_through_inductor(kind: str, cache: str) -> None:
    net = generative(kind)
    wanted = generated(net, cache)
    with attn_fuse.install(FUSED), all_fused(2 * LAYERS):
        net.compile()
        got = generated(net, cache)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("settings", [{}, {"mode": "default", "dynamic": True}])
def test_install_before_compile_config(settings: dict[str, Any]) -> None:
    """Its backend is "inductor", its mode "reduce-overhead" where none is said."""
    net = generative("LlamaForCausalLM")
    wanted = generated(net, "static")
    with attn_fuse.install(FUSED), all_fused():
        got = generated(net, "static", compile_config=config(**settings))
    assert torch.equal(got, wanted)


def test_a_prompt_in_chunks() -> None:
    net = generative("LlamaForCausalLM")
    how = {"prefill_chunk_size": 6}
    wanted = generated(net, "static", **how)
    with all_fused(2 * LAYERS):
        compiled = config(backend="attn_fuse", mode=None, options=QUICK)
        got = generated(net, "static", compile_config=compiled, **how)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("how", [{"do_sample": True, "top_k": 20, "temperature": 0.8}, {"num_beams": 3}])
def test_sampling_with_a_seed_and_beams(cache: str, how: dict[str, Any]) -> None:
    net = generative("LlamaForCausalLM")
    wanted = generated(net, cache, **how)
    net.compile(backend="attn_fuse", options=QUICK)
    with all_fused(2 * LAYERS):
        got = generated(net, cache, **how)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_an_encoder_and_a_decoder(cache: str) -> None:
    """The first token attends to itself alone: a single key, whose weight is 1, is no attention to fuse."""
    net = generative("BartForConditionalGeneration")
    ids, mask = padded()
    how = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "cache_implementation": cache}
    wanted = net.generate(ids, **how)
    net.compile(backend="attn_fuse", options=QUICK)
    with collecting() as graphs:
        got = net.generate(ids, **how)
    assert torch.equal(got, wanted)
    left = [site.blocker.reason for site in sites(graphs) if not site.fused]
    assert set(left) <= {"there is a single key, whose weight is 1"}
    assert len(sites(graphs)) - len(left) >= 2 * LAYERS


def test_the_same_model_again_for_other_prompts() -> None:
    """A static cache of the same size needs no other graph; tokens stay those of the eager model."""
    net = generative("LlamaForCausalLM")
    compiled = {"compile_config": config(backend="attn_fuse", mode=None, options=QUICK)}
    wanted = [generated(net, "static", min_new_tokens=NEW), generated(net, "static", do_sample=True)]
    with all_fused():
        first = generated(net, "static", min_new_tokens=NEW, **compiled)
    with collecting() as graphs:
        second = generated(net, "static", do_sample=True, **compiled)
    assert torch.equal(first, wanted[0]) and torch.equal(second, wanted[1])
    assert not graphs
