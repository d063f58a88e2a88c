"""`python -m attn_fuse.explain` and `attn_fuse.explain`: what they print, what they refuse, what they leave alone."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attn_fuse
from attn_fuse.explain import Explanation, explain
from attn_fuse.explain.command import main
from attn_fuse.report import Blocker, GraphReport, Location, SiteReport, collecting, reports
from attn_fuse.torch_internals import flex_runs_on_cpu
from tests.explain.sources import GPT, LOOK_ALIKE, PLAIN

ModelFile = Callable[[str], str]
WHOLE_AND_PART = """
import torch
from torch import nn

class SelfAttention(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT / 4).softmax(-1) @ v

class Model(nn.Module):
    def __init__(self, flavour: str):
        super().__init__()
        self.flavour = flavour.lower()
        self.inner = SelfAttention()
    def forward(self, x):
        return self.inner(x)
"""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(-2, -1) / 4.0, -1) @ v


class Layers(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.h = nn.ModuleList(Attention() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = x + layer(x)
        return x


class Named(Layers):
    """Hands on what it lacks, as wrappers do: Dynamo then reads its modules through `__dict__`."""

    def __getattr__(self, name: str) -> object:
        return super().__getattr__(name)


def site(module: str = "", **changes: object) -> SiteReport:
    values: dict[str, object] = {
        "location": Location("model.py", 7, "att = att.softmax(-1)", module),
        "status": "fused",
        "attention": {"mask": f"causal, by {module}.bias"},
        "kernel": "flash",
        "why_not": {"cudnn": ("runs on cuda, not on cpu",)},
        "score_bytes": 1024,
    }
    return SiteReport(**{**values, **changes})  # type: ignore[arg-type]


def explanation(*sites: SiteReport) -> Explanation:
    return Explanation("GPT(int64[1, 8]), inference", (GraphReport(sites, 0.0, ("a note",), "before()", "after()"),))


class TestText:
    def test_sites_that_differ_only_in_their_module_stand_in_one_block(self) -> None:
        text = str(explanation(*(site(f"h.{n}.attn") for n in range(12))))
        assert text.count("FUSED on flash") == 1
        assert "[1] model.py:7 (h.0.attn ... h.11.attn, 12 times)" in text
        assert "causal, by self.bias" in text
        assert "12.0 KiB of scores no longer stored" in text
        assert "12 attentions: 12 fused, 0 left as written" in text

    @pytest.mark.parametrize(
        ("modules", "words"),
        [
            (["h.0", "h.1"], "(h.0, h.1)"),
            (["h", "h", "h"], "(h, 3 times)"),
            (["h", "g", "h"], "(h, g, 3 times)"),
            (["", ""], "(2 times)"),
        ],
    )
    def test_modules_in_words(self, modules: Sequence[str], words: str) -> None:
        assert words in str(explanation(*(site(module, attention={}) for module in modules)))

    def test_a_mask_of_the_layer_around_does_not_part_a_group(self) -> None:
        sites = [site(f"m.h.{n}.attn", attention={"mask": f"by m.h.{n}.mask"}) for n in range(3)]
        assert "by m.h.*.mask" in str(explanation(*sites))

    @pytest.mark.parametrize(
        "change",
        [
            {"location": Location("model.py", 8, "att = att.softmax(-1)", "h.1.attn")},
            {"kernel": "chunked"},
            {"attention": {"mask": "none"}},
            {"status": "already fused", "kernel": None},
        ],
    )
    def test_other_sites_stand_apart(self, change: dict[str, object]) -> None:
        text = str(explanation(site("h.0.attn"), site("h.1.attn", **change)))
        assert "[2] model.py:" in text and "(h.0.attn)" in text and "causal, by h.0.attn.bias" in text

    def test_what_is_left_alone_names_its_blocker(self) -> None:
        where = [Location("model.py", 9, "x.softmax(-2)", module) for module in ("h.0", "h.1")]
        blockers = [(w.module, Blocker("another axis", "softmax", w)) for w in where]
        sites = [site(module, status="refused", blocker=b, score_bytes=0) for module, b in blockers]
        text = str(explanation(*sites))
        assert text.count("LEFT AS WRITTEN") == 1
        assert "because:    another axis" in text and "model.py:9: x.softmax(-2)" in text
        assert text.endswith("2 attentions: 0 fused, 2 left as written")

    def test_summary_names_what_was_fused_already(self) -> None:
        others = [
            site(status="already fused", score_bytes=0, fused_by=name) for name in ("flex_attention", "lib::attn")
        ]
        summary = str(explanation(site(), *others))
        assert (
            "3 attentions: 1 fused, 0 left as written, 2 fused already in the program (flex_attention, lib::attn)"
            in summary
        )

    def test_where_a_kernel_was_measured_is_a_line_of_its_own(self) -> None:
        picked = {"picked": "2.4 times as fast as written, by measurements here, the nearest at causal"}
        text = str(explanation(site(attention=picked)))
        assert "      picked:     2.4 times as fast as written\n" in text
        assert "\n                  by measurements here, the nearest at causal\n" in text

    def test_a_model_with_its_own_getattr(self) -> None:
        found = explain(Named(2), torch.randn(1, 8, 16))
        assert [site.location.module for site in found.sites] == ["h.0", "h.1"]

    def test_several_graphs(self) -> None:
        one = GraphReport((site("h.0.attn"),), 0.0, ("a note",))
        two = GraphReport((site("h.1.attn"),), 0.0, ("a note",))
        text = str(Explanation("GPT()", (one, two)))
        assert text.count("a note") == 1 and "2 attentions in 2 graphs: 2 fused" in text

    def test_no_attention(self) -> None:
        assert "no attention found: no softmax that can be followed stands between two products" in str(explanation())
        assert "no attention found: torch.compile made no graph of it" in str(Explanation("GPT()", ()))

    def test_json_keeps_every_site(self) -> None:
        given = explanation(*(site(f"h.{n}.attn") for n in range(12)))
        data = json.loads(json.dumps(given.as_json()))
        assert [s["location"]["module"] for s in data["graphs"][0]["sites"]] == [f"h.{n}.attn" for n in range(12)]
        assert (data["fused"], data["left_as_written"], data["score_bytes"]) == (12, 0, 12 * 1024)
        assert "before" not in data["graphs"][0]
        assert given.as_json(graphs=True)["graphs"][0]["after"] == "after()"


class TestCommandLine:
    def test_an_unmodified_gpt(self, model_file: ModelFile, capsys: pytest.CaptureFixture[str]) -> None:
        path = model_file(GPT)
        assert main([path, "--pick", "fused"]) == 0
        captured = capsys.readouterr()
        line = GPT.splitlines().index("        att = F.softmax(att, dim=-1)") + 1
        assert captured.out.startswith("GPT(int64[1, 32]), inference, float32 on cpu\n")
        assert f"{path}:{line} (transformer.h.0.attn ... transformer.h.2.attn, 3 times)" in captured.out
        assert "att = F.softmax(att, dim=-1)" in captured.out and "causal" in captured.out
        assert re.search(r"FUSED on \w+", captured.out) and re.search(r"not [\w, ]+: ", captured.out)
        assert "3 attentions: 3 fused, 0 left as written\n48.0 KiB of scores no longer stored" in captured.out
        assert "number of parameters" in captured.err and "number of parameters" not in captured.out

    def test_training(self, model_file: ModelFile, capsys: pytest.CaptureFixture[str]) -> None:
        assert (
            main([model_file(GPT.replace("dropout: float = 0.0", "dropout: float = 0.1")), "--train", "--pick=fused"])
            == 0
        )
        out = capsys.readouterr().out
        assert out.startswith("GPT(int64[1, 32], targets=int64[1, 32]), training")
        assert "3 attentions: " in out

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--dtype", "bfloat16", "--device", "cpu"], "bfloat16 on cpu"),
            (["--dynamic", "--pick", "fused"], "3 attentions: 3 fused"),
            (["--kernels", "cpu_flash"], "FUSED on cpu_flash"),
            (["--entry", "CausalSelfAttention"], "CausalSelfAttention(float32[1, 32, 32])"),
        ],
    )
    def test_flags(
        self, model_file: ModelFile, capsys: pytest.CaptureFixture[str], flags: Sequence[str], words: str
    ) -> None:
        assert main([model_file(GPT), *flags]) == 0
        assert words in capsys.readouterr().out

    def test_entry_and_inputs(self, model_file: ModelFile, capsys: pytest.CaptureFixture[str]) -> None:
        config = "GPTConfig(n_layer=1)"
        assert main([model_file(GPT), "--entry", f"GPT({config})", "--inputs", "torch.arange(8)[None]"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("GPT(int64[1, 8])") and "1 attention: " in out

    @pytest.mark.parametrize("inputs", ["(torch.randn(1, 2, 8, 4),) * 3", "dict.fromkeys('qkv', torch.randn(2, 8, 4))"])
    def test_entry_of_a_function(self, model_file: ModelFile, capsys: pytest.CaptureFixture[str], inputs: str) -> None:
        assert main([model_file(PLAIN), "--entry", "attention", "--inputs", inputs, "--dtype", "float64"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("attention(") and "float64" in out and "1 attention: " in out

    def test_what_was_made_up_stands_under_the_subject(
        self, model_file: ModelFile, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fields = "vocab_size: int", "n_layer: int", "n_head: int", "n_embd: int"
        config = "".join(f"    {field}\n" for field in fields) + "    block_size: int = 32\n    dropout: float = 0.0\n"
        source = re.sub(r"(class GPTConfig:\n)(    .*\n)+", rf"\1{config}", GPT)
        path = model_file(f"import no_such_plots\n{source}")
        assert main([path, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["said"] == [
            "missing packages, replaced by stand-ins: no_such_plots",
            "small values by name: config.vocab_size=1000, config.n_layer=2, config.n_head=4, config.n_embd=256",
        ]
        assert data["attentions"] == 2

    def test_a_setup_that_defines_both(
        self, model_file: ModelFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        setup = tmp_path / "setup_of_it.py"
        setup.write_text("model = GPT(GPTConfig(n_layer=1))\ninputs = torch.zeros(2, 9, dtype=torch.long)\n")
        assert main([model_file(GPT), "--setup", str(setup)]) == 0
        out = capsys.readouterr().out
        assert out.startswith("GPT(int64[2, 9])") and "1 attention: " in out

    def test_a_part_where_the_whole_cannot_be_built(
        self, model_file: ModelFile, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([model_file(WHOLE_AND_PART)]) == 0
        subject, note, *_ = capsys.readouterr().out.splitlines()
        assert subject.startswith("SelfAttention(float32[1, 64, 32])")
        assert note == (
            "  of a part only, SelfAttention, since of the whole: cannot build Model: its constructor needs flavour; "
            "pass --entry 'Model(flavour=...)'"
        )

    @pytest.mark.parametrize(
        "attends",
        [
            "relu()",
            "relu().flatten(2).view(x.shape)  # no softmax",
            "relu() if self.training or True else x.softmax(-1)",
        ],
    )
    def test_no_part_that_does_not_attend(
        self, attends: str, model_file: ModelFile, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = WHOLE_AND_PART.replace("SelfAttention", "Mixing").replace("softmax(-1)", attends)
        assert main([model_file(other)]) == 2
        assert capsys.readouterr().err.startswith(
            "attn_fuse.explain: cannot build Model: its constructor needs flavour"
        )

    def test_a_file_of_the_repository_that_holds_the_package(self, capsys: pytest.CaptureFixture[str]) -> None:
        example = Path(__file__).parents[2] / "examples" / "nanogpt" / "model.py"
        assert main([str(example), "--length", "64", "--pick", "fused"]) == 0
        assert "12 attentions: 12 fused" in capsys.readouterr().out

    def test_a_trained_function(self, model_file: ModelFile, capsys: pytest.CaptureFixture[str]) -> None:
        inputs = "(torch.randn(1, 2, 8, 4, requires_grad=True),) * 3"
        assert main([model_file(PLAIN), "--entry", "attention", "--inputs", inputs, "--train"]) == 0
        assert "1 attention: " in capsys.readouterr().out

    def test_a_look_alike(self, model_file: ModelFile, capsys: pytest.CaptureFixture[str]) -> None:
        path = model_file(LOOK_ALIKE)
        assert main([path, "--pick", "fused"]) == 0
        out = capsys.readouterr().out
        assert "1 attention: 0 fused, 1 left as written" in out
        assert "because:    " in out and f"{path}:9" in out

    def test_no_attention(self, model_file: ModelFile, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([model_file(PLAIN)]) == 0
        assert "no attention found" in capsys.readouterr().out

    def test_json(self, model_file: ModelFile, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([model_file(GPT), "--json", "--graph", "--pick", "fused"]) == 0
        data = json.loads(capsys.readouterr().out)
        (graph,) = data["graphs"]
        assert (data["attentions"], data["fused"], len(graph["sites"])) == (3, 3, 3)
        assert "softmax" in graph["before"] and "softmax" not in graph["after"]

    def test_graph(self, model_file: ModelFile, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([model_file(GPT), "--graph", "--pick", "fused"]) == 0
        before, after = capsys.readouterr().out.split("graph 1, after:")
        assert "graph 1, before:" in before and "softmax" in before.split("graph 1, before:")[1]
        assert "softmax" not in after


class TestFreshProcess:
    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)

    def test_a_model(self, model_file: ModelFile) -> None:
        done = self.run("-W", "error::RuntimeWarning", "-m", "attn_fuse.explain", model_file(GPT), "--pick", "fused")
        assert done.returncode == 0, done.stderr
        assert "3 attentions: 3 fused, 0 left as written" in done.stdout
        assert "RuntimeWarning" not in done.stderr

    def test_a_model_that_raises(self, model_file: ModelFile) -> None:
        raising = PLAIN.replace("return self.layer(x).relu()", "raise ValueError('not today')")
        for flags in ([], ["--inputs", "torch.randn(1, 4, 16)"]):
            done = self.run("-m", "attn_fuse.explain", model_file(raising), *flags)
            assert done.returncode == 2 and done.stdout == ""
            assert "ValueError: not today (model.py:8)" in done.stderr and "--inputs" in done.stderr
            assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
    @pytest.mark.parametrize("command", [["attn_fuse.explain"], ["attn_fuse", "explain"]])
    @pytest.mark.parametrize(("name", "why"), [("SIGSEGV", "a run of the model"), ("SIGKILL", "for its memory")])
    def test_a_model_that_ends_the_process(
        self, model_file: ModelFile, command: list[str], name: str, why: str
    ) -> None:
        ends = f"import os, signal; os.kill(os.getpid(), signal.{name})"
        done = self.run("-m", *command, model_file(PLAIN.replace("return self.layer(x).relu()", ends)))
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith(f"attn_fuse.explain: {name}: ") and why in done.stderr
        assert done.stderr.count("\n") == 1

    def test_a_process_that_is_ended_ends_the_model_too(self, model_file: ModelFile) -> None:
        endless = PLAIN.replace("return self.layer(x).relu()", "import time; print('runs', flush=True); time.sleep(60)")
        with subprocess.Popen(
            [sys.executable, "-m", "attn_fuse.explain", model_file(endless)], stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            while "runs" not in process.stderr.readline():
                pass
            process.terminate()
            # Reads to the end: nothing holds the pipe any longer.
            process.stderr.read()
            assert process.wait(30) != 0

    def test_the_function_before_and_after_the_module_is_imported(self) -> None:
        program = (
            "import torch, attn_fuse\n"
            "q = torch.randn(1, 2, 8, 4)\n"
            "def attention(q):\n"
            "    return (q @ q.mT).softmax(-1) @ q\n"
            "assert len(attn_fuse.explain(attention, q).sites) == 1\n"
            "import attn_fuse.explain\n"
            "assert len(attn_fuse.explain(attention, q).sites) == 1\n"
            "from attn_fuse import explain\n"
            "assert len(explain(attention, q).sites) == 1\n"
        )
        done = self.run("-c", program)
        assert done.returncode == 0, done.stderr


class TestFunction:
    x = torch.randn(2, 8, 16)

    def test_gives_the_report(self) -> None:
        given = explain(Layers(2), x=self.x)
        assert given.subject == "Layers(x=float32[2, 8, 16]), training, float32 on cpu"
        assert [s.location.module for s in given.sites] == ["h.0", "h.1"]
        assert given.fused + given.left_as_written == 2
        assert reports()[-1] == given.reports[-1]

    @pytest.mark.skipif(not flex_runs_on_cpu(), reason="needs a CPU that FlexAttention is compiled for")
    def test_names_the_kernel_that_the_backend_picks(self) -> None:
        def window(q: torch.Tensor) -> torch.Tensor:
            i = torch.arange(q.shape[-2])
            apart = i[:, None] - i
            return (q @ q.mT).masked_fill((apart < 0) | (apart >= 64), float("-inf")).softmax(-1) @ q

        # Which kernel is the fastest is the machine's to say; this one runs only where Inductor compiles it.
        q = torch.randn(1, 8, 1024, 64)
        with attn_fuse.use_kernels("flex"):
            given = explain(window, q)
            with collecting() as compiled:
                torch.compile(window, backend="attn_fuse")(q)
        assert [s.kernel for s in given.sites] == [s.kernel for s in compiled[-1].sites] == ["flex"]

    def test_the_module_is_the_function(self) -> None:
        module: Any = importlib.import_module("attn_fuse.explain")
        assert len(module(Layers(2), self.x).sites) == 2
        assert module.explain is explain and module is attn_fuse.explain

    @pytest.mark.parametrize("isolated", [True, False])
    def test_every_time_anew(self, isolated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if not isolated:  # as torch 2.11 compiles
            monkeypatch.setattr("attn_fuse.explain._ISOLATED", {})
        model = Layers(1)
        for _ in range(12):
            assert len(explain(model, self.x).sites) == 1

    def test_a_model_that_is_compiled_already(self) -> None:
        model = torch.compile(Layers(2), backend="eager")
        model(self.x)
        assert len(explain(model, self.x).sites) == 2

    def test_what_is_compiled_stays_compiled(self) -> None:
        compilations: list[tuple[int, ...]] = []

        def count(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
            compilations.append(tuple(i.shape[0] for i in inputs if i.dim() == 3))
            return graph.forward

        model = Layers(1)
        compiled = torch.compile(model, backend=count)
        compiled(self.x)
        explain(model, torch.randn(5, 8, 16))
        compiled(self.x)
        assert len(compilations) == 1

    def test_a_later_compilation_does_not_grow_dynamic_by_it(self) -> None:
        symbols: list[bool] = []

        def see(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
            symbols.append(any(isinstance(i, torch.SymInt) for i in inputs))
            return graph.forward

        model = Layers(1)
        explain(model, torch.randn(5, 8, 16))
        torch.compile(model, backend=see)(self.x)
        assert symbols == [False]

    def test_mode_gradients_and_random_state_stay(self) -> None:
        model = Layers(1).eval()
        state = torch.get_rng_state()
        explain(nn.Sequential(model, nn.Dropout(0.5)), self.x)
        assert torch.equal(state, torch.get_rng_state())
        assert not model.training and all(p.grad is None for p in model.parameters())

    def test_a_model_that_raises_raises(self) -> None:
        def broken(x: torch.Tensor) -> torch.Tensor:
            raise ValueError("not today")

        with pytest.raises(Exception, match="not today"):
            explain(broken, self.x)
