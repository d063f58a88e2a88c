"""Memory: the peak bytes of tensors during a call, on CUDA and on the CPU."""

from __future__ import annotations

import itertools
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
    """The peak bytes of tensors during `call`, above the bytes before it.

    On CUDA it is `max_memory_allocated`, on the CPU the same figure from the profiler's record of torch's allocations.
    Neither has the memory that libraries take behind torch's back. The profiler sees one thread, so `chunked` works in
    that thread alone, on blocks as large as those of all its workers. On the CPU `call` runs twice.
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
    changes = sorted((e["ts"], int(e["args"]["Bytes"])) for e in events if e.get("name") == "[memory]")
    return max(itertools.accumulate((change for _, change in changes), initial=0))
