"""Closed forms: the contents of a buffer as a function of the indices, where they equal one exactly.

A model's mask buffer is read when compiling, and the lift uses its form instead. `guard` checks it at each call.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch

from attn_fuse.expression import nodes as ex
from attn_fuse.expression import precision
from attn_fuse.expression import simplify as al
from attn_fuse.expression.index import Space
from attn_fuse.expression.nodes import Expr

# A tensor with more steps than this is cheaper and clearer as it is.
_MOST_STEPS = 3


@dataclass(frozen=True)
class ClosedForm:
    """A tensor whose element is a step function of column - row, its last index less the one before.

    steps: (min column - row, value) in rising order; the first starts at minus infinity (None).
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
        """Whether `tensor` has exactly this closed form. Reads the whole tensor."""
        return closed_form(tensor) == self

    def __str__(self) -> str:
        if len(self.steps) == 1:
            return f"{self.steps[0][1]:g} everywhere"
        if len(self.steps) == 2 and self.steps[1][0] == 1:
            return "a lower triangle"
        return "a band"

    def _number(self, value: float) -> Expr:
        return ex.Const(precision.rounded(value, self.dtype))


@dataclass(frozen=True)
class Diagonals:
    """A matrix of whole numbers that depend on column - row alone, in more steps than are written out.

    Such is the index buffer by which a table of distances, or of buckets of them, is read. The first row and column
    hold all of its numbers.
    """

    dtype: torch.dtype

    def places(self, index: tuple[sympy.Expr, ...]) -> tuple[Expr, ...]:
        """The position in the first row or column that holds the same number as `index`."""
        apart = sympy.expand(index[-1] - index[-2])
        below, above = (ex.Binary("maximum", ex.Index(x), ex.Const(0)) for x in (-apart, apart))
        return (*map(ex.Index, index[:-2]), below, above)

    def equals(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is such a matrix of this dtype. Reads the whole tensor."""
        return closed_form(tensor) == self

    def __str__(self) -> str:
        return "a function of the distance"


_PLACES = (torch.int32, torch.int64)


def closed_form(tensor: torch.Tensor) -> ClosedForm | Diagonals | None:
    """The closed form that `tensor`'s contents equal exactly, or None. Reads the whole tensor.

    It finds one value everywhere, and a matrix (leading dimensions 1) whose element depends on column - row alone: in
    at most three steps (triangles and bands, Boolean, 0/1 or additive), or in any number of steps for int32 and int64.
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
