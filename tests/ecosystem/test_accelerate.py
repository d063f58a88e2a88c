"""accelerate: `Accelerator.prepare` compiles the model, by each of its settings, and trains it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import attn_fuse
from tests.ecosystem.tiny import FUSED, LAYERS, WHY, all_fused, model, padded

accelerate = pytest.importorskip("accelerate", reason=f"accelerate {WHY}")


def by_name() -> Any:
    return accelerate.Accelerator(cpu=True, dynamo_backend="inductor")


def by_plugin() -> Any:
    plugin = accelerate.utils.TorchDynamoPlugin(backend="inductor", mode="default", dynamic=False)
    return accelerate.Accelerator(cpu=True, dynamo_plugin=plugin)


def by_region() -> Any:
    plugin = accelerate.utils.TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    return accelerate.Accelerator(cpu=True, dynamo_plugin=plugin)


def plainly() -> Any:
    return accelerate.Accelerator(cpu=True)


def trained(net: nn.Module, make: Callable[[], Any]) -> list[float]:
    """The losses of three steps, the last one of an evaluation."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = accelerator.prepare(net, optimizer)
    ids, mask = padded()
    labels = torch.where(mask == 1, ids, -100)
    losses = []
    for _ in range(3):
        loss = net(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    net.eval()
    with torch.no_grad():
        losses.append(net(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.item())
    return losses


@pytest.mark.parametrize("make", [by_name, by_plugin])
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_trains(kind: str, make: Callable[[], Any]) -> None:
    net = model(kind)
    wanted = trained(copy.deepcopy(net), plainly)
    with attn_fuse.install(FUSED), all_fused(2 * LAYERS):
        got = trained(net, make)
    assert got == pytest.approx(wanted, rel=1e-4)


def test_regions_share_one_graph() -> None:
    """Equal layers run one code, so two graphs hold every attention: one trains, one evaluates."""
    net = model("LlamaForCausalLM")
    wanted = trained(copy.deepcopy(net), plainly)
    with attn_fuse.install(FUSED), all_fused(2):
        got = trained(net, by_region)
    assert got == pytest.approx(wanted, rel=1e-4)


def test_a_model_compiled_before() -> None:
    """`prepare` leaves a model alone that is compiled already; the options are those of the backend."""
    net = model("GPT2LMHeadModel")
    wanted = trained(copy.deepcopy(net), plainly)
    with all_fused(2 * LAYERS):
        got = trained(torch.compile(net, backend="attn_fuse", options=FUSED), plainly)
    assert got == pytest.approx(wanted, rel=1e-4)


def test_accelerate_takes_no_other_backends_name() -> None:
    """While this holds, `install` is the way in."""
    with pytest.raises(ValueError, match="ATTN_FUSE"):
        accelerate.Accelerator(cpu=True, dynamo_backend="attn_fuse")
