"""Patterns: each takes one layer off an element expression and works under every other layer.

A pattern answers `None` (not my layer), a `Layered` (I read it; here is the expression beneath), or a `Refusal` (mine,
but fusing it would change the result). Patterns are asked in the order of the tuples.
"""

from attn_fuse.patterns.biases import bias
from attn_fuse.patterns.floors import floor, shared_floor
from attn_fuse.patterns.masks import additive_mask, mask
from attn_fuse.patterns.scale import quotient, scale
from attn_fuse.patterns.softcap import softcap
from attn_fuse.patterns.weights import dropout, factor, guard

# From the output of the softmax to its use.
WEIGHT_LAYERS = (dropout, guard, factor)
# From the input of the softmax down to the product of query and key.
SCORE_LAYERS = (mask, shared_floor, additive_mask, bias, softcap, scale, quotient, floor)
