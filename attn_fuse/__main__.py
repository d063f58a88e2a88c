"""The commands: ``python -m attn_fuse`` lists them, ``python -m attn_fuse info`` runs one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# Command: (the module whose `main` runs it, a description)
COMMANDS = {
    "explain": ("attn_fuse.explain.command", "say what becomes of every attention of the model in a Python file"),
    "run": ("attn_fuse.run.command", "run a program with its attention fused, and say what became of each attention"),
    "bench": (
        "attn_fuse.bench.command",
        "measure a model, a sweep of attentions, a GPT's training step, or this device",
    ),
    "info": ("attn_fuse.explain.info", "print torch, the device, Triton, and which kernels can run here"),
}


def main(argv: Sequence[str]) -> int:
    """Run the command that `argv` names, or list the commands; return the exit code, 2 for an unknown command."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m attn_fuse COMMAND [--help]\n")
        print("\n".join(f"  {name:<10}{what}" for name, (_, what) in COMMANDS.items()))
        return 0
    if argv[0] not in COMMANDS:
        from attn_fuse.errors import nearest  # imports torch; a command may set its environment first

        print(f"attn_fuse: there is no command {argv[0]!r}.{nearest(argv[0], COMMANDS)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["explain"]:
        from attn_fuse.explain.watched import watch

        watch("attn_fuse.explain")
    sys.exit(main(sys.argv[1:]))
