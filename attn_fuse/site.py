"""Sites: take each region of a graph through the stages, from its normal form to the call that replaces it."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg

from attn_fuse.attention.attention import Attention, Refusal
from attn_fuse.attention.describe import in_mathematics, in_words
from attn_fuse.attention.facts import Facts, facts_of, is_learned
from attn_fuse.emit.builder import NotEmitted
from attn_fuse.errors import named
from attn_fuse.expression import nodes as ex
from attn_fuse.expression.text import Names, as_text
from attn_fuse.graph.location import locate
from attn_fuse.graph.names import op_name, value_of
from attn_fuse.graph.nan_reads import nan_reads
from attn_fuse.graph.region import RefusedRegion, Region, Site, cut_at
from attn_fuse.graph.scopes import Scope, StillWritten, is_frozen, scopes
from attn_fuse.guard import Proof, can_be_guarded
from attn_fuse.lift.closed_forms import ClosedForm, Diagonals, closed_form
from attn_fuse.lift.lift import Lifted, NotLifted
from attn_fuse.lift.normalize import Normal, NotNormal
from attn_fuse.picker.pick import Choice, SelfCheck, Stopwatch
from attn_fuse.report import Blocker, SiteReport, log
from attn_fuse.torch_internals import FakeTensorMode, source_name

StopwatchOf = Callable[[Region, Attention, Facts, FakeTensorMode, Mapping[Node, Any]], Stopwatch]
SelfCheckOf = Callable[[Region, Attention, Facts, Mapping[Node, Any], Mapping[Node, str]], SelfCheck]


@dataclass(frozen=True)
class Stages:
    """The stages that a site passes through, in this order, each by the function of its name.

    stopwatch_of: makes a stopwatch that measures a site; None to pick without measuring. self_check_of: makes a check
    of kernels that were never measured on the device; None leaves such kernels out. draw: draws the mask, from the
    contents of the leaves by number; None to draw none.
    """

    find_sites: Callable[[Scope, StillWritten | None], Iterator[Site]]
    normalize: Callable[[Region], Normal]
    lift: Callable[[Normal, Mapping[int, ClosedForm | Diagonals]], Lifted]
    recognize: Callable[[Lifted], Attention | Refusal]
    pick: Callable[..., Choice]
    emit: Callable[..., Node]
    stopwatch_of: StopwatchOf | None = None
    self_check_of: SelfCheckOf | None = None
    draw: Callable[[Attention, Mapping[int, torch.Tensor]], tuple[str, ...]] | None = None


# The source of a tensor that the caller passes in, alone or in a container: the next call passes another tensor.
_ARGUMENT = re.compile(r"L\['[^']+'\](\[[^\]]+\])*")
_MOST_CUTS = 8
# The roundings by which an ordinary score differs when a kernel's backward computes it again, in another order.
_ROUNDINGS_OF_A_SCORE = 64


@dataclass
class Rewriter:
    """Rewrites the sites of one graph.

    inputs: the graph's example inputs. may_rewrite: asked with the report of each site about to be rewritten.
    written: by the path of a subgraph, the memory that it still writes. left: the sites that stay as written: number ->
    reason. constants: source names of arguments that are constants all the same. compiled: whether Inductor compiles
    the graph. proofs: what the rewrites rest on, by the number of the input, for the guard. keeps_nan: whether rows of
    the rewritten attentions are NaN wherever they are as written.
    """

    graph: GraphModule
    inputs: Sequence[Any]
    stages: Stages
    may_rewrite: Callable[[SiteReport], bool]
    written: Mapping[str, StillWritten] = field(default_factory=dict)
    left: Mapping[int, str] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()
    compiled: bool = True
    proofs: dict[int, Proof] = field(default_factory=dict)
    keeps_nan: bool = True
    _known: dict[Any, _Analysis] = field(default_factory=dict)

    def rewrite(self, seconds: float, started: float) -> list[SiteReport]:
        """The reports of all sites; the graph then has those fused that can be.

        seconds: the max time since `started`, by `time.perf_counter`, without the picking, which may compile and
            measure. The sites after that stay as written.
        """
        reports: list[SiteReport] = []
        for scope in scopes(self.graph):
            # Rewriting changes the graph, so find all sites before.
            for site in list(self.stages.find_sites(scope, self.written.get(scope.path))):
                if all(isinstance(region, Region) and not region.output.users for region in site.candidates):
                    continue  # it was a part of a fused site, and was erased with it
                late = time.perf_counter() - self._picking > started + seconds
                why = self._left(len(reports), seconds if late else None)
                if why is None:
                    report = self._site(site)
                else:
                    blocker = _blocker(why, site.softmax)
                    report = None if site.unsure else SiteReport(locate(site.softmax), "refused", blocker=blocker)
                reports += [] if report is None else [report]
        for scope in scopes(self.graph):
            scope.module.recompile()
        return reports

    def _left(self, number: int, spent: float | None) -> Refusal | None:
        """Why the site `number` is not looked at; None where it is. spent: the seconds that are over."""
        if spent is not None:
            return Refusal(f"not looked at: {spent:g} seconds had passed", advice="raise the option seconds")
        if number not in self.left:
            return None
        return Refusal(self.left[number], advice="report the disagreement, with the program, as a failure of attn_fuse")

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
        location = locate(region.softmax)
        if isinstance(region, RefusedRegion):
            return SiteReport(location, "refused", blocker=_blocker(region.refusal, region.softmax))
        try:
            with torch.set_grad_enabled(region.mode.grad):
                return self._fuse(region, site)
        except Exception as problem:  # rule 5: whatever goes wrong in here must not break the model
            log.warning("%s: the attention stays as written, since analysing it failed", location, exc_info=True)
            reason = Refusal(
                f"analysing it failed: {named(problem)}", advice="report the failure, which the log holds in full"
            )
            return SiteReport(location, "refused", blocker=_blocker(reason, region.softmax))

    def _fuse(self, region: Region, site: Site) -> SiteReport:
        if self._replaced.keys() & set(region.nodes):
            reason = Refusal("the scores are made from another attention", region.softmax)
            return SiteReport(locate(region.softmax), "refused", blocker=_blocker(reason, region.softmax))
        region = region.reading(self._replaced)
        location = locate(region.softmax)
        proofs = self._constants(region)
        analysis = self._analyse(region, proofs)
        region = analysis.region
        if isinstance(analysis.result, Refusal):
            blocker = _blocker(analysis.result, region.softmax)
            return SiteReport(location, "refused", blocker=blocker, expression=analysis.expression)
        attention = analysis.result
        operands = (attention.query, attention.key, attention.value)
        if not region.whole and any(isinstance(x, ex.Select) for side in operands for x in ex.walk(side)):
            reason = Refusal("an operand is written in part", region.output)
            return SiteReport(location, "refused", blocker=_blocker(reason, region.softmax))
        if attention.dropout_p is not None and region.dropped_weights_used is not None:
            reason = Refusal(
                "the weights after dropout are also used outside the attention", region.dropped_weights_used
            )
            return SiteReport(location, "refused", blocker=_blocker(reason, region.softmax))
        facts = facts_of(
            attention,
            [_as_read(leaf, region) for leaf in region.leaves],
            region.weights_used is not None,
            self.compiled,
            bool(region.scope.path) and self._is_frozen,
            analysis.multiplied,
        )
        facts = replace(facts, nan_read=self._nan_reads.get(region.output, ""))
        if facts.training and (factor := _lost_in_rounding(attention, facts)) is not None:
            reason = Refusal(f"the scores are scaled by {factor:g}: computed again for the backward they are others")
            return SiteReport(location, "refused", blocker=_blocker(reason, region.softmax))
        read_along = {region.leaves[x.leaf] for x in ex.walk(attention.score) if isinstance(x, ex.Gather)}
        used = [
            proof
            for leaf, proof in proofs.items()
            if leaf in (read_along if isinstance(proof.form, Diagonals) else region.leaves)
        ]
        words = in_words(attention, facts, tuple(f"the contents of {_plain(p.source)}, {p.form}" for p in used))
        if site.is_fused_already and not _gains(region.output, attention, facts):
            return SiteReport(location, "already fused")
        values, self_check = self._values(region), None
        if self.stages.self_check_of is not None:
            proved = {leaf: repr(proof.form) for leaf, proof in proofs.items() if leaf in region.leaves}
            self_check = self.stages.self_check_of(region, attention, facts, values, proved)
        measuring = self.stages.stopwatch_of
        stopwatch = measuring and measuring(region, attention, facts, analysis.mode, values)
        picking = time.perf_counter()
        choice = self.stages.pick(attention, facts, stopwatch, self_check=self_check)
        self._picking += time.perf_counter() - picking
        drawn = self._drawn(attention, region)
        left = SiteReport(location, "as written", words, expression=analysis.expression, picture=drawn)
        while (kernel := choice.kernel) is not None:
            words["picked"] = choice.because
            name, saved = kernel.name, facts.score_bytes
            report = replace(left, status="fused", kernel=name, why_not=choice.why_not, score_bytes=saved)
            if not self.may_rewrite(report):
                blocker = _blocker(Refusal("the fuel is used up", advice="raise the option fuel"), region.softmax)
                return replace(left, why_not=choice.why_not, blocker=blocker)
            try:
                self._replaced[region.output] = self.stages.emit(region, attention, facts, kernel.emit, analysis.mode)
            except NotEmitted as problem:
                choice = choice.without(str(problem))
                continue
            self.proofs |= {proof.input: proof for proof in used}
            self.keeps_nan &= kernel.keeps_nan and not attention.zero_for_nan
            return report
        words.pop("picked", None)
        # Where kernels decline a function of the scores, the operation that made it one is to blame.
        declined = attention.unread is not None and attention.unread.reason in choice.because
        culprit = attention.unread.node if declined and attention.unread else None
        why = Refusal(choice.because, culprit, choice.advice)
        return replace(left, why_not=choice.why_not, blocker=_blocker(why, region.softmax))

    def _drawn(self, attention: Attention, region: Region) -> tuple[str, ...]:
        """The picture of the mask; empty where it is not asked for, or cannot be drawn."""
        if self.stages.draw is None:
            return ()
        values = self._values(region)
        tensors = {n: values[leaf] for n, leaf in enumerate(region.leaves) if type(values.get(leaf)) is torch.Tensor}
        try:
            return self.stages.draw(attention, {n: tensor.cpu() for n, tensor in tensors.items()})
        except Exception:  # a report must not cost a fusion
            log.warning("%s: its mask cannot be drawn", locate(region.softmax), exc_info=True)
            return ()

    def _analyse(self, region: Region, proofs: Mapping[Node, Proof]) -> _Analysis:
        """The analysis of the region; identical layers share the work."""
        key = _fingerprint(region, proofs)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _analyse(region, proofs, self.stages)
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
        # The seconds that went into picking.
        self._picking = 0.0
        # The output of each fused region -> the node in its place, which a later region may read.
        self._replaced: dict[Node, Node] = {}


@dataclass(frozen=True, eq=False)
class _Analysis:
    """What is read of one region. cuts: operations read as leaves, by their number in the region they were cut from.

    multiplied: `Normal.multiplied`. expression: the attention as mathematics, or as much as was read.
    """

    region: Region
    result: Attention | Refusal
    mode: FakeTensorMode
    cuts: tuple[int, ...]
    multiplied: tuple[int, ...] = ()
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
        return _Analysis(region, result, self.mode, self.cuts, self.multiplied, self.expression)

    def _moved(self, refusal: Refusal, region: Region) -> Refusal:
        if refusal.node not in self.region.nodes:
            return refusal
        return replace(refusal, node=region.nodes[self.region.nodes.index(refusal.node)])


def _analyse(region: Region, proofs: Mapping[Node, Proof], stages: Stages) -> _Analysis:
    cuts: list[int] = []
    while True:
        try:
            normal = stages.normalize(region)
        except NotNormal as problem:
            return _Analysis(region, Refusal(str(problem), problem.node), FakeTensorMode(), tuple(cuts))
        original: Any = value_of(region.output)
        made = normal.graph.graph.output_node().all_input_nodes[0].meta["val"]
        if original.dtype != made.dtype or len(original.shape) != len(made.shape):
            reason = Refusal("the dtype of its products depends on an autocast that is not visible here", region.output)
            return _Analysis(region, reason, normal.mode, tuple(cuts))
        forms = {n: proofs[leaf].form for n, leaf in enumerate(region.leaves) if leaf in proofs}
        try:
            lifted = stages.lift(normal, forms)
            result = stages.recognize(lifted)
            expression = _in_mathematics(result, lifted, region)
            if isinstance(result, Refusal):
                result = _at_its_operation(result, normal)
            elif result.unread is not None:
                result = replace(result, unread=_at_its_operation(result.unread, normal))
            return _Analysis(region, result, normal.mode, tuple(cuts), normal.multiplied, expression)
        except NotLifted as problem:
            cut = cut_at(region, problem.node) if problem.node is not None and len(cuts) < _MOST_CUTS else None
            if cut is None:
                return _Analysis(region, Refusal(str(problem), problem.node), normal.mode, tuple(cuts))
            cuts.append(region.nodes.index(problem.node))
            region = cut


# The max size of an expression in a report, in nodes and in characters: a larger one is for a program to read.
_MOST_NODES = 4000
_MOST_CHARACTERS = 4000


def _in_mathematics(result: Attention | Refusal, lifted: Lifted, region: Region) -> str:
    """The mathematics that was read of a site; "" where it is too large to print, or cannot be printed."""
    if ex.size(lifted.element) > _MOST_NODES:
        return ""
    try:
        text = _printed(result, lifted, region)
    except Exception:  # what a report says must not cost a fusion
        log.warning("%s: its mathematics cannot be printed", locate(region.softmax), exc_info=True)
        return ""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


def _printed(result: Attention | Refusal, lifted: Lifted, region: Region) -> str:
    names = {n: _leaf_name(leaf, region) for n, leaf in enumerate(region.leaves)}
    if isinstance(result, Attention):
        letters: dict[int, str] = {}
        for letter, operand in (("q", result.query), ("k", result.key), ("v", result.value)):
            if isinstance(operand, ex.Load):
                letters[operand.leaf] = letters.get(operand.leaf, "") + letter
        names |= letters
        return in_mathematics(result, names)
    return f"out = {as_text(lifted.element, Names(leaves=names))}"


def _leaf_name(leaf: Node, region: Region) -> str:
    top = region.scope.top(leaf)
    source = source_name(top) if top is not None and top.op == "placeholder" else ""
    return re.sub(r"^L\['([^']+)'\]", r"\1", _plain(source)) if source else leaf.name


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


def _fingerprint(region: Region, proofs: Mapping[Node, Proof]) -> Any:
    """A value that is equal for regions with the same operations on leaves of the same kind."""
    number: dict[Node, str] = {node: f"%{i}" for i, node in enumerate((*region.leaves, *region.nodes))}

    def written(args: Any) -> str:
        return repr(map_arg(args, lambda n: _Named(number[n])))

    leaves = []
    for leaf in region.leaves:
        value = value_of(leaf)
        if isinstance(value, torch.Tensor):
            kind: Any = (str(value.shape), str(value.stride()), value.dtype, value.device, value.requires_grad)
            kind += (is_learned(value),)
        else:
            kind = (type(value), str(value))
        leaves.append((kind, proofs[leaf].form if leaf in proofs else None, leaf in region.operands))
    nodes = tuple((n.op, n.target, written((n.args, n.kwargs))) for n in region.nodes)
    modes = region.scope.modes
    return tuple(leaves), nodes, tuple(modes[n].autocast for n in region.nodes), region.mode.grad


@dataclass(frozen=True)
class _Named:
    name: str

    def __repr__(self) -> str:
        return self.name


def _blocker(refusal: Refusal, softmax: Node) -> Blocker:
    node = refusal.node if isinstance(refusal.node, Node) else softmax
    op, location = op_name(node) if node.op.startswith("call_") else node.op, locate(node)
    otherwise = f"write the attention without this one operation: {op}, line {location.line}"
    return Blocker(refusal.reason, op, location, refusal.advice or otherwise)


def _plain(source: str) -> str:
    source = re.sub(r"\._(?:modules|buffers|parameters)\['([^']+)'\]", r".\1", source)
    return source.replace("L['self'].", "", 1)
