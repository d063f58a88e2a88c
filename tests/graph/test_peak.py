"""Memory as a reason to fuse: the share of the peak that attention takes, and what the picker makes of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from attn_fuse.bench.memory import peak_memory
from attn_fuse.picker import evidence
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN, Row, Table
from attn_fuse.picker.peak import attention_share
from attn_fuse.picker.timing import this_device
from attn_fuse.report import SiteReport, collecting


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).softmax(-1) @ v


def operands(length: int = 64, training: bool = False) -> list[Tensor]:
    return [torch.randn(1, 4, length, 16, requires_grad=training) for _ in range(3)]


class Block(nn.Module):
    """An attention and a perceptron, with residuals."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.heads, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.heads(self.norm(x)).chunk(3, -1))
        s = (q @ k.mT * 0.25).masked_fill(torch.ones(x.size(1), x.size(1)).triu(1).bool(), float("-inf"))
        x = x + self.out((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def share_of(program: nn.Module | object, *args: Tensor, training: bool) -> float:
    found: list[float] = []

    def look(graph: GraphModule, values: object) -> GraphModule:
        found.append(attention_share(graph, training))
        return graph

    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        torch.compile(program, backend=look)(*args)  # type: ignore[call-overload]
    return found[0]


# ---- the share


def test_the_share_of_one_attention() -> None:
    # Scores of 64 KiB beside query, key, value and output of 16 KiB each.
    assert share_of(attention, *operands(), training=False) == pytest.approx(1 - 64 / 128)
    # The weights and one more; operands and their gradients, the output.
    assert share_of(attention, *operands(training=True), training=True) == pytest.approx(128 / (128 + 2 * 48 + 16))


def test_nothing_without_attention() -> None:
    assert share_of(nn.Linear(16, 16), torch.randn(4, 16), training=False) == 0
    assert share_of(nn.Linear(16, 16), torch.randn(4, 16), training=True) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("length, layers", [(64, 1), (256, 2), (512, 4), (1024, 2)])
def test_the_share_is_near_the_measured_one(length: int, layers: int, training: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Block() for _ in range(layers)]), torch.randn(1, length, 128)
    held = x.nbytes + sum(p.nbytes for p in model.parameters())

    def peak(**options: object) -> int:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="attn_fuse", options=options)

        def step() -> None:
            model.zero_grad()
            out = compiled(x)
            if training:
                out.sum().backward()
            model.zero_grad()

        with torch.set_grad_enabled(training):
            return peak_memory(step, x.device) + held

    written = peak(kernels=[])
    measured = 1 - peak(pick="fused") / written
    assert abs(share_of(model, x, training=training) - measured) < 0.2, measured


# ---- the choice


def picked(ratio: float, patch: pytest.MonkeyPatch, length: int = 64, pick: str = "memory") -> SiteReport:
    """The site, where a kernel takes `ratio` of the time as written."""
    rows = (Row(Case("float32", False, 1, 4, length, length, 16), {AS_WRITTEN: 10.0, "cpu_flash": 10.0 * ratio}),)
    tables = (Table(this_device(torch.device("cpu")), torch.__version__, rows),)
    patch.setattr(evidence, "tables", lambda: tables)
    torch._dynamo.reset()
    with collecting() as graphs, torch.no_grad():
        options = {"pick": pick, "inner_backend": "eager"}
        torch.compile(attention, backend="attn_fuse", options=options)(*operands(length))
    return graphs[0].sites[0]


def test_memory_is_a_reason_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    site = picked(1.2, monkeypatch)
    assert site.kernel == "cpu_flash"
    said = site.attention["picked"]
    assert said.startswith("1.20 times as slow as written") and said.endswith(
        "; attention takes about 50% of the step's peak memory as written"
    )
    assert not picked(1.2, monkeypatch, pick="fastest").fused


def test_it_has_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not picked(1.3, monkeypatch).fused


def test_little_memory_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not picked(1.2, monkeypatch, length=4).fused


def test_a_faster_kernel_needs_no_other_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    site = picked(0.8, monkeypatch)
    assert site.fused and "memory" not in site.attention["picked"]
