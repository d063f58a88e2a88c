"""Lightning: `Trainer.fit` and `validate` with a compiled module, and with a compiled model in a module."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import attn_fuse
from tests.ecosystem.tiny import FUSED, LAYERS, WHY, all_fused, model, padded

lightning = pytest.importorskip("lightning", reason=f"lightning {WHY}")

STEPS = 3


class Task(lightning.LightningModule):
    """Keeps the loss of each step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        ids, mask = batch
        labels = torch.where(mask == 1, ids, -100)
        found: Tensor = self.net(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        return found

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.losses.append(self.loss(batch).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(task: Any, losses: list[float], folder: Path, **settings: Any) -> list[float]:
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **settings,
    )
    ids, mask = padded(batch=6)
    loader = DataLoader(TensorDataset(ids, mask), batch_size=3)
    trainer.fit(task, loader)
    trainer.validate(task, loader, verbose=False)
    assert len(losses) >= STEPS + 2
    return losses


def plainly(net: nn.Module, folder: Path, **settings: Any) -> list[float]:
    task = Task(copy.deepcopy(net))
    return fitted(task, task.losses, folder, **settings)


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_a_compiled_model_in_the_module(kind: str, tmp_path: Path) -> None:
    net = model(kind)
    wanted = plainly(net, tmp_path)
    task = Task(torch.compile(net, backend="attn_fuse", options=FUSED))
    with all_fused(2 * LAYERS):
        got = fitted(task, task.losses, tmp_path)
    assert got == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}])
def test_the_module_compiled_as_a_whole(settings: dict[str, Any], tmp_path: Path) -> None:
    """As Lightning's documents say: torch.compile(module), then fit."""
    net = model("GPT2LMHeadModel")
    task = Task(net)
    wanted = plainly(net, tmp_path, **settings)
    with attn_fuse.install(FUSED), all_fused(2 * LAYERS):
        got = fitted(torch.compile(task), task.losses, tmp_path, **settings)
    assert got == pytest.approx(wanted, rel=1e-4)


def test_half_precision(tmp_path: Path) -> None:
    net = model("GPT2LMHeadModel")
    wanted = plainly(net, tmp_path, precision="bf16-mixed")
    task = Task(torch.compile(net, backend="attn_fuse", options=FUSED))
    with all_fused(2 * LAYERS):
        got = fitted(task, task.losses, tmp_path, precision="bf16-mixed")
    assert got == pytest.approx(wanted, rel=0.02)


def test_fabric() -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    net = model("GPT2LMHeadModel")
    ids, mask = padded()
    wanted = net(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
    with attn_fuse.install(FUSED), all_fused():
        compiled = fabric.setup_module(torch.compile(net))
        loss = compiled(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        fabric.backward(loss)
    torch.testing.assert_close(loss, wanted)
