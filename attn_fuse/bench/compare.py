"""Compare: whether a way to run a model computes the same as eager, up to rounding."""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.subject import Subject
from attn_fuse.graph.names import tensors_of

# Max root mean square of a difference, over that of the expected values. A small tensor, such as the gradient of a
# key's bias, which is 0 up to rounding, is compared with a share of the largest of its kind.
_TOLERANCE, _TOLERANCE_16, _SHARE = 1e-3, 6e-2, 1e-3
# A way may be this many times as far from the exact values as eager, and as two draws of eager's from each other.
_ALLOWED = 4.0

# The floating-point outputs of a call, then the gradients, by name.
Results = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]


class Reference:
    """Eager's results, to compare others with.

    random: whether another call of eager differs, as with dropout. Then no result is the right one, and a way may
    differ from eager several times as much as two such calls do.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._buffers = {name: x.detach().clone() for name, x in _buffers(subject.model)}
        self.results = self.of(subject.model)
        self._again = self.of(subject.model, seed=1)
        self.random = not _near(self._again, self.results)

    def of(self, model: Callable[..., Any], seed: int = 0) -> Results:
        """The results of one call of `model`, the subject's or one compiled from it, in the first state."""
        self.put_back()
        return _results(self._subject, model, seed)

    def put_back(self) -> None:
        """Give the buffers that calls have changed their first values, and drop all gradients."""
        with torch.no_grad():
            for name, x in _buffers(self._subject.model):
                # A write, even of the same values, would end the proof of a mask buffer.
                if name in self._buffers and not torch.equal(x, self._buffers[name]):
                    x.copy_(self._buffers[name])
        drop_gradients(self._subject)

    def difference(self, found: Results) -> float:
        """The max difference of `found` from eager's results, over the max absolute value of the tensor.

        A small tensor is compared with a share of the largest. Infinite if one of the two has a NaN or lacks a tensor.
        """
        most = 0.0
        for ours, theirs, largest in _kinds(found, self.results, _largest):
            if ours.keys() != theirs.keys():
                return math.inf
            for name, expected in theirs.items():
                if apart := _largest(_difference(ours[name], expected)):
                    most = max(most, apart / max(_largest(expected), _SHARE * largest, sys.float_info.min))
        return most

    def agrees(self, found: Results) -> bool:
        """Whether `found` is near eager's results, or about as near as those to the exact ones."""
        if not math.isfinite(self.difference(found)):
            return False
        if _near(found, self.results):
            return True
        if self.random:
            return _near(found, self.results, self._again, self.results)
        return self._exact is not None and _near(found, self.results, self.results, self._exact)

    @functools.cached_property
    def _exact(self) -> Results | None:
        try:
            return _results(_in_float64(self._subject), None, 0)
        except Exception:  # not every model runs in float64
            return None


def _kinds(
    found: Results, expected: Results, size: Callable[[Tensor], float]
) -> Iterator[tuple[Mapping[str, Tensor], Mapping[str, Tensor], float]]:
    """Both outputs, then both gradients, each with the size of the largest expected tensor."""
    for ours, theirs in zip(found, expected, strict=True):
        yield ours, theirs, max(map(size, theirs.values()), default=0.0)


def _near(found: Results, expected: Results, apart: Results | None = None, center: Results | None = None) -> bool:
    """Whether each tensor of `found` is near that of `expected`, or not much farther from `center` than `apart` is."""
    for kind, (ours, theirs, largest) in enumerate(_kinds(found, expected, _size)):
        for name, right in theirs.items():
            tolerance = _TOLERANCE if right.dtype.itemsize > 2 else _TOLERANCE_16
            if _size(_difference(ours[name], right), False) <= tolerance * (_size(right) + _SHARE * largest):
                continue
            if apart is None or center is None:
                return False
            off, allowed = (_size(_difference(x[name], center[kind][name]), False) for x in (ours, apart[kind]))
            if not off <= _ALLOWED * allowed:
                return False
    return True


def drop_gradients(subject: Subject) -> None:
    """Set the gradients of the subject's parameters and inputs to None."""
    for _, x in _learned(subject):
        x.grad = None


def _results(subject: Subject, model: Callable[..., Any] | None, seed: int) -> Results:
    torch.manual_seed(seed)
    out = subject.call(model or subject.model)
    outputs = {str(n): x.detach().clone() for n, x in enumerate(_leaves(out))}
    return outputs, {name: x.grad.detach().clone() for name, x in _learned(subject) if x.grad is not None}


def _leaves(value: Any) -> list[Tensor]:
    return [x for x in tensors_of(value) if x.is_floating_point()]


def _learned(subject: Subject) -> list[tuple[str, Tensor]]:
    model = subject.model
    named = [*model.named_parameters()] if isinstance(model, nn.Module) else []
    given = _leaves((subject.inputs.args, subject.inputs.kwargs))
    return [*named, *((f"input {n}", x) for n, x in enumerate(given) if x.is_leaf and x.requires_grad)]


def _buffers(model: Callable[..., Any]) -> list[tuple[str, Tensor]]:
    return [*model.named_buffers()] if isinstance(model, nn.Module) else []


def _in_float64(subject: Subject) -> Subject:
    model = subject.model
    if isinstance(model, nn.Module):
        model = copy.deepcopy(model).double()
        model.zero_grad(set_to_none=True)
    inputs = Inputs(in_dtype(subject.inputs.args, torch.float64), in_dtype(subject.inputs.kwargs, torch.float64))
    return replace(subject, model=model, inputs=inputs)


def in_dtype(values: Any, dtype: torch.dtype) -> Any:
    """`values` with each floating-point tensor as a new leaf in `dtype`."""

    def cast(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.detach().to(dtype).requires_grad_(x.requires_grad)

    return pytree.tree_map(cast, values)


def _difference(found: Tensor, expected: Tensor) -> Tensor:
    """The elements of the difference in float64, 0 where both are the same, NaN and infinity included."""
    if found.shape != expected.shape:
        return torch.full((1,), math.inf, dtype=torch.float64)
    a, b = found.double(), expected.double()
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)


def _largest(x: Tensor) -> float:
    """The max absolute value, infinite for a NaN."""
    return float(x.detach().double().abs().nan_to_num(nan=math.inf).max()) if x.numel() else 0.0


def _size(x: Tensor, finite: bool = True) -> float:
    """The root mean square; of the finite elements alone if `finite`."""
    x = x.double()[x.isfinite()] if finite else x
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
