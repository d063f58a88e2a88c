"""Replay: run a graph once on copies of its inputs, for its outputs, writes and gradients.

Dropout is off, because two graphs that draw it differently are compared. All other random numbers start from the
caller's random state. The user's tensors, gradients, random state and modes stay unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import Argument, Target
from torch.utils import _pytree as pytree

from attn_fuse.graph.names import INLINE_SUBGRAPHS, value_of
from attn_fuse.graph.region import Region, number_of
from attn_fuse.report import log
from attn_fuse.torch_internals import (
    FakeTensor,
    apart_from_dynamo,
    functorch_levels_kept,
    saved_tensors_hooks_aside,
    storage_of,
)


class NotWide(Exception):
    """In float64 the program would mean something else, because it reads bits, for example."""


@dataclass(frozen=True)
class Played:
    """The results of one run.

    tensors: by name, the outputs, then each input and constant after the run.
    gradients: of each input and constant that requires one, for a fixed weighting of outputs and written inputs; None
        where the backward raises.
    facts: results to compare exactly: outputs other than tensors, and the dtype, device, shape, strides, requires_grad
        and shared memory of tensors.
    constants: the graph's own tensors by name, and whether it writes each.
    aliases: by the path of an operation, which of its results share memory with its inputs.
    """

    tensors: dict[str, Tensor]
    gradients: dict[str, Tensor] | None
    facts: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, bool] = field(default_factory=dict)
    aliases: dict[str, list[bool]] = field(default_factory=dict)


def replay(graph: GraphModule, inputs: Sequence[Any], in_float64: Played | None = None) -> Played:
    """The results of `graph` on copies of `inputs`, in the caller's grad mode and autocast.

    in_float64: a run in the program's own dtypes, to repeat in float64 throughout, casts included. Raises NotWide where
    that is impossible, and whatever the graph raises.
    """
    try:
        return _replay(graph, inputs, in_float64, contextlib.nullcontext())
    except _NoBackward:
        # A write after the save breaks eager's backward. A compiled graph keeps the saved values, so copy them.
        kept = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
        with contextlib.suppress(Exception):  # torch.func takes no such hooks
            return _replay(graph, inputs, in_float64, kept)
    return _replay(graph, inputs, in_float64, contextlib.nullcontext(), backward=False)


class _NoBackward(Exception):
    pass


def _replay(
    graph: GraphModule,
    inputs: Sequence[Any],
    narrow: Played | None,
    saving: contextlib.AbstractContextManager[Any],
    backward: bool = True,
) -> Played:
    attributes = list(_attributes(graph))
    names = [*(f"input {n}" for n in range(len(inputs))), *(f"constant {name}" for name, _ in attributes)]
    originals = [*map(_plain, inputs), *(t for _, t in attributes)]
    with _as_it_was(originals, narrow is not None):
        copies, leaves = _copied(originals, narrow is not None)
        before = [c._version if _counts(c) else 0 for c in copies]
        given = {id(old): new for old, new in zip(originals, copies, strict=True) if isinstance(old, Tensor)}
        aliases: dict[str, list[bool]] = {} if narrow is None else narrow.aliases
        with saving:
            found = _Replay(graph, given, aliases, narrow is not None).run(*copies[: len(inputs)])
        outputs = {f"output {n}": out for n, out in enumerate(pytree.tree_leaves(found))}
        changed = [_counts(c) and c._version != v for c, v in zip(copies, before, strict=True)]
        written = [c for c, is_written in zip(copies, changed, strict=True) if is_written and not c.is_leaf]
        wanted = {n: leaf for n, leaf in zip(names, leaves, strict=True) if leaf is not None}
        gradients = gradients_of([*outputs.values(), *written], wanted) if backward else None
    everything = outputs | {f"{n} afterwards": c for n, c in zip(names, copies, strict=True)}
    tensors = {n: t for n, t in everything.items() if isinstance(t, Tensor)}
    facts = {n: o for n, o in outputs.items() if not isinstance(o, Tensor)} | _facts(tensors)
    constants = dict(zip(names[len(inputs) :], changed[len(inputs) :], strict=True))
    return Played({n: t.detach() for n, t in tensors.items()}, gradients, facts, constants, aliases)


def observed(
    region: Region, known: Mapping[Node, Any], graph: GraphModule, inputs: Sequence[Any]
) -> Mapping[Node, Tensor]:
    """The tensors that `graph` computes for the leaves of `region` that are not `known`; {} if it cannot run.

    Runs only the operations that they need, on copies of `inputs`, without gradients and autocast.
    """
    lacking = [leaf for leaf in region.leaves if leaf not in known and isinstance(value_of(leaf), Tensor)]
    tops = {leaf: top for leaf in lacking if (top := region.scope.top(leaf)) is not None and top.graph is graph.graph}
    if not tops:
        return {}
    try:
        part, copies = Graph(), dict[Node, Node]()
        part.graph_copy(graph.graph, copies)
        part.output(tuple(copies[top] for top in tops.values()))
        part.eliminate_dead_code()
        with torch.no_grad():
            found = replay(GraphModule(graph, part), inputs).tensors
    except Exception:  # the caller can do without
        log.info("the inputs of an attention could not be observed", exc_info=True)
        return {}
    return {leaf: value for n, leaf in enumerate(tops) if (value := found.get(f"output {n}")) is not None}


def gradients_of(results: Sequence[Any], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of `wanted` by name, for a fixed weighting of `results`; zeros where no result depends on one.

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
            # Graphs may differ in constants, unless a result shares their memory.
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


class _Replay(Interpreter):
    def __init__(
        self, module: Any, given: Mapping[int, Tensor], aliases: dict[str, list[bool]], wide: bool, path: str = ""
    ) -> None:
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
    """The body of a higher-order operator, replayed like the graph around it."""

    def __init__(self, body: GraphModule, run: Callable[..., Any]) -> None:
        super().__init__()
        self.meta, self._run = body.meta, run

    def forward(self, *args: Any) -> Any:
        return self._run(*args)


def _undropped(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """The result of a dropout call with dropout off, in a list; None where the call as written drops nothing."""
    named = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | dict(kwargs)
    drops = named.get("training", named.get("train", "alpha" not in name))
    if not drops or float(named.get("p", 0.5)) == 0:
        return None
    x = named["input"]
    if named.get("inplace", False) or name.endswith("dropout_"):
        return [x]
    return [(_another(x), torch.ones_like(x, dtype=torch.bool)) if "native" in name else _another(x)]


def _another(x: Tensor) -> Tensor:
    """`x` in new memory, as from dropout."""
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
    """Whether the call draws a kernel's seed, below 2**62, which must not change the program's later draws."""
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


@contextlib.contextmanager
def _as_it_was(values: Sequence[Any], wide: bool) -> Iterator[None]:
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
    # Saving the random state must not initialise CUDA.
    return sorted(d.index for d in found) or (
        [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    )


def _attributes(module: GraphModule, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The paths and tensors of the constants in the graph and its subgraphs."""
    for name in dict.fromkeys(str(node.target) for node in module.graph.find_nodes(op="get_attr")):
        value = operator.attrgetter(name)(module)
        if isinstance(value, Tensor):
            yield f"{path}{name}", value
        elif isinstance(value, GraphModule):
            yield from _attributes(value, f"{path}{name}.")


def _copied(values: Sequence[Any], wide: bool) -> tuple[list[Any], list[Tensor | None]]:
    """Copies in the strides and shared memory of `values`, and the leaf that gets each copy's gradient, if any."""
    kinds = {(storage_of(t), t.dtype) for t in values if _counts(t)}
    if wide and len({storage for storage, _ in kinds}) < len(kinds):
        raise NotWide("the bits of a number are read")
    memory: dict[int, Tensor] = {}
    made: dict[int, tuple[Any, Tensor | None]] = {}
    for value in values:
        if isinstance(value, Tensor) and id(value) not in made:
            if wide and not _counts(value):
                raise NotWide(f"a {type(value).__name__} stays as it is")
            copy = _copy_of(value, memory, wide) if _counts(value) else value.detach().clone()
            made[id(value)] = _requiring(copy, value.is_leaf) if value.requires_grad else (copy, None)
    pairs = [made.get(id(value), (value, None)) for value in values]
    return [copy for copy, _ in pairs], [leaf for _, leaf in pairs]


def _copy_of(value: Tensor, memory: dict[int, Tensor], wide: bool) -> Tensor:
    """A copy of `value` in `memory`: the copy of each storage, so that writes reach all copies that share it."""
    dtype = _WIDER.get(value.dtype, value.dtype) if wide else value.dtype
    with torch.no_grad():
        if (whole := memory.get(storage_of(value))) is None:
            whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
            whole = memory[storage_of(value)] = whole.to(dtype, copy=True)
        if whole.dtype != dtype:
            whole = torch.empty(0, dtype=dtype, device=value.device).set_(whole.untyped_storage())
        return whole.as_strided(value.shape, value.stride(), value.storage_offset()).detach()


def _requiring(copy: Tensor, is_leaf: bool) -> tuple[Tensor, Tensor]:
    if is_leaf or any(size > 1 and step == 0 for size, step in zip(copy.shape, copy.stride(), strict=True)):
        return (copy.requires_grad_(),) * 2
    leaf = copy.clone().requires_grad_()
    with torch.enable_grad():
        return copy.copy_(leaf), leaf


def _counts(value: Any) -> bool:
    """Whether `value` is a plain strided tensor, which can be rebuilt from a copy of its memory."""
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_conj() or value.is_neg())
    )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if _counts(leaf)]


def _plain(value: Any) -> Any:
    """`value`, or the number of a symbol on this call."""
    if isinstance(value, FakeTensor):
        raise TypeError("the inputs hold no numbers")
    return number_of(value)
