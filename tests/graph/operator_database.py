"""What an operation means, held against torch: its element expression, evaluated at every index, and torch's result.

A call is traced to its normal form, as a region is; each result is lifted and then evaluated as the kernels evaluate a
score program. Whole numbers and Booleans must be equal, and floating-point numbers to a rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from attn_fuse.attention.mask import Mask
from attn_fuse.emit.builder import NotEmitted
from attn_fuse.expression import nodes as ex
from attn_fuse.expression.nodes import Expr
from attn_fuse.kernels.score.program import Block, ScoreProgram, evaluate
from attn_fuse.kernels.score.write import _Writer
from attn_fuse.lift.lift import OPERATIONS, Lifted, NotLifted, lift
from attn_fuse.lift.normalize import Normal, _decompositions
from attn_fuse.lift.reductions import ACROSS
from attn_fuse.torch_internals import FakeTensorMode, functionalized, make_fx, on_fake_tensors
from tests.rounding import distance, rounding_of_float64

ROUNDINGS = 8.0
TIMES_TORCH = 4.0
CPU = torch.device("cpu")


class NotRun(Exception):
    """Torch cannot run the call on these numbers, or not trace it without knowing them."""


@dataclass
class Verdict:
    """Of one result of one call. operations: of its normal form. refused, wrong: why; neither: it is right."""

    operations: frozenset[Any]
    refused: str = ""
    wrong: str = ""


@dataclass
class Tally:
    """Counts over many calls."""

    calls: int = 0
    right: int = 0
    dtypes: set[torch.dtype] = field(default_factory=set)
    read: set[Any] = field(default_factory=set)
    refused: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, what: str, verdicts: Sequence[Verdict], dtype: torch.dtype) -> None:
        self.calls += 1
        self.dtypes.add(dtype)
        for verdict in verdicts:
            if verdict.wrong:
                self.wrong.append(f"{what}: {verdict.wrong}")
            elif verdict.refused:
                self.refused[verdict.refused] = self.refused.get(verdict.refused, 0) + 1
            else:
                self.right += 1
                self.read |= verdict.operations

    def __str__(self) -> str:
        return (
            f"{self.calls} calls in {len(self.dtypes)} dtypes: {self.right} results right, "
            f"{sum(self.refused.values())} refused, {len(self.wrong)} wrong; {len(self.read)} operations read"
        )


def judged(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Verdict]:
    """One verdict for each tensor that `function` gives. Raises NotRun."""
    return judged_in(None, function, *args, **kwargs)


def judged_in(scores: torch.dtype | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Verdict]:
    """The same beside scores of this dtype; None: of the widest that is in the call."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [n for n, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    given = [leaves[n] for n in places]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values = list(leaves)
        for n, tensor in zip(places, tensors, strict=True):
            values[n] = tensor
        positional, named = pytree.tree_unflatten(values, spec)
        return [x for x in pytree.tree_leaves(function(*positional, **named)) if isinstance(x, torch.Tensor)]

    try:
        with torch.no_grad():
            expected = run(*(_copied(x) for x in given))
            graph, mode = _traced(run, given)
    except Exception as problem:
        raise NotRun(str(problem)) from problem
    dtypes = [x.dtype for x in (*given, *expected)] + [x for x in leaves if isinstance(x, torch.dtype)]
    computed_in = scores or (torch.float64 if torch.float64 in dtypes else torch.float32)
    return [
        _verdict(graph, mode, n, given, x, computed_in, partial(_rounding_of_torch, run, given, n))
        for n, x in enumerate(expected)
        if not x.dtype.is_complex
    ]


def through_a_product(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of the same numbers, which are now a matrix product: reductions are read for scores alone."""

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        flat = x.reshape(-1, x.shape[-1]) @ torch.eye(x.shape[-1], dtype=x.dtype)
        return function(flat.reshape(x.shape), *args, **kwargs)

    return run


def _copied(x: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    if all(stride or size == 1 for size, stride in zip(x.size(), x.stride(), strict=True)):
        return copy.copy_(x)
    return x


def _traced(run: Callable[..., Any], given: Sequence[torch.Tensor]) -> tuple[GraphModule, FakeTensorMode]:
    mode = FakeTensorMode()
    with on_fake_tensors(mode):
        fakes = [torch.empty_strided(x.size(), x.stride(), dtype=x.dtype) for x in given]
        graph = make_fx(functionalized(run), _decompositions())(*fakes)
    return graph, mode


def operations_of(graph: GraphModule) -> frozenset[Any]:
    return frozenset(n.target for n in graph.graph.nodes if n.op == "call_function" and n.target in OPERATIONS)


def _verdict(
    whole: GraphModule,
    mode: FakeTensorMode,
    n: int,
    given: Sequence[torch.Tensor],
    expected: torch.Tensor,
    computed_in: torch.dtype,
    rounding_of_torch: Callable[[], float],
) -> Verdict:
    alone = torch.fx.Graph()
    outputs = [x for x in pytree.tree_leaves(alone.graph_copy(whole.graph, {})) if isinstance(x, Node)]
    alone.output(outputs[n])
    alone.eliminate_dead_code()
    graph = GraphModule(whole, alone)
    operations = operations_of(graph)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, tensor in zip(placeholders, given, strict=True):
        node.meta["example_value"] = tensor
    region = SimpleNamespace(leaves=placeholders)
    normal = Normal(region, graph, (), {}, mode)  # type: ignore[arg-type]
    try:
        lifted = lift(normal, {})
        found = value(lifted, given, computed_in)
    except (NotLifted, NotEmitted) as problem:
        return Verdict(operations, refused=str(problem))
    # What is summed, or made in several steps of half precision, is held against the largest number: it may cancel.
    is_half = expected.is_floating_point() and expected.dtype.itemsize == 2
    across = sum(operation in ACROSS for operation in operations)
    summed = (is_half and len(operations) > 1) or across or any("alpha" in node.kwargs for node in graph.graph.nodes)
    largest = max((x.abs().max().item() for x in given if x.is_floating_point() and x.numel()), default=0.0)
    wrong = _difference(found, expected, largest if summed else None)
    # A softmax makes of the rounding of a product one that is larger by the product, in torch as in ours.
    if wrong and across:
        wrong = _difference(found, expected, largest, TIMES_TORCH * rounding_of_torch())
    return Verdict(operations, wrong=wrong)


def _rounding_of_torch(run: Callable[..., list[torch.Tensor]], given: Sequence[torch.Tensor], n: int) -> float:
    """How far torch's result `n` is from itself computed in float64; 0.0 where it cannot be."""
    with torch.no_grad():
        if any(x.dtype == torch.float64 for x in given):
            return (rounding_of_float64(lambda values: run(*values), given) or [0.0] * (n + 1))[n]
        try:
            wide = run(*(x.double() if x.is_floating_point() else x for x in given))[n]
            return distance(run(*given)[n], wide)
        except Exception:
            return 0.0


def value(lifted: Lifted, leaves: Sequence[torch.Tensor], computed_in: torch.dtype) -> torch.Tensor:
    """All elements of a lifted tensor, where its leaves have these contents. Raises NotEmitted."""
    size = math.prod(int(n) for n in lifted.shape)
    if size == 0:
        return torch.empty([int(n) for n in lifted.shape])
    symbols = [i for i in lifted.indices if i.is_Symbol]
    whole = _Everywhere(symbols, lifted, leaves, computed_in).values(lifted.element)
    return whole.expand(size).reshape([int(n) for n in lifted.shape])


class _Everywhere(_Writer):
    """Writes a score program in which every index symbol is a digit of the key position."""

    def __init__(
        self,
        symbols: Sequence[sympy.Symbol],
        lifted: Lifted,
        leaves: Sequence[torch.Tensor],
        computed_in: torch.dtype,
    ) -> None:
        axes = SimpleNamespace(batch=(), query=(), key=tuple(symbols))
        attention = SimpleNamespace(space=lifted.space, axes=axes, head_axes=(), mask=Mask())
        facts = SimpleNamespace(bias_may_hide=False)
        super().__init__(SimpleNamespace(attention=attention, facts=facts))  # type: ignore[arg-type]
        self.symbols, self.lifted, self.leaves, self.computed_in = symbols, lifted, leaves, computed_in

    def values(self, x: Expr) -> torch.Tensor:
        """[elements] or [1]: `x` at every place along the symbols, the last the fastest."""
        tree = ScoreProgram(score=self.lowered(x)).score
        count = math.prod(int(self.lifted.space.sizes[s]) for s in self.symbols)
        block = Block(1, 1, (0, 1), (0, count), CPU, self.computed_in)
        return evaluate(tree, None, self.inputs, [], block).flatten()  # type: ignore[arg-type]

    def _lowered(self, x: Expr) -> Any:
        sizes = self.lifted.space.sizes
        match x:
            case ex.Load(leaf, index):
                if not self.leaves[leaf].numel():
                    return ex.Const(0)
                return self._gather(leaf, [self._within(leaf, d, i) for d, i in enumerate(index)])
            case ex.Contract(axes, a, b):
                return self._reduced(ex.Mul(a, b), axes, lambda t: t.sum(-1))
            # Of scores the mathematics is read; a logarithm of such a sum is never computed as it stands.
            case ex.Unary("log", ex.Reduce("sum", axis, ex.Unary("exp", body))):
                return self._reduced(body, (axis,), lambda t: t.logsumexp(-1))
            case ex.Reduce(name, axis, body):
                return self._reduced(body, (axis,), lambda t: getattr(torch, name)(t, -1))
            case ex.Softmax(axis, body, at):
                rest = [s for s in self.symbols if s not in at.free_symbols]
                if len(rest) + len(at.free_symbols) != len(self.symbols) or not (at.is_Symbol or at.is_Integer):
                    raise NotEmitted("a softmax of another axis")
                if at.is_Integer:
                    return self._reduced(body, (axis,), lambda t: t.softmax(-1)[..., int(at)])
                place = list(self.symbols).index(at)
                lengths = [int(sizes[s]) for s in (*rest, axis)]
                whole = self._over(body, (*rest, axis)).reshape(lengths).softmax(-1)
                return self._held(whole.movedim(-1, place).flatten())
        return super()._lowered(x)

    def _reduced(self, body: Expr, axes: Sequence[sympy.Symbol], by: Callable[..., torch.Tensor]) -> Any:
        count = math.prod(int(self.lifted.space.sizes[s]) for s in axes)
        if not count:
            return ex.Const(0.0)
        return self._held(by(self._over(body, (*self.symbols, *axes)).reshape(-1, count)))

    def _over(self, body: Expr, symbols: Sequence[sympy.Symbol]) -> torch.Tensor:
        count = math.prod(int(self.lifted.space.sizes[s]) for s in symbols)
        return _Everywhere(symbols, self.lifted, self.leaves, self.computed_in).values(body).expand(count)

    def _held(self, x: torch.Tensor) -> Any:
        self.inputs.append(x.reshape(1, 1, 1, -1))  # type: ignore[arg-type]
        return ex.Input(len(self.inputs) - 1)

    def _gather(self, leaf: int, positions: list[Any]) -> Any:
        self.inputs.append(self.leaves[leaf])  # type: ignore[arg-type]
        return ex.Gather(len(self.inputs) - 1, tuple(positions))

    def _input(self, x: Expr) -> Any:
        assert isinstance(x, ex.Unary)
        return self.lowered(x.x)

    def _within(self, leaf: int, dim: int, index: sympy.Expr) -> Any:
        place, length = self._position(index), self.leaves[leaf].shape[dim]
        return ex.Binary("minimum", ex.Binary("maximum", place, ex.Const(0)), ex.Const(length - 1))

    def _number(self, value: sympy.Expr) -> Any:
        return ex.Const(int(value))


def _difference(found: torch.Tensor, expected: torch.Tensor, largest: float | None, allowed: float = 0.0) -> str:
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)} for {tuple(expected.shape)}"
    if expected.is_floating_point():
        same = _near(found, expected, largest, allowed)
    elif found.is_floating_point():
        same = found.double() == expected.double()
    else:
        same = found.long() == expected.long()
    if bool(same.all()):
        return ""
    places = (~same).nonzero()
    first = tuple(places[0].tolist())
    return f"{len(places)} of {same.numel()} differ; at {first} {found[first].item()} for {expected[first].item()}"


def _near(found: torch.Tensor, expected: torch.Tensor, largest: float | None, allowed: float) -> torch.Tensor:
    """largest: the largest number of what was summed, if anything was. allowed: on top of the roundings."""
    info = torch.finfo(expected.dtype)
    x, y = found.double(), expected.double()
    exact = (x == y) | (x.isnan() & y.isnan())
    # Beyond the largest number of a type there is infinity, which a wider type need not reach.
    beyond = y.isinf() & (x.sign() == y.sign()) & (x.abs() >= info.max * (1 - info.eps))
    sizes = y.abs()
    if largest is not None:
        most = sizes[sizes.isfinite()].max().item() if sizes.isfinite().any() else 0.0
        sizes = torch.full_like(y, max(1.0, most, largest if math.isfinite(largest) else 0.0))
    near = (x - y).abs() <= ROUNDINGS * (info.eps * sizes + info.tiny) + allowed
    return exact | beyond | near
