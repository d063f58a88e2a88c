"""A second process finds Inductor's caches warm, as it would without attn_fuse, and never what was made without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

PROGRAM = """
import json, sys, torch
from torch._dynamo.utils import counters
from attn_fuse.backend import attn_fuse as backend

def attention(q, mask):
    hidden = torch.ones(q.shape[-2], q.shape[-2]).triu(1) == 1
    return torch.nn.functional.gelu(((q @ q.mT) / 4).masked_fill(hidden, float("-inf")).softmax(-1) @ q)

def look_alike(q, mask):
    return ((q @ q.mT) / 4).softmax(-2) @ q

written = {"attention": attention, "look_alike": look_alike}[sys.argv[1]]
which = "inductor" if sys.argv[2] == "plain" else backend
options = {"kernels": sys.argv[3:]} if sys.argv[3:] else {"pick": "fused"}
q = torch.linspace(-2, 2, 2 * 4 * 16 * 16).sin().view(2, 4, 16, 16).requires_grad_(sys.argv[1] == "attention")
out = torch.compile(written, backend=which, options=options if which is backend else None)(q, None)
error = (out - written(q, None)).abs().max().item()
if q.requires_grad:
    out.sum().backward()
print(json.dumps({"aot": counters["aot_autograd"], "fused": counters["inductor"]["fuse_attention"], "error": error}))
"""


def run(folder: Path, program: str, backend: str, *kernels: str) -> dict:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PROGRAM, program, backend, *kernels]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kernel", ["cpu_flash", "chunked"])
def test_a_second_process_finds_the_cache_warm(kernel: str, tmp_path) -> None:
    first, second = (run(tmp_path, "attention", "attn_fuse", kernel) for _ in range(2))
    assert first["aot"].get("autograd_cache_miss") == 1 and not first["aot"].get("autograd_cache_bypass")
    assert second["aot"].get("autograd_cache_hit") == 1 and second["error"] < 1e-5


def test_what_plain_inductor_cached_is_not_taken(tmp_path) -> None:
    # The softmax runs over the queries; Inductor's pattern takes it for one over the keys.
    plain = run(tmp_path, "look_alike", "plain")
    ours = run(tmp_path, "look_alike", "attn_fuse")
    assert ours["error"] < 1e-5 and not ours["aot"].get("autograd_cache_hit")
    again = run(tmp_path, "look_alike", "plain")
    assert again["aot"].get("autograd_cache_hit") == 1 and again["error"] == plain["error"]


COLD_THREADS = """
import json, sys, threading, torch
from torch._dynamo.utils import counters
from attn_fuse.report import collecting

def attention(q):
    hidden = torch.ones(q.shape[-2], q.shape[-2]).triu(1) == 1
    return torch.nn.functional.gelu(((q @ q.mT) / 4).masked_fill(hidden, float("-inf")).softmax(-1) @ q)

q = torch.linspace(-2, 2, 2 * 4 * 16 * 16).sin().view(2, 4, 16, 16)
compiled = torch.compile(attention, backend="attn_fuse", options={"pick": "fused"})
together, errors = threading.Barrier(4), []

def run():
    together.wait()
    errors.append((compiled(q) - attention(q)).abs().max().item())

with collecting() as graphs:
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
fused = [site.fused for graph in graphs for site in graph.sites]
print(json.dumps({"aot": counters["aot_autograd"], "fused": fused, "errors": errors}))
"""


def test_cold_threads_compile_kernels_once(tmp_path) -> None:
    """Dynamo has each thread compile its code; the first alone has Inductor compile kernels."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", COLD_THREADS], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["errors"]) == 4 and max(found["errors"]) < 1e-5 and all(found["fused"])
    assert found["aot"]["autograd_cache_miss"] == 1
    assert found["aot"].get("autograd_cache_hit", 0) == len(found["fused"]) - 1
