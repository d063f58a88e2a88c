"""Sites: take each region of a graph through the stages, from its normal form to the kernel's call."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attn_fuse.analysis import Analysis, analyse
from attn_fuse.attention.attention import Attention, Refusal
from attn_fuse.attention.describe import in_words, plain
from attn_fuse.attention.facts import Facts, facts_of
from attn_fuse.emit.builder import NotEmitted
from attn_fuse.emit.check import Rewritten
from attn_fuse.emit.picture import Picture, picture
from attn_fuse.emit.splice import emit
from attn_fuse.errors import named
from attn_fuse.expression import nodes as ex
from attn_fuse.graph.location import locate
from attn_fuse.graph.names import op_name, value_of
from attn_fuse.graph.nan_reads import nan_reads
from attn_fuse.graph.region import Region, Site, find_sites, fingerprint
from attn_fuse.graph.replay import observed
from attn_fuse.graph.scopes import Scope, StillWritten, is_frozen, scopes
from attn_fuse.guard import Proof
from attn_fuse.kernels.elsewhere import elsewhere
from attn_fuse.lift.closed_forms import ClosedForm, Diagonals, closed_form
from attn_fuse.picker.pick import FAILURES, WEIGHTS_USED, Choice
from attn_fuse.report import Blocker, Code, Failure, Location, SiteReport, bytes_in_words, log
from attn_fuse.torch_internals import FakeTensorMode, source_name


@dataclass(frozen=True, eq=False)
class Recognised:
    """A region that is proved to be an attention.

    mode: the fake mode of its normal form. values: example inputs by leaf. proofs: the proved contents of leaves.
    used: the proofs that the attention rests on. words: facts about the attention, by name. expression: the attention
    as mathematics.
    """

    region: Region
    attention: Attention
    facts: Facts
    mode: FakeTensorMode
    values: Mapping[Node, Any]
    proofs: Mapping[Node, Proof]
    used: tuple[Proof, ...]
    words: dict[str, str]
    expression: str


# Arguments: a region, the known contents of its leaves, the leaves that the program holds itself, the failure.
Repro = Callable[[Region, Mapping[Node, Any], frozenset[Node], Failure], str]
# The source of an argument, alone or in a container: its contents change from call to call.
_ARGUMENT = re.compile(r"L\['[^']+'\](\[[^\]]+\])*")
# Arguments: an attention, a function that reads a region, a function that gives the tensors of a region's leaves.
# The result is the code, or why there is none.
Coder = Callable[
    [Recognised, Callable[[Region], Refusal | Recognised], Callable[[Region], Mapping[Node, Any]]], Code | str
]
# Rounding errors of an ordinary score that a kernel's backward recomputes in another order.
_ROUNDINGS_OF_A_SCORE = 64


@dataclass
class Rewriter:
    """Rewrites the sites of one graph.

    inputs: the graph's example inputs.
    pick: chooses the kernel of a site; its second argument says why kernels cannot be called there.
    may_rewrite: asked with the report of each site before it is rewritten.
    written: the memory that each subgraph still writes, by path.
    left: the numbers of sites to leave as written, each with its failure if it is known.
    constants: source names of arguments to treat as constants.
    compiled: whether Inductor compiles the graph. draws: whether to draw masks and biases.
    repro: writes the script that shows a failure, and gives its path.
    coder: writes the code for an attention; its functions read a region that is cut elsewhere, and give the example
        tensors of its leaves.
    changer: finds the statement to change for an attention that is left; see `advice.change`.
    """

    graph: GraphModule
    inputs: Sequence[Any]
    pick: Callable[[Recognised, Mapping[str, str]], Choice]
    may_rewrite: Callable[[SiteReport], bool]
    written: Mapping[str, StillWritten] = field(default_factory=dict)
    left: Mapping[int, Failure | None] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()
    compiled: bool = True
    draws: bool = False
    repro: Repro | None = None
    coder: Coder | None = None
    changer: Callable[[Node, Location | None, Callable[[], str]], Code | None] | None = None

    def __post_init__(self) -> None:
        self._placeholders = {n: i for i, n in enumerate(self.graph.graph.find_nodes(op="placeholder"))}
        self._is_frozen = is_frozen(self.graph)
        self._forms: dict[int, ClosedForm | Diagonals | None] = {}
        self._known: dict[Any, Analysis] = {}
        self._codes: dict[Any, Code | str] = {}
        self._changes: dict[Any, Code | None] = {}
        # By the number of the input, for the guard.
        self._proofs: dict[int, Proof] = {}
        self._keeps_nan = True
        self._notes: list[str] = []
        # On the current site.
        self._failures: list[Failure] = []
        self._seconds_apart = 0.0
        # The output of each fused region -> the node that replaced it, which a later region may read.
        self._replaced: dict[Node, Node] = {}

    def rewrite(self, seconds: float, started: float) -> Rewritten:
        """The graph with its sites fused where possible, and a report on each.

        seconds: the max time since `started`, by `time.perf_counter`. Later sites stay as written. Picking does not
            count, because it may compile and measure, nor does what only a report needs.
        """
        reports: list[SiteReport] = []
        for scope in scopes(self.graph):
            # Find all sites first, because rewriting changes the graph.
            for site in list(find_sites(scope, self.written.get(scope.path))):
                if all(isinstance(region, Region) and not region.output.users for region in site.candidates):
                    continue  # erased as a part of a fused site
                late = time.perf_counter() - self._seconds_apart > started + seconds
                self._failures.clear()
                why = self._left(site, len(reports), seconds if late else None)
                report = self._site(site) if why is None else None if site.unsure else _refused(why, site.softmax)
                if report is not None:
                    with self._apart():
                        report = report if why is not None else self._with_change(report, site, scope)
                    reports.append(replace(report, failures=tuple(self._failures)))
        for scope in scopes(self.graph):
            scope.module.recompile()
        return Rewritten(self.graph, reports, tuple(self._proofs.values()), self._keeps_nan, tuple(self._notes))

    def _left(self, site: Site, number: int, spent: float | None) -> Refusal | None:
        """Why site `number` stays as written without analysis, or None. spent: the seconds if they are over."""
        if spent is not None:
            return Refusal(f"not looked at: {spent:g} seconds had passed", advice="raise the option seconds")
        if number not in self.left:
            return None
        failure = self.left[number]
        if failure is None:
            return Refusal("")
        return Refusal(failure.what, advice=self._failed(self._attention_of(site), failure))

    def _attention_of(self, site: Site) -> Region | None:
        """The candidate of the site that is an attention, or None."""
        for region in site.candidates:
            if isinstance(region, Region):
                with torch.set_grad_enabled(region.mode.grad):
                    found = self.judged(region)
                if isinstance(found, Recognised):
                    return found.region
        return None

    def _failed(self, region: Region | None, failure: Failure) -> str:
        """Advice on a failure. Keeps the failure for the report, and writes a script if one is asked for."""
        advice = "report this failure of attn_fuse; options={'repro': 'DIR'} writes a script that shows it"
        if self.repro is not None and region is not None:
            where = locate(region.softmax)
            try:
                file = self.repro(region, self._values(region), self._held(region), failure)
                log.warning("%s: %s reproduces the failure: %s", where, file, failure.what)
                failure, advice = replace(failure, file=file), f"report this failure of attn_fuse with {file}"
            except Exception as problem:  # a script must not cost a model
                log.warning("%s: no script could be written for the failure", where, exc_info=True)
                self._notes.append(f"no script could be written for the failure at {where}: {named(problem)}")
        self._failures.append(failure)
        return advice

    # ---- one site

    def _site(self, site: Site) -> SiteReport | None:
        """The report on the first candidate that is an attention, else on the first; for an unsure site, else None."""
        reports = []
        for candidate in site.candidates:
            reports.append(self._candidate(candidate, site))
            if reports[-1].attention:
                break
        report = reports[-1] if reports[-1].attention else reports[0]
        if site.is_fused_already and not report.fused:
            return SiteReport(locate(site.softmax), "already fused")
        return None if site.unsure and not report.attention else report

    def _candidate(self, region: Region | Refusal, site: Site) -> SiteReport:
        if isinstance(region, Refusal):
            return _refused(region, site.softmax)
        try:
            with torch.set_grad_enabled(region.mode.grad):
                found = self.judged(region)
                if isinstance(found, Refusal):
                    return _refused(found, region.softmax)
                if site.is_fused_already and not _gains(found.region.output, found.attention, found.facts):
                    return SiteReport(locate(region.softmax), "already fused")
                return self.placed(found)
        except Exception as problem:  # rule 5: nothing that fails here may break the model
            where = locate(region.softmax)
            log.warning("%s: the attention stays as written because analysing it failed", where, exc_info=True)
            failure = Failure(f"analysing it failed: {named(problem)}")
            advice = self._failed(region.reading(self._replaced), failure)
            return _refused(Refusal(failure.what, advice=advice), region.softmax)

    def judged(self, region: Region) -> Refusal | Recognised:
        """The attention that `region` is proved to compute, or a Refusal."""
        if self._replaced.keys() & set(region.nodes):
            return Refusal("the scores are made from another attention", region.softmax)
        region = region.reading(self._replaced)
        proofs = self._constants(region)
        analysis = self._analyse(region, proofs)
        region, attention = analysis.region, analysis.result
        if isinstance(attention, Refusal):
            return replace(attention, expression=analysis.expression)
        operands = (attention.query, attention.key, attention.value)
        if not region.whole and any(ex.parts(side, ex.Select) for side in operands):
            return Refusal("an operand is written in part", region.output)
        if attention.dropout_p is not None and (used := region.dropped_weights_used) is not None:
            return Refusal("the weights after dropout are also used outside the attention", used)
        facts = replace(
            facts_of(attention, [_as_read(leaf, region) for leaf in region.leaves]),
            weights_used=region.weights_used is not None,
            compiled=self.compiled,
            checkpointed=bool(region.scope.path) and self._is_frozen,
            nan_read=self._nan_reads.get(region.output, ""),
        )
        if facts.training and (factor := _lost_in_rounding(attention, facts)) is not None:
            return Refusal(f"the scores are scaled by {factor:g}, and lose precision when the backward recomputes them")
        read_along = {region.leaves[gather.leaf] for gather in ex.parts(attention.score, ex.Gather)}
        proofs = {leaf: proof for leaf, proof in proofs.items() if leaf in region.leaves}
        used = tuple(p for leaf, p in proofs.items() if leaf in read_along or not isinstance(p.form, Diagonals))
        words = in_words(attention, facts, tuple(f"the contents of {plain(p.source)}, {p.form}" for p in used))
        values, expression = self._values(region), analysis.expression
        return Recognised(region, attention, facts, analysis.mode, values, proofs, used, words, expression)

    def placed(self, found: Recognised) -> SiteReport:
        """Put an attention on the kernel picked for it, or leave it as written; the report on it."""
        attention, unfit = found.attention, dict[str, str]()
        choice = self._picked(found, unfit)
        where, (drawn, biases), advice = locate(found.region.softmax), self._drawn(found), ""
        for name, why in ((None, choice.because), *((name, reasons[0]) for name, reasons in choice.why_not.items())):
            if why.startswith(FAILURES):
                advice = self._failed(found.region, Failure(why if name is None else f"{name}: {why}", name))
        left = SiteReport(where, "as written", found.words, expression=found.expression, picture=drawn, bias=biases)
        with self._apart():
            left = self._with_code(left, found)
        while (kernel := choice.kernel) is not None:
            left = replace(left, attention=found.words | {"picked": choice.because})
            left = replace(left, why_not=choice.why_not, ratios=dict(choice.ratios))
            report = replace(left, status="fused", kernel=kernel.name, score_bytes=found.facts.score_bytes)
            if not self.may_rewrite(report):
                out_of_fuel = Refusal("the fuel is used up", advice="raise the option fuel")
                return replace(left, blocker=_blocker(out_of_fuel, found.region.softmax))
            if elsewhere() is not None:
                return report
            try:
                made = emit(found.region, attention, found.facts, kernel.emit, found.mode)
            except NotEmitted as problem:
                if not isinstance(problem.__cause__, NotEmitted):  # an error in the kernel, not a limit of it
                    failure = Failure(f"{kernel.name} cannot be called: {problem}", kernel.name)
                    advice = self._failed(found.region, failure)
                unfit[kernel.name] = f"its call cannot be written into the graph: {problem}"
                choice = self._picked(found, unfit)
            else:
                self._replaced[found.region.output] = made
                self._proofs |= {proof.input: proof for proof in found.used}
                self._keeps_nan &= kernel.keeps_nan and not attention.zero_for_nan
                return report
        # If kernels decline a function of the scores, the operation that makes it one is to blame.
        unread = attention.unread
        culprit = unread.node if unread is not None and unread.reason in choice.because else None
        blocker = _blocker(Refusal(choice.because, culprit, advice or choice.advice), found.region.softmax)
        why_not, ratios = choice.why_not, dict(choice.ratios)
        return replace(left, attention=found.words, why_not=why_not, ratios=ratios, blocker=blocker)

    def _picked(self, found: Recognised, unfit: Mapping[str, str]) -> Choice:
        with self._apart():
            return self.pick(found, unfit)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """A block whose time does not count."""
        started = time.perf_counter()
        yield
        self._seconds_apart += time.perf_counter() - started

    def _drawn(self, found: Recognised) -> Picture:
        """The pictures of the mask and the biases; empty if nobody asked for them or they cannot be drawn."""
        if not self.draws:
            return (), ()
        try:
            return picture(found.region, found.attention, found.facts, found.mode, found.values)
        except Exception:  # a report must not cost a fusion
            log.warning("%s: its mask cannot be drawn", locate(found.region.softmax), exc_info=True)
            return (), ()

    def _with_code(self, report: SiteReport, found: Recognised) -> SiteReport:
        """`report` with the code to write by hand, if it was asked for."""
        if self.coder is None:
            return report
        # Layers that are alike share their code.
        where = replace(locate(found.region.output), module="")
        key = where, fingerprint(found.region, {leaf: proof.form for leaf, proof in found.proofs.items()})
        if key not in self._codes:
            try:
                self._codes[key] = self.coder(found, self.judged, self._observed)
            except Exception as problem:  # a report must not cost a fusion
                log.warning("%s: its code cannot be written", report.location, exc_info=True)
                self._codes[key] = f"writing it failed: {named(problem)}"
        code = self._codes[key]
        return replace(report, no_code=code) if isinstance(code, str) else replace(report, code=code)

    def _with_change(self, report: SiteReport, site: Site, scope: Scope) -> SiteReport:
        """`report` with the lines to change, if they were asked for and the site is left for what it computes."""
        blocker = report.blocker
        if self.changer is None or blocker is None or (report.attention and blocker.reason != WEIGHTS_USED):
            return report
        # Equal layers share their change, if what reads their scores and weights is equal, too.
        regions = [x for x in site.candidates if isinstance(x, Region)]
        readers = [op_name(user) for x in regions for node in x.nodes for user in node.users if user not in x.nodes]
        written = (*(fingerprint(x, {}) for x in regions), str(value_of(site.softmax)), *readers)
        key = blocker.reason, replace(report.location, module=""), *written
        if key not in self._changes:
            try:
                self._changes[key] = self.changer(site.softmax, blocker.location, lambda: self._outcome(site, scope))
            except Exception:  # a report must not cost a fusion
                log.warning("%s: no change can be found for it", report.location, exc_info=True)
                self._changes[key] = None
        return replace(report, blocker=replace(blocker, change=self._changes[key]))

    def _outcome(self, site: Site, scope: Scope) -> str:
        """What becomes of the site in the graph at the time of the call; "" if it is left."""
        again = replace(self, coder=None, changer=None, repro=None)
        again._forms, again._replaced = self._forms, self._replaced
        scope = next(now for now in scopes(self.graph) if now.path == scope.path)  # knows the nodes made since
        sites = (other for other in find_sites(scope, self.written.get(scope.path)) if other.softmax is site.softmax)
        for region in (x for other in sites for x in other.candidates if isinstance(x, Region)):
            with torch.set_grad_enabled(region.mode.grad):
                found = again.judged(region)
                choice = None if isinstance(found, Refusal) else self.pick(found, {})
            if isinstance(found, Recognised) and choice is not None and choice.kernel is not None:
                less = bytes_in_words(found.facts.score_bytes)
                return f"it is then fused on {choice.kernel.name}, without {less} of scores"
            if choice is not None and choice.is_slower:
                return "it is then recognised, and fused at larger sizes"
        return ""

    def _analyse(self, region: Region, proofs: Mapping[Node, Proof]) -> Analysis:
        """The analysis of the region, which identical layers share."""
        key = fingerprint(region, {leaf: proof.form for leaf, proof in proofs.items()})
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = analyse(region, proofs)
        return known.moved_to(region)

    def _tops(self, region: Region) -> dict[Node, Node]:
        """The nodes of the whole graph that leaves stand for, by leaf."""
        return {leaf: top for leaf in region.leaves if (top := region.scope.top(leaf)) is not None}

    def _values(self, region: Region) -> dict[Node, Any]:
        """The example inputs that leaves stand for, by leaf."""
        numbers = {leaf: self._placeholders.get(top) for leaf, top in self._tops(region).items()}
        return {leaf: self.inputs[number] for leaf, number in numbers.items() if number is not None}

    def _observed(self, region: Region) -> Mapping[Node, Any]:
        values = self._values(region)
        return {**observed(region, values, self.graph, self.inputs), **values}

    # ---- constants

    def _held(self, region: Region) -> frozenset[Node]:
        """The leaves that are buffers and parameters of the program, not arguments."""
        tops = self._tops(region).items()
        return frozenset(leaf for leaf, top in tops if top.op == "get_attr" or self._is_constant(source_name(top)))

    def _constants(self, region: Region) -> dict[Node, Proof]:
        """The proofs of constant leaves that have a closed form and can be guarded."""
        proofs = {}
        for leaf, top in self._tops(region).items():
            number = self._placeholders.get(top)
            if leaf in region.operands or number is None:
                continue
            tensor, source = self.inputs[number], source_name(top)
            if type(tensor) is not torch.Tensor or tensor.requires_grad:
                continue
            # A tensor made under inference_mode counts no versions, so later edits go unnoticed.
            if not self._is_constant(source) or tensor.is_inference():
                continue
            if number not in self._forms:
                self._forms[number] = closed_form(tensor)
            if (form := self._forms[number]) is not None:
                proofs[leaf] = Proof(number, form, source)
        return proofs

    @functools.cached_property
    def _nan_reads(self) -> dict[Node, str]:
        # First asked before any region is rewritten.
        return nan_reads(self.graph)

    def _is_constant(self, source: str) -> bool:
        return source in self.constants or (bool(source) and _ARGUMENT.fullmatch(source) is None)


def _as_read(leaf: Node, region: Region) -> object:
    value = value_of(leaf)
    return value.detach() if isinstance(value, torch.Tensor) and leaf in region.detached else value


def _lost_in_rounding(attention: Attention, facts: Facts) -> float | None:
    """A factor of the scores so large that their rounding errors change the exponential; None without one."""
    limit = 1 / (_ROUNDINGS_OF_A_SCORE * torch.finfo(torch.promote_types(facts.dtype, torch.float32)).eps)
    for part in ex.walk(attention.score):
        match part:
            case ex.Mul(x, ex.Const(value)) if ex.has_product(x) and limit < abs(value) < math.inf:
                return float(value)
            case ex.Div(x, ex.Const(value)) if ex.has_product(x) and value != 0 and limit < abs(1 / value):
                return 1 / value
    return None


def _gains(call: Node, attention: Attention, facts: Facts) -> bool:
    """Whether a kernel may beat a call of SDPA.

    A proof may show that the mask is causal, or that keys are shared. And torch itself stores every score for operands
    without four dimensions, and on the CPU for dropout.
    """
    named = dict(zip(_SDPA_ARGUMENTS, call.args, strict=False)) | dict(call.kwargs)
    if getattr(value_of(named["query"]), "ndim", 4) != 4 or (
        facts.device.type == "cpu" and attention.dropout_p is not None
    ):
        return True
    causal = attention.mask.is_causal and not attention.biases and named.get("attn_mask") is not None
    return causal or (facts.kv_heads != facts.heads and not named.get("enable_gqa", False))


_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _refused(refusal: Refusal, softmax: Node) -> SiteReport:
    blocker = _blocker(refusal, softmax)
    return SiteReport(locate(softmax), "refused", blocker=blocker, expression=refusal.expression)


def _blocker(refusal: Refusal, softmax: Node) -> Blocker:
    # The graph's output has no place in the source.
    node = refusal.node if isinstance(refusal.node, Node) and refusal.node.op != "output" else softmax
    op = op_name(node) if node.op.startswith("call_") else node.op
    return Blocker(refusal.reason, op, locate(node), refusal.advice)
