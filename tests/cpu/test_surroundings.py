"""Attention among what real programs have around it: SDPA calls, torch's own modules, caches, checkpoints, autocast."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_fuse.report import collecting
from tests.harness import Outcome, assert_causal, assert_fused, check, compiled, every_day, tensors

S = 7
INF = math.inf


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


# ---- calls of F.scaled_dot_product_attention


SDPA = F.scaled_dot_product_attention
BECOMES_CAUSAL: dict[str, Callable[..., Tensor]] = {
    "a triangle": lambda q, k, v: SDPA(q, k, v, torch.ones(S, S, dtype=torch.bool).tril()),
    "a triangle of infinities": lambda q, k, v: SDPA(q, k, v, torch.full((S, S), -INF, dtype=q.dtype).triu(1)),
    "compared positions": lambda q, k, v: SDPA(q, k, v, torch.arange(S)[:, None] >= torch.arange(S), scale=0.3),
    "no heads": lambda q, k, v: SDPA(q[:, 0], k[:, 0], v[:, 0], torch.ones(S, S, dtype=torch.bool).tril()),
}


@pytest.mark.parametrize("name", BECOMES_CAUSAL)
def test_an_sdpa_call_becomes_causal(name: str) -> None:
    assert_causal(assert_fused(BECOMES_CAUSAL[name], *tensors(2, 3, S, 16)))


def expanded(x: Tensor) -> Tensor:
    return x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(2, 6, -1, 16)


SHARED: dict[str, Callable[..., Tensor]] = {
    "repeated": lambda q, k, v: SDPA(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)),
    "causal": lambda q, k, v: SDPA(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), is_causal=True),
    "expanded": lambda q, k, v: SDPA(q, expanded(k), expanded(v)),
    "tiled": lambda q, k, v: SDPA(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)),
}


@pytest.mark.parametrize("q_len", every_day([S, 5], 5))
@pytest.mark.parametrize("name", SHARED)
def test_an_sdpa_call_reads_shared_keys_once(name: str, q_len: int) -> None:
    (q,), (k, v) = tensors(2, 6, q_len, 16, count=1), tensors(2, 2, S, 16, count=2)
    outcome = assert_fused(SHARED[name], q, k, v)
    assert "enable_gqa = True" in outcome.after and "repeat" not in outcome.after
    assert outcome.site.attention["kv_heads"] == "2"


STAYS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda q, k, v: SDPA(q, k, v),
    "causal": lambda q, k, v: SDPA(q, k, v, is_causal=True),
    "a band": lambda q, k, v: SDPA(q, k, v, torch.ones(S, S, dtype=torch.bool).tril().triu(-2)),
    "reversed": lambda q, k, v: SDPA(q, k, v, torch.ones(S, S, dtype=torch.bool).triu()),
    "an offset": lambda q, k, v: SDPA(q, k, v, torch.ones(S, S, dtype=torch.bool).tril(1)),
    "empty rows": lambda q, k, v: SDPA(q, k, v, torch.ones(S, S, dtype=torch.bool).tril(-1)),
    "finite": lambda q, k, v: SDPA(q, k, v, torch.full((S, S), -2.0, dtype=q.dtype).triu(1)),
    "keys and values repeated apart": lambda q, k, v: SDPA(q, k[:, :1].repeat(1, 3, 1, 1), v),
}


@pytest.mark.parametrize("name", STAYS)
def test_any_other_sdpa_call_stays(name: str) -> None:
    outcome = check(STAYS[name], *tensors(2, 3, S, 16))
    assert outcome.site.status == "already fused" and outcome.site.blocker is None and not outcome.site.attention
    assert "is_causal = True" not in outcome.after or name == "causal"


def test_an_sdpa_call_with_dropout_keeps_dropping() -> None:
    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, torch.ones(64, 64, dtype=torch.bool).tril(), dropout_p=0.5)

    q, k = torch.randn(2, 2, 4, 64, 8).unbind(0)
    kept = compiled(call)(q, k, torch.eye(64).expand(2, 4, 64, 64).contiguous())[:, :, 32:, :32] != 0
    assert abs(kept.double().mean().item() - 0.5) < 0.05


@pytest.mark.parametrize(
    "shape, call",
    [
        ((2, 12, 8), {}),
        ((2, 12, 8), {"is_causal": True}),
        ((2, 2, 4, 12, 8), {}),
        ((12, 8), {}),
    ],
    ids=["three dimensions", "three, causal", "five dimensions", "two dimensions"],
)
def test_a_call_of_sdpa_that_torch_has_no_kernel_for(shape: tuple[int, ...], call: dict[str, bool]) -> None:
    def program(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **call)

    assert_fused(program, *tensors(*shape), inner="aot_eager")
    (site,) = check(F.scaled_dot_product_attention, *tensors(2, 4, 12, 8), inner="aot_eager").sites
    assert site.status == "already fused"


def test_dropout_of_sdpa() -> None:
    with collecting() as graphs:
        compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1), "aot_eager")(
            *tensors(2, 4, 12, 8)
        )
    assert [site.kernel for graph in graphs for site in graph.sites] == ["chunked"]


# ---- torch's own modules


class SelfAttention(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 3, batch_first=True, **options)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.attention(x, x, x, key_padding_mask=padding)


class WithoutWeights(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class OutputOnly(SelfAttention):
    """The usual call: the weights are asked for and thrown away."""

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=padding)[0]


class CausalByMask(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.attention(x, x, x, attn_mask=mask)[0]


@pytest.mark.parametrize(
    "training", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["training", "inference"]
)
@pytest.mark.parametrize(
    "options",
    every_day([{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}], {"add_bias_kv": True}),
    ids=str,
)
@pytest.mark.parametrize(
    "kind", [OutputOnly, *(pytest.param(k, marks=pytest.mark.thorough) for k in (SelfAttention, CausalByMask))]
)
def test_multihead_attention(kind, options, training: bool) -> None:
    outcome = assert_fused(kind(**options).train(training), torch.randn(2, S, 24), backward=training)
    assert outcome.site.kernel == "cpu_flash" and outcome.site.attention["head_dim"] == "8"


@pytest.mark.parametrize("kind", [SelfAttention, OutputOnly])
def test_multihead_attention_with_padding(kind) -> None:
    padding = torch.arange(S) >= torch.tensor([[4], [S]])
    assert_fused(kind(), torch.randn(2, S, 24), padding)


def test_multihead_attention_reads_its_packed_projection_where_it_lies() -> None:
    outcome = assert_fused(OutputOnly(), torch.randn(2, S, 24))
    assert "floor_divide" not in outcome.after and "getitem" not in outcome.after.partition("scaled_dot_product")[0]


def test_weights_that_are_thrown_away_are_not_used() -> None:
    for kind, used in ((OutputOnly, False), (SelfAttention, True)):
        torch._dynamo.reset()
        with collecting() as graphs:
            compiled(kind(), pick="fastest")(torch.randn(2, S, 24))
        (site,) = graphs[0].sites
        reason = "" if site.blocker is None else site.blocker.reason
        assert (reason == "the weights are also used outside the attention, so nothing is saved") == used, reason


def test_multihead_attention_without_weights_is_fused_already() -> None:
    assert check(WithoutWeights(), torch.randn(2, S, 24)).site.status == "already fused"


@pytest.mark.parametrize("training", every_day([True, False], False), ids=["training", "inference"])
def test_transformer_layers(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(24, 3, 48, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    outcome = check(model, torch.randn(2, S, 24), backward=training)
    assert outcome.sites and all(site.status in ("already fused", "fused") for site in outcome.sites)
    decoder = nn.TransformerDecoderLayer(24, 3, 48, dropout=0.0, batch_first=True).train(training)
    outcome = check(decoder, torch.randn(2, S, 24), torch.randn(2, 5, 24), backward=training)
    assert outcome.sites and all(site.status in ("already fused", "fused") for site in outcome.sites)


# ---- what is passed through


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_vmapped_attention_is_at_its_own_line(wrapped: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / 4
        weights = scores.softmax(-1)
        return weights @ v

    mapped = torch.vmap(attention)
    inputs = [torch.randn(2, 4, S, 16) for _ in range(3)]
    with collecting() as graphs:
        compiled((lambda *x: mapped(*x) + 1) if wrapped else mapped)(*inputs)
    (site,) = graphs[0].sites
    assert site.status == "fused" and site.location.code == "weights = scores.softmax(-1)"


def test_nested_tensors_are_passed_through() -> None:
    def cross(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (x @ k.mT / 4).softmax(-1) @ v

    def self_attention(x: Tensor) -> Tensor:
        x = x.view(x.shape[0], -1, 2, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x)

    ragged = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged)
    k, v = torch.randn(2, S, 16)
    with collecting() as graphs:
        got = compiled(cross)(ragged, k, v)
        torch.testing.assert_close(got.values(), cross(ragged, k, v).values())
    (site,) = graphs[0].sites
    assert site.status == "refused" and site.blocker.reason == "nested tensors are passed through untouched"
    assert "nested" not in graphs[0].before or graphs[0].before == graphs[0].after
    got = compiled(self_attention)(ragged)
    torch.testing.assert_close(got.values(), self_attention(ragged).values())


def test_several_tensors_read_at_once() -> None:
    def smallest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).masked_fill(torch.topk(q[..., 0], S)[1][:, :, None] < 2, -1e9).softmax(-1) @ v

    outcome = check(smallest, *tensors(2, 3, S, 16))
    assert outcome.site.fused or outcome.site.blocker.reason == "several tensors are read at once"


def test_a_temperature_is_no_attention() -> None:
    """CLIP's comparison of images with texts (arXiv 2103.00020): an exponential between two products."""

    def compared(images: Tensor, texts: Tensor, weight: Tensor) -> Tensor:
        scale = torch.full((), 2.6).exp()
        images, texts = images @ weight, texts @ weight
        images, texts = (x / x.pow(2).sum(-1, keepdim=True).sqrt() for x in (images, texts))
        return (scale * images) @ texts.T

    outcome = check(compared, torch.randn(7, 16), torch.randn(5, 16), torch.randn(16, 8))
    assert not outcome.sites


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(written(self.q(x), self.k(x), self.v(x)))


def test_dynamically_quantised_linears_around_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(Net().eval(), {nn.Linear})
    x = torch.randn(2, S, 16)
    with collecting() as graphs, torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x), rtol=1e-3, atol=1e-3)
    assert all(site.fused for graph in graphs for site in graph.sites)


# ---- activation checkpointing, autocast


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return (5 * torch.tanh(scores(q, k) / 5)).masked_fill(hidden, -INF).softmax(-1) @ v


def assert_chunked_alone(outcome: Outcome) -> None:
    assert outcome.sites and all(site.kernel == "chunked" for site in outcome.sites), str(outcome)


@pytest.mark.parametrize("inner", every_day(["eager", "aot_eager", "inductor"], "aot_eager"))
def test_activation_checkpointing(inner: str) -> None:
    def layers(q, k, v):
        for _ in range(2):
            v = checkpoint(capped, q, k, v, use_reentrant=False)
        return v

    assert_chunked_alone(check(layers, *tensors(2, 3, S, 16), inner=inner))


# torch's own eager backend draws other random numbers when it computes a checkpoint again.
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_activation_checkpointing_drops_the_same_weights_again(inner: str) -> None:
    def dropped(q, k, v):
        return F.dropout(scores(q, k).softmax(-1), 0.5) @ v

    def layer(q, k, v):
        return checkpoint(dropped, q, k, v, use_reentrant=False)

    q, k = torch.randn(2, 1, 2, 32, 8)
    v = torch.eye(32).expand(1, 2, 32, 32).clone()
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    with collecting() as graphs:
        out = compiled(layer, inner=inner)(q, k, v)
    assert graphs[0].sites[0].kernel == "chunked" and graphs[0].sites[0].attention["dropout"] == "0.5"
    pull = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), pull)
    # Values are centred and restored: what was dropped is 0 up to rounding.
    again = scores(q, k).softmax(-1) * 2.0 * (out.detach() > 1e-6) @ v
    for name, mine, wanted in zip("qkv", got, torch.autograd.grad(again, (q, k, v), pull), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5, msg=name)


class Autocast(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.dtype != torch.float64):
            return self.out(capped(*(layer(x)[:, None] for layer in (self.q, self.k, self.v)))[:, 0])


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_autocast_inside_the_model(inner: str) -> None:
    outcome = check(Autocast(), torch.randn(2, S, 16), inner=inner)
    assert_chunked_alone(outcome)
    assert outcome.site.attention["dtype"] == "bfloat16"


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_autocast_around_the_compiled_model(inner: str) -> None:
    class Capped(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(capped(*(layer(x)[:, None] for layer in (self.q, self.k, self.v)))[:, 0])

    model, x = Capped(), torch.randn(2, S, 16)
    (exact,) = torch.autograd.grad(model(x).square().sum(), model.q.weight)
    results = []
    for run in (model, compiled(model, inner=inner)):
        with torch.autocast("cpu", dtype=torch.bfloat16), collecting() as graphs:
            out = run(x)
        assert out.dtype == torch.bfloat16
        results.append(torch.autograd.grad(out.float().square().sum(), model.q.weight)[0])
    usual, mine = ((result - exact).abs().max().item() for result in results)
    assert mine <= 4 * usual + 1e-3 and graphs[0].sites[0].kernel == "chunked"
