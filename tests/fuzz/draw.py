"""Programs drawn at random: sizes that collide, most choices plain, a third of the programs mutated.

Hypothesis draws the entropy of a program, and the choices follow from it. It would otherwise prefer programs whose
choices are all alike, of which most are the same.
"""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import strategies as st

from tests.fuzz import description as d
from tests.fuzz import numbers
from tests.fuzz.description import Biased, Layer, Masked, Modified, Program, Sizes

# They end in an operand or a result being overwritten for good, which autograd does not always allow.
OVERWRITES = frozenset(
    "key_after value_after query_base weights_scaled weights_after argument_meanwhile product_out query_out "
    "argument_operator scores_out weights_operator cache_given".split()
)


def drawn(entropy: int) -> Program:
    r = random.Random(entropy)
    one, mostly = r.choice, _Mostly(r)
    program = Program(
        sizes=_sizes(r),
        seed=r.randrange(2**16),
        dtype=one(["float32"] * 8 + ["float64", "bfloat16", "bfloat16", "float16"]),
        dynamic=one([False] * 5 + [True]),
        backward=one([False, True]),
        layout=mostly(d.LAYOUTS, 0.2),
        touched=(mostly(d.TOUCHES), mostly(d.TOUCHES), mostly(d.TOUCHES)),
        key_groups=one(d.GROUPS),
        value_groups=one(d.GROUPS),
        rank=mostly(d.RANKS, 0.5),
        viewed=one([False, True]),
        transposed=one([False] * 5 + [True]),
        product=one(d.PRODUCTS),
        letters=(r.randrange(24), r.randrange(24)),
        scale=one(d.SCALES),
        layers=tuple(_layer(r, mostly) for _ in range(r.randrange(4))),
        softmax=mostly(d.SOFTMAXES, 0.4),
        weights=tuple(one(d.WEIGHTS) for _ in range(one([0, 0, 0, 1, 2]))),
        value_product=one([x for x in d.PRODUCTS if x != "summed" or r.random() < 0.2]),
        output=mostly(d.OUTPUTS),
        outside=mostly(d.OUTSIDE, 0.85),
        edit=mostly(d.EDITS, 0.65),
        detached=mostly(d.DETACHED, 0.85),
        call=mostly(d.CALLS, 0.8),
        mutation=one(d.MUTATIONS) if r.random() < 1 / 3 else None,
    )
    if program.dynamic and r.random() < 0.7:
        program = numbers.moved(program, r)
    return fitting(program)


def drawn_with_numbers(entropy: int) -> Program:
    """A program with dynamic sizes, nothing mutated, and masks that whole numbers move; otherwise rather plain."""
    r = random.Random(entropy)
    program, plain = drawn(entropy), Program()
    names = (
        "layout",
        "rank",
        "viewed",
        "product",
        "scale",
        "softmax",
        "weights",
        "outside",
        "edit",
        "detached",
        "call",
    )
    kept = {name: getattr(program, name) if r.random() < 0.15 else getattr(plain, name) for name in names}
    layers = tuple(x for x in program.layers if r.random() < 0.3)
    return fitting(numbers.moved(replace(program, **kept, layers=layers, mutation=None), r))


PROGRAMS = st.integers(0, 2**64 - 1).map(drawn)


class _Mostly:
    """One of `words`, the first one in more than the given share of draws."""

    def __init__(self, r: random.Random) -> None:
        self._random = r

    def __call__(self, words: tuple[str, ...], plain: float = 0.5) -> str:
        return words[0] if self._random.random() < plain else self._random.choice(words)


def _sizes(r: random.Random) -> Sizes:
    if r.random() < 0.35:  # everything is the same
        n = r.choice([2, 3, 4, 4])
        return Sizes(r.choice([1, 2, n]), n, 1, n, n, n, n)
    head_dim = r.choice([2, 3, 4, 4, 8, 5])
    return Sizes(
        batch=r.choice([1, 2, 2, 3, 4]),
        kv_heads=r.choice([1, 2, 3, 4]),
        groups=r.choice([1, 1, 1, 2, 3]),
        q_len=r.choice([1, 2, 3, 4, 4, 4, 5, 7, 8]),
        kv_len=r.choice([1, 2, 2, 3, 3, 4, 4, 4, 4, 5, 5, 7, 7, 8, 8]),
        head_dim=head_dim,
        value_dim=r.choice([head_dim, head_dim, 3, 1]),
    )


def _layer(r: random.Random, mostly: _Mostly) -> Layer:
    match r.choice(["mask", "mask", "bias", "function"]):
        case "mask":
            return Masked(
                kind=mostly(d.MASKS, 0.3),
                form=r.choice(d.TRIANGLES),
                offset=mostly(d.OFFSETS),
                applied=r.choice(d.APPLIED),
                fill=r.choice(["-inf", "-inf", "-1e9", "lowest", *d.FILLS]),
                reach=r.randrange(1, 5),
                reversed=r.random() < 0.12,
            )
        case "bias":
            over = r.choice(["ij", "hij", "bhij", "bj", "h", "j", "i", "bij", "hj", "", "bi"])
            return Biased(r.choice(d.BIASES), over, subtracted=r.random() < 0.3, first=r.random() < 0.3)
    return Modified(r.choice(d.MODS))


def fitting(p: Program) -> Program:
    """`p` with what cannot go together put right."""
    s = p.sizes
    if p.layout in d.ONE_TENSOR:
        s = replace(s, groups=1, kv_len=s.q_len, value_dim=s.head_dim)
    if p.layout in ("key_is_value", "two_bshd"):
        s = replace(s, value_dim=s.head_dim)
    if p.layout == "rotated":
        s = replace(s, head_dim=4)
    p = replace(p, sizes=s)
    if s.value_dim == 1:  # one number normalised is its sign, whose gradient is mere rounding
        p = replace(p, touched=(*p.touched[:2], "none" if p.touched[2] == "normalised" else p.touched[2]))
    if p.mutation is not None:  # one thing at a time
        p = replace(p, transposed=False, rank="four", viewed=False, call="once", dynamic=False)
    if p.call == "vmapped" and (p.cut != "none" or any(map(_is_moved, p.layers))):
        p = replace(p, call="once")  # numbers are not stacked
    if not p.dynamic:
        p = replace(p, cut="none", layers=tuple(x for x in p.layers if not _is_moved(x)))
    if p.rank == "four":
        p = replace(p, viewed=False)
    if p.rank == "rows_folded":
        p = replace(p, viewed=True, transposed=False)
    if p.transposed and p.softmax in ("sink", "constant_sink"):
        p = replace(p, softmax="method")
    if p.dtype == "float64" and p.softmax in ("float", "float_argument"):
        p = replace(p, softmax="method")  # narrower than what it is compared with
    if p.softmax == "late":
        p = replace(p, weights=())
    if p.edit in OVERWRITES:
        p = replace(p, backward=False)
    if p.softmax == "logsumexp":
        # Of scores that are all the same finite fill, log(kv_len) is rounded away: what is written is no softmax.
        p = replace(p, layers=tuple(replace(x, fill="-inf") if isinstance(x, Masked) else x for x in p.layers))
    return p


def _is_moved(layer: Layer) -> bool:
    return isinstance(layer, Masked) and layer.kind in numbers.KEPT


def oddity(p: Program) -> str:
    """Why an attention may be left as written though nothing was mutated; "" where it should be fused."""
    in_place = [isinstance(x, Masked) and x.applied in ("in_place", "indexed") for x in p.layers]
    writes = p.edit != "none" or p.scale == "in_place" or any(in_place)
    if p.edit in OVERWRITES:
        return "an operand or a result is overwritten"
    if p.edit in ("diagonal_set", "column_alias", "scores_twice"):
        return "the scores are written through a view, or read before and after"
    if writes and (p.outside not in ("none", "operands") or p.edit == "scores_after"):
        return "scores written in place are also a result"
    if p.detached in ("no_grad", "scores", "weights"):
        return "detached between the products"
    if p.detached.startswith(("no_grad", "autocast")):
        return "another mode on the way"
    if p.sizes.kv_len == 1:
        return "a single key"
    if p.cut != "none" or any(map(_is_moved, p.layers)):
        return "whole numbers move it"
    if p.softmax == "exp2":
        return "a softmax to the base of 2"
    if p.value_product == "summed":
        return "the product with the value is written as a sum"
    if "renormalised" in p.weights:
        return "normalised once more"
    return ""
