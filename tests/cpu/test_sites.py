"""Programs in which one site, one tensor or one number is easily taken for another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attn_fuse import backend
from attn_fuse.picker.pick import pick
from attn_fuse.report import collecting
from tests.harness import assert_fused, assert_zeros_are_kept, check, compiled, every_day, tensors

SHAPE = (2, 3, 9, 16)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.25


class Hiding(nn.Module):
    """Two layers written alike: one adds a learned bias, the other an argument, which may hide keys."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.bias, self.first = nn.Parameter(torch.randn(3, 8, 8)), first

    def layer(self, x: Tensor, bias: Tensor) -> Tensor:
        i = torch.arange(8)
        return (scores(x, x.sin()) + bias).masked_fill(i[:, None] < i, -1e9).softmax(-1) @ x.cos()

    def forward(self, x: Tensor, y: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        learned, given = (x, self.bias), (y, padding)
        one, other = (learned, given) if self.first else (given, learned)
        return self.layer(*one), self.layer(*other)


@pytest.mark.parametrize("grad", every_day([False, True], True))
@pytest.mark.parametrize("first", [False, True])
def test_a_learned_bias_and_one_that_hides_keys(first: bool, grad: bool) -> None:
    padding = torch.zeros(3, 8, 8)
    padding[:, :, :4] = -1e12
    with torch.set_grad_enabled(grad):
        args = torch.randn(2, 3, 8, 16), torch.randn(2, 3, 8, 16), padding
        # Unchecked: the check would leave as written what is wrong.
        check(Hiding(first), *args, backward=grad, check=False)


PATHS: dict[str, Callable[..., Tensor]] = {
    "key detached": lambda q, k, v, b: (scores(q, k.detach()) + b).softmax(-1) @ v,
    "value detached": lambda q, k, v, b: (scores(q, k) + b).softmax(-1) @ v.detach(),
    "bias detached": lambda q, k, v, b: (scores(q, k) + b.detach()).softmax(-1) @ v,
    "scores detached": lambda q, k, v, b: (5 * torch.tanh(scores(q, k).detach() + b)).softmax(-1) @ v,
    "bias compared": lambda q, k, v, b: scores(q, k).masked_fill(b > 0.5, -1e9).softmax(-1) @ v,
    "key also compared": lambda q, k, v, b: (
        (scores(q, k).masked_fill(k[..., None, :, 0] > 1, -1e9) + b).softmax(-1) @ v
    ),
    "nothing detached": lambda q, k, v, b: (scores(q, k) + b).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", every_day(PATHS, "bias detached", "key also compared"))
@pytest.mark.parametrize(
    "kernels", [["chunked"], pytest.param(None, marks=pytest.mark.thorough)], ids=["chunked", "any"]
)
def test_what_has_no_gradient_in_the_program_gets_none(name: str, kernels: Any) -> None:
    """Whatever requires a gradient, and where the same program stands in the graph before, without one."""
    values = [torch.randn(SHAPE), torch.randn(SHAPE), torch.randn(SHAPE), torch.randn(2, 3, 9, 9)]
    options = {"pick": "fused", "inner_backend": "eager"} | ({"kernels": kernels} if kernels else {})

    def twice(*args: Tensor) -> tuple[Tensor, Tensor]:
        return PATHS[name](*args[:4]), PATHS[name](*args[4:])

    for wanting in ("q", "k", "v", "b", "qk", "vb", "qkvb"):
        torch._dynamo.reset()
        run = torch.compile(twice, backend="attn_fuse", options=options)
        results = []
        for by in (twice, run):
            args = [x.clone().requires_grad_(letter in wanting) for x, letter in zip(values, "qkvb", strict=True)]
            before, out = by(*(x.clone() for x in values), *args)
            assert not before.requires_grad
            if out.requires_grad:
                out.pow(2).sum().backward()
            results.append([out, *(x.grad for x in args)])
        for one, other in zip(*results, strict=True):
            assert (one is None) == (other is None), wanting
            if one is not None:
                assert one.requires_grad == other.requires_grad
                torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("large", [1e4, 1e8, 1e30])
def test_what_only_some_queries_see_stays_out_of_the_others(large: float) -> None:
    """A value as large as unset memory may hold, at a key that is hidden from all queries but the last."""
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(scores(q, k)).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    q, k, v = (x.requires_grad_() for x in tensors(*SHAPE))
    with torch.no_grad():
        v[:, :, -1] = large
    found = compiled(program, kernels=["chunked"], check=False)(q, k, v)
    expected = program(q.double(), k.double(), v.double())
    torch.testing.assert_close(found[:, :, :-1], expected[:, :, :-1].float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", every_day([torch.float32, torch.bfloat16, torch.float16], torch.bfloat16))
def test_a_learned_table_under_a_softmax_in_float64(dtype: torch.dtype) -> None:
    at = torch.arange(9)

    def program(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        bias = nn.functional.embedding((at[:, None] - at).clamp(-4, 4) + 4, table).permute(2, 0, 1)
        return (scores(q, k) + bias).softmax(-1, dtype=torch.float64).to(v.dtype) @ v

    assert_fused(program, *tensors(*SHAPE, dtype=dtype), torch.randn(9, 3, dtype=dtype))


UNREAD: dict[str, Callable[..., Tensor]] = {
    "times nothing": lambda q, k, v, b: torch.baddbmm(b, q, k.mT, beta=0, alpha=0.3).softmax(-1) @ v,
    "never chosen": lambda q, k, v, b: torch.where(torch.ones(9, 9, dtype=torch.bool), scores(q, k), b).softmax(-1) @ v,
    "cut off": lambda q, k, v, b: (
        (scores(q, k) + torch.cat([torch.zeros(9, 9).expand(3, 9, 9), b], -1)[..., :9]).softmax(-1) @ v
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_zeros_are_a_gradient(name: str) -> None:
    """An optimizer with weight decay moves what has a gradient of zeros, and leaves what has none."""
    operands = [torch.randn(3, 9, n, requires_grad=True) for n in (16, 16, 16, 9)]
    assert_zeros_are_kept(UNREAD[name], operands)


@pytest.mark.parametrize(
    "shifted",
    [
        lambda s: s + 0.3 + torch.arange(9) % 3,
        lambda s: (s + torch.arange(9)) * 0.3,
        lambda s: (s + torch.arange(9)) / 3,
        lambda s: s - torch.where(torch.arange(9) > 2.5, torch.arange(9), 0.3) / 7,
    ],
    ids=["added", "multiplied", "divided", "chosen"],
)
def test_whole_numbers_beside_fractions_of_float64(shifted: Callable[[Tensor], Tensor]) -> None:
    """torch adds a fraction to whole numbers in its default dtype, which is narrower than these scores."""
    assert_fused(lambda q, k, v: shifted(scores(q, k)).softmax(-1) @ v, *tensors(*SHAPE, dtype=torch.float64))


def test_a_number_made_a_tensor_under_a_vmap() -> None:
    seen, at = torch.rand(6, 6) > 0.3, torch.arange(6)

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.where(seen | (at[:, None] == at), q @ k.mT, torch.tensor(-math.inf))
        # No scale, no mask, no bias: read as one function.
        return (s * (at + 1)[:, None].to(s.dtype)).tanh().softmax(-1) @ v

    assert_fused(torch.vmap(one), *tensors(3, 2, 6, 4))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.seen.append(str(operation))
        return operation(*args, **(kwargs or {}))


def test_a_parameter_as_a_bias_without_gradients_runs_on_the_kernel() -> None:
    """A view of a parameter requires a gradient, also where there is none; with a mask that does, torch takes none."""
    pool, x = torch.nn.Linear(8, 1), torch.randn(2, 12, 8)

    def program(x):
        return torch.einsum("bn,bnd->bd", pool(x).squeeze(-1).softmax(-1), x)

    operations = Operations()

    def counting(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            with operations:
                return graph.forward(*args)

        return call

    with torch.no_grad():
        compiled(program, counting)(x)
    assert any("flash_attention_for_cpu" in name for name in operations.seen), operations.seen


LIBRARY = torch.library.Library("attn_fuse_sites", "DEF")
for _name in ("dropout(Tensor x, float p) -> Tensor", "detach(Tensor x) -> Tensor", "softmax(Tensor x) -> Tensor"):
    LIBRARY.define(_name)
for _key in ("CPU", "Meta"):
    LIBRARY.impl("dropout", lambda x, p: x * (1 - p), _key)
    LIBRARY.impl("detach", lambda x: x * 2, _key)
    LIBRARY.impl("softmax", lambda x: x.sigmoid(), _key)


@pytest.mark.parametrize("name", ["dropout", "detach", "softmax"])
def test_an_operator_named_as_one_of_torch_is_another(name: str) -> None:
    own = getattr(torch.ops.attn_fuse_sites, name)

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT * 0.25
        weights = {
            "dropout": lambda: own(s.softmax(-1), 0.5),
            "detach": lambda: own(s).softmax(-1),
            "softmax": lambda: own(s),
        }[name]()
        return weights @ v

    q, k, v = tensors(2, 3, 9, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(program, check=False)(q, k, v), program(q, k, v))


def test_layers_that_are_alike_share_one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(backend, "pick", lambda *args: chosen.append(args) or pick(*args))

    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        return [scores(z, z).softmax(-1) @ z for z in (x, x.sin(), y, x.cos())]

    with collecting() as reports:
        torch.compile(program, backend=backend.analyze_only)(torch.randn(SHAPE), torch.randn(2, 3, 7, 16))
    lengths = [site.attention["kv_len"] for site in reports[0].sites]
    assert lengths == ["9", "9", "7", "9"] and len(chosen) == 2
