"""What the flash kernels are made of: rows of a matrix, the keys a block of queries may see, and dropout."""

from __future__ import annotations

import triton
import triton.language as tl

# Queries, or keys, of one entry in a table of spans.
SPAN = tl.constexpr(64)
# Philox passes BigCrush from seven rounds on (Salmon et al., SC 2011).
_ROUNDS = tl.constexpr(7)


@triton.jit
def plane(tensor, b, h):
    """Where the matrix of batch entry `b` and head `h` begins. tensor: (its start, its four strides)."""
    return tensor[0] + tl.cast(b, tl.int64) * tensor[1][0] + tl.cast(h, tl.int64) * tensor[1][1]


@triton.jit
def place(blocks, heads):
    """The block, head and batch entry that this program is for."""
    number = tl.program_id(0)
    return number % blocks, number // blocks % heads, number // blocks // heads


@triton.jit
def stretch(phase: tl.constexpr, first, inner_first, inner_last, last):
    """Where one of the three phases of a loop begins, and one past where it ends."""
    if phase == 0:
        begin, end = first, inner_first
    elif phase == 1:
        begin, end = inner_first, inner_last
    else:
        begin, end = inner_last, last
    return begin, end


@triton.jit
def load_rows(tensor, start, at, length, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr):
    """Rows `at` of the matrix at `start`, [len(at), BLOCK]: 0 beyond WIDTH and, where CHECKED, beyond `length` rows."""
    d = tl.arange(0, BLOCK)
    pointers = start + tl.cast(at, tl.int64)[:, None] * tensor[1][2] + tl.cast(d, tl.int64)[None, :] * tensor[1][3]
    if CHECKED and WIDTH != BLOCK:
        found = tl.load(pointers, mask=(at < length)[:, None] & (d < WIDTH)[None, :], other=0.0)
    elif CHECKED:
        found = tl.load(pointers, mask=(at < length)[:, None], other=0.0)
    elif WIDTH != BLOCK:
        found = tl.load(pointers, mask=(d < WIDTH)[None, :], other=0.0)
    else:
        found = tl.load(pointers)
    return found


@triton.jit
def store_rows(tensor, start, at, length, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    pointers = start + tl.cast(at, tl.int64)[:, None] * tensor[1][2] + tl.cast(d, tl.int64)[None, :] * tensor[1][3]
    mask = (at < length)[:, None] & (d < WIDTH)[None, :]
    tl.store(pointers, x.to(tensor[0].dtype.element_ty), mask=mask)


@triton.jit
def span(spans, b, h, start, length, BLOCK: tl.constexpr, other):
    """The first of what positions [start, start + BLOCK) may see, and one past the last.

    spans: None, or (int32 [batch, heads, entries, 2], strides of its first two dimensions). Without, [0, other).
    """
    first, last = 0, other
    if spans is not None:
        # The last position may be past the end.
        n = start // SPAN + tl.arange(0, (BLOCK + SPAN - 1) // SPAN)
        entries = spans[0] + tl.cast(b, tl.int64) * spans[1][0] + tl.cast(h, tl.int64) * spans[1][1] + n * 2
        there = n < tl.cdiv(length, SPAN)
        first = tl.min(tl.load(entries, mask=there, other=other), 0)
        last = tl.max(tl.load(entries + 1, mask=there, other=0), 0)
    return first, last


@triton.jit
def kept(seed, p, b, h, heads, i, j):
    """Which weights dropout keeps, from a generator that counts with the position: the same in every kernel."""
    drawn, _, _, _ = tl.philox(tl.load(seed), j, i, b * heads + h, 0, _ROUNDS)
    return tl.random.uint_to_uniform_float(drawn) >= p
