"""What torch has no fused CPU kernel for, as people write it: dropout, biases that learn, softcaps, windows.

The same hand-written program runs eagerly, compiled by Inductor, and compiled by attn_fuse (once as its picker
chooses, once on each kernel named); beside them the same attention rewritten by hand to F.scaled_dot_product_attention
and compiled by Inductor, where that can say it. One run, in turn, in a new order each round; medians. Memory is what
tensors take during one call above what was there before it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attn_fuse
from harness import RESULTS, bytes_in_words, interleaved, peak_memory, seconds_in_words, store, table

HEADS, HEAD_DIM, WINDOW = 8, 64, 256


def seen(length: int, window: int | None) -> Tensor:
    """Bool [length, length]: causal, in a window where there is one."""
    i = torch.arange(length)
    apart = i[:, None] - i
    return (apart >= 0) if window is None else (apart >= 0) & (apart < window)


class Written(nn.Module):
    """An attention of `length` tokens written by hand. by_hand: with torch's own function, where that can say it."""

    batch, value_dim = 1, HEAD_DIM
    training_step = True
    by_hand: Callable[..., Tensor] | None = None

    def __init__(self, length: int) -> None:
        super().__init__()


class Dropped(Written):
    """Causal attention with dropout on the weights, as in nanoGPT."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(~seen(q.size(-2), None), float("-inf"))
        return F.dropout(F.softmax(scores, dim=-1), p=0.1) @ v

    @staticmethod
    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


class RelativeBias(Written):
    """T5's encoder: unscaled scores and a learned bias for each bucket of distances (arXiv 1910.10683)."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.table = nn.Embedding(32, HEADS)

    def bias(self, length: int) -> Tensor:
        i = torch.arange(length)
        apart = i[None, :] - i[:, None]
        near, far = 8, 128
        log = near + (torch.log(apart.abs().float() / near) / math.log(far / near) * (16 - near)).long()
        bucket = torch.where(apart.abs() < near, apart.abs(), torch.clamp(log, max=15)) + (apart > 0) * 16
        return self.table(bucket).permute(2, 0, 1).unsqueeze(0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(3, 2)) + self.bias(q.size(-2))
        return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)

    def by_hand(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(q.size(-2)), scale=1.0)


class StoredIndex(Written):
    """Swin's relative position bias, without windows: a table read where a buffer says (arXiv 2103.14030)."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        width = math.isqrt(length)
        i = torch.arange(length)
        rows, columns = (x[:, None] - x for x in (i // width, i % width))
        index = rows * (2 * width - 1) + columns
        self.register_buffer("relative_position_index", index - index.min())
        self.table = nn.Parameter(torch.randn(int(self.relative_position_index.max()) + 1, HEADS))

    def bias(self) -> Tensor:
        length = len(self.relative_position_index)
        looked_up = self.table[self.relative_position_index.view(-1)].view(length, length, -1)
        return looked_up.permute(2, 0, 1).contiguous().unsqueeze(0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q * (1.0 / math.sqrt(q.size(-1)))) @ k.transpose(-2, -1) + self.bias()
        return torch.matmul(scores.softmax(-1), v)

    def by_hand(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias())


class Capped(Written):
    """Gemma 2's local layers: a softcap and a sliding window (arXiv 2408.00118)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * (1.0 / math.sqrt(k.size(-1)))
        scores = torch.tanh(scores / 50.0) * 50.0
        scores = scores.masked_fill(~seen(q.size(-2), WINDOW), float("-inf"))
        return torch.matmul(scores.softmax(-1), v)


class Padded(Written):
    """Four sequences padded to one length, as Hugging Face's eager models have it: the lowest number is added."""

    batch = 4

    def keep(self, length: int) -> Tensor:
        lengths = torch.linspace(length, length // 2, self.batch).long()
        return seen(length, None) & (torch.arange(length) < lengths[:, None])[:, None, None, :]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * (1.0 / math.sqrt(k.size(-1)))
        hidden = torch.where(self.keep(q.size(-2)), 0.0, torch.finfo(q.dtype).min)
        return torch.matmul((scores + hidden).softmax(-1), v)

    def by_hand(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.keep(q.size(-2)))


class WideValues(Written):
    """Values of 128 beside queries and keys of 64."""

    value_dim = 128

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * (1.0 / math.sqrt(k.size(-1)))
        return torch.matmul(scores.softmax(-1), v)

    @staticmethod
    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class WideValuesForward(WideValues):
    """The same, inference."""

    training_step = False


class Windowed(Written):
    """A sliding window, inference."""

    training_step = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * (1.0 / math.sqrt(k.size(-1)))
        return torch.matmul(scores.masked_fill(~seen(q.size(-2), WINDOW), float("-inf")).softmax(-1), v)

    @staticmethod
    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen(q.size(-2), WINDOW))


class Causal(Written):
    """Causal attention, inference."""

    training_step = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * (1.0 / math.sqrt(k.size(-1)))
        return torch.matmul(scores.masked_fill(~seen(q.size(-2), None), float("-inf")).softmax(-1), v)

    @staticmethod
    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


PROGRAMS: dict[str, tuple[type[Written], tuple[str, ...]]] = {
    "causal, dropout 0.1, training": (Dropped, ()),
    "T5 bias with gradient, training": (RelativeBias, ()),
    "bias by a stored index, training": (StoredIndex, ()),
    "values of 128, training": (WideValues, ()),
    "values of 128, inference": (WideValuesForward, ("chunked", "flex")),
    "softcap, window 256, training": (Capped, ()),
    "causal and padding, training": (Padded, ()),
    "window 256, inference": (Windowed, ("chunked", "flex", "cpu_flash")),
    "causal, inference": (Causal, ("flex", "cpu_flash", "chunked")),
}


@dataclass(frozen=True)
class Contestant:
    """A way to run a program. kernel: the one that attn_fuse put under it; None where it is not attn_fuse's."""

    run: Callable[[], object]
    kernel: str | None = None


def contestants(kind: type[Written], kernels: tuple[str, ...], length: int) -> dict[str, Contestant]:
    torch.manual_seed(0)
    sizes = (HEAD_DIM, HEAD_DIM, kind.value_dim)
    q, k, v = (torch.randn(kind.batch, HEADS, length, n, requires_grad=kind.training_step) for n in sizes)
    pull = torch.randn(kind.batch, HEADS, length, kind.value_dim)
    module = kind(length)

    def step(function: Callable[..., Tensor]) -> Callable[[], object]:
        def run() -> object:
            if not kind.training_step:
                with torch.no_grad():
                    return function(q, k, v)
            return torch.autograd.grad(function(q, k, v), [q, k, v, *module.parameters()], pull)

        return run

    def fused(**options: object) -> Contestant:
        run = step(torch.compile(module, backend="attn_fuse", options=options, dynamic=False))
        run()
        (site,) = attn_fuse.reports()[-1].sites
        return Contestant(run, site.kernel or "as written")

    torch._dynamo.reset()
    found = {"eager": Contestant(step(module)), "inductor": Contestant(step(torch.compile(module, dynamic=False)))}
    if module.by_hand is not None:
        found["by hand to sdpa"] = Contestant(step(torch.compile(module.by_hand, dynamic=False)))
    found["attn_fuse"] = fused()
    for name in kernels or ("chunked",):
        found[name] = fused(kernels=[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="PROGRAM")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=40.0, help="the most time for one row of the table")
    parser.add_argument("--add", action="store_true", help="keep the stored rows of what is not measured")
    parser.add_argument("--dry-run", action="store_true", help="print, and store nothing")
    args = parser.parse_args()
    device = torch.device("cpu")
    rows = []
    for program in args.programs:
        for length in args.lengths:
            rows.append(measured(program, length, args.rounds, args.seconds, device))
            show(rows[-1])
    if not args.dry_run:
        print(store("features", device, {"rows": [*kept_rows("features", rows), *rows] if args.add else rows}))


def kept_rows(name: str, new: list[dict]) -> list[dict]:
    """The rows stored as `name` of other programs and lengths, each with its machine and commit."""
    path = RESULTS / f"{name}-cpu.json"
    stored = json.loads(path.read_text())
    known = {(row["program"], row["length"]) for row in new}
    kept = [row for row in stored["rows"] if (row["program"], row["length"]) not in known]
    return [{**row, "machine": row.get("machine", stored["machine"])} for row in kept]


def measured(program: str, length: int, rounds: int, seconds: float, device: torch.device) -> dict[str, object]:
    found = contestants(*PROGRAMS[program], length)
    times = interleaved({name: c.run for name, c in found.items()}, device, rounds, seconds)
    return {
        "program": program,
        "length": length,
        "kernels": {name: c.kernel for name, c in found.items() if c.kernel},
        "times": times,
        "over_inductor": {name: t.median / times["inductor"].median for name, t in times.items()},
        "memory": {name: peak_memory(c.run, device) for name, c in found.items()},
    }


def show(row: dict) -> None:
    lines = [
        [
            name + (f" ({row['kernels'][name]})" if row["kernels"].get(name, name) != name else ""),
            seconds_in_words(time.median),
            f"{row['over_inductor'][name]:.2f}",
            bytes_in_words(row["memory"][name]),
        ]
        for name, time in row["times"].items()
    ]
    print(f"\n{row['program']}, T = {row['length']}")
    print(table(["", "median", "over inductor", "memory"], lines), flush=True)


if __name__ == "__main__":
    main()
