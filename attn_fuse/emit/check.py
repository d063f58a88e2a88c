"""Check: compare the rewritten program with the program as Dynamo wrote it, both run on the real inputs.

It compares the outputs, all gradients, and the contents of every input after the run. The judge is the program as
written, in float64 throughout, or in its own dtypes where float64 changes its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from attn_fuse.errors import named
from attn_fuse.graph.replay import Played, replay
from attn_fuse.report import Failure, SiteReport

# The rewrite's error may be this many times that of the program as written.
_TIMES_AS_WRITTEN = 8.0
# Roundings that are always allowed: a fused kernel sums in float32, in another order, and rounds to the written dtype.
_ROUNDINGS_OF_SUMS = 64.0
_ROUNDINGS_OF_RESULT = 2.0
# A gradient that is mathematically 0 comes out as the rounding of canceling terms: products with the values.
_ROUNDINGS_OF_LARGEST_GRADIENT = 16.0
# Where the judge is not in float64, it has roundings of its own.
_ROUNDINGS_OF_AS_WRITTEN = 64.0
# Numbers this many times the median, such as a mask's fill, are compared apart: their rounding would hide the rest.
_FAR_FROM_MOST = 1e3


def disagreement(
    written: GraphModule, rewritten: GraphModule, inputs: Sequence[Any], keeps_nan: bool = False
) -> str | None:
    """The first difference between `rewritten` and `written` on the real `inputs`; None where they agree.

    Both run in the caller's grad mode and autocast, with the same random state and without dropout. The user's
    tensors, gradients, random state and modes stay unchanged. A graph that cannot run here is a disagreement.
    keeps_nan: whether a 0 in place of a NaN is a difference.
    """
    try:
        as_rewritten = replay(rewritten, inputs)
    except Exception as problem:
        return f"the check could not be made: {named(problem)}"
    return difference(written, as_rewritten, inputs, keeps_nan)


def difference(
    written: GraphModule, as_rewritten: Played, inputs: Sequence[Any], keeps_nan: bool = False, numbers: bool = False
) -> str | None:
    """The first difference between a run and `written` on the same `inputs`; None without one.

    numbers: whether to compare only the numbers of outputs and gradients, not strides, writes and the like.
    """
    try:
        as_written = replay(written, inputs)
    except Exception as problem:
        return f"the check could not be made: {named(problem)}"
    if numbers:
        as_written = replace(as_written, facts={}, constants={})
    try:
        exact: Played | None = replay(written, inputs, in_float64=as_written)
    except Exception:  # some programs cannot run in float64, since an operation takes only half precision
        exact = None
    if exact is not None and _shapes(exact) != _shapes(as_written):
        exact = None
    found = _lost_nan(as_written, as_rewritten) if keeps_nan else None
    found = found or _disagreement(as_written, as_rewritten, exact)
    return found and f"the check failed: {found}"


def _lost_nan(written: Played, rewritten: Played) -> str | None:
    for name, tensor in written.tensors.items():
        found = rewritten.tensors.get(name)
        if found is not None and found.shape == tensor.shape and (tensor.isnan() & (found == 0)).any():
            return f"the rewritten {name} is 0 where it is NaN as written"
    return None


@dataclass(frozen=True)
class Rewritten:
    """A rewritten graph with the reports of its sites.

    proofs: assumptions of the rewrites, for the guard. keeps_nan: whether fully masked rows that are NaN as written
    stay NaN. notes: sentences for the user.
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
    """`found`, or a rewrite without the sites that make `found` disagree with `original`.

    rewrite: rewrites the graph anew. It takes the sites to leave as written, by number, with a failure or None.
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


def _shapes(played: Played) -> dict[str, Any]:
    return {name: t.shape for name, t in (played.tensors | (played.gradients or {})).items()}


def _disagreement(written: Played, rewritten: Played, exact: Played | None) -> str | None:
    for fact, value in written.facts.items():
        if fact not in rewritten.facts:
            return f"the rewritten program lacks {fact}"
        if (found := rewritten.facts[fact]) != value:
            return f"{fact} is {found} in the rewritten program, and {value} as written"
    if more := rewritten.facts.keys() - written.facts.keys():
        return f"the program as written lacks {sorted(more)[0]}"
    for name, changes in (written.constants | rewritten.constants).items():
        if changes and not (name in written.constants and name in rewritten.constants):
            return f"{name} is written, and only one program has it"
    judge = written if exact is None else exact
    dtypes = frozenset(t.dtype for t in written.tensors.values() if t.is_floating_point())
    compared = [(judge.tensors, written.tensors, rewritten.tensors, dtypes, 0.0)]
    if written.gradients is not None and judge.gradients is not None:
        if rewritten.gradients is None:
            return "the rewritten program has no backward"
        outputs = [t for n, t in judge.tensors.items() if n.startswith("output") and t.is_floating_point()]
        largest = max(map(_largest, [*judge.gradients.values(), *outputs]), default=0.0)
        compared.append((judge.gradients, written.gradients, rewritten.gradients, frozenset(), largest))
    for references, as_written, found_of, narrow, largest in compared:
        for name, reference in references.items():
            if name in found_of:
                tensors = reference, as_written[name], found_of[name]
                if (objection := _objection(name, *tensors, narrow, exact is not None, largest)) is not None:
                    return objection
            # A constant that is no longer read has no tensor, and a gradient of zeros.
            elif references is judge.gradients and reference.any():
                return f"the rewritten program has no {name}"
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

    dtypes: those of the program's inputs and outputs, for an output; none for a gradient.
    by_float64: whether `reference` was computed in float64.
    largest: the max magnitude of outputs and gradients, for a gradient; 0 for an output.
    """
    if torch.equal(written, rewritten):
        return None
    if not (written.is_floating_point() or written.is_complex()):
        wrong, usual = (int((t != reference).sum()) for t in (rewritten, written))
        return f"{wrong} elements of the rewritten {name} differ" if wrong > _TIMES_AS_WRITTEN * usual else None
    if written.is_complex():
        reference, written, rewritten = map(torch.view_as_real, (reference, written, rewritten))
    infinite = reference.isinf() & (written == reference)
    if not torch.equal(rewritten[infinite], written[infinite]):
        return f"the rewritten {name} is finite where it is not as written"
    # Where the program as written is not finite, such as in a fully masked row, the rewrite may give anything.
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
            judge = "float64" if by_float64 else "the result as written"
            return (
                f"the rewritten {name} is {error:.3g} from {judge}, as written {as_written:.3g}, allowed {allowed:.3g}"
            )
    return None


def _rounding(written: Tensor, dtypes: Collection[torch.dtype]) -> float:
    """The epsilon of the dtype that `written` was rounded to: a narrower one of `dtypes` that holds all its numbers.

    This finds programs that compute in half precision and widen the result. 8-bit dtypes do not count, because they
    hold small integers too.
    """
    narrower = [d for d in dtypes if 2 <= d.itemsize < written.dtype.itemsize]
    met = [d for d in narrower if torch.equal(written.to(d).to(written.dtype), written)]
    return max(torch.finfo(d).eps for d in (written.dtype, *met))


def _typical(x: Tensor) -> float:
    some = x[x != 0].abs()
    return some.median().item() if some.numel() else 0.0


def _largest(x: Tensor) -> float:
    """The max magnitude in `x`, without outliers far above the median."""
    known = x[x.isfinite()].abs()
    known = known[known <= _FAR_FROM_MOST * _typical(known)]
    return known.max().item() if known.numel() else 0.0
