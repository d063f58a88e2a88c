"""Train a character-level GPT on real text four ways, side by side, and print the cost of each.

    eager        model.py as it is
    inductor     model.py under torch.compile(backend="inductor")
    attn_fuse    model.py under torch.compile(backend="attn_fuse"): one word changed
    sdpa         model_sdpa.py, the attention edited by hand, under torch.compile(backend="inductor")

All variants start from the same weights and see the same batches. Each step runs and times every variant in turn. The
text is the language documentation that ships with Python.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

# The profiler that measures CPU memory warns about every tensor older than itself.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import torch
from torch import Tensor
from tqdm import tqdm

from attn_fuse.files import unwritable
from attn_fuse.report import GraphReport, as_text, collecting, headline
from harness import bytes_in_words, peak_memory, seconds_in_words, synchronize, table
from model import GPT, GPTConfig
from model_sdpa import SDPAGPT

BACKENDS = {"eager": None, "inductor": "inductor", "attn_fuse": "attn_fuse", "sdpa": "inductor"}
# Untimed steps, in which the compiler or the profiler runs.
UNTIMED, PROFILED = 3, 2


@dataclass
class Variant:
    """One way to train: a model, its optimizer, and its measurements."""

    name: str
    model: GPT
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    peak: int = 0

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        _, loss = self.model(inputs, targets)
        assert loss is not None
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class Text:
    """The text as one number per character, with the last tenth kept for validation."""

    def __init__(self, text: str, device: torch.device) -> None:
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        data = torch.tensor([number[character] for character in text], device=device)
        self.train, self.validation = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

    def batch(self, data: Tensor, size: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - length, (size,), generator=draw).tolist()
        rows = torch.stack([data[start : start + length + 1] for start in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def decoded(self, numbers: Tensor) -> str:
        return "".join(self.characters[i] for i in numbers.tolist())


class Graphs:
    """The reports of attn_fuse, grouped by what their graphs were compiled for."""

    def __init__(self) -> None:
        self._reports = collections.defaultdict[str, list[GraphReport]](list)

    @contextlib.contextmanager
    def compiled_for(self, purpose: str) -> Iterator[None]:
        """A block whose graphs are compiled for `purpose`, such as the training step."""
        with collecting() as reports:
            yield
        self._reports[purpose] += reports

    def named(self) -> Iterator[tuple[str, GraphReport]]:
        for purpose, reports in self._reports.items():
            for number, report in enumerate(reports, 1):
                yield purpose + (f", graph {number} of {len(reports)}" if len(reports) > 1 else ""), report


def build(names: list[str], config: GPTConfig, args: argparse.Namespace) -> list[Variant]:
    """The variants, with the same weights, each compiled its own way."""
    torch.manual_seed(args.seed)
    weights = GPT(config).state_dict()
    variants = []
    for name in names:
        model = (SDPAGPT if name == "sdpa" else GPT)(config).to(args.device)
        model.load_state_dict(weights)
        if BACKENDS[name] is not None and not args.compile_off:
            model.compile(backend=BACKENDS[name])
        variants.append(Variant(name, model, torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99))))
    return variants


def train(variants: list[Variant], text: Text, graphs: Graphs, args: argparse.Namespace) -> list[int]:
    """Train the variants side by side; gives the numbers of steps after which they were evaluated."""
    draw = torch.Generator().manual_seed(args.seed)
    held_out = [text.batch(text.validation, args.batch, args.block_size, draw) for _ in range(args.eval_batches)]
    first = [text.batch(text.train, args.batch, args.block_size, draw) for _ in range(UNTIMED)]
    compile_all(variants, first, held_out, graphs, args)
    steps = range(UNTIMED, args.steps)
    bar = tqdm(steps, initial=UNTIMED, total=args.steps, desc="training", unit="step", mininterval=1.0)
    started, evaluated = time.perf_counter(), [0]
    for number in bar:
        inputs, targets = text.batch(text.train, args.batch, args.block_size, draw)
        turn = number % len(variants)
        with graphs.compiled_for("training step"):
            for variant in variants[turn:] + variants[:turn]:
                run_step(variant, number, inputs, targets, args)
        bar.set_postfix({v.name: f"{v.losses[-1]:.3f}" for v in variants})
        over = time.perf_counter() - started > 60 * args.minutes
        if over or number + 1 == args.steps or (number + 1) % args.window == 0:
            evaluated.append(number + 1)
            for variant in variants:
                variant.validation.append(evaluate(variant.model, held_out))
        if over:
            bar.close()
            print(f"Stopped after {number + 1} of {args.steps} steps: the --minutes are over.")
            break
    return evaluated


def compile_all(
    variants: list[Variant],
    batches: list[tuple[Tensor, Tensor]],
    held_out: list[tuple[Tensor, Tensor]],
    graphs: Graphs,
    args: argparse.Namespace,
) -> None:
    """Evaluate each variant and run its compiling steps; print how long both took."""
    print(f"The first {UNTIMED} steps of each compile it; the --minutes start after them:", flush=True)
    for variant in variants:
        print(f"  {variant.name:<10}", end="", flush=True)
        started = time.perf_counter()
        with graphs.compiled_for("evaluation"):
            variant.validation.append(evaluate(variant.model, held_out))
        print(f"evaluation {time.perf_counter() - started:.0f} s, training step ", end="", flush=True)
        started = time.perf_counter()
        with graphs.compiled_for("training step"):
            for number, (inputs, targets) in enumerate(batches):
                run_step(variant, number, inputs, targets, args)
        print(f"{time.perf_counter() - started:.0f} s", flush=True)


def run_step(variant: Variant, number: int, inputs: Tensor, targets: Tensor, args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed + number)  # the same dropout, if the kernels draw alike
    if number == PROFILED:
        variant.peak = peak_memory(lambda: variant.losses.append(variant.step(inputs, targets).item()), args.device)
        return
    synchronize(args.device)
    started = time.perf_counter()
    loss = variant.step(inputs, targets)
    synchronize(args.device)
    if number >= UNTIMED:
        variant.seconds.append(time.perf_counter() - started)
    variant.losses.append(loss.item())


@torch.no_grad()
def evaluate(model: GPT, batches: list[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    losses = [float(model(inputs, targets)[1]) for inputs, targets in batches]
    model.train()
    return statistics.fmean(losses)


def disagreements(variants: list[Variant], window: int) -> list[str]:
    """The windows in which a variant's losses differ from the first variant's by more than noise.

    Noise is the jump of the loss from one batch to the next. Means over n steps disagree if they differ by more than
    three standard errors, 3 * noise / sqrt(n).
    """
    found, reference = [], variants[0]
    for start in range(0, len(reference.losses), window):
        losses = reference.losses[start : start + window]
        if len(losses) < 3:
            continue
        jumps = [abs(b - a) for a, b in itertools.pairwise(losses)]
        limit = 3 * statistics.fmean(jumps) / 2**0.5 / len(losses) ** 0.5
        for variant in variants[1:]:
            apart = abs(statistics.fmean(losses) - statistics.fmean(variant.losses[start : start + window]))
            if not apart <= limit:
                where = f"steps {start + 1}-{start + len(losses)}"
                found.append(f"{where}: {variant.name} is {apart:.4f} from {reference.name}; noise allows {limit:.4f}")
    return found


def print_results(variants: list[Variant], evaluated: list[int], args: argparse.Namespace) -> None:
    steps = len(variants[0].losses)
    window = min(args.window, max(1, steps // 4))  # a short run shows a curve, too
    starts = range(0, steps, window)
    head = ["training loss, mean of steps", *(f"{s + 1}-{min(s + window, steps)}" for s in starts)]
    curves = [[v.name, *(f"{statistics.fmean(v.losses[s : s + window]):.4f}" for s in starts)] for v in variants]
    print("\n" + table(head, curves))
    curves = [[v.name, *(f"{loss:.4f}" for loss in v.validation)] for v in variants]
    print("\n" + table(["validation loss after step", *map(str, evaluated)], curves))
    rows = []
    for v in variants:
        apart = max(abs(a - b) for a, b in zip(v.losses, variants[0].losses, strict=True))
        median = statistics.median(v.seconds)
        speed = f"{statistics.median(variants[0].seconds) / median:.2f}x"
        rows.append(
            [v.name, seconds_in_words(median), speed, bytes_in_words(v.peak), f"{v.validation[-1]:.4f}", f"{apart:.1e}"]
        )
    first = variants[0].name
    head = [
        "",
        "time per step",
        f"speed ({first} = 1)",
        "peak memory of a step",
        "final val loss",
        f"largest loss gap to {first}",
    ]
    print("\n" + table(head, rows))
    print(
        f"\nMedians of {len(variants[0].seconds)} steps, the variants in turn on each batch. "
        "Peak memory: tensors alive at once in one step, above the weights and the optimizer's state."
    )


def print_sample(variant: Variant, text: Text, args: argparse.Namespace) -> None:
    """Print text drawn from the model, compiled as it is. The context grows up to block_size, then slides."""
    torch.manual_seed(args.seed)
    variant.model.eval()
    prompt = text.validation[: args.prompt].unsqueeze(0)
    sample = variant.model.generate(prompt, args.sample, temperature=0.8, top_k=20)
    print(f"\nSample from {variant.name}, after {args.prompt} characters of real text:\n")
    print(text.decoded(sample[0, : args.prompt]) + "|" + text.decoded(sample[0, args.prompt :]))


def print_sites(graphs: Graphs) -> None:
    for name, report in sorted(graphs.named(), key=lambda named: not named[0].startswith("training step")):
        spent = f"{len(report.sites)} attentions, {report.seconds:.2f} s in its passes"
        print(f"\nWhat attn_fuse did in the {name} ({spent}):")
        if name.startswith("training step"):
            print(as_text(report))
        else:
            print("\n".join(f"    {site.location}: {headline(site)}" for site in report.sites))


def draw_results(path: Path, variants: list[Variant], evaluated: list[int]) -> None:
    """Draw training loss, validation loss and step times as three panels in a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4), layout="constrained")
    training, validation, times = figure.subplots(1, 3)
    for v in variants:
        training.plot(range(1, len(v.losses) + 1), v.losses, label=v.name)
        validation.plot(evaluated, v.validation, marker="o")
        # Steps that compile or are profiled are not timed.
        times.plot(range(UNTIMED + 1, UNTIMED + 1 + len(v.seconds)), [s * 1e3 for s in v.seconds], marker=".")
    training.set(title="training loss", xlabel="step", ylabel="cross entropy")
    validation.set(title="validation loss", xlabel="step", ylabel="cross entropy")
    times.set(title="time of a step", xlabel="step", ylabel="ms")
    figure.legend(loc="outside lower center", ncols=len(variants))
    figure.savefig(path)
    print(f"\nThe plot of losses and times: {path}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--minutes", type=float, default=4.0, help="of training at most, not counting compiling")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0, help="torch has no fused CPU attention with dropout")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--window", type=int, default=40, help="steps between two checkpoints")
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--sample", type=int, default=300, help="characters to generate; 0 for none")
    parser.add_argument("--prompt", type=int, default=64, help="characters of real text before them")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw losses and times as a .png or .svg")
    parser.add_argument("--variants", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument(
        "--compile-off", action="store_true", help="run without torch.compile, where there is no compiler"
    )
    args = parser.parse_args()
    if args.steps <= UNTIMED:
        parser.error(f"--steps: at least {UNTIMED + 1}")
    if args.plot is not None:
        if args.plot.suffix not in (".png", ".svg"):
            parser.error(f"--plot {args.plot}: it is a .png or .svg")
        if problem := unwritable("--plot", args.plot):
            parser.error(problem)
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--plot needs matplotlib, which is not installed: pip install matplotlib")
    if args.compile_off:
        args.variants = [name for name in args.variants if name not in ("inductor", "attn_fuse")]
    if not args.variants:
        parser.error("--compile-off leaves none of the --variants")
    return args


def main() -> int:
    args = arguments()
    text = Text("\n\n".join(topics[name] for name in sorted(topics)), args.device)
    config = GPTConfig(
        args.block_size, len(text.characters), args.layers, args.heads, args.width, dropout=args.dropout, bias=False
    )
    variants = build(list(dict.fromkeys(args.variants)), config, args)
    parameters = sum(parameter.numel() for parameter in variants[0].model.parameters())
    print(
        f"torch {torch.__version__} on {args.device}; {len(text.train) + len(text.validation):,} characters of text; "
        f"{parameters:,} parameters; batches of {args.batch} x {args.block_size}"
    )
    graphs = Graphs()
    evaluated = train(variants, text, graphs, args)
    if args.sample:
        with graphs.compiled_for("sampling"):
            print_sample(next((v for v in variants if v.name == "attn_fuse"), variants[0]), text, args)
    print_sites(graphs)
    print_results(variants, evaluated, args)
    if args.plot is not None:
        draw_results(args.plot, variants, evaluated)
    found = disagreements(variants, args.window)
    if found:
        print("\nThe loss curves DISAGREE beyond noise:\n" + "\n".join(f"  {line}" for line in found))
        return 1
    if len(variants) > 1:
        print("The loss curves agree within noise.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
