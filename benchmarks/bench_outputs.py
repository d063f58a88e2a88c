"""Run the commands of `attn_fuse.bench` that docs/bench.md shows; their output and figures are stored.

    python benchmarks/bench_outputs.py [model] [sweep] [nanogpt]

`make results` puts the outputs into the page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

# First of all: other packages, too, bring a `tests`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import RESULTS, ROOT, commit

COMMANDS = {
    "model": "model examples/nanogpt/model.py --entry GPT(GPTConfig(n_layer=2,vocab_size=512))",
    "sweep": "sweep --lengths 256 512 1024 2048 --masks none causal window",
    "nanogpt": "nanogpt",
}


def run(name: str) -> None:
    """Run one command; its JSON goes to benchmarks/results, with what it printed."""
    path = RESULTS / f"bench-{name}-cpu.json"
    arguments = [*COMMANDS[name].split(), "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "attn_fuse.bench", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    content = json.loads(path.read_text())
    content["machine"] = {"commit": commit(), **content["machine"]}
    content["printed"] = done.stdout
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(done.stdout, path, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="model, sweep, nanogpt (all)")
    names = parser.parse_args().names or list(COMMANDS)
    for name in names:
        if name not in COMMANDS:
            parser.error(f"there is no command {name!r}; known: {', '.join(COMMANDS)}")
    for name in names:
        run(name)


if __name__ == "__main__":
    main()
