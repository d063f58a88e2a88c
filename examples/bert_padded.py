"""A BERT-style encoder for padded sentences of different lengths. The model makes the mask of each batch.

python examples/bert_padded.py [--batch 8] [--length 512] ...
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from compare import compare, flags


class SelfAttention(nn.Module):
    """x: [batch, length, width]. bias: added to the scores, [batch, 1, 1, length]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, self.head_dim).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        weights = nn.functional.softmax(scores + bias, dim=-1)
        return torch.matmul(weights, v).permute(0, 2, 1, 3).flatten(-2)


class Layer(nn.Module):
    """x: [batch, length, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.out = SelfAttention(width, heads), nn.Linear(width, width)
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.norm(x + self.out(self.attention(x, bias)))
        return self.norm2(x + self.mlp(x))


class Encoder(nn.Module):
    """tokens: int64 [batch, length]. keep: [batch, length], 1 for a token and 0 for padding. -> [batch, width]."""

    def __init__(self, width: int = 256, heads: int = 4, layers: int = 2, length: int = 512) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(1000, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.size(1), device=tokens.device))
        bias = (1.0 - keep[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, bias)
        # The first token represents the sentence.
        return x[:, 0]


@torch.no_grad()
def main() -> None:
    args = flags(__doc__ or "", batch=8, length=512, width=256, heads=4, layers=2).parse_args()
    torch.manual_seed(0)
    model = Encoder(args.width, args.heads, args.layers, args.length).to(args.device).eval()
    tokens = torch.randint(1000, (args.batch, args.length), device=args.device)
    lengths = torch.randint(args.length // 4, args.length + 1, (args.batch, 1), device=args.device)
    keep = (torch.arange(args.length, device=args.device) < lengths).long()
    compare(model, (tokens, keep), args)


if __name__ == "__main__":
    main()
