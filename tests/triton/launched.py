"""Launches the flash kernels on a pretended GPU, and prints the launches as lines of JSON.

    python -m tests.triton.launched MODE...    # in the environment that `device.pretend` gives

MODE: shapes, all, lengths, growing, bulk or kept. `kept` changes settings of the process, so it is the last.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from tests.triton.device import launches, threads, use

use()

from attn_fuse.kernels.operands import Operands  # noqa: E402
from attn_fuse.kernels.triton.assembled import MisassembledError  # noqa: E402
from attn_fuse.kernels.triton.flash import backward as flash_backward  # noqa: E402
from attn_fuse.kernels.triton.flash import facts as flash_facts  # noqa: E402
from attn_fuse.kernels.triton.flash import forward as flash_forward  # noqa: E402
from attn_fuse.kernels.triton.flash import launch as flash  # noqa: E402
from tests.graph.chunked_cases import CASE, Sizes  # noqa: E402
from tests.triton.flash_compile import KERNELS, PLAIN, SEED  # noqa: E402

LOG = Path(os.environ["FAKE_CUDA_LOG"]).parent
SHAPES = {
    "usual": Sizes(2, 4, 4, 256, 256, 64, 64),
    "grouped": Sizes(2, 4, 2, 256, 256, 64, 64),
    "ragged": Sizes(1, 4, 4, 77, 131, 64, 64),
    "one query": Sizes(2, 4, 4, 1, 130, 64, 64),
    "no keys": Sizes(2, 4, 4, 64, 0, 64, 64),
    "no queries": Sizes(2, 4, 4, 0, 64, 64, 64),
    "no batch": Sizes(0, 4, 4, 64, 64, 64, 64),
}


HALF = torch.bfloat16


def operands(s: Sizes, dtype: torch.dtype = HALF) -> list[Tensor]:
    widths = ((s.q_len, s.heads, s.head_dim), (s.kv_len, s.kv_heads, s.head_dim), (s.kv_len, s.kv_heads, s.value_dim))
    return [torch.empty(s.batch, n, h, d, dtype=dtype).transpose(1, 2) for n, h, d in widths]


def step(s: Sizes, name: str, dtype: torch.dtype = HALF) -> None:
    """Run forward and backward of one program."""
    query, key, value = operands(s, dtype)
    simple = name in ("plain", "dropout")
    inputs = [] if simple else CASE[name].inputs(s)
    program, numbers = (PLAIN, [s.kv_len - s.q_len]) if simple else (CASE[name].program, CASE[name].numbers(s))
    dropout = (SEED, 0.1) if name in ("dropout", "everything") else (None, 0.0)
    given = Operands(query, key, value, inputs, numbers, *dropout, program.dumps())
    outputs = flash.attend(given)
    wanted = [x.is_floating_point() for x in inputs]
    flash.attend_backward(given, (None, None), outputs, outputs[0], wanted)


def reported(shape: str, program: str, run: Callable[..., None], *args: Any) -> None:
    """Call `run`, and print its launches."""
    launched = len(launches(LOG))
    run(*args)
    print(json.dumps({"shape": shape, "program": program, "launched": launches(LOG)[launched:]}), flush=True)


def shapes() -> None:
    for shape, s in SHAPES.items():
        for name in ("plain", "dropout", "everything") if shape == "usual" else ("plain",):
            reported(shape, name, step, s, name)


def everything() -> None:
    """Launch all widths, dtypes and tables of tiles."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim, value_dim in ((16, 16), (40, 24), (64, 64), (80, 80), (64, 128), (128, 128), (256, 256)):
            about = f"{dtype} {head_dim} {value_dim}"
            for shape, s in SHAPES.items():
                of = dataclasses.replace(s, head_dim=head_dim, value_dim=value_dim)
                reported(shape, f"plain {about}", step, of, "plain", dtype)
            of = dataclasses.replace(SHAPES["grouped"], head_dim=head_dim, value_dim=value_dim)
            if dtype is HALF and head_dim == value_dim and head_dim % 64 == 0:
                for name in ("dropout", "softcap", "bias", "documents"):
                    reported("grouped", f"{name} {about}", step, of, name, dtype)


def lengths() -> None:
    """Launch calls of many lengths and bounds, for which few kernels are compiled."""
    for length in range(100, 164):
        step(Sizes(1, 4, 4, length, length + length % 3, 64, 64), "plain")
    kernels = (flash_forward.forward, flash_backward.backward_query, flash_backward.backward_key_value)
    for kernel in (*kernels, flash_backward.statistics):
        compiled(kernel)


def growing() -> None:
    """Launch one query and a growing KV cache, contiguous or part of a longer one."""
    query, cache = torch.empty(2, 8, 1, 64, dtype=HALF), torch.empty(2, 2, 256, 64, dtype=HALF)
    for kv_len in range(100, 164):
        for keys in (cache[:, :, :kv_len], cache[:, :, :kv_len].contiguous()):
            flash.attend(Operands(query, keys, keys, [], [kv_len - 1], None, 0.0, PLAIN.dumps()))
    compiled(flash_forward.forward)


def kept() -> None:
    """Launch calls of the same shapes that differ in program, alignment, tiles, or hooks of Triton."""
    shifted = torch.empty(2 * 4 * 256 * 64 + 1, dtype=HALF)[1:].view(2, 256, 4, 64).transpose(1, 2)
    query, key, value = operands(SHAPES["usual"])

    def attended(name: str, query: Tensor = query, program: str = PLAIN.dumps()) -> None:
        before, launched = count(flash_forward.forward), len(launches(LOG))
        for _ in range(2):
            flash.attend(Operands(query, key, value, [], [0], None, 0.0, program))
        new = [programs for _, programs in launches(LOG)[launched:]]
        line = {"change": name, "compiled": count(flash_forward.forward) - before, "programs": new}
        print(json.dumps(line), flush=True)

    attended("first")
    attended("shifted", shifted)
    attended("program", program=dataclasses.replace(PLAIN, upper=None).dumps())
    for facts in flash_facts._known.values():
        facts.give_up("forward", MisassembledError("tried"))
    attended("tiles")
    attended("tiles, shifted", shifted)
    told: list[Any] = []
    knobs.runtime.launch_enter_hook.add(lambda about: told.append(about.get()["name"]))
    attended("hook")
    flash_facts.KEPT = flash.KEPT = 3
    for length in range(1, 9):
        step(dataclasses.replace(SHAPES["ragged"], q_len=length), "plain")
    facts = [*flash_facts._known.values()][-1]
    for which in range(8):
        flash._call(Operands(query, key, value, [], [0], None, 0.0, ""), (None, None), value, facts, how=which)
    print(json.dumps({"told": told, "facts": len(flash_facts._known), "launches": len(facts.launches)}))


def bulk() -> None:
    """Launch calls for bulk copies with misaligned and empty tensors."""

    def attended(what: str, query: Tensor, key: Tensor, value: Tensor, name: str = "plain") -> None:
        before = len(launches(LOG))
        program = PLAIN if name == "plain" else CASE[name].program
        flash.attend(Operands(query, key, value, [], [0], None, 0.0, program.dumps()))
        found = [(*launch, n) for launch, n in zip(launches(LOG)[before:], threads(LOG)[before:], strict=True)]
        print(json.dumps({"call": what, "launched": found}), flush=True)

    usual = Sizes(2, 4, 2, 256, 300, 128, 128)
    query, key, value, *_ = operands(usual)
    attended("first", query, key, value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        # Shifted by 8 bytes.
        shifted = torch.empty(x.numel() + 4, dtype=x.dtype)[4:].as_strided(x.shape, x.stride(), 4)
        attended(f"{name} shifted", **{"query": query, "key": key, "value": value} | {name: shifted})
    attended("again", query, key, value)
    attended("rows of 130", *(torch.empty(*x.shape[:3], 130, dtype=x.dtype)[..., :128] for x in (query, key, value)))
    attended("no keys", *operands(dataclasses.replace(usual, kv_len=0)), name="sink")
    attended("no batch", *operands(dataclasses.replace(usual, batch=0)))


def count(kernel: Any) -> int:
    return len(kernel.device_caches[0][0])


def compiled(kernel: Any) -> None:
    """Print how often `kernel` was compiled."""
    print(json.dumps({"kernel": kernel.__name__, "compiled": count(kernel)}), flush=True)


def main(modes: Sequence[str]) -> None:
    runs = {"shapes": shapes, "all": everything, "lengths": lengths, "growing": growing, "bulk": bulk, "kept": kept}
    for mode in modes:
        print(json.dumps({"mode": mode}), flush=True)
        flash_facts._known.clear()
        for kernel in KERNELS.values():
            kernel.device_caches.clear()
        runs[mode]()


if __name__ == "__main__":
    main(sys.argv[1:])
