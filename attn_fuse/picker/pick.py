"""Picker: which kernel runs an attention, with every reason why the others do not.

The program as written is a candidate, too: it wins where no kernel is faster than what Inductor makes of it, unless the
caller names kernels or asks for everything to be fused. A stopwatch measures times on the site itself; without one they
come from evidence. Evidence about other attentions than this is an estimate, which has to be better by a margin, and
never displaces a kernel that was measured and is faster than the program as written. Where there is no evidence at all,
large attentions run on what torch itself would take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from attn_fuse.report import log

WhyNot: TypeAlias = dict[str, tuple[str, ...]]

# An estimate may be off by this factor, so its ratio has to be below it.
_DOUBT = 0.7
# Without evidence, attentions of at least so many scores are fused; where positions hide all but so large a share of
# them, on a kernel that skips what is hidden.
_LARGE, _SPARSE = 1 << 20, 0.25
# The number of calls that we assume for a shape, to spread over them what building a plan for it takes.
_CALLS_OF_A_SHAPE = 100
# Seconds of one thread. Where float32 products may be of bfloat16 numbers, as float32_matmul_precision("medium") has
# it, torch calls oneDNN for each: measured with 256 windows of 49 keys.
_ONEDNN_CALL = 2.4e-5


@dataclass(frozen=True)
class Times:
    """The measured times of a site.

    seconds: by name, "as_written" among them. why_not: why a kernel has no time. failed: why nothing could be measured.
    """

    seconds: Mapping[str, float]
    why_not: Mapping[str, str]
    failed: str = ""


# How a reason against a kernel, or all of them, begins where it failed and does not merely decline or lose.
CHECK_FAILED, RUN_FAILED, ASKING_FAILED = "its self-check failed", "running it here failed", "asking it failed"
NOT_COMPILED = "the inner backend failed on"
FAILURES = (CHECK_FAILED, RUN_FAILED, ASKING_FAILED, NOT_COMPILED)
# Of kernels by name, and of the program as written.
Stopwatch: TypeAlias = Callable[[Sequence[str]], Times]
# Of a kernel that was never measured on the device, once it passed its self-check, and of what it would replace.
SelfCheck: TypeAlias = Callable[[str, str], Times]
# A self-check takes time: it runs only where the estimate is below this share of the time to beat.
_WORTH_CHECKING = 0.9
_UNTRIED = "was not measured on such a device"
_USUAL = "it is large, and nothing like it was measured"

_FUSE_ALL_OR_MEASURE = (
    'options={"pick": "fused"} fuses it all the same; `python -m attn_fuse.bench calibrate` measures this device'
)
_ALLOW_MORE = "change what the kernels decline, or allow more of them"
_KEEP_NO_WEIGHTS = 'keep and return no weights, or fuse it all the same with options={"pick": "fused"}'


@dataclass(frozen=True)
class Choice:
    """The kernel for a site; None leaves the site as written.

    why_not: why each other kernel was not chosen. because: what the choice rests on, in words.
    advice: what the user can do where there is no kernel.
    """

    kernel: Kernel | None
    why_not: WhyNot
    because: str
    advice: str = ""


def pick(
    attention: Attention,
    facts: Facts,
    stopwatch: Stopwatch | None = None,
    allowed: tuple[str, ...] | None = None,
    fuse_all: bool = False,
    self_check: SelfCheck | None = None,
    unfit: Mapping[str, str] | None = None,
) -> Choice:
    """The choice of a kernel for `attention`.

    stopwatch: measures the site; None to go by evidence. self_check: None to leave unmeasured kernels out.
    allowed: kernels by name, of which the first that can run it is chosen, faster or not; None for all.
    fuse_all: whether to choose the first kernel that can run it, faster or not.
    unfit: kernels by name that cannot be called or compiled here: why.
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
        because = "the weights are also used outside the attention, so nothing is saved"
        return Choice(None, why_not | {k.name: (because,) for k in able}, because, advice=_KEEP_NO_WEIGHTS)
    case = case_of(attention, facts)
    judged = {k: _judged(k, case, facts, able) for k in able}
    untried = [k for k in able if k.needs_evidence and ((found := judged[k]) is None or found.is_estimate)]
    why_not |= {k.name: (f"{_UNTRIED}, and is not tried unless it is asked for",) for k in untried}
    candidates = {k: found for k, found in judged.items() if k not in untried}
    times = stopwatch([k.name for k in candidates]) if stopwatch is not None else None
    choice, ratio = _among_measured(candidates, case, times, why_not)
    if self_check is None:
        return choice
    # Where there is much to gain we hope for the best from a kernel about which nothing is known.
    hopes = untried if case.scores >= _LARGE else [k for k in untried if judged[k] is not None]
    promises = {k: 0.0 if (found := judged[k]) is None else found.ratio for k in hopes}
    return _checked(choice, ratio, promises, self_check)


def _reasons(kernel: Kernel, attention: Attention, facts: Facts, set_so: switches.Switches) -> tuple[str, ...]:
    """Every reason why `kernel` cannot run the attention; an exception while asking counts as one."""
    try:
        return (*switches.forbidden(kernel, facts, set_so), *kernel.why_not(attention, facts))
    except Exception as problem:  # the others may take it
        log.warning("asking %s what it takes failed", kernel.name, exc_info=True)
        return (f"{ASKING_FAILED}: {named(problem)}",)


def _among_measured(
    judged: Mapping[Kernel, Comparison | None], case: Case, times: Times | None, why_not: WhyNot
) -> tuple[Choice, float]:
    """The choice among kernels that need no self-check, and its time over the time as written.

    judged: the kernels, and what is known of each. times: what was measured here, if that was asked for.
    """
    if times is not None and not times.failed:
        written = times.seconds[AS_WRITTEN]
        measured = {k: Comparison(times.seconds[k.name] / written, "measured here on its own sizes", written)
                    for k in judged if k.name in times.seconds}  # fmt: skip
        why_not |= {name: (reason,) for name, reason in times.why_not.items()}
        return _fastest(measured, why_not, "")
    note = f"; measuring here failed ({times.failed})" if times is not None else ""
    known = {k: found for k, found in judged.items() if found is not None}
    why_not |= {k.name: ("neither measured nor estimated",) for k in judged if k not in known}
    if not known and (usual := _usual(list(judged), case)) is not None:
        why_not.pop(usual.name)
        return Choice(usual, why_not, f"{_USUAL}{note}"), 1.0
    return _fastest(known, why_not, note)


def _usual(able: Sequence[Kernel], case: Case) -> Kernel | None:
    """What torch itself would run a large attention on, or a kernel that skips most of it; None for a small one."""
    if case.scores < _LARGE:
        return None
    sparse = [k for k in able if k.skips_hidden and case.visible <= _SPARSE]
    return next(iter(sparse or (k for k in able if k.switch)), None)


def _judged(kernel: Kernel, case: Case, facts: Facts, able: Sequence[Kernel]) -> Comparison | None:
    """What evidence says of one fixed shape at full precision, with what changing shapes and settings add."""
    here, names = this_device(facts.device), [k.name for k in able]
    found = evidence.compare(kernel.name, case, here, torch.__version__, evidence.tables(), names)
    if found is None:
        return None
    plans = sum(kernel.plan_seconds[: 1 + case.training]) / _CALLS_OF_A_SHAPE
    changing = bool(facts.symbolic & {"batch", "q_len", "kv_len"})
    for seconds, what in (
        (plans if changing else 0.0, "a plan for each of the shapes that change"),
        (_slow_products(kernel, case, facts.device), "what its products take at this float32_matmul_precision"),
    ):
        if seconds:
            found = replace(found, ratio=found.ratio + seconds / found.seconds, how=f"{found.how}, with {what}")
    return found


def _slow_products(kernel: Kernel, case: Case, device: torch.device) -> float:
    """Seconds that a slower library for the float32 products of blocks adds, where torch's settings choose it."""
    if kernel.block is None or case.itemsize != 4 or device.type != "cpu" or float32_precision(device) != "bf16":
        return 0.0
    rows, keys = kernel.block
    blocks = case.batch * case.heads * math.ceil(case.q_len / rows) * math.ceil(case.kv_len / keys)
    return _ONEDNN_CALL / torch.get_num_threads() * blocks * (7 if case.training else 2)


def _checked(choice: Choice, ratio: float, promises: Mapping[Kernel, float], self_check: SelfCheck) -> Choice:
    """`choice`, or in its place a kernel that promises more, passes its self-check and is faster by the clock.

    ratio: the choice's time over the time as written. promises: that ratio of each kernel to be tried, by an estimate.
    """
    for kernel in sorted(promises, key=lambda k: promises[k]):
        replaced = AS_WRITTEN if choice.kernel is None else choice.kernel.name
        words = "the program as written" if choice.kernel is None else replaced
        own, reason = 1.0, f"{_UNTRIED}, and by an estimate is no faster than {words}"
        if promises[kernel] < _WORTH_CHECKING * ratio:
            times = self_check(kernel.name, replaced)
            reason = times.why_not.get(kernel.name, times.failed)
            if not reason:
                own = times.seconds[kernel.name] / times.seconds[replaced]
                reason = f"{_in_words(own)} of the time of {words}, checked and timed here"
        why_not = choice.why_not | {kernel.name: (reason,)}
        if own < 1:
            del why_not[kernel.name]
            why_not |= {} if choice.kernel is None else {replaced: (f"{kernel.name} takes {reason}",)}
            choice, ratio = Choice(kernel, why_not, reason), ratio * own
        else:
            choice = replace(choice, why_not=why_not)
    return choice


def _fastest(known: dict[Kernel, Comparison], why_not: WhyNot, note: str) -> tuple[Choice, float]:
    """The choice of the fastest kernel, or of none where none beats the time as written; and its ratio to that time."""
    if not known:
        because = "no kernel was measured, nor can its time be estimated" + note
        return Choice(None, why_not, because, advice=_FUSE_ALL_OR_MEASURE), 1.0

    def doubted(found: Comparison) -> float:
        return found.ratio / (_DOUBT if found.is_estimate else 1.0)

    def order(kernel: Kernel) -> tuple[bool, bool, float]:
        # An estimate only stands in for a measurement: between two kernels it may be off by more than its doubt.
        found = known[kernel]
        return doubted(found) >= 1, found.is_estimate, doubted(found)

    said = {k: f"{_in_words(found.ratio)} of the time as written, {found.how}" for k, found in known.items()}
    best = min(known, key=order)
    why_not |= {k.name: (said[k],) for k in known}
    if doubted(known[best]) < 1:
        del why_not[best.name]
        return Choice(best, why_not, said[best] + note), known[best].ratio
    unsure = f", and an estimate has to promise {_DOUBT:g}" if known[best].ratio < 1 else ""
    than = "surely faster" if unsure else "faster"
    because = f"no kernel is {than} than the program as written: {best.name} takes {said[best]}{unsure}{note}"
    return Choice(None, why_not, because, advice=f"try larger inputs; {_FUSE_ALL_OR_MEASURE}"), 1.0


def _in_words(ratio: float) -> str:
    """`ratio` with two digits behind the point, with as many as tell it from 1 where two do not."""
    digits = next((n for n in range(2, 6) if float(f"{ratio:.{n}f}") != 1), 2)
    return f"{ratio:.{digits}f}"


def _no_kernel(why_not: WhyNot, facts: Facts, allowed: tuple[str, ...] | None) -> str:
    here = [k.name for k in KERNELS if facts.device.type in k.devices and (allowed is None or k.name in allowed)]
    said = [f"{name}: {'; '.join(why_not[name])}" for name in here]
    return "no kernel can run it: " + (", ".join(said) if said else f"none is allowed on {facts.device.type}")
