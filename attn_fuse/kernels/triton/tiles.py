"""What the flash kernels are made of: rows of a matrix, the keys a block of queries may see, and dropout.

A tensor that is only read is given as (its start, its strides), or as a descriptor [batch, heads, length, width] from
which Hopper's copy engine reads blocks of [1, 1, ROWS, BLOCK], with 0 for what is beyond its end.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Queries, or keys, of one entry in a table of spans.
SPAN = tl.constexpr(64)
# The golden ratio's fraction in 32 bits, and the multipliers of lowbias32 (Wellons, 2018).
_GOLDEN = tl.constexpr(0x9E3779B1)
_FIRST = tl.constexpr(0x7FEB352D)
_SECOND = tl.constexpr(0x846CA68B)
# Weights that share a word of random bits: those of two keys so far apart lie in one thread, whichever way a tile lies.
_APART = tl.constexpr(8)


@triton.jit
def plane(tensor, b, h):
    """Where the matrix of batch entry `b` and head `h` begins: a pointer, or for a descriptor its first indices."""
    if isinstance(tensor, tl.core.tensor_descriptor_base):
        start = (b, h)
    else:
        start = tensor[0] + tl.cast(b, tl.int64) * tensor[1][0] + tl.cast(h, tl.int64) * tensor[1][1]
    return start


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
def load_rows(
    tensor, start, first, length, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr
):
    """ROWS rows from `first` on of a matrix at `start`, [ROWS, BLOCK]: 0 beyond WIDTH and, where CHECKED, `length`."""
    if isinstance(tensor, tl.core.tensor_descriptor_base):
        found = tensor.load([start[0], start[1], first, 0]).reshape([ROWS, BLOCK])
    else:
        r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK)
        pointers = (
            start + tl.cast(first + r, tl.int64)[:, None] * tensor[1][2] + tl.cast(d, tl.int64)[None, :] * tensor[1][3]
        )
        if CHECKED and WIDTH != BLOCK:
            found = tl.load(pointers, mask=(first + r < length)[:, None] & (d < WIDTH)[None, :], other=0.0)
        elif CHECKED:
            found = tl.load(pointers, mask=(first + r < length)[:, None], other=0.0)
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
def mixed(x, word):
    """lowbias32 of `x`, uint32, with `word` added half-way."""
    x = (x ^ (x >> 16)) * _FIRST + word
    x = (x ^ (x >> 15)) * _SECOND
    return x ^ (x >> 16)


@triton.jit
def kept(
    seed, threshold, b, h, heads, first_i, first_j, QUERIES: tl.constexpr, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr
):
    """Which weights of a tile dropout keeps, the same whatever the tile: [QUERIES, KEYS], or the other way round.

    Each weight has 16 bits of a word that counts with its position, and is dropped where they are below `threshold`.
    Head and seed give the words two numbers, so that no two heads draw the same, not even apart. first_j: a multiple
    of 16.
    """
    drawn = tl.load(seed)
    head = (b * heads + h).to(tl.uint32)
    start = mixed(drawn.to(tl.uint32) + head * _GOLDEN, head)
    word = mixed((drawn >> 32).to(tl.uint32) ^ start, head)
    i = (first_i + tl.arange(0, QUERIES)).to(tl.uint32) * _GOLDEN + start
    pairs = tl.arange(0, KEYS // (2 * _APART)) * _APART + first_j // 2
    if KEYS_FIRST:
        x = pairs[:, None, None] + tl.arange(0, _APART)[None, :, None] + i[None, None, :]
        x = mixed(x.to(tl.uint32), word)
        x = tl.join(x, x << 16).permute(0, 3, 1, 2).reshape(KEYS, QUERIES)
    else:
        x = pairs[None, :, None] + tl.arange(0, _APART)[None, None, :] + i[:, None, None]
        x = mixed(x.to(tl.uint32), word)
        x = tl.join(x, x << 16).permute(0, 1, 3, 2).reshape(QUERIES, KEYS)
    return x >= (threshold << 16).to(tl.uint32)
