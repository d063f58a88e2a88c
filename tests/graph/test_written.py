"""What is read back of a tensor that was written into: what was written, what was there before, or a choice of both."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attn_fuse.expression import nodes as ex
from attn_fuse.lift.lift import NotLifted, lift
from attn_fuse.lift.normalize import Normal, _decompositions
from attn_fuse.torch_internals import FakeTensorMode, functionalized, make_fx, on_fake_tensors

CACHE, NEW = 0, 1


def element(program: Callable[..., Tensor], *shapes: tuple[int, ...], symbolic: bool) -> ex.Expr:
    """An element of what `program` makes of tensors of these shapes, all of whose sizes are symbols if `symbolic`."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=not symbolic)
    tensors = [mode.from_tensor(torch.empty(shape), static_shapes=not symbolic) for shape in shapes]
    with on_fake_tensors(mode):
        graph = make_fx(functionalized(program), _decompositions())(*tensors)
    graph.graph.eliminate_dead_code()
    leaves = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in leaves:
        node.meta["example_value"] = node.meta["val"]
    region: Any = SimpleNamespace(leaves=leaves)
    return lift(Normal(region, graph, (), {}, mode), {}).element


def loads(x: ex.Expr) -> set[int]:
    return {part.leaf for part in ex.walk(x) if isinstance(part, (ex.Load, ex.Gather))}


def filled(cache: Tensor, new: Tensor, start: int) -> Tensor:
    cache = cache.clone()
    cache[:, start : start + new.shape[1]] = new
    return cache


def transposed(cache: Tensor, new: Tensor) -> Tensor:
    cache = cache.mT.clone()
    cache[:, :, START : START + new.shape[1]] = new.mT
    return cache.mT


START = 5  # no other size is 5

READ: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], set[int]]] = {
    "the slice": (lambda c, n: filled(c, n, START)[:, START : START + n.shape[1]], {NEW}),
    "a part of the slice": (lambda c, n: filled(c, n, START)[:, START : START + n.shape[1]][:, 1:], {NEW}),
    "in front": (lambda c, n: filled(c, n, START)[:, :START], {CACHE}),
    "behind": (lambda c, n: filled(c, n, START)[:, START + n.shape[1] :], {CACHE}),
    "from the front": (lambda c, n: filled(c, n, START)[:, : START + n.shape[1]], {CACHE, NEW}),
    "from the front, filled from there": (lambda c, n: filled(c, n, 0)[:, : n.shape[1]], {NEW}),
    "all": (lambda c, n: filled(c, n, START), {CACHE, NEW}),
    "a row": (lambda c, n: filled(c, n, START)[:, START], {NEW}),
    "another row": (lambda c, n: filled(c, n, START)[:, START - 1], {CACHE}),
    "transposed": (lambda c, n: transposed(c, n)[:, :START], {CACHE}),
    "transposed, the slice": (lambda c, n: transposed(c, n)[:, START : START + n.shape[1]], {NEW}),
    "flattened": (lambda c, n: filled(c, n, 0)[:, : n.shape[1]].flatten(1), {NEW}),
    "written twice": (lambda c, n: filled(filled(c, c[:, :2], 0), n, START)[:, START : START + 1], {NEW}),
    "a copy": (lambda c, n: c[:, : n.shape[1]].copy_(n), {NEW}),
    "a select": (lambda c, n: c.select_scatter(n[:, 0], 1, START).select(1, START), {NEW}),
    "another select": (lambda c, n: c.select_scatter(n[:, 0], 1, START)[:, 2], {CACHE}),
    "by a list": (lambda c, n: c.index_copy(1, torch.arange(n.shape[1]) + START, n)[:, START : START + 2], {NEW}),
    "in front of a list": (lambda c, n: c.index_copy(1, torch.arange(n.shape[1]) + START, n)[:, :START], {CACHE}),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", READ)
def test_what_is_read_back(name: str, symbolic: bool) -> None:
    program, read = READ[name]
    if name == "flattened" and symbolic:
        # That a quotient of an index by a size is less than the number of rows is not proved.
        read = {CACHE, NEW}
    assert loads(element(program, (2, 17, 4), (2, 3, 4), symbolic=symbolic)) == read


@pytest.mark.parametrize("length", [1, 3])
def test_a_start_that_is_a_size(length: int) -> None:
    def program(cache: Tensor, new: Tensor, seen: Tensor) -> Tensor:
        start = seen.shape[0]
        cache = cache.clone()
        cache[:, start : start + length] = new
        return cache[:, start : start + length]

    assert loads(element(program, (2, 17, 4), (2, length, 4), (7,), symbolic=True)) == {NEW}


def test_positions_that_are_read_are_refused() -> None:
    with pytest.raises(NotLifted, match="read from a tensor"):
        element(lambda c, n, p: c.index_copy(1, p.long(), n), (2, 17, 4), (2, 3, 4), (3,), symbolic=False)
