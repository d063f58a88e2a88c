"""ONNX: what `attn_fuse.export` gives becomes ONNX's Attention operator, of opset 23, and computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attn_fuse
from tests.ecosystem.tiny import FUSED, LAYERS, WHY, all_fused, model, padded

onnx = pytest.importorskip("onnx", reason=f"onnx {WHY}")
pytest.importorskip("onnxscript", reason=f"onnxscript {WHY}")
onnxruntime = pytest.importorskip("onnxruntime", reason=f"onnxruntime {WHY}")

WIDTH, HEADS = 32, 4
SIZES = {"x": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}


class Attention(nn.Module):
    """Over a buffer's lower triangle, where it is causal."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), causal
        self.register_buffer("seen", torch.tril(torch.ones(64, 64)).bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (WIDTH // HEADS) ** -0.5
        if self.causal:
            scores = scores.masked_fill(~self.seen[: x.shape[1], : x.shape[1]], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Logits(nn.Module):
    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__()
        self.model = model(kind, use_cache=False, **settings)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        found: Tensor = self.model(ids, attention_mask=mask).logits
        return found


def exported(net: nn.Module, args: tuple[Tensor, ...], path: Path, sizes: Any = None, count: int = 1) -> list[Any]:
    """The nodes of the Attention operator in the ONNX file at `path`, which this writes."""
    with torch.no_grad(), all_fused(count):
        program = attn_fuse.export(net.eval(), args, dynamic_shapes=sizes, options=FUSED)
        torch.onnx.export(program, args, path, dynamo=True, opset_version=23, verbose=False)
    onnx.checker.check_model(onnx.load(path))
    nodes = onnx.load(path).graph.node
    assert not any(node.op_type == "Softmax" for node in nodes)
    return [node for node in nodes if node.op_type == "Attention"]


def by_onnxruntime(path: Path, args: Sequence[Tensor]) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, given([one.name for one in session.get_inputs()], args))[0])


def by_reference(path: Path, args: Sequence[Tensor]) -> Tensor:
    session = onnx.reference.ReferenceEvaluator(onnx.load(path))
    return torch.from_numpy(session.run(None, given(session.input_names, args))[0])


def given(names: Sequence[str], args: Sequence[Tensor]) -> dict[str, Any]:
    return {name: x.numpy() for name, x in zip(names, args, strict=True)}


def attribute(node: Any, name: str) -> Any:
    return next(onnx.helper.get_attribute_value(one) for one in node.attribute if one.name == name)


@pytest.mark.parametrize("causal", [False, True])
def test_one_attention(causal: bool, tmp_path: Path) -> None:
    net, args, path = Attention(causal), (torch.randn(2, 11, WIDTH),), tmp_path / "model.onnx"
    (node,) = exported(net, args, path)
    assert attribute(node, "is_causal") == causal and len(node.input) == 3
    for run in (by_onnxruntime, by_reference):
        torch.testing.assert_close(run(path, args), net(*args).detach())


def test_sizes_stay_free(tmp_path: Path) -> None:
    net, path = Attention(causal=True), tmp_path / "model.onnx"
    exported(net, (torch.randn(2, 11, WIDTH),), path, SIZES)
    for batch, length in ((2, 11), (3, 7), (5, 33)):
        args = (torch.randn(batch, length, WIDTH),)
        torch.testing.assert_close(by_onnxruntime(path, args), net(*args).detach())


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM", "Gemma2ForCausalLM", "BertForMaskedLM"])
def test_models_of_transformers(kind: str, tmp_path: Path) -> None:
    # Gemma 2 bounds its scores by tanh, which SDPA does not.
    settings = {"attn_logit_softcapping": None} if kind == "Gemma2ForCausalLM" else {}
    net, path = Logits(kind, **settings).eval(), tmp_path / "model.onnx"
    ids, mask = padded()
    nodes = exported(net, (ids, mask), path, count=LAYERS)
    assert len(nodes) == LAYERS
    wanted = net(ids, mask).detach()
    if kind != "BertForMaskedLM":  # the reference cannot look up BERT's token types
        torch.testing.assert_close(by_reference(path, (ids, mask)), wanted, atol=1e-4, rtol=1e-4)
    # Of queries that see no key, all padding, onnxruntime's operator gives 0 where the models give a mean.
    seen = mask.bool()
    torch.testing.assert_close(by_onnxruntime(path, (ids, mask))[seen], wanted[seen], atol=1e-4, rtol=1e-4)
