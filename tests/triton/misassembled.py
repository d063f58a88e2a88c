"""A program that ptxas 12.8 compiles to a wrong kernel for sm_90, launched without a GPU.

    PYTHONPATH=.:benchmarks TRITON_CACHE_DIR=FOLDER/triton python tests/triton/misassembled.py FOLDER

Prints the compiled kernels and the tiles that run as a line of JSON. On an H100 such a kernel read beyond shared memory
or gave a wrong sum.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import emulated  # isort: skip  # before all that imports attn_fuse

import torch

import gpu_tasks
from attn_fuse.kernels.triton.assembled import misdescribed
from attn_fuse.kernels.triton.flash import facts
from tests.grid.case import Case
from tests.triton import device

FOLDER = Path(sys.argv[1])
ROW = {
    "positions": "window", "visible": "a tensor for all batches", "bias": "learned",
    "function": "temperature of each head", "sink": "of each head", "factor": "of the keys", "empty rows": "mean",
    "dropout": "0.25", "heads": "4 of 1", "dims": "64, 8", "lengths": "127, 251", "batch": "1", "layout": "packed",
    "gradient": "none", "dtype": "float16",
}  # fmt: skip


def main() -> None:
    emulated.begin(device.build(FOLDER / "driver"))
    gpu_tasks.checked("triton_flash", Case.of(ROW), torch.device("cpu"))
    from triton import knobs

    wrong, compiled = 0, [*(FOLDER / "triton").glob("*/forward.cubin")]
    for cubin in compiled:
        command = [knobs.nvidia.cuobjdump.path, "-sass", cubin]
        wrong += bool(misdescribed(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    tiles = sorted({of.configs["forward"].block_m for of in facts._known.values()})
    print(json.dumps({"compiled": len(compiled), "wrong": wrong, "rows of a tile": tiles}))


if __name__ == "__main__":
    main()
