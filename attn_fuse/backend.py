"""The torch.compile backend: Dynamo's graph in, a guarded callable out."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from attn_fuse.advice.change import change
from attn_fuse.advice.code import by_hand
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
from attn_fuse.kernels.elsewhere import elsewhere
from attn_fuse.options import Fuel, Options, chosen_kernels, fuel_of, parse_options
from attn_fuse.picker.peak import attention_share
from attn_fuse.picker.pick import LARGER, NOT_COMPILED, Choice, from_length, pick
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
_REPORT = "Please report it with the traceback from the log."
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

    ``torch.compile(model, backend="attn_fuse", options=..., mode=...)`` calls it; see `Options`.
    Raises OptionError for an unknown option or an impossible value, and NotFusedError under `strict`.
    """
    return Attempt(parse_options(options, mode), fuel_of(options)).compiled(graph, example_inputs)


def analyze_only(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    codes: bool = False,
) -> Callable[..., Any]:
    """`graph` rewritten and reported as by `attn_fuse`, but not compiled. Raises the same errors.

    codes: whether to write the code for each attention.
    """
    parsed = replace(parse_options(options), compiles=False)
    return Attempt(parsed, fuel_of(options), codes=codes).compiled(graph, example_inputs)


@dataclass(frozen=True)
class Attempt:
    """One attempt to compile a graph.

    constants: source names of arguments to treat as constants.
    locations: the places of the sites, for a graph that is captured again and has lost them.
    unfit: why all sites stay as written; "" to judge each site.
    lost: kernels on which the inner backend failed, each with the reason.
    draws: whether to draw masks and to look for changes. Without compiling both are always done.
    codes: whether to write the code for each attention.
    plain: compiles graphs without attention as written, or all graphs if attn_fuse `only_looks`. The backward of other
        graphs is then compiled at once. None leaves everything to the inner backend.
    """

    options: Options
    fuel: Fuel
    constants: frozenset[str] = frozenset()
    locations: tuple[Location, ...] = ()
    unfit: str = ""
    lost: Mapping[str, str] = field(default_factory=dict)
    draws: bool = False
    codes: bool = False
    plain: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]] | None = None
    only_looks: bool = False

    def compiled(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """`graph` rewritten, reported, compiled and guarded by the first attempt that succeeds.

        Raises NotFusedError under `strict` if a site is not fused.
        """
        tried: Callable[..., Any] | Attempt = self
        while isinstance(tried, Attempt):
            tried = tried.tried(graph, inputs)
        return tried

    def tried(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any] | Attempt:
        """The compiled `graph`, or the next attempt if the inner backend fails on the rewritten graph."""
        started, looks = time.perf_counter(), may_hold_attention(graph)
        shown = looks or not self.options.compiles
        before = code_of(graph) if shown else ""
        # A checkpoint around this call must not see the operations and saved tensors of the stages.
        with saved_tensors_hooks_aside(), dispatch_modes_aside():
            found, called, failed = self._found(graph, inputs) if looks else (Rewritten(graph, [], ()), (), ())
            broken, notes = self._broken(graph)
        fuses = any(site.fused for site in found.sites)
        made = found.graph if fuses else graph
        # The inner backend may change the graph that it is given.
        original = copied(graph) if found.sites and not fuses else graph
        sites = (*relocated(found.sites, self.locations), *broken, *called)
        seconds = time.perf_counter() - started
        report = GraphReport(sites, seconds, (*notes, *failed), before, code_of(made) if shown else "")
        if self.plain is not None and (self.only_looks or not (found.sites or called)):
            record(report)
            return self.plain(graph, inputs)
        templated = {site.kernel for site in found.sites if site.fused and site.kernel in _TEMPLATED}
        try:
            if self.options.strict:
                require_all_fused(report.sites)
            compiled = self.by_inner_backend(made, inputs, backward_now=bool(templated or self.plain))
        except Exception as problem:  # rule 5: a failure on a rewritten graph must not break the model
            # The rewritten graph was a copy, so `graph` is unchanged.
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
        """The attempt after `problem`, a failure on a graph with fused sites; None to raise `problem`."""
        if isinstance(problem, (RestartsDynamo, NotFusedError)):
            return None
        if templated:
            log.warning("a graph is compiled without %s, which failed", *templated, exc_info=True)
            why = f"{NOT_COMPILED} it: {named(problem)}"
            return replace(self, lost={**self.lost, **dict.fromkeys(map(str, templated), why)})
        if self.options.strict:
            return None
        log.warning("a graph is compiled as written because compiling it with fused attention failed", exc_info=True)
        return replace(self, unfit=f"{_UNCOMPILED}: {named(problem)}")

    def checked(self, original: GraphModule, inputs: Sequence[Any]) -> Rewritten:
        """`original` rewritten; the option `check` undoes wrong rewrites."""
        rewrite = functools.partial(self.rewritten, original, inputs)
        found = rewrite({})
        return without_disagreements(original, inputs, rewrite, found) if self.options.check else found

    def rewritten(self, original: GraphModule, inputs: Sequence[Any], left: Mapping[int, Failure | None]) -> Rewritten:
        """A copy of `original` after all stages before the inner backend.

        left: the numbers of sites to leave as written, each with its failure if it is known.
        """
        started, graph, options = time.perf_counter(), copied(original), self.options
        rewriter = Rewriter(
            graph,
            inputs,
            self._picker(graph),
            self.fuel.allows,
            written=expand(graph, functionalize(graph)),
            left=left,
            constants=self.constants,
            compiled=options.inner_backend == "inductor",
            draws=self.draws or not options.compiles,
            coder=functools.partial(by_hand, original) if self.codes else None,
            changer=change if self.draws or not options.compiles else None,
            repro=None if options.repro is None else writer(options, graph, inputs),
        )
        return rewriter.rewrite(options.seconds, started)

    def _picker(self, graph: GraphModule) -> Callable[[Recognised, Mapping[str, str]], Choice]:
        if self.unfit:
            return lambda *_: Choice(None, {}, self.unfit)
        options, chosen = self.options, chosen_kernels()
        allowed, fuse_all = options.kernels if chosen is None else chosen, options.pick == "fused"
        how = {"inner_backend": options.inner_backend, "mode": options.mode}
        share_of = functools.cache(lambda training: attention_share(graph, training))
        known: dict[Any, Choice] = {}

        def picked(x: Recognised, unfit: Mapping[str, str]) -> Choice:
            # Equal layers share their analysis. Attentions over other spaces may be equal, but are not the same.
            key = id(x.attention.space), x.attention, x.facts, *unfit.items()
            if key not in known:
                known[key] = chosen_for(x, unfit)
            return known[key]

        def chosen_for(x: Recognised, unfit: Mapping[str, str]) -> Choice:
            facts, stopwatch, self_check = x.facts, None, None
            proved = {leaf: repr(proof.form) for leaf, proof in x.proofs.items()}
            run = SiteRun(x.region, x.attention, x.facts, x.values, proved, attn_fuse, how)
            if elsewhere() is not None:
                facts = replace(facts, device=torch.device("cuda"))
            else:
                stopwatch = run.times if options.pick == "measured" else None
                self_check = run.check if options.try_unmeasured else None
            share = share_of(facts.training) if options.pick == "memory" else 0.0
            choice = pick(x.attention, facts, stopwatch, allowed, fuse_all, self_check, {**self.lost, **unfit}, share)
            if choice.is_slower and not options.compiles and (longer := from_length(x.attention, facts)):
                choice = replace(choice, advice=f"{longer}; {choice.advice.removeprefix(LARGER)}")
            return choice

        return picked

    def _found(
        self, graph: GraphModule, inputs: Sequence[Any]
    ) -> tuple[Rewritten, tuple[SiteReport, ...], tuple[str, ...]]:
        """(`graph` rewritten, its calls of kernels that are not ours, a note if the stages fail on the whole graph)"""
        try:
            found = self.checked(graph, inputs)
            return found, tuple(calls_in(graph)), found.notes
        except Exception as problem:  # rule 5: a failure in here must not break the model
            if self.options.strict:
                raise
            log.warning("a graph stays as written because analysing it failed", exc_info=True)
            return Rewritten(graph, [], ()), (), (f"{GRAPH_FAILED}: {named(problem)}. {_REPORT}",)

    def _broken(self, graph: GraphModule) -> tuple[tuple[SiteReport, ...], tuple[str, ...]]:
        """(the attentions that a graph break leaves to Python, notes on the whole graph)"""
        try:
            sites, notes = at_the_end(graph)
        except Exception:  # rule 5: a report must not break a model
            log.debug("the graph's break cannot be read", exc_info=True)
            sites, notes = (), ()
        off = self.options.inner_backend == "inductor" and self.options.compiles
        return sites, (_PATTERNS_OFF, *notes) if off else notes

    def by_inner_backend(
        self, graph: GraphModule, inputs: Sequence[Any], backward_now: bool = False
    ) -> Callable[..., Any]:
        """`graph` compiled by the inner backend, without Inductor's own attention patterns.

        backward_now: compile the backward at once, to see its failures now.
        """
        if not self.options.compiles:
            return graph
        if self.options.inner_backend != "inductor":
            return compile_with(self.options.inner_backend, self.options.mode, graph, inputs)
        inductor = dict(self.options.inductor)
        with without_inductor_attention(inductor.pop("joint_custom_post_pass", None)):
            return compile_with(self.options.inner_backend, self.options.mode, graph, inputs, inductor, backward_now)


def require_all_fused(sites: Sequence[SiteReport]) -> None:
    """Raise NotFusedError, with the reasons, if one of `sites` was left as written."""
    left = [f"{site.location}: {headline(site)}" for site in sites if site.status in ("refused", "as written")]
    if left:
        raise NotFusedError(f"strict: {len(left)} of {len(sites)} attentions not fused: " + "; ".join(left))
