"""Leaves on another device than the attention's: the call reads copies. A meta tensor stands for the other device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from attn_fuse.backend import attn_fuse


def added(q: Tensor, k: Tensor, v: Tensor, elsewhere: Tensor) -> Tensor:
    return (q @ k.mT / 8 - (elsewhere.cumsum(-1) - 1).to("cpu")).softmax(-1) @ v


def in_a_function_of_the_scores(q: Tensor, k: Tensor, v: Tensor, elsewhere: Tensor) -> Tensor:
    return (torch.tanh(q @ k.mT / 8) - elsewhere.to("cpu") * 2).softmax(-1) @ v


class SeenError(Exception):
    pass


@pytest.mark.parametrize("program", [added, in_a_function_of_the_scores])
def test_the_call_reads_one_device(program: Callable[..., Tensor]) -> None:
    seen: list[GraphModule] = []

    def inner(graph: GraphModule, inputs: Sequence[Any]) -> GraphModule:
        seen.append(graph)
        return graph

    def looked_at(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        attn_fuse(graph, inputs, options={"pick": "fused", "strict": True, "inner_backend": inner})
        raise SeenError

    given = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="SeenError"):
        torch.compile(program, backend=looked_at)(*given, torch.randn(16, device="meta"))
    calls = [n for n in seen[-1].graph.nodes if "attention" in str(n.target) or "chunked" in str(n.target)]
    read = [node.meta["example_value"] for call in calls for node in call.all_input_nodes]
    assert len(read) > 3 and {tensor.device.type for tensor in read} == {"cpu"}
