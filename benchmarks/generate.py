"""Tokens in a second of transformers' `generate`, by a small LLaMA of random weights, five ways.

    .venv/ecosystem/bin/python benchmarks/generate.py [--device cuda] [--prompt 512] [--new 64] [--layers 4]

Each way has a model of its own with the same weights, decodes greedily into a static cache, and is timed over whole
calls, interleaved; before that its tokens are compared with those of the eager model. "sdpa" is the library's own call
of F.scaled_dot_product_attention under Inductor. The share of the prompt is timed by calls for a single new token.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import harness
from attn_fuse.report import collecting

os.environ["HF_HUB_OFFLINE"] = "1"

# By name of a way: the attention of transformers, the backend, its options.
WAYS: dict[str, tuple[str, str | None, dict[str, Any] | None]] = {
    "eager": ("eager", None, None),
    "inductor": ("eager", "inductor", None),
    "attn_fuse": ("eager", "attn_fuse", None),
    "attn_fuse, all fused": ("eager", "attn_fuse", {"pick": "fused"}),
    "sdpa": ("sdpa", "inductor", None),
}


@dataclass(frozen=True)
class Sizes:
    """prompt, new: in tokens."""

    batch: int
    prompt: int
    new: int
    layers: int
    width: int = 512
    heads: int = 8
    kv_heads: int = 4


def model(sizes: Sizes, attention: str, device: torch.device) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096, hidden_size=sizes.width, intermediate_size=4 * sizes.width, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, max_position_embeddings=2 * (sizes.prompt + sizes.new),
    )  # fmt: skip
    torch.manual_seed(0)
    made: nn.Module = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    return made.eval().to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)


def generated(net: nn.Module, ids: Tensor, new: int, room: int) -> Tensor:
    """The tokens after the prompt, int64 [batch, new]. room: the length of the cache."""
    from transformers import StaticCache

    cache = StaticCache(config=net.config, max_cache_len=room)
    with torch.no_grad():
        out = net.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new, do_sample=False,
            disable_compile=True,
        )  # fmt: skip
    found: Tensor = out[:, ids.shape[1] :]
    return found


def what_became(net: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, list[dict[str, str]]]:
    """The tokens, and of each attention that is compiled on the way its length of queries and what became of it."""
    with collecting() as graphs:
        tokens = run()
    return tokens, [
        {"q_len": site.attention.get("q_len", ""), "status": site.status, "kernel": site.kernel or ""}
        for graph in graphs
        for site in graph.sites
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="what the rounds of timing may take")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    sizes = Sizes(arguments.batch, arguments.prompt, arguments.new, arguments.layers)
    torch.manual_seed(1)
    ids = torch.randint(2, 4096, (sizes.batch, sizes.prompt), device=device)
    room = sizes.prompt + sizes.new

    calls: dict[str, Callable[[], object]] = {}
    sites, agree = {}, {}
    wanted: Tensor | None = None
    for name, (attention, backend, options) in WAYS.items():
        torch.compiler.reset()
        net = model(sizes, attention, device)
        if backend is not None:
            net.compile(backend=backend, options=options)
        run = functools.partial(generated, net, ids, room=room)
        tokens, sites[name] = what_became(net, functools.partial(run, sizes.new))
        wanted = tokens if wanted is None else wanted
        agree[name] = (tokens == wanted).float().mean().item()
        calls[f"{name}: all"] = functools.partial(run, sizes.new)
        calls[f"{name}: prompt"] = functools.partial(run, 1)
        print(f"{name}: {agree[name]:.0%} of the tokens as eager, {len(sites[name])} attentions reported", flush=True)

    load = harness.OtherLoad()
    times = harness.interleaved(calls, device, rounds=15, seconds=arguments.seconds, whole_programs=True)
    others = load.share()
    print(f"other programs took {others:.0%} of the cores")
    rows = {}
    for name in WAYS:
        whole, prompt = times[f"{name}: all"], times[f"{name}: prompt"]
        rows[name] = {
            "seconds": whole,
            "prompt_seconds": prompt,
            "tokens_per_second": sizes.batch * sizes.new / whole.median,
            "decoded_per_second": sizes.batch * (sizes.new - 1) / max(whole.median - prompt.median, 1e-9),
            "tokens_as_eager": agree[name],
            "attentions": sites[name],
        }
    cells = [
        [name, f"{row['tokens_per_second']:.1f}", f"{row['decoded_per_second']:.1f}", str(row["prompt_seconds"])]
        for name, row in rows.items()
    ]
    print(harness.table(["", "tokens/s", "decoded/s", "prompt"], cells))
    print(harness.store("generate", device, {"sizes": asdict(sizes), "other_load": others, "ways": rows}))


if __name__ == "__main__":
    main()
