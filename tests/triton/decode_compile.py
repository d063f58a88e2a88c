"""Compiles the kernels of triton_decode as its operator would launch them, without a GPU; one line of JSON for each.

    python tests/triton/decode_compile.py [sm_80 | sm_90 | sm_100 | growing]

A process of its own: Triton's interpreter cannot be on here, and a compiler pass that fails may end the process.
"growing" compiles nothing: it prints how many kernels a cache would need that grows by one key at a time.
"""

from __future__ import annotations

import collections
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from attn_fuse.expression.nodes import Const, Select
from attn_fuse.kernels.triton.decode import launch as decode
from tests.graph.chunked_cases import CASE, Sizes, drawn

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Reads of 16 bytes, into registers and past them; of any width past them; tensor cores; spills.
COUNTED = {
    "wide_reads": r"\bLDG\.E\.128|\bLDGSTS\.E\.BYPASS\.128", "async_wide": r"\bLDGSTS\.E\.BYPASS\.128",
    "async": r"\bLDGSTS\b", "tensor": r"\b(?:HMMA|HGMMA)\b|\bUTCHMMA", "spills": r"\b(?:LDL|STL)\b",
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """groups: query heads of one key head. softly: keys are hidden by a finite fill."""

    case: str
    groups: int
    q_len: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    softly: bool = False

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        case = f"{self.case} softly" if self.softly else self.case
        return f"{case}, {self.groups} x {self.q_len}, {self.head_dim}/{self.value_dim}, {dtype}"


SHAPES = [
    Shape("causal", 4, 1, 128, 128, torch.bfloat16),
    Shape("causal", 4, 8, 128, 128, torch.bfloat16),
    Shape("causal", 8, 16, 128, 128, torch.bfloat16),
    Shape("everything", 4, 1, 128, 128, torch.bfloat16),
    Shape("key padding", 4, 1, 128, 128, torch.float16),
    Shape("key padding", 4, 1, 128, 128, torch.bfloat16, softly=True),
    Shape("causal", 1, 1, 64, 64, torch.float16),
    Shape("causal", 4, 8, 256, 256, torch.bfloat16),
    Shape("causal", 4, 1, 40, 24, torch.bfloat16),
    Shape("causal", 4, 8, 64, 64, torch.float32),
    Shape("causal", 4, 1, 128, 128, torch.float32),
    Shape("causal", 4, 1, 256, 256, torch.float32),
]


@dataclass(frozen=True)
class Launch:
    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def specialized(self, target: GPUTarget) -> tuple[Any, Any, Any]:
        """By which Triton tells one kernel from another; and what it compiles it from."""
        backend = make_backend(target)
        binder = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, kinds, options = binder(*self.arguments, debug=False, **self.constants)
        options, signature, constants, attributes = self.kernel._pack_args(
            backend, self.constants, bound, kinds, options
        )
        return str(kinds), ASTSource(self.kernel, signature, constants, attributes), options.__dict__


def launches(shape: Shape, kv_len: int, capacity: int = 0) -> list[Launch]:
    """What `attend` launches. capacity: of the cache that key and value are the first part of."""
    found: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def warmup(self, *_: Any, **__: Any) -> None:
            """Nothing is compiled, as in the interpreter."""

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **constants: found.append(Launch(self.kernel, args, constants))

    case = CASE[shape.case]
    s = Sizes(2, 2 * shape.groups, 2, shape.q_len, max(kv_len, capacity), shape.head_dim, shape.value_dim)
    query, key, value, *inputs = drawn(case, s, shape.dtype)
    # The size of a mask's tensor does not show in the code, so those of the whole cache will do.
    program, numbers = case.program, [kv_len - shape.q_len] if case.numbers(s) else []
    if shape.case == "key padding":
        seen, score = program.score.cond, program.score.a
        fill = Const(torch.finfo(torch.float32).min if shape.softly else -math.inf)
        program = type(program)(Select(seen, score, fill), visible=seen, hides_only_if_others_seen=shape.softly)
    kernels = decode.attend_split, decode.join_splits
    decode.attend_split, decode.join_splits = map(Recorder, kernels)  # type: ignore[assignment]
    try:
        decode.attend(query, key[:, :, :kv_len], value[:, :, :kv_len], inputs, numbers, program.dumps(), 3)
    finally:
        decode.attend_split, decode.join_splits = kernels
    return found


def compiled(launch: Launch, target: GPUTarget) -> dict[str, Any]:
    _, source, options = launch.specialized(target)
    binary = triton.compile(source, target=target, options=options)
    return {"shared": binary.metadata.shared, **_measured(binary.asm["cubin"])}


def _measured(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def dumped(option: str) -> str:
            return subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout

        usage, code = re.search(r"REG:(\d+) STACK:(\d+)", dumped("-res-usage")), dumped("-sass")
    assert usage is not None
    counts = {name: len(re.findall(pattern, code)) for name, pattern in COUNTED.items()}
    return {"registers": int(usage[1]), "stack": int(usage[2]), **counts}


def growing() -> Iterator[dict[str, Any]]:
    target = GPUTarget("cuda", 90, 32)
    for capacity in (0, 256):
        kinds: collections.Counter[tuple[str, str]] = collections.Counter()
        for kv_len in range(90, 170):
            for launch in launches(SHAPES[0], kv_len, capacity):
                kinds[launch.kernel.__name__, launch.specialized(target)[0]] += 1
        yield {"capacity": capacity, "kernels": len(kinds)}


def main(what: str) -> None:
    if what == "growing":
        for line in growing():
            print(json.dumps(line), flush=True)
        return
    target = GPUTarget("cuda", int(what.removeprefix("sm_")), 32)
    for shape in SHAPES:
        for launch in launches(shape, 1024):
            print(json.dumps({"name": shape.name, "kernel": launch.kernel.__name__, **compiled(launch, target)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
