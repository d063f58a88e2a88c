"""A vision transformer with typical ViT attention: one packed projection, unbound into query, key and value; no mask.

python examples/vit.py [--image 224] [--patch 16] ...
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compare import compare, flags


class Attention(nn.Module):
    """x: [batch, patches, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, patches, width = x.shape
        qkv = self.qkv(x).reshape(batch, patches, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(batch, patches, width))


class ViT(nn.Module):
    """images: [batch, 3, image, image] -> logits [batch, classes]."""

    def __init__(self, image: int, patch: int, width: int, heads: int, layers: int, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.attention = nn.ModuleList([Attention(width, heads) for _ in range(layers)])
        self.mlp = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * layers)])
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.position
        for n, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * n](x))
            x = x + mlp(self.norms[2 * n + 1](x))
        return self.head(x[:, 0])


@torch.no_grad()
def main() -> None:
    args = flags(__doc__ or "", batch=4, image=224, patch=16, width=192, heads=3, layers=4).parse_args()
    torch.manual_seed(0)
    model = ViT(args.image, args.patch, args.width, args.heads, args.layers).to(args.device).eval()
    compare(model, (torch.randn(args.batch, 3, args.image, args.image, device=args.device),), args)


if __name__ == "__main__":
    main()
