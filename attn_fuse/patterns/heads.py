"""Heads: whether scores or weights are summed over the heads between the two products, as talking heads are.

It only names the reason of an expression that is refused; nothing is taken or declined by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from attn_fuse.attention.attention import Refusal
from attn_fuse.expression import nodes as ex
from attn_fuse.expression.nodes import Contract, Expr, Load, index_symbols

MIXED = Refusal(
    "heads are mixed (talking heads)",
    advice="no kernel takes mixed heads: keep it, or attend with each head by itself",
)


def mixes_heads(element: Expr, batch_of: Mapping[int, Set[int]]) -> bool:
    """Whether a product in `element` sums scores or weights over an axis that their query and key share.

    batch_of: for each leaf that is a matrix product, its dimensions along which it multiplies other matrices.
    """
    behind = [part for part in ex.walk(element) if isinstance(part, Contract) and _holds_softmax(part)]
    softmaxes = [part for part in ex.walk(element) if isinstance(part, ex.Softmax)]
    return any(map(_sums_weights, behind)) or any(_sums_scores(softmax, batch_of) for softmax in softmaxes)


def _holds_softmax(product: Contract) -> bool:
    return any(isinstance(part, ex.Softmax) for part in ex.walk(product))


def _sums_weights(product: Contract) -> bool:
    """Whether the weights are summed over an axis along which query and key both differ, and not over the keys."""
    softmaxes = [part for part in ex.walk(product) if isinstance(part, ex.Softmax)]
    summed = set(product.axes) - {symbol for softmax in softmaxes for symbol in softmax.at.free_symbols}
    scores = [part for softmax in softmaxes for part in ex.walk(softmax.body) if isinstance(part, Contract)]
    return any(summed & index_symbols(part.a) & index_symbols(part.b) for part in scores)


def _sums_scores(softmax: ex.Softmax, batch_of: Mapping[int, Set[int]]) -> bool:
    """Whether a product in the softmax sums over the heads of a factor that is a matrix product and holds the keys."""
    for product in (part for part in ex.walk(softmax.body) if isinstance(part, Contract)):
        for load in (part for part in ex.walk(product) if isinstance(part, Load) and part.leaf in batch_of):
            if softmax.axis in index_symbols(load) and _sums_along(product, load, batch_of[load.leaf]):
                return True
    return False


def _sums_along(product: Contract, load: Load, dimensions: Set[int]) -> bool:
    places = {n for n, place in enumerate(load.index) if place.free_symbols & set(product.axes)}
    return bool(places) and places <= dimensions
