"""Each reason why a kernel does not run an attention, asked of the kernel itself, also for devices that are not here.

test_reasons.py checks that all reasons are named.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.emit.builder import NotEmitted
from attn_fuse.graph.scopes import is_frozen
from attn_fuse.kernels import KERNELS
from attn_fuse.kernels.operands import within_exp2
from attn_fuse.picker import pick as picker
from attn_fuse.picker import site_run
from attn_fuse.picker.evidence import AS_WRITTEN
from attn_fuse.picker.pick import Choice, Times, pick
from attn_fuse.report import SiteReport, collecting
from tests.harness import compiled, every_day

BACKEND = importlib.import_module("attn_fuse.backend")
KERNEL = {kernel.name: kernel for kernel in KERNELS}
CUDA = {"device": torch.device("cuda")}
HALF = CUDA | {"dtype": torch.float16}
TRAINED = {"training": True}


def plain(q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(extra > 0, torch.finfo(q.dtype).min).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> Tensor:
    return (q @ k.mT + extra).softmax(-1) @ v


def dropped(q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> Tensor:
    return torch.dropout((q @ k.mT).softmax(-1), 0.5, True) @ v


def gated(q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> Tensor:
    return ((q @ k.mT).softmax(-1) * extra) @ v


def capped(q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> Tensor:
    return (5 * torch.tanh(q @ k.mT / 5)).softmax(-1) @ v


def with_sink(q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> Tensor:
    s = q @ k.mT
    return torch.cat([s, extra[..., :1].expand(2, 4, 6, 1)], -1).softmax(-1)[..., :-1] @ v


@functools.cache
def recognised(function: Callable[..., Tensor]) -> tuple[Attention, Facts]:
    """What the picker is asked about the one attention of `function`, in float32, without gradients."""
    asked: list[tuple[Attention, Facts]] = []

    def spy(attention: Attention, facts: Facts, *rest: Any, **how: Any) -> Any:
        asked.append((attention, facts))
        return pick(attention, facts, *rest, **how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BACKEND, "pick", spy)
        torch._dynamo.reset()
        compiled(function)(*torch.randn(3, 2, 4, 6, 16), torch.randn(1, 4, 6, 6))
    (found,) = asked
    return found


def rectified(q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> Tensor:
    return (q @ k.mT).relu().softmax(-1) @ v


REASONS = [
    ("cpu_flash", dropped, {}, "torch has no fused attention with dropout on CPU"),
    ("cpu_flash", biased, TRAINED | {"bias_needs_grad": True}, "a bias needs a gradient, which this kernel does not"),
    ("cpu_flash", biased, TRAINED, "a bias that may hide every key of a query, as padding does, would get a wrong"),
    ("cpu_flash", filled, TRAINED, "a query that sees no key would get a gradient, which the program's fill value"),
    ("cpu_flash", filled, {"dtype": torch.float16}, "would not get the mean of the values in float16"),
    ("cpu_flash", capped, {}, "takes no softcap"),
    ("cpu_flash", with_sink, {}, "takes no sink"),
    ("cpu_flash", gated, {}, "takes no factor on the weights that differs from key to key"),
    ("cpu_flash", rectified, {}, "takes no function of the scores: the scores pass through relu"),
    ("chunked", plain, {"dtype": torch.complex64}, "does not take complex64"),
    ("cudnn", plain, {}, "runs on cuda, not on cpu"),
    ("cudnn", capped, HALF, "takes no softcap"),
    ("cuda_flash", filled, HALF, "a query that sees no key would not get the mean of the values in float16"),
    ("cudnn", filled, HALF, "a query that sees no key would not get the mean of the values on CUDA"),
    ("cudnn", biased, HALF, "a query that sees no key would not get the mean of the values on CUDA"),
    ("cuda_efficient", filled, CUDA | TRAINED, "a query that sees no key would get a gradient, which the"),
    ("cuda_efficient", biased, CUDA | TRAINED, "a bias that may hide every key of a query, as padding does, would get"),
    ("cudnn", biased, HALF, "a bias in torch.float32 would be rounded to torch.float16"),
    ("cuda_efficient", plain, CUDA | {"kv_heads": 2}, "takes no grouped queries"),
    ("cuda_flash", causal, HALF | {"q_len": 5}, "takes a causal mask only where q_len equals kv_len"),
    ("cuda_efficient", plain, CUDA | {"q_len": 0}, "takes no empty sequence"),
    (
        "cpu_flash", plain, {"checkpointed": True},
        "torch takes it for random, and has nothing random in a checkpoint of a graph without gradients",
    ),
    (
        "cpu_flash", plain, {"value_dim": 5, "symbolic": frozenset({"value_dim"})},
        "value_dim differs from head_dim, and they may change from call to call",
    ),
    ("flex", plain, {"compiled": False}, "stores every score where the graph is not compiled by Inductor"),
    ("flex", dropped, {}, "takes no dropout"),
    ("flex", gated, {}, "takes no factor on the weights that differs from key to key"),
    ("flex", plain, {"symbolic": frozenset({"heads"})}, "needs numbers of heads and head_dims that stay the same"),
    ("flex", plain, {"dtype": torch.float64}, "does not take float64"),
    ("flex", plain, {"batch": 0}, "takes no empty sequence"),
    ("flex", plain, TRAINED, "gives no gradients on CPU"),
    ("flex", with_sink, {}, "gives no log-sum-exp on CPU, which a sink needs"),
    ("flex", plain, CUDA | {"value_dim": 8}, "takes no head_dim or value_dim below 16"),
    ("flex", filled, CUDA | TRAINED, "a query that sees no key would get a wrong gradient"),
    ("flex", biased, CUDA | TRAINED, "a bias that may hide every key of a query, as padding does, would get a wrong"),
    ("triton_flash", plain, CUDA | {"value_dim": 257}, "takes a value_dim of at most 256, not 257"),
    ("triton_flash", plain, CUDA | {"symbolic": frozenset({"head_dim"})},
     "takes a head_dim of at most 256, and it may change from call to call"),
    ("triton_flash", plain, CUDA | {"head_dim": 257}, "takes a head_dim of at most 256, not 257"),
    ("triton_flash", plain, CUDA | {"dtype": torch.float64}, "does not take float64"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "function", "changed", "reason"), REASONS, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_reason(name: str, function: Callable[..., Tensor], changed: dict[str, Any], reason: str) -> None:
    attention, facts = recognised(function)
    said = KERNEL[name].why_not(attention, dataclasses.replace(facts, **changed))
    assert any(reason in text for text in said), said


def test_an_old_device(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, facts = recognised(plain)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    said = KERNEL["triton_flash"].why_not(attention, dataclasses.replace(facts, **CUDA))
    assert "needs compute capability 8.0, this device has 7.5" in said


def test_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, facts = recognised(plain)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    inductor = dataclasses.replace(facts, compiled=True)
    assert "torch has it on CPU only with AVX2, and not on macOS" in KERNEL["flex"].why_not(attention, inductor)
    monkeypatch.setattr("attn_fuse.kernels.triton.flash.kernel.is_installed", lambda: False)
    there = dataclasses.replace(facts, **CUDA)
    assert "Triton is not installed" in KERNEL["triton_flash"].why_not(attention, there)


def chosen_in_turn(**how: Any) -> tuple[list[str], Choice]:
    """The kernels as one after the other turns out not to be callable, and what is chosen in the end."""
    unfit: dict[str, str] = {}
    while (choice := pick(*recognised(plain), unfit=unfit, **how)).kernel is not None:
        unfit[choice.kernel.name] = f"{len(unfit)} of its operands is missing"
    return [*unfit], choice


def test_the_next_best_kernel_is_known() -> None:
    names, last = chosen_in_turn(allowed=("chunked", "cpu_flash"))
    assert names == ["chunked", "cpu_flash"] and last.advice
    assert last.because == (
        "no kernel can run it: cpu_flash: 1 of its operands is missing, chunked: 0 of its operands is missing"
    )


@pytest.mark.parametrize(("chunked", "expected"), [(0.7, ["cpu_flash", "chunked"]), (1.2, ["cpu_flash"])])
def test_the_next_best_kernel_is_faster_than_as_written(chunked: float, expected: list[str]) -> None:
    seconds = {AS_WRITTEN: 1.0, "chunked": chunked, "cpu_flash": 0.5}
    names, last = chosen_in_turn(stopwatch=lambda kernels: Times(seconds, {}))
    assert names == expected and set(last.why_not) >= {"chunked", "cpu_flash"}
    assert ("chunked is 1.20 times as slow as written" in last.because) == (chunked > 1)


@pytest.mark.parametrize(
    ("program", "needs", "frozen"),
    [
        (lambda x, w: x @ w, False, True),
        (lambda x, w: x @ w, True, False),
        (lambda x, w: (x @ w).detach(), True, True),
        (lambda x, w: (x + 1, w.t()), True, True),
        (lambda x, w: (x + 1, w * 2), True, False),
    ],
    ids=["nothing learned", "learned", "detached", "a parameter given back", "learned elsewhere"],
)
def test_a_graph_without_gradients_is_frozen(program: Callable[..., Any], needs: bool, frozen: bool) -> None:
    graphs: list[Any] = []
    inputs = (torch.randn(3, 3), torch.randn(3, 3, requires_grad=needs))
    torch.compile(program, backend=lambda graph, _: graphs.append(graph) or graph.forward)(*inputs)
    assert is_frozen(graphs[0]) == frozen
    with torch.no_grad():
        assert not is_frozen(graphs[0])


PROBLEMS = (KeyError("fact"), NotEmitted("out of luck"), AssertionError(), RecursionError())
WAYS = ({"pick": "fused"}, {"kernels": ["cpu_flash", "chunked"]}, {"pick": "measured"})


class TestAKernelThatFails:
    """The next best one takes its place, whatever goes wrong, and the report says why."""

    def site(self, **options: Any) -> SiteReport:
        torch._dynamo.reset()
        q, k, v, extra = (torch.zeros(1, 2, 6, 8) for _ in range(4))
        with collecting() as graphs:
            torch.compile(plain, backend=BACKEND.attn_fuse, options={"inner_backend": "eager"} | options)(
                q, k, v, extra
            )
        return graphs[0].sites[0]

    def broken(self, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
        kernels = tuple(dataclasses.replace(k, **fields) if k.name == "cpu_flash" else k for k in picker.KERNELS)
        monkeypatch.setattr(picker, "KERNELS", kernels)

    @pytest.mark.parametrize("options", WAYS)
    def test_when_it_is_asked(self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog) -> None:
        def limits(attention: Attention, facts: Facts) -> Iterator[str]:
            yield from ()
            raise RuntimeError("no such\nfact")

        monkeypatch.setattr(site_run, "_known", {"": Times({AS_WRITTEN: 1.0, "chunked": 0.5}, {})})
        monkeypatch.setattr(site_run, "_key", lambda *_: "")
        self.broken(monkeypatch, limits=limits)
        site = self.site(**options)
        assert site.kernel == "chunked", site
        assert site.why_not["cpu_flash"] == ("asking it failed: RuntimeError: no such",)
        assert "asking cpu_flash what it takes failed" in caplog.text

    @pytest.mark.parametrize("options", WAYS)
    @pytest.mark.parametrize("problem", every_day(PROBLEMS, PROBLEMS[0]))
    def test_when_its_call_is_made(
        self, options: dict[str, Any], problem: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def emit(call: Any) -> Any:
            call.node("neg", call.query())
            raise problem

        seconds = {AS_WRITTEN: 1.0, "cpu_flash": 0.2, "chunked": 0.5}
        monkeypatch.setattr(site_run, "_known", {"": Times(seconds, {})})
        monkeypatch.setattr(site_run, "_key", lambda *_: "")
        self.broken(monkeypatch, emit=emit)
        site = self.site(**options)
        assert site.kernel == "chunked", site
        assert site.why_not["cpu_flash"][0].startswith("its call cannot be written into the graph: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fill_stays_finite_in_powers_of_two(dtype: torch.dtype) -> None:
    least = torch.finfo(dtype).min
    x = torch.tensor([0.0, 3.0, -1e4, -1e30, least / 4, least / 2, least, -math.inf, math.inf, math.nan], dtype=dtype)
    found = within_exp2(x)
    assert torch.equal(found[:5], x[:5]) and torch.equal(found[7:9], x[7:9]) and found[9].isnan()
    wide = found[:7].float() * 1.4426950408889634
    assert wide.isfinite().all() and (wide.diff()[1:] < 0).all()
    # It swallows a score, and what differs there differs by so much that exp is 0 or 1.
    assert torch.equal((found[6] + torch.tensor([5.0, -70.0]).to(dtype)).float(), found[6].float().expand(2))
    assert (found[5].float() - found[6].float()).item() > 1e30
