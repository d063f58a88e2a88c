"""Attention sites, counted while a program runs: a softmax between two products of activations.

A site is a softmax whose input descends from a product of two activations, and whose output goes into another one.
A tensor's descent is followed through every operation but those that begin something new (norms, convolutions, products
with a parameter). A bare parameter as query, a softmax written out as exp / sum, and products written as
multiply and sum are no sites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

_aten = torch.ops.aten
_PRODUCTS = {_aten.bmm.default, _aten.baddbmm.default, _aten.mm.default, _aten.matmul.default}
_SOFTMAXES = {
    _aten._softmax.default, _aten._safe_softmax.default, _aten.softmax.int, _aten._log_softmax.default,
}  # fmt: skip
_BEGINS_ANEW = {
    _aten.native_layer_norm.default, _aten.native_group_norm.default, _aten.native_batch_norm.default,
    _aten.convolution.default, _aten.addmm.default, _aten.linear.default, _aten.embedding.default,
    _aten.argmax.default, _aten.topk.default, _aten.sort.default,
}  # fmt: skip
_FUSED = ("scaled_dot_product", "flex_attention", "attn_fuse")
# A tensor that descends from more softmaxes than that is a sum over layers, no weights.
_MOST_SOFTMAXES = 4


class Sites(TorchDispatchMode):
    """Counts while it is active. found: the sites met. fused: calls of fused attention operators."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()
        self.fused = 0
        self._softmaxes = 0
        self._scores = WeakIdKeyDictionary()  # tensors that descend from a product of activations
        self._weights = WeakIdKeyDictionary()  # tensor -> the softmaxes that it descends from

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch._C._current_graph_task_id() != -1:  # in backward, where a softmax's derivative meets activations
            return out
        if any(name in str(func) for name in _FUSED):
            self.fused += 1
            return out
        taken, given = _tensors((args, kwargs)), _tensors(out)
        if func in _PRODUCTS:
            self._product(taken, given)
        elif func in _SOFTMAXES and any(tensor in self._scores for tensor in taken):
            self._softmaxes += 1
            for tensor in given:
                self._weights[tensor] = frozenset({self._softmaxes})
        elif func not in _BEGINS_ANEW and func not in _SOFTMAXES:
            self._descend(taken, given)
        return out

    def _product(self, taken: list[Tensor], given: list[Tensor]) -> None:
        for tensor in taken:
            if tensor in self._weights and not any(_is_parameter(other) for other in taken if other is not tensor):
                self.found |= self._weights[tensor]
        if not any(_is_parameter(tensor) for tensor in taken):
            for tensor in given:
                self._scores[tensor] = True

    def _descend(self, taken: list[Tensor], given: list[Tensor]) -> None:
        softmaxes: frozenset[int] = frozenset().union(*(self._weights.get(tensor, ()) for tensor in taken))
        if len(softmaxes) > _MOST_SOFTMAXES:
            softmaxes = frozenset()
        is_score = any(tensor in self._scores for tensor in taken)
        for tensor in given:
            if not tensor.is_floating_point():
                continue
            # What is written through a view descends to the viewed: x[i] = softmax(y).
            written = [tensor._base] if tensor._base is not None and any(tensor is t for t in taken) else []
            for reached in [tensor, *written]:
                if softmaxes:
                    self._weights[reached] = softmaxes | self._weights.get(reached, frozenset())
                if is_score:
                    self._scores[reached] = True


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
