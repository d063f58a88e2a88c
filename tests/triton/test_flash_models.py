"""triton_flash through torch.compile, interpreted on the CPU: query, key and value as parts of one projection."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_compiler
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from attn_fuse.backend import attn_fuse as backend
from tests.harness import assert_fused
from tests.triton.interpreted import interpreted

pytestmark = pytest.mark.thorough

Program = Callable[[Tensor], Tensor]
BATCH, LENGTH, HEADS, DIM = 2, 19, 4, 16
WIDTH = HEADS * DIM


# ---- programs from a projection, [batch, len, everything], to [batch, len, heads * dim]


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [batch, len, heads, dim], with key heads repeated if there are fewer."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    keep = torch.tril(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool))
    weights = torch.softmax(scores.masked_fill(~keep, -math.inf), -1)
    return (weights @ v).transpose(1, 2).contiguous().flatten(2)


def one_after_the_other(x: Tensor) -> Tensor:
    return attended(*(part.unflatten(2, (HEADS, DIM)) for part in x.split(WIDTH, 2)))


def three_first(x: Tensor) -> Tensor:
    return attended(*x.unflatten(2, (3, HEADS, DIM)).unbind(2))


def three_within_a_head(x: Tensor) -> Tensor:
    return attended(*x.unflatten(2, (HEADS, 3 * DIM)).chunk(3, -1))


def time_first(x: Tensor) -> Tensor:
    return attended(*(part.unflatten(2, (HEADS, DIM)) for part in x.transpose(0, 1).split(WIDTH, 2)))


def grouped(x: Tensor) -> Tensor:
    parts = x.split([2 * DIM * HEADS, HEADS * DIM // 2, HEADS * DIM // 2], 2)
    return attended(*(part.unflatten(2, (-1, DIM)) for part in parts))


def with_a_rest(x: Tensor) -> Tensor:
    """A gate lies between query, key and value."""
    q, k, gate, v = x.split([WIDTH, WIDTH, DIM, WIDTH], 2)
    return attended(*(part.unflatten(2, (HEADS, DIM)) for part in (q, k, v))) * gate.sigmoid().mean(-1, keepdim=True)


def one_twice(x: Tensor) -> Tensor:
    q, k, _ = (part.unflatten(2, (HEADS, DIM)) for part in x.split(WIDTH, 2))
    return attended(q, k, k)


def overlapping(x: Tensor) -> Tensor:
    parts = (x[..., :WIDTH], x[..., DIM : DIM + WIDTH], x[..., -WIDTH:])
    return attended(*(part.unflatten(2, (HEADS, DIM)) for part in parts))


def shared_by_all(x: Tensor) -> Tensor:
    """All batch entries attend to the first one's keys, which reads batch entries as grouped queries."""
    q, k, v = (part.unflatten(2, (HEADS, DIM)) for part in x.split(WIDTH, 2))
    return attended(q, k[:1].expand(q.shape), v[:1].expand(q.shape))


def in_groups(x: Tensor) -> Tensor:
    """Each key head lies beside its query heads, as in Falcon, so no single stride leads from head to head."""
    x = x.unflatten(2, (2, 6, DIM))
    return attended(x[:, :, :, :4].flatten(2, 3), x[:, :, :, 4], x[:, :, :, 5])


def turned(x: Tensor) -> Tensor:
    """The queries are reversed in time, which no view can do, because strides are not negative."""
    q, k, v = (part.unflatten(2, (HEADS, DIM)) for part in x.split(WIDTH, 2))
    return attended(q.flip(1), k, v)


VIEWS: dict[Program, int] = {
    one_after_the_other: 3 * WIDTH,
    three_first: 3 * WIDTH,
    three_within_a_head: 3 * WIDTH,
    time_first: 3 * WIDTH,
    grouped: 3 * WIDTH,
    with_a_rest: 3 * WIDTH + DIM,
    one_twice: 3 * WIDTH,
    overlapping: 3 * WIDTH,
    shared_by_all: 3 * WIDTH,
}
COPIED: dict[Program, int] = {in_groups: 12 * DIM, turned: 3 * WIDTH}
WIDTHS = VIEWS | COPIED


@interpreted
@pytest.mark.parametrize("program", WIDTHS)
def test_parts_of_a_projection(program: Program) -> None:
    assert_fused(program, torch.randn(BATCH, LENGTH, WIDTHS[program]), kernels=["triton_flash"])


COPIES = ("cat", "clone", "copy", "index", "flip", "stack")


@interpreted
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("program", WIDTHS)
def test_views_are_read_where_they_lie(program: Program, dynamic: bool) -> None:
    graphs: list[list[str]] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    inner = aot_autograd(fw_compiler=make_boxed_compiler(keep))
    options = {"inner_backend": inner, "kernels": ["triton_flash"]}
    run = torch.compile(program, backend=backend, options=options, dynamic=dynamic)
    # Half precision, because centring copies float32 values.
    with torch.no_grad():
        run(torch.randn(BATCH, LENGTH, WIDTHS[program]).half())
    (names,) = graphs
    before = names[: next(n for n, name in enumerate(names) if "triton_flash" in name)]
    copies = [name for name in before if any(word in name for word in COPIES)]
    assert bool(copies) == (program in COPIED), names


# ---- tables looked up for each query and key


def distances(length: int) -> Tensor:
    at = torch.arange(length)
    return (at[None, :] - at[:, None]).clamp(-8, 8) + 8


class RelativeLayers(nn.Module):
    """Two layers that share a learned table, as in T5. stored: look it up at places in a buffer, as Swin does.
    frozen: give the first layer no gradients."""

    def __init__(self, stored: bool, frozen: bool = False) -> None:
        super().__init__()
        self.table, self.frozen = nn.Parameter(torch.randn(17, HEADS)), frozen
        self.register_buffer("places", distances(LENGTH) if stored else None)

    def forward(self, x: Tensor) -> Tensor:
        places = distances(x.shape[1]) if self.places is None else self.places
        for frozen in (self.frozen, False):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
                bias = self.table[places].permute(2, 0, 1)
                q, k, v = (part.unflatten(2, (HEADS, DIM)).transpose(1, 2) for part in (x, x + 1, x - 1))
                y = (torch.softmax(q @ k.transpose(-2, -1) / 4 + bias, -1) @ v).transpose(1, 2).flatten(2)
            x = x + y
        return x


@interpreted
@pytest.mark.parametrize("stored, dynamic", [(False, False), (False, True), (True, False)])
def test_layers_share_one_lookup(stored: bool, dynamic: bool) -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    outcome = assert_fused(RelativeLayers(stored), x, kernels=["triton_flash"], dynamic=dynamic)
    assert outcome.after.count("lookup_v1.default(") == 1 and '"gather"' not in calls_of(outcome.after)


@interpreted
def test_a_lookup_without_gradients_is_not_shared_with_one_that_has_them() -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    outcome = assert_fused(RelativeLayers(False, frozen=True), x, kernels=["triton_flash"])
    assert outcome.after.count("lookup_v1.default(") == 2


@interpreted
def test_a_large_lookup_is_left_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_fuse.kernels.score.apart._MOST", 4 * HEADS * LENGTH * LENGTH - 1)
    outcome = assert_fused(RelativeLayers(False), torch.randn(BATCH, LENGTH, WIDTH), kernels=["triton_flash"])
    assert "lookup_v" not in outcome.after and '"gather"' in calls_of(outcome.after)


def calls_of(code: str) -> str:
    """The lines of `code` that call the attention."""
    return "\n".join(line for line in code.splitlines() if "triton_flash_v" in line)
