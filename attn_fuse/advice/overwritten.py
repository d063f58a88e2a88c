"""Overwritten: whether a variable still has, where an attention's output is computed, the value that it was read with.

A statement between the two may assign it, and an operation may write into its memory, under another name too. Code in
place of the output would read the new value, which its proof on the old values cannot show.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """An operation of a function's call.

    name: of its node. line: where it is written. reads: the tensors that the function passes to it, each as its
    expression and its storages. writes: the storages that it writes.
    """

    name: str
    line: int
    reads: tuple[tuple[ast.expr, set[int]], ...]
    writes: set[int]


class Overwritten:
    """What changes a function's variables before an output.

    function: the definition. output: the statement of the output; None where only its `line` is known.
    operations: those of the call, before writes became values, in order.
    """

    def __init__(self, function: ast.AST, output: ast.stmt | None, line: int, operations: Sequence[Operation]) -> None:
        self._output, self._last = output, line if output is None else output.end_lineno or output.lineno
        self._stores = [*_stores(function)]
        self._lines = [operation.line for operation in operations]
        self._order = {operation.name: number for number, operation in enumerate(operations)}
        self._writes = [(operation.line, operation.writes) for operation in operations if operation.writes]
        self._held = defaultdict[str, set[int]](set)
        for operation in operations:
            for expression, storages in operation.reads:
                self._held[ast.unparse(expression)] |= storages

    def since(
        self, expression: ast.expr, line: int, made_by: ast.stmt | None = None, user: str = "", output: str = ""
    ) -> bool:
        """Whether `expression`, read on `line`, may have another value at the output.

        made_by: the statement that assigns it, if it is read from there on. user, output: the names of the nodes that
        read it and give the output.
        """
        names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
        stores = [(at, end, by) for at, end, variables, by in self._stores if variables & names]
        own = [one for one in (made_by, self._output) if one is not None]
        if line > self._last or any(end >= line and at <= self._last and by not in own for at, end, by in stores):
            return True
        # A line outside of these two, but between them in time: a loop began anew.
        between = self._lines[self._order.get(user, 0) + 1 : self._order.get(output, 0)] if user in self._order else []
        begin = min((at for at, end, _, _ in self._stores if at <= line <= end), default=line)
        if stores and not all(begin <= one <= self._last for one in between):
            return True
        written = [memory for at, memory in self._writes if line <= at <= self._last]
        parts = (ast.unparse(x) for x in ast.walk(expression) if isinstance(x, ast.Name | ast.Attribute))
        held = set[int]().union(*(self._held.get(part, ()) for part in parts))
        return any(memory & held or not held for memory in written)


def assigned(unit: ast.AST) -> set[str]:
    """The variables that a statement assigns, whole or in part."""
    found = set()
    for node in ast.walk(unit):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            base: ast.AST = node
            while isinstance(base, ast.Attribute | ast.Subscript):
                base = base.value
            found.add(base.id if isinstance(base, ast.Name) else "")
    return found


def _stores(function: ast.AST) -> Iterator[tuple[int, int, set[str], ast.stmt | None]]:
    """(first line, last line, variables, statement) for all that assigns; without a statement for a `:=`."""
    for node in ast.walk(function):
        if isinstance(node, ast.NamedExpr):
            yield node.lineno, node.end_lineno or node.lineno, assigned(node.target), None
        elif isinstance(node, ast.stmt) and node is not function:
            heads = [node] if not hasattr(node, "body") else [x for x in ast.iter_child_nodes(node) if not _is_block(x)]
            for head in heads:
                at = getattr(head, "lineno", node.lineno)
                yield at, getattr(head, "end_lineno", None) or at, assigned(head), node


def _is_block(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case | ast.arguments)
