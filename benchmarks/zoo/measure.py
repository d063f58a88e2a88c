"""One case in one mode: its sites, how many are fused, and how far from eager it is."""

from __future__ import annotations

import collections
import contextlib
import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from attn_fuse.backend import attn_fuse
from attn_fuse.report import GraphReport, collecting, headline
from zoo.case import Build, Made
from zoo.sites import Sites

# Beyond NEAR float64 decides: ours may be FACTOR times as far from it as eager.
NEAR = 1e-4
FACTOR = 5.0
# What a gradient is measured by at least, of the largest: NEAR of that is 16 roundings. A key's bias has none, say.
FLOOR = 1e-2
# How often eager is run with its softmax rounded otherwise, and by how much: eight units in the last place of float32.
ROUNDINGS, ROUNDING = 12, 1e-6
CPU = torch.device("cpu")
SOFTMAX = ("softmax", "scaled_dot_product_attention", "multi_head_attention_forward")
_DROPOUTS = (
    "dropout", "attention_dropout", "attn_dropout", "activation_dropout", "attn_pdrop", "drop_rate", "layerdrop",
    "dropout_p", "drop_prob", "hidden_dropout_prob", "p_dropout",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What was measured of a case in a mode.

    sites: in eager. fused: of them. already: fused operators that the program calls itself.
    far: the greatest relative distance from eager, of an output, a gradient, or a buffer or argument written.
    float64: where it is beyond NEAR, our distance from float64, and eager's.
    wrong: it is no rounding error, and compiling without attn_fuse does not make it.
    kinked: the gradients alone are far, and those of eager are where its softmax is rounded otherwise, as behind a ReLU
    that switches.
    failed: the first line of what was raised, or "over N s". broken: eager or Dynamo alone fails.
    left: the reasons of the sites that are not fused, with their number.
    """

    package: str
    case: str
    mode: str
    sites: int = 0
    fused: int = 0
    already: int = 0
    far: float = 0.0
    float64: tuple[float, float] | None = None
    wrong: bool = False
    kinked: bool = False
    failed: str = ""
    broken: str = ""
    seconds: float = 0.0
    left: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What a run gives: outputs, gradients by name, and the buffers and arguments as it leaves them."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    written: dict[str, Tensor]


Compile = Callable[[nn.Module], Callable[..., Any]]


@dataclass(frozen=True)
class Setting:
    """A case in a mode, on a device. kernels: only these, the first that can. to_inputs: gradients of the arguments are
    wanted, too, which some models do not take."""

    build: Build
    mode: str
    device: torch.device = CPU
    kernels: tuple[str, ...] = ()
    to_inputs: bool = False

    def ours(self, inner: str | Callable[..., Any]) -> Compile:
        choice: dict[str, Any] = {"kernels": [*self.kernels]} if self.kernels else {"pick": "fused"}
        return with_backend(attn_fuse, options={"inner_backend": inner, **choice})


def measured(package: str, name: str, setting: Setting) -> Row:
    """How many of the sites of a case are fused, and how far from eager what it gives is."""
    row, setting, wanted = in_eager(package, name, setting)
    if wanted is None:
        return row
    try:
        row, got = counted(row, setting)
        return compared(row, setting, got, wanted)
    except Exception as problem:
        traceback.print_exc()
        try:
            run(setting, by=with_backend("eager"))
        except Exception as also:
            return replace(row, broken=f"Dynamo: {first_line(also)}")
        return replace(row, failed=first_line(problem))


def in_eager(package: str, name: str, setting: Setting) -> tuple[Row, Setting, Result | None]:
    """The sites, whether the arguments may require gradients, and what eager gives; None where it fails."""
    row = Row(package, name, setting.mode)
    setting = replace(setting, to_inputs=setting.mode == "training")
    while True:
        sites = Sites()
        try:
            wanted = run(setting, within=sites)
            return replace(row, sites=len(sites.found), already=sites.fused), setting, wanted
        except Exception as problem:
            if not setting.to_inputs:
                traceback.print_exc()
                return replace(row, broken=f"eager: {first_line(problem)}"), setting, None
            setting = replace(setting, to_inputs=False)


def sites_of(package: str, name: str, setting: Setting) -> Row:
    return in_eager(package, name, setting)[0]


def counted(row: Row, setting: Setting) -> tuple[Row, Result]:
    """`row` with the sites that are fused, and the reasons of the others; and what the fused program gives."""
    sites = Sites()

    def counting(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with sites:
                return graph.forward(*args)

        return call

    start = time.perf_counter()
    with collecting() as graphs:
        got = run(setting, by=setting.ours(counting))
    # A descent ends where a graph does, so that fewer sites may be seen than there are.
    left = len(sites.found)
    calls = max(sites.fused - row.already, 0)
    fused = row.sites - left if left + calls >= row.sites else min(calls, row.sites - left)
    seconds = round(time.perf_counter() - start, 1)
    return replace(row, fused=fused, seconds=seconds, left=reasons(graphs)), got


def compared(row: Row, setting: Setting, got: Result, wanted: Result) -> Row:
    """`row` with how far what is compiled is from eager, dropout aside."""
    if setting.mode == "training":
        wanted = run(setting, dropout=False)
        got = run(setting, by=setting.ours("eager"), dropout=False)
    row = replace(row, far=distance(got, wanted))
    if row.far <= NEAR:
        return row
    if distance(run(setting, dropout=False), wanted) > row.far / 2:
        return replace(row, broken="eager: not the same twice")
    alone = run(setting, by=with_backend("eager"), dropout=False)
    if distance(alone, wanted) >= row.far / 2:
        return row
    # After the others: a model that keeps activations for its copies would hand them float64.
    try:
        exact = run(setting, dropout=False, wide=True)
        row = replace(row, float64=(distance(got, exact), distance(wanted, exact)))
    except Exception as problem:
        print(f"{row.case}, {row.mode}: no float64: {first_line(problem)}")
    if row.float64 is not None and row.float64[0] <= max(FACTOR * row.float64[1], NEAR):
        return row
    # What switches by a rounding moves gradients alone: the outputs of a mistake are far, too.
    kinked = distance(replace(got, gradients={}), replace(wanted, gradients={})) <= NEAR and any(
        distance(run(setting, within=Rounded(seed), dropout=False), wanted) > row.far / 2 for seed in range(ROUNDINGS)
    )
    return replace(row, wrong=not kinked, kinked=kinked)


class Rounded(TorchFunctionMode):
    """Rounds what each softmax gives otherwise, at random, by about ROUNDING of its value."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in SOFTMAX or not isinstance(out, Tensor):
            return out
        return out * (1 + ROUNDING * torch.randn(out.shape, generator=self.random).to(out))


def run(
    setting: Setting,
    by: Compile = lambda model: model,
    within: contextlib.AbstractContextManager[Any] | None = None,
    dropout: bool = True,
    wide: bool = False,
) -> Result:
    """One run of the case made anew, always the same: in float64 if `wide`, with no dropout unless `dropout`."""
    torch._dynamo.reset()
    seed(0)
    training = setting.mode == "training"
    model, args, kwargs = on(setting.device, setting.build())
    model.train(training)
    if not dropout:
        without_dropout(model)
    if wide:
        model, args, kwargs = widened(model, args, kwargs)
    leaves = dict(model.named_parameters())
    if setting.to_inputs:
        leaves |= {f"argument {n}": tensor.requires_grad_() for n, tensor in enumerate(reals((args, kwargs)))}
        # What is computed of a leaf may be written in place, the leaf may not.
        args, kwargs = pytree.tree_map(lambda value: value.clone() if is_real(value) else value, (args, kwargs))
    compiled = by(model)
    seed(1)
    with within or contextlib.nullcontext(), torch.set_grad_enabled(training):
        out = compiled(*args, **kwargs)
        outputs = [tensor.detach().clone() for tensor in reals(out)]
        if training:
            backward(out)
    gradients = {name: tensor.grad for name, tensor in leaves.items() if tensor.grad is not None}
    buffers = {name: buffer for name, buffer in model.named_buffers() if is_real(buffer)}
    inputs = {f"argument {n}": tensor for n, tensor in enumerate(reals((args, kwargs)))}
    return Result(outputs, gradients, {name: tensor.detach() for name, tensor in {**buffers, **inputs}.items()})


def backward(out: Any) -> None:
    """Of a loss in which every element of every output has a weight of its own."""
    losses = [
        (tensor.float() * torch.linspace(0.5, 1.5, tensor.numel(), device=tensor.device).view(tensor.shape)).mean()
        for tensor in reals(out)
        if tensor.requires_grad
    ]
    if losses:
        torch.stack(losses).sum().backward()


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(number)


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in _DROPOUTS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def on(device: torch.device, made: Made) -> Made:
    model, args, kwargs = made
    if device.type == "cpu":
        return made
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    return model.to(device), args, kwargs


def widened(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made:
    args, kwargs = pytree.tree_map(lambda value: value.double() if is_real(value) else value, (args, kwargs))
    return model.double(), args, kwargs


def with_backend(backend: Any, **options: Any) -> Compile:
    return lambda model: torch.compile(model, backend=backend, **options)


def reals(values: Any) -> list[Tensor]:
    if hasattr(values, "to_tuple"):
        values = values.to_tuple()
    return [value for value in pytree.tree_leaves(values) if is_real(value)]


def is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def distance(got: Result, wanted: Result) -> float:
    """The greatest relative distance of a tensor; infinite where one is missing, or no number though it should be."""
    if len(got.outputs) != len(wanted.outputs) or got.gradients.keys() < wanted.gradients.keys():
        return float("inf")
    largest = max((g.norm().item() for g in wanted.gradients.values()), default=0.0)
    return max(
        (
            *(apart(a, b) for a, b in zip(got.outputs, wanted.outputs, strict=True)),
            *(apart(got.gradients[name], g, FLOOR * largest) for name, g in wanted.gradients.items()),
            *(apart(got.written[name], tensor) for name, tensor in wanted.written.items()),
        ),
        default=0.0,
    )


def apart(got: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """Relative to the norm of `wanted`, where it is finite, or to `floor` if that is more."""
    if got.shape != wanted.shape:
        return float("inf")
    finite = wanted.isfinite()
    a, b = got[finite].double(), wanted[finite].double()
    if not a.isfinite().all():
        return float("inf")
    return (a - b).norm().item() / max(b.norm().item(), floor, 1e-12)


def reasons(graphs: Sequence[GraphReport]) -> dict[str, int]:
    done = ("fused", "already fused")
    return dict(collections.Counter(headline(s) for graph in graphs for s in graph.sites if s.status not in done))


def first_line(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:300] if lines else ''}"
