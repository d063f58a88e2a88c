"""flex without a compiler: its programs and block tables against dense ones, on FlexAttention's own dense form."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.nn.attention.flex_attention import create_block_mask

from attn_fuse.expression.nodes import Add, Binary, Const, Div, Expr, Input, Mul, Number, Score, Select, distinct
from attn_fuse.graph.reach import earlier
from attn_fuse.kernels.flex.blocks import flex_blocks, flex_operands
from attn_fuse.kernels.flex.kernel import BLOCKS, attend
from attn_fuse.kernels.flex.mods import inlined, mask_mod, scaled, with_exact_fills
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.score.write import ScoreCall
from tests.graph.chunked_cases import CASES, INF, SIZES, USUAL, H, K, Q, S, Sizes, assert_near, drawn, naive, where
from tests.graph.chunked_cases import Case as DenseCase
from tests.graph.random_cases import random_case

TAKEN = [case for case in CASES if case.program.factor is None]
# The log-sum-exp is rounded as a number of its size, so the gradient of a sink is as near as that is small.
SMALL_SINK = DenseCase(
    "small sink",
    ScoreProgram(["mul", S, ["const", 0.1]], sink=["input", 0]),
    lambda s, at, sink: (s * 0.1, None, sink),
    lambda s: [torch.randn(1, s.heads, 1, 1)],
)
CAUSAL = ["ge", ["sub", Q, K], ["const", 0]]


def program(**parts: object) -> ScoreProgram:
    return ScoreProgram(**parts)  # type: ignore[arg-type]


def on_flex(case: DenseCase, s: Sizes, query: Tensor, key: Tensor, value: Tensor, *inputs: Tensor) -> Tensor:
    """The case on `attend`, as `emit` splices it."""
    whole = ScoreCall(case.program, inputs, case.numbers(s))
    seen = whole.part(ScoreProgram(Score(), visible=case.program.visible, upper=case.program.upper,
                                   lower=case.program.lower,
                                   hides_only_if_others_seen=case.program.hides_only_if_others_seen))  # fmt: skip
    sizes, program = [s.batch, s.heads, s.q_len, s.kv_len], seen.program.dumps()
    tables = flex_blocks(seen.inputs, seen.numbers, sizes, list(BLOCKS), True, query.device, program)
    read = whole.part(inlined(case.program))
    numbers = list(map(torch.tensor, read.numbers))
    return attend(query, key, value, read.inputs, numbers, tables, blocks=BLOCKS, program=read.program.dumps())


class TestFillsOnCuda:
    """The template's max is of rounded multiples by log2(e), the difference from it of exact ones."""

    LOG2E = torch.tensor(1.44269504)

    @pytest.mark.parametrize(
        "fill", [torch.finfo(d).min for d in (torch.float32, torch.bfloat16)] + [-1e9, -1e10, -3e7]
    )
    def test_a_multiple_of_a_fill_is_exact(self, fill: float) -> None:
        score = Mul(Score(), Const(0.125))
        found = with_exact_fills(Select(Input(0), Select(Input(1), score, Const(fill)), Const(fill)))
        assert found is not None
        (value,) = {node.value for node in distinct(found) if isinstance(node, Const)} - {0.125}
        product = torch.tensor(value, dtype=torch.float32) * self.LOG2E
        assert product.isfinite() and product.double() == value * self.LOG2E.double()
        assert fill * 2 < value < fill / 8
        # The fill itself is not: what the mend is for.
        rounded = torch.tensor(max(fill, -1.5e38)) * self.LOG2E
        assert (rounded.double() - torch.tensor(max(fill, -1.5e38)).double() * self.LOG2E.double()).abs() > 0.1

    @pytest.mark.parametrize("fill", [-1e4, -1e6, -INF])
    def test_what_stays(self, fill: float) -> None:
        score = Select(Input(0), Score(), Const(fill))
        assert with_exact_fills(score) == score

    @pytest.mark.parametrize(
        "score",
        [
            Add(Score(), Select(Input(0), Const(-1e10), Const(0.0))),
            Add(Score(), Select(Input(0), Const(-(2.0**34)), Const(0.0))),
            Mul(Select(Input(0), Score(), Const(-1e10)), Const(0.5)),
            Binary("maximum", Score(), Const(-3e38)),
            Select(Input(0), Select(Input(1), Score(), Const(-1e10)), Const(-1.2e10)),
            Select(Input(0), Score(), Add(Const(-1e10), Input(1))),
        ],
        ids=["added", "a power of two added", "scaled", "clamped", "two of one size", "a sum"],
    )
    def test_what_cannot_be_made_exact(self, score: Expr) -> None:
        assert with_exact_fills(score) is None

    def test_two_fills_keep_their_order(self) -> None:
        found = with_exact_fills(Select(Input(0), Select(Input(1), Score(), Const(-1e9)), Const(-1e10)))
        assert {node.value for node in distinct(found) if isinstance(node, Const)} == {-(2.0**30), -(2.0**34)}


class TestTheScoreFunction:
    @pytest.mark.parametrize(
        "s", [pytest.param(s, id=str(s), marks=() if s is USUAL else pytest.mark.thorough) for s in SIZES]
    )
    @pytest.mark.parametrize("case", [*TAKEN, *map(random_case, range(40))], ids=lambda case: case.name)
    def test_forward(self, case: DenseCase, s: Sizes) -> None:
        torch.manual_seed(0)
        tensors = drawn(case, s, torch.float32)
        got = on_flex(case, s, *tensors)
        exact = naive(case, *(x.double() if x.is_floating_point() else x for x in tensors))
        usual = naive(case, *tensors)
        eps = torch.finfo(torch.float32).eps
        allowed = 4 * (usual - exact).abs().max().item() + 16 * eps * exact.abs().max().item()
        assert (got - exact).abs().max().item() <= allowed

    @pytest.mark.parametrize("name", ["scaled", "softcap", "small sink", "relative table", "documents"])
    def test_gradients(self, name: str) -> None:
        case = next(case for case in (*CASES, SMALL_SINK) if case.name == name)
        torch.manual_seed(0)
        tensors = drawn(case, USUAL, torch.float32)
        leaves = [x.requires_grad_(x.is_floating_point()) for x in tensors]
        out = on_flex(case, USUAL, *leaves)
        pull = torch.randn_like(out)
        wanted = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, pull))
        names = ["query", "key", "value", *(f"input {n}" for n in range(len(leaves) - 3))]
        got = {n: next(found) for n, x in zip(names, leaves, strict=True) if x.requires_grad}
        assert_near({"out": out.detach()} | got, partial(naive, case), [x.detach() for x in leaves], pull)


class TestTheMaskIsTakenOut:
    """Where `mask_mod` decides, the score of a block that is seen whole is what it is without a mask."""

    @pytest.mark.parametrize(
        ("score", "visible"),
        [
            (where(CAUSAL, S), CAUSAL),
            (["where", ["not", CAUSAL], ["const", -INF], S], CAUSAL),
            (where(["ge", K, ["const", 3]], where(CAUSAL, S)), ["and", CAUSAL, ["ge", K, ["const", 3]]]),
            (["where", ["ge", ["sub", ["sub", K, Q], ["const", 1]], ["const", 0]], ["const", -INF], S], CAUSAL),
            (["where", ["lt", Q, K], ["const", -INF], S], CAUSAL),
            (where(["le", K, Q], S), CAUSAL),
            (["add", S, where(CAUSAL, ["const", 0.0])], CAUSAL),
            (
                where(["gt", ["add", Q, ["number", 0]], K], S),
                ["ge", ["sub", ["add", Q, ["number", 0]], K], ["const", 1]],
            ),
        ],
    )
    def test_taken_out(self, score: list, visible: list) -> None:
        assert inlined(program(score=score, visible=visible)).score == Score()

    @pytest.mark.parametrize(
        ("score", "visible"),
        [
            # Another condition, though it looks alike.
            (where(["gt", Q, K], S), CAUSAL),
            (where(["ge", K, Q], S), CAUSAL),
            (where(["ge", ["sub", Q, H], ["const", 0]], S), CAUSAL),
            # One of two that need not both hold.
            (where(CAUSAL, S), ["or", CAUSAL, ["ge", K, ["const", 3]]]),
            # Of fractions, one of x >= 0 and -1 - x >= 0 need not hold.
            (where(["ge", ["input", 0], ["const", 0]], S), ["ge", ["const", -1], ["input", 0]]),
        ],
    )
    def test_left(self, score: list, visible: list) -> None:
        whole = program(score=score, visible=visible)
        assert inlined(whole).score == whole.score

    def test_a_truth_value_stays_one(self) -> None:
        score = ["add", S, ["add", ["where", CAUSAL, ["eq", Q, K], ["const", 0.0]], ["eq", H, K]]]
        assert isinstance(inlined(program(score=score, visible=CAUSAL)).score.b.a, Select)

    def test_what_is_not_read_any_more_goes(self) -> None:
        both = program(score=where(["eq", ["input", 0], ["input", 1]], ["add", S, ["input", 2]]),
                       visible=["eq", ["input", 0], ["input", 1]], upper=["number", 1])  # fmt: skip
        whole = ScoreCall(both, ("query's", "key's", "added"), (3, 5))
        said, seen = whole.part(ScoreProgram(inlined(both).score)), whole.part(replace(both, score=Score()))
        assert (said.inputs, said.numbers) == (["added"], []) and seen.inputs == ["query's", "key's"]
        assert said.program.score == Add(Score(), Input(0))
        assert seen.program.upper == Number(0) and seen.numbers == [5]


@pytest.mark.parametrize(
    ("score", "factor", "rest"),
    [
        (["mul", S, ["const", 0.125]], 0.125, Score()),
        (["mul", ["const", 2], S], 2.0, Score()),
        (["div", S, ["const", 8.0]], 0.125, Score()),
        (["div", ["const", 8.0], S], 1.0, Div(Const(8.0), Score())),
        (["mul", S, ["const", INF]], 1.0, Mul(Score(), Const(INF))),
    ],
)
def test_a_scale(score: list, factor: float, rest: tuple) -> None:
    assert scaled(program(score=score).score) == (factor, rest)


# Each with the numbers that it reads.
MASKS = {
    "causal": (["ge", Q, K], []),
    "window": (["and", ["ge", Q, K], ["lt", ["sub", Q, K], ["const", 70]]], []),
    "prefix": (["or", ["ge", Q, K], ["lt", K, ["number", 0]]], [40]),
    "offset": (["ge", ["add", Q, ["number", 0]], K], [100]),
    "none of the first": (["ge", K, ["const", 130]], []),
    "of each head": (["ge", ["sub", Q, ["mul", H, ["const", 64]]], K], []),
}


class TestBlockTables:
    @pytest.mark.parametrize("lengths", [(256, 256), (300, 170), (1, 333), (64, 64)], ids=str)
    @pytest.mark.parametrize("name", MASKS)
    def test_as_torch_makes_them_of_the_mask(self, name: str, lengths: tuple[int, int]) -> None:
        visible, numbers = MASKS[name]
        mask = ScoreProgram(S, visible=visible)
        got = flex_blocks([], numbers, [2, 3, *lengths], [64, 64], True, torch.device("cpu"), mask.dumps())
        read = [torch.tensor(n) for n in numbers]
        see = mask_mod(mask.visible, 0)
        heads = 3 if name == "of each head" else 1
        wanted = create_block_mask(lambda b, h, i, j: see(b, h, i, j, *read), 1, heads, *lengths, "cpu", BLOCK_SIZE=64)
        theirs = (
            (wanted.kv_num_blocks, wanted.kv_indices), (wanted.full_kv_num_blocks, wanted.full_kv_indices),
            (wanted.q_num_blocks, wanted.q_indices), (wanted.full_q_num_blocks, wanted.full_q_indices),
        )  # fmt: skip
        for ours, (counts, places) in zip(zip(got[::2], got[1::2], strict=True), theirs, strict=True):
            assert ours[0].dtype == ours[1].dtype == torch.int32
            assert torch.equal(ours[0], counts) and torch.equal(_listed(*ours), _listed(counts, places))

    def test_those_that_read_tensors(self) -> None:
        lengths = torch.tensor([10, 130, 256]).view(3, 1, 1, 1)
        mask = ScoreProgram(S, visible=["lt", K, ["input", 0]]).dumps()
        got = flex_blocks([lengths], [], [3, 2, 100, 256], [64, 64], False, torch.device("cpu"), mask)
        assert got[0].shape == (3, 1, 2) and got[0][:, 0].tolist() == [[1, 1], [1, 3], [0, 4]]
        assert got[2][:, 0].tolist() == [[0, 0], [2, 0], [4, 0]]

    def test_a_caller_may_write_into_them(self) -> None:
        arguments = ([], [], [1, 1, 300, 300], [64, 64], False, torch.device("cpu"), program(score=S).dumps())
        flex_blocks(*arguments)[0].zero_()
        assert flex_blocks(*arguments)[0].any()

    @pytest.mark.parametrize("transposed", [True, False])
    def test_operator(self, transposed: bool) -> None:
        mask = ScoreProgram(S, visible=["and", ["lt", K, ["input", 0]], ["ge", Q, ["number", 0]]]).dumps()
        arguments = ([torch.tensor([9, 130]).view(2, 1, 1, 1)], [3], [2, 2, 100, 256], [64, 128], transposed)
        torch.library.opcheck(flex_blocks, (*arguments, torch.device("cpu"), mask))


def test_operands_are_whole_buffers_of_their_own() -> None:
    x = torch.randn(3, 4, 5)
    first, second, number = flex_operands([x[1:], x.mT], [7])
    assert torch.equal(first, x[1:]) and torch.equal(second, x.mT) and number.item() == 7 and number.shape == ()
    assert first.is_contiguous() and second.is_contiguous() and first.storage_offset() == 0
    torch.library.opcheck(flex_operands, ([x[1:].requires_grad_(), x.mT], [7]))


def _listed(counts: Tensor, places: Tensor) -> Tensor:
    """Which blocks a table names, in order; -1 beyond them."""
    named = torch.arange(places.shape[-1]) < counts.unsqueeze(-1)
    return torch.where(named, places, -1)


class TestEarlier:
    def graph(self) -> tuple[Graph, torch.fx.Node, torch.fx.Node]:
        graph = Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        x.meta["example_value"], y.meta["example_value"] = torch.zeros(4), torch.zeros(4)
        return graph, x, y

    def call(self, graph: Graph, target: object, *args: object) -> torch.fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["example_value"] = torch.zeros(4)
        return node

    def test_the_same_views_of_the_same(self) -> None:
        graph, x, y = self.graph()
        first = self.call(graph, torch.cumsum, self.call(graph, torch.unsqueeze, x, 0), 0)
        again = (self.call(graph, torch.unsqueeze, x, 0), 0)
        end = graph.output(first)
        assert earlier(graph, end, torch.cumsum, again) is first
        assert earlier(graph, first, torch.cumsum, again) is None
        assert earlier(graph, end, torch.cumsum, (y, 0)) is None
        assert earlier(graph, end, torch.cumsum, (again[0], 0.0)) is None

    def test_not_the_same_where_it_may_differ(self) -> None:
        graph, x, _ = self.graph()
        first = self.call(graph, torch.cumsum, self.call(graph, torch.rand_like, x), 0)
        end = graph.output(first)
        with graph.inserting_before(end):
            again = self.call(graph, torch.rand_like, x)
        assert earlier(graph, end, torch.cumsum, (again, 0)) is None

    def test_not_where_a_gradient_would_be_lost(self) -> None:
        graph, x, _ = self.graph()
        x.meta["example_value"] = torch.empty(4, requires_grad=True)
        first = self.call(graph, torch.cumsum, x, 0)
        end = graph.output(first)
        # Made where gradients are off.
        assert earlier(graph, end, torch.cumsum, (x, 0)) is None
        first.meta["example_value"] = torch.empty(4, requires_grad=True)
        assert earlier(graph, end, torch.cumsum, (x, 0)) is first
