"""Patterns: each takes one layer off an element expression and works under every other layer.

A pattern answers `None` (this layer is not mine), a `Layered` (I read it, here is what is beneath), or a `Refusal`
(it is mine, and fusing it would change what is computed). The order of the tuples is the order they are asked in.
"""

from attn_fuse.patterns.biases import bias
from attn_fuse.patterns.casts import widening
from attn_fuse.patterns.floors import floor, shared_floor
from attn_fuse.patterns.masks import additive_mask, mask
from attn_fuse.patterns.scale import quotient, scale
from attn_fuse.patterns.softcap import softcap
from attn_fuse.patterns.weights import dropout, factor, guard

# From the output of the softmax to its use.
WEIGHT_LAYERS = (dropout, widening, guard, factor)
# From the input of the softmax down to the product of query and key.
SCORE_LAYERS = (widening, mask, shared_floor, additive_mask, bias, softcap, scale, quotient, floor)
