"""Repro: the script of a failure runs alone, exits with 1 while attn_fuse fails, and with 0 once it does not."""

from __future__ import annotations

import importlib
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from attn_fuse.backend import attn_fuse as backend
from attn_fuse.errors import OptionError
from attn_fuse.kernels import switches
from attn_fuse.options import Options, parse_options
from attn_fuse.picker import pick
from attn_fuse.picker.leaves import Leaf, made
from attn_fuse.picker.pick import CHECK_FAILED, Choice
from attn_fuse.report import Failure, GraphReport, as_json, as_text, collecting
from attn_fuse.repro.write import NotWritten, _import

ROOT = Path(__file__).parents[2]
# Run before a script, it puts a fault into a kernel; so it does for the program that the script is about.
FAULT = """
from dataclasses import replace
import torch
from attn_fuse.picker import pick

(right,) = (kernel for kernel in pick.KERNELS if kernel.name == "chunked")

def raises(call):
    raise ZeroDivisionError("by design")

def wrong(call):
    return call.node(torch.mul, right.emit(call), 1.5)

def wrong_gradient(call):
    out = right.emit(call)
    half = call.node(torch.mul, out, 0.5)
    return call.node(torch.add, call.node("detach", half), half)

def faulty(emit):
    return tuple(replace(kernel, emit=emit) if kernel is right else kernel for kernel in pick.KERNELS)
"""
fault: dict[str, Any] = {}
exec(FAULT, fault)


class Block(nn.Module):
    """Causal and padded attention in one projection, as models have it."""

    def __init__(self, length: int = 16) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.register_buffer("causal", torch.ones(length, length).tril().bool())

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(8)
        scores = scores.masked_fill(~self.causal[:length, :length], -math.inf)
        scores = scores.masked_fill((pad == 0)[:, None, None, :], -1e9)
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def padded(length: int = 9) -> tuple[Tensor, Tensor]:
    pad = torch.ones(2, length, dtype=torch.int64)
    pad[1, 6:] = 0
    return torch.randn(2, length, 32), pad


def compiled(
    program: Callable[..., Any], inputs: tuple[Any, ...], folder: Path | None, dynamic: bool = False, **options: Any
) -> list[GraphReport]:
    """The reports, once the compiled program has given what it gives as written."""
    given = {"inner_backend": "eager", "kernels": ["chunked"], "check": True, **options}
    if folder is not None:
        given["repro"] = folder
    torch.compiler.reset()
    with collecting() as graphs:
        got = torch.compile(program, backend=backend, dynamic=dynamic, options=given)(*inputs)
    torch.testing.assert_close(got, program(*inputs))
    return graphs


def scripts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.py"))


def ran(script: Path, emit: str = "") -> subprocess.CompletedProcess[str]:
    """The script, run in a process of its own; emit: the fault that is put into `chunked` there."""
    run = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    if emit:
        run = f"{FAULT}\npick.KERNELS = faulty({emit})\n{run}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", run], cwd=script.parent.parent, env=environment, capture_output=True, text=True
    )


def exits(script: Path) -> int:
    """The exit code of the script, run in this process."""
    torch.compiler.reset()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return int(ended.value.code or 0)


def test_a_kernel_that_raises(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(pick, "KERNELS", fault["faulty"](fault["raises"]))
    (graph,) = compiled(Block().eval(), padded(), tmp_path / "repro")
    (site,), (script,) = graph.sites, scripts(tmp_path / "repro")
    assert site.status == "as written"
    assert site.failures == (Failure("chunked cannot be called: by design", "chunked", str(script)),)
    assert site.blocker is not None and site.blocker.advice == f"report this failure of attn_fuse with {script}"
    assert f"repro:      {script}" in as_text(graph)
    assert as_json(graph)["sites"][0]["failures"][0]["file"] == str(script)
    assert f"{script} reproduces the failure: chunked cannot be called: by design" in caplog.text

    done = ran(script, "raises")
    assert done.returncode == 1 and done.stdout.endswith("chunked cannot be called: by design\n"), done
    done = ran(script)
    assert done.returncode == 0 and "FUSED on chunked" in done.stdout, done
    assert done.stdout.endswith("nothing failed, and both compute the same\n")


@pytest.mark.parametrize("emit", ["wrong", "wrong_gradient"])
def test_a_kernel_that_is_wrong(emit: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(pick, "KERNELS", fault["faulty"](fault[emit]))
    (graph,) = compiled(Block().train(), padded(), tmp_path / "repro")
    (site,), (script,) = graph.sites, scripts(tmp_path / "repro")
    what = "the rewritten gradient of input" if emit == "wrong_gradient" else "the rewritten output 0 is"
    assert site.blocker is not None and what in site.blocker.reason
    assert site.failures == (Failure(site.blocker.reason, "chunked", str(script)),)

    assert exits(script) == 1 and "the check failed: " in capsys.readouterr().out.splitlines()[-1]
    monkeypatch.undo()
    assert exits(script) == 0


def test_an_inner_backend_that_computes_something_else(tmp_path: Path, monkeypatch, capsys) -> None:
    """The numbers that count are those that the compiled program gives."""
    monkeypatch.setattr(pick, "KERNELS", fault["faulty"](fault["raises"]))
    compiled(Block().eval(), padded(), tmp_path)
    monkeypatch.undo()
    (script,) = scripts(tmp_path)
    assert exits(script) == 0

    def off(self: Any, graph: GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
        return lambda *values: tuple(out * 1.5 for out in graph(*values))

    monkeypatch.setattr(importlib.import_module("attn_fuse.backend").Attempt, "by_inner_backend", off)
    assert exits(script) == 1
    assert "the rewritten output 0 is" in capsys.readouterr().out


@pytest.mark.parametrize("stage", ["normalize", "lift", "recognize", "pick"])
def test_a_stage_that_raises(stage: str, tmp_path: Path, monkeypatch, capsys) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError('by "design" \\')

    home = "attn_fuse.backend" if stage == "pick" else "attn_fuse.analysis"
    monkeypatch.setattr(importlib.import_module(home), stage, fails)
    (graph,) = compiled(Block().eval(), padded(), tmp_path)
    (script,) = scripts(tmp_path)
    assert graph.sites[0].failures[0].what.startswith("analysing it failed: ZeroDivisionError")
    assert exits(script) == 1
    assert 'analysing it failed: ZeroDivisionError: by "design"' in capsys.readouterr().out
    monkeypatch.undo()
    assert exits(script) == 0


def test_a_stage_that_fails_on_the_whole_graph_of_a_script(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pick, "KERNELS", fault["faulty"](fault["raises"]))
    compiled(Block().eval(), padded(), tmp_path)
    monkeypatch.undo()

    def fails(*_: object) -> None:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(importlib.import_module("attn_fuse.backend"), "functionalize", fails)
    assert exits(scripts(tmp_path)[0]) == 1


def test_a_kernel_that_fails_its_self_check(tmp_path: Path, monkeypatch) -> None:
    """Another kernel runs the attention then; the script is about the one that failed."""
    module = importlib.import_module("attn_fuse.backend")
    (chunked,) = (kernel for kernel in pick.KERNELS if kernel.name == "chunked")
    why_not = {"triton_flash": (f"{CHECK_FAILED}: 3 of 8 rows of its result differ",), "flex": ("is slower",)}
    monkeypatch.setattr(module, "pick", lambda *_, **__: Choice(chunked, why_not, "asked for"))
    (graph,) = compiled(Block().eval(), padded(), tmp_path)
    (script,) = scripts(tmp_path)
    assert graph.sites[0].fused
    assert [(f.kernel, f.file) for f in graph.sites[0].failures] == [("triton_flash", str(script))]
    assert "'kernels': ['triton_flash']" in script.read_text()
    assert "3 of 8 rows of its result differ" in script.read_text()


def test_asking_a_kernel_what_it_takes_fails(tmp_path: Path, monkeypatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("by design")

    kernels = tuple(replace(k, limits=fails) if k.name == "chunked" else k for k in pick.KERNELS)
    monkeypatch.setattr(pick, "KERNELS", kernels)
    compiled(Block().eval(), padded(), tmp_path)
    (script,) = scripts(tmp_path)
    assert exits(script) == 1
    monkeypatch.undo()
    assert exits(script) == 0


# ---- what stands in a script


def test_layers_that_fail_alike_share_a_script(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pick, "KERNELS", fault["faulty"](fault["wrong"]))
    layers = [Block().eval() for _ in range(3)]

    def program(x: Tensor, pad: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, pad)
        return x

    (graph,) = compiled(program, padded(), tmp_path)
    files = [site.failures[0].file for site in graph.sites]
    # The first layer reads its mask and the padding in another order.
    assert len(files) == 3 and {*files} == {*map(str, scripts(tmp_path))} and len({*files[1:]}) == 1


def test_masks_and_constants_are_kept_and_activations_are_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pick, "KERNELS", fault["faulty"](fault["raises"]))
    block, (x, pad) = Block(64).eval(), padded(20)
    with torch.no_grad():
        compiled(block, (x, pad), tmp_path)
    (script,) = scripts(tmp_path)
    namespace, text = runpy.run_path(str(script)), script.read_text()
    inputs = [made(leaf) for leaf in namespace["LEAVES"] if not leaf.held]
    assert [torch.equal(leaf.contents, block.causal) for leaf in namespace["LEAVES"] if leaf.held] == [True]
    assert sum(given.dtype == torch.int64 and torch.equal(given, pad) for given in inputs) == 1
    (drawn,) = (given for given in inputs if given.is_floating_point())
    real = block.qkv(x)
    assert drawn.shape == real.shape and drawn.stride() == real.stride()
    assert not torch.equal(drawn, real) and not drawn.requires_grad
    assert abs(drawn.std() - real.std()) < 0.1 * real.std() and "grad=False" in text
    assert script.with_suffix(".pt").stat().st_size < 4 * 64 * 64


def test_symbols_autocast_dropout_and_parameters(tmp_path: Path, monkeypatch) -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)
            self.temperature = nn.Parameter(torch.tensor(0.3))
            self.table = nn.Parameter(torch.randn(40, 4))

        def forward(self, x: Tensor, window: int) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            i = torch.arange(x.shape[1])
            back = i[:, None] - i
            scores = q @ k.mT * self.temperature + self.table[back.clamp(-19, 19) + 19].permute(2, 0, 1)
            scores = scores.masked_fill((back > window) | (back < 0), -math.inf)
            return (F.dropout(scores.softmax(-1), 0.25, self.training) @ v).transpose(1, 2).flatten(2)

    monkeypatch.setattr(pick, "KERNELS", fault["faulty"](fault["wrong"]))
    options = {"inner_backend": "eager", "kernels": ["chunked"], "check": True, "repro": str(tmp_path)}
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(Biased(), backend=backend, dynamic=True, options=options)(torch.randn(2, 17, 32), 5)
    (script,) = scripts(tmp_path)
    text = script.read_text()
    assert "dynamic=True" in text and "device='cpu', dtype=torch.bfloat16, enabled=True" in text and "dropout" in text
    assert "torch.tensor(0.3" in text and re.search(r"Leaf\(size=\(40, 4\).*learned=True, spread=", text)
    assert exits(script) == 1
    monkeypatch.undo()
    assert exits(script) == 0


def test_what_the_graph_computes_before_is_observed(tmp_path: Path, monkeypatch) -> None:
    """Integers that no input holds, but the graph makes of one."""

    class Documents(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
            document = starts.cumsum(-1).sort(-1).values
            apart = document[:, None, :, None] != document[:, None, None, :]
            return ((10 * q) @ k.mT / 2).masked_fill(apart, -math.inf).softmax(-1) @ v

    monkeypatch.setattr(pick, "KERNELS", fault["faulty"](fault["raises"]))
    starts = torch.zeros(2, 40, dtype=torch.int64)
    starts[:, ::7] = 1
    inputs = *(torch.randn(2, 4, 40, 8) for _ in range(3)), starts
    compiled(Documents(), inputs, tmp_path)
    (script,) = scripts(tmp_path)
    inputs = map(made, runpy.run_path(str(script))["LEAVES"])
    whole = [given for given in inputs if not given.is_floating_point()]
    assert len(whole) == 1 and whole[0].max() == starts.sum(-1).max()
    monkeypatch.undo()
    assert exits(script) == 0


def test_a_script_says_what_torch_was_set_to(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pick, "KERNELS", fault["faulty"](fault["raises"]))
    monkeypatch.setattr(switches, "float32_precision", lambda device: "bf16")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        compiled(Block().eval(), padded(), tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    text = scripts(tmp_path)[0].read_text()
    assert "deterministic=True, warns_only=True), 'bf16', dynamic=False" in text


@pytest.mark.parametrize("spread", [True, False])
def test_every_kind_of_tensor_is_made(spread: bool) -> None:
    kinds = {torch.int32: (1, 4), torch.bool: (1.0,)}
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64, *kinds):
        how = kinds.get(dtype, (2.0, 1.0)) if spread else ()
        given = made(Leaf(size=(3, 1, 5), stride=(10, 0, 2), dtype=dtype, spread=how))
        assert given.shape == (3, 1, 5) and given.stride() == (10, 0, 2) and given.dtype == dtype
    drawn = made(Leaf(size=(100,), stride=(1,), dtype=torch.int64, spread=(1, 3)))
    assert drawn.unique().tolist() == [1, 2, 3]


def test_what_no_module_has_cannot_be_imported() -> None:
    def local() -> None: ...

    with pytest.raises(NotWritten, match="local"):
        _import("local", local)
    assert _import("torch", torch) == "import torch"
    assert _import("F", F) == "import torch.nn.functional as F"
    assert _import("softmax", F.softmax) == "from torch.nn.functional import softmax as softmax"


# ---- what never breaks a model


def test_a_folder_that_cannot_be_written_is_a_note(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pick, "KERNELS", fault["faulty"](fault["raises"]))
    (tmp_path / "taken").write_text("a file")
    (graph,) = compiled(Block().eval(), padded(), tmp_path / "taken")
    assert [failure.file for failure in graph.sites[0].failures] == [""]
    assert any(note.startswith("no script could be written for the failure at ") for note in graph.notes)


def test_where_nothing_fails_nothing_is_written(tmp_path: Path) -> None:
    (graph,) = compiled(Block().eval(), padded(), tmp_path / "repro")
    assert graph.sites[0].fused and not graph.sites[0].failures and not (tmp_path / "repro").exists()


def test_without_the_option_the_advice_names_it(monkeypatch) -> None:
    monkeypatch.setattr(pick, "KERNELS", fault["faulty"](fault["raises"]))
    (graph,) = compiled(Block().eval(), padded(), None)
    (site,) = graph.sites
    assert site.blocker is not None and "options={'repro': 'DIR'} writes a script" in site.blocker.advice
    assert site.failures == (Failure("chunked cannot be called: by design", "chunked"),)


def test_a_limit_of_a_kernel_is_no_failure(tmp_path: Path, monkeypatch) -> None:
    module = importlib.import_module("attn_fuse.emit.builder")

    def declines(call: Any) -> None:
        raise module.NotEmitted("takes none of this")

    monkeypatch.setattr(pick, "KERNELS", fault["faulty"](declines))
    (graph,) = compiled(Block().eval(), padded(), tmp_path / "repro")
    assert not graph.sites[0].failures and not (tmp_path / "repro").exists()


@pytest.mark.parametrize("value", [3, "", b"folder", ["folder"]])
def test_the_option_is_a_path(value: object) -> None:
    with pytest.raises(OptionError, match="repro="):
        parse_options({"repro": value})


def test_a_path_object_is_a_path(tmp_path: Path) -> None:
    assert parse_options({"repro": tmp_path}).repro == str(tmp_path)
    assert parse_options({"repro": None}) == parse_options({}) and Options().repro is None
