"""Export: an ExportedProgram with its attention on torch's own fused kernels, for AOTInductor and for files.

torch.export ignores backends, so the program is exported, rewritten as `backend` rewrites a graph, and exported again
with the sizes that the first export found to be free. Only kernels of torch itself are used, unless the caller names
others: a saved program then runs where attn_fuse is not installed.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from attn_fuse.backend import Attempt, require_all_fused
from attn_fuse.emit.check import Rewritten, without_disagreements
from attn_fuse.errors import AttnFuseError, OptionError, named
from attn_fuse.graph.names import value_of
from attn_fuse.graph.scopes import code_of
from attn_fuse.kernels.sdpa import CPU_FLASH, CUDA_EFFICIENT, CUDA_FLASH, CUDNN, PINNED
from attn_fuse.options import Fuel, parse_options
from attn_fuse.report import Failure, GraphReport, record
from attn_fuse.torch_internals import SOURCE, calling_convention_of, storage_of

log = logging.getLogger("attn_fuse")

_TORCHS_OWN = tuple(kernel.name for kernel in (CUDNN, CUDA_FLASH, CUDA_EFFICIENT, CPU_FLASH))
_SDPA = (F.scaled_dot_product_attention, *PINNED.values())
_SELF = "L['self']."  # as Dynamo begins the name of what a module holds
_BAKED = "what is proved of %s is part of the program now, and not checked when the program runs"


def export(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> ExportedProgram:
    """`model` as torch.export gives it, with its attention on fused kernels of torch; `torch.export.save` takes it.

    model: a module, exported by ``torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)``, or a
        program that was exported before, whose free sizes stay free. For a program args and kwargs are example inputs,
        by default its own, and dynamic_shapes must be None.
    options: as for the backend; `inner_backend`, `mode` and `inductor` say nothing here. `kernels` are torch's own by
        default; a program with one of ours runs only where attn_fuse is imported.

    The program computes what `model` computes, for inference. Export under ``torch.no_grad()``, so that kernels are
    picked for inference; a program exported with gradients on may still be trained. A proof that rests on the contents
    of a buffer, such as a lower triangle, is baked into the program: nothing checks the buffer when the program runs,
    and another state dict loaded into the program does not change the mask. A buffer that the program itself writes
    proves nothing and is read as the tensor it is. What could not be rewritten or exported again comes back as torch
    exported it, with a warning. What was rewritten has lost the tree of its modules, as `torch.export.unflatten` would
    rebuild it. `attn_fuse.reports()` tells of every attention.

    Raises OptionError for a bad option, NotFusedError under `strict`, what torch.export raises for `model`, and
    AttnFuseError where args are missing.
    """
    chosen = parse_options(options)
    if chosen.kernels is None:
        chosen = replace(chosen, kernels=_TORCHS_OWN)
    program = _exported(model, args, kwargs, dynamic_shapes)
    if isinstance(model, nn.Module) or args is None:
        args, kwargs = program.example_inputs or (None, None)
    if args is None:
        raise AttnFuseError("attn_fuse.export: the program holds no example inputs; give them as args and kwargs.")
    with _as_the_program_runs():
        try:
            module, found, seconds = _rewritten(program, args, kwargs or {}, replace(chosen, try_unmeasured=False))
        except Exception as problem:  # rule 5: whatever goes wrong in here must not break the export
            log.warning("the program stays as torch exported it: %s", named(problem), exc_info=True)
            return program
        record(GraphReport(tuple(found.sites), seconds, _notes(found), module.before, module.after))
        if chosen.strict:
            require_all_fused(found.sites)
        if not any(site.fused for site in found.sites):
            return program
        try:
            return _again(program, module.module, args, kwargs or {})
        except Exception as problem:
            log.warning("the program stays as torch exported it: %s", named(problem), exc_info=True)
            return program


def _exported(
    model: nn.Module | ExportedProgram, args: Any, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    if isinstance(model, ExportedProgram):
        if dynamic_shapes is not None:
            raise OptionError(
                "attn_fuse.export: dynamic_shapes are those of the program; give the module to choose others."
            )
        return model
    if args is None:
        raise AttnFuseError("attn_fuse.export: a module needs example inputs; give them as a tuple, args.")
    given = None if kwargs is None else dict(kwargs)
    return torch.export.export(model, args, given, dynamic_shapes=dynamic_shapes)


@contextlib.contextmanager
def _as_the_program_runs() -> Iterator[None]:
    """A block without autocast: an exported program holds its casts, whatever autocast it is exported under."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _notes(found: Rewritten) -> tuple[str, ...]:
    return (*(_BAKED % proof.source.removeprefix(_SELF) for proof in found.proofs), *found.notes)


# ---- the program as a graph whose parameters and buffers are inputs, and back


@dataclass(frozen=True)
class _Module:
    """The program's module, rewritten. before, after: its code."""

    module: GraphModule
    before: str
    after: str


def _rewritten(
    program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any], options: Any
) -> tuple[_Module, Rewritten, float]:
    started = time.perf_counter()
    module: Any = program.module()
    lifted, names, tensors = _lifted(module, _written(program, module))
    inputs = [*tensors, *pytree.tree_leaves((tuple(args), _in_order(dict(kwargs), program)))]
    attempt = Attempt(options, Fuel(options.fuel))

    def rewrite(left: Mapping[int, Failure | None]) -> Rewritten:
        return attempt.rewritten(lifted, inputs, left)

    found, before = rewrite({}), code_of(lifted)
    if options.check:
        found = without_disagreements(lifted, inputs, rewrite, found)
    after = code_of(found.graph)
    _lower(module, found.graph, names)
    return _Module(module, before, after), found, time.perf_counter() - started


def _in_order(kwargs: dict[str, Any], program: ExportedProgram) -> dict[str, Any]:
    """`kwargs` in the order of the program's inputs."""
    known = program.call_spec.in_spec.children()[1].context or []
    return {name: kwargs[name] for name in known if name in kwargs} | kwargs


def _written(program: ExportedProgram, module: nn.Module) -> frozenset[int]:
    """The storages that a run of the program writes: their contents prove nothing of the next run."""
    names = program.run_decompositions({}).graph_signature.buffers_to_mutate.values()
    return frozenset(storage_of(_attribute(module, name)) for name in names)


def _lifted(module: GraphModule, written: frozenset[int]) -> tuple[GraphModule, list[str], list[torch.Tensor]]:
    """`module` with its tensors as inputs before its own; their names and contents. written: storages."""
    graph, copies = Graph(), dict[Node, Node]()
    holders, tensors = dict[str, Node](), list[torch.Tensor]()
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        value = _attribute(module, name)
        if not isinstance(value, torch.Tensor):
            continue
        if name not in holders:
            holders[name] = graph.placeholder(f"lifted_{len(holders)}")
            holders[name].meta = dict(node.meta)
            if storage_of(value) not in written:
                holders[name].meta[SOURCE] = _SELF + name
            tensors.append(value)
        copies[node] = holders[name]
    graph.output(graph.graph_copy(module.graph, copies))
    # torch.export keeps what nobody reads, such as the weights that nn.MultiheadAttention averages.
    graph.eliminate_dead_code(lambda node: not _is_pure(node))
    return GraphModule(module, graph), [*holders], tensors


def _is_pure(node: Node) -> bool:
    """Whether `node` does nothing but give a result: an assertion gives none, and a draw moves the random state."""
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    return not target._schema.is_mutable and bool(target._schema.returns) and not is_random


def _lower(module: GraphModule, rewritten: GraphModule, names: Sequence[str]) -> None:
    """Make `module` run the graph of `rewritten`, whose first inputs are the attributes called `names`."""
    for name, child in rewritten.named_children():
        if isinstance(child, GraphModule):
            setattr(module, name, child)
    convention = calling_convention_of(module.graph)
    module.graph = rewritten.graph
    graph = module.graph
    for placeholder, name in zip(list(graph.find_nodes(op="placeholder")), names, strict=False):
        with graph.inserting_before(placeholder):
            attribute = graph.create_node("get_attr", name)  # Graph.get_attr warns of a tensor that is no buffer
        attribute.meta = {k: v for k, v in placeholder.meta.items() if k != SOURCE}
        placeholder.replace_all_uses_with(attribute)
        graph.erase_node(placeholder)
    _widen_masks(graph)
    graph.set_codegen(convention)
    module.recompile()


def _widen_masks(graph: Graph) -> None:
    """Give the mask of every kernel's call a row for each query, by a view that takes no memory.

    torch takes one row for all queries, and so does ONNX's Attention; onnxruntime refuses it.
    """
    calls = [c for kernel in _SDPA for c in graph.find_nodes(op="call_function", target=kernel)]
    for call in calls:
        query, mask = call.args[0], call.kwargs.get("attn_mask")
        if not isinstance(query, Node) or not isinstance(mask, Node):
            continue
        asked, shown = value_of(query), value_of(mask)
        if not isinstance(asked, torch.Tensor) or not isinstance(shown, torch.Tensor):
            continue
        if _is_one(shown.shape[-2]) and not _is_one(asked.shape[-2]):
            with graph.inserting_before(call):
                length = graph.call_method("size", (query, -2))
                wide = graph.call_method("expand", (mask, *[-1] * (shown.ndim - 2), length, -1))
            call.update_kwarg("attn_mask", wide)


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


# ---- the second export


def _again(
    program: ExportedProgram, module: GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ExportedProgram:
    """`module` exported with the free sizes of `program`. Raises RuntimeError where other sizes would be free."""
    fused = torch.export.export(module, tuple(args), dict(kwargs), dynamic_shapes=_free_sizes(program, module))
    before, after = _shapes(program), _shapes(fused)
    if _which_are_free(before) != _which_are_free(after):
        raise RuntimeError(f"exported again, the inputs of the shapes {before} would have the shapes {after}")
    return fused


def _shapes(program: ExportedProgram) -> list[Any]:
    """The shape of each input of the user's, or the input itself where it is no tensor."""
    holders = {node.name: value_of(node) for node in program.graph.find_nodes(op="placeholder")}
    values = [holders.get(name) if isinstance(name, str) else name for name in program.graph_signature.user_inputs]
    return [tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in values]


def _which_are_free(shapes: Sequence[Any]) -> list[int | None]:
    """By size, the number of the first size that is always equal to it; None for a number."""
    sizes = [size for shape in shapes for size in (shape if isinstance(shape, tuple) else (shape,))]
    symbols = [size.node.expr if isinstance(size, torch.SymInt) else None for size in sizes]
    return [None if symbol is None else symbols.index(symbol) for symbol in symbols]


def _free_sizes(program: ExportedProgram, module: GraphModule) -> Any:
    """The `dynamic_shapes` with which an export finds the sizes of `program` free again, within the same bounds.

    Which sizes are equal is not said: the module checks its inputs, so the export finds that by itself.
    """
    bounds = program.range_constraints

    def free(size: Any) -> Any:
        known = bounds.get(size.node.expr)
        if known is None:
            return Dim.AUTO
        low, high = (int(end) if end.is_Integer else None for end in (known.lower, known.upper))
        return Dim.AUTO(min=low, max=high)

    def of_input(shape: Any) -> Any:
        if isinstance(shape, torch.SymInt):
            return free(shape)
        if not isinstance(shape, tuple):
            return None
        return {number: free(size) for number, size in enumerate(shape) if isinstance(size, torch.SymInt)} or None

    args, kwargs = pytree.tree_unflatten([of_input(shape) for shape in _shapes(program)], program.call_spec.in_spec)
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
