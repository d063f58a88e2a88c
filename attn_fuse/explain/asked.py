"""What an error asks for: the numbers, names and choices of its message and of the comparison that failed.

How messages are worded is not known here: that differs between versions of torch and between libraries. Each number in
a message may be an actual size or a wanted one.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import math
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attn_fuse.explain.opening.roots import PACKAGE
from attn_fuse.explain.problems import in_one_line

# How large a size may be that an error asks for.
LARGEST = 1 << 16
_LIBRARY = str(Path(torch.__file__).parent)
_SHAPE = re.compile(r"[\[(]((?:-?\d+, )*-?\d+)[\])]")


@dataclass(frozen=True)
class Asked:
    """What an error asks for.

    words: the error in one line. kind: its type and the line that raised it. numbers: those that its message or the
    values that it compares have. names: what the failing lines name, and what the message quotes. choices: pairs of a
    value and others that the code knows in its place. memory: where the tensors of the failing calls lie, those of the
    innermost call first.
    """

    words: str
    kind: str
    numbers: tuple[int, ...]
    names: frozenset[str]
    choices: tuple[tuple[Any, Any], ...]
    memory: tuple[int, ...] = ()

    def others_for(self, size: int) -> Iterator[int]:
        """Sizes to put in the place of `size`: a number of the error itself, one such that what was computed of it,
        as n times it, its square, or it and a constant, is another number of the error; the likeliest first."""
        found: dict[int, None] = {}
        pairs = [*itertools.permutations(self.numbers, 2)]
        if size in self.numbers:
            # Beside it in the message stands what it has to fit.
            after = self.numbers.index(size) + 1
            found |= dict.fromkeys((*self.numbers[after:], *self.numbers[:after][::-1]))
        for has, wants in pairs:
            # size is n times what there is, or a part of it; of a square the sides.
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
    # The side of a picture of which `wants` patches come where `has` come of one of `size`.
    if has <= 0 or wants <= 0 or has == wants:
        return None
    side = size * math.sqrt(wants / has)
    per_patch = size / math.sqrt(has)
    return round(side) if side == round(side) and per_patch == round(per_patch) else None


def asked_by(error: BaseException) -> Asked:
    """What `error`, which a constructor or a forward raised, asks for."""
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
    return Asked(
        in_one_line(error),
        f"{type(error).__name__} {place}",
        tuple(kept[:8]),
        frozenset(names),
        tuple(choices),
        _memory(error),
    )


def memory_of(tensor: torch.Tensor) -> int:
    """Where the numbers of a tensor lie, which its views share."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _memory(error: BaseException) -> tuple[int, ...]:
    calls = [frame.f_locals.values() for frame, _ in reversed(_frames(error))]
    return tuple(dict.fromkeys(memory_of(v) for values in calls for v in values if type(v) is torch.Tensor))


def _frames(error: BaseException) -> list[tuple[types.FrameType, int]]:
    # The calls of code that is neither torch's nor ours, the innermost last.
    found: list[tuple[types.FrameType, int]] = []
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((_LIBRARY, str(PACKAGE), "<")):
            found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _statement(frame: types.FrameType, line: int) -> ast.stmt | None:
    # The statement that failed; where it raises, the `if` that it stands under.
    around = [
        node
        for node in _statements(frame.f_code.co_filename)
        if node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
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
    # The numbers that a statement compares, and its values that are to be one of several.
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
    if isinstance(value, torch.Size) or (isinstance(value, (tuple, list)) and all(type(one) is int for one in value)):
        return list(value)
    return [value] if type(value) is int else []


def _value(node: ast.expr, frame: types.FrameType) -> Any:
    # The value of an expression that calls nothing but `len` and `size`, where it failed.
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            called = inner.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name not in ("len", "size", "dim"):
                return None
    try:
        return eval(compile(ast.Expression(node), "<asked>", "eval"), {**frame.f_globals, **frame.f_locals})
    except Exception:  # a name that is not bound by now
        return None


def near(names: Sequence[str], asked: Asked) -> list[str]:
    """The names, those that the failing lines name first."""
    return sorted(names, key=lambda name: name.rpartition(".")[2] not in asked.names)
