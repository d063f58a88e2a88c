"""`python -m attn_fuse.run` on programs with torch: the report, the files, the end of the program, its processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.explain.test_json import check

ROOT = Path(__file__).parents[2]
MODEL = """
import sys, time
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        att = q @ k.transpose(-2, -1) / 32 ** 0.5
        return att.softmax(-1) @ v
"""
TRAINS = (
    MODEL
    + """
import argparse, atexit
parser = argparse.ArgumentParser(description="the script's own")
parser.add_argument("--steps", type=int)
steps = parser.parse_args().steps
atexit.register(print, "at exit")
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
try:
    for step in range(steps):
        try:
            loss = model(torch.randn(2, 64, 32)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        except Exception:
            print("an exception")
        print(step, loss.item())
finally:
    print("finally")
print("to the end")
"""
)
LOADS = (
    MODEL
    + """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, item):
        return torch.full((64, 32), item / 32)

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(
        Data(), 4, num_workers=2, multiprocessing_context="spawn", persistent_workers=True
    )
    model = Model().eval()
    with torch.no_grad():
        for batch in loader:
            print(model(batch).shape)
"""
)
DISTRIBUTED = (
    MODEL
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.randn(2, 64, 32)).square().mean().backward()
    optimizer.step()
    print(f"rank {dist.get_rank()} step {step}\\n", end="")
"""
)
THREADS = (
    MODEL
    + """
import threading
threading.Thread(target=threading.Event().wait).start()
with torch.no_grad():
    Model()(torch.randn(2, 64, 32))
    print("not stopped")
"""
)
ENDS = (
    """
import sys
if sys.argv[1] == "no torch":
    raise SystemExit
"""
    + MODEL
    + """
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    model(torch.randn(2, 64, 32)).square().mean().backward()
    if sys.argv[1] == "raises":
        raise ValueError("boom")
    if sys.argv[1] == "exits":
        sys.exit(3)
    if sys.argv[1] == "is interrupted":
        raise KeyboardInterrupt
    optimizer.step()
"""
)
# Runs a program as the command does, and looks at torch after all else.
AFTERWARDS = """
import atexit, os, sys
leave = os._exit

def look():
    if "torch" in sys.modules:
        import torch
        from attn_fuse import report
        assert vars(torch.nn.Module)["_compiled_call_impl"] is None and not report._listeners
        assert not torch.overrides._get_current_function_mode_stack()
        assert not sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
        assert torch._TorchCompileInductorWrapper.__init__.__qualname__ == "_TorchCompileInductorWrapper.__init__"
        assert not torch._dynamo.config.suppress_errors
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("attn_fuse")]
    print("nothing is left", flush=True)

def look_and_leave(code):
    look()
    leave(code)

os._exit = look_and_leave
atexit.register(look)
if sys.argv[-1] == "nothing":
    sys.argv[1:] = ["nothing.py"]
from attn_fuse.run.command import main
sys.exit(main(sys.argv[1:]))
"""
FUNCTION = """
import importlib.util, os, sys
assert "torch" not in sys.modules and importlib.util.find_spec("torch") is not None
os.environ["OMP_NUM_THREADS"] = "1"
import torch
print(torch.get_num_threads(), torch.__spec__.loader.get_data(torch.__file__) != b"")

def attend(q, k, v):
    return (q @ k.mT).softmax(-1) @ v

attend(*torch.randn(3, 2, 64, 32))
"""
RUN = [sys.executable, "-m", "attn_fuse.run"]


def done(folder: Path, source: str, *command: str) -> subprocess.CompletedProcess[str]:
    """`command` in `folder`, beside script.py with `source`."""
    (folder / "script.py").write_text(source)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_explain_stops_after_the_first_step_and_tells_what_it_saw(tmp_path: Path) -> None:
    files = ["--html", "report.html", "--json", "report.json", "--code", "code.py"]
    got = done(tmp_path, TRAINS, *RUN, "--explain", "--pick", "fused", *files, "script.py", "--steps", "5")
    assert (got.returncode, got.stdout) == (0, "finally\nat exit\n")
    head, model, site = got.stderr.split("\n\n")[:3]
    assert head == "attn_fuse.run: script.py --steps 5"
    assert model.splitlines()[0] == "Model(float32[2, 64, 32]), training, float32 on cpu"
    assert site.startswith("[1] script.py:14\n    return att.softmax(-1) @ v\n    FUSED on ")
    assert got.stderr.endswith("stopped after the first training step; use --steps N for more.\n")
    data = check(json.loads((tmp_path / "report.json").read_text()), "program")
    assert (data["program"], data["attentions"], data["fused"]) == ("script.py --steps 5", 1, 1)
    assert data["models"][0]["subject"] == model.splitlines()[0] and data["notes"]
    assert "\nreturn F.scaled_dot_product_attention(" in (tmp_path / "code.py").read_text()
    page = (tmp_path / "report.html").read_text()
    assert all(text in page for text in ("<title>script.py --steps 5</title>", "softmax", "stopped after the first"))
    assert "<code>python -m attn_fuse.run --explain --pick fused --html report.html" in page


def test_explain_changes_nothing_while_it_goes_on(tmp_path: Path) -> None:
    wanted = done(tmp_path, TRAINS, sys.executable, "script.py", "--steps", "3")
    got = done(tmp_path, TRAINS, *RUN, "--explain", "--steps", "9", "script.py", "--steps", "3")
    assert (got.returncode, got.stdout) == (0, wanted.stdout) and "to the end" in got.stdout
    assert "1 attention: " in got.stderr and got.stderr.endswith("the program ended by itself.\n")


@pytest.mark.thorough
def test_spawned_workers_of_a_loader_serve_and_end(tmp_path: Path) -> None:
    got = done(tmp_path, LOADS, *RUN, "--explain", "script.py")
    assert got.returncode == 0 and "attention: " in got.stderr, got.stderr
    assert got.stderr.endswith("stopped after the first inference; use --steps N for more.\n")


@pytest.mark.thorough
def test_under_torchrun_the_first_process_reports(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "attn_fuse.run", "--explain"]
    got = done(tmp_path, DISTRIBUTED, sys.executable, *torchrun, "script.py")
    assert got.returncode == 0 and got.stdout == "", got.stderr
    assert got.stderr.count("attn_fuse.run: script.py") == got.stderr.count("1 attention: ") == 1


def test_a_thread_that_goes_on_does_not_hold_up_the_end(tmp_path: Path) -> None:
    got = done(tmp_path, THREADS, *RUN, "--explain", "script.py")
    assert (got.returncode, got.stdout) == (0, "") and "1 attention: " in got.stderr


@pytest.mark.parametrize(
    "how",
    [
        "is stopped",
        *(
            pytest.param(how, marks=pytest.mark.thorough)
            for how in ("raises", "exits", "is interrupted", "no torch", "nothing")
        ),
    ],
)
def test_nothing_of_the_watch_is_left_however_the_program_ends(how: str, tmp_path: Path) -> None:
    got = done(tmp_path, ENDS, sys.executable, "-c", AFTERWARDS, "--explain", "script.py", how)
    assert "nothing is left" in got.stdout, got
    assert got.returncode == {"raises": 1, "exits": 3, "is interrupted": -signal.SIGINT, "nothing": 2}.get(how, 0)


def test_a_script_may_set_the_environment_before_torch_and_attend_in_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    got = done(tmp_path, FUNCTION, *RUN, "script.py")
    assert got.stdout == "1 True\n"
    assert got.stderr == (
        "attn_fuse.run: script.py\n\n"
        "no attention was seen. Plain functions are analysed only under @torch.compile, and processes that the program "
        "starts are not analysed.\n"
    )


FAILS = (
    """
from dataclasses import replace
from attn_fuse.picker import pick

def fails(call):
    raise ZeroDivisionError("by design")

pick.KERNELS = tuple(replace(kernel, emit=fails) for kernel in pick.KERNELS)
"""
    + MODEL
    + """
import os
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
with torch.no_grad():
    Model()(torch.randn(2, 64, 32))
"""
)


def test_an_attention_that_attn_fuse_fails_on_gets_a_script(tmp_path: Path) -> None:
    got = done(tmp_path, FAILS, *RUN, "--explain", "--repro", "failures", "--kernels", "chunked", "script.py")
    (script,) = (tmp_path / "failures").glob("*.py")
    assert got.returncode == 0 and f"repro:      {script}" in got.stderr, got.stderr
    done_alone = done(tmp_path, "", sys.executable, str(script))
    assert done_alone.returncode == 0 and done_alone.stdout.endswith("both compute the same\n"), done_alone
    refused = done(tmp_path, FAILS, *RUN, "--repro", "script.py", "script.py")
    assert (refused.returncode, refused.stderr) == (
        2,
        "attn_fuse.run: --repro script.py: that is a file, name a folder\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["", "/no/compiler"])
def test_a_program_is_fused_and_goes_on_without_a_compiler(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = done(tmp_path, TRAINS, sys.executable, "script.py", "--steps", "3")
    if compiler:
        monkeypatch.setenv("CXX", compiler)
        monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    got = done(tmp_path, TRAINS, *RUN, "--pick", "fused", "script.py", "--steps", "3")
    assert got.returncode == 0
    losses, wanted_losses = (
        [float(loss) for loss in re.findall(r"^\d (.*)$", text, re.M)] for text in (got.stdout, wanted.stdout)
    )
    assert losses == pytest.approx(wanted_losses, rel=1e-4) and len(losses) == 3
    assert ("compiling it failed" if compiler else "compiled at its first call") in got.stderr
    assert got.stdout.endswith("to the end\nat exit\n")
