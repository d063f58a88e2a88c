"""Check: compare the rewritten program with the program as Dynamo wrote it, both run on the real inputs.

The check compares the outputs, the gradients of everything that requires one, and the contents of every input
afterwards. The judge is the program as written, in float64 throughout, or as it is where float64 makes it another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from attn_fuse.errors import named
from attn_fuse.graph.replay import Aliases, Played, replay
from attn_fuse.report import Failure, SiteReport

# The rewrite may be this many times as far from float64 as the program as written.
_TIMES_AS_WRITTEN = 8.0
# These roundings are allowed anyway: a fused kernel sums in float32, in another order, and rounds to the written dtype.
_ROUNDINGS_OF_SUMS = 64.0
_ROUNDINGS_OF_RESULT = 2.0
# A gradient that is 0 in mathematics comes out as a rounding of the terms that cancel: products with the values.
_ROUNDINGS_OF_LARGEST_GRADIENT = 16.0
# Where float64 is not the judge: the program as written has roundings, too.
_ROUNDINGS_OF_AS_WRITTEN = 64.0
# Numbers this many times the median, such as a mask's fill, are compared apart: their rounding would hide all others.
_FAR_FROM_MOST = 1e3


def disagreement(
    written: GraphModule, rewritten: GraphModule, inputs: Sequence[Any], keeps_nan: bool = False
) -> str | None:
    """The first difference between `rewritten` and `written` on `inputs`, the graph's real ones; None where they agree.

    Both run in the caller's grad mode and autocast, with the same random state and without dropout. The user's
    tensors, gradients, random state and modes stay as they are. keeps_nan: whether 0 in place of a NaN of an output
    is a difference. A graph that cannot be run here is a disagreement.
    """
    try:
        as_rewritten = replay(rewritten, inputs, {})
    except Exception as problem:
        return f"the check could not be made: {named(problem)}"
    return difference(written, as_rewritten, inputs, keeps_nan)


def difference(
    written: GraphModule, as_rewritten: Played, inputs: Sequence[Any], keeps_nan: bool = False, numbers: bool = False
) -> str | None:
    """The first difference of a run from what `written` computes on the same `inputs`; None without one.

    numbers: whether only the numbers of outputs and gradients count, and not strides, writes and the like.
    """
    aliases: Aliases = {}
    try:
        as_written = replay(written, inputs, aliases)
    except Exception as problem:
        return f"the check could not be made: {named(problem)}"
    if numbers:
        as_written = replace(as_written, facts={}, constants={})
    try:
        exact: Played | None = replay(written, inputs, aliases, wide=True)
    except Exception:  # nothing says that a program can run in float64: an operation may take half precision alone
        exact = None
    if exact is not None and not _comparable(exact, as_written):
        exact = None
    if keeps_nan:
        for name, tensor in as_written.tensors.items():
            found = as_rewritten.tensors.get(name)
            if found is not None and found.shape == tensor.shape and (tensor.isnan() & (found == 0)).any():
                return f"the check failed: the rewritten {name} is 0 where as written it is no number"
    return _disagreement(as_written, as_rewritten, exact)


@dataclass(frozen=True)
class Rewritten:
    """A rewritten graph with the reports of its sites.

    proofs: what the rewrites rest on, for the guard. keeps_nan: whether fully masked rows are still NaN, where they are
    as written. notes: sentences for the user.
    """

    graph: GraphModule
    sites: list[SiteReport]
    proofs: tuple[Any, ...]
    keeps_nan: bool = False
    notes: tuple[str, ...] = ()


def without_disagreements(
    original: GraphModule,
    inputs: Sequence[Any],
    rewrite: Callable[[Mapping[int, Failure | None]], Rewritten],
    found: Rewritten,
) -> Rewritten:
    """`found`, or a rewrite that leaves the sites as written which make `found` disagree with `original`.

    rewrite: rewrites the graph anew. Its argument holds the sites to leave as written, by number: what failed there, or
    None where nothing is known to.
    """
    left: dict[int, Failure | None] = {}
    while fused := [number for number, site in enumerate(found.sites) if site.fused]:
        problem = disagreement(original, found.graph, inputs, found.keeps_nan)
        if problem is None:
            break
        # Bisect to the first site with which the graph disagrees.
        low, high = 0, len(fused) - 1
        while low < high:
            middle = (low + high) // 2
            behind: dict[int, Failure | None] = dict.fromkeys(fused[middle + 1 :])
            part = rewrite({**left, **behind})
            if disagreement(original, part.graph, inputs, part.keeps_nan) is None:
                low = middle + 1
            else:
                high = middle
        left[fused[low]] = Failure(problem, found.sites[fused[low]].kernel)
        found = rewrite(left)
    return found


def _comparable(exact: Played, written: Played) -> bool:
    def shapes(played: Played) -> dict[str, Any]:
        return {n: t.shape for n, t in (played.tensors | (played.gradients or {})).items()}

    return shapes(exact) == shapes(written)


def _disagreement(written: Played, rewritten: Played, exact: Played | None) -> str | None:
    for fact, value in written.facts.items():
        if fact not in rewritten.facts:
            return f"the check failed: the rewritten program has no such thing as {fact}"
        if (found := rewritten.facts[fact]) != value:
            return f"the check failed: {fact} is {found} in the rewritten program, as written {value}"
    if more := rewritten.facts.keys() - written.facts.keys():
        return f"the check failed: the program as written has no such thing as {sorted(more)[0]}"
    for name, changes in (written.constants | rewritten.constants).items():
        if changes and not (name in written.constants and name in rewritten.constants):
            return f"the check failed: {name} is written, and only one of the programs has it"
    judge = written if exact is None else exact
    dtypes = frozenset(t.dtype for t in written.tensors.values() if t.is_floating_point())
    for name, reference in judge.tensors.items():
        if name not in rewritten.tensors:
            continue  # a constant that is not read any longer
        objection = _objection(
            name, reference, written.tensors[name], rewritten.tensors[name], dtypes, exact is not None, largest=0.0
        )
        if objection is not None:
            return objection
    if written.gradients is None or judge.gradients is None:
        return None
    if rewritten.gradients is None:
        return "the check failed: the rewritten program has no backward"
    given = [t for n, t in judge.tensors.items() if n.startswith("output") and t.is_floating_point()]
    largest = max(map(_largest, [*judge.gradients.values(), *given]), default=0.0)
    for name, reference in judge.gradients.items():
        if name not in rewritten.gradients:
            if reference.any():
                return f"the check failed: the rewritten program has no {name}"
            continue
        objection = _objection(
            name, reference, written.gradients[name], rewritten.gradients[name], (), exact is not None, largest
        )
        if objection is not None:
            return objection
    return None


def _objection(
    name: str,
    reference: Tensor,
    written: Tensor,
    rewritten: Tensor,
    dtypes: Collection[torch.dtype],
    by_float64: bool,
    largest: float,
) -> str | None:
    """Why `rewritten` is too far from `reference`, given how far `written` is; None where it is not.

    dtypes: of the program's inputs and outputs, for an output; else none. by_float64: whether `reference` is in
        float64. largest: the max of outputs and gradients, for a gradient; else 0.
    """
    if torch.equal(written, rewritten):
        return None
    if not (written.is_floating_point() or written.is_complex()):
        wrong, usual = (int((t != reference).sum()) for t in (rewritten, written))
        return (
            None
            if wrong <= _TIMES_AS_WRITTEN * usual
            else f"the check failed: {wrong} elements of the rewritten {name} are others"
        )
    if written.is_complex():
        reference, written, rewritten = map(torch.view_as_real, (reference, written, rewritten))
    infinite = reference.isinf() & (written == reference)
    if not torch.equal(rewritten[infinite], written[infinite]):
        return f"the check failed: the rewritten {name} is finite where it is not as written"
    # Where the program as written gives no finite number, as in a fully masked row, the rewrite may give anything.
    known = reference.isfinite() & written.isfinite()
    r, w, x = (t[known].double() for t in (reference, written, rewritten))
    eps = _rounding(written[known], dtypes)
    floor = _ROUNDINGS_OF_SUMS * min(eps, torch.finfo(torch.float32).eps) + _ROUNDINGS_OF_RESULT * eps
    if not by_float64:
        floor = _ROUNDINGS_OF_AS_WRITTEN * eps
    far = r.abs() > _FAR_FROM_MOST * _typical(r)
    for part in (~far, far):
        if not part.any():
            continue
        error, as_written = ((t[part] - r[part]).abs().max().item() for t in (x, w))
        allowed = _TIMES_AS_WRITTEN * as_written + floor * r[part].abs().max().item()
        allowed += _ROUNDINGS_OF_LARGEST_GRADIENT * eps * largest
        if not error <= allowed:
            return (
                f"the check failed: the rewritten {name} is {error:.3g} from "
                f"{'float64, ' if by_float64 else 'it '}as written {as_written:.3g}, allowed {allowed:.3g}"
            )
    return None


def _rounding(written: Tensor, dtypes: Collection[torch.dtype]) -> float:
    """The epsilon of the dtype that `written` was rounded to: a narrower one of `dtypes` where it has only its numbers.

    A program that computes in half precision and widens its result ends so. Numbers of 8 bits say nothing: small
    integers are among them.
    """
    narrower = [d for d in dtypes if 2 <= d.itemsize < written.dtype.itemsize]
    met = [d for d in narrower if torch.equal(written.to(d).to(written.dtype), written)]
    return max(torch.finfo(d).eps for d in (written.dtype, *met))


def _typical(x: Tensor) -> float:
    some = x[x != 0].abs()
    return some.median().item() if some.numel() else 0.0


def _largest(x: Tensor) -> float:
    """The max magnitude in `x`, without numbers far above the median."""
    known = x[x.isfinite()].abs()
    known = known[known <= _FAR_FROM_MOST * _typical(known)]
    return known.max().item() if known.numel() else 0.0
