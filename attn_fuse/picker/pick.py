"""Picker: which kernel runs an attention, and every reason why the others do not.

The program as written is a candidate, too. It wins where no kernel is faster than Inductor on it, unless the caller
names kernels or asks to fuse everything. Times come from a stopwatch on the site itself, or else from evidence.
Evidence from unlike attentions is an estimate: it has to be better by a margin, and never displaces a kernel that was
measured to beat the program as written. Without any evidence, large attentions run on the kernel torch would take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.errors import named
from attn_fuse.kernels import KERNELS, switches
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.kernels.switches import float32_precision
from attn_fuse.picker import evidence
from attn_fuse.picker.case import Case, case_of
from attn_fuse.picker.evidence import AS_WRITTEN, Comparison
from attn_fuse.picker.timing import this_device
from attn_fuse.report import bytes_in_words, log

WhyNot: TypeAlias = dict[str, tuple[str, ...]]

# An estimate may be off by this factor, so its ratio has to be below it.
_DOUBT = 0.7
# Without evidence, attentions of at least _LARGE scores are fused. If positions leave at most the share _SPARSE of them
# visible, a kernel that skips masked blocks is preferred.
_LARGE, _SPARSE = 1 << 20, 0.25
# The assumed number of calls for a shape, over which the cost of its plan is spread.
_CALLS_OF_A_SHAPE = 100
# Seconds on one thread of a oneDNN call, which torch makes for each float32 product that may use bfloat16, as under
# float32_matmul_precision("medium"). Measured with 256 windows of 49 keys.
_ONEDNN_CALL = 2.4e-5


@dataclass(frozen=True)
class Times:
    """The measured times of a site.

    seconds: by the name of a kernel or "as_written". why_not: why a kernel has no time.
    failed: why nothing could be measured.
    """

    seconds: Mapping[str, float]
    why_not: Mapping[str, str]
    failed: str = ""


# How a reason begins if a kernel, or all of them, failed, and did not merely decline or lose.
CHECK_FAILED, RUN_FAILED, ASKING_FAILED = "its self-check failed", "running it here failed", "asking it failed"
NOT_COMPILED = "the inner backend failed on"
FAILURES = (CHECK_FAILED, RUN_FAILED, ASKING_FAILED, NOT_COMPILED)
# Times kernels, by name, and the program as written.
Stopwatch: TypeAlias = Callable[[Sequence[str]], Times]
# Times a kernel that was never measured on the device, if its self-check passes, and the candidate it would replace.
SelfCheck: TypeAlias = Callable[[str, str], Times]
# A self-check takes time, so it runs only if the estimate is below this share of the time to beat.
_WORTH_CHECKING = 0.9
_UNTRIED = "was not measured on such a device"
# Memory is a reason to fuse if attention takes at least this share of the peak, and the kernel at most this many times
# the time as written.
LEAST_SHARE, MOST_LOSS = 0.1, 1.25
WEIGHTS_USED = "the weights are also used outside the attention, so nothing is saved"
_USUAL = "it is large, and nothing like it was measured"

_FUSE_ALL_OR_MEASURE = (
    'options={"pick": "fused"} fuses it all the same; `python -m attn_fuse.bench calibrate` measures this device'
)
LARGER = "try larger inputs; "
_ALLOW_MORE = "change what the kernels decline, or allow more of them"
_KEEP_NO_WEIGHTS = 'keep and return no weights, or fuse it all the same with options={"pick": "fused"}'


@dataclass(frozen=True)
class Choice:
    """The kernel for a site; None leaves the site as written.

    why_not: why each other kernel was not chosen. because: the reason for the choice.
    advice: what the user can do if there is no kernel. ratio: its time over the time as written; 1 if nothing is known.
    is_slower: whether there is no kernel because none is faster. ratios: `ratio` of every kernel with a known time.
    """

    kernel: Kernel | None
    why_not: WhyNot
    because: str
    advice: str = ""
    ratio: float = 1.0
    is_slower: bool = False
    ratios: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chosen = self.kernel and self.kernel.name
        object.__setattr__(self, "why_not", {name: why for name, why in self.why_not.items() if name != chosen})


def pick(
    attention: Attention,
    facts: Facts,
    stopwatch: Stopwatch | None = None,
    allowed: tuple[str, ...] | None = None,
    fuse_all: bool = False,
    self_check: SelfCheck | None = None,
    unfit: Mapping[str, str] | None = None,
    share: float = 0.0,
) -> Choice:
    """The choice of a kernel for `attention`.

    stopwatch: measures the site; None to go by evidence. self_check: None to leave unmeasured kernels out.
    allowed: names of kernels, the first of which that can run the attention is chosen, faster or not; None for all.
    fuse_all: whether to choose the first kernel that can run it, faster or not.
    unfit: why kernels, by name, cannot be called or compiled here.
    share: the share of the step's peak memory that all attention takes, if memory is a reason to fuse.
    """
    order = KERNELS if allowed is None else tuple(k for name in allowed for k in KERNELS if k.name == name)
    why_not: WhyNot = {k.name: ("not among the kernels allowed",) for k in KERNELS if k not in order}
    able, set_so = [], switches.current()
    for kernel in order:
        known = (unfit or {}).get(kernel.name)
        reasons = _reasons(kernel, attention, facts, set_so) if known is None else (known,)
        if reasons:
            why_not[kernel.name] = reasons
        else:
            able.append(kernel)
    if not able:
        return Choice(None, why_not, _no_kernel(why_not, facts, allowed), advice=_ALLOW_MORE)
    if allowed is not None or fuse_all:
        others = {k.name: (f"{able[0].name} is preferred",) for k in able[1:]}
        return Choice(able[0], why_not | others, "asked for")
    if facts.weights_used:
        why_not |= {k.name: (WEIGHTS_USED,) for k in able}
        return Choice(None, why_not, WEIGHTS_USED, advice=_KEEP_NO_WEIGHTS)
    case = case_of(attention, facts)
    judged = {k: _judged(k, case, facts, able) for k in able}
    untried = [k for k in able if k.needs_evidence and ((found := judged[k]) is None or found.is_estimate)]
    why_not |= {k.name: (f"{_UNTRIED}, and is not tried unless it is asked for",) for k in untried}
    candidates = {k: found for k, found in judged.items() if k not in untried}
    times = stopwatch([k.name for k in candidates]) if stopwatch is not None else None
    choice = _among_measured(candidates, case, times, why_not, share)
    # A self-check compares without dropout, so it says nothing of what a kernel drops.
    if self_check is None or attention.dropout_p is not None:
        return choice
    promises = {k: found.ratio for k in untried if (found := judged[k]) is not None}
    if case.scores >= _LARGE:  # worth the check of a kernel about which nothing is known
        promises = dict.fromkeys(untried, 0.0) | promises
    return _checked(choice, promises, self_check)


def _reasons(kernel: Kernel, attention: Attention, facts: Facts, set_so: switches.Switches) -> tuple[str, ...]:
    """Every reason why `kernel` cannot run the attention; an exception while asking is one."""
    try:
        return (*switches.forbidden(kernel, facts, set_so), *kernel.why_not(attention, facts))
    except Exception as problem:  # the others may take it
        log.warning("asking %s what it takes failed", kernel.name, exc_info=True)
        return (f"{ASKING_FAILED}: {named(problem)}",)


def _among_measured(
    judged: Mapping[Kernel, Comparison | None], case: Case, times: Times | None, why_not: WhyNot, share: float
) -> Choice:
    """The choice among kernels that need no self-check.

    judged: the evidence on each kernel. times: of the site itself, if they were asked for. share: as in `pick`.
    """
    if times is not None and not times.failed:
        seconds, how = times.seconds, "measured here on its own sizes"
        measured = {
            k: Comparison(seconds[k.name] / seconds[AS_WRITTEN], how, seconds[AS_WRITTEN])
            for k in judged
            if k.name in seconds
        }
        return _fastest(measured, why_not | {name: (reason,) for name, reason in times.why_not.items()}, "", share)
    note = f"; measuring here failed ({times.failed})" if times is not None else ""
    known = {k: found for k, found in judged.items() if found is not None}
    why_not |= {k.name: ("neither measured nor estimated",) for k in judged if k not in known}
    if not known and (usual := _usual(list(judged), case)) is not None:
        return Choice(usual, why_not, f"{_USUAL}{note}")
    return _fastest(known, why_not, note, share)


def _usual(able: Sequence[Kernel], case: Case) -> Kernel | None:
    """The kernel torch would run a large attention on, or one that skips most of it; None for a small attention."""
    if case.scores < _LARGE:
        return None
    sparse = [k for k in able if k.skips_hidden and case.visible <= _SPARSE]
    return next(iter(sparse or (k for k in able if k.switch)), None)


def _judged(kernel: Kernel, case: Case, facts: Facts, able: Sequence[Kernel]) -> Comparison | None:
    """The evidence for one fixed shape at full precision, plus what changing shapes and settings cost."""
    here, names = this_device(facts.device), [k.name for k in able]
    found = evidence.compare(kernel.name, case, here, torch.__version__, evidence.tables(), names)
    if found is None:
        return None
    if facts.symbolic & {"batch", "q_len", "kv_len"} and kernel.plan_seconds:
        plans = sum(kernel.plan_seconds[: 1 + case.training]) / _CALLS_OF_A_SHAPE
        found = found.slower_by(plans, "a plan for each of the shapes that change")
    if slow := _slow_products(kernel, case, facts.device):
        found = found.slower_by(slow, "what its products take at this float32_matmul_precision")
    return found


def _slow_products(kernel: Kernel, case: Case, device: torch.device) -> float:
    """Seconds that oneDNN adds to the float32 products of blocks, if torch's settings choose it."""
    if kernel.block is None or case.itemsize != 4 or device.type != "cpu" or float32_precision(device) != "bf16":
        return 0.0
    rows, keys = kernel.block
    blocks = case.batch * case.heads * math.ceil(case.q_len / rows) * math.ceil(case.kv_len / keys)
    return _ONEDNN_CALL / torch.get_num_threads() * blocks * (7 if case.training else 2)


def _checked(choice: Choice, promises: Mapping[Kernel, float], self_check: SelfCheck) -> Choice:
    """`choice`, or a kernel that promises more, passes its self-check and is faster by the clock.

    promises: the estimated ratios of kernels to try.
    """
    for kernel in sorted(promises, key=lambda k: promises[k]):
        replaced = AS_WRITTEN if choice.kernel is None else choice.kernel.name
        words = "the program as written" if choice.kernel is None else replaced
        own, reason = 1.0, f"{_UNTRIED}, and by an estimate is no faster than {words}"
        if promises[kernel] < _WORTH_CHECKING * choice.ratio:
            times = self_check(kernel.name, replaced)
            reason = times.why_not.get(kernel.name, times.failed and f"could not be checked: {times.failed}")
            if not reason:
                own = times.seconds[kernel.name] / times.seconds[replaced]
                # The time as written was not taken if a kernel without evidence is replaced.
                base = 1.0 if choice.kernel is None else choice.ratios.get(replaced)
                if base is not None:
                    choice = replace(choice, ratios={**choice.ratios, kernel.name: base * own})
                reason = f"{speed(own, words)}, checked and timed here"
        if own < 1:
            beaten: WhyNot = {} if choice.kernel is None else {replaced: (f"{kernel.name} is {reason}",)}
            ratio, why_not = choice.ratio * own, choice.why_not | beaten
            choice = Choice(kernel, why_not, reason, ratio=ratio, ratios=choice.ratios)
        else:
            choice = replace(choice, why_not={**choice.why_not, kernel.name: (reason,)})
    return choice


def _fastest(known: Mapping[Kernel, Comparison], why_not: WhyNot, note: str, share: float) -> Choice:
    """The choice of the fastest kernel, or of none if none beats the time as written or saves enough memory."""
    if not known:
        because = "no kernel was measured, nor can its time be estimated" + note
        return Choice(None, why_not, because, advice=_FUSE_ALL_OR_MEASURE)

    def doubted(found: Comparison) -> float:
        return found.ratio / (_DOUBT if found.is_estimate else 1.0)

    def order(kernel: Kernel) -> tuple[bool, bool, float]:
        # A measured kernel comes first: between two kernels an estimate may be off by more than its doubt.
        found = known[kernel]
        return doubted(found) >= 1, found.is_estimate, doubted(found)

    said = {k: f"{speed(found.ratio, 'written')}, {found.how}" for k, found in known.items()}
    best = min(known, key=order)
    why_not = why_not | {k.name: (said[k],) for k in known}
    ratios = {k.name: found.ratio for k, found in known.items()}
    if doubted(known[best]) < 1:
        return Choice(best, why_not, said[best] + note, ratio=known[best].ratio, ratios=ratios)
    if share >= LEAST_SHARE and doubted(known[best]) <= MOST_LOSS:
        saved = f"; attention takes about {share:.0%} of the step's peak memory as written"
        return Choice(best, why_not, said[best] + note + saved, ratio=known[best].ratio, ratios=ratios)
    unsure = f", and an estimate has to promise {1 / _DOUBT:.2f} times" if known[best].ratio < 1 else ""
    than = "surely faster" if unsure else "faster"
    because = f"no kernel is {than} than the program as written: {best.name} is {said[best]}{unsure}{note}"
    advice = f"{LARGER}{_FUSE_ALL_OR_MEASURE}"
    return Choice(None, why_not, because, advice=advice, is_slower=True, ratios=ratios)


def speed(ratio: float, other: str) -> str:
    """How fast a kernel is that takes `ratio` of the time of `other`: "2.2 times as fast as written"."""
    times, word = (1 / ratio, "fast") if ratio < 1 else (ratio, "slow")
    # Show enough digits to tell the number from 1.
    digits = 1 if times >= 2 else next((n for n in range(2, 6) if float(f"{times:.{n}f}") != 1), 2)
    return f"{times:.{digits}f} times as {word} as {other}"


def _no_kernel(why_not: WhyNot, facts: Facts, allowed: tuple[str, ...] | None) -> str:
    here = [k.name for k in KERNELS if facts.device.type in k.devices and (allowed is None or k.name in allowed)]
    said = [f"{name}: {'; '.join(why_not[name])}" for name in here]
    return "no kernel can run it: " + (", ".join(said) if said else f"none is allowed on {facts.device.type}")


# ---- other lengths

_LONGEST = 1 << 15
# The length for which the gain is told, unless a kernel wins only later.
_TOLD = 1024


def from_length(attention: Attention, facts: Facts) -> str:
    """A sentence on the first length at which the picker would choose a kernel by evidence; "" if it finds none.

    Query and key grow alike; a single query stays alone.
    """
    found = ((longer, pick(attention, longer)) for longer in _longer(facts))
    longer, first = next(((longer, choice) for longer, choice in found if choice.kernel is not None), (facts, None))
    if first is None or first.kernel is None:
        return ""
    told = _at(facts, max(_TOLD, longer.kv_len))
    then = pick(attention, told)
    gain = f"; at {told.kv_len}: {speed(then.ratio, 'written')}, and {bytes_in_words(told.score_bytes)} of scores less"
    flag = f" (explain --length {longer.kv_len})" if facts.q_len == facts.kv_len else ""
    said = f"from about {longer.kv_len} tokens on{flag} it would run on {first.kernel.name}"
    return said + gain if then.kernel else said


def _longer(facts: Facts) -> Iterator[Facts]:
    """`facts` at lengths above its own, two for each octave."""
    step = 16
    while step <= _LONGEST:
        for length in (step, step * 3 // 2):
            if length > facts.kv_len:
                yield _at(facts, length)
        step *= 2


def _at(facts: Facts, kv_len: int) -> Facts:
    q_len = 1 if facts.q_len == 1 else max(1, round(facts.q_len * kv_len / facts.kv_len))
    return replace(facts, q_len=q_len, kv_len=kv_len)
