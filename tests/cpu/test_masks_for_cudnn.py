"""The masks that cuDNN is given, tried on the CPU: of numbers, with rows as long as there are keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.attention import SDPBackend

from attn_fuse.graph.names import value_of
from attn_fuse.kernels import sdpa
from attn_fuse.picker import pick
from tests.harness import compiled, every_day

LENGTHS = torch.tensor([0, 5, 9])


def padded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    hidden = torch.arange(k.shape[-2]) >= LENGTHS[:, None]
    return (q @ k.mT).masked_fill(hidden[:, None, None], float("-inf")).softmax(-1).nan_to_num() @ v


def causal_and_padded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    hidden = later | (torch.arange(k.shape[-2]) >= LENGTHS[:, None])[:, None, None]
    return (q @ k.mT).masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num() @ v


def of_each_query(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT + bias[..., :1]).softmax(-1) @ v


def of_each_key(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT + bias[:, :, :1]).softmax(-1) @ v


@pytest.fixture
def masks(monkeypatch) -> list[Tensor]:
    """The masks, as fake tensors, that cuDNN's call gets; torch's kernel on the CPU runs it."""
    made: list[Tensor] = []

    def emit(call: Any) -> Node:
        out = sdpa.emit(SDPBackend.CUDNN_ATTENTION, call)
        made.append(value_of(out.kwargs["attn_mask"]))
        return out

    kernel = dataclasses.replace(sdpa.CPU_FLASH, emit=emit)
    monkeypatch.setattr(pick, "KERNELS", (kernel,))
    return made


@pytest.mark.parametrize("dynamic", every_day([False, True], False))
@pytest.mark.parametrize("program", [padded, causal_and_padded, of_each_query, of_each_key], ids=lambda f: f.__name__)
def test_masks_for_cudnn(program: Callable[..., Tensor], dynamic: bool, masks: list[Tensor]) -> None:
    operands = [*torch.randn(3, 3, 4, 9, 16), torch.randn(1, 4, 9, 9)]
    run = compiled(program, dynamic=dynamic, kernels=["cpu_flash"])
    torch.testing.assert_close(run(*operands), program(*operands), atol=1e-5, rtol=1e-4)
    (mask,) = masks
    assert mask.dtype == torch.float32 and mask.shape[-1] == 9 and mask.stride(-1) == 1


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 4, 9, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT + self.bias * torch.ones(9)).softmax(-1) @ v


def test_a_learned_bias_of_each_query(masks: list[Tensor]) -> None:
    model, operands = Learned(), torch.randn(3, 3, 4, 9, 16)
    with torch.no_grad():
        found = compiled(model, kernels=["cpu_flash"])(*operands)
        torch.testing.assert_close(found, model(*operands), atol=1e-5, rtol=1e-4)
    assert [mask.shape[-1] for mask in masks] == [9]
