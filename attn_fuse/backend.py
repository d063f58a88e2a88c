"""The torch.compile backend: Dynamo's graph in, a guarded callable out."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.emit.check import disagreement
from attn_fuse.errors import NotFusedError
from attn_fuse.graph.expand import expand
from attn_fuse.graph.functionalize import make_functional
from attn_fuse.graph.names import INLINE_SUBGRAPHS, op_name
from attn_fuse.graph.region import Region
from attn_fuse.graph.scopes import scopes
from attn_fuse.lift.closed_forms import Guard, Proof
from attn_fuse.options import Fuel, Options, chosen_kernels, fuel_of, parse_options
from attn_fuse.picker import selfcheck
from attn_fuse.picker.pick import SelfCheck, Stopwatch, pick
from attn_fuse.picker.trial import Trial
from attn_fuse.report import GraphReport, Location, SiteReport, headline, record
from attn_fuse.site import Rewriter
from attn_fuse.torch_internals import (
    FakeTensorMode,
    compile_with,
    saved_tensors_hooks_aside,
    sdpa_switches,
    without_inductor_attention,
)

log = logging.getLogger("attn_fuse")

_PATTERNS_OFF = "Inductor's own attention patterns were kept off this graph: they rewrite look-alikes wrongly"


def attn_fuse(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """`graph` with its attention on fused kernels, compiled by the inner backend.

    This is what ``torch.compile(model, backend="attn_fuse", options=..., mode=...)`` calls; see `Options`.
    Raises: OptionError for an option that does not exist or has an impossible value; NotFusedError under `strict`.
    """
    return _compile(graph, example_inputs, parse_options(options, mode), fuel_of(options))


def looked_at(
    graph: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """`graph` with its attention on the kernels that `attn_fuse` would put it on, reported and not compiled.

    Raises what `attn_fuse` raises.
    """
    parsed = dataclasses.replace(parse_options(options), compiles=False)
    return _compile(graph, example_inputs, parsed, fuel_of(options))


def _compile(
    graph: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    fuel: Fuel,
    constants: frozenset[str] = frozenset(),
    locations: Sequence[Location] = (),
) -> Callable[..., Any]:
    started = time.perf_counter()
    before = _code(graph)
    rewrite = functools.partial(_rewritten, graph, inputs, options, fuel, constants)
    # What the stages run is none of what a checkpoint around this call counts.
    with saved_tensors_hooks_aside():
        candidate, sites, proofs = rewrite({})
        if options.check:
            candidate, sites, proofs = _checked(graph, inputs, rewrite, (candidate, sites, proofs))
    # The inner backend may change the graph that it is given.
    if any(site.fused for site in sites):
        original, graph = graph, candidate
    else:
        original = _copied(graph) if sites else graph
    notes = (_PATTERNS_OFF,) if options.inner_backend == "inductor" and options.compiles else ()
    seconds = time.perf_counter() - started
    report = GraphReport(tuple(_relocated(sites, locations)), seconds, notes, before, _code(graph))
    record(report)
    if options.strict:
        _require_all_fused(report.sites)
    compiled = _by_inner_backend(options, graph, inputs)
    return _guarded(compiled, original, inputs, proofs, options, fuel, report)


_Rewritten = tuple[GraphModule, list[SiteReport], tuple[Proof, ...]]


def _rewritten(
    original: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    fuel: Fuel,
    constants: frozenset[str],
    left: Mapping[int, str],
) -> _Rewritten:
    """A copy of the graph `original` with its sites rewritten, their reports, and what the rewrites rest on.

    left: sites that stay as written, by their number, and why.
    """
    started = time.perf_counter()
    chosen, graph = chosen_kernels(), _copied(original)
    still = {s.path: found for s in list(scopes(graph)) if (found := make_functional(s)) is not None}
    made = expand(graph, {path for path, found in still.items() if not found.functional})
    for s in [s for s in scopes(graph) if s.path in made]:
        if (found := make_functional(s, made[s.path])) is not None:
            still[s.path] = found.and_also(still.get(s.path))
    allowed, fuse_all = options.kernels if chosen is None else chosen, options.pick == "fused"
    rewriter = Rewriter(
        graph,
        inputs,
        pick=lambda attention, facts, stopwatch, self_check: pick(
            attention, facts, stopwatch, allowed, fuse_all, self_check
        ),
        may_rewrite=fuel.allows,
        written=still,
        left=left,
        constants=constants,
        stopwatch_of=functools.partial(_stopwatch, options) if options.pick == "measured" else None,
        self_check_of=functools.partial(_self_check, options) if options.try_unmeasured else None,
        compiled=options.inner_backend == "inductor",
    )
    sites = rewriter.rewrite(options.seconds, started)
    for scope in scopes(graph):
        scope.module.recompile()
    return graph, sites, tuple(rewriter.proofs.values())


def _checked(
    original: GraphModule, inputs: Sequence[Any], rewrite: Callable[[Mapping[int, str]], _Rewritten], found: _Rewritten
) -> _Rewritten:
    """`found`, or where it computes something else than `original`, the same without the sites that do."""
    left: dict[int, str] = {}
    while fused := [number for number, site in enumerate(found[1]) if site.fused]:
        problem = disagreement(original, found[0], inputs)
        if problem is None:
            break
        # The first site with which the graph disagrees.
        low, high = 0, len(fused) - 1
        while low < high:
            middle = (low + high) // 2
            behind = dict.fromkeys(fused[middle + 1 :], "")
            if disagreement(original, rewrite({**left, **behind})[0], inputs) is None:
                low = middle + 1
            else:
                high = middle
        left[fused[low]] = problem
        found = rewrite(left)
    return found


def _guarded(
    compiled: Callable[..., Any],
    original: GraphModule,
    inputs: Sequence[Any],
    proofs: tuple[Proof, ...],
    options: Options,
    fuel: Fuel,
    report: GraphReport,
) -> Callable[..., Any]:
    """`compiled` while what it rests on holds: the buffers' contents, and the kernels that may run.

    Which may run is for `use_kernels` to say, and for torch's switches of SDPA; its others Dynamo guards by itself.
    """
    if not report.sites:
        return compiled
    guard, allowed = Guard(proofs, inputs), (chosen_kernels(), sdpa_switches())
    locations = [site.location for site in report.sites]
    constants = frozenset(f"L['values'][{proof.input}]" for proof in proofs)

    @functools.cache
    def for_kernels(now_allowed: tuple[Any, ...]) -> Callable[..., Any]:
        return _compiled_anew(
            original,
            functools.partial(_compile, options=options, fuel=fuel, constants=constants, locations=locations),
        )

    @functools.cache
    def as_written() -> Callable[..., Any]:
        changed = ", ".join(sorted({proof.source for proof in proofs}))
        log.warning("a mask is no longer what it was when the model was compiled (%s): running as written", changed)
        return _compiled_anew(original, functools.partial(_by_inner_backend, options))

    def run(*values: Any) -> Any:
        if (now := (chosen_kernels(), sdpa_switches())) != allowed:
            return for_kernels(now)(*values)
        if guard.holds(values):
            return compiled(*values)
        return as_written()(*values)

    return run


def _stopwatch(
    options: Options,
    region: Region,
    attention: Attention,
    facts: Facts,
    mode: FakeTensorMode,
    values: Mapping[Node, Any],
) -> Stopwatch:
    """What measures a site as written and on kernels, for `pick`."""
    trial = Trial(region, attention, facts, mode, values, options.inner_backend, options.mode)
    return trial.measure


def _self_check(
    options: Options,
    region: Region,
    attention: Attention,
    facts: Facts,
    values: Mapping[Node, Any],
    proved: Mapping[Node, str],
) -> SelfCheck:
    """What tries kernels on a site that were never measured on the device, for `pick`."""
    site = selfcheck.Site(region, attention, facts, values, proved, options.inner_backend, options.mode)
    return site.verdict


def _by_inner_backend(options: Options, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    if not options.compiles:
        return graph
    if options.inner_backend != "inductor":
        return compile_with(options.inner_backend, options.mode, graph, inputs)
    with without_inductor_attention():
        return compile_with(options.inner_backend, options.mode, graph, inputs)


def _compiled_anew(graph: GraphModule, backend: Callable[..., Any]) -> Callable[..., Any]:
    """`graph` captured and compiled once more, when it is called, with guards of its own."""
    if any(op_name(node) in INLINE_SUBGRAPHS for node in graph.graph.nodes):
        return graph

    # Dynamo passes over a generated forward that is called as such, but looks into one that a function calls.
    def again(*values: Any) -> Any:
        return graph.forward(*values)

    return torch.compile(again, backend=backend)


def _require_all_fused(sites: Sequence[SiteReport]) -> None:
    left = [f"{site.location}: {headline(site)}" for site in sites if site.status in ("refused", "as written")]
    if left:
        raise NotFusedError(f"strict: {len(left)} of {len(sites)} attentions not fused: " + "; ".join(left))


def _relocated(sites: Sequence[SiteReport], locations: Sequence[Location]) -> Sequence[SiteReport]:
    """A graph captured anew has lost its source lines; its sites are those of the first capture, in order."""
    if len(sites) != len(locations):
        return sites
    return [SiteReport(**{**vars(site), "location": where}) for site, where in zip(sites, locations, strict=True)]


def _code(graph: GraphModule) -> str:
    return "\n".join(scope.module.code for scope in scopes(graph))


def _copied(module: GraphModule) -> GraphModule:
    """A copy whose graphs can be rewritten apart; tensors and parameters are shared."""
    graph = Graph()
    result = graph.graph_copy(module.graph, {})
    graph.output(result)
    copy = GraphModule(module, graph)
    for name, child in list(copy.named_children()):
        if isinstance(child, GraphModule):
            setattr(copy, name, _copied(child))
    return copy
