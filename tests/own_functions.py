"""What a user may put between two products: operators of one's own, and functions that make their own gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LIBRARY = torch.library.Library("attn_fuse_hidden", "DEF")
for _name, _how in {
    "softmax": lambda x: x.softmax(-1),
    "gelu": F.gelu,
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
}.items():
    LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    LIBRARY.impl(_name, _how, "CompositeExplicitAutograd")
LIBRARY.define("mm(Tensor x, Tensor w) -> Tensor")
LIBRARY.impl("mm", torch.matmul, "CompositeExplicitAutograd")
OWN = torch.ops.attn_fuse_hidden


class OwnSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float) -> Tensor:
        weights = (scores * scale).softmax(-1)
        ctx.save_for_backward(weights)
        ctx.scale = scale
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        return weights * (grad - (grad * weights).sum(-1, keepdim=True)) * ctx.scale, None


class OwnSwish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + x * s * (1 - s))


class OwnSoftplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.log1p(torch.exp(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * torch.sigmoid(ctx.saved_tensors[0])


@torch._dynamo.allow_in_graph
def doubled(scores: Tensor) -> Tensor:
    return scores * 2
