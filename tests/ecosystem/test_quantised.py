"""Adapters and quantised weights: PEFT's LoRA, torchao's int8 and bitsandbytes' 4 bit around attention as written."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.ecosystem.tiny import FUSED, WHY, all_fused, model, padded

PROJECTIONS = {"GPT2LMHeadModel": ["c_attn"], "LlamaForCausalLM": ["q_proj", "v_proj"]}


def logits(net: nn.Module) -> Tensor:
    ids, mask = padded()
    found: Tensor = net(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return found


def compiled(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="attn_fuse", options=FUSED)


def assert_close_to_eager(net: nn.Module) -> None:
    with torch.no_grad():
        wanted = logits(net.eval())
        with all_fused():
            got = logits(compiled(net))
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_lora_trains(kind: str) -> None:
    peft = pytest.importorskip("peft", reason=f"peft {WHY}")
    settings = peft.LoraConfig(r=4, target_modules=PROJECTIONS[kind], lora_dropout=0.0, init_lora_weights=False)
    net = peft.get_peft_model(model(kind), settings)
    twin = copy.deepcopy(net)
    with all_fused():
        losses = [trained(one) for one in (compiled(net), twin)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for (name, got), (_, wanted) in zip(net.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3, msg=lambda said, name=name: f"{name}: {said}")
    with torch.no_grad(), all_fused():
        torch.testing.assert_close(logits(compiled(net.eval())), logits(twin.eval()), atol=1e-3, rtol=1e-3)


def trained(net: nn.Module) -> list[float]:
    """The losses of three steps."""
    optimizer = torch.optim.SGD([weight for weight in net.parameters() if weight.requires_grad], lr=0.05)
    ids, mask = padded()
    losses = []
    for _ in range(3):
        loss = net(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "BertForMaskedLM"])
def test_int8_weights(kind: str) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason=f"torchao {WHY}")
    net = model(kind)
    torchao.quantize_(net, torchao.Int8WeightOnlyConfig())
    assert any(type(weight.data) is not Tensor and type(weight) is not nn.Parameter for weight in net.parameters())
    assert_close_to_eager(net)


def test_4_bit_weights() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason=f"bitsandbytes {WHY}")
    net = model("LlamaForCausalLM", hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    for layer in net.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(parent, name, in_4_bit(bitsandbytes, linear))
    assert_close_to_eager(net)


def in_4_bit(bitsandbytes: object, linear: nn.Linear) -> nn.Module:
    made = bitsandbytes.nn.Linear4bit(  # type: ignore[attr-defined]
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")  # which quantises
