"""The oracle of the grid: the attention written densely, in float64.

The budget is the one of `tests.harness`: a small multiple of what the dense computation is off in the same dtype, and a
few roundings. A gradient through a softmax is the difference of two, and may be 0 where neither is: its roundings are
of the greater of the two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.grid.case import Case, Operands, attention, held_softmax
from tests.rounding import ROUNDINGS, TIMES_EAGER

Results = dict[str, Tensor]


def results(run: Callable[..., Tensor], o: Operands, training: bool) -> Results:
    """The output and, in training, each gradient by name."""
    leaves = o.leaves(training)
    out = run(*leaves)
    found = {"out": out.detach()}
    if training:
        wanted = {name: x for name, x in zip(o.names, leaves, strict=True) if x.requires_grad}
        gradients = torch.autograd.grad(out, list(wanted.values()), o.grad_out.to(out.dtype), allow_unused=True)
        for (name, x), gradient in zip(wanted.items(), gradients, strict=True):
            found[name] = torch.zeros_like(x) if gradient is None else gradient
    return found


def complaint(got: Results, c: Case, o: Operands, kept: Tensor | None = None, keeps_nan: bool = False) -> str:
    """What is wrong with `got`, by name; empty where it is as near to float64 as can be asked.

    kept: what the weights are multiplied with, where there is dropout. keeps_nan: whether the output is to be NaN where
    the original is, and its gradients may be; else 0 is expected there.
    """
    empty_rows = "zero" if c["empty rows"] == "nan" else c["empty rows"]
    dense = attention(c, empty_rows, kept)
    # Against itself, float64 is off by nothing: what float32 is off, in its roundings, says what to expect.
    less = torch.float32 if c.dtype == torch.float64 else c.dtype
    exact = results(dense, _in(o, torch.float64), c.training)
    usual = results(dense, _in(o, less), c.training)
    of_usual = results(dense, _in(_in(o, less), torch.float64), c.training)
    held = results(attention(c, empty_rows, kept, held_softmax), _in(o, torch.float64), c.training)
    if got.keys() != exact.keys():
        return f"gave {sorted(got)}, not {sorted(exact)}"
    eps = torch.finfo(c.dtype).eps
    wrong = []
    as_written = results(attention(c, kept=kept), _in(o, torch.float64), c.training) if keeps_nan else {}
    for name, reference in exact.items():
        found = got[name]
        if name in as_written and found.shape == reference.shape:
            no_number = as_written[name].isnan()
            if name == "out" and not found[no_number].isnan().all():
                wrong.append("out is a number where the original is NaN")
            found = torch.where(no_number & found.isnan(), reference.to(found.dtype), found)
        if found.dtype != c.dtype or found.shape != reference.shape:
            wrong.append(f"{name} is {found.dtype} {[*found.shape]}")
        elif not found.isfinite().all():
            wrong.append(f"{name} is not finite at {found.isfinite().logical_not().sum().item()} of {found.numel()}")
        else:
            error = _largest(found - reference)
            off = _largest(usual[name] - of_usual[name]) * eps / torch.finfo(less).eps
            allowed = TIMES_EAGER * off + ROUNDINGS * eps * max(_largest(reference), _largest(held[name]))
            if not error <= allowed:
                wrong.append(f"{name} is off by {error:.3g}, allowed {allowed:.3g}")
    return "; ".join(wrong)


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _in(o: Operands, dtype: torch.dtype) -> Operands:
    *tensors, grad_out = (t.to(dtype) if t.is_floating_point() else t for t in (*o.tensors, o.grad_out))
    return Operands(tensors, o.names, o.learned, grad_out)
