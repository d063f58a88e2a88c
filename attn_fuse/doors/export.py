"""Export: an ExportedProgram with its attention on torch's own fused kernels, for AOTInductor and for files.

torch.export ignores backends, so the program is exported, rewritten by `backend`, and exported again with the dynamic
sizes of the first export. By default only torch's own kernels are used: a saved program runs without attn_fuse.
"""

from __future__ import annotations

import inspect
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from attn_fuse.backend import Attempt, require_all_fused
from attn_fuse.errors import AttnFuseError, NotFusedError, OptionError, named
from attn_fuse.graph.names import value_of
from attn_fuse.graph.scopes import code_of
from attn_fuse.kernels.sdpa import CPU_FLASH, CUDA_EFFICIENT, CUDA_FLASH, CUDNN, PINNED
from attn_fuse.options import Fuel, parse_options
from attn_fuse.report import GraphReport, log, record
from attn_fuse.torch_internals import SOURCE, calling_convention_of, storage_of

_TORCHS_OWN = tuple(kernel.name for kernel in (CUDNN, CUDA_FLASH, CUDA_EFFICIENT, CPU_FLASH))
_SDPA = (F.scaled_dot_product_attention, *PINNED.values())
_SELF = "L['self']."  # the start of Dynamo's names of a module's attributes
_BAKED = "the program relies on the contents of %s at the export, and does not check them when it runs"


def export(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> ExportedProgram:
    """`model` exported by torch.export, with its attention on torch's fused kernels; `torch.export.save` takes it.

    model: a module, exported by ``torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)``, or a
        program exported before, whose dynamic sizes stay dynamic. For a program, args and kwargs are example inputs, by
        default its own, and dynamic_shapes must be None.
    options: those of the backend; `inner_backend`, `mode` and `inductor` have no effect. `kernels` are torch's own by
        default; a program with one of ours runs only after ``import attn_fuse``.

    Export under ``torch.no_grad()`` to pick kernels for inference; a program exported with gradients on can be trained.
    A proof from the contents of a buffer, such as a lower triangle, is baked into the program: nothing checks the
    buffer at run time, and another state dict does not change the mask. A buffer that the program writes proves
    nothing, and is read as a tensor. A program that cannot be rewritten or exported again is returned as torch exported
    it, with a warning. A rewritten program has no tree of modules for `torch.export.unflatten`. `attn_fuse.reports()`
    has a report on every attention.

    Raises OptionError for a bad option, NotFusedError under `strict`, torch.export's errors for `model`, and
    AttnFuseError if args are missing.
    """
    chosen = parse_options(options)
    if chosen.kernels is None:
        chosen = replace(chosen, kernels=_TORCHS_OWN)
    program = _exported(model, args, kwargs, dynamic_shapes)
    if isinstance(model, nn.Module) or args is None:
        args, kwargs = program.example_inputs or (None, None)
    if args is None:
        raise AttnFuseError("attn_fuse.export: the program holds no example inputs; give them as args and kwargs.")
    # The exported program already holds the casts of any autocast.
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        try:
            module, report = _rewritten(program, args, kwargs or {}, replace(chosen, try_unmeasured=False))
            record(report)
            if chosen.strict:
                require_all_fused(report.sites)
            if any(site.fused for site in report.sites):
                return _again(program, module, args, kwargs or {})
        except NotFusedError:
            raise
        except Exception as problem:  # rule 5: nothing that fails here may break the export
            log.warning("the program stays as torch exported it: %s", named(problem), exc_info=True)
    return program


def _exported(
    model: nn.Module | ExportedProgram, args: Any, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    if isinstance(model, ExportedProgram):
        if dynamic_shapes is not None:
            raise OptionError("attn_fuse.export: a program keeps its dynamic_shapes; pass the module to choose others.")
        return model
    if args is None:
        raise AttnFuseError("attn_fuse.export: a module needs example inputs; give them as a tuple, args.")
    given = None if kwargs is None else dict(kwargs)
    return torch.export.export(model, args, given, dynamic_shapes=dynamic_shapes)


# ---- the program as a graph whose parameters and buffers are inputs, and back


def _rewritten(
    program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any], options: Any
) -> tuple[GraphModule, GraphReport]:
    """(the program's module, rewritten; the report)"""
    started = time.perf_counter()
    module: Any = program.module()
    lifted, names, tensors = _lifted(module, _written(program, module))
    inputs = [*tensors, *pytree.tree_leaves((tuple(args), _in_order(dict(kwargs), program)))]
    found = Attempt(options, Fuel(options.fuel)).checked(lifted, inputs)
    before, after = code_of(lifted), code_of(found.graph)
    _lower(module, found.graph, names)
    notes = (*(_BAKED % proof.source.removeprefix(_SELF) for proof in found.proofs), *found.notes)
    return module, GraphReport(tuple(found.sites), time.perf_counter() - started, notes, before, after)


def _in_order(kwargs: dict[str, Any], program: ExportedProgram) -> dict[str, Any]:
    """`kwargs` in the order of the program's inputs."""
    known = program.call_spec.in_spec.children()[1].context or []
    return {name: kwargs[name] for name in known if name in kwargs} | kwargs


def _written(program: ExportedProgram, module: nn.Module) -> frozenset[int]:
    """The storages that the program writes: their contents prove nothing about the next run."""
    names = program.run_decompositions({}).graph_signature.buffers_to_mutate.values()
    return frozenset(storage_of(operator.attrgetter(name)(module)) for name in names)


def _lifted(module: GraphModule, written: frozenset[int]) -> tuple[GraphModule, list[str], list[torch.Tensor]]:
    """(`module` with its tensors as inputs before its own, their names, their contents). written: storages."""
    graph, copies = Graph(), dict[Node, Node]()
    holders, tensors = dict[str, Node](), list[torch.Tensor]()
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        value = operator.attrgetter(name)(module)
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
    # torch.export keeps unread results, such as the weights that nn.MultiheadAttention averages.
    graph.eliminate_dead_code(lambda node: not _is_pure(node))
    return GraphModule(module, graph), [*holders], tensors


def _is_pure(node: Node) -> bool:
    """Whether `node` only gives a result; an assertion gives none, and a draw changes the random state."""
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
            attribute = graph.create_node("get_attr", name)  # Graph.get_attr warns of tensors that are no buffers
        attribute.meta = {k: v for k, v in placeholder.meta.items() if k != SOURCE}
        placeholder.replace_all_uses_with(attribute)
        graph.erase_node(placeholder)
    _widen_masks(graph)
    graph.set_codegen(convention)
    module.recompile()


def _widen_masks(graph: Graph) -> None:
    """Expand the mask of every kernel's call to a row for each query.

    torch and ONNX's Attention accept one row for all queries; onnxruntime does not.
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


# ---- the second export


def _again(
    program: ExportedProgram, module: GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ExportedProgram:
    """`module` exported with the dynamic sizes of `program`. Raises RuntimeError if others become dynamic."""
    fused = torch.export.export(module, tuple(args), dict(kwargs), dynamic_shapes=_free_sizes(program, module))
    before, after = _shapes(program), _shapes(fused)
    if _which_are_free(before) != _which_are_free(after):
        raise RuntimeError(f"exported again, the inputs of the shapes {before} would have the shapes {after}")
    return fused


def _shapes(program: ExportedProgram) -> list[Any]:
    """The shape of each user input; an input that is no tensor stands for itself."""
    holders = {node.name: value_of(node) for node in program.graph.find_nodes(op="placeholder")}
    values = [holders.get(name) if isinstance(name, str) else name for name in program.graph_signature.user_inputs]
    return [tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in values]


def _which_are_free(shapes: Sequence[Any]) -> list[int | None]:
    """For each size, the number of the first size that always equals it; None for a number."""
    sizes = [size for shape in shapes for size in (shape if isinstance(shape, tuple) else (shape,))]
    symbols = [size.node.expr if isinstance(size, torch.SymInt) else None for size in sizes]
    return [None if symbol is None else symbols.index(symbol) for symbol in symbols]


def _free_sizes(program: ExportedProgram, module: GraphModule) -> Any:
    """The `dynamic_shapes` for the dynamic sizes of `program`, within the same bounds.

    Equal sizes are not marked: the module checks its inputs, which shows them to the export.
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
