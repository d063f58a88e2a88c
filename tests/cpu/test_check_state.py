"""What the check runs on: copies that share memory as the inputs do, and nothing of the user's changes meanwhile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import attn_fuse
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.emit.call import Call
from attn_fuse.emit.check import disagreement
from attn_fuse.graph.replay import replay
from tests.captured import attention, captured, fused, randoms

# ---- aliases and constants


def test_inputs_that_share_memory_share_it_in_the_check() -> None:
    base = torch.randn(2, 3, 6, 12)
    q, k, v = base.split(4, -1)

    def written(q, k, v, whole):
        whole.mul_(0.5)
        return attention(q, k, v)

    def rewritten(q, k, v, whole):
        out = fused(q * 0.5, k * 0.5, v * 0.5)
        whole.mul_(0.5)
        return out

    def lost(q, k, v, whole):
        out = fused(q, k, v)
        whole.mul_(0.5)
        return out

    inputs = {"q": q, "k": k, "v": v, "whole": base}
    graphs = [captured(f, **{n: t.clone() for n, t in inputs.items()}) for f in (written, rewritten, lost)]
    kept = base.clone()
    assert disagreement(graphs[0], graphs[1], [q, k, v, base]) is None
    assert "output 0" in str(disagreement(graphs[0], graphs[2], [q, k, v, base]))
    assert torch.equal(base, kept)


def test_strides_and_overlap_are_kept() -> None:
    q = torch.randn(6, 2, 3, 4).permute(1, 2, 0, 3)
    k = torch.randn(1, 1, 6, 4).expand(2, 3, 6, 4)
    copies = replay(captured(attention, q=q, k=k, v=q), [q, k, q[..., 1:]]).tensors
    assert copies["input 0 afterwards"].stride() == q.stride() and copies["input 1 afterwards"].stride() == k.stride()
    assert copies["input 2 afterwards"].storage_offset() == 1


def with_constants(writes: bool, detached: bool, model: nn.Module) -> GraphModule:
    """attention(q, q * weight, q), counted in `seen`; both tensors are the graph's own."""
    graph = torch.fx.Graph()
    q, seen, weight = graph.placeholder("q"), graph.get_attr("seen"), graph.get_attr("weight")
    if writes:
        graph.call_method("add_", (seen, 1))
    if detached:
        weight = graph.call_method("detach", (weight,))
    graph.output(graph.call_function(attention, (q, graph.call_function(torch.mul, (q, weight)), q)))
    return GraphModule(model, graph)


def test_tensors_of_the_graph_are_inputs_too() -> None:
    """Not Dynamo's graphs, but those that are made of them may hold tensors."""
    model, q = nn.Module(), torch.randn(2, 3, 6, 4)
    model.register_buffer("seen", torch.zeros(2))
    model.weight = nn.Parameter(torch.ones(4))
    written = with_constants(True, False, model)
    assert disagreement(written, with_constants(True, False, model), [q]) is None
    assert "constant seen afterwards" in str(disagreement(written, with_constants(False, False, model), [q]))
    found = disagreement(written, with_constants(True, True, model), [q.requires_grad_()])
    assert "gradient of constant weight" in str(found)
    assert torch.equal(model.seen, torch.zeros(2)) and model.weight.grad is None


# ---- nothing of the user's changes


def test_nothing_of_the_users_changes() -> None:
    inputs = randoms(2, 3, 6, 4)
    weight = torch.randn(4, 4, requires_grad=True)

    def program(q, k, v, w):
        q.mul_(2)
        with torch.autocast("cpu", torch.bfloat16):
            return F.dropout(attention(q, k, v) @ w, 0.5) + torch.rand(())

    graph = captured(program, **inputs, w=weight)
    values = [*inputs.values(), weight]
    before = [(t.clone(), t._version) for t in values]
    state = torch.random.get_rng_state()
    assert disagreement(graph, graph, values) is None
    assert all(
        torch.equal(t, kept) and t._version == version for t, (kept, version) in zip(values, before, strict=True)
    )
    assert weight.grad is None and torch.equal(state, torch.random.get_rng_state())
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()


def test_a_graph_that_raises_leaves_no_mode_behind() -> None:
    def program(q):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return torch.vmap(torch.linalg.cholesky)(q)

    q = torch.randn(2, 3, 3)
    graph = captured(program, q=q @ q.mT + 3 * torch.eye(3))
    found = disagreement(graph, graph, [-q @ q.mT])
    assert found is not None and "could not be made" in found and "cholesky" in found
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def test_a_forward_derivative_that_raises_leaves_no_level_behind() -> None:
    def program(q):
        return torch.func.jvp(torch.linalg.cholesky, (q,), (q,))[1]

    q = torch.randn(3, 3)
    graph = captured(program, q=q @ q.mT + 3 * torch.eye(3))
    assert "could not be made" in str(disagreement(graph, graph, [-q @ q.mT]))
    assert disagreement(graph, graph, [q @ q.mT + 3 * torch.eye(3)]) is None


# ---- within the backend


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, again: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        return attention(q, k, v).transpose(1, 2).flatten(2) + again


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("scale", lambda call, scale: 0.3, "output 0 is"),
        ("value", lambda call, value: call.node("detach", value), "gradient of input"),
    ],
)
def test_it_refuses_what_is_wrong(name, wrong, said, monkeypatch) -> None:
    right = getattr(Call, name)
    monkeypatch.setattr(Call, name, lambda self: wrong(self, right(self)))
    model, x = Stack(), torch.randn(2, 9, 16)
    run = torch.compile(model, backend=backend, options={"inner_backend": "aot_eager", "pick": "fused", "check": True})
    torch.testing.assert_close(run(x, x), model(x, x))
    (site,) = attn_fuse.reports()[-1].sites
    assert not site.fused and f"the check failed: the rewritten {said}" in site.blocker.reason


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_check_within_a_checkpoint(use_reentrant) -> None:
    """What autograd saves in the check is none of what the checkpoint counts."""
    model, x, again = Stack(), torch.randn(2, 9, 16, requires_grad=True), torch.randn(2, 9, 16)
    options = {"inner_backend": "aot_eager", "pick": "fused", "check": True}
    run = torch.compile(model, backend=backend, options=options)
    for _ in range(2):
        checkpoint(run, x, again, use_reentrant=use_reentrant).square().sum().backward()
    assert attn_fuse.reports()[-1].sites[0].fused
    wanted = torch.autograd.grad(model(x, again).square().sum(), x)[0]
    torch.testing.assert_close(x.grad, 2 * wanted, rtol=1e-4, atol=1e-4)


def test_constants_are_the_graphs_own_unless_they_are_written() -> None:
    model, q = nn.Module(), torch.randn(2, 3, 6, 4)
    model.register_buffer("seen", torch.zeros(2))
    model.register_buffer("other", torch.ones(4))
    model.weight = nn.Parameter(torch.ones(4))
    written, same, writes = (with_constants(False, False, model) for _ in range(3))
    for graph, name in ((same, None), (writes, "mul_")):
        first = next(n for n in graph.graph.nodes if n.op != "placeholder")
        graph.register_buffer("other", model.other)
        with graph.graph.inserting_before(first):
            other = graph.graph.get_attr("other")
            if name is not None:
                graph.graph.call_method(name, (other, 2))
        graph.recompile()
    assert disagreement(written, same, [q]) is None
    assert "constant other is written" in str(disagreement(written, writes, [q]))
