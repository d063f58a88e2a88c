"""Replay: run a graph once on copies of its inputs, for its outputs, its writes and its gradients.

Dropout is off, so that two graphs that draw it differently can be compared; every other draw starts from the caller's
random state. The user's tensors, gradients, random state and modes stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Argument, Target
from torch.utils import _pytree as pytree

from attn_fuse.graph.names import INLINE_SUBGRAPHS
from attn_fuse.torch_internals import (
    FakeTensor,
    apart_from_dynamo,
    functorch_levels_kept,
    saved_tensors_hooks_aside,
    storage_of,
)

# By the path of an operation in the graph: which of its results share memory with its inputs.
Aliases = dict[str, list[bool]]


class NotWide(Exception):
    """In float64 the program would be another: it reads bits, or would copy where it shares memory, say."""


@dataclass(frozen=True)
class Played:
    """The results of one run.

    tensors: by name, the outputs, then each input and constant as it is afterwards.
    facts: what must agree exactly: outputs that are no tensors; the dtype, device, shape, strides, requires_grad and
        shared memory of tensors.
    gradients: of each input and constant that requires one, for a fixed weighting of outputs and written inputs; None
        where the backward raises.
    constants: by name, the tensors that the graph holds itself, and whether it writes each.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    gradients: dict[str, Tensor] | None
    constants: dict[str, bool]


def replay(graph: GraphModule, inputs: Sequence[Any], aliases: Aliases, wide: bool = False) -> Played:
    """The results of `graph` on copies of `inputs`, in the caller's grad mode and autocast.

    aliases: filled in by a run in the program's own dtypes, read by a `wide` run.
    wide: run in float64 throughout, casts included. Raises NotWide, and whatever the graph raises.
    """
    try:
        return _replay(graph, inputs, aliases, wide, contextlib.nullcontext())
    except _NoBackward:
        # A write after the save breaks eager's backward; a compiled graph keeps the saved values, so we copy them.
        kept = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
        with contextlib.suppress(Exception):  # torch.func takes no such hooks
            return _replay(graph, inputs, aliases, wide, kept)
    return _replay(graph, inputs, aliases, wide, contextlib.nullcontext(), backward=False)


class _NoBackward(Exception):
    pass


def _replay(
    graph: GraphModule,
    inputs: Sequence[Any],
    aliases: Aliases,
    wide: bool,
    saving: contextlib.AbstractContextManager[Any],
    backward: bool = True,
) -> Played:
    attributes = list(_attributes(graph))
    names = [*(f"input {n}" for n in range(len(inputs))), *(f"constant {name}" for name, _ in attributes)]
    originals = [*map(_plain, inputs), *(t for _, t in attributes)]
    with _as_it_was(wide, originals):
        copies, leaves = _copied(originals, wide)
        before = [c._version if _counts(c) else 0 for c in copies]
        given = {id(old): new for old, new in zip(originals, copies, strict=True) if isinstance(old, Tensor)}
        with saving:
            found = _Replay(graph, given, aliases, wide).run(*copies[: len(inputs)])
        outputs = {f"output {n}": out for n, out in enumerate(pytree.tree_leaves(found))}
        afterwards = {n: c for n, c in zip(names, copies, strict=True) if isinstance(c, Tensor)}
        written = [c for c, v in zip(copies, before, strict=True) if _counts(c) and c._version != v and not c.is_leaf]
        held = {n: _counts(c) and c._version != v for n, c, v in zip(names, copies, before, strict=True)}
        wanted = {n: leaf for n, leaf in zip(names, leaves, strict=True) if leaf is not None}
        gradients = gradients_of([*outputs.values(), *written], wanted) if backward else None
    tensors = {n: t for n, t in outputs.items() if isinstance(t, Tensor)} | {
        f"{n} afterwards": t for n, t in afterwards.items()
    }
    facts = {n: o for n, o in outputs.items() if not isinstance(o, Tensor)} | _facts(tensors)
    constants = {n: held[n] for n in names[len(inputs) :]}
    return Played({n: t.detach() for n, t in tensors.items()}, facts, gradients, constants)


def gradients_of(results: Sequence[Any], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of `wanted` by name, for a fixed weighting of `results`: zeros where a result depends on none.

    Raises an exception where the results have no backward.
    """
    total = torch.zeros((), dtype=torch.float64)
    with torch.enable_grad():
        for out in results:
            if isinstance(out, Tensor) and out.requires_grad:
                real = torch.view_as_real(out) if out.is_complex() else out
                # Constant or smooth weights would hide errors that cancel in the sum.
                weights = torch.arange(real.numel(), dtype=torch.float64, device=out.device).mul_(12.9898).cos_()
                total = total + (real.double() * weights.view(real.shape)).sum().cpu()
    if not total.requires_grad or not wanted:
        found: Sequence[Tensor | None] = [None] * len(wanted)
    else:
        try:
            found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
        except RuntimeError as problem:
            raise _NoBackward from problem
    pairs = zip(wanted.items(), found, strict=True)
    return {f"gradient of {n}": torch.zeros_like(t) if g is None else g for (n, t), g in pairs}


def _facts(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    owner: dict[int, tuple[str, Tensor]] = {}
    for name, t in reversed(list(tensors.items())):
        if name.startswith("constant"):
            # A graph may hold any constants: they count only where a result shares their memory.
            if _counts(t):
                owner.setdefault(storage_of(t), (name, t))
            continue
        facts[f"the dtype, device and shape of {name}"] = (t.dtype, t.device, tuple(t.shape))
        facts[f"whether {name} requires a gradient"] = t.requires_grad
        if not _counts(t):
            continue
        steps = tuple(stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1)
        facts[f"the strides of {name}"] = steps if t.numel() else ()
        other, first = owner.setdefault(storage_of(t), (name, t))
        shared = None if other == name else (other, t.storage_offset() - first.storage_offset())
        facts[f"what {name} shares its memory with"] = shared
    return facts


# ---- the run


class _Replay(Interpreter):
    def __init__(self, module: Any, given: Mapping[int, Tensor], aliases: Aliases, wide: bool, path: str = "") -> None:
        super().__init__(module)
        self._given, self._aliases, self._wide, self._path = given, aliases, wide, path
        self._entered: list[tuple[Any, Any]] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run(*args, **kwargs)
        except BaseException:
            for enter, mode in reversed(self._entered):
                leave = getattr(sys.modules[enter.__module__], enter.__name__.replace("_enter", "_exit"))
                leave(level=mode) if "level" in enter.__name__ else leave(mode)
            raise

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op not in ("call_function", "call_method"):
            return result
        read = {storage_of(t) for a in n.all_input_nodes for t in _tensors(self.env[a])}
        leaves, spec = pytree.tree_flatten(result)
        shared = [_counts(leaf) and storage_of(leaf) in read for leaf in leaves]
        where = f"{self._path}/{n.name}"
        if not self._wide:
            self._aliases[where] = shared
            return result
        for place, (now, as_written) in enumerate(zip(shared, self._aliases[where], strict=True)):
            if as_written and not now:
                raise NotWide(f"{n.name} gives a copy")
            if now and not as_written:
                leaves[place] = leaves[place].clone()
        return pytree.tree_unflatten(leaves, spec)

    def get_attr(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, GraphModule):
            return _Body(value, functools.partial(self._inside, value, str(target)))
        return self._given.get(id(value), value)

    def call_module(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        module: Any = self.fetch_attr(str(target))
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            return args[0] if module.inplace or not module.training else _another(args[0])
        held = {n: self._given[id(t)] for n, t in _held(module)}
        return torch.func.functional_call(module, held, args, kwargs)

    def call_method(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        if self._wide:
            target = "double" if target in ("float", "half", "bfloat16") else target
            args, kwargs = _wide_arguments(str(target), args, kwargs)
        return super().call_method(target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(target, "__name__", "")
        if name in INLINE_SUBGRAPHS:
            body = next(a for a in args if isinstance(a, _Body))
            return body(*(a for a in args if a is not body and not isinstance(a, str)))
        if self._wide and "autocast" not in name:
            args, kwargs = _wide_arguments(name, args, kwargs)
        if "dropout" in name and "forward" not in name and (dropped := _undropped(name, args, kwargs)) is not None:
            return dropped[0]
        args, kwargs = _without_dropout(target, args, kwargs)
        with torch.random.fork_rng(_cuda(args)) if _is_seed(args) else contextlib.nullcontext():
            result = super().call_function(target, args, kwargs)
        if name.startswith("_enter"):
            self._entered.append((target, result))
        elif name.startswith("_exit") and self._entered:
            self._entered.pop()
        return result

    def _inside(self, body: GraphModule, name: str, *args: Any) -> Any:
        return _Replay(body, self._given, self._aliases, self._wide, f"{self._path}/{name}").run(*args)


class _Body(torch.nn.Module):
    """The body of a higher-order operator, run as the graph around it is."""

    def __init__(self, body: GraphModule, run: Callable[..., Any]) -> None:
        super().__init__()
        self.meta, self._run = body.meta, run

    def forward(self, *args: Any) -> Any:
        return self._run(*args)


def _undropped(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """A list of the result of a dropout call with dropout off; None where the call drops nothing as written."""
    named = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | dict(kwargs)
    drops = named.get("training", named.get("train", "alpha" not in name))
    if not drops or float(named.get("p", 0.5)) == 0:
        return None
    x = named["input"]
    if named.get("inplace", False) or name.endswith("dropout_"):
        return [x]
    return [(_another(x), torch.ones_like(x, dtype=torch.bool)) if "native" in name else _another(x)]


def _another(x: Tensor) -> Tensor:
    """`x` in new memory, as dropout gives it."""
    return x * 1


def _without_dropout(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    if "dropout_p" in kwargs:
        return args, {**kwargs, "dropout_p": 0.0}
    names = _parameters(target)
    place = names.index("dropout_p") if "dropout_p" in names else len(args)
    return (*args[:place], 0.0, *args[place + 1 :]) if place < len(args) else args, kwargs


@functools.cache
def _parameters(target: Any) -> tuple[str, ...]:
    if target is torch.nn.functional.scaled_dot_product_attention:
        return ("query", "key", "value", "attn_mask", "dropout_p")
    target = getattr(target, "_opoverload", target)
    if isinstance(target, torch._ops.OpOverload):
        return tuple(a.name for a in target._schema.arguments)
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return ()


def _is_seed(args: tuple[Any, ...]) -> bool:
    """Whether the call draws a kernel's seed, below 2**62: the program's later draws must not depend on it."""
    return bool(args) and isinstance(args[0], int) and args[0] == 2**62


_WIDER = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex32: torch.complex128, torch.complex64: torch.complex128,
}  # fmt: skip


def _wide_arguments(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if name == "view" and any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
        raise NotWide("the bits of a number are read")
    widened: tuple[Any, Any] = pytree.tree_map(
        lambda a: _WIDER.get(a, a) if isinstance(a, torch.dtype) else a, (args, kwargs)
    )
    return widened


# ---- the state around it


@contextlib.contextmanager
def _as_it_was(wide: bool, values: Sequence[Any]) -> Iterator[None]:
    dtype = torch.get_default_dtype()
    with (
        torch.random.fork_rng(_cuda(values)),
        apart_from_dynamo(),
        saved_tensors_hooks_aside(),
        functorch_levels_kept(),
        torch.set_grad_enabled(torch.is_grad_enabled()),
    ):
        if wide:
            torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _cuda(values: Sequence[Any]) -> list[int]:
    found = {t.device for t in _tensors(values) if t.device.type == "cuda"}
    # Saving the random state must not be what initialises CUDA.
    return sorted(d.index for d in found) or (
        [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    )


def _attributes(module: GraphModule, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors that the graph and its subgraphs hold themselves, each under its path."""
    seen: set[str] = set()
    for node in module.graph.nodes:
        if node.op not in ("get_attr", "call_module") or node.target in seen:
            continue
        seen.add(node.target)
        value = functools.reduce(getattr, str(node.target).split("."), module)
        if isinstance(value, Tensor):
            yield f"{path}{node.target}", value
        elif isinstance(value, GraphModule) and node.op == "get_attr":
            yield from _attributes(value, f"{path}{node.target}.")
        elif isinstance(value, torch.nn.Module):
            yield from ((f"{path}{node.target}.{n}", t) for n, t in _held(value))


def _held(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _copied(values: Sequence[Any], wide: bool) -> tuple[list[Any], list[Tensor | None]]:
    """Copies with the strides and shared memory of `values`, and the leaf that gets each copy's gradient, if any."""
    memory: dict[int, list[Tensor]] = {}
    for value in values:
        if _counts(value):
            memory.setdefault(storage_of(value), []).append(value)
    copies: list[Any] = []
    leaves: list[Tensor | None] = []
    made: dict[int, Tensor] = {}
    parts = {key: _Memory(group, wide) for key, group in memory.items()}
    for value in values:
        if not isinstance(value, Tensor):
            copies.append(value)
            leaves.append(None)
            continue
        if wide and not _counts(value):
            raise NotWide(f"a {type(value).__name__} stays as it is")
        first = id(value) not in made
        copy, leaf = made.get(id(value)), None
        if copy is None:
            copy = parts[storage_of(value)].like(value) if _counts(value) else value.detach().clone()
            if value.requires_grad:
                copy, leaf = _requiring(copy, value.is_leaf)
            made[id(value)] = copy
        copies.append(copy)
        leaves.append(leaf if first else None)
    return copies, leaves


def _requiring(copy: Tensor, is_leaf: bool) -> tuple[Tensor, Tensor]:
    if is_leaf or any(size > 1 and step == 0 for size, step in zip(copy.shape, copy.stride(), strict=True)):
        return (copy.requires_grad_(),) * 2
    leaf = copy.clone().requires_grad_()
    with torch.enable_grad():
        return copy.copy_(leaf), leaf


class _Memory:
    """A copy of the memory that some tensors share."""

    def __init__(self, group: Sequence[Tensor], wide: bool) -> None:
        self._one_dtype = len({t.dtype for t in group}) == 1
        if wide and not self._one_dtype:
            raise NotWide("the bits of a number are read")
        last = [t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in group]
        self._start = min(t.storage_offset() for t in group) if self._one_dtype else 0
        whole = torch.empty(0, dtype=group[0].dtype, device=group[0].device)
        with torch.no_grad():
            if self._one_dtype:
                whole.set_(group[0].untyped_storage(), self._start, (max(last) + 1 - self._start,), (1,))
                self._copy = whole.to(_WIDER.get(whole.dtype, whole.dtype)) if wide else whole.clone()
                self._copy = self._copy.clone() if self._copy is whole else self._copy
            else:
                self._copy = whole.set_(group[0].untyped_storage().clone())

    def like(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            if self._one_dtype:
                # Detached, so that each is a leaf, though a write into one is a write into all.
                return self._copy.as_strided(value.shape, value.stride(), value.storage_offset() - self._start).detach()
            separate = torch.empty(0, dtype=value.dtype, device=value.device)
            return separate.set_(self._copy.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def _counts(value: Any) -> bool:
    """Whether `value` is a plain strided tensor, which a copy of its memory gives back."""
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_conj() or value.is_neg())
    )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if _counts(leaf)]


def _plain(value: Any) -> Any:
    """`value`; for a symbol its number on this call."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    if isinstance(value, FakeTensor):
        raise TypeError("the inputs hold no numbers")
    return value
