"""transformers.Trainer: training, evaluating and checkpointing gradients, through each way of naming a compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attn_fuse
from tests.ecosystem.tiny import FUSED, LAYERS, WHY, WORDS, all_fused, model, transformers

pytest.importorskip("accelerate", reason=f"accelerate {WHY}")

STEPS, BATCH, LENGTH = 3, 4, 16
KINDS = ("GPT2LMHeadModel", "BertForMaskedLM")


def sentences(count: int) -> list[dict[str, Any]]:
    """Padded on the right, the padding without a label."""
    torch.manual_seed(2)
    made = []
    for number in range(count):
        ids, mask = torch.randint(3, WORDS, (LENGTH,)), torch.ones(LENGTH, dtype=torch.long)
        mask[LENGTH - number % 3 :] = 0
        made.append({"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)})
    return made


def trained(net: nn.Module, folder: Path, **settings: Any) -> dict[str, Any]:
    """The losses of each step and evaluation, the predictions, and the weights at the end."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        optim="sgd",
        learning_rate=0.1,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    data = sentences(STEPS * BATCH)
    trainer = transformers.Trainer(net, arguments, train_dataset=data, eval_dataset=data[: 2 * BATCH])
    trainer.train()
    log = trainer.state.log_history
    return {
        "loss": [entry["loss"] for entry in log if "loss" in entry],
        "eval_loss": [entry["eval_loss"] for entry in log if "eval_loss" in entry],
        "predictions": torch.from_numpy(trainer.predict(data[:BATCH]).predictions),
        "weights": [weight.detach() for weight in net.parameters()],
    }


def same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert len(got["loss"]) == len(got["eval_loss"]) == STEPS
    torch.testing.assert_close(got, wanted, atol=2e-3, rtol=1e-3)


def installed(net: nn.Module, folder: Path, **settings: Any) -> dict[str, Any]:
    with attn_fuse.install(FUSED):
        return trained(net, folder, torch_compile=True, **settings)


def by_backend(net: nn.Module, folder: Path, **settings: Any) -> dict[str, Any]:
    with attn_fuse.install(FUSED):
        return trained(net, folder, torch_compile_backend="inductor", **settings)


def compiled_before(net: nn.Module, folder: Path, **settings: Any) -> dict[str, Any]:
    net.compile(backend="attn_fuse", options=FUSED)
    return trained(net, folder, **settings)


@pytest.mark.parametrize(
    ("kind", "way"),
    [(KINDS[0], installed), (KINDS[0], by_backend), (KINDS[0], compiled_before), (KINDS[1], installed)],
)
def test_trains_and_evaluates(kind: str, way: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    net = model(kind)
    wanted = trained(copy.deepcopy(net), tmp_path)
    # Between steps of training, Trainer evaluates the model that it was given, not the one that it compiled.
    with all_fused(2 * LAYERS if way is compiled_before else LAYERS):
        got = way(net, tmp_path)
    same(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluates_alone(kind: str, tmp_path: Path) -> None:
    net, data = model(kind), sentences(2 * BATCH)
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "disable_tqdm": True}
    plain = transformers.Trainer(copy.deepcopy(net), transformers.TrainingArguments(**arguments), eval_dataset=data)
    wanted = plain.evaluate()["eval_loss"]
    with attn_fuse.install(FUSED), all_fused():
        compiled = transformers.TrainingArguments(torch_compile=True, **arguments)
        got = transformers.Trainer(net, compiled, eval_dataset=data).evaluate()["eval_loss"]
    assert got == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("kind", "reentrant"), [(KINDS[0], False), (KINDS[0], True), (KINDS[1], False)])
def test_gradient_checkpointing(kind: str, reentrant: bool, tmp_path: Path) -> None:
    net = model(kind)
    wanted = trained(copy.deepcopy(net), tmp_path)
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    with all_fused():
        got = installed(net, tmp_path, **settings)
    same(got, wanted)


def test_half_precision(tmp_path: Path) -> None:
    net = model(KINDS[0])
    wanted = trained(copy.deepcopy(net), tmp_path, bf16=True)
    with all_fused():
        got = installed(net, tmp_path, bf16=True)
    torch.testing.assert_close(got["loss"], wanted["loss"], atol=0.05, rtol=0.02)
    torch.testing.assert_close(got["eval_loss"], wanted["eval_loss"], atol=0.05, rtol=0.02)


def test_trainer_takes_no_other_backends_name(tmp_path: Path) -> None:
    """While this holds, `install` is the way in."""
    with pytest.raises(ValueError, match="ATTN_FUSE"):
        trained(model(KINDS[0]), tmp_path, torch_compile_backend="attn_fuse")
