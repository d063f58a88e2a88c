"""Names: kinds of operations in Dynamo's graph, which decide how far a walk goes through each.

A kind says nothing about what an operation means. torch's tags say which operations are element-wise, so those need no
name here. Any other operation outside the tables is a leaf.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from attn_fuse.expression.functions import FUNCTIONS
from attn_fuse.torch_internals import storage_of

SOFTMAX = frozenset({"softmax", "softmin", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax"})
FUSED = frozenset({"scaled_dot_product_attention"})
# Calls that contain an attention: `expand` writes them out before the search for sites.
CALLS = frozenset({"multi_head_attention_forward", "_transformer_encoder_layer_fwd"})
PRODUCTS = frozenset(
    "matmul bmm mm einsum baddbmm addbmm addmm linear tensordot inner dot mv vecdot chain_matmul".split()
)
DROPOUT = frozenset({"dropout"})
LAYOUT = frozenset(
    "view reshape transpose permute t mT T H mH contiguous clone expand expand_as repeat repeat_interleave unsqueeze "
    "squeeze flatten unflatten movedim moveaxis swapaxes swapdims split split_with_sizes chunk unbind tensor_split "
    "select slice narrow getitem view_as reshape_as broadcast_to adjoint tile ravel alias detach diagonal "
    "lift_fresh_copy _unsafe_view".split()
)
# Joins, pads and rolls: leaves on the way to query, key and value, walked through on the mask side.
JOINS = frozenset("cat concat concatenate stack hstack vstack dstack pad constant_pad_nd roll flip".split())
# Partial writes in functional form.
SCATTERS = frozenset("slice_scatter select_scatter diagonal_scatter index_copy as_strided_scatter".split())
# Lookups at positions from a tensor.
LOOKUPS = frozenset("embedding index_select gather take_along_dim index".split())
CASTS = frozenset("to float half bfloat16 double type type_as _to_copy".split())
# Element-wise functions without torch's tag, Python's operators, and aliases.
_ELEMENTWISE = frozenset(CASTS | FUNCTIONS.keys() - LAYOUT) | frozenset(
    "absolute and arccos arccosh arcsin arcsinh arctan arctan2 arctanh bool copy divide expit fill fix floordiv "
    "greater greater_equal hardswish index_fill index_put int invert less less_equal log_sigmoid logsigmoid long "
    "masked_scatter mod multiply negative not not_equal or prelu setitem softsign subtract tanhshrink xor zero".split()
)
REDUCTIONS = frozenset("sum amax amin logsumexp any all mean cumsum diff".split())
CREATION = frozenset(
    "ones zeros full empty arange tril triu ones_like zeros_like full_like empty_like tensor scalar_tensor new_ones "
    "new_zeros new_full new_tensor new_empty eye as_tensor tril_indices triu_indices meshgrid".split()
)
_BETWEEN = LAYOUT | CREATION | DROPOUT | REDUCTIONS | JOINS | SCATTERS | LOOKUPS | SOFTMAX
# These read sizes only.
SIZE_QUERIES = frozenset({"size", "dim", "numel", "stride", "shape", "sym_size", "getattr"})
# These read only shape and dtype.
IN_THE_SHAPE_OF = frozenset(
    "ones_like zeros_like full_like empty_like rand_like randn_like randint_like new_ones new_zeros new_full new_empty "
    "new_tensor".split()
)
# These run their subgraph once, on their own arguments.
INLINE_SUBGRAPHS = frozenset({"tag_activation_checkpoint", "invoke_subgraph", "wrap"})
# These run their subgraph any number of times, on operands that the graph does not name.
LOOPED_SUBGRAPHS = frozenset({"while_loop", "cond", "scan", "map_impl", "map"})


_TORCH_AND_PYTHON = ("torch", "_operator", "builtins", "math")


@functools.cache
def is_elementwise(name: str) -> bool:
    """Whether the operation `name` is element-wise, by torch's tag or the table."""
    if name in _ELEMENTWISE:
        return True
    tags = [overload.tags for overload in (*overloads_of(name), *overloads_of(f"special_{name}"))]
    return any(torch.Tag.pointwise in t and torch.Tag.nondeterministic_seeded not in t for t in tags)


def overloads_of(operator: str | torch._ops.OpOverloadPacket) -> list[torch._ops.OpOverload]:
    """The overloads of an ATen operator; none for other attributes of `torch.ops.aten`."""
    packet: Any = getattr(torch.ops.aten, operator, None) if isinstance(operator, str) else operator
    named = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    return [getattr(packet, name) for name in named]


@functools.cache
def is_between(name: str) -> bool:
    """Whether the operation `name` may stand between scores, weights and the product with the value."""
    return name in _BETWEEN or is_elementwise(name)


def elements(tensor: torch.Tensor) -> int:
    """The number of elements on the first call; symbolic sizes without a known value count as 1."""
    sizes = [n.node.hint if isinstance(n, torch.SymInt) else n for n in tensor.shape]
    return math.prod(1 if n is None else n for n in sizes)


def op_name(node: Node) -> str:
    """The operation's name, shared by function, method, operator and in-place form.

    Outside torch and Python the name keeps its module or namespace, as another library's `softmax` may mean anything.
    """
    target = node.target
    if node.op == "call_method":
        name = str(target)
    elif isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        namespace, _, name = packet._qualified_op_name.partition("::")
        if namespace not in ("aten", "prims"):
            return packet._qualified_op_name
    else:
        name = getattr(target, "__name__", str(target))
        if (module := _module_of(target)).partition(".")[0] not in _TORCH_AND_PYTHON:
            return f"{module}.{name}"
    if name == "getattr" and len(node.args) > 1:
        return str(node.args[1])
    # `torch.special` has aliases for torch's own functions.
    name = name.removeprefix("special_")
    if name in _REFLECTED:
        return _REFLECTED[name]
    bare = name.strip("_") if name.startswith("__") else name.rstrip("_")
    return _OPERATORS.get(bare, bare)


def is_others_function(node: Node) -> bool:
    """Whether `node` calls a Python function from outside torch and Python, kept whole by `allow_in_graph`."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.OperatorBase):
        return False
    return _module_of(node.target).partition(".")[0] not in _TORCH_AND_PYTHON


def _module_of(target: object) -> str:
    return getattr(target, "__module__", None) or "torch"


def called(node: Node) -> str:
    """The name of the operation that `node` calls; "" unless it is a call."""
    return op_name(node) if node.op.startswith("call_") else ""


_OPERATORS = {
    "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "truediv": "div", "iand": "and", "ior": "or",
    "ipow": "pow", "imatmul": "matmul", "radd": "add", "rmul": "mul", "multiply": "mul", "divide": "div",
    "true_divide": "div", "subtract": "sub", "invert": "logical_not",
}  # fmt: skip


# Commutative operators. Without underscores, `__rand__` would be `torch.rand`.
_REFLECTED = {"__rand__": "and", "__ror__": "or", "__rxor__": "xor"}


def is_exponential(node: Node) -> bool:
    """Whether `node` is `exp`, `exp2` or a power of a positive number."""
    base = node.args[0] if op_name(node) == "pow" and node.args else None
    return op_name(node) in ("exp", "exp2") or (isinstance(base, int | float) and base > 0)


def value_of(node: Node) -> object:
    """The fake tensor, number, symbol or container recorded for `node`; None without a record."""
    return node.meta.get("example_value", node.meta.get("val"))


def tensors_of(value: object) -> list[torch.Tensor]:
    """The tensors in `value`, at any depth."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_tensor(node: Node) -> bool:
    """Whether the value of `node` is one tensor."""
    return isinstance(value_of(node), torch.Tensor)


def requires_grad(node: Node) -> bool:
    """Whether some tensor of `node` requires a gradient."""
    return any(tensor.requires_grad for tensor in tensors_of(value_of(node)))


def storages(node: Node) -> set[int]:
    """The ids of the storages of the tensors of `node`; a view has the storage of its base."""
    return {storage_of(tensor) for tensor in tensors_of(value_of(node))}
