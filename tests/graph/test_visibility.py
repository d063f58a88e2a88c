"""Which blocks of the scores a mask hides: exactly so for structured masks, and never a block that is seen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn_fuse.kernels.score.program import Block, ScoreProgram, evaluate
from attn_fuse.kernels.score.visibility import visibility

Q, K, B, H = ["i"], ["j"], ["b"], ["h"]
CPU = torch.device("cpu")
CAUSAL = ["le", K, ["add", Q, ["number", 0]]]
WINDOW = ["and", ["le", K, Q], ["gt", K, ["sub", Q, ["const", 9]]]]
PREFIX = ["or", ["le", K, Q], ["lt", K, ["gather", 0, B]]]
LENGTHS = ["lt", K, ["gather", 0, B]]
DOCUMENTS = ["eq", ["input", 0], ["input", 1]]


def sees(tree: list, inputs: list[Tensor], numbers: list[int], sizes: tuple[int, int, int, int]) -> Tensor:
    """The mask itself, [B, H, q_len, kv_len]."""
    batch, heads, q_len, kv_len = sizes
    block = Block(batch, heads, (0, q_len), (0, kv_len), CPU, torch.float32)
    program = ScoreProgram(["score"], visible=tree)
    assert program.visible is not None
    return evaluate(program.visible, None, inputs, numbers, block).bool().expand(sizes)


def blockwise(keep: Tensor, blocks: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Any and all of each block."""
    rows = [strip.split(blocks[1], 3) for strip in keep.split(blocks[0], 2)]
    some = [[part.any(3).any(2) for part in row] for row in rows]
    every = [[part.all(3).all(2) for part in row] for row in rows]
    return tuple(torch.stack([torch.stack(row, -1) for row in table], -2) for table in (some, every))  # type: ignore[return-value]


def sorted_documents(sizes: tuple[int, int, int, int]) -> list[Tensor]:
    numbers = torch.randint(0, 5, (sizes[0], sizes[3])).sort(-1).values
    return [numbers[:, None, : sizes[2], None], numbers[:, None, None, :]]


@pytest.mark.parametrize("blocks", [(8, 8), (16, 4), (64, 64)], ids=str)
@pytest.mark.parametrize(
    ("tree", "inputs", "numbers"),
    [
        (CAUSAL, lambda s: [], [0]),
        (CAUSAL, lambda s: [], [11]),
        (CAUSAL, lambda s: [], [-7]),
        (WINDOW, lambda s: [], []),
        (PREFIX, lambda s: [torch.randint(0, 20, (s[0],))], []),
        (LENGTHS, lambda s: [torch.randint(0, 50, (s[0],))], []),
        (["and", CAUSAL, LENGTHS], lambda s: [torch.randint(0, 50, (s[0],))], [3]),
        (DOCUMENTS, sorted_documents, []),
        (["input", 0], lambda s: [torch.rand(s[0], 1, *s[2:]) > 0.9], []),
        (["eq", ["floor_divide", Q, ["const", 8]], ["floor_divide", K, ["const", 8]]], lambda s: [], []),
    ],
    ids="causal ahead behind window prefix lengths both documents tensor chunks".split(),
)
def test_structured_masks_are_exact(tree, inputs, numbers, blocks) -> None:
    torch.manual_seed(0)
    sizes = (2, 3, 37, 45)
    given_inputs = inputs(sizes)
    some, every = blockwise(sees(tree, given_inputs, numbers, sizes), blocks)
    found = visibility(ScoreProgram(["score"], visible=tree), given_inputs, numbers, sizes, blocks, CPU)
    assert torch.equal(found.some.expand(some.shape), some)
    assert torch.equal(found.every.expand(every.shape), every)


def test_bounds_alone() -> None:
    program = ScoreProgram(["score"], upper=["number", 0], lower=["const", -9])
    found = visibility(program, [], [2], (1, 1, 40, 48), (8, 8), CPU)
    j, i = torch.arange(48), torch.arange(40)[:, None]
    some, every = blockwise(((j - i <= 2) & (j - i >= -9))[None, None], (8, 8))
    assert torch.equal(found.some, some) and torch.equal(found.every, every)


@pytest.mark.parametrize("sizes", [(1, 2, 0, 45), (1, 2, 37, 0), (0, 2, 37, 45)], ids=str)
def test_an_empty_dimension_has_no_blocks(sizes: tuple[int, int, int, int]) -> None:
    for tree in (CAUSAL, ["lt", ["gather", 0, ["add", Q, K]], ["const", 0.5]]):
        found = visibility(ScoreProgram(["score"], visible=tree), [torch.rand(99)], [0], sizes, (8, 8), CPU)
        assert found.some.shape[2:] == found.every.shape[2:] == ((sizes[2] + 7) // 8, (sizes[3] + 7) // 8)


def test_no_mask_shows_everything() -> None:
    found = visibility(ScoreProgram(["score"]), [], [], (2, 3, 40, 8), (16, 16), CPU)
    assert found.some.shape == (1, 1, 3, 1) and found.some.all() and found.every.all()


def test_nothing_to_see() -> None:
    for sizes in ((1, 1, 0, 8), (1, 1, 8, 0), (0, 1, 8, 8)):
        found = visibility(ScoreProgram(["score"], visible=LENGTHS), [torch.ones(sizes[0])], [], sizes, (4, 4), CPU)
        assert found.some.shape[2:] == (-(-sizes[2] // 4), -(-sizes[3] // 4))


@pytest.mark.parametrize("blocks", [(8, 16), (64, 64)], ids=str)
@pytest.mark.parametrize(
    ("tree", "inputs", "numbers", "found_out"),
    [
        (CAUSAL, lambda s: [], [0], True),
        (CAUSAL, lambda s: [], [-9], True),
        (["and", CAUSAL, LENGTHS], lambda s: [torch.tensor([0, 150])], [0], True),
        (["and", CAUSAL, ["ge", K, ["gather", 0, B]]], lambda s: [torch.tensor([0, 40])], [0], False),
        (["ge", K, ["gather", 0, B]], lambda s: [torch.tensor([s[3], 100])], [], True),
        (DOCUMENTS, lambda s: [torch.full((s[0], 1, s[2], 1), 7), sorted_documents(s)[1]], [], True),
        (["input", 0], lambda s: [torch.rand(s[0], 1, *s[2:]) > 0.99], [], False),
    ],
    ids="causal behind right-padding left-padding left-padding-alone another-document tensor".split(),
)
def test_where_a_query_may_see_no_key_all_of_them_count(tree, inputs, numbers, found_out, blocks) -> None:
    """found_out: whether it is known of each query that sees a key, and not only of most."""
    torch.manual_seed(0)
    sizes = (2, 1, 170, 180)
    given_inputs = inputs(sizes)
    keep = sees(tree, given_inputs, numbers, sizes)
    counts = keep | ~keep.any(-1, keepdim=True)
    some, _ = blockwise(counts, blocks)
    program = ScoreProgram(["score"], visible=tree, hides_only_if_others_seen=True)
    found = visibility(ScoreProgram.loads(program.dumps()), given_inputs, numbers, sizes, blocks, CPU).some
    assert found.expand(some.shape)[some].all()
    if found_out:
        # Of a block in which one query sees no key, all are computed.
        empty, _ = blockwise(~keep.any(-1, keepdim=True).expand(keep.shape), blocks)
        assert torch.equal(found.expand(some.shape), blockwise(keep, blocks)[0] | empty.any(-1, keepdim=True))


NUMBERS = st.sampled_from(
    [Q, K, B, H, ["const", -3], ["const", 4], ["const", 0.5], ["number", 0], ["input", 0], ["input", 1], ["input", 2],
     ["input", 3], ["gather", 4, ["remainder", ["add", Q, K], ["const", 7]]], ["input", 5], ["input", 6], ["input", 7],
     ["input", 8], ["const", 2**29], ["cast", "int32", ["mul", Q, ["const", 2**28]]]]
)  # fmt: skip


def joined(children: st.SearchStrategy) -> st.SearchStrategy:
    pairs = "add sub mul maximum minimum ge gt le lt eq ne and or floor_divide".split()
    return st.one_of(
        st.tuples(st.sampled_from(pairs), children, children).map(list),
        st.tuples(st.sampled_from(["neg", "abs", "not", "relu", "sign"]), children).map(list),
        st.tuples(st.just("where"), children, children, children).map(list),
        st.tuples(
            st.just("cast"),
            st.sampled_from(["int64", "float32", "bool", "int32", "uint8", "int8", "uint16", "float64"]),
            children,
        ).map(list),
    )


@given(tree=st.recursive(NUMBERS, joined, max_leaves=8), seed=st.integers(0, 99))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_no_block_that_is_seen_is_hidden(tree: list, seed: int) -> None:
    torch.manual_seed(seed)
    sizes, blocks = (2, 2, 11, 13), (4, 4)
    inputs = [
        torch.randint(0, 4, (2, 1, 11, 1)), torch.randint(0, 4, (2, 1, 1, 13)), torch.randn(1, 2, 11, 13),
        torch.tensor([1.0, torch.nan, torch.inf, -torch.inf]).repeat(4)[:13].view(1, 1, 1, 13), torch.randn(7),
        torch.randint(-(2**31), 2**31, (2, 1, 11, 1)).int(), torch.randint(-(2**31), 2**31, (1, 1, 1, 13)).int(),
        torch.randint(0, 256, (2, 1, 11, 1)).byte(), torch.randint(-(2**63), 2**63 - 1, (2, 1, 1, 13)),
    ]  # fmt: skip
    try:
        keep = sees(tree, inputs, [3], sizes)
    except RuntimeError:  # torch subtracts no Booleans, for one, and hardly computes with uint16
        return
    some, every = blockwise(keep, blocks)
    found = visibility(ScoreProgram(["score"], visible=tree), inputs, [3], sizes, blocks, CPU)
    assert not (some & ~found.some).any()
    assert not (found.every & ~every).any()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.int64], ids=str
)
def test_numbers_of_every_width_are_compared(dtype: torch.dtype) -> None:
    """torch finds no least or greatest one of the wide unsigned numbers; `torch.eye` has positions in uint16."""
    sizes, blocks = (1, 1, 300, 300), (128, 128)
    name = str(dtype).removeprefix("torch.")
    tree = ["eq", *(["cast", name, ["remainder", x, ["const", 200]]] for x in (Q, K))]
    some, every = blockwise(sees(tree, [], [], sizes), blocks)
    found = visibility(ScoreProgram(["score"], visible=["not", tree]), [], [], sizes, blocks, CPU)
    assert found.some.all() and not (found.every & some).any()
    ids = torch.arange(300).div(128, rounding_mode="floor").to(dtype)
    given_inputs = [ids.view(1, 1, -1, 1), ids.view(1, 1, 1, -1)]
    some, every = blockwise(sees(DOCUMENTS, given_inputs, [], sizes), blocks)
    found = visibility(ScoreProgram(["score"], visible=DOCUMENTS), given_inputs, [], sizes, blocks, CPU)
    assert not (some & ~found.some).any() and not (found.every & ~every).any()
    if dtype != torch.uint64:
        assert torch.equal(found.some, some) and torch.equal(found.every, every)
