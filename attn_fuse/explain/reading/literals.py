"""Values that code spells out: literals, and arithmetic on them, as in `["self", "cross"] * 4` and `2**10`."""

from __future__ import annotations

import ast
import operator
from typing import Any

_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
# Above which neither a number nor a sequence is made.
MOST = 1 << 16


def literal(node: ast.expr) -> Any:
    """The value of a literal or of such arithmetic. Raises ValueError, TypeError or SyntaxError for other code."""
    if not isinstance(node, ast.BinOp):
        return ast.literal_eval(node)
    left, right = literal(node.left), literal(node.right)
    if isinstance(node.op, ast.Pow) and 0 <= right <= 32 and abs(left) <= 64:
        return left**right
    if type(node.op) not in _OPERATORS or any(
        isinstance(one, (int, float)) and abs(one) > MOST for one in (left, right)
    ):
        raise ValueError(ast.unparse(node))
    try:
        return _OPERATORS[type(node.op)](left, right)
    except ArithmeticError as error:
        raise ValueError(ast.unparse(node)) from error
