"""How far gradients are from float64 where values have a common part: eager, `chunked`, and torch's own flash kernel.

python benchmarks/common_part.py

Windows of tokens around a mean, as tests/common_part.py makes them, without a bias: torch's flash kernel gives none a
gradient. Each figure is the largest, over the gradients of input, weight and bias, of the distance over eager's own.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import ROOT, store, table

sys.path.insert(0, str(ROOT))
from tests.common_part import HEAD_DIM, distances

TOKENS = (49, 300)
# In half precision nothing is left of a gradient at a mean of 500, eager's or another's.
MEANS = {torch.float32: (0.0, 5.0, 500.0), torch.bfloat16: (0.0, 5.0), torch.float16: (0.0, 5.0)}


def written(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * HEAD_DIM**-0.5).softmax(-1) @ v + 0 * bias.sum()


def flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v) + 0 * bias.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    for dtype, means in MEANS.items():
        for mean in means:
            for tokens in TOKENS:
                torch._dynamo.reset()
                options = {"kernels": ["chunked"], "inner_backend": "eager"}
                ours = torch.compile(written, backend="attn_fuse", options=options)
                several = {"eager": written, "chunked": ours, "flash": flash}
                found = distances(several, mean, tokens, arguments.seeds, written, dtype)
                found.pop("bias")
                over = {name: max(of[name] / of["eager"] for of in found.values()) for name in ("chunked", "flash")}
                eager = max(of["eager"] for of in found.values())
                rows.append({"dtype": str(dtype).removeprefix("torch."), "mean": mean, "tokens": tokens,
                             "eager": eager, **over})  # fmt: skip
    shown = [
        [row["dtype"], f"{row['mean']:g}", str(row["tokens"]), f"{row['eager']:.1e}"]
        + [f"{row[name]:.2f}" for name in ("chunked", "flash")]
        for row in rows
    ]
    print(table(["dtype", "mean", "tokens", "eager from float64", "chunked / eager", "torch's flash / eager"], shown))
    print(store("common-part", torch.device("cpu"), {"seeds": arguments.seeds, "rows": rows}))


if __name__ == "__main__":
    main()
