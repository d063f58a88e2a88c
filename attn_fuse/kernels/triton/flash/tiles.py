"""Parts of the flash kernels: rows of a matrix, the keys that a block of queries may see, and dropout.

A tensor [batch, heads, length, width] is given as (pointer, strides).
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
# Neighbouring positions whose random numbers have a factor in common.
_GROUP = tl.constexpr(32)
# For the same in Triton's language LLVM makes vectors of bits, which it packs into words and unpacks again.
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
    """The block, head and batch entry that this program is for.

    SHARED: whether batch entries share what is read for each element. They then follow each other, and all but the
    first find it in the cache.
    """
    number = tl.program_id(0)
    if SHARED:
        batch = tl.num_programs(0) // (blocks * heads)
        b, block, h = number % batch, number // batch % blocks, number // batch // blocks
    else:
        block, h, b = number % blocks, number // blocks % heads, number // blocks // heads
    return block, h, b


@triton.jit
def stretch(phase: tl.constexpr, first, inner_first, inner_last, last):
    """The first block of one of the three phases of a loop, and one past its last."""
    if phase == 0:
        begin, end = first, inner_first
    elif phase == 1:
        begin, end = inner_first, inner_last
    else:
        begin, end = inner_last, last
    return begin, end


@triton.jit
def rounded(length, EVEN: tl.constexpr):
    """`length`, which is a multiple of 16 where EVEN says so: Triton sees that from the product alone."""
    return length // 16 * 16 if EVEN else length


@triton.jit
def in_blocks(first, inner_first, inner_last, last, BLOCK: tl.constexpr):
    """The four positions that cut a loop, as numbers of blocks: those in the middle are whole, the others may be cut
    by the end of the sequence."""
    begin = first // BLOCK
    last = tl.maximum(begin * BLOCK, last)
    end = tl.cdiv(last, BLOCK)
    whole = tl.minimum(tl.maximum(begin, tl.cdiv(tl.maximum(inner_first, 0), BLOCK)), end)
    return begin, whole, tl.maximum(whole, tl.maximum(tl.minimum(inner_last, last), 0) // BLOCK), end


@triton.jit
def load_rows(
    tensor, start, first, length, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr
):
    """ROWS rows from `first` on of a matrix at `start`, [ROWS, BLOCK]: 0 beyond WIDTH and, where CHECKED, `length`."""
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
    """The first of what positions [start, start + BLOCK) may see, and one past the last; then the same of a run that
    all of them see, as far as the spans know.

    spans: None, or (int32 [batch, heads, entries, 4 if INNER else 2], strides of its first two dimensions). Without,
    all is [0, other).
    """
    first, last, inner_first, inner_last = 0, other, 0, other
    if spans is not None:
        first, last = other, 0
        entries = spans[0] + tl.cast(b, tl.int64) * spans[1][0] + tl.cast(h, tl.int64) * spans[1][1]
        for k in tl.static_range((BLOCK + SPAN - 1) // SPAN):
            # The last position may be past the end.
            n = tl.minimum(start // SPAN + k, tl.cdiv(length, SPAN) - 1)
            entry = entries + n * (4 if INNER else 2)
            first, last = tl.minimum(first, tl.load(entry)), tl.maximum(last, tl.load(entry + 1))
            if INNER:
                inner_first = tl.maximum(inner_first, tl.load(entry + 2))
                inner_last = tl.minimum(inner_last, tl.load(entry + 3))
    return first, last, inner_first, inner_last


@triton.jit
def mixed(x, word):
    """lowbias32 of `x`, uint32, with `word` added half-way."""
    x = (x ^ (x >> 16)) * _FIRST + word
    x = (x ^ (x >> 15)) * _SECOND
    return x ^ (x >> 16)


@triton.jit
def draws(seed, b, h, heads):
    """What the random numbers of a head's queries start from, and those of its keys: a word of 32 bits each."""
    drawn = tl.load(seed)
    head = (b * heads + h).to(tl.uint32)
    for_queries = mixed(drawn.to(tl.uint32) + head * _GOLDEN, head)
    return for_queries, mixed((drawn >> 32).to(tl.uint32) ^ for_queries, head)


@triton.jit
def odd_numbers(start, positions):
    """A random odd number for each of `positions`, uint32: the product of one of its group and one of its place there.

    start: of `draws`.
    """
    return _of_groups(start, positions // _GROUP) * _of_places(start, positions % _GROUP)


@triton.jit
def dropped(x, of_rows, start, first, threshold):
    """`x`, float32 [ROWS, COLUMNS], with 0 where dropout drops: the same elements, whatever the tile.

    of_rows: `odd_numbers` of the rows. start: that of the columns, which begin at `first`, a multiple of COLUMNS.
    threshold: as int32 the 32-bit number below which an element's is dropped.

    An element's number is its row's times its column's, modulo 2^32, under which odd numbers are a group: the products
    of random ones are uniform, and any three are independent. Where two rows meet two columns the fourth follows from
    the others, but whether it is dropped hardly does: the covariance of the four is at most the largest square of a
    character's mean over the numbers below the threshold, less than 1e-6 (Polya and Vinogradov, 1918). Of a hundred
    million pairs of rows one or two have numbers of so small a ratio that they are dropped alike.
    """
    COLUMNS: tl.constexpr = x.shape[1]
    # A loop over columns leaves the places as they are, and draws for the groups only.
    if COLUMNS < _GROUP:
        # Where Triton interprets, a loop may count in Python's numbers.
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
