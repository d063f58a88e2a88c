"""What is private of symbolic numbers: their SymPy expressions as calls, and guards on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch


def called_on(expr: sympy.Expr, operands: Sequence[Any], call: Callable[..., Any]) -> Any:
    """The outermost function of `expr` on `operands`, which stand for its arguments, by `call(function, *arguments)`.

    Raises KeyError for a function that torch does not know.
    """
    from torch.utils._sympy.interp import _run_sympy_handler
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    class Calls:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            function = getattr(PythonReferenceAnalysis, name)
            return lambda *arguments: call(function, *arguments)

    return _run_sympy_handler(Calls(), list(operands), expr)


def holds_by_guard(condition: bool | torch.SymBool) -> bool:
    """Whether `condition` holds on the first call, under a guard that compiles anew where its truth changes.

    False where no guard can be made, as for a number that is read from a tensor in the graph.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(condition))
