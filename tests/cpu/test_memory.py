"""Writes where a compiler may not look: several tensors at once, operators, views, `.data`, and what is given out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.backend import attn_fuse as backend
from attn_fuse.graph import expand as expanding
from attn_fuse.graph import memory
from attn_fuse.report import collecting
from tests.harness import every_day

SHAPE = (2, 2, 8, 8)
LIBRARY = torch.library.Library("attn_fuse_memory", "DEF")
LIBRARY.define("scale_(Tensor(a!) x, float by) -> ()")
LIBRARY.impl("scale_", lambda x, by: (x.mul_(by), None)[1], "CPU")
LIBRARY.impl("scale_", lambda x, by: None, "Meta")
LIBRARY.define("store(Tensor(a!) cache, Tensor x) -> ()")
LIBRARY.impl("store", lambda cache, x: (cache.copy_(x), None)[1], "CPU")
LIBRARY.impl("store", lambda cache, x: None, "Meta")


def attend(s: Tensor, v: Tensor) -> Tensor:
    return s.softmax(-1) @ v


def method(q, k, v, b):
    s = q @ k.mT
    k.mul_(2)
    return attend(s, v)


def slices(q, k, v, b):
    b[..., 2:] = k[..., 2:]
    s = q @ b.mT
    b[..., :2] = 0
    return attend(s, b)


def several_at_once(q, k, v, b):
    s = q @ k.mT
    torch._foreach_mul_([k, v], 2.0)
    return attend(s, v)


def scores_of_several_at_once(q, k, v, b):
    s = q @ k.mT
    torch._foreach_add_([s], 1.5)
    torch._foreach_mul_([s], 3.0)
    return attend(s, v)


def several_copied_at_once(q, k, v, b):
    keys = k * 1
    torch._foreach_copy_([b, keys], [v, v])
    return attend(q @ keys.mT + b, v)


def operator_on_a_key(q, k, v, b):
    s = q @ k.mT
    torch.ops.attn_fuse_memory.scale_(k, 2.0)
    return attend(s, v)


def operator_on_a_view(q, k, v, b):
    s = q @ k.mT
    torch.ops.attn_fuse_memory.scale_(k.view(-1), 2.0)
    return attend(s, v)


def operator_on_scores(q, k, v, b):
    s = q @ k.mT
    torch.ops.attn_fuse_memory.scale_.default(s, 2.0)
    return attend(s, v)


def operator_on_weights(q, k, v, b):
    w = (q @ k.mT).softmax(-1)
    torch.ops.attn_fuse_memory.scale_(x=w, by=2.0)
    return w @ v


def operator_on_a_cache(q, k, v, b):
    torch.ops.attn_fuse_memory.store(b, k)
    s = q @ b.mT
    torch.ops.attn_fuse_memory.store(b, v)
    return attend(s, v)


def data_written(q, k, v, b):
    s = q @ k.mT
    k.data.mul_(2.0)
    return attend(s, v)


def data_kept_and_written(q, k, v, b):
    data = k.data
    s = q @ k.mT
    data.mul_(2.0)
    data.add_(1.0)
    return attend(s, v)


def data_replaced(q, k, v, b):
    s = q @ k.mT
    k.data = v * 2
    return attend(s, v)


def view_by_vmap(q, k, v, b):
    keys = torch.vmap(lambda a: a.transpose(1, 2))(k)
    k.mul_(2)
    return attend(q @ keys, v)


def scores_viewed_by_vmap(q, k, v, b):
    s = q @ k.mT
    torch.vmap(lambda a: a.transpose(1, 2))(s).mul_(2)
    return attend(s, v)


def positions_by_vmap(q, k, v, b):
    last = torch.vmap(lambda a: a + 0)(torch.arange(8))
    last.add_(1)
    return attend((q @ k.mT).masked_fill(last[:, None] < torch.arange(8)[None], -1e9), v)


def sum_by_baddbmm(q, k, v, b):
    q, k, v, b = (x.flatten(0, 1) for x in (q, k, v, b))
    y = torch.baddbmm(b, (q @ k.mT).softmax(-1), v)
    s = q @ y.mT
    y.mul_(2)
    return attend(s, v)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.joined = nn.MultiheadAttention(8, 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        y, _ = self.joined(b[0], b[0], b[0], need_weights=False)
        s = y @ k.mT
        y.mul_(2)
        return attend(s, v)


class Filled(nn.Module):
    """A causal mask, until `.data` says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(8, 8).tril())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        self.mask.data.fill_(1)
        return attend((q @ k.mT).masked_fill(self.mask == 0, -1e9), v)


PROGRAMS = (
    method, slices, several_at_once, scores_of_several_at_once, several_copied_at_once, operator_on_a_key,
    operator_on_a_view, operator_on_scores, operator_on_weights, operator_on_a_cache, data_written,
    data_kept_and_written, data_replaced, view_by_vmap, scores_viewed_by_vmap, positions_by_vmap, sum_by_baddbmm,
    Joined, Filled,
)  # fmt: skip


UNCOUNTED = (several_at_once, operator_on_a_key, operator_on_scores, operator_on_a_cache)


@pytest.mark.parametrize(
    ("program", "writes"),
    [
        pytest.param(program, writes, marks=() if n % 8 == writes else pytest.mark.thorough)
        for n, program in enumerate(PROGRAMS)
        for writes in range(4)
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_writes(program: Callable[..., Any], writes: int) -> None:
    """writes: into each argument and buffer before the call; only their change in the graph may count."""
    made = program() if isinstance(program, type) else program
    again = program() if isinstance(program, type) else program
    if isinstance(made, nn.Module):
        again.load_state_dict(made.state_dict())
    values = [torch.randn(SHAPE) for _ in range(4)]

    def run(by: Callable[..., Tensor]) -> list[Tensor]:
        args = [x.clone() for x in values]
        for _ in range(writes):
            for x in args:
                x.add_(0)
        return [by(*args), *args]

    with torch.no_grad():
        for module in (made, again):
            for _ in range(writes if isinstance(module, nn.Module) else 0):
                for buffer in module.buffers():
                    buffer.add_(0)
        options = {"inner_backend": "aot_eager", "pick": "fused"}
        with collecting() as graphs:
            expected, found = run(made), run(torch.compile(again, backend=backend, options=options))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one)
    if program in UNCOUNTED:
        reasons = [site.blocker.reason for graph in graphs for site in graph.sites]
        assert reasons and all("writes without torch counting it" in reason for reason in reasons), reasons


def gradient_cut_after_a_vmap(q, k, v, b):
    x = torch.vmap(torch.mul)(b, b)
    with torch.no_grad():
        bias = x * 3
    return attend(q @ k.mT + bias, v)


def gradient_cut_after_a_baddbmm(q, k, v, b):
    q, k, v, b = (x.flatten(0, 1) for x in (q, k, v, b))
    x = torch.baddbmm(b, (q @ k.mT).softmax(-1), v)
    with torch.no_grad():
        bias = x * 3
    return attend(q @ k.mT + bias, v)


class CutAfterJoined(Joined):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        y, _ = self.joined(b[0], b[0], b[0], need_weights=False)
        with torch.no_grad():
            bias = y * 3
        return attend(q @ k.mT + bias, v)


@pytest.mark.parametrize("program", [gradient_cut_after_a_vmap, gradient_cut_after_a_baddbmm, CutAfterJoined])
def test_gradients(program: Callable[..., Any]) -> None:
    made = program() if isinstance(program, type) else program
    values = [torch.randn(SHAPE) for _ in range(4)]

    def gradients(by: Callable[..., Tensor]) -> list[Tensor]:
        args = [x.clone().requires_grad_() for x in values]
        found = torch.autograd.grad((by(*args) * torch.linspace(0.5, 1.5, 8)).sum(), args, allow_unused=True)
        return [torch.zeros(()) if g is None else g for g in found]

    expected = gradients(made)
    found = gradients(torch.compile(made, backend=backend, options={"inner_backend": "aot_eager", "pick": "fused"}))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)


def bias_masked(q, k, v, b):
    b.masked_fill_(torch.ones(8, 8).triu(1).bool(), -1e9)
    return attend(q @ k.mT + b, v)


def bias_scaled_behind_the_scores(q, k, v, b):
    s = q @ k.mT + b[:, :1]
    b[:, 0].mul_(2)
    return attend(s, v)


def bias_grows(q, k, v, b):
    b += q @ k.mT
    return attend(b, v)


def key_scaled_before_the_scores(q, k, v, b):
    k *= 2
    return attend(q @ k.mT, v)


def value_written_as_a_slice(q, k, v, b):
    v[..., 2:] = b[..., 2:]
    return attend(q @ k.mT, v)


def mask_written_behind_the_scores(q, k, v, b):
    s = (q @ k.mT).masked_fill(b < 0, -1e9)
    b.zero_()
    return attend(s, v)


def view_of_a_cache(q, k, v, b):
    b[:, :, 2:5] = k[:, :, 2:5]
    return attend(q @ b[:, :, :5].mT, v[:, :, :5])


@pytest.mark.parametrize(
    ("with_gradient", "inner"),
    [
        ("qkvb", "aot_eager"),
        *(
            pytest.param(*x, marks=pytest.mark.thorough)
            for x in (("q", "eager"), ("q", "aot_eager"), ("qkvb", "eager"))
        ),
        *(pytest.param(names, "inductor", marks=pytest.mark.thorough) for names in ("q", "qkvb")),
    ],
)
@pytest.mark.parametrize(
    "program",
    [
        bias_masked, bias_scaled_behind_the_scores, bias_grows, key_scaled_before_the_scores,
        value_written_as_a_slice, mask_written_behind_the_scores, view_of_a_cache,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_gradients_past_writes(program: Callable[..., Any], with_gradient: str, inner: str) -> None:
    """A kernel keeps for its backward what the program then overwrites, and never kept."""
    values = [torch.randn(SHAPE) for _ in range(4)]

    def run(by: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(name in with_gradient) for x, name in zip(values, "qkvb", strict=True)]
        args = [x * 1 for x in leaves]
        wanted = [x for x in leaves if x.requires_grad]
        found = torch.autograd.grad((by(*args) * torch.linspace(0.5, 1.5, 8)).sum(), wanted, allow_unused=True)
        return [*(torch.zeros(SHAPE) if g is None else g for g in found), *args]

    expected = run(program)
    with collecting() as graphs:
        found = run(torch.compile(program, backend=backend, options={"inner_backend": inner, "pick": "fused"}))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)
    assert [site.fused for graph in graphs for site in graph.sites] == [True]


def test_a_call_that_cannot_be_written_out_is_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """One result differs from what Dynamo recorded: then none is replaced, and no node of the attempt is left."""

    def refused(new: torch.fx.Node, old: torch.fx.Node) -> None:
        if new.meta["example_value"].dim() == 3 and new.meta["example_value"].shape[-1] == 5:
            raise TypeError("another tensor")

    joined, x = nn.MultiheadAttention(8, 2), torch.randn(5, 2, 8)
    seen: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(graph)
        return graph

    def program(x: Tensor) -> tuple[Tensor, ...]:
        return *joined(x, x, x), attend(x @ x.mT, x)

    monkeypatch.setattr(expanding, "_assert_as_recorded", refused)
    with torch.no_grad():
        found = torch.compile(program, backend=backend, options={"inner_backend": keep, "pick": "fused"})(x)
        for one, other in zip(program(x), found, strict=True):
            torch.testing.assert_close(other, one)
    assert [n for n in seen[0].graph.nodes if "multi_head_attention_forward" in str(n.target)]
    assert not [n for n in seen[0].graph.nodes if n.op == "call_function" and not n.users]


def test_memory_that_a_call_brings_near_an_attention_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask is written by positions, and only a call that is written out later reads it."""
    joined, x, last = (
        nn.MultiheadAttention(8, 2, batch_first=True).eval(),
        torch.randn(3, 6, 8),
        torch.tensor([2, 5, 0]),
    )

    def program(x: Tensor, last: Tensor) -> Tensor:
        seen = torch.zeros(3, 6)
        seen[torch.arange(3), last] = 1
        hidden = seen.flip(-1).cumsum(-1).flip(-1) == 0
        return joined(x, x, x, key_padding_mask=hidden)[0]

    def reasons() -> list[str | None]:
        torch._dynamo.reset()
        with collecting() as graphs, torch.no_grad():
            run = torch.compile(program, backend=backend, options={"inner_backend": "eager", "pick": "fused"})
            torch.testing.assert_close(run(x, last), program(x, last))
        return [site.blocker and site.blocker.reason for graph in graphs for site in graph.sites]

    assert reasons() == [None]
    monkeypatch.setattr(memory, "CALLS", frozenset())
    assert reasons() == ["memory that is written in place, and was near no attention before a call was written out"]


def one_head_less(out: Tensor) -> Tensor:
    return out[:, 1:]


def one_tensor(out: Tensor) -> Tensor:
    return out.transpose(1, 2).contiguous().transpose(1, 2).detach()


GIVEN_OUT = (Tensor.contiguous, one_head_less, Tensor.unbind, one_tensor)


@pytest.mark.parametrize("kernel", every_day(["cpu_flash", "chunked"], "cpu_flash"))
@pytest.mark.parametrize(
    ("given", "inner", "batch"),
    [
        *((given, "eager", 2) for given in GIVEN_OUT),
        (Tensor.contiguous, "inductor", 1),
        *(pytest.param(given, "inductor", 1, marks=pytest.mark.thorough) for given in GIVEN_OUT[1:]),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_what_is_given_out_may_be_written(given: Callable[..., Any], kernel: str, inner: str, batch: int) -> None:
    """A product keeps no output for its backward, a kernel does: whoever gets the output may write into it."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out = attend(q @ k.mT * 0.3, v)
        return given(out), out.sum()

    def gradients(by: Callable[..., Any]) -> tuple[Tensor, ...]:
        operands = [torch.randn(batch, 2, 9, 4, generator=torch.Generator().manual_seed(n)) for n in range(3)]
        out, total = by(*(x.requires_grad_() for x in operands))
        with torch.no_grad():
            for part in [out] if isinstance(out, Tensor) else out:
                part.detach().fill_(3.0)
        return torch.autograd.grad(total, operands)

    with collecting() as graphs:
        run = torch.compile(program, backend=backend, options={"inner_backend": inner, "kernels": kernel})
        found = gradients(run)
    assert [site.kernel for graph in graphs for site in graph.sites] == [kernel]
    torch.testing.assert_close(found, gradients(program), rtol=1e-4, atol=1e-5)
