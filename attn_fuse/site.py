"""Sites: take each region of a graph through the stages, from its normal form to the call that replaces it."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attn_fuse.attention.attention import Attention, Refusal
from attn_fuse.attention.describe import in_words, plain, printed
from attn_fuse.attention.facts import Facts, facts_of
from attn_fuse.emit.builder import NotEmitted
from attn_fuse.emit.picture import picture
from attn_fuse.emit.splice import emit
from attn_fuse.errors import named
from attn_fuse.expression import nodes as ex
from attn_fuse.graph.fingerprint import fingerprint
from attn_fuse.graph.location import locate
from attn_fuse.graph.names import op_name, value_of
from attn_fuse.graph.nan_reads import nan_reads
from attn_fuse.graph.region import RefusedRegion, Region, Site, cut_at, find_sites
from attn_fuse.graph.scopes import StillWritten, is_frozen, scopes
from attn_fuse.guard import Proof, can_be_guarded
from attn_fuse.lift.closed_forms import ClosedForm, Diagonals, closed_form
from attn_fuse.lift.lift import Lifted, NotLifted, lift
from attn_fuse.lift.normalize import Normal, NotNormal, normalize
from attn_fuse.patterns.recognize import recognize
from attn_fuse.picker.pick import FAILURES, Choice
from attn_fuse.report import Blocker, Failure, SiteReport, log
from attn_fuse.torch_internals import FakeTensorMode, source_name


@dataclass(frozen=True, eq=False)
class Recognised:
    """A region that is proved to be an attention.

    mode: the fake mode of its normal form. values: the example inputs by the leaves that stand for them.
    proofs: the proved contents of leaves. used: those that the attention rests on.
    words: the attention in words, by name. expression: the attention as mathematics.
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


# The arguments: a region, the contents of its leaves at hand, the leaves that the program holds itself, what failed.
Repro = Callable[[Region, Mapping[Node, Any], frozenset[Node], Failure], str]
# The source of a tensor that the caller passes in, alone or in a container: the next call passes another tensor.
_ARGUMENT = re.compile(r"L\['[^']+'\](\[[^\]]+\])*")
_MOST_CUTS = 8
# The roundings by which an ordinary score differs when a kernel's backward computes it again, in another order.
_ROUNDINGS_OF_A_SCORE = 64


@dataclass
class Rewriter:
    """Rewrites the sites of one graph.

    inputs: the graph's example inputs. pick: chooses the kernel of a site, given why kernels cannot be called there.
    may_rewrite: asked with the report of each site about to be rewritten. emit: writes the kernel's call. written: by
    the path of a subgraph, the memory that it still writes. left: the sites that stay as written, each with what failed
    there, or None. constants: arguments to treat as constants. repro: writes a script that shows a failure, and gives
    its path. notes: sentences for the user.
    compiled: whether Inductor compiles the graph. draws: whether reports get a picture of the mask. proofs: what the
    rewrites rest on, by the number of the input, for the guard. keeps_nan: whether rows of the rewritten attentions are
    NaN wherever they are as written.
    """

    graph: GraphModule
    inputs: Sequence[Any]
    pick: Callable[[Recognised, Mapping[str, str]], Choice]
    may_rewrite: Callable[[SiteReport], bool]
    emit: Callable[..., Node] = emit
    written: Mapping[str, StillWritten] = field(default_factory=dict)
    left: Mapping[int, Failure | None] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()
    compiled: bool = True
    draws: bool = False
    repro: Repro | None = None
    proofs: dict[int, Proof] = field(default_factory=dict)
    keeps_nan: bool = True
    notes: list[str] = field(default_factory=list)
    _known: dict[Any, _Analysis] = field(default_factory=dict)

    def rewrite(self, seconds: float, started: float) -> list[SiteReport]:
        """The reports of all sites; the graph then has those fused that can be.

        seconds: the max time since `started`, by `time.perf_counter`, without the picking, which may compile and
            measure. The sites after that stay as written.
        """
        reports: list[SiteReport] = []
        for scope in scopes(self.graph):
            # Rewriting changes the graph, so find all sites before.
            for site in list(find_sites(scope, self.written.get(scope.path))):
                if all(isinstance(region, Region) and not region.output.users for region in site.candidates):
                    continue  # it was a part of a fused site, and was erased with it
                late = time.perf_counter() - self._picking > started + seconds
                self._failures.clear()
                why = self._left(site, len(reports), seconds if late else None)
                report = self._site(site) if why is None else None if site.unsure else _refused(why, site.softmax)
                if report is not None:
                    reports.append(replace(report, failures=tuple(self._failures)))
        for scope in scopes(self.graph):
            scope.module.recompile()
        return reports

    def _left(self, site: Site, number: int, spent: float | None) -> Refusal | None:
        """Why the site `number` is not looked at; None where it is. spent: the seconds that are over."""
        if spent is not None:
            return Refusal(f"not looked at: {spent:g} seconds had passed", advice="raise the option seconds")
        if number not in self.left:
            return None
        failure = self.left[number]
        if failure is None:
            return Refusal("")
        return Refusal(failure.what, advice=self._failed(self._attention_of(site), failure))

    def _attention_of(self, site: Site) -> Region | None:
        """The candidate of the site that is an attention, None without one."""
        for region in site.candidates:
            if isinstance(region, Region):
                with torch.set_grad_enabled(region.mode.grad):
                    found = self.judged(region)
                if isinstance(found, Recognised):
                    return found.region
        return None

    def _failed(self, region: Region | None, failure: Failure) -> str:
        """Advice on the failure, which is kept for the report, and shown by a script where one is asked for."""
        advice = "report this failure of attn_fuse; options={'repro': 'DIR'} writes a script that shows it"
        if self.repro is not None and region is not None:
            where = locate(region.softmax)
            try:
                file = self.repro(region, self._values(region), self._held(region), failure)
                log.warning("%s: %s shows by itself: %s", where, file, failure.what)
                failure, advice = replace(failure, file=file), f"report this failure of attn_fuse with {file}"
            except Exception as problem:  # a script must not cost a model
                log.warning("%s: no script shows the failure", where, exc_info=True)
                self.notes.append(f"no script shows the failure at {where}: {named(problem)}")
        self._failures.append(failure)
        return advice

    # ---- one site

    def _site(self, site: Site) -> SiteReport | None:
        """The report on the first candidate that is an attention, else on the first; None if unsure and none is."""
        reports = []
        for candidate in site.candidates:
            reports.append(self._candidate(candidate, site))
            if reports[-1].attention:
                break
        report = next((r for r in reports if r.attention), reports[0])
        if site.is_fused_already and not report.fused:
            return SiteReport(locate(site.softmax), "already fused")
        return None if site.unsure and not report.attention else report

    def _candidate(self, region: Region | RefusedRegion, site: Site) -> SiteReport:
        if isinstance(region, RefusedRegion):
            return _refused(region.refusal, region.softmax)
        try:
            with torch.set_grad_enabled(region.mode.grad):
                found = self.judged(region)
                if isinstance(found, Refusal):
                    return _refused(found, region.softmax)
                if site.is_fused_already and not _gains(found.region.output, found.attention, found.facts):
                    return SiteReport(locate(region.softmax), "already fused")
                return self.placed(found)
        except Exception as problem:  # rule 5: whatever goes wrong in here must not break the model
            where = locate(region.softmax)
            log.warning("%s: the attention stays as written, since analysing it failed", where, exc_info=True)
            failure = Failure(f"analysing it failed: {named(problem)}")
            advice = self._failed(region.reading(self._replaced), failure)
            return _refused(Refusal(failure.what, advice=advice), region.softmax)

    def judged(self, region: Region) -> Refusal | Recognised:
        """What `region` is proved to compute, or why it is not to be fused."""
        if self._replaced.keys() & set(region.nodes):
            return Refusal("the scores are made from another attention", region.softmax)
        region = region.reading(self._replaced)
        proofs = self._constants(region)
        analysis = self._analyse(region, proofs)
        region, attention = analysis.region, analysis.result
        if isinstance(attention, Refusal):
            return replace(attention, expression=analysis.expression)
        operands = (attention.query, attention.key, attention.value)
        if not region.whole and any(isinstance(x, ex.Select) for side in operands for x in ex.walk(side)):
            return Refusal("an operand is written in part", region.output)
        if attention.dropout_p is not None and (used := region.dropped_weights_used) is not None:
            return Refusal("the weights after dropout are also used outside the attention", used)
        facts = facts_of(
            attention,
            [_as_read(leaf, region) for leaf in region.leaves],
            region.weights_used is not None,
            self.compiled,
            bool(region.scope.path) and self._is_frozen,
        )
        facts = replace(facts, nan_read=self._nan_reads.get(region.output, ""))
        if facts.training and (factor := _lost_in_rounding(attention, facts)) is not None:
            return Refusal(f"the scores are scaled by {factor:g}: computed again for the backward they are others")
        read_along = {region.leaves[x.leaf] for x in ex.walk(attention.score) if isinstance(x, ex.Gather)}
        proofs = {leaf: proof for leaf, proof in proofs.items() if leaf in region.leaves}
        used = tuple(p for leaf, p in proofs.items() if leaf in read_along or not isinstance(p.form, Diagonals))
        words = in_words(attention, facts, tuple(f"the contents of {plain(p.source)}, {p.form}" for p in used))
        values, expression = self._values(region), analysis.expression
        return Recognised(region, attention, facts, analysis.mode, values, proofs, used, words, expression)

    def placed(self, found: Recognised) -> SiteReport:
        """The report on an attention that is now on the kernel picked for it, or left as written."""
        attention, unfit = found.attention, dict[str, str]()
        choice = self._picked(found, unfit)
        where, drawn, advice = locate(found.region.softmax), self._drawn(found), ""
        for name, why in ((None, choice.because), *((name, reasons[0]) for name, reasons in choice.why_not.items())):
            if why.startswith(FAILURES):
                advice = self._failed(found.region, Failure(why if name is None else f"{name}: {why}", name))
        left = SiteReport(where, "as written", found.words, expression=found.expression, picture=drawn)
        while (kernel := choice.kernel) is not None:
            left = replace(left, attention=found.words | {"picked": choice.because}, why_not=choice.why_not)
            report = replace(left, status="fused", kernel=kernel.name, score_bytes=found.facts.score_bytes)
            if not self.may_rewrite(report):
                out_of_fuel = Refusal("the fuel is used up", advice="raise the option fuel")
                return replace(left, blocker=_blocker(out_of_fuel, found.region.softmax))
            try:
                made = self.emit(found.region, attention, found.facts, kernel.emit, found.mode)
            except NotEmitted as problem:
                if not isinstance(problem.__cause__, NotEmitted):  # no limit of the kernel, but an error in it
                    failure = Failure(f"{kernel.name} cannot be called: {problem}", kernel.name)
                    advice = self._failed(found.region, failure)
                unfit[kernel.name] = f"its call cannot be written into the graph: {problem}"
                choice = self._picked(found, unfit)
                continue
            self._replaced[found.region.output] = made
            self.proofs |= {proof.input: proof for proof in found.used}
            self.keeps_nan &= kernel.keeps_nan and not attention.zero_for_nan
            return report
        # Where kernels decline a function of the scores, the operation that made it one is to blame.
        declined = attention.unread is not None and attention.unread.reason in choice.because
        culprit = attention.unread.node if declined and attention.unread else None
        blocker = _blocker(Refusal(choice.because, culprit, advice or choice.advice), found.region.softmax)
        return replace(left, attention=found.words, why_not=choice.why_not, blocker=blocker)

    def _picked(self, found: Recognised, unfit: Mapping[str, str]) -> Choice:
        started = time.perf_counter()
        choice = self.pick(found, unfit)
        self._picking += time.perf_counter() - started
        return choice

    def _drawn(self, found: Recognised) -> tuple[str, ...]:
        """The picture of the mask; empty where it is not asked for, or cannot be drawn."""
        if not self.draws:
            return ()
        try:
            return picture(found.region, found.attention, found.facts, found.mode, found.values)
        except Exception:  # a report must not cost a fusion
            log.warning("%s: its mask cannot be drawn", locate(found.region.softmax), exc_info=True)
            return ()

    def _analyse(self, region: Region, proofs: Mapping[Node, Proof]) -> _Analysis:
        """The analysis of the region; identical layers share the work."""
        key = fingerprint(region, {leaf: proof.form for leaf, proof in proofs.items()})
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _analyse(region, proofs)
        return known.moved_to(region)

    def _values(self, region: Region) -> dict[Node, Any]:
        """The example inputs by the leaves that stand for them."""
        tops = {leaf: region.scope.top(leaf) for leaf in region.leaves}
        return {
            leaf: self.inputs[self._placeholders[top]]
            for leaf, top in tops.items()
            if top is not None and top in self._placeholders
        }

    # ---- constants

    def _held(self, region: Region) -> frozenset[Node]:
        """The leaves that the program holds itself, as buffers and parameters, and is not called with."""
        tops = {leaf: region.scope.top(leaf) for leaf in region.leaves}
        held = {leaf: top.op == "get_attr" or self._is_constant(source_name(top)) for leaf, top in tops.items() if top}
        return frozenset(leaf for leaf, is_held in held.items() if is_held)

    def _constants(self, region: Region) -> dict[Node, Proof]:
        """The proofs of leaves that are constant, have a closed form, and can be guarded."""
        proofs = {}
        for leaf in region.leaves:
            top = region.scope.top(leaf)
            if leaf in region.operands or top is None or top.op != "placeholder":
                continue
            number = self._placeholders[top]
            tensor = self.inputs[number]
            if type(tensor) is not torch.Tensor or tensor.requires_grad:
                continue
            source = source_name(top)
            if not self._is_constant(source) or not can_be_guarded(tensor):
                continue
            form = self._closed_form(number, tensor)
            if form is not None:
                proofs[leaf] = Proof(number, form, source)
        return proofs

    @functools.cached_property
    def _nan_reads(self) -> dict[Node, str]:
        # First asked before any region is rewritten.
        return nan_reads(self.graph)

    def _is_constant(self, source: str) -> bool:
        return source in self.constants or (bool(source) and _ARGUMENT.fullmatch(source) is None)

    def _closed_form(self, number: int, tensor: torch.Tensor) -> ClosedForm | Diagonals | None:
        if number not in self._forms:
            self._forms[number] = closed_form(tensor)
        return self._forms[number]

    def __post_init__(self) -> None:
        self._placeholders = {n: i for i, n in enumerate(self.graph.graph.find_nodes(op="placeholder"))}
        self._is_frozen = is_frozen(self.graph)
        self._forms: dict[int, ClosedForm | Diagonals | None] = {}
        # What failed on the site that is looked at.
        self._failures: list[Failure] = []
        # The seconds that went into picking.
        self._picking = 0.0
        # The output of each fused region -> the node in its place, which a later region may read.
        self._replaced: dict[Node, Node] = {}


@dataclass(frozen=True, eq=False)
class _Analysis:
    """What is read of one region. cuts: operations read as leaves, by their number in the region they were cut from.

    expression: the attention as mathematics, or as much as was read.
    """

    region: Region
    result: Attention | Refusal
    mode: FakeTensorMode
    cuts: tuple[int, ...]
    expression: str = ""

    def moved_to(self, region: Region) -> _Analysis:
        """The same analysis for `region`, which consists of the same operations."""
        for number in self.cuts:
            cut = cut_at(region, region.nodes[number])
            assert cut is not None
            region = cut
        result = self.result
        if isinstance(result, Refusal):
            result = self._moved(result, region)
        elif result.unread is not None:
            result = replace(result, unread=self._moved(result.unread, region))
        return _Analysis(region, result, self.mode, self.cuts, self.expression)

    def _moved(self, refusal: Refusal, region: Region) -> Refusal:
        if refusal.node not in self.region.nodes:
            return refusal
        return replace(refusal, node=region.nodes[self.region.nodes.index(refusal.node)])


def _analyse(region: Region, proofs: Mapping[Node, Proof]) -> _Analysis:
    cuts: list[int] = []
    while True:
        try:
            normal = normalize(region)
        except NotNormal as problem:
            return _Analysis(region, Refusal(str(problem), problem.node), FakeTensorMode(), tuple(cuts))
        original: Any = value_of(region.output)
        made = normal.graph.graph.output_node().all_input_nodes[0].meta["val"]
        if original.dtype != made.dtype or len(original.shape) != len(made.shape):
            reason = Refusal("the dtype of its products depends on an autocast that is not visible here", region.output)
            return _Analysis(region, reason, normal.mode, tuple(cuts))
        forms = {n: proofs[leaf].form for n, leaf in enumerate(region.leaves) if leaf in proofs}
        try:
            lifted = lift(normal, forms)
            result = recognize(lifted)
            expression = _printed(result, lifted, region)
            if isinstance(result, Refusal):
                result = _at_its_operation(result, normal)
            elif result.unread is not None:
                result = replace(result, unread=_at_its_operation(result.unread, normal))
            return _Analysis(region, result, normal.mode, tuple(cuts), expression)
        except NotLifted as problem:
            cut = cut_at(region, problem.node) if problem.node is not None and len(cuts) < _MOST_CUTS else None
            if cut is None:
                return _Analysis(region, Refusal(str(problem), problem.node), normal.mode, tuple(cuts))
            cuts.append(region.nodes.index(problem.node))
            region = cut


def _printed(result: Attention | Refusal, lifted: Lifted, region: Region) -> str:
    """The mathematics that was read of a site; "" where it is too large to print, or cannot be printed."""
    try:
        return printed(result, lifted.element, {n: _leaf_name(leaf, region) for n, leaf in enumerate(region.leaves)})
    except Exception:  # what a report says must not cost a fusion
        log.warning("%s: its mathematics cannot be printed", locate(region.softmax), exc_info=True)
        return ""


def _leaf_name(leaf: Node, region: Region) -> str:
    top = region.scope.top(leaf)
    source = source_name(top) if top is not None and top.op == "placeholder" else ""
    return re.sub(r"^L\['([^']+)'\]", r"\1", plain(source)) if source else leaf.name


def _at_its_operation(refusal: Refusal, normal: Normal) -> Refusal:
    """`refusal` with a node of Dynamo's graph: the operation that made its node, a part of an expression."""
    made_by = ex.origin_of(refusal.node) if isinstance(refusal.node, ex.Expr) else None
    return replace(refusal, node=normal.origin.get(made_by))


def _as_read(leaf: Node, region: Region) -> object:
    value = value_of(leaf)
    return value.detach() if isinstance(value, torch.Tensor) and leaf in region.detached else value


def _lost_in_rounding(attention: Attention, facts: Facts) -> float | None:
    """A factor of the scores so large that their rounding is more than an exponential bears; None without one."""
    limit = 1 / (_ROUNDINGS_OF_A_SCORE * torch.finfo(torch.promote_types(facts.dtype, torch.float32)).eps)
    for part in ex.walk(attention.score):
        match part:
            case ex.Mul(x, ex.Const(value)) if ex.has_product(x) and limit < abs(value) < math.inf:
                return float(value)
            case ex.Div(x, ex.Const(value)) if ex.has_product(x) and value != 0 and limit < abs(1 / value):
                return 1 / value
    return None


def _gains(call: Node, attention: Attention, facts: Facts) -> bool:
    """Whether a kernel knows more than a call of SDPA says, or torch has no kernel for it and stores every score.

    A kernel may know that the mask is causal, by proof, and that keys are shared. torch has no kernel for operands of
    other than four dimensions, nor, on the CPU, for dropout.
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
    node = refusal.node if isinstance(refusal.node, Node) else softmax
    op, location = op_name(node) if node.op.startswith("call_") else node.op, locate(node)
    otherwise = f"write the attention without this one operation: {op}, line {location.line}"
    return Blocker(refusal.reason, op, location, refusal.advice or otherwise)
