"""Memory: the most bytes of tensors that a call holds at once, on CUDA and on the CPU."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from attn_fuse.kernels.chunked.workers import alone
from attn_fuse.picker.timing import synchronize


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors alive at once during `call`, above what was alive before it.

    On CUDA it is `max_memory_allocated`; on the CPU the same figure, summed up from the profiler's record of every
    allocation and release by torch. Memory that libraries take behind torch's back is in neither. The profiler sees one
    thread: `chunked` works in that alone, on blocks as large as those of all its workers. `call` runs twice on the CPU.
    """
    synchronize(device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler reports its own start and stop
    with alone():
        call()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


def bytes_in_words(count: int) -> str:
    """`count` bytes in MiB."""
    return f"{count / 2**20:.1f} MiB"
