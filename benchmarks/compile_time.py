"""Compile time of a GPT-2 or a T5 under attn_fuse and under Inductor alone, with cold and with warm caches.

Every figure is of a process of its own: a cold one starts with an empty cache directory, a warm one with what the cold
one left. Each compiles a training step, forward and backward; what a step takes once compiled is subtracted.

With --stages nothing is compiled: measured is what attn_fuse's own stages take, on graphs that grow and on one
without attention.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "nanogpt"))

import torch
from torch._dynamo.utils import counters

from attn_fuse.backend import attn_fuse
from attn_fuse.report import reports
from attn_fuse.torch_internals import known_backends
from harness import store, summary, table
from model import GPT, GPTConfig

BACKENDS = ("inductor", "attn_fuse")
HITS = {
    "AOTAutograd cache hits": ("aot_autograd", "autograd_cache_hit"),
    "AOTAutograd cache misses": ("aot_autograd", "autograd_cache_miss"),
    "AOTAutograd cache bypasses": ("aot_autograd", "autograd_cache_bypass"),
    "FX graph cache hits": ("inductor", "fxgraph_cache_hit"),
    "FX graph cache misses": ("inductor", "fxgraph_cache_miss"),
    "FX graph cache bypasses": ("inductor", "fxgraph_cache_bypass"),
}


def gpt(args: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    model = GPT(GPTConfig(block_size=args.length, n_layer=args.layers)).to(args.device)
    tokens = torch.randint(50257, (1, args.length), device=args.device)
    return model, lambda: model(tokens, tokens)[1]


def t5(args: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """T5-small's widths with `transformers`' eager attention, half of the layers in the encoder, padded."""
    from transformers import T5Config, T5Model

    half = args.layers // 2
    config = T5Config(num_layers=half, num_decoder_layers=half, attn_implementation="eager", dropout_rate=0.0)
    model = T5Model(config).to(args.device)
    tokens = torch.randint(config.vocab_size, (2, args.length), device=args.device)
    seen = torch.arange(args.length, device=args.device) < torch.tensor([[args.length], [args.length // 2]])
    inputs = {"input_ids": tokens, "attention_mask": seen.long(), "decoder_input_ids": tokens, "use_cache": False}
    return model, lambda: model(**inputs).last_hidden_state.square().mean()


def wav2vec2(args: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """`transformers`' speech encoder, narrow, whose feature extractor and masks write in place."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "conv_dim": (32,) * 7}
    config = Wav2Vec2Config(num_hidden_layers=args.layers, attn_implementation="eager", mask_time_prob=0.0, **sizes)
    model = Wav2Vec2Model(config).to(args.device).eval()  # in training it leaves out layers at random
    sound = torch.randn(2, 16000, device=args.device)
    heard = torch.arange(16000, device=args.device) < torch.tensor([[16000], [9000]], device=args.device)
    return model, lambda: model(sound, attention_mask=heard.long()).last_hidden_state.square().mean()


class Layers(torch.nn.Module):
    """Attentions with other operations between them. between: what is done to [batch, length, 32] in one layer."""

    def __init__(self, layers: int, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.between = between
        self.projections = torch.nn.ModuleList(torch.nn.Linear(32, 96) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
        for project in self.projections:
            q, k, v = project(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
            weights = (q @ k.mT * 8**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
            x = self.between(x + (weights @ v).transpose(1, 2).flatten(2))
        return x


def layers(between: Callable[[torch.Tensor], torch.Tensor], args: argparse.Namespace) -> Any:
    model = Layers(args.layers, between).to(args.device)
    x = torch.randn(1, 16, 32, device=args.device)
    return model, lambda: model(x).square().mean()


def large(args: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """With 96 layers 20,000 nodes."""

    def between(x: torch.Tensor) -> torch.Tensor:
        for _ in range(48):
            x = x + torch.sin(x) * 0.1 - 0.01
        return x

    return layers(between, args)


def writes(args: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """With 24 layers 2,000 writes in place."""

    def between(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for n in range(42):
            x.mul_(0.99)
            x[:, n % 16].add_(0.01)
        return x

    return layers(between, args)


class Perceptron(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x)) * 0.5
        return x


def perceptron(args: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """No attention: with 840 layers 5,000 nodes."""
    model = Perceptron(args.layers).to(args.device)
    x = torch.randn(16, 32, device=args.device)
    return model, lambda: model(x).square().mean()


MODELS = {
    "gpt": gpt, "t5": t5, "wav2vec2": wav2vec2, "large": large, "writes": writes, "perceptron": perceptron,
}  # fmt: skip
# What --stages measures: the model and its layers.
STAGES = (
    ("gpt", 12), ("gpt", 60), ("wav2vec2", 12), ("large", 24), ("large", 48), ("large", 96),
    ("writes", 12), ("writes", 24), ("perceptron", 840),
)  # fmt: skip


def stages_once(args: argparse.Namespace) -> dict[str, Any]:
    """What the stages took on the graphs of a training step, and how large those are."""
    torch.manual_seed(0)
    model, loss = MODELS[args.model](args)
    # Loading Inductor is none of what is measured.
    importlib.import_module("torch._inductor.fx_passes.joint_graph")
    importlib.import_module("torch._inductor.fx_passes.fuse_attention")
    nodes: list[int] = []
    busy = 0.0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal busy
        nodes.append(len(graph.graph.nodes))
        known_backends()  # torch reads the installed packages once in a process
        started = time.process_time()
        run = attn_fuse(graph, inputs, options={"pick": "fused", "inner_backend": "eager"})
        busy += time.process_time() - started
        return run

    model.compile(backend=backend)
    loss()
    return {
        "nodes": sum(nodes),
        "cpu_s": busy,
        "stages_s": sum(report.seconds for report in reports()),
        "sites": sum(len(report.sites) for report in reports()),
        "fused": sum(site.fused for report in reports() for site in report.sites),
    }


def compile_once(args: argparse.Namespace) -> dict[str, Any]:
    """What compiling with `args.child` took in this process."""
    torch.manual_seed(0)
    model, loss = MODELS[args.model](args)
    # Every attention is fused, also where a short sequence would not pay for it, so that all stages run.
    model.compile(backend=args.child, options={"pick": "fused"} if args.child == "attn_fuse" else None)

    def step() -> float:
        started = time.perf_counter()
        loss().backward()
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    first = step()
    steady = min(step() for _ in range(3))
    return {
        "compile_s": first - steady,
        "step_s": steady,
        "stages_s": sum(report.seconds for report in reports()),
        "sites": sum(len(report.sites) for report in reports()),
        "fused": sum(site.fused for report in reports() for site in report.sites),
        "counters": {name: counters[group][counter] for name, (group, counter) in HITS.items()},
    }


def in_new_process(backend: str, cache: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", backend, "--device", str(args.device)]
    command += ["--layers", str(args.layers), "--length", str(args.length), "--model", args.model]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    command += ["--stages"] if args.stages else []
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="gpt by default; t5 and wav2vec2 need the package transformers")
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3, help="cold and warm processes of each backend, in turn")
    parser.add_argument("--stages", action="store_true", help="attn_fuse's own stages alone, on --model or all but t5")
    parser.add_argument("--child", choices=BACKENDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def all_stages(args: argparse.Namespace) -> None:
    rows, stored = [], {}
    for model, count in [case for case in STAGES if args.model in (None, case[0])]:
        if model == "wav2vec2" and importlib.util.find_spec("transformers") is None:
            print("wav2vec2 is not measured: it needs the package transformers")
            continue
        sized = argparse.Namespace(**{**vars(args), "model": model, "layers": count})
        with tempfile.TemporaryDirectory() as cache:
            runs = [in_new_process("attn_fuse", cache, sized) for _ in range(args.repeats)]
        name, last = f"{model}, {count} layers", runs[-1]
        took, busy = (summary([run[what] for run in runs]).median for what in ("stages_s", "cpu_s"))
        stored[name] = runs
        fused, each = f"{last['fused']} of {last['sites']}", f"{1e3 * busy / last['nodes']:.2f} ms"
        rows.append([name, f"{last['nodes']:,}", fused, f"{took:.3f} s", f"{busy:.3f} s", each])
        print(*rows[-1], flush=True)
    print(table(["", "nodes", "fused", "in attn_fuse", "of the CPU", "for each node"], rows))
    print(store(f"compile_time-stages{'-' if args.model else ''}{args.model or ''}", args.device, {"runs": stored}))


def main() -> None:
    args = arguments()
    if args.child:
        print(json.dumps(stages_once(args) if args.stages else compile_once(args)))
        return
    if args.stages:
        all_stages(args)
        return
    args.model = args.model or "gpt"
    runs: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(args.repeats):
        for backend in BACKENDS if repeat % 2 == 0 else reversed(BACKENDS):
            with tempfile.TemporaryDirectory() as cache:
                for caches in ("cold", "warm"):
                    run = in_new_process(backend, cache, args)
                    runs.setdefault(f"{backend}, {caches} caches", []).append(run)
                    print(f"{backend}, {caches} caches: {run}", flush=True)
    rows = []
    for name in sorted(runs, key=lambda name: name.split()[1]):
        compiling, stages = (summary([run[key] for run in runs[name]]).median for key in ("compile_s", "stages_s"))
        last = runs[name][-1]
        hits = [
            last["counters"][f"{cache} cache {what}"]
            for cache in ("AOTAutograd", "FX graph")
            for what in ("hits", "misses")
        ]
        rows.append(
            [
                name,
                f"{compiling:.2f} s",
                f"{stages:.2f} s",
                f"{100 * stages / compiling:.1f}%",
                f"{last['fused']} of {last['sites']}",
                f"{hits[0]} / {hits[1]}",
                f"{hits[2]} / {hits[3]}",
            ]
        )
    head = ["", "compile", "in attn_fuse", "share", "fused", "AOTAutograd hit / miss", "FX graph hit / miss"]
    print(
        f"\n{args.model} of {args.layers} layers, {args.length} tokens, training step; medians of {args.repeats} runs"
    )
    print(table(head, rows))
    facts = {"layers": args.layers, "length": args.length, "runs": runs}
    print(store(f"compile_time-{args.model}", args.device, facts))


if __name__ == "__main__":
    main()
