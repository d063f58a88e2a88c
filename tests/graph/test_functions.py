"""Functions: every field of every row against torch, which has none of our tables; and what a new row takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_fuse.expression import nodes as ex
from attn_fuse.expression import simplify
from attn_fuse.expression.functions import BINARY, FUNCTIONS, UNARY, Function, Order, bounds_of
from attn_fuse.kernels.score.gradient import differentiable, gradient_exprs, gradients, needed
from attn_fuse.kernels.score.program import Block, Memo, ScoreProgram, bound, evaluate
from attn_fuse.kernels.triton.emitter import Described, Emitter, Granted
from attn_fuse.lift.elementwise import ELEMENTWISE

ORDINARY = [-40.0, -3.5, -1.0, -0.75, -0.5, -0.1, 0.0, 0.1, 0.5, 0.75, 1.0, 1.5, 2.5, 7.0, 40.0]
INFINITE = [-math.inf, math.inf]
ENDS = Order(min, max)


def of_torch(name: str) -> Callable[..., Tensor]:
    """torch's function, found by its name alone."""
    found: Callable[..., Tensor] = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    return found


def doubles(*values: float) -> list[Tensor]:
    return [torch.tensor(x, dtype=torch.float64) for x in values]


def operands(row: Function) -> list[tuple[float, ...]]:
    if row.name in UNARY:
        return [(x,) for x in ORDINARY]
    return [(x, y) for x in ORDINARY for y in ORDINARY]


def node(name: str, *parts: ex.Expr) -> ex.Expr:
    """The function as a node of an expression, by the name that a string of a program has."""
    made: ex.Expr = ScoreProgram([name, *parts]).score
    return made


@pytest.mark.parametrize("row", FUNCTIONS.values(), ids=lambda row: row.name)
class TestARow:
    def test_value(self, row: Function) -> None:
        for x in operands(row):
            expected = of_torch(row.name)(*doubles(*x)).double()
            torch.testing.assert_close(doubles(row.value(*x))[0], expected, equal_nan=True)

    def test_dtype(self, row: Function) -> None:
        """What it makes of whole numbers, and of each floating-point type."""
        count = 1 if row.name in UNARY else 2
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            result = of_torch(row.name)(*[torch.ones(2, dtype=dtype)] * count).dtype
            assert result == (torch.bool if row.gives == "truth" else dtype)
        try:
            of_whole = of_torch(row.name)(*[torch.ones(2, dtype=torch.int64)] * count).dtype
        except (RuntimeError, NotImplementedError):
            return  # torch itself has it of fractions only
        assert of_whole == {"same": torch.int64, "fraction": torch.float32, "truth": torch.bool}[row.gives]

    def test_gradient(self, row: Function) -> None:
        """The value on a block, and the gradient by both walks, on a block and as expressions, against autograd."""
        leaves = [ex.Input(n) for n in range(len(row.gradients))]
        root = node(row.name, *leaves)
        root = ScoreProgram(root).score
        inputs = [x for x in ex.distinct(root) if isinstance(x, ex.Input)]
        block = Block(1, 1, (0, 1), (0, 1), torch.device("cpu"), torch.float64)
        for x in operands(row):
            tensors = [torch.tensor(v, dtype=torch.float64).view(1, 1, 1, 1).requires_grad_() for v in x]
            out = evaluate(root, None, tensors, (), block)
            exact = of_torch(row.name)(*doubles(*x)).double()
            torch.testing.assert_close(out.detach().double().view(()), exact, equal_nan=True)
            if not out.requires_grad or row.name == "floor_divide":
                continue  # of floor_divide autograd has no derivative
            expected = torch.autograd.grad(out.sum(), tensors, allow_unused=True)
            memo: Memo = dict.fromkeys(needed(path := differentiable([root], inputs)))
            with torch.no_grad():
                evaluate(root, None, tensors, (), block, memo)
                on_block = gradients(path, inputs, [(root, torch.ones(1, 1, 1, 1).double())], (), block, memo)
                one = ex.Const(1.0)
                as_exprs = gradient_exprs([(root, one)], inputs)
                for leaf in inputs:
                    reference = expected[leaf.leaf]
                    reference = torch.zeros(()).double() if reference is None else reference
                    zero = torch.zeros(1, 1, 1, 1).double()
                    found = on_block.get(id(leaf), zero)
                    torch.testing.assert_close(found.view(()), reference.view(()), equal_nan=True)
                    expr = as_exprs.get(id(leaf), ex.Const(0.0))
                    written = evaluate(expr, None, tensors, (), block).double().expand(1, 1, 1, 1)
                    torch.testing.assert_close(written.view(()), reference.view(()), equal_nan=True)

    def test_where_there_is_none_autograd_has_none(self, row: Function) -> None:
        for n, rule in enumerate(row.gradients):
            if rule is not None or row.name in ("detach", "floor_divide") or row.gives == "truth":
                continue
            tensors = [torch.tensor(1.3, dtype=torch.float64, requires_grad=True) for _ in row.gradients]
            out = of_torch(row.name)(*tensors)
            assert not out.requires_grad or torch.autograd.grad(out, tensors)[n] == 0

    def test_image(self, row: Function) -> None:
        """No value within an interval lies outside of its image, in each of the analyses."""
        if row.name in UNARY:
            for low in ORDINARY:
                for high in (x for x in ORDINARY if x >= low):
                    assert_covers(row, [(low, high)])
        else:
            intervals = [(-3.5, -1.0), (-1.0, 0.5), (0.0, 0.0), (0.5, 2.5), (1.0, 7.0), (2.5, 2.5)]
            for a in intervals:
                for b in intervals:
                    assert_covers(row, [a, b])

    def test_infinities(self, row: Function) -> None:
        if row.infinite is None:
            return
        for x in INFINITE:
            value = row.value(x)
            assert math.isnan(value) == ((1 if x > 0 else -1) in row.undefined)
            if math.isinf(value):
                assert (1 if value > 0 else -1) == row.infinite[x > 0]

    def test_growth(self, row: Function) -> None:
        """A bounded function stays below 4, a linear one below a few times its operand; both where it is defined."""
        for x in (1e3, 1e6, 1e9):
            values = [v for sign in (-1, 1) if not math.isnan(v := row.value(*[sign * x] * len(row.gradients)))]
            if row.growth == "bounded":
                assert all(abs(v) < 4 for v in values)
            elif row.growth == "linear":
                assert all(abs(v) <= 4 * x for v in values)

    def test_lifted(self, row: Function) -> None:
        """torch's core operation of this name is read, if the row says so."""
        if not row.lifted:
            return
        packet = getattr(torch.ops.aten, row.name)
        if row.name in UNARY:
            assert packet.default in ELEMENTWISE
            return
        of_tensors = {
            op
            for op in (getattr(packet, kind) for kind in packet.overloads())
            if not op._schema.is_mutable and any(str(one.type) == "Tensor" for one in op._schema.arguments)
        }
        assert of_tensors and of_tensors <= ELEMENTWISE.keys()

    def test_folded(self, row: Function) -> None:
        """A function of numbers is the number that torch gives, or stays where that is none."""
        build = simplify.unary if row.name in UNARY else simplify.binary
        if row.name in ("add", "sub", "mul", "div", "detach"):
            return  # built by functions of their own
        for x in operands(row):
            found = build(row.name, *map(ex.Const, x), torch.float64)
            if isinstance(found, ex.Const):
                torch.testing.assert_close(doubles(float(found.value))[0], of_torch(row.name)(*doubles(*x)).double())

    def test_triton_has_code(self, row: Function) -> None:
        """What tests/triton computes with; here that both templates name every operand."""
        for template in filter(None, (row.triton, row.whole)):
            assert all(f"{{{n}}}" in template for n in range(len(row.gradients)))
        emitter = Emitter([Described(torch.float32, (False,) * 4, True)] * 2, Granted())
        value = emitter.value(node(row.name, *map(ex.Input, range(len(row.gradients)))))
        assert value.dtype == (torch.bool if row.gives == "truth" else torch.float32)


def assert_covers(row: Function, intervals: list[tuple[float, float]]) -> None:
    grids = [torch.linspace(low, high, 9, dtype=torch.float64) for low, high in intervals]
    points = torch.cartesian_prod(*grids).view(-1, len(grids)).unbind(-1)
    values = of_torch(row.name)(*points).double()
    values = values[~values.isnan()]
    slack = 1e-9 * (1 + values.abs().nan_to_num(0, 0, 0).amax().item()) if len(values) else 0.0
    found = []
    if row.image is not None:
        found.append(row.image(row.value, *intervals))
    if row.interval is not None:
        found.append(row.interval(ENDS, *intervals))
    # Where a function is not defined an end is NaN, which says nothing of the values.
    for low, high in (ends for ends in found if not any(map(math.isnan, ends))):
        assert bool((values >= low - slack).all()) and bool((values <= high + slack).all()), (row.name, intervals)


def test_names_are_torchs() -> None:
    assert [*FUNCTIONS] == [*UNARY, *BINARY] and all(name == row.name for name, row in FUNCTIONS.items())
    assert len(UNARY) == 41 and len(BINARY) == 11


def test_the_ends_of_tensors() -> None:
    """Intervals of many blocks at once are the intervals of each."""
    order = Order(torch.minimum, torch.maximum)
    low, high = torch.tensor([-3.0, -1.0, 2.0]), torch.tensor([-1.0, 4.0, 5.0])
    for name in ("add", "sub", "mul", "neg", "abs", "maximum", "minimum"):
        pairs = [(low, high)] * len(FUNCTIONS[name].gradients)
        interval = FUNCTIONS[name].interval
        assert interval is not None
        found = interval(order, *pairs)
        for n in range(3):
            each = [(float(a[n]), float(b[n])) for a, b in pairs]
            assert (float(found[0][n]), float(found[1][n])) == interval(ENDS, *each)


def test_bounds_of_whole_numbers_hold_all_values_and_no_more() -> None:
    """Integers stay integers, however large, and a remainder stays below what it is divided by."""
    assert bounds_of("add", (2**62, 2**62), (2**62, 2**62)) == (2**63, 2**63)
    assert bounds_of("remainder", (-7, 9), (1, 4)) == (0, 3) and bounds_of("remainder", (-7.0, 9.0), (1.0, 4.0)) == (
        0,
        4,
    )
    assert bounds_of("floor_divide", (-7, 9), (2, 4)) == (-4, 4) and bounds_of("floor_divide", (-7, 9), (-4, 4)) == (
        -9,
        9,
    )
    assert bounds_of("floor_divide", (-7.0, 9.0), (-4.0, 4.0)) == (-math.inf, math.inf)
    assert bounds_of("sign", (-5, 0)) == (-1, 0) and bounds_of("relu", (-5, 3)) == (0, 3)
    for row in (row for row in FUNCTIONS.values() if row.whole):
        for x in itertools.product((-7, -2, 1, 3), repeat=len(row.gradients)):
            exact = int(of_torch(row.name)(*map(torch.tensor, x)))
            assert bounds_of(row.name, *((one, one) for one in x)) == (exact, exact)
    for name in ("floor_divide", "remainder", "fmod"):
        low, high = bounds_of(name, (5, 5), (0, 0))
        assert math.isinf(low) and math.isinf(high)
    for name in ("floor_divide", "remainder", "fmod", "add", "mul", "sub", "maximum"):
        for a in ((-5, 3), (2, 6), (-4, -1)):
            for b in ((-3, -1), (1, 4), (2, 2)):
                low, high = bounds_of(name, a, b)
                points = torch.cartesian_prod(torch.arange(a[0], a[1] + 1), torch.arange(b[0], b[1] + 1)).unbind(-1)
                values = of_torch(name)(*points)
                assert low <= int(values.min()) and int(values.max()) <= high


@pytest.mark.parametrize("name", ["remainder", "fmod", "floor_divide", "sign", "floor", "ceil", "round", "trunc"])
def test_bounds_hold_where_a_rounded_number_jumps(name: str) -> None:
    """1.4 is a multiple of 0.2 in float64 and not in float32: bounds are of the one, and values of the other."""
    tenths = [n / 10 for n in range(-30, 31)]
    arguments = itertools.product(tenths, (-0.3, -0.2, -0.1, 0.1, 0.2, 0.7))
    for a, b in arguments:
        exact = (a, b) if name in BINARY else (a / b,)
        rounded = [torch.tensor(x) for x in (a, b)]
        value = of_torch(name)(*(rounded if name in BINARY else [rounded[0] / rounded[1]])).item()
        low, high = bounds_of(name, *((x, x) for x in exact))
        assert low - 1e-6 <= value <= high + 1e-6, (a, b)
    vanishing = bounds_of("exp", (-200.0, -150.0))
    if name in ("sign", "ceil"):
        low, high = bounds_of(name, vanishing)
        assert low <= of_torch(name)(torch.tensor(-175.0).exp()).item() <= high


def test_a_bound_that_is_divided_by_0_is_none() -> None:
    for name in ("floor_divide", "remainder", "fmod"):
        program = node(name, ex.Number(0), ex.Number(1))
        assert bound(program, [7, 2]) == int(of_torch(name)(torch.tensor(7), torch.tensor(2)))
        with pytest.raises(ValueError, match="divided by 0"):
            bound(program, [7, 0])


@pytest.mark.parametrize(
    "dtype, granted, apart",
    [
        (torch.int64, Granted(short=True), True),
        (torch.int64, Granted(), False),
        (torch.int8, Granted(short=True), False),
    ],
    ids=str,
)
def test_a_distance_is_cast_apart_only_where_that_is_exact(dtype: torch.dtype, granted: Granted, apart: bool) -> None:
    """In int8 the difference of two positions wraps around; beyond 2^24 float32 does not hold it."""
    emitter = Emitter([], granted)
    distance = ex.Cast(dtype, ex.Position("i")) - ex.Cast(dtype, ex.Position("j"))
    assert (emitter.value(distance).made_of is not None) == apart
