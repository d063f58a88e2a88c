"""Normalise: a region becomes a graph of few ATen operations, however it was written.

make_fx traces the region once on fresh fake tensors of Dynamo's own fake mode, which turns methods, operators, in-place
forms, einsum and baddbmm into one small set of operations. Symbolic sizes stay symbolic. Dropout becomes a marker,
since its decomposition would hide it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from attn_fuse.graph.modes import autocast_of
from attn_fuse.graph.names import DROPOUT, FUSED, op_name, requires_grad, tensors_of, value_of
from attn_fuse.graph.region import Region
from attn_fuse.graph.trace import call, fake_mode, fresh, made_for, origin_of, traced
from attn_fuse.lift.reductions import dropout_marker
from attn_fuse.torch_internals import (
    DataDependentOutputException,
    FakeTensorMode,
    decompositions,
    functionalized,
    on_fake_tensors,
)

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Normal:
    """A region in core ATen operations.

    graph: from the region's leaves, in order, to its output. dropout: the probability of each marker, a number or leaf.
    origin: each operation's node in Dynamo's graph. mode: the fake mode of the graph's tensors.
    trains: whether a leaf needs a gradient.
    """

    region: Region
    graph: GraphModule
    dropout: tuple[float | Node, ...]
    origin: dict[Node, Node]
    mode: FakeTensorMode
    trains: bool = False


class NotNormal(Exception):
    """Why the region has no normal form. node: the operation without one."""

    def __init__(self, reason: str, node: Node) -> None:
        super().__init__(reason)
        self.node = node


def normalize(region: Region) -> Normal:
    """The normal form of `region`. Raises NotNormal, or any error of torch's operations."""
    _require_plain_tensors(region)
    try:
        mode = fake_mode((*region.leaves, *region.nodes))
    except TypeError as problem:
        raise NotNormal(str(problem), region.output) from None
    trains = region.mode.grad and any(map(requires_grad, region.leaves))
    probabilities: list[float | Node] = []
    by_name = {node.name: node for node in region.nodes}

    def run(*values: Any) -> Any:
        env: dict[Node, Any] = dict(zip(region.leaves, values, strict=True))
        for node in region.nodes:
            with autocast_of(region.scope.modes[node]), made_for(node):
                # Without gradients a detach does nothing.
                stops = trains or op_name(node) != "detach"
                env[node] = _run(node, env, probabilities) if stops else env[node.all_input_nodes[0]]
        return env[region.output]

    with on_fake_tensors(mode), torch.no_grad():
        inputs = [fresh(value_of(leaf)) for leaf in region.leaves]
        trace = traced(run, inputs, _decompositions(trains))
        if any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable for n in trace.graph.nodes):
            # Some decompositions write into tensors that they create, such as that of a vector times matrices.
            probabilities.clear()
            trace = traced(functionalized(run), inputs, _decompositions(trains))
    trace.graph.eliminate_dead_code()
    _merge_equal(trace.graph)
    if sum(node.op == "placeholder" for node in trace.graph.nodes) != len(region.leaves):
        raise NotNormal("not every leaf is one tensor or one number", region.output)
    origin = {node: by_name[name] for node in trace.graph.nodes if (name := origin_of(node)) in by_name}
    return Normal(region, trace, tuple(probabilities), origin, mode, trains)


def _merge_equal(graph: Graph) -> None:
    """Replace each repeated operation in `graph`, as in scores written twice, by the first one."""
    made: dict[tuple[Any, str], Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            # By `repr`, since True, 1 and 1.0 are equal but give different dtypes.
            first = made.setdefault((node.target, repr((node.args, node.kwargs))), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _require_plain_tensors(region: Region) -> None:
    """Raise NotNormal for a tensor made of tensors, such as a DTensor, which redefines operations."""
    for leaf in region.leaves:
        for tensor in tensors_of(value_of(leaf)):
            if hasattr(tensor, "__tensor_flatten__"):
                kind = type(tensor).__name__
                advice = (
                    ": attend to local tensors, by to_local() or use_local_output=True" if kind == "DTensor" else ""
                )
                raise NotNormal(f"it reads a {kind}, which defines its own operations{advice}", leaf)


def _run(node: Node, env: dict[Node, Any], probabilities: list[float | Node]) -> Any:
    if op_name(node) in DROPOUT:
        return _run_dropout(node, env, probabilities)
    args, kwargs = map_arg(node.args, env.__getitem__), map_arg(node.kwargs, env.__getitem__)
    if op_name(node) in FUSED:
        return _as_written_out(node, probabilities, *args, **kwargs)
    try:
        return call(node, args, kwargs)
    except DataDependentOutputException:
        # Torch needs the number in a tensor, as in `x.reshape(n, torch.div(32, 4, rounding_mode="floor"))`.
        args, kwargs = (map_arg(given, lambda one: _number_in(one, env)) for given in (node.args, node.kwargs))
        return call(node, args, kwargs)


def _number_in(node: Node, env: dict[Node, Any]) -> Any:
    """The integer in `node` if it was constant when the graph was captured; else its value in `env`.

    Other numbers stay tensors, because their dtypes decide the precision.
    """
    constant = getattr(value_of(node), "constant", None)
    if constant is None or constant.dim() or constant.is_floating_point() or constant.is_complex():
        return env[node]
    return constant.item()


def _as_written_out(
    node: Node,
    probabilities: list[float | Node],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`F.scaled_dot_product_attention` as torch documents it."""
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.mT * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        seen = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = aten._safe_softmax(scores, -1)
    if dropout_p != 0:
        probabilities.append(dropout_p)
        weights = dropout_marker(weights, len(probabilities) - 1)
    return weights @ value


def _run_dropout(node: Node, env: dict[Node, Any], probabilities: list[float | Node]) -> Any:
    named = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | dict(node.kwargs)
    training, p = named.get("training", named.get("train", True)), named.get("p", 0.5)
    x = env[named["input"]]
    if not isinstance(training, bool):
        raise NotNormal("whether dropout is active is known only at run time", node)
    if not training or p == 0:
        return x
    if isinstance(p, (int, float)) and not 0 < p < 1:
        raise NotNormal(f"dropout with probability {p}", node)
    probabilities.append(p)
    return dropout_marker(x, len(probabilities) - 1)


def _hardtanh(x: Tensor, low: float = -1.0, high: float = 1.0) -> Tensor:
    return x.masked_fill(x >= high, high).masked_fill(x <= low, low)


def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    # The exponential of a positive number may be infinite, which would make the gradient NaN.
    below = torch.expm1(x.masked_fill(x > 0, 0.0) * input_scale) * (alpha * scale)
    return torch.where(x > 0, x * scale, below)


def _mean(x: Tensor, dims: list[int] | None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    count = math.prod(x.shape[d] for d in dims or range(x.dim()))
    return x.sum(dims, keepdim, dtype=dtype) / count


# Klambauer et al., arXiv 1706.02515
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805
# Decompositions that read better than torch's, or have torch's gradients where those do not.
_OURS: dict[Any, Callable[..., Tensor]] = {
    aten.hardtanh.default: _hardtanh,
    aten.relu6.default: lambda x: _hardtanh(x, 0.0, 6.0),
    aten.hardsigmoid.default: lambda x: _hardtanh(x + 3.0, 0.0, 6.0) / 6.0,
    aten.hardswish.default: lambda x: x * (_hardtanh(x + 3.0, 0.0, 6.0) / 6.0),
    aten.elu.default: _elu,
    aten.celu.default: lambda x, alpha=1.0: _elu(x, alpha, 1.0, 1 / alpha),
    aten.selu.default: lambda x: _elu(x, _SELU_ALPHA, _SELU_SCALE),
    aten.mean.dim: _mean,
    aten._log_softmax.default: lambda x, dim, half: aten._softmax(x, dim, half).log(),
    aten.logsumexp.default: lambda x, dims, keepdim=False: x.exp().sum(dims, keepdim).log(),
}


@functools.cache
def _decompositions(trains: bool = False) -> dict[Any, Any]:
    """torch's decompositions of operations that make_fx leaves whole and the lift does not read."""
    taken_apart = decompositions(
        [
            aten._prelu_kernel, aten._safe_softmax, aten.addmm, aten.baddbmm, aten.clamp_max, aten.clamp_min,
            aten.deg2rad, aten.eye, aten.floor_divide, aten.frac, aten.hardshrink, aten.heaviside, aten.index_select,
            aten.isneginf, aten.isposinf, aten.ldexp, aten.leaky_relu, aten.log_sigmoid_forward, aten.logaddexp,
            aten.logaddexp2, aten.logit, aten.mish, aten.mv, aten.nan_to_num, aten.native_layer_norm, aten.rad2deg,
            aten.rsub, aten.sgn, aten.softshrink, aten.squeeze.default, aten.stack, aten.t, aten.threshold,
            aten.transpose, aten.tril, aten.triu, aten.unbind, aten.where.Scalar, aten.where.ScalarOther,
            aten.where.ScalarSelf, aten.xlogy, aten.zero,
        ]
    )  # fmt: skip
    # The gradient of the decomposition is wrong where a branch of its `where` is NaN.
    whole = {aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other} if trains else ()
    return {op: how for op, how in (taken_apart | _OURS).items() if op not in whole}
