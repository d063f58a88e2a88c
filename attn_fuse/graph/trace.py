"""Trace: record a stretch of a graph on fake tensors as ATen operations, and put the record back into a graph.

Each traced operation names the node that it was made for, whose place in the program it takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.utils import _pytree as pytree

from attn_fuse.graph.names import op_name, requires_grad, tensors_of, value_of
from attn_fuse.torch_internals import FakeTensor, FakeTensorMode, make_fx

_ORIGIN = "attn_fuse_origin"
_PLACE = ("stack_trace", "nn_module_stack", "source_fn_stack")


def fake_mode(nodes: Iterable[Node]) -> FakeTensorMode:
    """The fake mode of the tensors recorded for `nodes`. Raises TypeError without one."""
    for node in nodes:
        for tensor in tensors_of(value_of(node)):
            if isinstance(tensor, FakeTensor):
                return tensor.fake_mode
    raise TypeError("the graph does not record its tensors")


def fresh(value: Any) -> Any:
    """`value` with empty tensors of the same sizes, strides, dtypes and devices.

    Raises TypeError unless each tensor is a strided FakeTensor or Parameter.
    """
    return pytree.tree_map_only(torch.Tensor, _fresh, value)


def _fresh(value: torch.Tensor) -> torch.Tensor:
    if type(value) not in (FakeTensor, torch.nn.Parameter) or value.layout != torch.strided:
        raise TypeError(f"a {type(value).__name__} of layout {value.layout}")
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def with_gradient(value: torch.Tensor) -> torch.Tensor:
    """`value` as a leaf that requires a gradient, or `value` itself unless it is floating-point."""
    return value.detach().requires_grad_() if value.is_floating_point() else value


def call(node: Node, args: Any, kwargs: Any) -> Any:
    """The result of the function or method of `node` on these arguments."""
    target: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
    return target(*args[node.op == "call_method" :], **kwargs)


def made_for(node: Node) -> contextlib.AbstractContextManager[Any]:
    """A block of a traced function whose operations are made for `node`."""
    return torch.fx.traceback.annotate({_ORIGIN: node.name})


def origin_of(made: Node) -> str:
    """The name of the node that the traced operation `made` was made for; "" where torch did not note it."""
    name: str = made.meta.get("custom", {}).get(_ORIGIN, "")
    return name


def added(trace: Graph, origin: str, target: Any, *args: Any, **kwargs: Any) -> Node:
    """One more operation in a trace, made for the node named `origin`."""
    made = trace.call_function(target, args, kwargs)
    made.meta = {"custom": {_ORIGIN: origin}, "val": target(*map_arg(args, lambda n: n.meta["val"]), **kwargs)}
    return made


def traced(
    run: Callable[..., Any], inputs: Sequence[Any], table: Mapping[Any, Any] | None = None, pre_dispatch: bool = False
) -> GraphModule:
    """The operations of `run` on `inputs`, decomposed by `table`."""
    with torch.fx.traceback.preserve_node_meta():
        return make_fx(run, table, pre_dispatch=pre_dispatch)(*inputs)


def locate_at(made: Node, origin: Node) -> None:
    """Give `made` the source line and module of `origin`."""
    made.meta |= {name: origin.meta[name] for name in _PLACE if name in origin.meta}


def put_back(graph: Graph, made: Node, env: dict[Node, Any], origin: Node, grad: bool) -> Node:
    """A copy in `graph` of the traced operation `made`, with the records that Dynamo would have made.

    env: the nodes of `graph` by those of the trace, to which the copy is added. grad: whether gradients are on there.
    """
    copy = env[made] = graph.node_copy(made, env.__getitem__)
    value = made.meta["val"]
    # The trace ran without gradients.
    if grad and op_name(copy) != "detach" and any(map(requires_grad, copy.all_input_nodes)):
        value = pytree.tree_map_only(torch.Tensor, with_gradient, value)
    copy.meta = {"example_value": value}
    locate_at(copy, origin)
    return copy


def constant(module: GraphModule, trace: GraphModule, node: Node, mode: FakeTensorMode) -> Node:
    """A node of `module` for the traced constant `node`. Raises TypeError where its contents are unknown."""
    value = getattr(trace, str(node.target))
    value = getattr(value, "constant", None) if isinstance(value, FakeTensor) else value
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{node.target} is a tensor written out in the program")
    if value.numel() == 1 and value.device.type == "cpu":
        number, kind = (list(value.shape), value.item()), {"dtype": value.dtype, "device": value.device}
        made = module.graph.call_function(torch.full, number, kind)
    else:
        name = f"_traced_{sum(name.startswith('_traced_') for name, _ in module.named_buffers())}"
        module.register_buffer(name, value)
        made = module.graph.get_attr(name)
    made.meta["example_value"] = mode.from_tensor(value)
    return made
