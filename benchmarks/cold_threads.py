"""What it takes where several threads call a compiled model for the first time at once, with nothing in any cache.

Dynamo lets them wait for one another, and has each trace the model anew; the first alone has Inductor compile kernels.
Each run is a process of its own with a new cache directory, the backends in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import torch

from harness import ROOT, store

BACKENDS = ("attn_fuse", "inductor")


def seconds_of_threads(backend: str, threads: int, layers: int, length: int) -> list[float]:
    """The seconds from the start to each thread's result, the earliest first; in this process, whose caches are new."""
    sys.path.insert(0, str(ROOT / "examples" / "nanogpt"))
    from model import GPT, GPTConfig

    model = GPT(GPTConfig(n_layer=layers)).eval()
    tokens = torch.randint(model.config.vocab_size, (1, length))
    compiled = torch.compile(model, backend=backend)
    together, ends = threading.Barrier(threads), []

    def run() -> None:
        together.wait()
        start = time.monotonic()
        with torch.no_grad():
            compiled(tokens)
        ends.append(time.monotonic() - start)

    started = [threading.Thread(target=run) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return sorted(ends)


def in_a_process(backend: str, arguments: argparse.Namespace) -> list[float]:
    """`seconds_of_threads` in a new process with new caches."""
    with tempfile.TemporaryDirectory() as caches:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches, "ATTN_FUSE_CACHE": caches}
        command = [sys.executable, str(Path(__file__)), "--backend", backend, "--threads", str(arguments.threads)]
        command += ["--layers", str(arguments.layers), "--length", str(arguments.length)]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4, help="of GPT-2's size (4)")
    parser.add_argument("--length", type=int, default=256, help="tokens (256)")
    parser.add_argument("--runs", type=int, default=3, help="of each backend (3)")
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.backend is not None:
        print(json.dumps(seconds_of_threads(arguments.backend, arguments.threads, arguments.layers, arguments.length)))
        return
    runs: dict[str, list[list[float]]] = {backend: [] for backend in BACKENDS}
    for _ in range(arguments.runs):
        for backend, of in runs.items():
            of.append(in_a_process(backend, arguments))
            print(backend, [round(end, 1) for end in of[-1]], flush=True)
    # What each further thread adds, as a fraction of what the first takes.
    added = {name: median((run[-1] - run[0]) / (len(run) - 1) / run[0] for run in of) for name, of in runs.items()}
    first = {name: median(run[0] for run in of) for name, of in runs.items()}
    sizes = {"threads": arguments.threads, "layers": arguments.layers, "length": arguments.length}
    results = {"sizes": sizes, "first_seconds": first, "added_by_a_thread": added, "runs": runs}
    print(store("cold-threads", torch.device("cpu"), results))


if __name__ == "__main__":
    main()
