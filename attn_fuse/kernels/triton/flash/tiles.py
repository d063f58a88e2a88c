"""Tiles: loading and storing rows, the blocks to visit, and dropout, for all flash kernels.

A tensor [batch, heads, length, width] is passed as (pointer, strides).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_fuse.kernels.triton.functions import IN_PTX

# Queries or keys in one entry of a table of spans.
SPAN = tl.constexpr(64)
# The golden ratio's fraction in 32 bits, and the multipliers of lowbias32 (Wellons, 2018).
_GOLDEN = tl.constexpr(0x9E3779B1)
_FIRST = tl.constexpr(0x7FEB352D)
_SECOND = tl.constexpr(0x846CA68B)
# The number of neighbouring positions whose random numbers share a factor.
_GROUP = tl.constexpr(32)
# From the same computation in Triton's language, LLVM makes vectors of bits that it packs into words and unpacks again.
_DROPPED = tl.constexpr("""
    { .reg .pred kept; .reg .u32 drawn;
      mul.lo.u32 drawn, $2, $3; setp.hs.u32 kept, drawn, $4; selp.f32 $0, $1, 0f00000000, kept; }
""")


@triton.jit
def head_base(tensor, b, h):
    """The pointer to the matrix of batch entry `b` and head `h`."""
    return tensor[0] + tl.cast(b, tl.int64) * tensor[1][0] + tl.cast(h, tl.int64) * tensor[1][1]


@triton.jit
def place(blocks, heads, SHARED: tl.constexpr):
    """The block, head and batch entry of this program.

    SHARED: whether batch entries read the same tensor for each element of the scores. They then run one after another,
    and all but the first find the tensor in the cache.
    """
    number = tl.program_id(0)
    if SHARED:
        batch = tl.num_programs(0) // (blocks * heads)
        b, block, h = number % batch, number // batch % blocks, number // batch // blocks
    else:
        block, h, b = number % blocks, number // blocks % heads, number // blocks // heads
    return block, h, b


@triton.jit
def rounded(length, EVEN: tl.constexpr):
    """`length`; if EVEN, in a form from which Triton sees that it is a multiple of 16."""
    return length // 16 * 16 if EVEN else length


@triton.jit
def in_blocks(first, inner_first, inner_last, last, BLOCK: tl.constexpr):
    """The four ends of a loop's stretches, from positions to numbers of blocks. The middle stretch has whole blocks."""
    begin = first // BLOCK
    last = tl.maximum(begin * BLOCK, last)
    end = tl.cdiv(last, BLOCK)
    whole = tl.minimum(tl.maximum(begin, tl.cdiv(tl.maximum(inner_first, 0), BLOCK)), end)
    return begin, whole, tl.maximum(whole, tl.maximum(tl.minimum(inner_last, last), 0) // BLOCK), end


@triton.jit
def load_rows(
    tensor, start, first, length, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr
):
    """ROWS rows of a matrix from row `first` on, [ROWS, BLOCK]; 0 beyond WIDTH and, if CHECKED, beyond `length`."""
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
def span(spans, b, h, start, length, BLOCK: tl.constexpr, other, INNER: tl.constexpr):
    """The first position that any of [start, start + BLOCK) may see and one past the last, then the same for a run of
    positions that all of them see.

    spans: (int32 [batch, heads, entries, 4 if INNER else 2], strides of the first two dimensions). With None, both
    runs are [0, other).
    """
    first, last, inner_first, inner_last = 0, other, 0, other
    if spans is not None:
        first, last = other, 0
        entries = spans[0] + tl.cast(b, tl.int64) * spans[1][0] + tl.cast(h, tl.int64) * spans[1][1]
        for k in tl.static_range((BLOCK + SPAN - 1) // SPAN):
            # The block may reach beyond the end.
            n = tl.minimum(start // SPAN + k, tl.cdiv(length, SPAN) - 1)
            entry = entries + n * (4 if INNER else 2)
            first, last = tl.minimum(first, tl.load(entry)), tl.maximum(last, tl.load(entry + 1))
            if INNER:
                inner_first = tl.maximum(inner_first, tl.load(entry + 2))
                inner_last = tl.minimum(inner_last, tl.load(entry + 3))
    return first, last, inner_first, inner_last


@triton.jit
def mixed(x, word):
    """lowbias32 of `x`, uint32, with `word` added half-way through."""
    x = (x ^ (x >> 16)) * _FIRST + word
    x = (x ^ (x >> 15)) * _SECOND
    return x ^ (x >> 16)


@triton.jit
def draws(seed, b, h, heads):
    """The 32-bit words from which the random numbers of a head's queries and of its keys are made."""
    drawn = tl.load(seed)
    head = (b * heads + h).to(tl.uint32)
    for_queries = mixed(drawn.to(tl.uint32) + head * _GOLDEN, head)
    return for_queries, mixed((drawn >> 32).to(tl.uint32) ^ for_queries, head)


@triton.jit
def odd_numbers(start, positions):
    """A random odd number for each of `positions`, uint32: a number of its group times one of its place in the group.

    start: a word from `draws`.
    """
    return _of_groups(start, positions // _GROUP) * _of_places(start, positions % _GROUP)


@triton.jit
def dropped(x, of_rows, start, first, threshold):
    """`x`, float32 [ROWS, COLUMNS], with 0 where dropout drops. Tile sizes do not change which elements are dropped.

    of_rows: `odd_numbers` of the rows. start: the word from `draws` for the columns, which begin at `first`, a multiple
        of COLUMNS. threshold: elements with a smaller 32-bit random number are dropped; passed as int32.

    The number of an element is that of its row times that of its column, modulo 2^32. Odd numbers are a group under
    this product, so products of random odd numbers are uniform, and any three are independent. In a rectangle of two
    rows and two columns, the fourth number follows from the other three, but whether it is dropped hardly does. The
    covariance of the four is at most the largest square of a character's mean over the numbers below the threshold,
    less than 1e-6 (Polya and Vinogradov, 1918). In one or two of a hundred million pairs of rows, the ratio of the
    numbers is so small that the rows are dropped alike.
    """
    COLUMNS: tl.constexpr = x.shape[1]
    # In a loop over columns, only the numbers of the groups change.
    if COLUMNS < _GROUP:
        # In Triton's interpreter a loop may count in Python's integers.
        at = tl.cast(first, tl.int32)
        places = at % _GROUP + tl.arange(0, COLUMNS)
        of_columns = _of_groups(start, at // _GROUP) * _of_places(start, places)
    else:
        groups = first // _GROUP + tl.arange(0, COLUMNS // _GROUP)
        places = tl.arange(0, _GROUP)
        of_columns = (_of_groups(start, groups)[:, None] * _of_places(start, places)[None, :]).reshape(COLUMNS)
    rows, columns, least = of_rows[:, None], of_columns[None, :], threshold.to(tl.uint32, bitcast=True)
    if IN_PTX:
        x = tl.inline_asm_elementwise(
            _DROPPED, "=f,f,r,r,r", [x, rows, columns, least], tl.float32, is_pure=True, pack=1
        )
    else:
        x = tl.where(rows * columns >= least, x, 0.0)
    return x


@triton.jit
def _of_groups(start, groups):
    return mixed(groups.to(tl.uint32) + start, _GOLDEN) | 1


@triton.jit
def _of_places(start, places):
    return mixed(places.to(tl.uint32) + start, 0) | 1
