"""Where `chunked` beats the attention as written: what the kernel picker goes by where SDPA does not take it.

The same program is compiled by Inductor alone and by attn_fuse with `chunked`, and both run in turn: dropout in
training, a bias in training with and without a gradient of its own, a softcap. The rows go to
attn_fuse/kernels/evidence_DEVICE_chunked.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from harness import ROOT, interleaved, machine, table

HEAD_DIM = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One row of the table, without its times. beyond: what no kernel of SDPA's takes on the CPU."""

    dtype: str
    mask: str
    beyond: str
    training: bool
    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int = HEAD_DIM


def cases(args: argparse.Namespace) -> Iterator[Case]:
    kinds = (
        ("causal", "dropout", True), ("bias", "", True), ("bias", "gradient", True), ("causal", "function", False),
        ("causal", "function", True),
    )  # fmt: skip
    for dtype in args.dtypes:
        for mask, beyond, training in kinds:
            for length in args.lengths:
                yield Case(dtype, mask, beyond, training, args.batch, args.heads, length, length)


def program(case: Case) -> Callable[..., Tensor]:
    # The query scaled before the product: a form that Inductor's own patterns do not match.
    def written(q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> Tensor:
        scores = (q * 0.125) @ k.transpose(-2, -1)
        if case.beyond == "function":
            scores = 30.0 * torch.tanh(scores / 30.0)
        hidden = case.mask == "causal"
        scores = scores.masked_fill(extra == 0, float("-inf")) if hidden else scores + extra
        weights = torch.softmax(scores, -1)
        if case.beyond == "dropout":
            weights = F.dropout(weights, 0.1)
        return weights @ v

    return written


def inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPES[case.dtype], device=device)

    operands = [random(case.batch, case.heads, case.q_len, case.head_dim).requires_grad_(case.training) for _ in "qkv"]
    if case.mask == "causal":
        return *operands, torch.tril(torch.ones(case.q_len, case.kv_len, device=device))
    return *operands, random(1, case.heads, case.q_len, case.kv_len).requires_grad_(case.beyond == "gradient")


def runner(compiled: Callable[..., Tensor], case: Case, tensors: tuple[Tensor, ...]) -> Callable[[], Any]:
    if not case.training:

        def forward() -> Tensor:
            with torch.no_grad():
                return compiled(*tensors)

        return forward
    wanted = [t for t in tensors if t.requires_grad]
    gradient = torch.ones_like(tensors[0])
    return lambda: torch.autograd.grad(compiled(*tensors), wanted, gradient)


def measure(case: Case, args: argparse.Namespace) -> dict[str, float]:
    torch.compiler.reset()
    torch.manual_seed(0)
    tensors, written = inputs(case, args.device), program(case)
    counters.clear()
    as_written = runner(torch.compile(written, dynamic=False), case, tensors)
    expected = as_written()
    if counters["inductor"]["fuse_attention"]:
        raise AssertionError(f"Inductor's own patterns matched the written form: {case}")
    fused = torch.compile(written, backend="attn_fuse", dynamic=False, options={"kernels": ["chunked"], "strict": True})
    chunked = runner(fused, case, tensors)
    given = chunked()
    if case.beyond != "dropout":
        tolerance = 1e-3 if case.dtype == "float32" else 6e-2
        torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance)
    runners = {"as_written": as_written, "chunked": chunked}
    times = interleaved(runners, args.device, rounds=args.rounds, seconds=args.seconds)
    return {f"{name}_us": round(timing.median * 1e6, 1) for name, timing in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=6.0, help="of measuring, at most, for a case")
    args = parser.parse_args()
    started, rows = time.perf_counter(), []
    for case in cases(args):
        row = {"device": args.device.type, "torch": torch.__version__, **asdict(case)} | measure(case, args)
        rows.append(row)
        print(f"{time.perf_counter() - started:5.0f} s", *(f"{k}={v}" for k, v in row.items()), flush=True)
    path = ROOT / "attn_fuse" / "kernels" / f"evidence_{args.device.type}_chunked.json"
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(f'{{\n "machine": {json.dumps(machine(args.device))},\n "rows": [\n{lines}\n ]\n}}\n')
    ratios = [
        [f"{r['mask']} {r['beyond']} {'training' if r['training'] else 'inference'} {r['dtype']}", str(r["q_len"]),
         f"{r['chunked_us'] / r['as_written_us']:.2f}"]
        for r in rows
    ]  # fmt: skip
    print(table(["case", "length", "chunked / as written"], ratios))


if __name__ == "__main__":
    main()
