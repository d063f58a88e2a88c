"""Run the examples in their usual sizes; what they print is stored, for their pages on the site.

python benchmarks/example_outputs.py [bert_padded.py ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

import torch

from harness import RESULTS, ROOT, machine

COMMANDS = {
    "bert_padded.py": "python examples/bert_padded.py",
    "vit.py": "python examples/vit.py",
    "sliding_window.py": "python examples/sliding_window.py",
    "decoding.py": "python examples/decoding.py",
    "export.py": "python examples/export.py",
    "distributed.py": "torchrun --nproc-per-node 2 examples/distributed.py",
    "nanogpt/train.py": "python examples/nanogpt/train.py --minutes 2 --sample 0",
}
STORED = RESULTS / "examples-cpu.json"


def printed(command: str) -> str:
    """What a command prints, run with this Python in a folder of its own. Raises CalledProcessError if it fails."""
    program, *arguments = command.split()
    start = [sys.executable] if program == "python" else [sys.executable, "-m", "torch.distributed.run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(ROOT / "examples", f"{folder}/examples")
        done = subprocess.run(
            [*start, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    return done.stdout.replace(f"{ROOT}/", "").replace(f"{folder}/", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(COMMANDS)} (all)")
    names = parser.parse_args().names or list(COMMANDS)
    programs = json.loads(STORED.read_text())["programs"] if STORED.exists() else {}
    for name in names:
        programs[name] = {"command": COMMANDS[name], "printed": printed(COMMANDS[name])}
        print(f"$ {COMMANDS[name]}\n{programs[name]['printed']}", flush=True)
        content = {"machine": machine(torch.device("cpu")), "programs": programs}
        STORED.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
