"""A sliding window with a softcap, as in Gemma 2 (arXiv 2408.00118). SDPA supports no softcap.

python examples/sliding_window.py [--length 2048] [--window 256] [--softcap 50] ...
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compare import compare, flags


class WindowAttention(nn.Module):
    """x: [batch, length, width]; each query sees itself and the `window` - 1 before it. Scores lie within +-softcap."""

    def __init__(self, width: int, heads: int, kv_heads: int, window: int, softcap: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.window, self.softcap = window, softcap
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, kv_heads * self.head_dim, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q = self.query(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.key(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.value(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * self.head_dim**-0.5
        scores = torch.tanh(scores / self.softcap) * self.softcap
        i = torch.arange(length, device=x.device)
        distance = i[:, None] - i[None, :]
        visible = (distance >= 0) & (distance < self.window)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return self.out(torch.einsum("bhij,bhjd->bhid", weights, v).transpose(1, 2).reshape(batch, length, width))


@torch.no_grad()
def main() -> None:
    sizes = flags(
        __doc__ or "", batch=1, length=2048, width=512, heads=8, kv_heads=4, window=256, softcap=50.0
    ).parse_args()
    torch.manual_seed(0)
    model = WindowAttention(sizes.width, sizes.heads, sizes.kv_heads, sizes.window, sizes.softcap).to(sizes.device)
    compare(model.eval(), (torch.randn(sizes.batch, sizes.length, sizes.width, device=sizes.device),), sizes)


if __name__ == "__main__":
    main()
