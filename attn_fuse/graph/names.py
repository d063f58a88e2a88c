"""Names: the operations of Dynamo's graph by kind, which decides how far a walk goes through each.

A kind says nothing about what an operation means. torch's own tags say which operations are element-wise, so one that
the lift learns to read needs no name here; another operation that stands in no table is a leaf.
"""

from __future__ import annotations

import functools
import math

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from attn_fuse.expression.functions import FUNCTIONS
from attn_fuse.torch_internals import storage_of

SOFTMAX = frozenset({"softmax", "softmin", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax"})
FUSED = frozenset({"scaled_dot_product_attention"})
# Calls that compute attention among other things: `expand` writes them out before sites are sought.
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
# Tensors joined, padded or rolled: leaves on the way to query, key and value, walked through on the mask side.
JOINS = frozenset("cat concat concatenate stack hstack vstack dstack pad constant_pad_nd roll flip".split())
# Partial writes, made functional: a tensor with some of its elements replaced.
SCATTERS = frozenset("slice_scatter select_scatter diagonal_scatter index_copy as_strided_scatter".split())
# Elements at positions that a tensor holds.
LOOKUPS = frozenset("embedding index_select gather take_along_dim index".split())
CASTS = frozenset("to float half bfloat16 double type type_as _to_copy".split())
# Element-wise functions that torch does not tag as such, Python's operators, and second names of others.
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
# These read sizes, not values.
SIZE_QUERIES = frozenset({"size", "dim", "numel", "stride", "shape", "sym_size", "getattr"})
# These make a tensor in the shape or dtype of another, without reading its values.
IN_THE_SHAPE_OF = frozenset(
    "ones_like zeros_like full_like empty_like rand_like randn_like randint_like new_ones new_zeros new_full new_empty "
    "new_tensor".split()
)
# These run their subgraph once, on the operands given.
INLINE_SUBGRAPHS = frozenset({"tag_activation_checkpoint", "invoke_subgraph", "wrap"})
# These run their subgraph any number of times, on operands that the graph does not name.
LOOPED_SUBGRAPHS = frozenset({"while_loop", "cond", "scan", "map_impl", "map"})


_TORCH_AND_PYTHON = ("torch", "_operator", "builtins", "math")


@functools.cache
def is_elementwise(name: str) -> bool:
    """Whether the operation of this name computes each element from those at its place: by torch's tag or the table."""
    if name in _ELEMENTWISE:
        return True
    packets = [getattr(torch.ops.aten, spelled, None) for spelled in (name, f"special_{name}")]
    tags = [
        getattr(packet, kind).tags
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for kind in packet.overloads()
    ]
    return any(torch.Tag.pointwise in t and torch.Tag.nondeterministic_seeded not in t for t in tags)


@functools.cache
def is_between(name: str) -> bool:
    """Whether the operation of this name may stand between the scores, the weights and the product with the value."""
    return name in _BETWEEN or is_elementwise(name)


def elements(tensor: torch.Tensor) -> int:
    """The number of elements on the first call; a symbolic size without a known value counts as 1."""
    sizes = [n.node.hint if isinstance(n, torch.SymInt) else n for n in tensor.shape]
    return math.prod(1 if n is None else n for n in sizes)


def op_name(node: Node) -> str:
    """The operation's name, the same for the function, the method, the operator and the in-place form.

    Outside torch and Python the name keeps its module or namespace: another library's `softmax` may mean anything.
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
    # `torch.special` has second names for functions of torch's own.
    name = name.removeprefix("special_")
    if name in _REFLECTED:
        return _REFLECTED[name]
    bare = name.strip("_") if name.startswith("__") else name.rstrip("_")
    return _OPERATORS.get(bare, bare)


def is_others_function(node: Node) -> bool:
    """Whether `node` calls a Python function that is neither torch's nor Python's, as `allow_in_graph` leaves it."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.OperatorBase):
        return False
    return _module_of(node.target).partition(".")[0] not in _TORCH_AND_PYTHON


def _module_of(target: object) -> str:
    return getattr(target, "__module__", None) or "torch"


def called(node: Node) -> str:
    """The name of the operation that a call calls, "" for any other node."""
    return op_name(node) if node.op.startswith("call_") else ""


_OPERATORS = {
    "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "truediv": "div", "iand": "and", "ior": "or",
    "ipow": "pow", "imatmul": "matmul", "radd": "add", "rmul": "mul", "multiply": "mul", "divide": "div",
    "true_divide": "div", "subtract": "sub", "invert": "logical_not",
}  # fmt: skip


# Of operators for which the order does not matter. Bare, `__rand__` would be `torch.rand`.
_REFLECTED = {"__rand__": "and", "__ror__": "or", "__rxor__": "xor"}


def is_exponential(node: Node) -> bool:
    """Whether `node` is `exp`, `exp2` or a power with a positive number as its base."""
    base = node.args[0] if op_name(node) == "pow" and node.args else None
    return op_name(node) in ("exp", "exp2") or (isinstance(base, int | float) and base > 0)


def value_of(node: Node) -> object:
    """The fake tensor, number, symbol or container of them that is recorded for `node`; None without a record."""
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
    """The ids of the storages that the tensors of `node` live in; a view has the storage of its base."""
    return {storage_of(tensor) for tensor in tensors_of(value_of(node))}
