"""Closed forms: what a buffer holds, as a function of the indices, where it is one exactly.

A model's mask buffer is read when compiling, and the lift uses the form in its place. `guard` keeps the proof true.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression import simplify as al
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Expr

# A closed form with more steps than this is cheaper and clearer as the tensor that it is.
_MOST_STEPS = 3


@dataclass(frozen=True)
class ClosedForm:
    """A tensor whose element depends on at most (last index - index before it), in steps.

    steps: (least difference column - row, value) in rising order; the first starts at minus infinity (None).
    A uniform tensor is one step. Leading dimensions do not matter.
    """

    dtype: torch.dtype
    steps: tuple[tuple[int | None, float], ...]

    def element(self, index: tuple[sympy.Expr, ...], space: Space) -> Expr:
        """The element expression at `index`."""
        result: Expr = self._number(self.steps[0][1])
        for start, value in self.steps[1:]:
            reached = al.nonnegative(index[-1] - index[-2] - start, space)
            result = al.select(reached, self._number(value), result)
        return result

    def equals(self, tensor: torch.Tensor) -> bool:
        """Whether every element of `tensor` is what the form says. Reads the whole tensor."""
        return closed_form(tensor) == self

    def __str__(self) -> str:
        if len(self.steps) == 1:
            return f"{self.steps[0][1]:g} everywhere"
        if len(self.steps) == 2 and self.steps[1][0] == 1:
            return "a lower triangle"
        return "a band"

    def _number(self, value: float) -> Expr:
        return ex.Const(al.rounded(value, self.dtype))


@dataclass(frozen=True)
class Diagonals:
    """Whole numbers that depend on (last index - index before it), in more steps than are written out.

    So is an index buffer that a table of distances is read by, or of buckets of them. One row and column have them all.
    """

    dtype: torch.dtype

    def places(self, index: tuple[sympy.Expr, ...]) -> tuple[Expr, ...]:
        """Where in the first row or column the element at `index` stands too."""
        apart = sympy.expand(index[-1] - index[-2])
        below, above = (ex.Binary("maximum", ex.Index(x), ex.Const(0)) for x in (-apart, apart))
        return (*map(ex.Index, index[:-2]), below, above)

    def equals(self, tensor: torch.Tensor) -> bool:
        """Whether the elements of `tensor` are so. Reads the whole tensor."""
        return closed_form(tensor) == self

    def __str__(self) -> str:
        return "a function of the distance"


_PLACES = (torch.int32, torch.int64)


def closed_form(tensor: torch.Tensor) -> ClosedForm | Diagonals | None:
    """The closed form that `tensor`'s contents equal exactly, or None. Reads the whole tensor.

    Found are: one value everywhere; a matrix (its leading dimensions 1) whose element depends on column - row, in at
    most three steps (triangles and bands, Boolean, 0/1 or additive), or in any number of them if it is made of places.
    """
    if tensor.numel() == 0 or tensor.is_complex() or tensor.layout != torch.strided:
        return None
    tensor = tensor.detach()
    first = tensor.flatten()[0]
    if bool((tensor == first).all()):
        return ClosedForm(tensor.dtype, ((None, float(first)),))
    if tensor.dim() < 2 or tensor.numel() != tensor.shape[-1] * tensor.shape[-2]:
        return None
    matrix = tensor.reshape(tensor.shape[-2:])
    if not bool((matrix[1:, 1:] == matrix[:-1, :-1]).all()):
        return None
    rows = matrix.shape[0]
    # values of column - row = 1 - rows, ..., columns - 1
    diagonals = torch.cat([matrix[:, 0].flip(0), matrix[0, 1:]])
    changes = (diagonals[1:] != diagonals[:-1]).nonzero().flatten() + 1
    if changes.numel() + 1 > _MOST_STEPS and tensor.dtype in _PLACES:
        return Diagonals(tensor.dtype)
    if changes.numel() + 1 > _MOST_STEPS or not bool((diagonals == diagonals).all()):
        return None
    steps: list[tuple[int | None, float]] = [(None, float(diagonals[0]))]
    steps += [(int(c) - rows + 1, float(diagonals[c])) for c in changes]
    return ClosedForm(tensor.dtype, tuple(steps))
