"""What a drawn program is made of: small frozen values, each with the plainest choice as its default.

Every choice is a word that write.py turns into source. The first word of a tuple is the plain one; a failing program
is made smaller by putting plain words back, one field at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LAYOUTS = (
    "bhsd", "bshd", "joined", "joined_inner", "sbhd", "transposed", "linear", "concatenated", "rotated",
    "three_bshd", "three_first", "three_in_head", "three_last", "split", "two_bshd", "all_same", "key_is_value",
)  # fmt: skip
# Query, key and value (or the last two) are one tensor, and so agree in their sizes.
ONE_TENSOR = ("three_bshd", "three_first", "three_in_head", "three_last", "split", "all_same")
TOUCHES = ("none", "contiguous", "clone", "there_and_back", "shifted", "normalised", "viewed")
GROUPS = ("expand", "repeat_interleave", "repeat", "tile_last", "indexed")
RANKS = ("four", "three", "grouped", "rows_folded")
PRODUCTS = ("at", "matmul", "einsum", "swapped", "summed", "bmm", "baddbmm", "einsum_swapped")
SCALES = (
    "none", "times", "number_first", "divided", "root_of_size", "query", "key", "both", "twice", "tensor", "rsqrt",
    "per_head", "per_row", "negative", "in_place", "alpha", "per_key",
)  # fmt: skip
MASKS = (
    "triangle", "window", "padding", "lengths", "numbers", "documents", "chunks", "prefix", "strided", "dense",
    "dense_buffer", "triangle_and_padding", "window_or_prefix", "band", "almost", "own_rows", "heads_differ", "cut_out",
)  # fmt: skip
TRIANGLES = ("tril", "triu", "arange", "arange_swapped", "difference", "buffer", "buffer_4d", "cumulative", "vmapped")
OFFSETS = ("0", "M - N", "1", "-1", "2", "-2", "M", "N - M")
APPLIED = (
    "masked_fill", "where", "where_not", "added", "added_numbers", "times_and_added", "in_place", "indexed",
    "logarithm", "subtracted", "full_like", "tensor_fill",
)  # fmt: skip
FILLS = ("-inf", "-1e9", "lowest", "-1e4", "-1.0", "0.0", "-1e30")
BIASES = (
    "argument", "detached", "parameter", "alibi", "table", "of_query", "of_key", "buffer", "whole_numbers", "cosine",
    "distance",
)  # fmt: skip
MODS = ("softcap", "clamp", "temperature", "swish", "floor", "relu", "abs", "square", "half_sine", "softplus", "cut_in")
# After a finite fill, their gradients are nothing but rounding.
STEEP = ("temperature", "square", "half_sine")
SOFTMAXES = (
    "method", "function", "float", "float_argument", "by_hand", "by_hand_without_max", "by_hand_detached_max",
    "log_softmax", "logsumexp", "less_maximum", "late", "safe", "nan_to_num", "where_nan", "sink", "constant_sink",
    "plus_one", "exp2",
)  # fmt: skip
WEIGHTS = (
    "dropout_zero", "dropout_eval", "times_number", "head_mask", "masked_again", "filled_again", "renormalised",
    "cast", "times_dense", "times_row",
)  # fmt: skip
OUTPUTS = ("as_is", "joined", "sequence_first", "residual", "linear", "summed_heads", "wide", "first_row")
OUTSIDE = ("none", "weights", "mean_weights", "detached_weights", "scores", "raw_scores", "operands", "lse")
EDITS = (
    "none", "scores_scaled", "scores_set", "diagonal_set", "scores_after", "mask_between", "out_scaled", "out_set",
    "scores_alias", "key_before", "key_after", "value_between", "value_after", "query_base", "weights_scaled",
    "weights_after", "argument_meanwhile", "scores_copied", "product_out", "column_alias", "scores_twice",
    "query_operator", "key_method", "value_slice", "query_out", "argument_operator", "key_view", "scores_operator",
    "scores_slice", "scores_out", "weights_operator", "out_operator", "key_cached", "value_cached", "cache_given",
    "beyond_the_end",
)  # fmt: skip
DETACHED = (
    "none", "query", "key", "value", "scores", "weights", "no_grad", "out", "no_grad_query", "no_grad_key",
    "no_grad_value", "autocast_product", "autocast_off",
)  # fmt: skip
CALLS = ("once", "twice", "checkpoint", "three_keyword", "vmapped")
# Of what kinds of whole numbers the narrow ones are, by `reach`.
NARROW = ("uint8", "int8", "int16", "int32")
MUTATIONS = (
    "softmax_rows", "softmax_heads", "softmax_batch", "heads_rolled", "heads_flipped_value", "batch_flipped",
    "batch_shared", "mask_of_scores", "mask_of_weights", "two_products", "chosen_between_products",
    "value_of_other_head", "two_values", "cumulative_scores", "cumulative_weights", "key_not_transposed",
    "weights_transposed", "key_and_query_swapped", "heads_and_rows_swapped", "softmax_twice", "talking_heads",
    "sum_of_rows", "sum_without_last", "sorted", "score_times_score", "top_scores", "rows_shifted", "keys_shifted",
    "value_shifted", "minus_row_mean", "sigmoid", "other_sum", "key_edited_by_scores", "bias_of_scores",
    "reversed_softmax", "mean_of_weights", "masked_value", "product_of_three", "keys_cut", "mask_moved",
    "value_transposed",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """B, KV, G, N, M, D, E in the source. The query has KV * G heads."""

    batch: int = 2
    kv_heads: int = 3
    groups: int = 1
    q_len: int = 5
    kv_len: int = 5
    head_dim: int = 4
    value_dim: int = 4


@dataclass(frozen=True)
class Masked:
    """number: of what kind the whole number is that moves it (numbers.py)."""

    kind: str = "triangle"
    form: str = "tril"
    offset: str = "0"
    applied: str = "masked_fill"
    fill: str = "-inf"
    reach: int = 2
    reversed: bool = False
    number: str = "argument"


@dataclass(frozen=True)
class Biased:
    """over: the axes of b, h, i, j that the bias differs along."""

    kind: str = "argument"
    over: str = "ij"
    subtracted: bool = False
    first: bool = False


@dataclass(frozen=True)
class Modified:
    kind: str = "softcap"


Layer = Masked | Biased | Modified


@dataclass(frozen=True)
class Program:
    sizes: Sizes = field(default_factory=Sizes)
    seed: int = 0
    dtype: str = "float32"
    dynamic: bool = False
    backward: bool = True
    layout: str = "bhsd"
    touched: tuple[str, str, str] = ("none", "none", "none")
    key_groups: str = "expand"
    value_groups: str = "expand"
    rank: str = "four"
    viewed: bool = False
    transposed: bool = False
    product: str = "at"
    letters: tuple[int, int] = (0, 0)
    scale: str = "none"
    layers: tuple[Layer, ...] = ()
    softmax: str = "method"
    weights: tuple[str, ...] = ()
    value_product: str = "at"
    output: str = "as_is"
    outside: str = "none"
    edit: str = "none"
    detached: str = "none"
    call: str = "once"
    cut: str = "none"
    number: str = "argument"
    mutation: str | None = None
