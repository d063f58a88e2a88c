"""Compiles the flash kernels for any device, and prints the properties of each as one line of JSON.

    python tests/triton/flash_compile.py CAPABILITY DTYPE HEAD_DIM [CASE [VALUE_DIM]]

CASE: one of PROGRAMS, "plain" a causal mask and a scale, "dropout" and "grouped" the same with dropout, or with two
heads to a key head, "padded" with a mask that hides keys unless a query would see none; or one of `chunked_cases`,
grouped, and "everything" with dropout.

The kernels are launched as usual, with a driver that only names the device. This runs in a process of its own, because
Triton's interpreter must be off, and a failing compiler pass may end the process.
"""

from __future__ import annotations

import collections
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.triton.assembled import misdescribed
from attn_fuse.kernels.triton.flash import backward as flash_backward
from attn_fuse.kernels.triton.flash import facts as flash_facts
from attn_fuse.kernels.triton.flash import forward as flash_forward
from attn_fuse.kernels.triton.flash import hopper, hopper_backward, spans_kernel
from attn_fuse.kernels.triton.flash import launch as flash
from attn_fuse.kernels.triton.flash.bulk import Bulk
from attn_fuse.kernels.triton.flash.configs import Config, together_or_apart
from attn_fuse.kernels.triton.flash.spans import spans
from tests.graph.chunked_cases import CASE, CAUSAL, S, Sizes, const, where
from tests.triton.sass import loops

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
KERNELS = {
    "forward": flash_forward.forward,
    "bulk_forward": hopper.bulk_forward,
    "bulk_query": hopper_backward.bulk_query,
    "statistics": flash_backward.statistics,
    "query": flash_backward.backward_query,
    "key_value": flash_backward.backward_key_value,
    "input": flash_backward.backward_input,
    "seen": spans_kernel.seen,
}
SCALED = ["mul", S, const(0.125)]
PLAIN = ScoreProgram(where(CAUSAL, SCALED), upper=["number", 0])
SEEN = ["and", CAUSAL, ["input", 0]]
ADDED = ["add", SCALED, where(SEEN, const(0.0), torch.finfo(torch.float32).min)]
PADDED = ScoreProgram(ADDED, visible=SEEN, hides_only_if_others_seen=True)
BIASED = ["add", SCALED, ["input", 0]]
CAPPED = ["mul", const(30.0), ["tanh", ["div", SCALED, const(30.0)]]]
SLOPED = ["add", SCALED, ["mul", ["input", 0], ["sub", ["j"], ["i"]]]]
# Each with the shape of its input.
PROGRAMS: dict[str, tuple[ScoreProgram, tuple[int, ...] | None]] = {
    "plain": (PLAIN, None),
    "dropout": (PLAIN, None),
    "grouped": (PLAIN, None),
    "padded": (PADDED, (2, 1, 1, 1024)),
    "dense bias": (ScoreProgram(BIASED), (1, 4, 1024, 1024)),
    "own bias": (ScoreProgram(BIASED), (2, 4, 1024, 1024)),
    "causal bias": (ScoreProgram(where(CAUSAL, BIASED), upper=["number", 0]), (1, 4, 1024, 1024)),
    "mask": (ScoreProgram(where(["input", 0], SCALED)), (2, 1, 1024, 1024)),
    "softcap": (ScoreProgram(where(CAUSAL, CAPPED), upper=["number", 0]), None),
    "slopes": (ScoreProgram(where(CAUSAL, SLOPED), upper=["number", 0]), (1, 4, 1, 1)),
}
# The dtype of the input, if it is not that of the operands.
READ = {"padded": torch.bool, "mask": torch.bool, "slopes": torch.float32}
# The max bytes of shared memory of a program.
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 232448, 100: 232448}
SEED = torch.zeros(1, dtype=torch.int64)


class NoDevice:
    """The part of a driver that compiling needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def facts(compiled: Any, tile: Config | Bulk) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([CUOBJDUMP, how, file.name], capture_output=True, text=True, check=True).stdout
            for how in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    counted = collections.Counter(re.findall(r"\b(HGMMA|HMMA|UTCHMMA|UTMALDG|LDL|STL|ATOM|RED)\b", code))
    shared = compiled.metadata.shared
    known: dict[str, Any] = {"registers": int(found[1]), "stack": int(found[2]), "shared": shared, **counted}
    known["misdescribed"] = misdescribed(code)
    whole = loops(code)[:1]
    if isinstance(tile, Bulk):
        # Each of the two warp groups has its own rows and loops.
        elements = tile.block_m * tile.block_n / 256
    else:
        elements = tile.block_m * tile.block_n / (32 * tile.num_warps)
    for loop in whole:
        known["per_element"] = loop.instructions / elements
        known["bound_by_issue"] = loop.bound_by_issue
        known["in_flight"] = loop.in_flight
        known["meeting"] = loop.meeting
        known["spills"] = loop.counts["LDL"] + loop.counts["STL"]
        known["loop"] = {name: loop.counts[name] for name in ("LDG", "SHFL", "BAR", "HGMMA", "WARPGROUP")}
    return known


def only_compile(kernel: Any, found: list[Any], most_shared: int) -> None:
    launch = kernel.run

    def run(*args: Any, grid: Any, warmup: bool, **how: Any) -> None:
        if warmup:  # the launch itself follows
            compiled = launch(*args, grid=grid, warmup=True, **how)
            if compiled.metadata.shared > most_shared:
                raise OutOfResources(compiled.metadata.shared, most_shared, "shared memory")
            found.append(compiled)

    kernel.run = run


def main(capability: int, dtype: torch.dtype, head_dim: int, name: str = "plain", value_dim: str = "") -> None:
    driver.set_active(NoDevice(capability))
    flash_facts._capability = lambda device: capability // 10  # type: ignore[assignment]
    made: dict[str, list[Any]] = {kernel: [] for kernel in KERNELS}
    for kernel, function in KERNELS.items():
        only_compile(function, made[kernel], SHARED[capability])
    # Kernels are compiled differently if no heads share keys.
    kv_heads = 4 if name in PROGRAMS and name != "grouped" else 2
    s = Sizes(2, 4, kv_heads, 1024, 1024, head_dim, int(value_dim or head_dim))
    if name in PROGRAMS:
        program, shape = PROGRAMS[name]
        inputs, numbers = [] if shape is None else [torch.empty(shape, dtype=READ.get(name, dtype))], [0]
    else:
        inputs, numbers, program = CASE[name].inputs(s), CASE[name].numbers(s), CASE[name].program
    shapes = (s.q_len, s.heads, s.head_dim), (s.kv_len, s.kv_heads, s.head_dim), (s.kv_len, s.kv_heads, s.value_dim)
    query, key, value = (torch.empty(s.batch, *shape, dtype=dtype).transpose(1, 2) for shape in shapes)
    text, tables = program.dumps(), (None, None)
    if program.visible is not None:
        tables = spans(inputs, numbers, s.batch, s.heads, s.q_len, s.kv_len, text, query.device, True)
    dropout = (SEED, 0.1) if name in ("dropout", "everything") else (None, 0.0)
    given = Operands(query, key, value, inputs, numbers, *dropout, text)
    known = flash_facts.call_facts(given, tables)
    outputs = flash.attend(given, tables)
    flash.attend_backward(given, tables, outputs, outputs[0], [True] * len(inputs))
    in_bulk = {f"bulk_{kernel}": tile for kernel, tile in known.bulk.items()}
    if known.bulk:
        for kernel in [*known.bulk]:
            known.give_up(kernel, RuntimeError("the others are wanted, too"))
        for kernel, found in made.items():
            if "bulk" not in kernel and kernel != "seen":
                found.clear()
        flash.attend(given, tables)
        flash.attend_backward(given, tables, outputs, outputs[0], [True] * len(inputs))
    for kernel, several in made.items():
        # One function computes the gradients of key and value. For wide rows it is compiled once for each.
        names = together_or_apart(dtype, known.widths) if kernel == "key_value" else [kernel] * len(several)
        for name, compiled in zip(names, several, strict=True):
            tile = in_bulk.get(name) or known.configs[name if name in known.configs else "query"]
            print(json.dumps({"kernel": name, **facts(compiled, tile)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
