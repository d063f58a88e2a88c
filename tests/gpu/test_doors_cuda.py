"""Whole programs on CUDA behind attn_fuse, through Inductor, as users run them: mixed precision, CUDA graphs, changing
shapes, checkpoints, export, decoding, and what the picker tries by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attn_fuse
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.report import collecting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ORDERS: dict[str, dict[str, Any]] = {
    "picked": {},
    "fused": {"pick": "fused", "strict": True},
    "own": {"kernels": ["triton_flash"], "strict": True},
}
orders = pytest.mark.parametrize("order", ORDERS)


class Block(nn.Module):
    """A GPT's block, by hand. x: [batch, length, width]; padding: [batch, length], False where there is no token."""

    def __init__(self, width: int = 256, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attention(self, x: Tensor, padding: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        if padding is not None:
            hidden = hidden | ~padding[:, None, None, :]
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
        weights = F.dropout(weights, self.dropout, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm(x), padding)
        return x + self.mlp(x)


def block(**options: Any) -> Block:
    torch.manual_seed(0)
    return Block(**options).cuda()


def inputs(batch: int = 2, length: int = 300, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    lengths = torch.randint(length // 2, length + 1, (batch, 1), device="cuda")
    return (
        torch.randn(batch, length, 256, device="cuda", dtype=dtype),
        torch.arange(length, device="cuda") < lengths,
    )


def step(model: Callable[..., Tensor], of: nn.Module, x: Tensor, padding: Tensor | None) -> list[Tensor]:
    """Output and gradients; those of queries without a token are left out of the loss."""
    of.zero_grad()
    x = x.detach().requires_grad_()
    out = model(x, padding)
    loss = out.float() if padding is None else out.float() * padding[..., None]
    (loss * torch.linspace(0.5, 1.5, loss.shape[-1], device="cuda")).sum().backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in of.parameters() if p.grad is not None)]


def near(found: list[Tensor], usual: list[Tensor], exact: list[Tensor], times: float = 4.0) -> None:
    """`found` is as near to `exact` as `usual` is, up to a factor and a few roundings."""
    assert len(found) == len(usual) == len(exact)
    for number, (f, u, e) in enumerate(zip(found, usual, exact, strict=True)):
        size = e.double().norm().clamp_min(1e-6)
        off, allowed = ((t.double() - e.double()).norm() / size for t in (f, u))
        assert off <= times * allowed + 1e-5, (number, off.item(), allowed.item())


@orders
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_causal_and_padded_training(order: str, dtype: torch.dtype) -> None:
    model, (x, padding) = block().to(dtype), inputs(dtype=dtype)
    exact = step(wide := block().double(), wide, x.double(), padding)
    usual = step(model, model, x, padding)
    with collecting() as graphs:
        found = step(torch.compile(model, backend=backend, options=ORDERS[order]), model, x, padding)
    assert len([site for graph in graphs for site in graph.sites]) == 1
    near(found, usual, exact)


@orders
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(order: str, dtype: torch.dtype) -> None:
    model, (x, padding) = block(), inputs()
    exact = step(wide := block().double(), wide, x.double(), padding)
    fused = torch.compile(model, backend=backend, options=ORDERS[order])
    with torch.autocast("cuda", dtype=dtype):
        usual, found = step(model, model, x, padding), step(fused, model, x, padding)
    near(found, usual, exact)


@orders
def test_lengths_that_change(order: str) -> None:
    model = block().bfloat16()
    fused = torch.compile(model, backend=backend, options=ORDERS[order])
    for length in (64, 65, 127, 200, 513):
        x, padding = inputs(length=length, dtype=torch.bfloat16)
        exact = step(wide := block().double(), wide, x.double(), padding)
        near(step(fused, model, x, padding), step(model, model, x, padding), exact)


@orders
def test_cuda_graphs(order: str) -> None:
    model = block().bfloat16().eval()
    options = {**ORDERS[order], "mode": "reduce-overhead"}
    fused = torch.compile(model, backend=backend, options=options)
    for number in range(4):
        torch.manual_seed(number)
        x = torch.randn(2, 256, 256, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            near([fused(x).clone()], [model(x)], [block().double().eval()(x.double())])


@orders
def test_cuda_graphs_in_training(order: str) -> None:
    model, (x, _) = block().bfloat16(), inputs(length=256, dtype=torch.bfloat16)
    fused = torch.compile(model, backend=backend, options={**ORDERS[order], "mode": "reduce-overhead"})
    exact = step(wide := block().double(), wide, x.double(), None)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        near(step(fused, model, x, None), step(model, model, x, None), exact)


@pytest.mark.parametrize("order", ["fused", "own"])
def test_dropout_is_the_same_again_in_a_checkpoint(order: str) -> None:
    model, (x, _) = block(dropout=0.3), inputs()
    fused = torch.compile(model, backend=backend, options=ORDERS[order])

    def checkpointed(x: Tensor, padding: Tensor | None) -> Tensor:
        return checkpoint(fused, x, padding, use_reentrant=False)

    torch.manual_seed(5)
    plain = step(fused, model, x, None)
    torch.manual_seed(5)
    again = step(checkpointed, model, x, None)
    near(again, plain, [t.double() for t in plain])
    torch.manual_seed(6)
    assert not torch.equal(step(fused, model, x, None)[0], plain[0])


@pytest.mark.parametrize("order", ["fused", "own"])
def test_the_mean_over_dropout_is_the_attention_without(order: str) -> None:
    model = block(dropout=0.25)
    x = torch.randn(1, 64, 256, device="cuda")
    without = block().eval()
    fused = torch.compile(model.attention, backend=backend, options=ORDERS[order])
    with torch.no_grad():
        mean = torch.stack([fused(x, None) for _ in range(400)]).mean(0)
        wanted = without.attention(x, None)
    assert ((mean - wanted).norm() / wanted.norm()).item() < 0.08


@orders
def test_export(order: str) -> None:
    model, (x, padding) = block().eval(), inputs()
    program = torch.export.export(model, (x, padding))
    fused = torch.compile(program.module(), backend=backend, options=ORDERS[order])
    with torch.no_grad():
        near([fused(x, padding)], [model(x, padding)], [block().double().eval()(x.double(), padding)])


@orders
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_decoding_from_a_growing_cache(order: str, kv_heads: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(8 // kv_heads, dim=1) for t in (k, v))
        return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v

    fused = torch.compile(attend, backend=backend, options=ORDERS[order])
    with torch.no_grad():
        for length in (100, 101, 102, 1000, 3000):
            torch.manual_seed(length)
            q = torch.randn(2, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
            k, v = (torch.randn(2, kv_heads, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            near([fused(q, k, v)], [attend(q, k, v)], [attend(q.double(), k.double(), v.double())])


@pytest.mark.parametrize("kernel", ["cudnn", "cuda_efficient", "flex", "chunked", "triton_flash"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fill", ["min of the dtype", "min of float32", "-1e9", "-1e4"])
@pytest.mark.parametrize("added", [False, True])
def test_queries_that_see_no_key(kernel: str, dtype: torch.dtype, fill: str, added: bool) -> None:
    """They get the mean of the values, since all their scores are the same, or what their scores say, if they are not.

    Kernels that take exp(x) as exp2(x * log2(e)) would make -inf of the min of float32.
    """
    far = {"min of the dtype": torch.finfo(dtype).min, "min of float32": torch.finfo(torch.float32).min}.get(fill)
    far = float(fill) if far is None else far
    if far < torch.finfo(dtype).min:
        pytest.skip("the dtype has no such number")

    def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / 8
        hiding = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, far)
        return ((scores + hiding) if added else scores.masked_fill(hidden, far)).softmax(-1) @ v

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 64, device="cuda", dtype=dtype) for n in (128, 128, 128))
    hidden = torch.rand(2, 1, 128, 128, device="cuda") < 0.3
    hidden[0, :, ::3] = True
    fused = torch.compile(attend, backend=backend, options={"kernels": [kernel]})
    with collecting() as graphs, torch.no_grad():
        found = fused(q, k, v, hidden)
    (site,) = graphs[-1].sites
    if site.kernel is None:
        pytest.skip(str(site.why_not[kernel]))
    # The number is the program's own, also where float64 would have more digits of it.
    near([found], [attend(q, k, v, hidden)], [attend(q.double(), k.double(), v.double(), hidden)])
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    with collecting() as graphs:
        out = torch.compile(attend, backend=backend, options={"kernels": [kernel]})(*leaves, hidden)
    if graphs[-1].sites[0].kernel is None:
        return  # it says why it has no gradients of this program
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    usual = [t.clone().requires_grad_() for t in (q, k, v)]
    results = [
        [*torch.autograd.grad(o.double().square().sum(), of)]
        for o, of in ((out, leaves), (attend(*usual, hidden), usual), (attend(*wide, hidden), wide))
    ]
    near(*results)


def moved(q: Tensor, k: Tensor, v: Tensor, on_cpu: Tensor, table: Tensor) -> Tensor:
    """As LongT5 has it: what is computed on the CPU is copied to the scores' device."""
    bias = (on_cpu.cumsum(-1) - 1).to(q.device)
    return (q @ k.transpose(-2, -1) / 8 - bias).softmax(-1) @ v


def indexed(q: Tensor, k: Tensor, v: Tensor, on_cpu: Tensor, table: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / 8 + table[:, on_cpu.long()][:, None]).softmax(-1) @ v


def one_number(q: Tensor, k: Tensor, v: Tensor, on_cpu: Tensor, table: Tensor) -> Tensor:
    return (torch.tanh(q @ k.transpose(-2, -1) / on_cpu[3]) * on_cpu[4]).softmax(-1) @ v


@orders
@pytest.mark.parametrize("program", [moved, indexed, one_number], ids=lambda f: f.__name__)
@pytest.mark.parametrize("training", [False, True])
def test_tensors_on_the_cpu(order: str, program: Callable[..., Tensor], training: bool) -> None:
    torch.manual_seed(0)
    given = [torch.randn(2, 4, 96, 64, device="cuda", requires_grad=training) for _ in range(3)]
    table = torch.randn(4, 96, device="cuda", requires_grad=training and program is indexed and order != "fused")
    on_cpu = torch.randperm(96).float() if program is indexed else 1 + torch.randperm(96) / 96
    fused = torch.compile(program, backend=backend, options=ORDERS[order])

    def results(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        wide = leaves[0].dtype == torch.float64
        out = function(*leaves[:3], on_cpu.double() if wide else on_cpu, leaves[3])
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted)] if training else [out]

    near(
        results(fused, *given, table), results(program, *given, table), results(program, *[t.double() for t in given],
        table.double()),
    )  # fmt: skip


def test_every_kernel_that_is_tried_by_itself_is_said() -> None:
    """Causal and padded in training has no kernel of torch's: ours is tried, or the reason says why it is not."""
    model, (x, padding) = block().bfloat16(), inputs(8, 2048, torch.bfloat16)
    with collecting() as graphs:
        step(torch.compile(model, backend=backend), model, x, padding)
    (site,) = [site for graph in graphs for site in graph.sites]
    print(attn_fuse.last_report())
    assert site.kernel == "triton_flash" or any("triton_flash" in name for name in site.why_not), site
