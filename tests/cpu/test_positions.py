"""Masks by positions, and slices at their ends: numbers that wrap, round or are cut where torch does it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness import assert_fused, assert_right, check, every_day, tensors

INF, N = float("inf"), 13
PICKS = ("fused", "fastest")
NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)


def attention(query: Tensor, key: Tensor, value: Tensor, hide: Tensor | None = None, fill: float = -INF) -> Tensor:
    scores = query @ key.mT * 0.3
    return (scores if hide is None else scores.masked_fill(hide, fill)).softmax(-1) @ value


# ---- slices beyond an end


@pytest.mark.parametrize("window", every_day([5, N, N + 1, 64], 64))
@pytest.mark.parametrize("where", ["cache", "mask", "front"])
def test_a_slice_beyond_the_front(window: int, where: str) -> None:
    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if where == "cache":
            key, value = key[:, :, -window:], value[:, :, -window:]
            return attention(query, key, value)
        keep = torch.ones(N, 70).tril().bool()[:, -64 - N : N] if where == "front" else torch.ones(N, N).tril().bool()
        keep = keep[-window:, -window:]
        return attention(query[:, :, -window:], key[:, :, -window:], value[:, :, -window:], ~keep)

    assert_fused(program, *tensors(2, 3, N, 8))


@pytest.mark.parametrize("window", [5, 64])
def test_a_mask_cut_beyond_its_end(window) -> None:
    def program(q, k, v):
        keep = torch.ones(13, 13).tril().bool()[:, -window:]
        keep = F.pad(keep, (13 - keep.shape[1], 0))
        return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v

    assert_right(program, *tensors(2, 3, 13, 8))


@pytest.mark.thorough
def test_a_window_longer_than_any_call() -> None:
    def program(q, k, v):
        return attention(q, k[:, :, -9:], v[:, :, -9:])

    assert_right(program, *tensors(2, 3, 5, 8), more=[tensors(2, 3, 7, 8), tensors(2, 3, 13, 8)], dynamic=True)


# ---- positions


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "blocks by a floor": lambda p: apart(torch.floor(p / 41)),
    "blocks by whole numbers": lambda p: apart(p // 41),
    "blocks by a cast": lambda p: apart((p / 41).long()),
    "thirds": lambda p: apart((p / 3) % 1),
    "sevenths": lambda p: torch.frac(p / 7)[:, None] < torch.frac(p / 7),
    "tenths": lambda p: (p * 0.1)[:, None] < (p * 0.1).round(),
    "double": lambda p: (p.double() / 41 * 41).long()[:, None] < p,
    "half": lambda p: (p.half() * 0.1)[:, None] < (p * 0.1),
    "bfloat16 positions": lambda p: p.bfloat16()[:, None] < p.bfloat16(),
    "bytes": lambda p: p.to(torch.uint8)[:, None] - p.to(torch.uint8) >= 100,
    "a byte of a triangle": lambda p: (torch.ones(N, N, dtype=torch.int64).tril() * 256).to(torch.uint8) != 0,
    "far out": lambda p: (p.int() * 2**27)[:, None] < p.int() * 2**20,
    "beyond 2**24": lambda p: (p * 2**20 + 1).float()[:, None] < (p * 2**20).float(),
}


def apart(p: Tensor) -> Tensor:
    return p[:, None] != p


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in MASKS),
        *(
            pytest.param(name, torch.float64, marks=pytest.mark.thorough)
            for name in ("blocks by a floor", "sevenths", "tenths", "half")
        ),
    ],
    ids=str,
)
def test_masks_of_positions(name: str, dtype: torch.dtype) -> None:
    length = N if "triangle" in name else 120

    def program(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, MASKS[name](torch.arange(length)), -1e9)

    assert_fused(program, *tensors(1, 2, length, 8, dtype=dtype))


SEEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "blocks": lambda i, j: (i // 2) == (j // 2),
    "blocks and before": lambda i, j: (i // 2) >= (j // 2),
    "neighbours": lambda i, j: (i - j).abs() < 2,
    "stripes": lambda i, j: (i % 2) == (j % 2),
    "first keys": lambda i, j: j < 2,
    "products": lambda i, j: (i * j) % 3 != 1,
    "one key further": lambda i, j: j <= i + 1,
}


@pytest.mark.parametrize("first", [3, *(pytest.param(n, marks=pytest.mark.thorough) for n in (4, 5))])
@pytest.mark.parametrize("name", every_day(SEEN, "blocks and before"))
def test_a_mask_by_position_of_any_length(name: str, first: int) -> None:
    """What holds for the lengths of the first call, or the least there are, need not hold for others."""

    def program(q, k, v):
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        return attention(q, k, v, ~SEEN[name](i, j))

    more = [tensors(1, 2, size, 4) for size in (first + 2, 9)]
    assert_right(program, *tensors(1, 2, first, 4), dynamic=True, backward=False, more=more)


@pytest.mark.thorough
@pytest.mark.parametrize("picks", PICKS)
@pytest.mark.parametrize("size", [255, 256, 300])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_an_identity_in_the_mask(size, dtype, picks) -> None:
    def program(q, k, v, keep):
        s = (q @ k.mT * 0.3).masked_fill(torch.eye(size, dtype=dtype).bool(), torch.finfo(q.dtype).min)
        return s.masked_fill(~(keep | torch.eye(size, dtype=torch.bool)), -INF).softmax(-1) @ v

    assert_right(program, *tensors(1, 2, size, 8), torch.rand(size, size) > 0.5, backward=False, picks=(picks,))


@pytest.mark.thorough
@pytest.mark.parametrize("kernels", [["cpu_flash"], ["chunked"]], ids=lambda names: names[0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["range", "cast", "difference"])
def test_positions_that_a_narrow_dtype_rounds(form: str, dtype: torch.dtype, kernels) -> None:
    def program(q, k, v):
        i = torch.arange(600) * 9
        if form == "range":
            i = torch.arange(600, dtype=dtype)
        if form == "cast":
            i = i.to(dtype)
        apart = i[:, None] - i
        return attention(q, k, v, apart.to(dtype) < -4 if form == "difference" else i[:, None] < i)

    check(program, *tensors(1, 1, 600, 8), kernels=kernels, backward=False)


# ---- whole numbers

# Of the numbers `x` of keys, and those of queries `a` and of keys `b` against each other.
HIDE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "equal to -1": lambda x, a, b: x == -1,
    "equal to 255": lambda x, a, b: x == 255,
    "negative": lambda x, a, b: -x > 5,
    "a product": lambda x, a, b: x * 100 > 50,
    "differences": lambda x, a, b: (a - b).abs() > 1,
    "sums": lambda x, a, b: a + b <= 0,
    "a remainder": lambda x, a, b: x % 3 == 1,
    "a floor": lambda x, a, b: x // -3 > -2,
    "a floor and back": lambda x, a, b: x // 3 * 3 != x,
    "quotients": lambda x, a, b: x / 3 * 3 != x,
    "powers": lambda x, a, b: x**2 > 100,
    "products": lambda x, a, b: a * b > 0,
    "shifted bits": lambda x, a, b: (x << 3) > 3,
    "exclusive bits": lambda x, a, b: (x ^ -1) > 5,
    "magnitudes": lambda x, a, b: x.abs() < 0,
    "a sum beyond": lambda x, a, b: x + 200 > 100,
    "inverted": lambda x, a, b: ~x > 7,
    "differences as floats": lambda x, a, b: (a - b).float() > 0.5,
}


@pytest.mark.parametrize("kernels", [None, pytest.param(["chunked"], marks=pytest.mark.thorough)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.uint8, *(pytest.param(d, marks=pytest.mark.thorough) for d in (*NARROW[1:], torch.int64))], ids=str
)
@pytest.mark.parametrize(
    "name",
    every_day(HIDE, "negative", "differences", "a floor"),
)
def test_stored_whole_numbers_wrap_around(name: str, dtype: torch.dtype, kernels: list[str] | None) -> None:
    def program(query: Tensor, key: Tensor, value: Tensor, stored: Tensor) -> Tensor:
        x = stored[:, None, None]
        return attention(query, key, value, HIDE[name](x, x.mT, x), -1e9)

    info = torch.iinfo(dtype)
    stored = torch.randint(max(info.min, -(2**62)), min(info.max, 2**62), (2, 40)).to(dtype)
    stored[0, :3] = torch.tensor([info.max, info.min, 1])
    check(program, *tensors(2, 3, 40, 8), stored, backward=kernels is None, kernels=kernels)


def test_whole_numbers_that_wrap_around_as_they_grow() -> None:
    def program(q, k, v):
        p = torch.arange(300, dtype=torch.int32) * 2**27
        return attention(q, k, v, p[:, None] < p, -1e9)

    assert_right(program, *tensors(1, 2, 300, 8), backward=False)
