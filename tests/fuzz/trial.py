"""One program tried: compiled, held against float64 by the harness, counted, and made smaller where it fails."""

from __future__ import annotations

import collections
import inspect
import itertools
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attn_fuse.report import SiteReport
from tests.fuzz import numbers
from tests.fuzz.description import Program, Sizes
from tests.fuzz.draw import fitting, oddity
from tests.fuzz.write import write
from tests.harness import Outcome, _results, _widened, _wider, assert_as_good_as_eager, check

_numbers = itertools.count()


@dataclass(frozen=True)
class Failure:
    program: Program
    error: str

    def __str__(self) -> str:
        source = write(self.program)
        calls = _calls(self.program, loaded(source))
        return f"{self.error}\n{self.program}\n\n{source}\n{_TAIL.format(p=self.program, calls=calls)}"


_TAIL = """
CALLS = {calls}

if __name__ == "__main__":
    from tests.harness import check
    again = [(str(how), inputs(**how)) for how in CALLS]
    print(check(Program(), *inputs(), backward={p.backward}, dynamic={p.dynamic} or None, again=again))
"""


def _calls(program: Program, module: types.ModuleType) -> list[dict[str, int]]:
    """How a program with dynamic sizes is called after the first call."""
    if not program.dynamic:
        return []
    parameters = inspect.signature(module.inputs).parameters
    return numbers.calls(program, {name: one.default for name, one in parameters.items()})


class Tally:
    """What was tried so far. refused: why sites were not fused, for each kind of program.

    A program is "mutated", or "odd" where it may be left as written (draw.oddity), or "plain".
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.refused: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.failures: list[Failure] = []

    def run(self, program: Program, inner: str = "eager") -> None:
        """Try `program`; what goes wrong is kept, not raised."""
        kind = _kind_of(program)
        self.counts["programs"] += 1
        self.counts[f"{kind} programs"] += 1
        try:
            outcome = attempt(program, inner)
        except Exception as error:
            self.failures.append(Failure(program, f"{type(error).__name__}: {error}"))
            return
        if outcome is None:
            self.counts["not run: eager raises"] += 1
            return
        self.failures += [Failure(program, _reason(site)) for site in outcome.sites if _broke(site)]
        for what, count in outcome.again.items():
            self.counts[f"called again: {what}"] += count
            if any(site.fused for site in outcome.sites):
                self.counts[f"called again, fused: {what}"] += count
        sites = [(site.fused, _reason(site)) for site in outcome.sites] or [(False, "no attention was found")]
        for fused, reason in sites:
            self.counts[f"{kind} sites"] += 1
            self.counts[f"{kind} sites fused"] += fused
            if not fused:
                self.refused[kind][reason] += 1

    @property
    def share_fused(self) -> float:
        """Of the sites of plain programs."""
        return self.counts["plain sites fused"] / max(self.counts["plain sites"], 1)

    def __str__(self) -> str:
        lines = [f"{count:6} {what}" for what, count in self.counts.items()]
        for kind, reasons in sorted(self.refused.items(), reverse=True):
            lines.append(f"       {kind} sites that are not fused:")
            lines += [f"{count:6}   {what}" for what, count in reasons.most_common()]
        lines.append(f"{self.share_fused:6.1%} of the plain sites fused")
        return "\n".join([*lines, f"{len(self.failures):6} failures"])


def _kind_of(program: Program) -> str:
    return "mutated" if program.mutation is not None else "odd" if oddity(program) else "plain"


def _reason(site: SiteReport) -> str:
    return site.blocker.reason if site.blocker is not None else site.status


def _broke(site: SiteReport) -> bool:
    """Whether an exception, not a reason, left the site as written."""
    return site.blocker is not None and "analysing it failed" in site.blocker.reason


def attempt(program: Program, inner: str = "eager") -> Outcome | None:
    """Compile `program` and hold it against float64; None where it does not run eagerly either."""
    module = loaded(write(program))
    written, args = module.Program(), module.inputs()
    if not _runs(written, args, program.backward):
        return None
    options: dict[str, Any] = {}
    if program.call == "twice" and _is_no_number(written(*args)):
        # The second attention has a query that is NaN, for which docs/limits.md promises nothing of torch's kernels.
        options["kernels"] = ["chunked"]
        attempt(replace(program, call="once"), inner)
    again = [(str(how), module.inputs(**how)) for how in _calls(program, module)]
    dynamic = program.dynamic or None
    if not all(
        _is_right_alone(written, given, inner, dynamic, program.backward) for given in (args, *dict(again[:1]).values())
    ):
        inner = "eager"
    torch._dynamo.reset()
    return check(written, *args, inner=inner, dynamic=dynamic, backward=program.backward, again=again, **options)


def _is_no_number(results: Any) -> bool:
    tensors = (x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor) and x.is_floating_point())
    return any(bool(x.isnan().any()) for x in tensors)


def _is_right_alone(written: Any, args: Sequence[Any], inner: str, dynamic: bool | None, backward: bool) -> bool:
    """Whether the inner backend without us is as near to float64 as a program has to be.

    Inductor keeps sums of float16 in float32: a mask that takes up the scores as written does not do so there.
    """
    if inner == "eager":
        return True
    torch._dynamo.reset()
    try:
        got = _results(torch.compile(written, backend=inner, dynamic=dynamic), written, args, backward)
        assert_as_good_as_eager(got, written, args, backward)
    except Exception:
        return False
    return True


def loaded(source: str) -> types.ModuleType:
    """`source` as a module that Dynamo and tracebacks find the lines of."""
    name = f"<drawn {next(_numbers)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = types.ModuleType(f"drawn_{next(_numbers)}")
    # Dynamo imports the module of a function by its name.
    sys.modules[module.__name__] = module
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def _runs(program: torch.nn.Module, args: Any, backward: bool) -> bool:
    """Eagerly, and in float64 too, where it is compared."""
    try:
        _results(program, program, args, backward)
        wide = _wider(program)
        _results(wide, wide, pytree.tree_map(_widened, args), backward)
    except Exception:
        return False
    return True


# ---- making a failing program smaller


def smallest(failure: Failure, inner: str = "eager") -> Failure:
    """The same failure with as many choices as possible put back to the plain one."""
    kind = _kind(failure)
    return _failure(plainest(failure.program, lambda p: _kind(_failure(p, inner)) == kind), inner) or failure


def plainest(program: Program, still: Callable[[Program], bool], most: int = 80) -> Program:
    """`program` with as many choices as possible put back to the plain one while `still` holds, after `most` tries."""
    for tried, candidate in enumerate(itertools.islice(_simpler(program), most), 1):
        if still(candidate):
            return plainest(candidate, still, most - tried)
    return program


def _simpler(program: Program) -> Iterator[Program]:
    seen = {program}
    for candidate in _candidates(program):
        candidate = fitting(candidate)
        if candidate not in seen:
            seen.add(candidate)
            yield candidate


def _candidates(program: Program) -> Iterator[Program]:
    plain = Program()
    for f in fields(Program):
        if f.name not in ("seed", "sizes", "layers") and getattr(program, f.name) != getattr(plain, f.name):
            yield replace(program, **{f.name: getattr(plain, f.name)})
    for n, layer in enumerate(program.layers):
        rest = program.layers[:n], program.layers[n + 1 :]
        yield replace(program, layers=(*rest[0], *rest[1]))
        for f in fields(layer):
            if getattr(layer, f.name) != f.default:
                yield replace(program, layers=(*rest[0], replace(layer, **{f.name: f.default}), *rest[1]))
    for f in fields(Sizes):
        if getattr(program.sizes, f.name) > 1:
            yield replace(program, sizes=replace(program.sizes, **{f.name: 1}))


def _failure(program: Program, inner: str) -> Failure | None:
    try:
        outcome = attempt(program, inner)
    except Exception as error:
        return Failure(program, f"{type(error).__name__}: {error}")
    broken = next(filter(_broke, outcome.sites), None) if outcome is not None else None
    return None if broken is None else Failure(program, _reason(broken))


def _kind(failure: Failure | None) -> str:
    return failure.error.split(":")[0] if failure is not None else ""
