"""Closed forms: buffers whose contents equal a function of the indices exactly.

They are read when compiling; the lift uses the form instead, and `guard` checks the buffer at each call.
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

# A tensor with more steps is cheaper and clearer as it is.
_MOST_STEPS = 3


@dataclass(frozen=True)
class ClosedForm:
    """A tensor whose element is a step function of column - row; leading dimensions do not matter.

    steps: (min column - row, value) in rising order; the first starts at minus infinity (None). Integers stay integers,
        because a float does not hold those beyond 2**53 exactly.
    """

    dtype: torch.dtype
    steps: tuple[tuple[int | None, float], ...]

    def element(self, index: tuple[sympy.Expr, ...], space: Space) -> Expr:
        """The element expression at `index`."""
        (_, first), *others = ((start, ex.Const(precision.rounded(value, self.dtype))) for start, value in self.steps)
        result: Expr = first
        for start, value in others:
            result = al.select(al.nonnegative(index[-1] - index[-2] - start, space), value, result)
        return result

    def __str__(self) -> str:
        if len(self.steps) == 1:
            return f"{self.steps[0][1]:g} everywhere"
        if len(self.steps) == 2 and self.steps[1][0] == 1:
            return "a lower triangle"
        return "a band"


@dataclass(frozen=True)
class Diagonals:
    """A matrix of integers that depend on column - row alone, in too many steps to write out.

    An example is an index buffer into a table of relative positions. The first row and column hold all numbers.
    """

    dtype: torch.dtype

    def places(self, index: tuple[sympy.Expr, ...]) -> tuple[Expr, ...]:
        """The position in the first row or column with the same number as at `index`."""
        apart = sympy.expand(index[-1] - index[-2])
        below, above = (ex.Binary("maximum", ex.Index(x), ex.Const(0)) for x in (-apart, apart))
        return (*map(ex.Index, index[:-2]), below, above)

    def __str__(self) -> str:
        return "a function of the distance"


def closed_form(tensor: torch.Tensor) -> ClosedForm | Diagonals | None:
    """The closed form that `tensor`'s contents equal exactly, or None. Reads the whole tensor.

    Found are one value everywhere, and matrices (leading dimensions 1) that depend on column - row alone, in at most
    three steps (triangles and bands) or, for int32 and int64, in any number.
    """
    if tensor.numel() == 0 or tensor.is_complex() or tensor.layout != torch.strided:
        return None
    tensor = tensor.detach()
    first = tensor.flatten()[0]
    if bool((tensor == first).all()):
        return ClosedForm(tensor.dtype, ((None, first.item()),))
    if tensor.dim() < 2 or tensor.numel() != tensor.shape[-1] * tensor.shape[-2]:
        return None
    matrix = tensor.reshape(tensor.shape[-2:])
    if not bool((matrix[1:, 1:] == matrix[:-1, :-1]).all()):
        return None
    rows = matrix.shape[0]
    # values of column - row = 1 - rows, ..., columns - 1
    diagonals = torch.cat([matrix[:, 0].flip(0), matrix[0, 1:]])
    changes = (diagonals[1:] != diagonals[:-1]).nonzero().flatten() + 1
    if changes.numel() >= _MOST_STEPS:
        return Diagonals(tensor.dtype) if tensor.dtype in (torch.int32, torch.int64) else None
    if not bool((diagonals == diagonals).all()):
        return None
    steps: list[tuple[int | None, float]] = [(None, diagonals[0].item())]
    steps += [(int(c) - rows + 1, diagonals[c].item()) for c in changes]
    return ClosedForm(tensor.dtype, tuple(steps))
