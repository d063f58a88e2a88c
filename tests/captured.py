"""Dynamo's graphs of two programs, for the check to compare."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from attn_fuse.emit.check import disagreement
from attn_fuse.torch_internals import source_name

Program = Callable[..., Any]


def captured(program: Program, **inputs: Any) -> GraphModule:
    """Dynamo's graph of `program`, which takes `inputs` in this order."""
    graphs: list[tuple[GraphModule, dict[str, Node]]] = []

    def keep(graph: GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append((graph, {source_name(n): n for n in graph.graph.nodes if n.op == "placeholder"}))
        return graph.forward

    torch._dynamo.reset()
    values = {n: v.clone() if isinstance(v, Tensor) and not v.requires_grad else v for n, v in inputs.items()}
    torch.compile(program, backend=keep, dynamic=False, fullgraph=True)(**values)
    ((module, holders),) = graphs
    graph = module.graph
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for name in inputs:
        holder = holders.get(f"L['{name}']")
        with graph.inserting_before(first):
            if holder is None:
                graph.placeholder(f"unused_{name}")
            else:
                first.prepend(holder)
    module.recompile()
    return module


def said(written: Program, rewritten: Program, **inputs: Any) -> str | None:
    graphs = [captured(program, **inputs) for program in (written, rewritten)]
    return disagreement(*graphs, list(inputs.values()))


def randoms(*shape: int, count: int = 3, grad: bool = False) -> dict[str, Tensor]:
    return {name: torch.randn(shape).requires_grad_(grad) for name in "qkvwxyz"[:count]}


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)
