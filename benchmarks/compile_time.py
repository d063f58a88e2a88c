"""What attn_fuse's own stages take of a training step's compiling, on graphs that grow and on one without attention.

Nothing else is compiled. Every figure is of a process of its own.
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

from attn_fuse.backend import attn_fuse
from attn_fuse.report import reports
from attn_fuse.torch_internals import known_backends
from harness import store, summary, table
from model import GPT, GPTConfig


def gpt(args: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    model = GPT(GPTConfig(block_size=args.length, n_layer=args.layers)).to(args.device)
    tokens = torch.randint(50257, (1, args.length), device=args.device)
    return model, lambda: model(tokens, tokens)[1]


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
    "gpt": gpt, "wav2vec2": wav2vec2, "large": large, "writes": writes, "perceptron": perceptron,
}  # fmt: skip
# What is measured: the model and its layers.
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


def in_new_process(args: argparse.Namespace, model: str, layers: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", "--device", str(args.device)]
    command += ["--layers", str(layers), "--length", str(args.length), "--model", model]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="all by default; wav2vec2 needs the package transformers")
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3, help="processes of each")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(stages_once(args)))
        return
    rows, stored = [], {}
    for model, count in [case for case in STAGES if args.model in (None, case[0])]:
        if model == "wav2vec2" and importlib.util.find_spec("transformers") is None:
            print("wav2vec2 is not measured: it needs the package transformers")
            continue
        runs = [in_new_process(args, model, count) for _ in range(args.repeats)]
        name, last = f"{model}, {count} layers", runs[-1]
        took, busy = (summary([run[what] for run in runs]).median for what in ("stages_s", "cpu_s"))
        stored[name] = runs
        fused, each = f"{last['fused']} of {last['sites']}", f"{1e3 * busy / last['nodes']:.2f} ms"
        rows.append([name, f"{last['nodes']:,}", fused, f"{took:.3f} s", f"{busy:.3f} s", each])
        print(*rows[-1], flush=True)
    print(table(["", "nodes", "fused", "in attn_fuse", "of the CPU", "for each node"], rows))
    print(store(f"compile_time-stages{'-' if args.model else ''}{args.model or ''}", args.device, {"runs": stored}))


if __name__ == "__main__":
    main()
