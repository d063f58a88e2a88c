"""One decode step of attention over a long cache on CUDA: the bytes of keys and values read in a second.

    python benchmarks/decode.py [--quick]

A query for each of 32 heads, 8 key heads of 128, bfloat16: triton_decode beside torch's own SDPA, each of its backends
that takes the shape, and the attention as written under Inductor, all in one run, interleaved. "static" is a cache of
32k of which only kv_len keys are visible, as a mask says. The caches are taken in turn, so that none is found in L2.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import harness
from attn_fuse.kernels.score.program import ScoreProgram

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CAPACITY = 32 * 1024
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip
# Beyond the L2 of any device there is, and never less than two caches.
L2_BYTES, FEWEST = 256 << 20, 2


@dataclass(frozen=True)
class Shape:
    """static: whether the cache is longer than the kv_len keys that are visible."""

    batch: int
    kv_len: int
    static: bool

    @property
    def bytes(self) -> int:
        """Of the visible keys and values, which are nearly all that has to be read."""
        return 2 * self.batch * KV_HEADS * self.kv_len * HEAD_DIM * 2

    @property
    def length(self) -> int:
        return CAPACITY if self.static else self.kv_len

    def __str__(self) -> str:
        return f"B {self.batch}, {self.kv_len // 1024}k" + (" of a static cache" if self.static else "")


def shapes(quick: bool) -> Iterator[Shape]:
    batches, lengths = ((1, 32), (4096,)) if quick else ((1, 8, 32), (1024, 4096, 16384, 32768))
    for static, batch, kv_len in itertools.product((False, True), batches, lengths):
        if not static or kv_len < CAPACITY:
            yield Shape(batch, kv_len, static)


@dataclass(frozen=True)
class Step:
    """query [B, H, 1, D], key and value [B, Hkv, length, D], position int64 [1] of the query."""

    query: Tensor
    key: Tensor
    value: Tensor
    position: Tensor

    @property
    def keep(self) -> Tensor:
        return torch.arange(self.key.shape[2], device=self.key.device)[None, :] <= self.position[:, None]


def step(shape: Shape) -> Step:
    query, key, value = (
        torch.randn(shape.batch, heads, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for heads, length in ((HEADS, 1), (KV_HEADS, shape.length), (KV_HEADS, shape.length))
    )
    return Step(query, key, value, torch.tensor([shape.kv_len - 1], device="cuda"))


def as_written(s: Step, static: bool) -> Tensor:
    groups = s.query.shape[1] // s.key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (s.key, s.value))
    scores = (s.query @ key.transpose(-2, -1)).float() * HEAD_DIM**-0.5
    if static:
        scores = scores.masked_fill(~s.keep, float("-inf"))
    return scores.softmax(-1).to(value.dtype) @ value


def sdpa(s: Step, static: bool, backend: SDPBackend | None = None) -> Tensor:
    def call() -> Tensor:
        mask = s.keep if static else None
        return F.scaled_dot_product_attention(s.query, s.key, s.value, attn_mask=mask, enable_gqa=True)

    if backend is None:
        return call()
    with sdpa_kernel(backend):
        return call()


SCALED = ("mul", ("score",), ("const", HEAD_DIM**-0.5))
SEEN = ("le", ("j",), ("gather", 0, ("i",)))
PROGRAMS = {
    False: ScoreProgram(SCALED).dumps(),
    True: ScoreProgram(("where", SEEN, SCALED, ("const", "-inf")), visible=SEEN).dumps(),
}


def ours(s: Step, static: bool) -> Tensor:
    from attn_fuse.kernels.triton.decode.op import decode

    return decode(s.query, s.key, s.value, [s.position] if static else [], [], PROGRAMS[static])


def candidates(shape: Shape) -> dict[str, Callable[[Step], Tensor]]:
    written = torch.compile(as_written, dynamic=False)
    found: dict[str, Callable[[Step], Tensor]] = {
        "triton_decode": functools.partial(ours, static=shape.static),
        "sdpa": functools.partial(sdpa, static=shape.static),
        "as written": functools.partial(written, static=shape.static),
    }
    for name, backend in BACKENDS.items():
        found[f"sdpa {name}"] = functools.partial(sdpa, static=shape.static, backend=backend)
    return found


def measured(shape: Shape) -> dict[str, Any]:
    """Times by name, and why a candidate has none. What is off from float32 by more than rounding is no candidate."""
    whole = 2 * shape.batch * KV_HEADS * shape.length * HEAD_DIM * 2
    turns = [step(shape) for _ in range(max(FEWEST, -(-L2_BYTES // whole)))]
    first = turns[0]
    exact = as_written(Step(first.query.float(), first.key.float(), first.value.float(), first.position), shape.static)
    graphs, failed = {}, {}
    for name, call in candidates(shape).items():
        try:
            with torch.inference_mode():
                error = (call(first).float() - exact).abs().max().item()
                if not error <= 0.02 * exact.abs().max().item():
                    raise ValueError(f"off by {error:.3g}")
                graphs[name] = recorded(call, turns)
        except Exception as problem:
            failed[name] = str(problem).partition("\n")[0]
    times = harness.interleaved({name: graph.replay for name, graph in graphs.items()}, torch.device("cuda"), seconds=8)
    return {
        "shape": str(shape),
        "times": {name: time.median / len(turns) for name, time in times.items()},
        "gb_per_s": {name: shape.bytes / 1e9 / (time.median / len(turns)) for name, time in times.items()},
        "failed": failed,
    }


def recorded(call: Callable[[Step], Tensor], turns: list[Step]) -> torch.cuda.CUDAGraph:
    """One call for each of `turns`, as a decode loop is run, so that the launches cost nothing on the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for turn in turns:
            call(turn)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in turns:
            call(turn)
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two batches and one length")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/decode.py: torch sees no CUDA device")
    torch.manual_seed(0)
    rows = []
    names = [*candidates(Shape(1, 1024, False))]
    for shape in shapes(arguments.quick):
        row = measured(shape)
        rows.append(row)
        print(shape, {name: f"{row['gb_per_s'][name]:.0f}" for name in row["gb_per_s"]}, flush=True)
        torch.cuda.empty_cache()
    cells = [
        [row["shape"], *(f"{row['gb_per_s'][n]:.0f}" if n in row["gb_per_s"] else "-" for n in names)] for row in rows
    ]
    print(harness.table(["GB/s", *names], cells))
    print(harness.store("decode", torch.device("cuda"), {"rows": rows}))


if __name__ == "__main__":
    main()
