"""Generate tokens with a static key-value cache, compiled into one graph for the prompt and one for single tokens.

    python examples/decoding.py [--prompt 256] [--tokens 64] ...

The cache is filled in place, and a mask hides its empty part. The tokens are compared with the model as written.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attn_fuse.picker.timing import synchronize, table
from compare import flags, tell


class CachedAttention(nn.Module):
    """x: [batch, new, width], at: the positions of the new tokens. The cache is [batch, heads, capacity, head_dim]."""

    def __init__(self, width: int, heads: int, batch: int, capacity: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, heads, capacity, self.head_dim))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        batch, new, width = x.shape
        q, k, v = (
            t.view(batch, new, self.heads, self.head_dim).transpose(1, 2) for t in self.qkv(x).split(width, dim=2)
        )
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        scores = q @ self.keys.transpose(-2, -1) / math.sqrt(self.head_dim)
        visible = torch.arange(self.keys.size(2), device=x.device)[None, :] <= at[:, None]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return self.out((weights @ self.values).transpose(1, 2).reshape(batch, new, width))


class Decoder(nn.Module):
    """tokens: int64 [batch, new], at: their positions, int64 [new] -> logits of the last, [batch, vocabulary]."""

    def __init__(self, args: argparse.Namespace, vocabulary: int = 512) -> None:
        super().__init__()
        capacity = args.prompt + args.tokens
        self.embed, self.position = nn.Embedding(vocabulary, args.width), nn.Embedding(capacity, args.width)
        self.layers = nn.ModuleList(
            [CachedAttention(args.width, args.heads, args.batch, capacity) for _ in range(args.layers)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(args.width) for _ in range(args.layers)])
        self.head = nn.Linear(args.width, vocabulary)

    def forward(self, tokens: Tensor, at: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(at)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x), at)
        return self.head(x[:, -1])


def generate(step: Callable[[Tensor, Tensor], Tensor], prompt: Tensor, count: int) -> Tensor:
    """The next `count` tokens after `prompt`, by greedy decoding: int64 [batch, count]."""
    at, tokens, made = torch.arange(prompt.size(1), device=prompt.device), prompt, []
    for _ in range(count):
        tokens = step(tokens, at).argmax(-1, keepdim=True)
        made.append(tokens)
        at = at[-1:] + 1
    return torch.cat(made, dim=1)


@torch.no_grad()
def main() -> None:
    args = flags(__doc__ or "", batch=1, prompt=256, tokens=64, width=256, heads=8, layers=4).parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    model = Decoder(args).to(device).eval()
    prompt = torch.randint(512, (args.batch, args.prompt), device=device)
    # dynamic=False: the prompt and the single token get a graph each.
    compiled = torch.compile(model, backend="attn_fuse", options={"pick": args.pick}, dynamic=False)
    steps = {"eager": model, "inductor": torch.compile(model, dynamic=False), "attn_fuse": compiled}
    made = {name: generate(step, prompt, args.tokens) for name, step in steps.items()}
    tell()
    if not torch.equal(made["attn_fuse"], made["eager"]):
        raise SystemExit("the compiled model generates other tokens")
    rows = []
    for name, step in steps.items():
        synchronize(device)
        started = time.perf_counter()
        generate(step, prompt, args.tokens)
        synchronize(device)
        rows.append([name, f"{args.batch * args.tokens / (time.perf_counter() - started):.0f}"])
    print(table(["", "tokens a second"], rows))


if __name__ == "__main__":
    main()
