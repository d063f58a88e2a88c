"""A mask buffer edited after compiling: the answer follows the buffer, without a restart."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import return_and_correct_aliasing

import attn_fuse
from attn_fuse.backend import attn_fuse as backend
from tests.harness import every_day

T = 12


class Causal(nn.Module):
    """nanoGPT's attention, one projection, no dropout."""

    def __init__(self, shared: torch.Tensor | None = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        triangle = torch.tril(torch.ones(T, T)).view(1, 1, T, T)
        self.register_buffer("bias", triangle if shared is None else shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 4, 8).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        return (F.softmax(att, dim=-1) @ v).transpose(1, 2).contiguous().view(batch, length, width)


def compiled(model: nn.Module, **options: object) -> nn.Module:
    return torch.compile(model, backend=backend, options={"inner_backend": "eager", "pick": "fused"} | options)


def same(model: nn.Module, fused: nn.Module, x: torch.Tensor) -> bool:
    return torch.allclose(model(x), fused(x), atol=1e-5)


def visible_diagonal_and_next() -> torch.Tensor:
    return torch.tril(torch.ones(T, T), 1).view(1, 1, T, T)


def in_place(model: Causal) -> None:
    model.bias[0, 0, 0, 5] = 1


def under_no_grad(model: Causal) -> None:
    with torch.no_grad():
        model.bias.fill_(1)


def under_inference_mode(model: Causal) -> None:
    with torch.inference_mode():
        model.bias.fill_(1)


def data_replaced(model: Causal) -> None:
    model.bias.data = visible_diagonal_and_next()


def attribute_replaced(model: Causal) -> None:
    model.bias = visible_diagonal_and_next()


def state_loaded(model: Causal) -> None:
    model.load_state_dict(model.state_dict() | {"bias": visible_diagonal_and_next()})


def state_assigned(model: Causal) -> None:
    model.load_state_dict(model.state_dict() | {"bias": visible_diagonal_and_next()}, assign=True)


EDITS = [
    in_place, under_no_grad, under_inference_mode, data_replaced, attribute_replaced, state_loaded, state_assigned
]  # fmt: skip


@pytest.mark.parametrize(
    "edit", every_day(EDITS, in_place, data_replaced, state_assigned), ids=lambda edit: edit.__name__
)
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_the_answer_follows_an_edit(edit, dynamic, caplog) -> None:
    model, x = Causal(), torch.randn(2, T, 32)
    fused = torch.compile(model, backend=backend, dynamic=dynamic, options={"inner_backend": "eager", "pick": "fused"})
    before = fused(x)
    assert attn_fuse.reports()[-1].sites[0].fused
    assert same(model, fused, x)
    edit(model)
    assert not torch.allclose(before, model(x), atol=1e-3)
    assert same(model, fused, x)
    assert same(model, fused, x)


def test_an_edit_is_said_once_and_an_edit_back_fuses_again(caplog) -> None:
    model, x = Causal(), torch.randn(2, T, 32)
    fused = compiled(model)
    fused(x)
    triangle = model.bias.clone()
    with torch.no_grad():
        model.bias.fill_(1)
    assert same(model, fused, x) and same(model, fused, x)
    assert caplog.text.count("running as written") == 1
    with torch.no_grad():
        model.bias.copy_(triangle)
    assert same(model, fused, x)


def test_the_same_contents_elsewhere_stay_fused(caplog) -> None:
    model, x = Causal(), torch.randn(2, T, 32)
    fused = compiled(model)
    fused(x)
    model.bias.data = model.bias.data.clone()
    assert same(model, fused, x)
    assert "running as written" not in caplog.text


def test_two_modules_with_one_buffer() -> None:
    shared = torch.tril(torch.ones(T, T)).view(1, 1, T, T)
    model, x = nn.Sequential(Causal(shared), Causal(shared)), torch.randn(2, T, 32)
    fused = compiled(model)
    assert same(model, fused, x)
    assert sum(site.fused for site in attn_fuse.reports()[-1].sites) == 2
    with torch.no_grad():
        shared[..., 0, 3] = 1
    assert same(model, fused, x)
    model[1].bias = torch.ones(1, 1, T, T)
    assert same(model, fused, x)


class EditsItsMask(Causal):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bias[:, :, 0] = 1 - self.bias[:, :, 0]
        return super().forward(x)


class EditsItsMaskAfterwards(Causal):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.bias[:, :, 0, 1:4] += 1
        return out


@pytest.mark.parametrize("kind", [EditsItsMask, EditsItsMaskAfterwards])
@pytest.mark.parametrize("inner", every_day(["eager", "aot_eager", "inductor"], "aot_eager"))
def test_a_buffer_changed_inside_the_graph(kind, inner) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, T, 32)
    twin = kind()
    twin.load_state_dict(model.state_dict())
    fused = compiled(model, inner_backend=inner)
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(fused(x), twin(x), atol=1e-5, equal_nan=True)


def test_a_buffer_made_under_inference_mode_is_not_relied_on() -> None:
    with torch.inference_mode():
        model = Causal()
    x = torch.randn(2, T, 32)
    fused = compiled(model)
    with torch.inference_mode():
        assert same(model, fused, x)
        (site,) = attn_fuse.reports()[-1].sites
        assert site.fused and "causal" not in site.attention["mask"]
        model.bias[0, 0, 0, 5] = 1
        assert same(model, fused, x)


def test_causal_but_for_one_element_is_not_causal() -> None:
    model, x = Causal(), torch.randn(2, T, 32)
    model.bias[0, 0, 3, 7] = 1
    fused = compiled(model)
    assert same(model, fused, x)
    (site,) = attn_fuse.reports()[-1].sites
    assert site.attention["mask"] == "a mask kept as a tensor"


def test_a_mask_given_as_an_argument_is_not_a_constant() -> None:
    def attention(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (q @ q.mT).masked_fill(mask == 0, float("-inf")).softmax(-1) @ q

    fused = torch.compile(attention, backend=backend, options={"inner_backend": "eager", "pick": "fused"})
    q = torch.randn(2, 4, T, 8)
    for mask in (torch.tril(torch.ones(T, T)), torch.triu(torch.ones(T, T))):
        assert torch.allclose(fused(q, mask), attention(q, mask), atol=1e-5)
    assert "causal" not in attn_fuse.reports()[-1].sites[0].attention["mask"]


def test_training_follows_an_edit() -> None:
    model, x = Causal(), torch.randn(2, T, 32)
    fused = compiled(model)
    fused(x).sum().backward()
    with torch.no_grad():
        model.bias.fill_(1)
    model.zero_grad()
    fused(x).square().sum().backward()
    got = model.qkv.weight.grad.clone()
    model.zero_grad()
    model(x).square().sum().backward()
    assert torch.allclose(got, model.qkv.weight.grad, atol=1e-4)


# ---- no references


def weak_references(tensors: list[torch.Tensor]) -> list[int]:
    gc.collect()
    return [weakref.getweakrefcount(tensor) for tensor in tensors]


def referring(tensors: list[torch.Tensor]) -> list[int]:
    gc.collect()
    return [len(gc.get_referrers(tensor)) for tensor in tensors]


# By its name: Dynamo then drops its own weak references.
BY_NAME: dict[str, Any] = {"backend": "attn_fuse", "options": {"inner_backend": "eager", "pick": "fused"}}


@pytest.mark.parametrize(
    ("checked", "edited"),
    [
        (True, True),
        *(pytest.param(*x, marks=pytest.mark.thorough) for x in ((False, False), (False, True), (True, False))),
    ],
)
def test_no_reference_to_a_tensor_of_the_users_is_kept(edited, checked) -> None:
    model, x = Causal(), torch.randn(2, T, 32)
    tensors = [*model.parameters(), *model.buffers(), x]
    before = referring(tensors)
    fused = torch.compile(model, backend="attn_fuse", options={"inner_backend": "eager", "check": checked})
    fused(x).sum().backward()
    if edited:
        model.bias.fill_(1)
        fused(x).sum().backward()
    assert weak_references(tensors) == [0] * len(tensors)
    assert referring(tensors) == before


def test_no_reference_is_kept_to_what_a_graph_with_a_break_returns() -> None:
    returned = []

    def attention(x: torch.Tensor) -> torch.Tensor:
        weights = (x @ x.mT).softmax(-1)
        returned.append(weights)
        torch._dynamo.graph_break()
        return weights @ x

    compiled(attention)(torch.randn(2, 4, T, 8))
    assert returned and weak_references(returned) == [0]


@pytest.mark.parametrize("dynamic", every_day([False, True], False))
def test_swapping_the_mask_is_seen(dynamic) -> None:
    model, x = Causal(), torch.randn(2, T, 32)
    fused = torch.compile(model, **BY_NAME, dynamic=dynamic)
    assert same(model, fused, x)
    before = fused(x)
    torch.utils.swap_tensors(model.bias, visible_diagonal_and_next())
    assert not torch.allclose(before, model(x), atol=1e-3)
    assert same(model, fused, x)


def test_swapping_in_another_alias_of_the_memory_at_the_same_version_is_seen() -> None:
    model, x = Causal(), torch.randn(2, T, 32)
    model.bias.mul_(1)
    fused = torch.compile(model, **BY_NAME)
    before = fused(x)
    alias = model.bias.data
    alias[0, 0, :, :] = visible_diagonal_and_next()
    assert alias._version == model.bias._version and alias.data_ptr() == model.bias.data_ptr()
    torch.utils.swap_tensors(model.bias, alias)
    assert not torch.allclose(before, model(x), atol=1e-3)
    assert same(model, fused, x)


def test_a_state_dict_is_loaded_by_swapping() -> None:
    model, x = Causal(), torch.randn(2, T, 32)
    fused = torch.compile(model, **BY_NAME)
    fused(x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(Causal().state_dict() | {"bias": visible_diagonal_and_next()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert same(model, fused, x)


def test_the_memory_of_a_mask_that_was_replaced_is_freed() -> None:
    model, x = Causal(), torch.randn(2, T, 32)
    fused = compiled(model)
    fused(x)
    memory = StorageWeakRef(model.bias.untyped_storage())
    model.bias = None
    gc.collect()
    assert memory.expired()


class Int8(torch.Tensor):
    """A weight in int8 and its scale, as quantisers make it."""

    @staticmethod
    def __new__(cls, q: torch.Tensor, s: torch.Tensor) -> Int8:
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=s.dtype, device=q.device)

    def __init__(self, q: torch.Tensor, s: torch.Tensor) -> None:
        self.q, self.s = q, s

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q", "s"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _, size, stride) -> Int8:
        return cls(inner["q"], inner["s"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, f, types, args, kwargs=None):
        if f in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            made = cls(args[0].q.clone(), args[0].s.clone())
            return return_and_correct_aliasing(f, args, kwargs or {}, made)
        return f(*[a.q * a.s if isinstance(a, cls) else a for a in args], **(kwargs or {}))


def test_a_module_whose_weights_are_of_a_subclass_is_moved() -> None:
    model, x = Causal(), torch.randn(2, T, 32)
    weight = Int8(torch.randint(-99, 99, (96, 32), dtype=torch.int8), torch.full((96, 1), 0.002))
    model.qkv.weight = nn.Parameter(weight, requires_grad=False)
    fused = torch.compile(model, **BY_NAME)
    with torch.no_grad():
        fused(x)
        assert attn_fuse.reports()[-1].sites[0].fused
        model._apply(torch.clone)
        assert same(model, fused, x)
