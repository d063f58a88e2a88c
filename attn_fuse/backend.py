"""The torch.compile backend: Dynamo's graph in, a guarded callable out."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule

from attn_fuse.attention.picture import picture
from attn_fuse.emit.check import Rewritten, without_disagreements
from attn_fuse.emit.splice import emit
from attn_fuse.errors import NotFusedError, named
from attn_fuse.graph.breaks import at_the_end
from attn_fuse.graph.expand import expand
from attn_fuse.graph.functionalize import functionalize
from attn_fuse.graph.hidden import may_hold_attention
from attn_fuse.graph.kernel_calls import calls_in
from attn_fuse.graph.region import find_sites
from attn_fuse.graph.scopes import code_of, copied
from attn_fuse.guard import guarded
from attn_fuse.kernels import KERNELS
from attn_fuse.lift.lift import lift
from attn_fuse.lift.normalize import normalize
from attn_fuse.options import Fuel, Options, chosen_kernels, fuel_of, parse_options
from attn_fuse.patterns.recognize import recognize
from attn_fuse.picker.pick import Choice, pick
from attn_fuse.picker.selfcheck import self_check_of
from attn_fuse.picker.trial import stopwatch_of
from attn_fuse.report import GraphReport, Location, SiteReport, headline, log, record, relocated
from attn_fuse.site import Rewriter, Stages
from attn_fuse.torch_internals import (
    RestartsDynamo,
    compile_with,
    dispatch_modes_aside,
    saved_tensors_hooks_aside,
    without_inductor_attention,
)

_PATTERNS_OFF = "Inductor's own attention patterns were kept off this graph: they rewrite look-alikes wrongly"
_FAILED = "this graph stays as written, since analysing it failed; report the failure, which the log holds in full"
_TEMPLATED = frozenset(kernel.name for kernel in KERNELS if kernel.templated)
_UNCOMPILED = "the inner backend failed on the graph with its attention fused"


def attn_fuse(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """`graph` with its attention on fused kernels, compiled by the inner backend.

    This is what ``torch.compile(model, backend="attn_fuse", options=..., mode=...)`` calls; see `Options`.
    Raises OptionError for an option that does not exist or has an impossible value, NotFusedError under `strict`.
    """
    return Compiler(parse_options(options, mode), fuel_of(options)).compiled(graph, example_inputs)


def analyze_only(
    graph: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """`graph` with its attention on the kernels that `attn_fuse` would put it on, reported and not compiled.

    Raises what `attn_fuse` raises.
    """
    parsed = replace(parse_options(options), compiles=False)
    return Compiler(parsed, fuel_of(options)).compiled(graph, example_inputs)


@dataclass(frozen=True)
class Compiler:
    """Compiles graphs. constants: source names of arguments that are constants all the same.

    locations: those of the sites, for a graph that is captured anew and has lost them.
    unfit: why all sites stay as written; "" where each is judged by itself.
    lost: the kernels that the inner backend failed on, by name: why.
    """

    options: Options
    fuel: Fuel
    constants: frozenset[str] = frozenset()
    locations: tuple[Location, ...] = ()
    unfit: str = ""
    lost: Mapping[str, str] = field(default_factory=dict)

    def rewritten(self, original: GraphModule, inputs: Sequence[Any], left: Mapping[int, str]) -> Rewritten:
        """A copy of the graph `original` with its sites rewritten, by all stages before the inner backend.

        left: the sites that stay as written: number -> reason.
        """
        started, options, chosen = time.perf_counter(), self.options, chosen_kernels()
        graph = copied(original)
        written = functionalize(graph)
        written = expand(graph, written)
        stages = Stages(
            find_sites,
            normalize,
            lift,
            recognize,
            _none(self.unfit)
            if self.unfit
            else functools.partial(
                pick,
                allowed=options.kernels if chosen is None else chosen,
                fuse_all=options.pick == "fused",
                unfit=self.lost,
            ),
            emit,
            stopwatch_of(options.inner_backend, options.mode) if options.pick == "measured" else None,
            self_check_of(options.inner_backend, options.mode) if options.try_unmeasured else None,
            None if options.compiles else picture,
        )
        is_inductor = options.inner_backend == "inductor"
        rewriter = Rewriter(graph, inputs, stages, self.fuel.allows, written, left, self.constants, is_inductor)
        sites = rewriter.rewrite(options.seconds, started)
        return Rewritten(graph, sites, tuple(rewriter.proofs.values()), rewriter.keeps_nan)

    def compiled(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """`graph` rewritten, reported, compiled by the inner backend, and guarded.

        Raises NotFusedError under `strict` where a site is not fused.
        """
        started, looks = time.perf_counter(), may_hold_attention(graph)
        shown = looks or not self.options.compiles
        before = code_of(graph) if shown else ""
        # A checkpoint around this call must not count the tensors that the stages save, nor their operations.
        with saved_tensors_hooks_aside(), dispatch_modes_aside():
            found, called, failed = self._found(graph, inputs) if looks else (Rewritten(graph, [], ()), (), ())
            broken, notes = self._broken(graph)
        # The inner backend may change the graph that it is given.
        fuses = any(site.fused for site in found.sites)
        if fuses:
            original, graph = graph, found.graph
        else:
            original = copied(graph) if found.sites else graph
        seconds = time.perf_counter() - started
        sites = (*relocated(found.sites, self.locations), *broken, *called)
        report = GraphReport(sites, seconds, (*notes, *failed), before, code_of(graph) if shown else "")
        templated = {site.kernel for site in found.sites if site.fused and site.kernel in _TEMPLATED}
        try:
            if self.options.strict:
                require_all_fused(report.sites)
            compiled = self.by_inner_backend(graph, inputs, backward_now=bool(templated))
        except Exception as problem:
            # rule 5: a kernel that the inner backend fails on must not break the model
            if templated and not isinstance(problem, (RestartsDynamo, NotFusedError)):
                log.warning("a graph is compiled without %s, since that failed", *templated, exc_info=True)
                lost = {**self.lost, **dict.fromkeys(templated, f"the inner backend failed on it: {named(problem)}")}
                return replace(self, lost=lost).compiled(original, inputs)
            if not fuses or self.options.strict or isinstance(problem, RestartsDynamo):
                record(report)
                raise
            log.warning("a graph is compiled as written, since compiling it with fused attention failed", exc_info=True)
            return replace(self, unfit=f"{_UNCOMPILED}: {named(problem)}").compiled(original, inputs)
        record(report)
        if not found.sites:
            return compiled
        again = replace(
            self,
            constants=frozenset(f"L['values'][{proof.input}]" for proof in found.proofs),
            locations=tuple(site.location for site in sites[: len(found.sites)]),
        )
        return guarded(compiled, original, inputs, found.proofs, again.compiled, self.by_inner_backend)

    def _found(
        self, graph: GraphModule, inputs: Sequence[Any]
    ) -> tuple[Rewritten, tuple[SiteReport, ...], tuple[str, ...]]:
        """`graph` rewritten, its calls of kernels that are not ours, and a note where the stages fail on all of it."""
        rewrite = functools.partial(self.rewritten, graph, inputs)
        try:
            found = rewrite({})
            if self.options.check:
                found = without_disagreements(graph, inputs, rewrite, found)
            return found, tuple(calls_in(graph)), ()
        except Exception as problem:  # rule 5: a failure in here must not break the model
            if self.options.strict:
                raise
            log.warning("a graph stays as written, since analysing it failed", exc_info=True)
            return Rewritten(graph, [], ()), (), (f"{_FAILED}: {named(problem)}",)

    def _broken(self, graph: GraphModule) -> tuple[tuple[SiteReport, ...], tuple[str, ...]]:
        """The attentions that a graph break leaves to Python, and the notes on the whole graph."""
        try:
            sites, notes = at_the_end(graph)
        except Exception:  # rule 5: what a report says must not break a model
            log.debug("the graph's break cannot be read", exc_info=True)
            sites, notes = (), ()
        off = self.options.inner_backend == "inductor" and self.options.compiles
        return sites, (_PATTERNS_OFF, *notes) if off else notes

    def by_inner_backend(
        self, graph: GraphModule, inputs: Sequence[Any], backward_now: bool = False
    ) -> Callable[..., Any]:
        """`graph` compiled by the inner backend alone, with Inductor's own attention patterns kept off.

        backward_now: whether its backward is compiled with it, so that all that fails does so now.
        """
        if not self.options.compiles:
            return graph
        if self.options.inner_backend != "inductor":
            return compile_with(self.options.inner_backend, self.options.mode, graph, inputs)
        inductor = dict(self.options.inductor)
        with without_inductor_attention(inductor.pop("joint_custom_post_pass", None)):
            return compile_with(self.options.inner_backend, self.options.mode, graph, inputs, inductor, backward_now)


def _none(why: str) -> Callable[..., Choice]:
    """A picker that picks no kernel."""
    return lambda *_, **__: Choice(None, {}, why)


def require_all_fused(sites: Sequence[SiteReport]) -> None:
    """Raise NotFusedError, with the reasons, where one of `sites` was left as written."""
    left = [f"{site.location}: {headline(site)}" for site in sites if site.status in ("refused", "as written")]
    if left:
        raise NotFusedError(f"strict: {len(left)} of {len(sites)} attentions not fused: " + "; ".join(left))
