"""What torch's own logs have of us: a line for each site in TORCH_LOGS, the report in TORCH_TRACE."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch

def attention(q, k, v):
    return (q @ k.mT / 8).softmax(-1) @ v

def other(x):
    return x.relu()

for program, x in ((attention, torch.randn(3, 2, 4, 9, 16).unbind(0)), (other, (torch.randn(3),))):
    torch.compile(program, backend="attn_fuse", options={"inner_backend": "eager", "pick": "fused"})(*x)
"""


def test_torchs_logs_and_trace(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    environment = os.environ | {"TORCH_LOGS": "attn_fuse", "TORCH_TRACE": str(tmp_path / "trace")}
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, env=environment, check=True)
    (line,) = [line for line in done.stderr.splitlines() if "fused on" in line]
    assert line.endswith("program.py:5: fused on cpu_flash")
    (trace,) = (tmp_path / "trace").iterdir()
    _, _, rest = trace.read_text().partition('"name": "attn_fuse"')
    report = rest.partition("\nV")[0]
    assert "FUSED on cpu_flash" in report and "head_dim:   16" in report and "score[b,h,i,j] =" in report
    assert '"name": "attn_fuse"' not in rest
