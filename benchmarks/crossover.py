"""Where a fused kernel beats the attention as written: the evidence that the kernel picker goes by.

Both sides are compiled by Inductor and run in turn: the scores, mask and softmax spelled out, in forms that Inductor's
own attention patterns do not match (checked), and `scaled_dot_product_attention` on the device's fused kernels. The
rows go to attn_fuse/kernels/evidence_DEVICE.json when all are there; until then they lie in build/, where --resume
finds them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import ROOT, OtherLoad, Timing, interleaved, machine, table

HEAD_DIM = 64
MASKS = ("none", "causal", "bool", "bias")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KERNELS = {
    "cpu": {"cpu_flash": SDPBackend.FLASH_ATTENTION},
    "cuda": {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "cuda_flash": SDPBackend.FLASH_ATTENTION,
        "cuda_efficient": SDPBackend.EFFICIENT_ATTENTION,
    },
}


@dataclass(frozen=True)
class Case:
    """One row of the table, without its times."""

    dtype: str
    mask: str
    training: bool
    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int = HEAD_DIM


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """All cases; those that tell most come first."""
    for batch in args.batches:
        for dtype in args.dtypes:
            for training in (False, True):
                for mask in MASKS:
                    for length in args.lengths if batch == 1 else args.batched_lengths:
                        yield Case(dtype, mask, training, batch, args.heads, length, length)
            for mask in ("none", "bool", "bias"):  # a single query sees every key: causal is no mask
                for length in args.decode_lengths:
                    yield Case(dtype, mask, False, batch, args.heads, 1, length)


# The forms below are ones that Inductor's patterns miss: the query scaled before the product, and masked_fill.
def written_none(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q * 0.125) @ k.transpose(-2, -1), -1) @ v


def written_causal(q: Tensor, k: Tensor, v: Tensor, lower: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * 0.125
    return torch.softmax(scores.masked_fill(lower == 0, float("-inf")), -1) @ v


def written_bool(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * 0.125
    return torch.softmax(scores.masked_fill(~keep, float("-inf")), -1) @ v


def written_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax((q * 0.125) @ k.transpose(-2, -1) + bias, -1) @ v


def fused_none(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def fused_causal(q: Tensor, k: Tensor, v: Tensor, lower: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def fused_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


WRITTEN: dict[str, Callable[..., Tensor]] = {
    "none": written_none,
    "causal": written_causal,
    "bool": written_bool,
    "bias": written_bias,
}
FUSED: dict[str, Callable[..., Tensor]] = {
    "none": fused_none,
    "causal": fused_causal,
    "bool": fused_mask,
    "bias": fused_mask,
}


def inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    dtype, batch, heads = DTYPES[case.dtype], case.batch, case.heads

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    query = random(batch, heads, case.q_len, case.head_dim).requires_grad_(case.training)
    key, value = (random(batch, heads, case.kv_len, case.head_dim).requires_grad_(case.training) for _ in range(2))
    shape = (case.q_len, case.kv_len)
    if case.mask == "causal":
        return query, key, value, torch.tril(torch.ones(shape, device=device)).view(1, 1, *shape)
    if case.mask == "bool":
        keep = torch.rand(batch, 1, *shape, device=device) < 0.8
        keep[..., 0] = True  # no row without a key
        return query, key, value, keep
    if case.mask == "bias":
        return query, key, value, random(1, heads, *shape)
    return query, key, value


def runner(function: Callable[..., Tensor], case: Case, tensors: tuple[Tensor, ...]) -> Callable[[], object]:
    compiled = torch.compile(function, dynamic=False)
    if not case.training:

        def forward() -> object:
            with torch.no_grad():
                return compiled(*tensors)

        return forward
    wanted = tensors[:3]
    gradient = torch.ones_like(tensors[0])
    return lambda: torch.autograd.grad(compiled(*tensors), wanted, gradient)


def pinned(function: Callable[..., Tensor], backend: SDPBackend) -> Callable[..., Tensor]:
    def on_backend(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return function(*tensors)

    return on_backend


def measure(case: Case, device: torch.device, args: argparse.Namespace) -> dict[str, Timing]:
    torch.compiler.reset()
    torch.manual_seed(0)
    tensors = inputs(case, device)
    counters.clear()
    written = runner(WRITTEN[case.mask], case, tensors)
    expected = written()
    if counters["inductor"]["fuse_attention"]:
        raise AssertionError(f"Inductor's own patterns matched the written form: {case}")
    runners = {"as_written": written}
    for name, backend in KERNELS[device.type].items():
        run = runner(pinned(FUSED[case.mask], backend), case, tensors)
        try:
            agree(run(), expected, case)
        except RuntimeError as error:  # the kernel does not take this case
            print(f"  {name}: {str(error).splitlines()[0]}")
            continue
        runners[name] = run
    for _ in range(args.tries):
        load = OtherLoad()
        times = interleaved(runners, device, rounds=args.rounds, seconds=args.seconds, shortest=args.shortest)
        if load.share() < 0.04:
            return times
        time.sleep(2)
    print("  the machine was busy with something else")
    return times


def agree(given: Any, expected: Any, case: Case) -> None:
    """Both sides compute the same, so that a time never stands for a wrong answer."""
    tolerance = 1e-3 if case.dtype == "float32" else 6e-2
    torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance)


def stored_rows(path: Path, head: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an interrupted run on this machine and these versions."""
    if not path.exists():
        return []
    stored = json.loads(path.read_text())
    same = all(stored["machine"].get(name) == head[name] for name in head if name not in ("date", "commit"))
    return stored["rows"] if same else []


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 768, 1024, 2048])
    parser.add_argument("--batched-lengths", type=int, nargs="+", default=[16, 64, 128, 256, 512])
    parser.add_argument("--decode-lengths", type=int, nargs="+", default=[64, 256, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1.5, help="of measuring, at most, for a case")
    parser.add_argument("--shortest", type=float, default=2e-3, help="seconds that one measurement lasts at least")
    parser.add_argument("--tries", type=int, default=10, help="at most, while other programs keep the machine busy")
    parser.add_argument("--out", type=Path, help="write here and not beside the kernels")
    parser.add_argument("--resume", action="store_true", help="keep the rows of an earlier run on this machine")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    path = args.out or ROOT / "attn_fuse" / "kernels" / f"evidence_{args.device.type}.json"
    part = ROOT / "build" / path.with_suffix(".part").name
    part.parent.mkdir(exist_ok=True)
    head, started = machine(args.device), time.perf_counter()
    rows = stored_rows(part, head) if args.resume else []
    known = {case_of(row) for row in rows}
    for case in cases(args):
        if case in known:
            continue
        times = measure(case, args.device, args)
        row = {"device": args.device.type, "torch": torch.__version__, **asdict(case)}
        row |= {f"{name}_us": round(timing.median * 1e6, 2) for name, timing in times.items()}
        rows.append(row)
        print(f"{time.perf_counter() - started:5.0f} s", *(f"{k}={v}" for k, v in row.items()), flush=True)
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        part.write_text(f'{{\n "machine": {json.dumps(head)},\n "rows": [\n{lines}\n ]\n}}\n')
    print(summary(rows, args.device))
    os.replace(part, path)
    print(f"{len(rows)} rows in {path}")


def case_of(row: dict[str, Any]) -> Case:
    return Case(**{field.name: row[field.name] for field in fields(Case)})


def summary(rows: list[dict[str, Any]], device: torch.device) -> str:
    """The best kernel's time over the time as written, by length."""
    lengths = sorted({(row["batch"], row["q_len"], row["kv_len"]) for row in rows})
    kinds = sorted({(row["mask"], row["training"], row["dtype"]) for row in rows})
    names = [f"{name}_us" for name in KERNELS[device.type]]

    def ratio(kind: tuple[str, bool, str], length: tuple[int, int, int]) -> str:
        for row in rows:
            if (row["mask"], row["training"], row["dtype"], row["batch"], row["q_len"], row["kv_len"]) == kind + length:
                times = [row[name] for name in names if name in row]
                return f"{min(times) / row['as_written_us']:.2f}" if times else "-"
        return ""

    head = ["fused / as written", *(f"{b}x{q}x{k}" for b, q, k in lengths)]
    lines = []
    for mask, training, dtype in kinds:
        label = f"{mask} {'training' if training else 'inference'} {dtype}"
        lines.append([label, *(ratio((mask, training, dtype), length) for length in lengths)])
    return table(head, lines)


if __name__ == "__main__":
    main()
