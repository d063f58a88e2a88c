"""Where `chunked` beats the attention as written, on what SDPA's kernels do not take on a CPU.

Dropout in training, biases with a gradient, softcaps, sinks, value_dim other than head_dim, windows. The rows go to
attn_fuse/kernels/evidence_DEVICE_chunked.json, beside those of crossover.py.
"""

from __future__ import annotations

from attn_fuse.bench import grid
from attn_fuse.kernels.case import Case
from crossover import measure_all, parser
from harness import ROOT

LENGTHS = (128, 512, 1024, 2048)


def is_beyond_sdpa(case: Case) -> bool:
    odd = case.function or case.dropout or case.sink or case.bias == "gradient" or case.value_dim != case.head_dim
    return odd or case.mask in ("window", "documents")


def main() -> None:
    args = parser(__doc__).parse_args()
    device = args.device.type
    wanted = [case for case in grid(device, args.lengths or LENGTHS, args.heads) if is_beyond_sdpa(case)][: args.most]
    args.kernels = args.kernels or ["chunked"]
    measure_all(wanted, args.out or ROOT / "attn_fuse" / "kernels" / f"evidence_{device}_chunked.json", args)


if __name__ == "__main__":
    main()
