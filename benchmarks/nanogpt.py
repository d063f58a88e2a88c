"""GPT-2-small blocks, and attention alone: as written, under Inductor, under attn_fuse, and edited by hand to SDPA.

    python benchmarks/nanogpt.py [--device cuda --dtype bfloat16 --layers 12 --batch 8]

Each round runs every variant once, in a new order; the figures are medians. "Training" is forward and backward,
without the optimizer's step, which is the same for all.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The profiler that measures memory on the CPU warns of every tensor older than itself.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "nanogpt"))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_fuse.report import headline, reports
from harness import Timing, bytes_in_words, interleaved, peak_memory, store, table
from model import GPT, GPTConfig
from model_sdpa import SDPAGPT

Runs = dict[str, Callable[[], Any]]
VARIANTS = ("eager", "inductor", "attn_fuse", "sdpa")
BACKENDS = {"inductor": "inductor", "attn_fuse": "attn_fuse", "sdpa": "inductor"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WrittenAttention(nn.Module):
    """Causal attention as nanoGPT writes it, from query, key and value."""

    bias: Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.size(2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        return F.softmax(att, dim=-1) @ v


class SDPAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def blocks(args: argparse.Namespace) -> dict[str, nn.Module]:
    """The variants of a GPT of GPT-2-small blocks, with equal weights; the vocabulary is small, so blocks dominate."""
    config = GPTConfig(block_size=args.length, vocab_size=256, n_layer=args.layers)
    torch.manual_seed(0)
    weights = GPT(config).state_dict()
    variants: dict[str, nn.Module] = {}
    for name in args.variants:
        model = (SDPAGPT if name == "sdpa" else GPT)(config)
        model.load_state_dict(weights)
        variants[name] = model.to(args.device, DTYPES[args.dtype])
    return compiled(variants)


def attentions(args: argparse.Namespace, length: int) -> dict[str, nn.Module]:
    return compiled(
        {name: SDPAttention() if name == "sdpa" else WrittenAttention(length).to(args.device) for name in args.variants}
    )


def compiled(variants: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The variants, each to be compiled by its backend when it is first called."""
    torch.compiler.reset()
    for name, model in variants.items():
        if name in BACKENDS:
            model.compile(backend=BACKENDS[name])
    return variants


def block_runs(variants: dict[str, nn.Module], args: argparse.Namespace, training: bool) -> Runs:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (args.batch, args.length + 1), generator=generator).to(args.device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def run(model: nn.Module) -> Callable[[], Any]:
        def step() -> Tensor:
            model.zero_grad(set_to_none=True)
            loss = model(inputs, targets)[1]
            loss.backward()
            return loss.detach()

        @torch.no_grad()
        def forward() -> Tensor:
            return model(inputs, targets)[1]

        return step if training else forward

    return {name: run(model) for name, model in variants.items()}


def attention_runs(variants: dict[str, nn.Module], args: argparse.Namespace, length: int, training: bool) -> Runs:
    torch.manual_seed(1)
    shape = (1, args.heads, length, 64)
    q, k, v, gradient = torch.randn(4, *shape).to(args.device, DTYPES[args.dtype]).unbind()
    for tensor in (q, k, v):
        tensor.requires_grad_(training)

    def run(model: nn.Module) -> Callable[[], Any]:
        @torch.no_grad()
        def forward() -> Tensor:
            return model(q, k, v)

        def both() -> Tensor:
            return torch.autograd.grad(model(q, k, v), (q, k, v), gradient)[0]

        return both if training else forward

    return {name: run(model) for name, model in variants.items()}


def measured(name: str, runs: Runs, args: argparse.Namespace) -> dict[str, Any]:
    """Times and peak memory of the runs, once they are known to compute the same."""
    results = {variant: run() for variant, run in runs.items()}
    tolerance = 1e-3 if args.dtype == "float32" else 5e-2
    for variant, result in results.items():
        torch.testing.assert_close(result, results[args.variants[0]], rtol=tolerance, atol=tolerance, msg=variant)
    del results, result
    seconds = interleaved(runs, args.device, rounds=args.rounds, seconds=args.seconds, whole_programs=True)
    memory = {variant: peak_memory(run, args.device) for variant, run in runs.items()}
    rows = [
        [v, str(seconds[v]), *(ratio(seconds, v, base) for base in VARIANTS), bytes_in_words(memory[v])] for v in runs
    ]
    print(f"\n{name} ({seconds[args.variants[0]].runs} rounds)")
    print(table(["", "median (quartiles)", *(f"/ {base}" for base in VARIANTS), "peak memory"], rows), flush=True)
    ratios = {
        base: seconds["attn_fuse"].median / seconds[base].median
        for base in ("eager", "inductor", "sdpa")
        if base in seconds and "attn_fuse" in seconds
    }
    return {"seconds": seconds, "attn_fuse_over": ratios, "peak_bytes": memory}


def ratio(seconds: dict[str, Timing], variant: str, base: str) -> str:
    return f"{seconds[variant].median / seconds[base].median:.3f}" if base in seconds else "-"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=12, help="of attention alone")
    parser.add_argument("--attention-lengths", type=int, nargs="*", default=[1024, 2048])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=90.0, help="of measuring, at most, for each table")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    results: dict[str, Any] = {}
    for training in (False, True):
        kind = "training" if training else "inference"
        if args.layers:
            name = f"{args.layers} GPT-2-small blocks, batch {args.batch}, {args.length} tokens, {args.dtype}, {kind}"
            results[name] = measured(name, block_runs(blocks(args), args, training), args)
        for length in args.attention_lengths:
            name = f"causal attention alone, {args.heads} heads of 64, {length} tokens, {args.dtype}, {kind}"
            results[name] = measured(name, attention_runs(attentions(args, length), args, length, training), args)
    print("\nattn_fuse's sites:")
    sites = [f"{site.location}: {headline(site)}" for report in reports() for site in report.sites]
    print("\n".join(f"  {site}" for site in sites))
    print(f"\n{store('nanogpt', args.device, {'options': options(args), 'results': results, 'sites': sites})}")


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) if name == "device" else value for name, value in vars(args).items()}


if __name__ == "__main__":
    main()
