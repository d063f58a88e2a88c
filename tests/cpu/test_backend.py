"""The backend end to end: options, decoding, checkpointing, in-place compile, and that it never breaks a model."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attn_fuse
from attn_fuse.backend import Attempt
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.options import Fuel, Options
from attn_fuse.report import collecting

FUSED = {"inner_backend": "eager", "pick": "fused"}


class Block(nn.Module):
    """One nanoGPT block's attention with a residual."""

    def __init__(self, block_size: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 4, 8).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        att = self.drop(F.softmax(att, dim=-1))
        return x + (att @ v).transpose(1, 2).contiguous().view(batch, length, width)


class Stack(nn.Module):
    def __init__(self, layers: int = 3, **options: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Checkpointed(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


def last_sites() -> tuple[attn_fuse.SiteReport, ...]:
    return attn_fuse.reports()[-1].sites


def test_importing_attn_fuse_brings_in_nothing_heavy() -> None:
    program = (
        "import sys, torch; before = set(sys.modules); import attn_fuse; "
        "assert set(sys.modules) - before == {'attn_fuse'}, set(sys.modules) - before"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_training_step(inner: str) -> None:
    # In float32 the two differ by roundings, of which no fixed share of a gradient is the bound.
    model, x = Stack().double(), torch.randn(2, 17, 32, dtype=torch.float64)
    model(x).square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    fused = torch.compile(model, backend=backend, options=FUSED | {"inner_backend": inner})
    fused(x).square().sum().backward()
    assert [site.fused for site in last_sites()] == [True] * 3
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], msg=lambda m, name=name: f"{name}: {m}")


def test_identical_layers_are_analysed_once(monkeypatch) -> None:
    module = importlib.import_module("attn_fuse.analysis")

    calls = []
    monkeypatch.setattr(module, "normalize", lambda region, run=module.normalize: calls.append(region) or run(region))
    torch.compile(Stack(6), backend=backend, options=FUSED)(torch.randn(2, 17, 32))
    assert [site.fused for site in last_sites()] == [True] * 6
    assert len(calls) <= 2  # the first layer's input is no sum, so its leaf may differ


def test_a_growing_sequence_takes_three_graphs_and_stays_causal() -> None:
    model = Stack(2).eval()
    with collecting() as graphs, torch.no_grad():
        fused = torch.compile(model, backend=backend, options=FUSED)
        for length in range(1, 65):
            x = torch.randn(1, length, 32)
            torch.testing.assert_close(fused(x), model(x), atol=1e-5, rtol=1e-5)
    assert len(graphs) <= 3
    assert all(site.fused and site.attention["mask"].startswith("causal") for site in graphs[-1].sites)
    assert "is_causal = True" in graphs[-1].after and "attn_mask = None" in graphs[-1].after


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_activation_checkpointing(inner: str) -> None:
    model, x = Checkpointed(2), torch.randn(2, 9, 32)
    model(x).square().sum().backward()
    wanted = model.blocks[0].qkv.weight.grad.clone()
    model.zero_grad()
    fused = torch.compile(model, backend=backend, options=FUSED | {"inner_backend": inner})
    fused(x).square().sum().backward()
    assert [site.fused for site in last_sites()] == [True] * 2
    assert last_sites()[0].attention["mask"].startswith("causal")
    torch.testing.assert_close(model.blocks[0].qkv.weight.grad, wanted)
    with torch.no_grad():
        model.blocks[0].bias.fill_(1)
    torch.testing.assert_close(fused(x), model(x), atol=1e-5, rtol=1e-5)


def test_compile_in_place_leaves_the_module_alone() -> None:
    model, x = Stack(), torch.randn(2, 9, 32)
    keys, kinds, wanted = list(model.state_dict()), [type(m) for m in model.modules()], model(x)
    model.compile(backend=backend, options=FUSED)
    torch.testing.assert_close(model(x), wanted)
    assert all(site.fused for site in last_sites())
    assert list(model.state_dict()) == keys and [type(m) for m in model.modules()] == kinds


def test_dropout_in_training_is_for_chunked_alone_on_cpu() -> None:
    reason = "torch has no fused attention with dropout on CPU"
    model = Stack(1, dropout=0.2)
    torch.compile(model, backend=backend, options=FUSED)(torch.randn(2, 9, 32))
    (site,) = last_sites()
    assert site.kernel == "chunked" and site.attention["dropout"] == "0.2"
    assert site.why_not["cpu_flash"] == (reason,)
    torch._dynamo.reset()
    torch.compile(model, backend=backend, options=FUSED | {"kernels": ["cpu_flash"]})(torch.randn(2, 9, 32))
    (site,) = last_sites()
    assert site.status == "as written" and site.attention["dropout"] == "0.2"
    assert reason in site.blocker.reason
    torch._dynamo.reset()
    model.eval()
    torch.compile(model, backend=backend, options=FUSED)(torch.randn(2, 9, 32))
    assert last_sites()[0].kernel == "cpu_flash"


def test_mode_is_passed_through() -> None:
    def inner(graph: torch.fx.GraphModule, inputs: list, **settings: object) -> object:
        given.append(settings)
        return graph.forward

    given: list = []
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    Attempt(Options(inner, mode="reduce-overhead"), Fuel(None)).compiled(graph, [torch.zeros(2)])
    assert given == [{"mode": "reduce-overhead"}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pik": "fused"}, "no option 'pik'. Did you mean 'pick'?"),
        ({"pick": "fast"}, "pick='fast': it must be 'fastest' or 'measured' or 'memory' or 'fused'"),
        ({"kernels": ["cpu_flush"]}, "no kernel 'cpu_flush'. Did you mean 'cpu_flash'?"),
        ({"kernels": 3}, "kernels=3 is not a list"),
        ({"strict": 1}, "strict=1"),
        ({"check": "yes"}, "check='yes'"),
        ({"fuel": -1}, "fuel=-1"),
        ({"fuel": True}, "fuel=True"),
        ({"inner_backend": "induktor"}, "no inner backend 'induktor'. Did you mean 'inductor'?"),
        ({"inner_backend": "attn_fuse"}, "inner_backend='attn_fuse': the inner backend compiles the graphs that"),
        ({"inner_backend": 7}, "inner_backend=7"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, said) -> None:
    with pytest.raises(attn_fuse.OptionError) as raised:
        torch.compile(plain, backend=backend, options=options)(*torch.randn(3, 1, 2, 8, 16))
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_kernels_is_an_allow_list() -> None:
    q = torch.randn(1, 2, 8, 16)
    torch.compile(plain, backend=backend, options=FUSED | {"kernels": ["cudnn"]})(q, q, q)
    (site,) = last_sites()
    assert site.status == "as written" and site.why_not["cpu_flash"] == ("not among the kernels allowed",)
    assert site.why_not["cudnn"] == ("runs on cuda, not on cpu",)


def test_use_kernels_holds_for_models_compiled_before() -> None:
    model, x = Stack(1), torch.randn(2, 9, 32)
    fused = torch.compile(model, backend=backend, options=FUSED)
    torch.testing.assert_close(fused(x), model(x))
    with collecting() as graphs, attn_fuse.use_kernels():
        torch.testing.assert_close(fused(x), model(x))
        torch.testing.assert_close(fused(x), model(x))
    assert len(graphs) == 1 and graphs[0].sites[0].status == "as written"
    assert graphs[0].sites[0].location.line > 1 and graphs[0].sites[0].location.file == __file__
    with collecting() as graphs, attn_fuse.use_kernels("cpu_flash"):
        torch.testing.assert_close(fused(x), model(x))
    assert graphs[0].sites[0].kernel == "cpu_flash" and graphs[0].sites[0].attention["mask"].startswith("causal")
    with collecting() as graphs:
        torch.testing.assert_close(fused(x), model(x))
    assert not graphs
    with pytest.raises(attn_fuse.OptionError), attn_fuse.use_kernels("nothing"):
        pass


def test_strict_raises_with_every_reason() -> None:
    def returns_weights(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = (q @ q.mT).softmax(-1)
        return p @ q, p

    def over_queries(q: torch.Tensor) -> torch.Tensor:
        return (q @ q.mT).softmax(-2) @ q + (q @ q.mT).softmax(-1).softmax(-1) @ q

    q = torch.randn(2, 4, 8)
    with pytest.raises(attn_fuse.NotFusedError, match="weights are also used outside") as raised:
        torch.compile(returns_weights, backend=backend, options={"inner_backend": "eager", "strict": True})(q)
    assert "test_backend.py:" in str(raised.value)
    torch._dynamo.reset()
    torch.compile(returns_weights, backend=backend, options=FUSED | {"strict": True})(q)
    assert last_sites()[0].fused
    with pytest.raises(attn_fuse.NotFusedError, match="2 of 2 attentions not fused") as raised:
        torch.compile(over_queries, backend=backend, options=FUSED | {"strict": True})(q)
    assert "over another axis" in str(raised.value) and "a second softmax" in str(raised.value)


def test_fuel_counts_sites_over_all_graphs_and_recompiles() -> None:
    options = FUSED | {"fuel": 2}
    fused = torch.compile(Stack(3), backend=backend, options=options)
    for length in (9, 11, 13):
        fused(torch.randn(2, length, 32))
        assert [site.fused for site in last_sites()] == [True, True, False]
    assert last_sites()[2].blocker.reason == "the fuel is used up"
    torch.compile(Stack(1), backend=backend, options=FUSED | {"fuel": 0})(torch.randn(2, 9, 32))
    assert not last_sites()[0].fused


def test_an_expression_that_cannot_be_printed_costs_no_fusion(monkeypatch, caplog) -> None:
    def fails(*args: object) -> str:
        raise RecursionError("by design")

    monkeypatch.setattr("attn_fuse.analysis.printed", fails)
    model, x = Stack(1), torch.randn(2, 9, 32)
    torch.testing.assert_close(torch.compile(model, backend=backend, options=FUSED)(x), model(x))
    (site,) = last_sites()
    assert site.fused and site.expression == "" and "its mathematics cannot be printed" in caplog.text


def test_what_eager_refuses_fails_with_eagers_error() -> None:
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 15)
    with pytest.raises(Exception) as wanted:
        plain(q, k, k)
    with pytest.raises(Exception) as got:
        torch.compile(plain, backend=backend, options=FUSED)(q, k, k)
    assert str(wanted.value).split("\n")[0] in str(got.value)


def test_sdpa_in_the_program_is_named_as_such() -> None:
    def attention(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    torch.compile(attention, backend=backend, options=FUSED | {"strict": True})(torch.randn(1, 2, 8, 16))
    assert [site.status for site in last_sites()] == ["already fused"]


def test_inductors_own_patterns_are_off_here_and_back_afterwards() -> None:
    from torch._dynamo.utils import counters

    def written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((q @ k.transpose(-2, -1)) / 4.0).softmax(-1) @ v

    q, k, v = torch.randn(3, 1, 2, 32, 16)
    counters.clear()
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(written, backend=backend, options={"kernels": ["cudnn"]})(q, k, v)
        assert counters["inductor"]["fuse_attention"] == 0
        assert any("attention patterns were kept off" in note for note in attn_fuse.reports()[-1].notes)
        torch._dynamo.reset()
        torch.compile(written)(q, k, v)
        assert counters["inductor"]["fuse_attention"] == 1
