"""In-place views that no view can stand for: Dynamo makes few of these graphs, so they are written here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, Node

from attn_fuse.graph.in_place_views import pure_views
from attn_fuse.graph.memory import NotFunctional
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
