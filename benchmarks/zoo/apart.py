"""Sites that are no single attention, by package and case, with the mathematics that shows it. They are not counted.

P = softmax(S), with S = q·k and what is done to it; i is a query, j a key, h a head.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Apart:
    """mathematics: one line. sites: how many of a run they are, None for all."""

    mathematics: str
    sites: int | None = None


BAND = "a band as products of overlapping blocks: S is put together from diagonals, and P is cut into blocks again"
BLOCKS = (
    "S is put together from the products with a window, random and global blocks, and P is cut among as many products"
)
BLEND = "the weights are (1 - a)·P1 + a·P2: the sum of two softmaxes is none"
DIFFERENCE = "out = (P1 - λ P2)·V: the difference of two softmaxes is none"
DROPPED = "P∘M / (1 - p) is an output beside P∘M / (1 - p)·V: the mask M that is drawn has to be stored"
OWN_VALUES = "each query has values of its own: out[i] = Σ_j P[i, j]·(v[j] + e[j - i])"
HARD = "P = onehot(argmax S) + P' - stop(P'): the weights are no softmax"
HALVES = "two softmaxes over halves of the batch, of one attention: it is fused once"
HEADS = "S'[h] = Σ_g W[h, g]·S[g] before the softmax: heads are mixed (talking heads)"
RUNNING = "S[i, j] is less a running sum over the queries before i of what relu(S) is there (selective attention)"
COUNTED = "the position of a key is a running sum of sigmoid(S) over the keys behind it (CoPE)"
RANKED = "key j is seen where S[i, j] is among the k largest of its row: a mask that all scores of the row decide"
SIGNED = "P = sign(S)∘softmax(|S|): the weights are no softmax, and do not sum to 1"
QUERIES = "P is normalised over the queries and summed over the keys, or the other way round: Σ_j P[i, j] is not 1"
ONE_KEY = "there is one key: P = 1, out = v"

# By the reason that the report gives.
REASONS = {
    "refused: the weights after dropout are also used outside the attention": DROPPED,
    "refused: there is a single key, whose weight is 1": ONE_KEY,
}
APART: dict[str, dict[str, Apart]] = {
    "transformers": {
        "longformer": Apart(BAND),
        "led": Apart(BAND, 2),
        "big_bird_sparse": Apart(BLOCKS),
        "vits_text": Apart(OWN_VALUES),
        "groupvit_text_vision": Apart(HARD, 1),
    },
    "timm": {"vit_diff": Apart(DIFFERENCE), "convit": Apart(BLEND, 2)},
    "x-transformers": {
        "top_k": Apart(RANKED),
        "hard": Apart(HARD),
        "talking_heads_before": Apart(HEADS),
        "cog_signed": Apart(SIGNED),
        "selective": Apart(RUNNING),
        "cope": Apart(COUNTED),
        "cope_talking": Apart(COUNTED),
    },
    "vit-pytorch": {"wwt": Apart(QUERIES)},
    "labml-nn": {
        "stable_diffusion_self": Apart(HALVES, 1),
        "stable_diffusion_cross": Apart(HALVES, 1),
        "stable_diffusion_spatial": Apart(HALVES, 2),
    },
}
