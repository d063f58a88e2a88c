"""Compiles the Hopper kernels for sm_90a, without a GPU, and prints what came of each as one line of JSON.

    python tests/triton/hopper_compile.py [NAME ...]

A process of its own: Triton's interpreter cannot be on here, and a compiler pass that fails may end the process.
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
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attn_fuse.kernels.score_program import ScoreProgram
from attn_fuse.kernels.triton import hopper_kernels, hopper_launch
from tests.triton.messages import mismatches

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
COUNTED = ("HGMMA", "UTMALDG", "LDL", "STL")
KERNELS = {
    "forward": hopper_kernels.forward_kernel,
    "key_value": hopper_kernels.key_value_kernel,
    "query": hopper_kernels.query_kernel,
}


SOFTCAP = 50.0
S, Q, K = ["score"], ["i"], ["j"]
CAPPED = ["mul", ["tanh", ["mul", S, ["const", 0.125 / SOFTCAP]]], ["const", SOFTCAP]]
CAUSAL = ["le", K, Q]


def hidden(condition: list[Any], tree: list[Any]) -> list[Any]:
    return ["where", condition, tree, ["const", -math.inf]]


# None: scaled, under a causal mask, which the kernels know by themselves.
PROGRAMS: dict[str, tuple[ScoreProgram | None, tuple[Tensor, ...]]] = {
    "causal": (None, ()),
    "softcap": (ScoreProgram(hidden(CAUSAL, CAPPED), upper=["const", 0]), ()),
    "alibi": (ScoreProgram(hidden(CAUSAL, ["add", S, ["mul", ["sub", K, Q], ["const", 0.1]]]), upper=["const", 0]), ()),
    "bias": (ScoreProgram(["add", ["mul", S, ["const", 0.1]], ["input", 0]]), (torch.zeros(1, 8, 999, 999),)),
    "documents": (
        ScoreProgram(hidden(["eq", ["input", 0], ["input", 1]], S)),
        (torch.zeros(2, 1, 999, 1, dtype=torch.int64), torch.zeros(2, 1, 1, 999, dtype=torch.int64)),
    ),
}
TYPES = {torch.float32: "*fp32", torch.int64: "*i64"}


@dataclass(frozen=True)
class Case:
    kernel: str
    dim: int
    program: str = "causal"

    @property
    def name(self) -> str:
        return f"{self.kernel}-{self.dim}-{self.program}"


def cases() -> Iterator[Case]:
    for kernel, dim in hopper_launch.BLOCKS:
        yield from (Case(kernel, dim, name) for name in PROGRAMS if name == "causal" or dim == 128)


def compiled(case: Case) -> dict[str, Any]:
    kernel = KERNELS[case.kernel]
    program, tensors = PROGRAMS[case.program]
    score = hopper_launch.score_of((program or ScoreProgram(S)).dumps(), tensors, [], 0.0 if program else 1.0)
    blocks = hopper_launch.blocks_of(case.kernel, case.dim, score)
    constants = {
        "HEAD_DIM": case.dim, "VALUE_DIM": case.dim, "VALUE_BLOCK": case.dim, "HEAD_BLOCK": case.dim,
        "BLOCK_M": blocks.queries, "BLOCK_N": blocks.keys, "RAGGED": True,
        **score.constants(backward=True), "MASKED": True,
    }  # fmt: skip
    lengths = {"query": blocks.queries, "grad_out": blocks.queries, "key": blocks.keys, "value": blocks.keys}
    signature: dict[str, Any] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in lengths:
            signature[name] = f"tensordesc<bf16[1, 1, {lengths[name]}, {case.dim}]>"
        elif name in ("lse", "delta"):
            signature[name] = f"tensordesc<fp32[1, 1, {blocks.queries}]>"
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name == "lse_ptr" else "*bf16"
        elif name == "reads":
            signature[name] = tuple(TYPES[x.dtype] for x in tensors), ("i32",) * len(score.reads[1]), ()
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    # As at run time: pointers and steps are multiples of 16.
    aligned = [n for n, name in enumerate(signature) if name.endswith(("_ptr", "_b", "_h", "_i", "_j"))]
    source = ASTSource(
        kernel,
        signature,
        {name: value for name, value in constants.items() if name in signature},
        {(n,): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    described = [name for name, kind in signature.items() if str(kind).startswith("tensordesc")]
    boxes = {name: meta["block_size"] for name, meta in zip(described, binary.metadata.tensordesc_meta, strict=True)}
    messages, wrong = mismatches(binary.asm["ttgir"], boxes)
    about = {"descriptors": len(described), "messages": messages, "wrong": wrong}
    return {"name": case.name, "shared": binary.metadata.shared} | about | _measured(binary.asm["cubin"])


def _measured(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def dumped(option: str) -> str:
            return subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout

        usage = re.search(r"REG:(\d+) STACK:(\d+)", dumped("-res-usage"))
        code = dumped("-sass")
    assert usage is not None
    counted = collections.Counter(re.findall(rf"\b({'|'.join(COUNTED)})\b", code))
    return {"registers": int(usage[1]), "stack": int(usage[2]), **{name: counted[name] for name in COUNTED}}


def main(names: list[str]) -> None:
    for case in cases():
        if not names or case.name in names:
            print(json.dumps(compiled(case)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
