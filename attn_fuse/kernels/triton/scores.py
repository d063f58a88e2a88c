"""Scores: a score program as functions of Triton, which the kernels of this package are given as constants.

    code = score_code(program, inputs, numbers)         # cached; program: what ScoreProgram.dumps gives
    reads = code.reads(inputs, numbers)                 # one kernel argument: tensors, strides and sizes, numbers
    kernel[grid](..., reads, SCORE=code.score, ...)     # within: SCORE(raw, b, h, i, j, q_len, kv_len, reads)

Every function is about one tile of any shape and orientation:

    raw        fp32 tile, the product of query and key without any scale
    b, h       int32: batch and query head, scalars or of the shape of `i`
    i, j       int32 positions of query and key, of shapes that broadcast to the tile ([M, 1] and [1, N], or [1, M] and
               [N, 1]); beyond q_len and kv_len nothing is read, and the result there means nothing
    reads      as above

    score(raw, b, h, i, j, q_len, kv_len, reads)             the final score, fp32, times `unit`
    score_inside(the same)                                   the same where lower <= j - i <= upper for all of the tile;
                                                             `slope` * raw, where that is all, and `slope` above 0
    factor(the same)                                         what multiplies the weights
    sink(b, h, i, q_len, kv_len, reads)                      the logit of the sink times `unit`, in the shape of `i`
    visible(b, h, i, j, q_len, kv_len, reads)                whether the mask lets the query see the key, in whatever
                                                             shape, where lower <= j - i <= upper
    score_backward(given0, raw, b, ...)                      gradient of the score (without unit) -> of raw, but for
                                                             `backward_factor`, by which it is still to be multiplied;
                                                             None where nothing else is to be done
    Gradient.function(given0, given1, raw, b, ...)           gradients of score and factor -> of an input's elements

The weight of an element is exp2((score - maximum) * (LOG2E / unit)): where a score can be had in units of log(2) at no
cost, it is; elsewhere, and where a finite fill in a bias could overflow, it is as it is. The difference is to be taken
before the product: a row of equal huge scores must have equal weights.

The source is written to a file of the user's, because Triton reads the source of what it compiles.
"""

from __future__ import annotations

import dataclasses
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

from attn_fuse.kernels.score.derivative import Trees, gradient_trees
from attn_fuse.kernels.score.program import ScoreProgram, Tree, nodes
from attn_fuse.kernels.score.simplify import in_unit, inside, taken_out
from attn_fuse.kernels.triton.emitter import LONGEST, Described, Emitter, described

LOG2E = 1.4426950408889634

_TILE = frozenset({"i", "j"})
_PLACE = "b, h, i, j, q_len, kv_len, reads"


@dataclass(frozen=True)
class Gradient:
    """How the gradient of what `node`, an "input" or a "gather", reads comes of those of score and factor.

    along: the positions, of b, h, i and j, that the node depends on; over the others its gradient is to be added up.
    """

    node: Tree
    along: frozenset[str]
    function: Any


@dataclass(frozen=True)
class ScoreCode:
    """The functions, each a `triton.jit` one; see above. path: where their source is.

    unit: log2(e) or 1. factor, sink, visible: None where the program has none, or lets each key be seen within its
    bounds. score_inside: `score` itself where it is no other. gradients: of the floating-point inputs that score and
    factor read, in no order.
    """

    program: ScoreProgram
    path: Path
    unit: float
    score: Any
    score_inside: Any
    slope: float | None
    factor: Any
    sink: Any
    visible: Any
    score_backward: Any
    backward_factor: float
    gradients: tuple[Gradient, ...]

    def reads(self, inputs: Sequence[Tensor], numbers: Sequence[int]) -> tuple[Any, ...]:
        """What the functions read, as one argument of a kernel: (tensors, their strides and sizes, numbers).

        Triton compiles anew for a number in a tuple that is 1 or a multiple of 16: 4 * number + 2 is neither.
        """
        return (
            readable(inputs),
            tuple(n for x in inputs for n in (*_strides(x), *x.shape)),
            tuple(4 * int(n) + 2 for n in numbers),
        )


def readable(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors as kernels take them."""
    return tuple(x.view(torch.uint8) if x.dtype == torch.bool else x for x in inputs)


def score_code(program: str, inputs: Sequence[Tensor], numbers: Sequence[int]) -> ScoreCode:
    """The functions of `program` for inputs of these dtypes and dimensions, and numbers as large as these."""
    wide = any(abs(n) > LONGEST for n in numbers)
    return _score_code(program, tuple(map(described, inputs)), wide)


@functools.cache
def _score_code(text: str, inputs: tuple[Described, ...], wide: bool) -> ScoreCode:
    program, trees = ScoreProgram.loads(text), Trees()
    scored, scored_inside = program.score, inside(trees, program)
    sink, unit = program.sink, 1.0
    united, united_inside = (in_unit(trees, tree, LOG2E) for tree in (scored, scored_inside))
    if united is not None and united_inside is not None:
        scored, scored_inside, unit = united, united_inside, LOG2E
        sink = sink and trees.node("mul", sink, trees.node("const", LOG2E))
    write = functools.partial(_function, inputs=inputs, wide=wide)
    sources: dict[str, str | None] = {
        "score": write("score", f"raw, {_PLACE}", scored, "raw", _TILE),
        "factor": None if program.factor is None else write("factor", f"raw, {_PLACE}", program.factor, "raw", _TILE),
        "visible": _visible(program, trees, inputs, wide),
        "sink": None if sink is None else write("sink", "b, h, i, q_len, kv_len, reads", sink, "i", frozenset("i")),
    }
    if scored_inside is not scored:
        sources["score_inside"] = write("score_inside", f"raw, {_PLACE}", scored_inside, "raw", _TILE)
    found = _gradients(program, trees, inputs)
    nought = trees.node("const", 0.0)
    reads_score = [node for node in nodes(program.score) if node[0] == "score"]
    back = found[id(reads_score[0])][1] if reads_score and id(reads_score[0]) in found else nought
    backward_factor, back = taken_out(trees, back)
    if back is not trees.node("given", 0):
        sources["score_backward"] = write("score_backward", f"given0, raw, {_PLACE}", back, "raw", _TILE)
    wanted = [(node, tree) for node, tree in found.values() if node[0] != "score"]
    for n, (_, tree) in enumerate(wanted):
        sources[f"gradient{n}"] = write(f"gradient{n}", f"given0, given1, raw, {_PLACE}", tree, "raw", _TILE)
    path, module = _loaded(_HEADER + "\n\n\n".join(filter(None, sources.values())))
    return ScoreCode(
        program=program,
        path=path,
        unit=unit,
        score=module.score,
        score_inside=getattr(module, "score_inside", module.score),
        slope=_slope(scored_inside),
        factor=getattr(module, "factor", None),
        sink=getattr(module, "sink", None),
        visible=getattr(module, "visible", None),
        score_backward=getattr(module, "score_backward", None),
        backward_factor=backward_factor,
        gradients=tuple(
            Gradient(node, _along(node, inputs), getattr(module, f"gradient{n}")) for n, (node, _) in enumerate(wanted)
        ),
    )


def _slope(tree: Tree) -> float | None:
    match tree:
        case ("mul", ("score",), ("const", float() as value)) | ("mul", ("const", float() as value), ("score",)):
            return value if value > 0 else None
    return None


def _gradients(program: ScoreProgram, trees: Trees, inputs: Sequence[Described]) -> dict[int, tuple[Tree, Tree]]:
    """By the identity of a node, itself and its gradient: of the raw score and of what reads a floating input."""
    given = [(program.score, trees.node("given", 0))]
    if program.factor is not None:
        given.append((program.factor, trees.node("given", 1)))
    distinct = {id(node): node for tree, _ in given for node in nodes(tree)}
    sources = [
        node
        for node in distinct.values()
        if node[0] == "score" or (node[0] in ("input", "gather") and inputs[node[1]].dtype.is_floating_point)
    ]
    return {which: (distinct[which], tree) for which, tree in gradient_trees(trees, given, sources).items()}


def _along(node: Tree, inputs: Sequence[Described]) -> frozenset[str]:
    """The positions along which `evaluate` gives more than one element."""
    if node[0] == "input":
        return frozenset(name for name, single in zip("bhij", inputs[node[1]].single, strict=True) if not single)
    if node[0] == "gather" and not inputs[node[1]].dims:
        return frozenset()
    children = (_along(part, inputs) for part in node[1:] if isinstance(part, tuple))
    return frozenset({node[0]} & set("bhij")).union(*children)


_HEADER = """\
import triton
import triton.language as tl

from attn_fuse.kernels.triton import functions as fn


"""


def _function(
    name: str, arguments: str, tree: Tree, like: str, whole: frozenset[str], inputs: Sequence[Described], wide: bool
) -> str:
    emitter = Emitter(inputs, wide)
    result = emitter.float32(tree, like, whole)
    lines = [*emitter.lines, f"return {result}"]
    return f"@triton.jit\ndef {name}({arguments}):\n" + "\n".join(f"    {line}" for line in lines) + "\n"


def _visible(program: ScoreProgram, trees: Trees, inputs: Sequence[Described], wide: bool) -> str | None:
    tree = program.visible and inside(trees, dataclasses.replace(program, score=program.visible))
    if tree is None or (tree[0] == "const" and tree[1]):
        return None
    emitter = Emitter(inputs, wide)
    result = emitter.boolean(tree)
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
    """$ATTN_FUSE_CACHE_DIR, or attn_fuse in $XDG_CACHE_HOME or ~/.cache; where none can be written, one of our own."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("ATTN_FUSE_CACHE_DIR") or Path(home, "attn_fuse")) / "scores"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="attn_fuse_"))
