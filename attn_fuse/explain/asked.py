"""What an error asks of a model's inputs: sizes, ranks, dtypes, entries of dicts, and arguments that it names."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

# The size that there is, and the size that is wanted, in the words of torch's errors; of two that have to be equal,
# either may be wrong.
WANTED = re.compile(
    r"shapes cannot be multiplied \(\d+x(?P<has>\d+) and (?P<wants>\d+)x\d+\)"
    r"|to have (?P<wants1>\d+) channels, but got (?P<has1>\d+) channels"
    r"|expected input with shape \[\*, (?P<wants2>\d+)\], but got input of size\[[\d, ]*?(?P<has2>\d+)\]"
    r"|input.size\(-1\) must be equal to input_size\. Expected (?P<wants3>\d+), got (?P<has3>\d+)"
    r"|running_mean should contain (?P<has4>\d+) elements not (?P<wants4>\d+)"
    r"|\w+ \((?P<has6>\d+)\) must be divisible by \w+ \((?P<wants6>\d+)\)"
    r"|expecting embedding dimension of (?P<wants5>\d+), but got (?P<has5>\d+)"
)
EQUAL = re.compile(
    r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)"
    r"|Expected size (\d+) but got size (\d+) for tensor"
    r"|expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\)"
)
# The rank that there is, and the one that is wanted; a rank that an index or a dimension goes beyond is one too few.
RANKS = re.compile(
    r"input\.dim\(\) = (?P<has>\d+) is not equal to len\(dims\) = (?P<wants>\d+)"
    r"|[Ee]xpected (?P<wants1>\d+)(?: or more)? dims\. Received (?P<has1>\d+)-dim"
)
TOO_FEW = re.compile(
    r"too many indices for tensor of dimension (\d)|Dimension out of range \(expected to be in range of \[-(\d), \d\]"
)
UNPACKED = re.compile(r"(?:not enough|too many) values to unpack \(expected (\d)")
UNEQUAL_RANKS = re.compile(r"Tensors must have same number of dimensions: got \d and \d")
INDEX_RANK = re.compile(r"Index tensor must have the same number of dimensions as (?:input|self) tensor")
TO_FLOATS = re.compile(
    r"mixed dtype|same dtype|not implemented for '(Long|Int)'|Input type \(long int\)|scalar type Long but found Float"
)
TO_WHOLE = re.compile(
    r"'indices' to have one of the following scalar types|must be long, int, byte or bool|of type LongTensor"
    r"|Expected dtype int(64|32/int64)"
)
RESHAPED = re.compile(r"shape '\[-1, ([\d, ]+)\]' is invalid for input of size (\d+)")
ARRAYS = re.compile(r"'numpy\.ndarray' and 'Tensor'|expected np\.ndarray|has no attribute 'astype'")
NUMBERS = re.compile(r"'NoneType' and '(int|float)'|'(int|float)' and 'NoneType'")
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


@dataclass(frozen=True)
class Asked:
    """What an error asks of the inputs.

    sizes: pairs of a size that there is, or that came of one, and one that is wanted.
    ranks: pairs of ranks likewise; the first is None where any may be wrong.
    is_rank_unequal: whether two ranks that came of them differ.
    blocks: pairs of a count of numbers and a block that the model makes of each.
    dtype: the kind of numbers that is wanted.
    key: an entry that a dict lacks.
    index_rank: whether whole numbers lack a dimension.
    arrays: whether NumPy's arrays are wanted.
    words: those of the message.
    absent: names that are None and that the message or the lines that led there speak of.
    near: the names and the keys at those lines.
    number: whether a number is wanted in place of None.
    lacks: attributes of the model that are not set there.
    kind: the message without sizes.
    """

    sizes: tuple[tuple[int, int], ...] = ()
    ranks: tuple[tuple[int | None, int], ...] = ()
    is_rank_unequal: bool = False
    blocks: tuple[tuple[int, int], ...] = ()
    dtype: torch.dtype | None = None
    key: str | None = None
    index_rank: bool = False
    arrays: bool = False
    words: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    near: frozenset[str] = frozenset()
    number: bool = False
    lacks: frozenset[str] = frozenset()
    kind: str = ""


def asked_by(error: BaseException) -> Asked:
    """What `error`, which a model raised on some inputs, asks of them: by its message, and by the comparison of sizes
    that the model's own code found false, as in `assert width == self.width`."""
    message = str(error)
    sizes = [*_sizes_in(message)]
    ranks: list[tuple[int | None, int]] = [*_ranks_in(message)]
    frames = _frames(error.__traceback__)
    for has, wants, is_rank in _compared(*frames[-1]) if frames else ():
        (ranks if is_rank else sizes).append((has, wants))
    reshaped = RESHAPED.search(message)
    words = frozenset(re.findall(r"[A-Za-z_]\w*", message))
    near = frozenset(name for frame, line in frames for name in _named(frame.f_code.co_filename, line))
    return Asked(
        tuple(dict.fromkeys(pair for pair in sizes if pair[0] != pair[1])),
        tuple(dict.fromkeys(ranks)),
        UNEQUAL_RANKS.search(message) is not None,
        ((int(reshaped[2]), _product(reshaped[1])),) if reshaped else (),
        torch.float32 if TO_FLOATS.search(message) else torch.long if TO_WHOLE.search(message) else None,
        str(error.args[0]) if isinstance(error, KeyError) and error.args else None,
        INDEX_RANK.search(message) is not None,
        ARRAYS.search(message) is not None,
        words,
        frozenset(name for frame, _ in frames for name in _absent(frame) if name in words | near),
        near,
        NUMBERS.search(message) is not None,
        _lacks(error, *frames[-1]) if frames else frozenset(),
        re.sub(r"\(\d+\)|\d\d+", "", message),
    )


def _product(sizes: str) -> int:
    return functools.reduce(lambda a, b: a * b, map(int, sizes.split(",")))


def _sizes_in(message: str) -> Iterator[tuple[int, int]]:
    if found := WANTED.search(message):
        yield _has_and_wants(found)
    elif found := EQUAL.search(message):
        one, other = (int(v) for v in found.groups() if v)
        yield one, other
        yield other, one


def _has_and_wants(found: re.Match[str]) -> tuple[int, int]:
    groups = found.groupdict()
    has = next(int(v) for n, v in groups.items() if v and n.startswith("has"))
    return has, next(int(v) for n, v in groups.items() if v and n.startswith("wants"))


def _ranks_in(message: str) -> Iterator[tuple[int | None, int]]:
    if found := UNPACKED.search(message):
        yield None, int(found[1])
    elif found := TOO_FEW.search(message):
        rank = int(found[1] or found[2])
        yield rank, rank + 1
    elif found := RANKS.search(message):
        yield _has_and_wants(found)


def _compared(frame: FrameType, line: int) -> Iterator[tuple[int, int, bool]]:
    # Of the comparisons at a line that came out false: the size that there is, the one that would do, and whether both
    # are ranks.
    for test, holds in _tests(frame.f_code.co_filename, line):
        for left, operator, right in _needed(test, holds):
            # Whatever the model's own attributes raise says nothing.
            with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
                yield from [*_pairs(left, operator, right, frame)]


def _absent(frame: FrameType) -> set[str]:
    return {name for name, value in frame.f_locals.items() if value is None}


def _lacks(error: BaseException, frame: FrameType, line: int) -> frozenset[str]:
    # Attributes of a module that it has not, or that are None in the statement that failed.
    if isinstance(error, AttributeError) and isinstance(error.obj, nn.Module):
        return frozenset({str(error.name)})
    owner = frame.f_locals.get("self")
    inner = max(_statements(frame.f_code.co_filename, line), key=lambda node: node.lineno, default=ast.Pass())
    read = {
        node.attr for node in ast.walk(inner) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    is_module = isinstance(owner, nn.Module) and "NoneType" in str(error)
    return frozenset(name for name in read if getattr(owner, name, owner) is None) if is_module else frozenset()


def _named(file: str, line: int) -> Iterator[str]:
    # The names and the keys in the statement at a line.
    inner = max(_statements(file, line), key=lambda node: node.lineno, default=None)
    for node in ast.walk(inner) if inner is not None else ():
        if node is inner or line <= getattr(node, "lineno", line):
            match node:
                case ast.Name(name) | ast.Constant(str(name)):
                    yield name


def _frames(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    # The frames of the model's code, which is in none of torch's files, and their lines; the innermost last.
    library = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
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


def _pairs(left: ast.expr, operator: ast.cmpop, right: ast.expr, frame: FrameType) -> Iterator[tuple[int, int, bool]]:
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
            for has, wants in _differing(one, other):
                yield has, wants, is_rank
                if not is_rank:
                    yield wants, has, False
        case ast.LtE() | ast.GtE():
            if _is_size(one) and _is_size(other):
                yield one, other, is_rank
        case ast.Lt() | ast.Gt():
            if _is_size(one) and _is_size(other):
                yield one, other + (1 if isinstance(operator, ast.Gt) else -1), is_rank
        case ast.In():
            for wants in [one for one in other if _is_size(one)][:4] if isinstance(other, (tuple, list)) else ():
                yield one, wants, is_rank


def _differing(one: Any, other: Any) -> Iterator[tuple[int, int]]:
    if _is_size(one) and _is_size(other):
        yield one, other
    elif isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)) and len(one) == len(other):
        yield from ((a, b) for a, b in zip(one, other, strict=True) if a != b and _is_size(a) and _is_size(b))


def _is_size(value: object) -> bool:
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
