"""What a call of our Triton kernels takes in Python, up to a driver that runs nothing: `python benchmarks/host.py`.

No GPU is needed, and none is used (benchmarks/emulated.py). A causal attention of two sequences of 1024, 8 heads of 64
in bfloat16.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import emulated  # isort: skip  # before all that imports attn_fuse

import torch

from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.program import ScoreProgram
from harness import interleaved, store, table
from tests.graph.chunked_cases import CAUSAL, S, const, where
from tests.triton import device

PROGRAM = ScoreProgram(where(CAUSAL, ["mul", S, const(0.125)]), upper=["number", 0]).dumps()


def calls() -> dict[str, Callable[[], object]]:
    from attn_fuse.kernels.triton.flash import launch as flash

    query, key, value = (torch.empty(2, 1024, 8, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    given = Operands(query, key, value, [], [0], None, 0.0, PROGRAM)
    outputs = flash.attend(given)
    back = (given, (None, None), outputs, outputs[0], [])
    return {
        "triton_flash, forward": functools.partial(flash.attend, given),
        "triton_flash, backward": functools.partial(flash.attend_backward, *back),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        emulated.begin(device.build(Path(folder)))
        timings = interleaved(calls(), torch.device("cpu"), rounds=200, shortest=2e-3)
    print(table(["", "a call"], [[name, str(timing)] for name, timing in timings.items()]))
    print(store("host", torch.device("cpu"), {"seconds": timings}))


if __name__ == "__main__":
    main()
