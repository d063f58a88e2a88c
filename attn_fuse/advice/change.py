"""Change: the edit of one expression with which an attention that is left would be fused.

Edits are tried on the graph until the attention is fused: the softmax runs over the last axis, an operation between the
two products is left out, or the weights are no longer returned. The softmax and the products themselves stay.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import linecache
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.fx import Node, map_arg

from attn_fuse.advice.source import Frame, arguments_of, at, expression_of, frames_of, function_at
from attn_fuse.graph.location import locate
from attn_fuse.graph.names import LAYOUT, REDUCTIONS, SOFTMAX, called, is_between, is_exponential, value_of
from attn_fuse.graph.reach import reach
from attn_fuse.graph.walk import is_product
from attn_fuse.report import Code, Location

# The new arguments of nodes.
Changed: TypeAlias = dict[Node, tuple[tuple[Any, ...], dict[str, Any]]]
# What changes with one node.
Edit: TypeAlias = Callable[[Node], Changed]
# (the change of the graph, the new lines)
Candidates: TypeAlias = Iterator[tuple[Edit, Code]]
_MOST_TRIES = 32


def change(softmax: Node, blamed: Location | None, outcome: Callable[[], str]) -> Code | None:
    """The edited lines, with the outcome as a note; None if no edit of one expression helps.

    blamed: the place of the operation to try first.
    outcome: what becomes of the attention in the graph at the time of the call, such as "it is then fused on chunked";
        "" if it is left.
    """
    if outcome():
        return None  # it was left for what other rewrites have changed since
    between = sorted(_between(softmax), key=lambda node: locate(node) != blamed)
    differs, lacks = "the result differs", "the weights are no longer returned"
    kinds = ((_along, differs), (_left_out, differs), (_not_returned, lacks))
    tries = ((node, *found, but) for kind, but in kinds for node in between for found in kind(node))
    for node, edit, code, but in itertools.islice(tries, _MOST_TRIES):
        with _edited(edit, node):
            how = outcome()
        if how:
            return replace(code, notes=(f"{how}; {but}",))
    return None


def _between(softmax: Node) -> list[Node]:
    """The operations on the way from the product of query and key to the product with the value, in graph order."""

    def above(node: Node) -> list[Node]:
        return node.all_input_nodes if is_between(called(node)) and not is_product(node) else []

    def below(node: Node) -> list[Node]:
        return [user for user in node.users if is_between(called(user)) and not is_product(user)]

    scores = [node for node in reach([softmax], above) if is_product(node)]
    return sorted(reach([user for product in scores for user in below(product)], below))


@contextlib.contextmanager
def _edited(edit: Edit, node: Node) -> Iterator[None]:
    """A block in which `node` is changed, and each node that the same expression made."""
    before: list[tuple[Node, Any, Any]] = []
    try:
        for one in node.graph.nodes:
            if one.target == node.target and frames_of(one)[-1:] == frames_of(node)[-1:]:
                for changed, (args, kwargs) in edit(one).items():
                    before.append((changed, changed.args, changed.kwargs))
                    changed.args, changed.kwargs = args, kwargs
        yield
    finally:
        for changed, args, kwargs in reversed(before):
            changed.args, changed.kwargs = args, kwargs


# ---- candidates


def _along(node: Node) -> Candidates:
    """With a softmax over the last axis."""
    for frame in frames_of(node)[-1:] if called(node) in SOFTMAX else ():
        for value, written in arguments_of(node, frame):
            if type(value) is int and value not in (-1, getattr(value_of(node), "ndim", 0) - 1):
                yield _along_last, _code(frame, written, "-1")


def _along_last(node: Node) -> Changed:
    args = (node.args[0], -1, *node.args[2:]) if len(node.args) > 1 else node.args
    return {node: (args, node.kwargs | {"dim": -1} if "dim" in node.kwargs else node.kwargs)}


def _left_out(node: Node) -> Candidates:
    """Without an operation that keeps shape and dtype."""
    if called(node) in SOFTMAX | REDUCTIONS | LAYOUT or is_exponential(node):
        return
    for frame in frames_of(node)[-1:]:
        whole = expression_of(node, frame)
        for value, written in arguments_of(node, frame):
            if whole is not None and isinstance(value, Node) and value in node.args and _kind(value) == _kind(node):
                yield _instead(node.args.index(value)), _code(frame, whole, _text(written, frame))


def _instead(place: int) -> Edit:
    def edit(node: Node) -> Changed:
        given = node.args[place]
        return {x: map_arg((x.args, x.kwargs), lambda n: given if n is node else n) for x in node.users}

    return edit


def _not_returned(node: Node) -> Candidates:
    """With None in place of the weights that a function returns."""
    output = node.graph.output_node()
    if output not in node.users or not any(called(x) in SOFTMAX for x in (node, *node.all_input_nodes)):
        return
    for frame in frames_of(node)[-1:]:
        inside = [*ast.walk(function_at(frame) or ast.Module([], []))]
        assigned = {t.id for x in at(frame, ast.Assign) for t in x.targets if isinstance(t, ast.Name)}
        names = assigned - {
            x.id for x in inside if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store) and x.lineno > frame.line
        }
        for tuples in (x.value for x in inside if isinstance(x, ast.Return) and isinstance(x.value, ast.Tuple)):
            for one in tuples.elts:
                if isinstance(one, ast.Name) and one.id in names:
                    yield _none, _code(frame, one, "None")


def _none(node: Node) -> Changed:
    output = node.graph.output_node()
    return {output: map_arg((output.args, output.kwargs), lambda n: None if n is node else n)}


def _kind(node: Node) -> tuple[object, object]:
    value = value_of(node)
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else (node, None)


def _code(frame: Frame, expression: ast.expr, by: str) -> Code:
    """The lines of `expression` with the text `by` in its place."""
    first, last = expression.lineno, expression.end_lineno or expression.lineno
    # The syntax tree counts columns in bytes.
    before = linecache.getline(frame.file, first).encode()[: expression.col_offset].decode()
    after = linecache.getline(frame.file, last).encode()[expression.end_col_offset :].decode()
    text = textwrap.dedent(f"{before}{by}{after}").rstrip()
    return Code(frame.file, ((first, last),), frame.function, (), tuple(text.splitlines()))


def _text(expression: ast.expr, frame: Frame) -> str:
    """The source of `expression`, in parentheses if it has an operator."""
    found = ast.get_source_segment("".join(linecache.getlines(frame.file)), expression) or ast.unparse(expression)
    binds = isinstance(expression, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
    return found if binds else f"({found})"
