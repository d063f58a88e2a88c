"""In-place views that no view can stand for: Dynamo makes few of these graphs, so they are written here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, Node

from attn_fuse.graph.in_place_views import pure_views
from attn_fuse.graph.memory import NotFunctional, changes_shape
from attn_fuse.graph.modes import Mode
from attn_fuse.torch_internals import FakeTensorMode


def of_an_input(graph: Graph, x: torch.Tensor) -> Node:
    node = graph.placeholder("x")
    node.meta["example_value"] = x
    return node


def of_one_of_several(graph: Graph, x: torch.Tensor) -> Node:
    given = of_an_input(graph, x.clone())
    both = graph.call_function(torch.aminmax, (given,), {"dim": 0})
    both.meta["example_value"] = (x, x.clone())
    one = graph.call_function(lambda pair: pair[0], (both,))
    one.meta["example_value"] = x
    return one


def of_another_tensor(graph: Graph, x: torch.Tensor) -> Node:
    return of_an_input(graph, x.clone())


@pytest.mark.parametrize(
    "source, reason",
    [
        (of_an_input, "the shape of an input is changed in place"),
        (of_one_of_several, "the shape of one of several results is changed in place"),
        (of_another_tensor, "changes a tensor that Dynamo does not record"),
    ],
)
def test_no_view_stands_for_it(source: Callable[[Graph, torch.Tensor], Node], reason: str) -> None:
    graph = Graph()
    with FakeTensorMode():
        x = torch.randn(4, 1)
        target = source(graph, x)
        changed = graph.call_method("unsqueeze_", (target, 0))
        changed.meta["example_value"] = x
        graph.output((changed,))
    modes = dict.fromkeys(graph.nodes, Mode(True, ()))
    with pytest.raises(NotFunctional, match=reason):
        pure_views(graph, modes)


@pytest.mark.parametrize("name", [name for name in dir(torch.Tensor) if name.endswith("__")])
def test_no_method_of_pythons_changes_a_shape(name: str) -> None:
    """`torch.ops.aten` has many of them as an object of Python: `__eq__` is no operator there."""
    graph = Graph()
    with FakeTensorMode():
        x = of_an_input(graph, torch.randn(4, 1))
        same = graph.call_method(name, (x, x))
        same.meta["example_value"] = torch.ones(4, 1, dtype=torch.bool)
        graph.output((same,))
    assert not changes_shape(same)
    pure_views(graph, dict.fromkeys(graph.nodes, Mode(True, ())))
    assert same in graph.nodes


@pytest.mark.parametrize("name", ["unsqueeze_", "squeeze_", "t_", "transpose_", "resize_", "set_", "as_strided_"])
def test_these_methods_change_a_shape(name: str) -> None:
    graph = Graph()
    assert changes_shape(graph.call_method(name, (graph.placeholder("x"),)))


@pytest.mark.parametrize("name", ["add_", "masked_fill_", "detach_", "unsqueeze", "no_such_method_"])
def test_these_methods_do_not(name: str) -> None:
    graph = Graph()
    assert not changes_shape(graph.call_method(name, (graph.placeholder("x"),)))
