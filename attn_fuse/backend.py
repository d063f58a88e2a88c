"""The torch.compile backend: Dynamo's graph in, a guarded callable out."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule

from attn_fuse.emit.check import Rewritten, without_disagreements
from attn_fuse.errors import NotFusedError, named
from attn_fuse.graph.breaks import at_the_end
from attn_fuse.graph.expand import expand
from attn_fuse.graph.functionalize import functionalize
from attn_fuse.graph.hidden import may_hold_attention
from attn_fuse.graph.kernel_calls import calls_in
from attn_fuse.graph.scopes import code_of, copied
from attn_fuse.guard import guarded
from attn_fuse.kernels import KERNELS
from attn_fuse.options import Fuel, Options, chosen_kernels, fuel_of, parse_options
from attn_fuse.picker.pick import NOT_COMPILED, Choice, pick
from attn_fuse.picker.site_run import SiteRun
from attn_fuse.report import GRAPH_FAILED, Failure, GraphReport, Location, SiteReport, headline, log, record, relocated
from attn_fuse.repro.write import writer
from attn_fuse.site import Recognised, Rewriter
from attn_fuse.torch_internals import (
    RestartsDynamo,
    compile_with,
    dispatch_modes_aside,
    saved_tensors_hooks_aside,
    without_inductor_attention,
)

_PATTERNS_OFF = "Inductor's own attention patterns were kept off this graph: they rewrite look-alikes wrongly"
_FAILED = f"{GRAPH_FAILED}; report the failure, which the log holds in full"
_TEMPLATED = frozenset(kernel.name for kernel in KERNELS if kernel.templated)
_UNCOMPILED = f"{NOT_COMPILED} the graph with its attention fused"


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
    return Attempt(parse_options(options, mode), fuel_of(options)).compiled(graph, example_inputs)


def analyze_only(
    graph: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """`graph` with its attention on the kernels that `attn_fuse` would put it on, reported and not compiled.

    Raises what `attn_fuse` raises.
    """
    parsed = replace(parse_options(options), compiles=False)
    return Attempt(parsed, fuel_of(options)).compiled(graph, example_inputs)


@dataclass(frozen=True)
class Attempt:
    """One way to compile a graph. constants: source names of arguments to treat as constants.

    locations: those of the sites, for a graph that is captured anew and has lost them.
    unfit: why all sites stay as written; "" where each is judged by itself.
    lost: the kernels that the inner backend failed on, by name: why.
    draws: whether to draw masks, as is always done where nothing is compiled.
    plain: compiles the graphs without attention, or all where attn_fuse `only_looks`, as written; with the others a
        backward is compiled at once. None leaves all of them to the inner backend.
    """

    options: Options
    fuel: Fuel
    constants: frozenset[str] = frozenset()
    locations: tuple[Location, ...] = ()
    unfit: str = ""
    lost: Mapping[str, str] = field(default_factory=dict)
    draws: bool = False
    plain: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]] | None = None
    only_looks: bool = False

    def compiled(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """`graph` rewritten, reported, compiled by the inner backend, and guarded: by the first attempt that does it.

        Raises NotFusedError under `strict` where a site is not fused.
        """
        tried: Callable[..., Any] | Attempt = self
        while isinstance(tried, Attempt):
            tried = tried.tried(graph, inputs)
        return tried

    def tried(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any] | Attempt:
        """The compiled `graph`, or the attempt to make next where the inner backend fails on what was rewritten."""
        started, looks = time.perf_counter(), may_hold_attention(graph)
        shown = looks or not self.options.compiles
        before = code_of(graph) if shown else ""
        # A checkpoint around this call must not count the tensors that the stages save, nor their operations.
        with saved_tensors_hooks_aside(), dispatch_modes_aside():
            found, called, failed = self._found(graph, inputs) if looks else (Rewritten(graph, [], ()), (), ())
            broken, notes = self._broken(graph)
        given, fuses = graph, any(site.fused for site in found.sites)
        # The inner backend may change the graph that it is given.
        original = graph if fuses or not found.sites else copied(graph)
        graph = found.graph if fuses else graph
        sites = (*relocated(found.sites, self.locations), *broken, *called)
        seconds = time.perf_counter() - started
        report = GraphReport(sites, seconds, (*notes, *failed), before, code_of(graph) if shown else "")
        if self.plain is not None and (self.only_looks or not (found.sites or called)):
            record(report)
            return self.plain(given, inputs)
        templated = {site.kernel for site in found.sites if site.fused and site.kernel in _TEMPLATED}
        try:
            if self.options.strict:
                require_all_fused(report.sites)
            compiled = self.by_inner_backend(graph, inputs, backward_now=bool(templated or self.plain))
        except Exception as problem:  # rule 5: what the inner backend fails on must not break the model
            # A graph with fused sites is a copy, so the one that came is as it was.
            if fuses and (following := self._after(problem, templated)):
                return following
            record(report)
            raise
        record(report)
        if not found.sites:
            return compiled
        again = replace(
            self,
            constants=frozenset(f"L['values'][{proof.input}]" for proof in found.proofs),
            locations=tuple(site.location for site in sites[: len(found.sites)]),
        )
        return guarded(compiled, original, inputs, found.proofs, again.compiled, self.by_inner_backend)

    def _after(self, problem: Exception, templated: Set[str | None]) -> Attempt | None:
        """The attempt after `problem`, a failure on a graph with fused sites; None to raise it."""
        if isinstance(problem, (RestartsDynamo, NotFusedError)):
            return None
        if templated:
            log.warning("a graph is compiled without %s, since that failed", *templated, exc_info=True)
            why = f"{NOT_COMPILED} it: {named(problem)}"
            return replace(self, lost={**self.lost, **dict.fromkeys(map(str, templated), why)})
        if self.options.strict:
            return None
        log.warning("a graph is compiled as written, since compiling it with fused attention failed", exc_info=True)
        return replace(self, unfit=f"{_UNCOMPILED}: {named(problem)}")

    def rewritten(self, original: GraphModule, inputs: Sequence[Any], left: Mapping[int, Failure | None]) -> Rewritten:
        """A copy of the graph `original` with its sites rewritten, by all stages before the inner backend.

        left: the sites that stay as written, by number: what failed there, None for nothing known.
        """
        started, graph, options = time.perf_counter(), copied(original), self.options
        rewriter = Rewriter(
            graph,
            inputs,
            self._picker(),
            self.fuel.allows,
            written=expand(graph, functionalize(graph)),
            left=left,
            constants=self.constants,
            compiled=options.inner_backend == "inductor",
            draws=self.draws or not options.compiles,
            repro=None if options.repro is None else writer(options, graph, inputs),
        )
        sites = rewriter.rewrite(options.seconds, started)
        return Rewritten(graph, sites, tuple(rewriter.proofs.values()), rewriter.keeps_nan, tuple(rewriter.notes))

    def _picker(self) -> Callable[[Recognised, Mapping[str, str]], Choice]:
        if self.unfit:
            return lambda *_: Choice(None, {}, self.unfit)
        options, chosen = self.options, chosen_kernels()
        allowed, fuse_all = options.kernels if chosen is None else chosen, options.pick == "fused"
        how = attn_fuse, options.inner_backend, options.mode

        def picked(x: Recognised, unfit: Mapping[str, str]) -> Choice:
            proved = {leaf: repr(proof.form) for leaf, proof in x.proofs.items()}
            run = SiteRun(x.region, x.attention, x.facts, x.values, proved, *how)
            stopwatch = run.times if options.pick == "measured" else None
            self_check = run.check if options.try_unmeasured else None
            return pick(x.attention, x.facts, stopwatch, allowed, fuse_all, self_check, {**self.lost, **unfit})

        return picked

    def _found(
        self, graph: GraphModule, inputs: Sequence[Any]
    ) -> tuple[Rewritten, tuple[SiteReport, ...], tuple[str, ...]]:
        """`graph` rewritten, its calls of kernels that are not ours, and a note where the stages fail on all of it."""
        rewrite = functools.partial(self.rewritten, graph, inputs)
        try:
            found = rewrite({})
            if self.options.check:
                found = without_disagreements(graph, inputs, rewrite, found)
            return found, tuple(calls_in(graph)), found.notes
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


def require_all_fused(sites: Sequence[SiteReport]) -> None:
    """Raise NotFusedError, with the reasons, where one of `sites` was left as written."""
    left = [f"{site.location}: {headline(site)}" for site in sites if site.status in ("refused", "as written")]
    if left:
        raise NotFusedError(f"strict: {len(left)} of {len(sites)} attentions not fused: " + "; ".join(left))
