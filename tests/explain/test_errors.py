"""`python -m attn_fuse.explain` where it must give up: one line, exit code 2, and what to pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from attn_fuse.explain.command import main
from tests.explain.sources import PLAIN

ModelFile = Callable[[str], str]


ERRORS = {
    "a constructor that needs arguments": (
        "from torch import nn\nclass Net(nn.Module):\n"
        "    def __init__(self, flavour: str):\n        super().__init__()\n        self.flavour = flavour.lower()\n",
        [],
        "cannot build Net: its constructor needs flavour; pass --entry 'Net(flavour=...)'",
    ),
    "no module class": ("x = 1\n", [], "defines no nn.Module class; pass --entry EXPR"),
    "a file that raises": (
        "import torch\ntorch.nothing_of_this_name\n",
        [],
        "AttributeError: module 'torch' has no attribute 'nothing_of_this",
    ),
    "inputs that cannot be guessed": (
        "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        raise ValueError(x)\n",
        [],
        "no inputs found that Net runs on",
    ),
    "a function without inputs": (
        PLAIN,
        ["--entry", "attention"],
        "no inputs can be guessed for the function attention",
    ),
    "an entry that does not evaluate": (PLAIN, ["--entry", "Nett"], "--entry 'Nett' does not evaluate: NameError"),
    "an entry of another kind": (PLAIN, ["--entry", "SIZE"], "--entry 'SIZE' gives a value of type int; it must give"),
    "an entry that is another class": (PLAIN, ["--entry", "dict"], "--entry 'dict' gives the class dict; it must give"),
    "inputs that do not evaluate": (
        PLAIN,
        ["--inputs", "randn(1)"],
        "--inputs 'randn(1)' does not evaluate: NameError",
    ),
    "inputs of another kind": (
        PLAIN,
        ["--inputs", "[1]"],
        "--inputs '[1]' gives a list; it must give a tensor, a tuple",
    ),
    "inputs that the model does not take": (
        PLAIN,
        ["--inputs", "torch.randn(1, 15)"],
        "Net(float32[1, 15]) raises RuntimeError: ",
    ),
    "training with nothing to train": (
        PLAIN,
        ["--train", "--entry", "attention", "--inputs", "(torch.randn(1, 2, 8, 4),) * 3"],
        "--train: no output needs a gradient",
    ),
    "a package that is not installed": (
        "from torch import nn\nimport no_such_layers\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.mlp, self.out = no_such_layers.Mlp(), nn.Linear(8, 8)\n"
        "    def forward(self, x):\n        return self.mlp(self.out(x))\n",
        [],
        "the model uses no_such_layers.Mlp, and no_such_layers is not installed; install no_such_layers",
    ),
    "more parameters than allowed": (
        PLAIN,
        ["--parameters", "100"],
        "parameters, more than 100; build a smaller one with --entry 'Net(...)', or allow it with --parameters",
    ),
    "a setup that raises": (
        PLAIN,
        ["--setup", __file__ + ".none"],
        ".none: FileNotFoundError: [Errno 2] No such file",
    ),
    "an unknown device": (PLAIN, ["--device", "gpu"], "--device 'gpu' cannot be used: RuntimeError: "),
    "an unknown dtype": (
        PLAIN,
        ["--dtype", "float23"],
        "--dtype 'float23' is no dtype to run a model in. Did you mean",
    ),
    "an unknown pick": (
        PLAIN,
        ["--pick", "best"],
        "attn_fuse option pick='best': it must be 'fastest' or 'measured' or 'memory' or 'fused'",
    ),
    "an unknown kernel": (PLAIN, ["--kernels", "cpu_flash,flash"], "attn_fuse has no kernel 'flash'."),
}


class TestErrors:
    @pytest.mark.parametrize(("source", "flags", "message"), ERRORS.values(), ids=ERRORS)
    def test_one_line_that_says_what_to_pass(
        self, model_file: ModelFile, capfd: pytest.CaptureFixture[str], source: str, flags: Sequence[str], message: str
    ) -> None:
        assert main([model_file(source), *flags]) == 2
        captured = capfd.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert captured.err.startswith("attn_fuse.explain: ") and message in captured.err

    def test_no_such_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([str(tmp_path / "none.py")]) == 2
        assert "none.py: no such file; pass a Python file" in capsys.readouterr().err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
    def test_a_device_that_is_not_there(self, model_file: ModelFile, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([model_file(PLAIN), "--device", "cuda"]) == 2
        assert "--device 'cuda' cannot be used: " in capsys.readouterr().err

    def test_a_model_that_only_runs_as_written(
        self, model_file: ModelFile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object, **__: object) -> None:
            raise ValueError("a backend that fails")

        monkeypatch.setattr("attn_fuse.backend.analyze_only", broken)
        assert main([model_file(PLAIN)]) == 2
        assert "Net(float32[1, 64, 16]) runs as written, but torch.compile fails on it: " in capsys.readouterr().err
