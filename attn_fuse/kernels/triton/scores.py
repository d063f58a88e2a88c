"""Scores: a score program as Triton functions, which the kernels of this package take as constants.

    code = score_code(program, inputs, numbers)         # cached; program: what ScoreProgram.dumps gives
    reads = code.kernel_args(inputs, numbers)           # one kernel argument: tensors, strides and sizes, numbers
    kernel[grid](..., reads, SCORE=code.score, ...)     # within: SCORE(raw, b, h, i, j, q_len, kv_len, reads)

Every function works on one tile of any shape and orientation:

    raw        fp32 tile, the product of query and key without any scale
    b, h       int32: batch and query head, scalars or of the shape of `i`
    i, j       int32 positions of query and key, of shapes that broadcast to the tile ([M, 1] and [1, N], or [1, M] and
               [N, 1]); beyond q_len and kv_len nothing is read, and the result there has no meaning; a length that
               is None lies beyond the whole tile
    reads      as above

    score(raw, b, h, i, j, q_len, kv_len, reads)             the final score, fp32, times `unit`
    score_whole(the same)                                    the same in whole blocks, times `unit_whole`; where it is
                                                             raw times a number above 0, that is `slope`
    factor(the same)                                         what multiplies the weights
    sink(b, h, i, q_len, kv_len, reads)                      the logit of the sink times `unit`, in the shape of `i`
    visible(b, h, i, j, q_len, kv_len, reads)                whether the mask lets the query see the key, in any shape,
                                                             where lower <= j - i <= upper
    score_backward(given0, raw, b, ...)                      gradient of the score (without unit) -> of raw, still to be
                                                             multiplied by `backward_factor`; None where that is all
    backward_whole(the same)                                 the same in whole blocks
    Gradient.function(given0, given1, raw, b, ...)           gradients of score and factor -> of an input's elements

A block is whole where lower <= j - i <= upper for all of it and, if the code is for spans, the mask lets every query
see every key.

The weight of an element is exp2((score - max) * (LOG2E / unit)). unit is log2(e) where multiplying the score by it
costs nothing; elsewhere, and where a finite fill in a bias could overflow, it is 1. Kernels subtract before they
multiply: a row of equal huge scores must have equal weights.

We write the source to a file in the user's cache, because Triton reads the source of what it compiles.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attn_fuse.expression.nodes import Const, Expr, Gather, Given, Input, Mul, Position, Score, children, distinct
from attn_fuse.kernels.cache import cache_dir
from attn_fuse.kernels.score.gradient import gradient_exprs
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.score.simplify import in_unit, inside, taken_out
from attn_fuse.kernels.triton.emitter import LONGEST, SHORT, Described, Emitter, Granted, described

LOG2E = 1.4426950408889634

_TILE = frozenset({"i", "j"})
_PLACE = "b, h, i, j, q_len, kv_len, reads"


@dataclass(frozen=True)
class Gradient:
    """The gradient of what `node` reads, by a Triton `function` of the gradients of score and factor; see above.

    along: the positions, of b, h, i and j, that the node depends on; kernels sum its gradient over the others.
    """

    node: Input | Gather
    along: frozenset[str]
    function: Any


@dataclass(frozen=True)
class ScoreCode:
    """The `triton.jit` functions of a score program; see above. path: the file of their source.

    unit: log2(e) or 1. score_whole: `score` itself where the two do not differ; so is backward_whole score_backward.
    slope: None where score_whole is not raw times a number above 0.
    unit_whole: log2(e) also where `unit` is 1 for the sake of fills alone: of a product, no row is one huge number.
    factor, sink, visible: None where the program has none; visible also where it shows every key within the bounds.
    gradients: of the floating-point inputs that score and factor read, in no order.
    """

    program: ScoreProgram
    path: Path
    unit: float
    score: Any
    score_whole: Any
    slope: float | None
    unit_whole: float
    factor: Any
    sink: Any
    visible: Any
    score_backward: Any
    backward_whole: Any
    backward_factor: float
    gradients: tuple[Gradient, ...]

    @functools.cached_property
    def looks_up(self) -> bool:
        """Whether the score reads a table."""
        return any(isinstance(node, Gather) for node in distinct(self.program.score))

    def kernel_args(self, inputs: Sequence[Tensor], numbers: Sequence[int]) -> tuple[Any, ...]:
        """What the functions read, as one argument of a kernel: (tensors, their strides and sizes, numbers).

        Triton compiles again for a number in a tuple that is 1 or a multiple of 16; 4 * number + 2 is neither.
        """
        return (
            readable(inputs),
            tuple(n for x in inputs for n in (*_strides(x), *x.shape)),
            tuple(4 * int(n) + 2 for n in numbers),
        )


def readable(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors as kernels take them: Booleans viewed as uint8."""
    return tuple(x.view(torch.uint8) if x.dtype == torch.bool else x for x in inputs)


def score_code(
    program: str,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    longest: int = LONGEST,
    half: bool = False,
    seen: bool = False,
) -> ScoreCode:
    """The functions of `program`, a `ScoreProgram`'s text, for inputs of these dtypes and sizes, and such numbers.

    longest: the max of batch, heads, queries and keys. half: whether query and key have 16 bits. seen: whether
    spans say which blocks are whole.
    """
    most = max(longest, *map(abs, numbers)) if numbers else longest
    granted = Granted(wide=any(abs(n) > LONGEST for n in numbers), short=most <= SHORT, half=half)
    return _score_code(program, tuple(map(described, inputs)), granted, seen)


@functools.cache
def _score_code(text: str, inputs: tuple[Described, ...], granted: Granted, seen: bool) -> ScoreCode:
    program = ScoreProgram.loads(text)
    # Where that simplifies nothing, score_whole is no function of its own.
    scored, scored_whole = program.score, inside(program.score, program, seen)
    sink, unit = program.sink, 1.0
    united, united_whole = (in_unit(expr, LOG2E) for expr in (scored, scored_whole))
    if united is not None and united_whole is not None:
        scored, scored_whole = united, united if scored_whole is scored else united_whole
        unit = LOG2E
        sink = None if sink is None else sink * LOG2E
    unit_whole = unit
    if seen and unit == 1.0 and _slope(scored_whole) is not None and united_whole is not None:
        scored_whole, unit_whole = united_whole, LOG2E
    write = functools.partial(_function, inputs=inputs, granted=granted)
    sources: dict[str, str | None] = {
        "score": write("score", f"raw, {_PLACE}", scored, "raw", _TILE),
        "factor": None if program.factor is None else write("factor", f"raw, {_PLACE}", program.factor, "raw", _TILE),
        "visible": _visible(program, inputs, granted),
        "sink": None if sink is None else write("sink", "b, h, i, q_len, kv_len, reads", sink, "i", frozenset("i")),
    }
    if scored_whole is not scored:
        sources["score_whole"] = write("score_whole", f"raw, {_PLACE}", scored_whole, "raw", _TILE)
    found = _gradients(program, inputs)
    of_raw = [expr for node, expr in found if isinstance(node, Score)]
    backward_factor, back = taken_out(of_raw[0] if of_raw else Const(0.0))
    back_whole = inside(back, program, seen) if seen else back
    for name, expr in ("score_backward", back), ("backward_whole", back_whole):
        if expr != _OF_SCORE and (expr is back) == (name == "score_backward"):
            sources[name] = write(name, f"given0, raw, {_PLACE}", expr, "raw", _TILE)
    wanted = [(node, expr) for node, expr in found if isinstance(node, (Input, Gather))]
    for n, (_, expr) in enumerate(wanted):
        sources[f"gradient{n}"] = write(f"gradient{n}", f"given0, given1, raw, {_PLACE}", expr, "raw", _TILE)
    path, module = _loaded(_HEADER + "\n\n\n".join(filter(None, sources.values())))
    return ScoreCode(
        program=program,
        path=path,
        unit=unit,
        score=module.score,
        score_whole=getattr(module, "score_whole", module.score),
        slope=_slope(scored_whole),
        unit_whole=unit_whole,
        factor=getattr(module, "factor", None),
        sink=getattr(module, "sink", None),
        visible=getattr(module, "visible", None),
        score_backward=(score_backward := getattr(module, "score_backward", None)),
        backward_whole=None if back_whole == _OF_SCORE else getattr(module, "backward_whole", score_backward),
        backward_factor=backward_factor,
        gradients=tuple(
            Gradient(node, _along(node, inputs), getattr(module, f"gradient{n}")) for n, (node, _) in enumerate(wanted)
        ),
    )


def _slope(expr: Expr) -> float | None:
    match expr:
        case Score():
            return 1.0
        case Mul(Score(), Const(float() as value)):
            return value if value > 0 else None
    return None


# The gradients of score and factor.
_OF_SCORE, _OF_FACTOR = Given(0), Given(1)


def _gradients(program: ScoreProgram, inputs: Sequence[Described]) -> list[tuple[Expr, Expr]]:
    """The raw score and the nodes that read a floating-point input, each with its gradient, where there is one."""
    given: list[tuple[Expr, Expr]] = [(program.score, _OF_SCORE)]
    if program.factor is not None:
        given.append((program.factor, _OF_FACTOR))
    every = {id(node): node for expr, _ in given for node in distinct(expr)}
    sources = [
        node
        for node in every.values()
        if isinstance(node, Score) or (isinstance(node, (Input, Gather)) and inputs[node.leaf].dtype.is_floating_point)
    ]
    return [(every[which], expr) for which, expr in gradient_exprs(given, sources).items()]


def _along(node: Expr, inputs: Sequence[Described]) -> frozenset[str]:
    """The positions along which `evaluate` gives more than one element."""
    match node:
        case Input(n):
            return frozenset(name for name, single in zip("bhij", inputs[n].single, strict=True) if not single)
        case Gather(n) if not inputs[n].dims:
            return frozenset()
        case Position(name):
            return frozenset({name})
    return frozenset[str]().union(*(_along(part, inputs) for part in children(node)))


_HEADER = """\
import triton
import triton.language as tl

from attn_fuse.kernels.triton import functions as fn


"""


def _function(
    name: str,
    arguments: str,
    expr: Expr,
    like: str,
    whole: frozenset[str],
    inputs: Sequence[Described],
    granted: Granted,
) -> str:
    emitter = Emitter(inputs, granted)
    result = emitter.float32(expr, like, whole)
    lines = [*emitter.lines, f"return {result}"]
    return f"@triton.jit\ndef {name}({arguments}):\n" + "\n".join(f"    {line}" for line in lines) + "\n"


def _visible(program: ScoreProgram, inputs: Sequence[Described], granted: Granted) -> str | None:
    expr = None if program.visible is None else inside(program.visible, program)
    if expr is None or (isinstance(expr, Const) and expr.value):
        return None
    emitter = Emitter(inputs, granted)
    result = emitter.boolean(expr)
    lines = [*emitter.lines, f"return {result}"]
    return f"@triton.jit\ndef visible({_PLACE}):\n" + "\n".join(f"    {line}" for line in lines) + "\n"


def _strides(x: Tensor) -> tuple[int, ...]:
    return tuple(0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True))


# ---- the source as a file


def _loaded(source: str) -> tuple[Path, ModuleType]:
    name = f"attn_fuse_scores_{hashlib.sha256(source.encode()).hexdigest()[:24]}"
    path = _folder() / f"{name}.py"
    if name not in sys.modules:
        if not path.exists() or path.read_text() != source:
            # Other processes may be reading or writing the same file.
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                file.write(source)
            os.replace(file.name, path)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return path, sys.modules[name]


@functools.cache
def _folder() -> Path:
    """scores in the cache directory; where that cannot be written, a temporary folder."""
    try:
        folder = cache_dir() / "scores"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.mkdtemp(prefix="attn_fuse_"))
