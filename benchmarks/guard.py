"""What the guard of mask buffers costs a call: 12 buffers of 1 x 1 x 1024 x 1024, untouched between calls.

python benchmarks/guard.py
"""

from __future__ import annotations

import argparse

import torch

from attn_fuse.guard import Guard, Proof
from attn_fuse.lift.closed_forms import closed_form
from harness import interleaved, seconds_in_words, store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buffers", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    arguments = parser.parse_args()
    device = torch.device("cpu")
    length = arguments.length
    buffers = [torch.tril(torch.ones(length, length)).view(1, 1, length, length) for _ in range(arguments.buffers)]
    form = closed_form(buffers[0])
    assert form is not None
    guard = Guard(tuple(Proof(n, form, f"buffer {n}") for n in range(len(buffers))), buffers)
    timing = interleaved({"guard": lambda: guard.holds(buffers)}, device, rounds=200, shortest=1e-3)["guard"]
    print(f"{len(buffers)} buffers: {timing} a call, {seconds_in_words(timing.median / len(buffers))} a buffer")
    print(store("guard", device, {"buffers": len(buffers), "length": length, "seconds": timing}))


if __name__ == "__main__":
    main()
