"""torch's one operator for nn.TransformerEncoderLayer in inference: the attention in it is found and fused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import attn_fuse
from attn_fuse.graph.encoder_layer import encoder_layer
from attn_fuse.report import SiteReport, collecting
from tests.harness import every_day

BATCH, LENGTH, WIDTH, HEADS = 2, 24, 32, 4
OPERATOR = "_transformer_encoder_layer_fwd"


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, **options).eval()


def padding(first_hidden: int) -> Tensor:
    hidden = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    hidden[1, first_hidden:] = True
    return hidden


CAUSAL = torch.ones(LENGTH, LENGTH).triu(1) == 1
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"src_key_padding_mask": padding(17)},
    "no key": {"src_key_padding_mask": padding(0)},
    "causal": {"src_mask": CAUSAL},
    "causal, floats": {"src_mask": nn.Transformer.generate_square_subsequent_mask(LENGTH)},
    "both": {"src_mask": CAUSAL, "src_key_padding_mask": padding(17)},
    # The operator makes a Boolean of a mask: what a bias would be hides all keys but those of 0.
    "bias": {"src_mask": torch.eye(LENGTH) * 0.5},
}


def compiled(model: nn.Module, given: Sequence[Tensor], kwargs: Any, **options: Any) -> tuple[Tensor, list[SiteReport]]:
    torch._dynamo.reset()
    with collecting() as reports, torch.no_grad():
        out = torch.compile(model, backend="attn_fuse", options=options)(*given, **kwargs)
    return out, [site for report in reports for site in report.sites]


KINDS = [*itertools.product((False, True), ("relu", "gelu"), (torch.float32,)), (False, "gelu", torch.bfloat16)]


@pytest.mark.parametrize("mask", every_day(MASKS, "no key", "both", "bias"))
@pytest.mark.parametrize(
    ("norm_first", "activation", "dtype"),
    [KINDS[0], *(pytest.param(*k, marks=pytest.mark.thorough) for k in KINDS[1:])],
)
def test_it_is_fused(mask: str, norm_first: bool, activation: str, dtype: torch.dtype) -> None:
    model = layer(norm_first=norm_first, activation=activation).to(dtype)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype)
    with torch.no_grad():
        expected = model(x, **MASKS[mask])
    out, (site,) = compiled(model, [x], MASKS[mask], pick="fused", inner_backend="eager")
    assert site.status == "fused" and site.attention["heads"] == str(HEADS)
    close = 1e-5 if dtype is torch.float32 else 0.05
    # A query that sees no key gets NaN as written, and may get 0 from a kernel: rule 2.
    seen = ~expected.isnan()
    assert bool(seen.all()) == (mask != "no key") and out.shape == expected.shape
    torch.testing.assert_close(out[seen], expected[seen], rtol=close, atol=close)


def test_what_the_masks_are_is_told() -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    _, (site,) = compiled(layer(), [x], MASKS["padding"], pick="fused", inner_backend="eager")
    assert site.attention["mask"] == "key padding"

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()
            self.register_buffer("mask", CAUSAL)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x, src_mask=self.mask)
            return out

    _, (site,) = compiled(Causal().eval(), [x], {}, pick="fused", inner_backend="eager")
    assert site.attention["mask"].startswith("causal, since query i sees key j <= i")


def test_a_whole_encoder() -> None:
    model = nn.TransformerEncoder(layer(), 3, enable_nested_tensor=False).eval()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding(17))
    out, sites = compiled(model, [x], {"src_key_padding_mask": padding(17)}, pick="fused", inner_backend="aot_eager")
    assert [site.status for site in sites] == ["fused"] * 3
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_lengths_that_change() -> None:
    model, lengths = layer(), (16, 24, 40)
    torch._dynamo.reset()
    options = {"pick": "fused", "inner_backend": "aot_eager"}
    run = torch.compile(model, backend="attn_fuse", options=options, dynamic=True)
    for length in lengths:
        x = torch.randn(BATCH, length, WIDTH)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
    assert [site.status for site in attn_fuse.reports()[-1].sites] == ["fused"]


def test_a_layer_that_is_not_fused_stays_one_operator() -> None:
    seen: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(graph)
        return graph

    torch._dynamo.register_backend(keep, "keep_encoder_layer")
    x = torch.randn(BATCH, LENGTH, WIDTH)
    options = {"kernels": ["triton_flash"], "inner_backend": "keep_encoder_layer"}
    _, (site,) = compiled(layer(), [x], {}, **options)
    assert site.status == "as written"
    assert [node for node in seen[0].graph.nodes if OPERATOR in str(node.target)]


def arguments_of(model: nn.TransformerEncoderLayer, x: Tensor) -> list[Any]:
    inner = model.self_attn
    weights = [inner.in_proj_weight, inner.in_proj_bias, inner.out_proj.weight, inner.out_proj.bias]
    norms = [model.norm1.weight, model.norm1.bias, model.norm2.weight, model.norm2.bias]
    ends = [model.linear1.weight, model.linear1.bias, model.linear2.weight, model.linear2.bias]
    return [x, WIDTH, HEADS, *weights, False, False, 1e-5, *norms, *ends]


@pytest.mark.parametrize("is_on", [False, True])
def test_under_autocast_the_operator_stays(is_on: bool) -> None:
    """Autocast reaches the products within the operator, and would not reach all of those written out."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                return torch._transformer_encoder_layer_fwd(*arguments_of(self.layer, x))

    _, sites = compiled(Direct().eval(), [torch.randn(BATCH, LENGTH, WIDTH)], {}, pick="fused", inner_backend="eager")
    assert [site.status for site in sites] == ([] if is_on else ["fused"])


def test_masks_and_inputs_of_another_kind_are_refused() -> None:
    rest = [WIDTH, HEADS, *[torch.ones(WIDTH)] * 4, True, False, 1e-5, *[torch.ones(WIDTH)] * 8]
    with pytest.raises(TypeError, match="not called with"):
        encoder_layer(torch.randn(LENGTH, WIDTH), *rest)
    arguments = arguments_of(layer(), torch.randn(BATCH, LENGTH, WIDTH))
    with pytest.raises(TypeError, match="3 axes"):
        encoder_layer(*arguments, mask=torch.ones(BATCH, LENGTH, LENGTH), mask_type=0)
    torch.testing.assert_close(encoder_layer(*arguments), torch._transformer_encoder_layer_fwd(*arguments))
