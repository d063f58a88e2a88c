"""Scores: a score program as Triton functions, which the kernels of this package take as constants.

    code = score_code(program, inputs, numbers)         # cached; program: the text from ScoreProgram.dumps
    reads = code.kernel_args(inputs, numbers)           # one kernel argument: tensors, strides and sizes, numbers
    kernel[grid](..., reads, SCORE=code.score, ...)     # inside: SCORE(raw, b, h, i, j, q_len, kv_len, reads)

Every function works on one tile of any shape and orientation:

    raw        fp32 tile, the unscaled product of query and key
    b, h       int32 batch entry and query head, scalars or in the shape of `i`
    i, j       int32 positions of query and key, in shapes that broadcast to the tile ([M, 1] and [1, N], or [1, M] and
               [N, 1]); nothing is read beyond q_len and kv_len, and results there are meaningless; a length of None is
               beyond the tile

    score(raw, b, h, i, j, q_len, kv_len, reads)        the final score, fp32, times `unit`
    score_whole(the same)                               the score in whole blocks, times `unit_whole`
    factor(the same)                                    the factor of the weights
    sink(b, h, i, q_len, kv_len, reads)                 the logit of the sink times `unit`, in the shape of `i`
    visible(b, h, i, j, q_len, kv_len, reads)           whether the mask shows the key to the query, in any shape, if
                                                        lower <= j - i <= upper
    score_backward(given0, raw, b, ...)                 the gradient of raw from that of the score (without unit), still
                                                        to be multiplied by `backward_factor`
    backward_whole(the same)                            the same in whole blocks
    Gradient.function(given0, given1, raw, b, ...)      the gradient of an input's elements from those of score and
                                                        factor

In a whole block lower <= j - i <= upper everywhere and, if the code is for spans, the mask shows every key to every
query.

The weight of an element is exp2((score - max) * (LOG2E / unit)). unit is log2(e) if multiplying the score by it costs
nothing and cannot make a finite fill in a bias overflow, else 1. Kernels subtract before they multiply, because a row
of equal huge scores must get equal weights.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_fuse.expression.nodes import Const, Expr, Gather, Given, Input, Mul, Score, distinct
from attn_fuse.kernels.score.dependence import dependences
from attn_fuse.kernels.score.gradient import gradient_exprs
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.score.simplify import in_unit, inside, taken_out
from attn_fuse.kernels.triton.emitter import LONGEST, SHORT, Described, Emitter, Granted, described

LOG2E = 1.4426950408889634

_PLACE = "b, h, i, j, q_len, kv_len, reads"


@dataclass(frozen=True)
class Gradient:
    """The gradient of the elements that `node` reads, as a Triton `function` of the gradients of score and factor.

    along: the positions among b, h, i and j on which the node depends. Kernels sum its gradient over the others.
    """

    node: Input | Gather
    along: frozenset[str]
    function: Any


@dataclass(frozen=True)
class ScoreCode:
    """The `triton.jit` functions of a score program, described above, and their source.

    score_whole, backward_whole: score and score_backward themselves if they do not differ.
    slope: the number > 0 by which score_whole multiplies, or None if it does anything else.
    unit_whole: log2(e) even if `unit` is 1 because of fills. Without fills the scores of a row are not one huge number.
    factor, sink, visible: None if the program has none, or if every key within the bounds is visible.
    score_backward: None if the gradient of raw is that of the score times backward_factor.
    gradients: for the floating-point inputs of score and factor, in any order.
    """

    program: ScoreProgram
    source: str
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
        """Whether the score looks up a table."""
        return any(isinstance(node, Gather) for node in distinct(self.program.score))

    def kernel_args(self, inputs: Sequence[Tensor], numbers: Sequence[int]) -> tuple[Any, ...]:
        """The kernel argument `reads`: (tensors, their strides and sizes, numbers).

        Triton compiles again for a number in a tuple that is 1 or a multiple of 16, and 4 * number + 2 never is.
        """
        return (
            readable(inputs),
            tuple(n for x in inputs for n in (*_strides(x), *x.shape)),
            tuple(4 * int(n) + 2 for n in numbers),
        )


def readable(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`inputs` as kernels take them, with Booleans viewed as uint8."""
    return tuple(x.view(torch.uint8) if x.dtype == torch.bool else x for x in inputs)


def score_code(
    program: str,
    inputs: Sequence[Tensor],
    numbers: Sequence[int],
    longest: int = LONGEST,
    half: bool = False,
    seen: bool = False,
) -> ScoreCode:
    """The functions of `program`, the text of a `ScoreProgram`, for inputs and numbers like these.

    longest: the max of batch, heads, q_len and kv_len. half: whether query and key have 16 bits. seen: whether spans
    say which blocks are whole.
    """
    most = max(longest, *map(abs, numbers)) if numbers else longest
    granted = Granted(wide=any(abs(n) > LONGEST for n in numbers), short=most <= SHORT, half=half)
    return _score_code(program, tuple(map(described, inputs)), granted, seen)


@functools.cache
def _score_code(text: str, inputs: tuple[Described, ...], granted: Granted, seen: bool) -> ScoreCode:
    program = ScoreProgram.loads(text)
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
    visible = None if program.visible is None else inside(program.visible, program)
    of_raw, of_inputs = _gradients(program, inputs)
    backward_factor, back = taken_out(of_raw)
    back_whole = inside(back, program, seen) if seen else back

    of_tile, of_gradient = f"raw, {_PLACE}", f"given0, raw, {_PLACE}"
    wanted: dict[str, tuple[Expr | None, str]] = {
        "score": (scored, of_tile),
        "factor": (program.factor, of_tile),
        "visible": (None if isinstance(visible, Const) and visible.value else visible, _PLACE),
        "sink": (sink, "b, h, i, q_len, kv_len, reads"),
        "score_whole": (None if scored_whole is scored else scored_whole, of_tile),
        "score_backward": (None if back == _OF_SCORE else back, of_gradient),
        "backward_whole": (None if back_whole in (back, _OF_SCORE) else back_whole, of_gradient),
    }
    for n, (_, expr) in enumerate(of_inputs):
        wanted[f"gradient{n}"] = expr, f"given0, given1, raw, {_PLACE}"
    written = (_function(name, *how, inputs, granted) for name, how in wanted.items())
    source = _HEADER + "\n\n\n".join(filter(None, written))
    made = _functions(source)
    functions = {name: made.get(name) for name in wanted if not name.startswith("gradient")}
    functions["score_whole"] = functions["score_whole"] or made["score"]
    if back_whole != _OF_SCORE:
        functions["backward_whole"] = functions["backward_whole"] or functions["score_backward"]
    varies = [frozenset(name for name, one in zip("bhij", x.single, strict=False) if not one) for x in inputs]
    return ScoreCode(
        program=program,
        source=source,
        unit=unit,
        unit_whole=unit_whole,
        slope=_slope(scored_whole),
        backward_factor=backward_factor,
        **functions,
        gradients=tuple(
            Gradient(node, dependences(node, varies)[id(node)], made[f"gradient{n}"])
            for n, (node, _) in enumerate(of_inputs)
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


def _gradients(program: ScoreProgram, inputs: Sequence[Described]) -> tuple[Expr, list[tuple[Input | Gather, Expr]]]:
    """The gradient of the raw score, and the nodes that read a floating-point input, each with its gradient if any."""
    given: list[tuple[Expr, Expr]] = [(program.score, _OF_SCORE)]
    if program.factor is not None:
        given.append((program.factor, _OF_FACTOR))
    every = {id(node): node for expr, _ in given for node in distinct(expr)}
    read = [
        node
        for node in every.values()
        if isinstance(node, (Input, Gather)) and inputs[node.leaf].dtype.is_floating_point
    ]
    scores = [node for node in every.values() if isinstance(node, Score)]
    found = gradient_exprs(given, [*scores, *read])
    of_raw = [found[id(node)] for node in scores if id(node) in found]
    return of_raw[0] if of_raw else Const(0.0), [(node, found[id(node)]) for node in read if id(node) in found]


_HEADER = """\
import triton
import triton.language as tl

from attn_fuse.kernels.triton import functions as fn


"""


def _function(
    name: str, expr: Expr | None, arguments: str, inputs: Sequence[Described], granted: Granted
) -> str | None:
    if expr is None:
        return None
    emitter = Emitter(inputs, granted)
    result = emitter.boolean(expr) if name == "visible" else emitter.float32(expr, "i" if name == "sink" else "raw")
    lines = [*emitter.lines, f"return {result}"]
    return f"@triton.jit\ndef {name}({arguments}):\n" + "\n".join(f"    {line}" for line in lines) + "\n"


def _strides(x: Tensor) -> tuple[int, ...]:
    return tuple(0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True))


@functools.cache
def _functions(source: str) -> dict[str, Any]:
    """The names that `source` defines."""
    name = f"attn_fuse_scores_{hashlib.sha256(source.encode()).hexdigest()[:24]}"
    file = f"{name}.py"
    # Triton finds the source of functions that it compiles under this name.
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    made: dict[str, Any] = {"__name__": name}
    exec(compile(source, file, "exec"), made)
    return made
