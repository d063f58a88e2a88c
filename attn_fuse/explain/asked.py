"""Read an error: the numbers, names and choices in its message and in the comparison that failed.

The wording of messages differs between versions of torch and between libraries, so every number may be the actual size
or the wanted one.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import math
import re
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attn_fuse.explain.opening.roots import PACKAGE
from attn_fuse.explain.problems import in_one_line

# The largest size that an error may ask for.
LARGEST = 1 << 16
_LIBRARY = str(Path(torch.__file__).parent)
_SHAPE = re.compile(r"[\[(]((?:-?\d+, )*-?\d+)[\])]")


@dataclass(frozen=True)
class Asked:
    """What an error asks for.

    words: the error in one line. kind: its type and the line that raised it. numbers: in the message and the failing
    comparison. names: in the failing lines, and quoted in the message. choices: values, each with the alternatives that
    the code knows.
    """

    words: str
    kind: str
    numbers: tuple[int, ...]
    names: frozenset[str]
    choices: tuple[tuple[Any, Any], ...]

    def others_for(self, size: int) -> Iterator[int]:
        """Replacements for `size`, the likeliest first.

        Either a number of the error, or the size that turns one number of the error into another if it was computed as
        a multiple, a part, a square, or a sum with a small constant.
        """
        found: dict[int, None] = {}
        pairs = [*itertools.permutations(self.numbers, 2)]
        if size in self.numbers:
            # The number that it has to fit stands beside it in the message.
            after = self.numbers.index(size) + 1
            found |= dict.fromkeys((*self.numbers[after:], *self.numbers[:after][::-1]))
        for has, wants in pairs:
            # `has` was computed as a multiple or a part of `size`, or as its square.
            if wants and has and (size * wants) % has == 0 and (size % has == 0 or has % size == 0):
                found[size * wants // has] = None
            for extra in (0, 1, 2):
                side = _side(size, has - extra, wants - extra)
                if side is not None:
                    found[side] = None
        for has, wants in pairs:
            if 0 < abs(has - size) <= 4:
                found[size + wants - has] = None
        found |= dict.fromkeys(self.numbers)
        yield from (other for other in found if 0 < other <= LARGEST and other != size)


def _side(size: int, has: int, wants: int) -> int | None:
    # The side of a picture with `wants` patches, if one of side `size` has `has`.
    if has <= 0 or wants <= 0 or has == wants:
        return None
    side = size * math.sqrt(wants / has)
    per_patch = size / math.sqrt(has)
    return round(side) if side == round(side) and per_patch == round(per_patch) else None


def asked_by(error: BaseException) -> Asked:
    """What an error of a constructor or a forward asks for."""
    message = "\n".join(str(error).splitlines()[:3])
    numbers = [int(number) for number in re.findall(r"(?<![\w.])\d+(?![\w.])|(?<=\d[x*])\d+|\d+(?=[x*]\d)", message)]
    for shape in _SHAPE.findall(message):
        sizes = [int(size) for size in shape.split(",")]
        numbers.append(abs(math.prod(sizes)))
    names = set(re.findall(r"'(\w+)'", message))
    choices: list[tuple[Any, Any]] = []
    place = ""
    for frame, line in _frames(error)[-3:]:
        statement = _statement(frame, line)
        names |= set(re.findall(r"[A-Za-z_]\w*", linecache.getline(frame.f_code.co_filename, line)))
        place = f"{frame.f_code.co_filename}:{line}"
        if statement is not None:
            compared, options = _compared(statement, frame)
            numbers += compared
            choices += options
    kept = [number for number in dict.fromkeys(numbers) if 0 < number <= 1 << 26]
    kind = f"{type(error).__name__} {place}"
    return Asked(in_one_line(error), kind, tuple(kept[:8]), frozenset(names), tuple(choices))


def _frames(error: BaseException) -> list[tuple[types.FrameType, int]]:
    # The calls of the user's code, the innermost last.
    calls = traceback.walk_tb(error.__traceback__)
    return [one for one in calls if not one[0].f_code.co_filename.startswith((_LIBRARY, str(PACKAGE), "<"))]


def _statement(frame: types.FrameType, line: int) -> ast.stmt | None:
    # The statement that failed; for a `raise`, the `if` around it.
    statements = _statements(frame.f_code.co_filename)
    around = [node for node in statements if node.lineno <= line <= (node.end_lineno or node.lineno)]
    if not around:
        return None
    innermost = max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    if isinstance(innermost, ast.Raise):
        return max((n for n in around if isinstance(n, ast.If)), key=lambda node: node.lineno, default=None)
    return innermost


@functools.lru_cache(maxsize=64)
def _statements(file: str) -> tuple[ast.stmt, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.stmt))


def _compared(statement: ast.stmt, frame: types.FrameType) -> tuple[list[int], list[tuple[Any, Any]]]:
    # The numbers that a statement compares, and its values that must be one of several.
    numbers: list[int] = []
    choices: list[tuple[Any, Any]] = []
    tested: ast.AST = statement.test if isinstance(statement, (ast.If, ast.Assert)) else statement
    for node in ast.walk(tested):
        match node:
            case ast.Compare(left, [ast.In() | ast.NotIn()], [several]):
                value, options = _value(left, frame), _value(several, frame)
                if isinstance(options, (list, tuple, set, dict)):
                    choices.append((value, tuple(options)))
            case ast.Compare(left, [ast.Eq() | ast.NotEq()], [ast.Constant(other)]):
                choices.append((_value(left, frame), (other,)))
                numbers += _whole(_value(left, frame)) + _whole(other)
            case ast.Compare(left, _, others):
                for one in (left, *others):
                    numbers += _whole(_value(one, frame))
            case ast.Subscript(table, key):
                options = _value(table, frame)
                if isinstance(options, dict):
                    choices.append((_value(key, frame), tuple(options)))
            case ast.BinOp(left, ast.Mod() | ast.FloorDiv(), right):
                numbers += _whole(_value(left, frame)) + _whole(_value(right, frame))
    return numbers, choices


def _whole(value: Any) -> list[int]:
    return [one for one in (value if isinstance(value, (tuple, list)) else (value,)) if type(one) is int]


def _value(node: ast.expr, frame: types.FrameType) -> Any:
    # The value of an expression where it failed, if it calls only `len`, `size` and `dim`.
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            called = inner.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name not in ("len", "size", "dim"):
                return None
    try:
        return eval(compile(ast.Expression(node), "<asked>", "eval"), {**frame.f_globals, **frame.f_locals})
    except Exception:  # for example an unbound name
        return None
