"""GPT-2-small blocks, and attention alone: as written, under Inductor, under attn_fuse, and edited by hand to SDPA.

    python benchmarks/blocks.py [--device cuda --dtype bfloat16 --layers 12 --batch 8]

Each round runs every variant once, in a new order; the figures are medians. "Training" is forward and backward,
without the optimizer's step, which is the same for all. The results are stored as `nanogpt`.
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

from attn_fuse.picker.case import DTYPES
from attn_fuse.report import headline, reports
from harness import bytes_in_words, interleaved, peak_memory, store, table
from model import GPT, GPTConfig
from model_sdpa import SDPAGPT

Step = Callable[[], Any]
BACKENDS = {"eager": None, "inductor": "inductor", "attn_fuse": "attn_fuse", "sdpa": "inductor"}


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


def block(name: str, args: argparse.Namespace, training: bool) -> Step:
    """A step of GPT-2-small blocks, with equal weights; the vocabulary is small, so that blocks dominate."""
    torch.manual_seed(0)
    config = GPTConfig(block_size=args.length, vocab_size=256, n_layer=args.layers)
    model = (SDPAGPT if name == "sdpa" else GPT)(config).to(args.device, DTYPES[args.dtype])
    run = compiled(model, name)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (args.batch, args.length + 1), generator=generator).to(args.device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def both() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = run(inputs, targets)[1]
        loss.backward()
        return loss.detach()

    return both if training else torch.no_grad()(lambda: run(inputs, targets)[1])


def attention(name: str, args: argparse.Namespace, training: bool, length: int) -> Step:
    run = compiled(SDPAttention() if name == "sdpa" else WrittenAttention(length).to(args.device), name)
    torch.manual_seed(1)
    q, k, v, gradient = torch.randn(4, 1, args.heads, length, 64).to(args.device, DTYPES[args.dtype]).unbind()
    for tensor in (q, k, v):
        tensor.requires_grad_(training)
    if training:
        return lambda: torch.autograd.grad(run(q, k, v), (q, k, v), gradient)[0]
    return torch.no_grad()(lambda: run(q, k, v))


def compiled(model: nn.Module, name: str) -> nn.Module:
    if BACKENDS[name] is not None:
        model.compile(backend=BACKENDS[name])
    return model


def measured(title: str, step: Callable[[str], Step], args: argparse.Namespace) -> dict[str, Any]:
    """Times and peak memory of the variants' steps, once they are known to compute the same."""
    torch.compiler.reset()
    runs = {name: step(name) for name in BACKENDS}
    results = {name: run() for name, run in runs.items()}
    tolerance = 1e-3 if args.dtype == "float32" else 5e-2
    for name, result in results.items():
        torch.testing.assert_close(result, results["eager"], rtol=tolerance, atol=tolerance, msg=name)
    del results, result
    seconds = interleaved(runs, args.device, rounds=args.rounds, seconds=args.seconds, whole_programs=True)
    memory = {name: peak_memory(run, args.device) for name, run in runs.items()}
    over = {name: {base: seconds[name].median / seconds[base].median for base in BACKENDS} for name in BACKENDS}
    rows = [
        [name, str(seconds[name]), *(f"{ratio:.3f}" for ratio in over[name].values()), bytes_in_words(memory[name])]
        for name in BACKENDS
    ]
    print(f"\n{title} ({seconds['eager'].runs} rounds)")
    print(table(["", "median (quartiles)", *(f"/ {base}" for base in BACKENDS), "peak memory"], rows), flush=True)
    ours = {base: ratio for base, ratio in over["attn_fuse"].items() if base != "attn_fuse"}
    return {"seconds": seconds, "attn_fuse_over": ours, "peak_bytes": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=12, help="of attention alone")
    parser.add_argument("--attention-lengths", type=int, nargs="*", default=[1024, 2048])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=90.0, help="of measuring, at most, for each table")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for training in (False, True):
        kind = f"{args.dtype}, {'training' if training else 'inference'}"
        if args.layers:
            title = f"{args.layers} GPT-2-small blocks, batch {args.batch}, {args.length} tokens, {kind}"
            results[title] = measured(title, lambda name, t=training: block(name, args, t), args)
        for length in args.attention_lengths:
            title = f"causal attention alone, {args.heads} heads of 64, {length} tokens, {kind}"
            results[title] = measured(title, lambda name, t=training, n=length: attention(name, args, t, n), args)
    print("\nattn_fuse's sites:")
    sites = [f"{site.location}: {headline(site)}" for report in reports() for site in report.sites]
    print("\n".join(f"  {site}" for site in sites))
    options = {**vars(args), "device": str(args.device)}
    print(f"\n{store('nanogpt', args.device, {'options': options, 'results': results, 'sites': sites})}")


if __name__ == "__main__":
    main()
