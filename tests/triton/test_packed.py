"""Packed query, key and value: what is proved of them, and that operators read and write them in place.

Under Triton's interpreter, which is chosen before Triton is imported: the tests run in a process of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_compiler
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from attn_fuse.backend import attn_fuse as backend
from attn_fuse.kernels.chunked.kernel import CHUNKED
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.triton.flash.kernel import TRITON_FLASH
from attn_fuse.kernels.triton.flash.op import VERSION
from attn_fuse.kernels.triton.flash.packed import Packed, packed_views
from attn_fuse.picker import pick as picker
from tests.harness import assert_fused
from tests.triton.interpreted import interpreted, run_interpreted

pytestmark = pytest.mark.thorough

Results = tuple[Tensor, Tensor]
BATCH, LENGTH, HEADS, DIM = 2, 19, 4, 16
WIDTH = HEADS * DIM


def test_in_a_process_that_interprets() -> None:
    run_interpreted(__file__)


# ---- programs: one packed tensor in, [batch, len, everything] out


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, len, heads, dim] in, [batch, len, heads * dim] out; fewer key heads are repeated."""
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
    """Between the three lies something else, which is used otherwise."""
    q, k, gate, v = x.split([WIDTH, WIDTH, DIM, WIDTH], 2)
    return attended(*(part.unflatten(2, (HEADS, DIM)) for part in (q, k, v))) * gate.sigmoid().mean(-1, keepdim=True)


def one_twice(x: Tensor) -> Tensor:
    q, k, _ = (part.unflatten(2, (HEADS, DIM)) for part in x.split(WIDTH, 2))
    return attended(q, k, k)


def overlapping(x: Tensor) -> Tensor:
    parts = (x[..., :WIDTH], x[..., DIM : DIM + WIDTH], x[..., -WIDTH:])
    return attended(*(part.unflatten(2, (HEADS, DIM)) for part in parts))


def shared_by_all(x: Tensor) -> Tensor:
    """The keys and values of the first batch entry, for each: batch entries are read as queries grouped to a key."""
    q, k, v = (part.unflatten(2, (HEADS, DIM)) for part in x.split(WIDTH, 2))
    return attended(q, k[:1].expand(q.shape), v[:1].expand(q.shape))


def in_groups(x: Tensor) -> Tensor:
    """The query heads of each key head beside it, as in Falcon: no one step leads from head to head."""
    x = x.unflatten(2, (2, 6, DIM))
    return attended(x[:, :, :, :4].flatten(2, 3), x[:, :, :, 4], x[:, :, :, 5])


def turned(x: Tensor) -> Tensor:
    """Queries and keys are reversed in time first: no step of a view is negative."""
    q, k, v = (part.unflatten(2, (HEADS, DIM)) for part in x.split(WIDTH, 2))
    return attended(q.flip(1), k, v)


PACKED: dict[Callable[[Tensor], Tensor], int] = {
    one_after_the_other: 3 * WIDTH,
    three_first: 3 * WIDTH,
    three_within_a_head: 3 * WIDTH,
    time_first: 3 * WIDTH,
    grouped: 3 * WIDTH,
    with_a_rest: 3 * WIDTH + DIM,
    shared_by_all: 3 * WIDTH,
}
NOT_PACKED: dict[Callable[[Tensor], Tensor], int] = {
    one_twice: 3 * WIDTH,
    overlapping: 3 * WIDTH,
    in_groups: 12 * DIM,
    turned: 3 * WIDTH,
}


def projected(width: int) -> Tensor:
    return torch.randn(BATCH, LENGTH, width)


def only(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.setattr(picker, "KERNELS", (kernel,))


def views_of(monkeypatch: pytest.MonkeyPatch, program: Callable[..., Any], x: Tensor, **how: Any) -> Packed | None:
    """What is proved of the one attention in `program`."""
    found: list[Packed | None] = []

    def emit(call: Any) -> Any:
        found.append(packed_views(call.attention))
        return CHUNKED.emit(call)

    only(monkeypatch, Kernel("seen", CHUNKED.devices, CHUNKED.dtypes, CHUNKED.limits, emit))
    torch.compile(program, backend=backend, options={"inner_backend": "eager", "pick": "fused"}, **how)(x)
    (views,) = found
    return views


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("program", PACKED)
def test_is_packed(program: Callable[..., Any], dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert views_of(monkeypatch, program, projected(PACKED[program]), dynamic=dynamic) is not None


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("program", NOT_PACKED)
def test_is_not_packed(program: Callable[..., Any], dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert views_of(monkeypatch, program, projected(NOT_PACKED[program]), dynamic=dynamic) is None


# ---- operators


def as_arguments(dim: int, kv_heads: int) -> tuple[list[int], list[int], int]:
    """Views and sizes of [batch, len, (heads + 2 * kv_heads) * dim + 8], query, key and value one after the other, and
    eight elements that none of them has."""
    views: list[int] = []
    for start in (0, HEADS * dim, (HEADS + kv_heads) * dim):
        views += [0, 0, start, 1, 0, 0, 0, 0, dim, 0, 1, 0, 0, 0, 1]
    sizes = [BATCH, HEADS, kv_heads, LENGTH, LENGTH, dim, dim]
    return views, sizes, (HEADS + 2 * kv_heads) * dim + 8


CAUSAL = ScoreProgram(
    ["where", ["le", ["j"], ["i"]], ["mul", ["score"], ["const", 0.25]], ["const", -math.inf]], upper=["const", 0]
).dumps()
BIASED = ScoreProgram(["add", ["mul", ["score"], ["const", 0.25]], ["input", 0]]).dumps()


def flash(packed: Tensor, views: list[int], sizes: list[int], inputs: list[Tensor], program: str) -> Results:
    from attn_fuse.kernels.triton.flash.op import triton_flash
    from attn_fuse.kernels.triton.flash.packed_op import flash_packed, operands

    rest = (inputs, [], None, None, None, 0.0, program)
    alone = operands(packed, views, sizes)
    return flash_packed(packed, views, sizes, *rest, False)[0], triton_flash(*alone, *rest, False)[0]


@interpreted
@pytest.mark.parametrize("program", (CAUSAL, BIASED), ids=("causal", "biased"))
@pytest.mark.parametrize("kv_heads", (1, 2, HEADS))
def test_same_as_unpacked(kv_heads: int, program: str) -> None:
    views, sizes, width = as_arguments(DIM, kv_heads)
    inputs = [torch.randn(1, HEADS, LENGTH, LENGTH)] if program == BIASED else []
    packed = projected(width).requires_grad_()
    got, wanted = flash(packed, views, sizes, inputs, program)
    assert torch.equal(got, wanted) and got.transpose(1, 2).is_contiguous()
    weights = torch.randn_like(got)
    (gradient,) = torch.autograd.grad(got, packed, weights)
    (of_unpacked,) = torch.autograd.grad(wanted, packed, weights)
    assert torch.equal(gradient, of_unpacked) and gradient.is_contiguous()
    assert gradient[..., :-8].any() and not gradient[..., -8:].any()


@interpreted
def test_bias_keeps_its_gradient() -> None:
    views, sizes, width = as_arguments(DIM, 2)
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, requires_grad=True)
    got, wanted = flash(projected(width).requires_grad_(), views, sizes, [bias], BIASED)
    weights = torch.randn_like(got)
    assert torch.equal(*(torch.autograd.grad(out, bias, weights)[0] for out in (got, wanted)))


@interpreted
def test_packed_tensor_with_gaps() -> None:
    """Its strides are not those of its gradient."""
    views, sizes, width = as_arguments(DIM, HEADS)
    whole = torch.randn(BATCH, LENGTH + 3, width + 5)
    packed = whole[:, 3:, 5:].detach().requires_grad_()
    got, wanted = flash(packed, views, sizes, [], CAUSAL)
    weights = torch.randn_like(got)
    assert torch.equal(*(torch.autograd.grad(out, packed, weights)[0] for out in (got, wanted)))


@interpreted
def test_second_derivative_is_refused() -> None:
    views, sizes, width = as_arguments(DIM, HEADS)
    packed = projected(width).requires_grad_()
    for out in flash(packed, views, sizes, [], CAUSAL):
        (gradient,) = torch.autograd.grad(out, packed, torch.ones_like(out), create_graph=True)
        with pytest.raises(RuntimeError, match="differentiated twice"):
            gradient.sum().backward()


# ---- through the backend


def graphs_of(program: Callable[..., Any], x: Tensor, **how: Any) -> dict[str, list[str]]:
    """The operations of the forward and of the backward graph, by name."""
    graphs: dict[str, list[str]] = {}

    def keeping(which: str) -> Callable[..., Any]:
        def keep(graph: Any, inputs: Any) -> Any:
            nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
            graphs[which] = [str(node.target) for node in nodes]
            return graph

        return keep

    inner = aot_autograd(
        fw_compiler=make_boxed_compiler(keeping("forward")), bw_compiler=make_boxed_compiler(keeping("backward"))
    )
    run = torch.compile(program, backend=backend, options={"inner_backend": inner, "pick": "fused"}, **how)
    run(x.requires_grad_()).sum().backward()
    return graphs


COPIES = ("cat", "clone", "copy", "split", "slice", "select", "stack", "add", "new_zeros", "as_strided")


@interpreted
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("program", (one_after_the_other, three_first, three_within_a_head, grouped))
def test_nothing_around_the_operator(
    program: Callable[..., Any], dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, TRITON_FLASH)
    # In float32 the values are centred, and what is taken off is added.
    graphs = graphs_of(program, projected(PACKED[program]).half(), dynamic=dynamic)
    for which in ("forward", "backward"):
        operator = f"packed_v{VERSION}{'' if which == 'forward' else '_backward'}.default"
        assert sum(operator in name for name in graphs[which]) == 1, graphs[which]
        assert not [name for name in graphs[which] if any(word in name for word in COPIES)], graphs[which]


@interpreted
@pytest.mark.parametrize("program", [*PACKED, *NOT_PACKED])
def test_through_the_backend(program: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, TRITON_FLASH)
    outcome = assert_fused(program, projected({**PACKED, **NOT_PACKED}[program]))
    assert ("packed" in outcome.after) == (program in PACKED)
