"""What an error asks of a model's inputs: sizes, ranks, dtypes, entries of dicts, and arguments that it names."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import Any, TypeGuard

import torch
from torch import nn

from attn_fuse.explain.reading.signatures import tree_of_function
from attn_fuse.explain.repairing.messages import Said, said_in
from attn_fuse.explain.roots import PACKAGE

DIVISIBLE = re.compile(r"(\w+) (?:must|should|has to|needs to) be (?:evenly )?divisible by (?:the )?(\w+)")
COUNTED = (int, list, tuple)
# Errors of a name, a file or a way that is not there, which says nothing of sizes.
OF_WHAT_IS_ABSENT = (NameError, ImportError, OSError, NotImplementedError)
# How many texts are told of that a name may be.
MOST_CHOICES = 6
# What a comparison of a size may be made of: nothing that computes for long or writes.
_PLAIN = (
    ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.List, ast.Slice,
    ast.operator, ast.unaryop, ast.expr_context,
)  # fmt: skip
_FUNCTIONS, _METHODS = {"len", "int", "tuple", "list", "max", "min"}, {"size", "dim", "ndimension", "numel"}
_INVERSE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip

# Two sizes, or two runs of them, and whether they are ranks.
_Pair = tuple[int, int, bool] | tuple[tuple[int, ...], tuple[int, ...], bool]


@dataclass(frozen=True)
class Asked(Said):
    """What an error asks of the inputs, or of the arguments that a model is built from.

    sizes, ranks: also those of the comparisons in the model's code that came out false.
    runs: several sizes one after another that there are, and those that are wanted, as of a shape that was compared.
    key: an entry that a dict lacks.
    words: those of the message.
    absent: names that are None and that the message or the lines that led there speak of, or that must not be None.
    near: the names and the keys at those lines.
    lacks: attributes of the model that are not set there.
    taken_apart: names in the code that failed of which it takes entries, the length, or one after another.
    choices: names in the failing code that it compares with texts or looks up in a dict, their values, and the texts
    or the keys; of an attribute that the model's constructor sets on a condition, the names there and what meets it; of
    what is absent, the flags on which it is reached, and their other values.
    kind: the message without sizes.
    lines: those of the model's code at which the error was raised, the outermost function's first: of two errors of the
    same function the one with the greater lines came further.
    """

    runs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    key: str | None = None
    words: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    near: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    taken_apart: frozenset[str] = frozenset()
    choices: tuple[tuple[str, Any, tuple[str | bool, ...]], ...] = ()
    kind: str = ""
    lines: tuple[int, ...] = ()


def asked_by(error: BaseException) -> Asked:
    """What `error`, which a model raised on some inputs, asks of them: by its message, and by the comparison of sizes
    that the model's own code found false, as in `assert width == self.width`."""
    with warnings.catch_warnings(action="ignore"):  # of what is computed again
        return _asked_by(error)


def _asked_by(error: BaseException) -> Asked:
    message = str(error)
    said = said_in(message)
    sizes, ranks = [*said.sizes], [*said.ranks]
    frames = _frames(error.__traceback__)
    compared = [*_compared(*frames[-1])] if frames else []
    for has, wants, is_rank in compared:
        if isinstance(has, int) and isinstance(wants, int):
            (ranks if is_rank else sizes).append((has, wants))
    if isinstance(error, IndexError) and frames:
        sizes += _entries_counted(frames)
    sizes += _divided(error)
    words = frozenset(re.findall(r"[A-Za-z_]\w*", message))
    near = frozenset(name for frame, line in frames for name in _named(frame.f_code.co_filename, line))
    return Asked(
        **{
            **vars(said),
            "sizes": tuple(dict.fromkeys(pair for pair in sizes if pair[0] != pair[1])),
            "ranks": tuple(dict.fromkeys(ranks)),
        },
        runs=tuple((has, wants) for has, wants, _ in compared if isinstance(has, tuple) and isinstance(wants, tuple)),
        key=str(error.args[0]) if isinstance(error, KeyError) and error.args else None,
        words=words,
        absent=frozenset(name for frame, _ in frames for name in _absent(frame) if name in words | near)
        | frozenset(_asserted_to_be(frames)),
        near=near,
        lacks=_lacks(error, *frames[-1]) if frames else frozenset(),
        taken_apart=frozenset(_taken_apart(*frames[-1])) if frames else frozenset(),
        choices=(
            *(_choices(*frames[-1]) if frames else ()),
            *_conditions(error),
            *_asserted(frames),
            *_around(error, frames),
        ),
        kind=re.sub(r"\(\d+\)|\d\d+", "", message),
        lines=tuple(line for _, line in frames),
    )


def _compared(frame: FrameType, line: int) -> Iterator[_Pair]:
    # Of the comparisons at a line that came out false: the size that there is, the one that would do, and whether both
    # are ranks. Of shapes all of their sizes come first, then each.
    for test, holds in _tests(frame.f_code.co_filename, line):
        for left, operator, right in _needed(test, holds):
            # Whatever the model's own attributes raise says nothing.
            with contextlib.suppress(Exception):
                yield from [*_pairs(left, operator, right, frame)]


def _divided(error: BaseException) -> Iterator[tuple[int, int]]:
    # Of "a must be divisible by b", the names of whole numbers where it was raised: the next multiple, and a divisor.
    frame = next(reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]), None)
    found = DIVISIBLE.search(str(error))
    held = frame.f_locals if frame is not None else {}
    values = {**getattr(held.get("self"), "__dict__", {}), **held}
    size, by = (values.get(name, 0) for name in found.groups()) if found else (0, 0)
    if _is_size(size) and _is_size(by) and size > 0 < by and size % by:
        yield size, -(-size // by) * by
        yield by, next(n for n in range(min(by, size), 0, -1) if size % n == 0)


def _entries_counted(frames: Sequence[tuple[FrameType, int]]) -> Iterator[tuple[int, int]]:
    # Of a list that an index goes beyond: the counts near it that are greater than its length, and that.
    frame, line = frames[-1]
    held = [value for near, _ in frames[-2:] for value in near.f_locals.values()]
    counts = {len(value) if isinstance(value, (list, tuple)) else value for value in held if type(value) in COUNTED}
    for node in _subscripts_at(frame.f_code.co_filename, line):
        with contextlib.suppress(Exception):
            several = _value(node.value, frame)
            if isinstance(several, (list, tuple, nn.ModuleList)):
                yield from ((count, len(several)) for count in sorted(counts) if count > len(several) > 0)


def _line(node: ast.stmt) -> int:
    return node.lineno


def _absent(frame: FrameType) -> set[str]:
    return {name for name, value in frame.f_locals.items() if value is None}


def _lacks(error: BaseException, frame: FrameType, line: int) -> frozenset[str]:
    # Attributes of a module that it has not, or that are None in the statement that failed.
    if isinstance(error, AttributeError) and isinstance(error.obj, nn.Module):
        return frozenset({str(error.name)})
    owner = frame.f_locals.get("self")
    inner = max(_statements(frame.f_code.co_filename, line), key=_line, default=ast.Pass())
    read = {
        node.attr for node in ast.walk(inner) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    is_module = isinstance(owner, nn.Module) and "NoneType" in str(error)
    return frozenset(name for name in read if getattr(owner, name, owner) is None) if is_module else frozenset()


def _choices(frame: FrameType, line: int) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    # What the function, up to the line that failed, compares with texts; and what it looks up there in a dict.
    file, options = frame.f_code.co_filename, dict[str, list[str]]()
    nodes: dict[str, ast.expr] = {}
    for node in ast.walk(_function_at(file, frame.f_code.co_firstlineno)):
        match node:
            case ast.Compare(left, [ast.Eq() | ast.NotEq() | ast.In() | ast.NotIn()], [right]) if node.lineno <= line:
                texts = [one.value for one in ast.walk(right) if isinstance(one, ast.Constant)]
                options.setdefault(ast.unparse(left), []).extend(text for text in texts if isinstance(text, str))
                nodes[ast.unparse(left)] = left
    for node in _subscripts_at(file, line):
        with contextlib.suppress(Exception):
            table = _value(node.value, frame)
            keys = [key for key in table if isinstance(key, str)] if isinstance(table, dict) else []
            options.setdefault(ast.unparse(node.slice), []).extend(keys)
            nodes[ast.unparse(node.slice)] = node.slice
    for text, several in options.items():
        with contextlib.suppress(Exception):
            if several and (name := _last_name(nodes[text])):
                yield name, _value(nodes[text], frame), tuple(dict.fromkeys(several))[:MOST_CHOICES]


def _conditions(error: BaseException) -> Iterator[tuple[str, Any, tuple[str | bool, ...]]]:
    # Of an attribute that a module lacks: the conditions on which its constructor sets it.
    if not (isinstance(error, AttributeError) and isinstance(error.obj, nn.Module)):
        return
    made_by = type(error.obj).__init__
    for node in ast.walk(tree_of_function(made_by) if isinstance(made_by, FunctionType) else ast.Module([], [])):
        if isinstance(node, ast.If) and any(_sets(one, str(error.name)) for one in node.body):
            match node.test:
                case ast.Compare(left, [ast.Eq()], [ast.Constant(str(wanted))]) if name := _last_name(left):
                    yield name, None, (wanted,)
                case ast.Name() | ast.Attribute() as flag if name := _last_name(flag):
                    yield name, None, (True,)


def _asserted(frames: Sequence[tuple[FrameType, int]]) -> Iterator[tuple[str, Any, tuple[bool]]]:
    # Of a condition that failed: its flags, as `qk_norm` in `assert qk_norm`, and what they have to be.
    for test, holds in _tests(frames[-1][0].f_code.co_filename, frames[-1][1]) if frames else ():
        wanted, flag = holds, test
        while isinstance(flag, ast.UnaryOp) and isinstance(flag.op, ast.Not):
            wanted, flag = not wanted, flag.operand
        if isinstance(flag, (ast.Name, ast.Attribute)) and (name := _last_name(flag)):
            yield name, not wanted, (wanted,)


def _asserted_to_be(frames: Sequence[tuple[FrameType, int]]) -> Iterator[str]:
    # What the condition that failed says must not be None, as in `assert self.max_size is not None`.
    for test, holds in _tests(frames[-1][0].f_code.co_filename, frames[-1][1]) if frames else ():
        for left, operator, right in _needed(test, holds):
            match operator, right:
                case ast.IsNot(), ast.Constant(None) if name := _last_name(left):
                    yield name


def _around(error: BaseException, frames: Sequence[tuple[FrameType, int]]) -> Iterator[tuple[str, Any, tuple[bool]]]:
    # Of what this machine or the file does not have: the flags of the conditions under which it was reached, and their
    # other values, the innermost first. `if use_flash: self.attention = FlashAttention()` is not reached without flash.
    if not isinstance(error, OF_WHAT_IS_ABSENT):
        return
    for frame, line in reversed(frames):
        for node in sorted(_statements(frame.f_code.co_filename, line), key=_line, reverse=True):
            if isinstance(node, ast.If) and node.lineno != line:
                for flag in (n for n in ast.walk(node.test) if isinstance(n, (ast.Name, ast.Attribute))):
                    with contextlib.suppress(Exception):
                        value = _value(flag, frame)
                        if isinstance(value, bool) and (name := _last_name(flag)):
                            yield name, value, (not value,)


def _sets(statement: ast.stmt, attribute: str) -> bool:
    targets = (target for node in ast.walk(statement) if isinstance(node, ast.Assign) for target in node.targets)
    return any(isinstance(target, ast.Attribute) and target.attr == attribute for target in targets)


def _subscripts_at(file: str, line: int) -> Iterator[ast.Subscript]:
    # What the statement at a line takes of values that have a name.
    for node in ast.walk(max(_statements(file, line), key=_line, default=ast.Pass())):
        if isinstance(node, ast.Subscript) and isinstance(node.value, (ast.Name, ast.Attribute)):
            yield node


def _taken_apart(frame: FrameType, line: int) -> Iterator[str]:
    for node in ast.walk(max(_statements(frame.f_code.co_filename, line), key=_line, default=ast.Pass())):
        match node:
            case (
                ast.Subscript(held)
                | ast.For(_, held)
                | ast.comprehension(_, held)
                | ast.Call(ast.Name("len" | "sum" | "zip" | "enumerate"), [held, *_])
            ):
                if name := _last_name(held):
                    yield name


def _last_name(node: ast.expr) -> str | None:
    match node:
        case ast.Name(name) | ast.Attribute(_, name) | ast.Subscript(_, ast.Constant(str(name))):
            return name
    return None


def _function_at(file: str, line: int) -> ast.AST:
    # The function whose code begins at a line, that of its first decorator.
    for node in ast.walk(_tree("".join(linecache.getlines(file)))):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == line:
                return node
    return ast.Module([], [])


def _named(file: str, line: int) -> Iterator[str]:
    # The names and the keys in the statement at a line.
    inner = max(_statements(file, line), key=_line, default=None)
    for node in ast.walk(inner) if inner is not None else ():
        if node is inner or line <= getattr(node, "lineno", line):
            match node:
                case ast.Name(name) | ast.Constant(str(name)) | ast.Attribute(_, name):
                    yield name


def _frames(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    # The frames of the model's code, which is in none of torch's files, and their lines; the innermost last.
    library = (str(Path(torch.__file__).parent), str(PACKAGE), "<")
    return [
        (frame, line) for frame, line in traceback.walk_tb(trace) if not frame.f_code.co_filename.startswith(library)
    ]


@functools.lru_cache(maxsize=64)
def _tree(text: str) -> ast.AST:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _statements(file: str, line: int) -> Iterator[ast.stmt]:
    # Those that hold a line of a file.
    for node in ast.walk(_tree("".join(linecache.getlines(file)))):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            yield node


def _tests(file: str, line: int) -> Iterator[tuple[ast.expr, bool]]:
    # The conditions of the statements at a line, and what they have to be: true in an assertion, false before a raise.
    for node in _statements(file, line):
        match node:
            case ast.Assert(test):
                yield test, True
            case ast.Expr(ast.Call(ast.Name(name) | ast.Attribute(attr=name), [test, *_])) if "assert" in name.lower():
                yield test, True
            case ast.If(test, body) if any(isinstance(one, ast.Raise) and one.lineno <= line for one in body):
                yield test, False


def _needed(test: ast.expr, holds: bool) -> Iterator[tuple[ast.expr, ast.cmpop, ast.expr]]:
    match test:
        case ast.UnaryOp(ast.Not(), inner):
            yield from _needed(inner, not holds)
        case ast.BoolOp(ast.And(), values) if holds:
            for value in values:
                yield from _needed(value, holds)
        case ast.BoolOp(ast.Or(), values) if not holds:
            for value in values:
                yield from _needed(value, holds)
        case ast.BinOp(_, ast.Mod(), _) if not holds:
            yield test, ast.Eq(), ast.Constant(0)
        case ast.Compare(left, operators, rights):
            for operator, right in zip(operators, rights, strict=True):
                inverse = _INVERSE.get(type(operator))
                if holds or (inverse is not None and len(operators) == 1):
                    yield left, operator if holds or inverse is None else inverse(), right
                left = right


def _pairs(left: ast.expr, operator: ast.cmpop, right: ast.expr, frame: FrameType) -> Iterator[_Pair]:
    is_rank = any(
        re.search(r"\.(dim|ndimension)\(\)|\.ndim\b|len\([^)]*(shape|size\(\))\)", ast.unparse(s))
        for s in (left, right)
    )
    if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and isinstance(operator, ast.Eq):
        has, by = _value(left.left, frame), _value(left.right, frame)
        if _is_size(has) and _is_size(by) and by and _value(right, frame) == 0:
            yield has, -(-has // by) * by, False
            yield has, by, False
        return
    one, other = _value(left, frame), _value(right, frame)
    match operator:
        case ast.Eq():
            differing = [*_differing(one, other)]
            if len(differing) > 1:
                yield tuple(one), tuple(other), False
                yield tuple(other), tuple(one), False
            for has, wants in differing:
                yield has, wants, is_rank
                if not is_rank:
                    yield wants, has, False
        case ast.LtE() | ast.GtE():
            if _is_size(one) and _is_size(other):
                yield one, other, is_rank
        case ast.Lt() | ast.Gt():
            if _is_size(one) and _is_size(other):
                yield one, other + (1 if isinstance(operator, ast.Gt) else -1), is_rank
                # Sizes are often powers of two.
                yield one, other * 2 if isinstance(operator, ast.Gt) else other // 2, is_rank
        case ast.In():
            for wants in [one for one in other if _is_size(one)][:4] if isinstance(other, (tuple, list)) else ():
                yield one, wants, is_rank


def _differing(one: Any, other: Any) -> Iterator[tuple[int, int]]:
    if _is_size(one) and _is_size(other):
        yield one, other
    elif isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)) and len(one) == len(other):
        yield from ((a, b) for a, b in zip(one, other, strict=True) if a != b and _is_size(a) and _is_size(b))


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _value(node: ast.expr, frame: FrameType) -> Any:
    # The value that a plain expression has in a frame. Raises ValueError for one that is not plain.
    for inner in ast.walk(node):
        match inner:
            case ast.Call(ast.Name(name)) if name in _FUNCTIONS:
                continue
            case ast.Call(ast.Attribute(attr=name)) if name in _METHODS:
                continue
        if isinstance(inner, ast.Call) or not isinstance(inner, _PLAIN):
            raise ValueError(ast.unparse(node))
    names: Mapping[str, Any] = {**frame.f_globals, **frame.f_locals}
    return eval(compile(ast.fix_missing_locations(ast.Expression(node)), "<a comparison>", "eval"), dict(names))
