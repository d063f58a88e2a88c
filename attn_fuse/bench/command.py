"""The commands of ``python -m attn_fuse.bench``: measure a model, a sweep of attentions, a GPT, or this device."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# The profiler that measures memory on the CPU warns of every tensor older than itself. torch reads this at import.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from attn_fuse.errors import BenchError, ExplainError, OptionError, nearest

# By name: the module whose `main` runs the command, and a description.
COMMANDS = {
    "model": ("attn_fuse.bench.model_command", "the model in a file: eager, Inductor, attn_fuse, each kernel forced"),
    "sweep": ("sweep", "attentions over lengths, head_dims, batches, masks and dtypes; in a clone"),
    "nanogpt": ("nanogpt", "a GPT's training step on each kernel, and with a padded vocabulary; in a clone"),
    "calibrate": ("attn_fuse.bench.calibrate", "measure this device for the picker; show or forget that"),
}
# The folder of `sweep` and `nanogpt`, which a wheel does not have.
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` name, or list the commands; gives the exit code.

    It is 2 after an error, which is one line on stderr, and 130 after ^C.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m attn_fuse.bench COMMAND [--help]\n")
        print("\n".join(f"  {name:<11}{what}" for name, (_, what) in COMMANDS.items()))
        return 0
    if arguments[0] not in COMMANDS:
        return _refused(f"there is no command {arguments[0]!r}.{nearest(arguments[0], COMMANDS)}")
    module = COMMANDS[arguments[0]][0]
    if not module.startswith("attn_fuse."):
        if not (BENCHMARKS / f"{module}.py").exists():
            return _refused(f"{arguments[0]} is in benchmarks/, which only a clone of the repository has: run it there")
        sys.path.insert(0, str(BENCHMARKS))
    try:
        return int(importlib.import_module(module).main(arguments[1:]))
    except (BenchError, ExplainError, OptionError) as problem:
        return _refused(str(problem))
    except KeyboardInterrupt:
        print("\nattn_fuse.bench: interrupted", file=sys.stderr)
        return INTERRUPTED


def _refused(why: str) -> int:
    print(f"attn_fuse.bench: {why}", file=sys.stderr)
    return 2
