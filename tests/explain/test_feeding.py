"""Inputs that a model runs on: by names and layers, then as its errors ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building import built
from attn_fuse.explain.choose import candidates
from attn_fuse.explain.feeding import Wish, fed
from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.steps import now
from tests.explain.repository import SECONDS, Write


def source(layers: str, signature: str, body: str, arguments: str = "") -> str:
    """The source of a module: the layers that it has, the signature of its forward, and that one's body."""
    lines = "".join(f"        {line}\n" for line in layers.splitlines())
    inner = "".join(f"        {line}\n" for line in body.splitlines())
    head = (
        f"class Net(nn.Module):\n    def __init__(self{arguments and f', {arguments}'}):\n        super().__init__()\n"
    )
    return f"{head}{lines}    def forward(self{signature and f', {signature}'}):\n{inner}"


@dataclass(frozen=True)
class Run:
    """A model and inputs that it ran on."""

    model: Any
    inputs: Inputs
    attends: bool

    def __getitem__(self, name: str) -> Any:
        return self.inputs.kwargs[name]

    @property
    def all(self) -> list[Any]:
        return [*self.inputs.args, *self.inputs.kwargs.values()]

    @property
    def shapes(self) -> list[Any]:
        return [list(v.shape) if isinstance(v, Tensor) else v for v in self.all]


def run_in(path: Path, seconds: float = SECONDS, **wish: Any) -> Run:
    """The model of a file with the inputs that are found for it, on which it runs here once more."""
    with imported(path) as module:
        made = built(candidates(module)[0], module, 10**8, now() + seconds)
        model = made.model.eval()
        found = fed(model, made.slots, Wish(**wish), now() + seconds)
        model(*found.inputs.args, **found.inputs.kwargs)
    return Run(model, found.inputs, found.attends)


TOKENS = (
    "self.token, self.out = nn.Embedding(vocab, 4), nn.Linear(4, vocab)\nself.position = nn.Embedding(positions, 4)"
)
READ = "return self.out(self.token(ids) + self.position(torch.arange(ids.shape[1])))"
CLIP = "self.patch, self.time = nn.Conv2d(4, 8, 4, 4), nn.Parameter(torch.zeros(6, 1))"

BY_NAMES_AND_LAYERS: dict[str, tuple[str, Callable[[Run], object]]] = {
    "tokens as long as a slot says": (
        source(TOKENS, "ids", READ, "positions=32, vocab=11, block_size=20"),
        lambda run: run.shapes == [[1, 20]] and run.all[0].dtype == torch.int64 and int(run.all[0].max()) < 11,
    ),
    "floats as wide as the first linear": (
        source("self.layer = nn.Linear(10, 10)", "x", "return self.layer(x)"),
        lambda run: run.shapes == [[1, 64, 10]],
    ),
    "floats of the weights' dtype": (
        source("self.layer = nn.Linear(10, 10).to(torch.bfloat16)", "x", "return self.layer(x)"),
        lambda run: run.all[0].dtype == torch.bfloat16,
    ),
    "no longer than is cheap": (
        source("self.layer, self.max_len = nn.Linear(6, 6), 131072", "x", "return self.layer(x)"),
        lambda run: run.shapes == [[1, 1024, 6]],
    ),
    "vectors for names that say so": (
        source("self.layer = nn.Linear(6, 6)", "query, key", "return self.layer(query) + self.layer(key)"),
        lambda run: run.shapes == [[1, 64, 6], [1, 64, 6]],
    ),
    "pictures of the size that a slot says": (
        source("self.patches = nn.Conv2d(3, 8, 16, 16)", "x", "return self.patches(x)", "img_size=(32, 48)"),
        lambda run: run.shapes == [[1, 3, 32, 48]],
    ),
    "volumes": (
        source("self.patches = nn.Conv3d(2, 8, 8, 8)", "x", "return self.patches(x)"),
        lambda run: len(run.shapes[0]) == 5 and run.shapes[0][1] == 2,
    ),
    "sound and text": (
        source(
            "self.front, self.words = nn.Conv1d(80, 4, 3, padding=1), nn.Embedding(11, 4)",
            "mel, tokens",
            "assert not tokens.is_floating_point()\nreturn self.front(mel).mean(-1)[:, None] + self.words(tokens)",
        ),
        lambda run: run.shapes[0][1] == 80,
    ),
    "no optional ones": (
        source("self.layer = nn.Linear(6, 6)", "x, mask=None, memory=None", "return self.layer(x)"),
        lambda run: run.inputs.kwargs == {} and len(run.inputs.args) == 1,
    ),
    "a forward of no arguments": (
        source("self.layer = nn.Linear(6, 6)", "", "return self.layer.weight"),
        lambda run: run.all == [],
    ),
    "a time and a label beside a picture": (
        source(
            "self.patches, self.classes = nn.Conv2d(4, 8, 8, 8), nn.Embedding(5, 8)",
            "x, t, y",
            "assert t.shape == y.shape == x.shape[:1]\n"
            "return self.patches(x) + (self.classes(y) * t[:, None])[..., None, None]",
        ),
        lambda run: run.shapes == [[1, 4, 64, 64], [1], [1]],
    ),
    "a memory, an offset and a mask": (
        source(
            "self.layer = nn.Linear(6, 6)",
            "x, memory, start_pos: int, mask, *, scale: int",
            "assert start_pos == 0 and (mask is None or mask.shape == (x.shape[1], x.shape[1]))\n"
            "return self.layer(x + memory) * scale",
        ),
        lambda run: (
            [type(value) for value in run.all[:3]] == [Tensor, Tensor, int] and set(run.inputs.kwargs) == {"scale"}
        ),
    ),
    "lengths and the longest": (
        source(
            "self.layer = nn.Linear(6, 6)",
            "x, src_lens, max_src_len",
            "hidden = torch.arange(0, max_src_len)[None] >= src_lens[:, None]\n"
            "return self.layer(x.masked_fill(hidden[..., None], 0))",
        ),
        lambda run: run.all[1].tolist() == [run.shapes[0][1]],
    ),
    "marks that may be None": (
        source("self.layer = nn.Linear(6, 6)", "x, x_mark", "return self.layer(x if x_mark is None else x / 0)"),
        lambda run: run.all[1] is None,
    ),
}

AS_ERRORS_ASK: dict[str, tuple[str, Callable[[Run], object]]] = {
    "one length": (
        source("self.layer = nn.Linear(6, 6)", "x", "assert x.dim() == 3 and x.shape[1] == 20\nreturn self.layer(x)"),
        lambda run: run.shapes == [[1, 20, 6]],
    ),
    "one token": (
        source("self.token = nn.Embedding(11, 4)", "ids", "assert ids.shape[1] == 1\nreturn self.token(ids)"),
        lambda run: run.shapes == [[1, 1]],
    ),
    "learned positions": (
        source(
            "self.token, self.learned = nn.Embedding(11, 4), nn.Parameter(torch.zeros(23, 4))",
            "ids",
            "return self.token(ids) + self.learned",
        ),
        lambda run: run.shapes == [[1, 23]],
    ),
    "no longer than its positions": (
        source(TOKENS, "ids", READ, "positions=32, vocab=11"),
        lambda run: run.shapes[0][1] <= 32,
    ),
    "sides that a position table has": (
        source(
            "self.patches, self.positions = nn.Conv2d(3, 8, 16, 16), nn.Parameter(torch.zeros(1, 197, 8))",
            "x",
            "x = self.patches(x).flatten(2).mT\nreturn torch.cat([x[:, :1], x], 1) + self.positions",
        ),
        lambda run: run.shapes == [[1, 3, 224, 224]],
    ),
    "a side that is declared in a list": (
        source("self.patches = nn.Conv2d(3, 8, 16, 16)", "x", "return self.patches(x)", "img_size=[96]"),
        lambda run: run.shapes == [[1, 3, 96, 96]],
    ),
    "sides of two sizes": (
        source(
            "self.patches = nn.Conv2d(3, 8, 16, 16)", "x", "assert x.shape[-2:] == (256, 512)\nreturn self.patches(x)"
        ),
        lambda run: run.shapes == [[1, 3, 256, 512]],
    ),
    "a context of another width": (
        source(
            "self.layer, self.weight = nn.Linear(6, 6), nn.Parameter(torch.ones(40, 6))",
            "x, context",
            "return self.layer(x) + (context @ self.weight).mean(1, keepdim=True)",
        ),
        lambda run: run.shapes[1][-1] == 40,
    ),
    "rows of a width that nothing declares": (
        source(
            "self.rows, self.a = nn.Parameter(torch.zeros(1, 2, 7)), nn.Identity()",
            "x",
            "return torch.cat([self.rows, x], dim=1)",
        ),
        lambda run: run.shapes[0][-1] == 7,
    ),
    "tokens without a batch": (
        source(
            "self.token, self.out = nn.Embedding(11, 4), nn.Linear(4, 4)",
            "x",
            "x = self.token(x)\n_length, _width = x.shape\nreturn self.out(x)",
        ),
        lambda run: run.all[0].dim() == 1 and run.all[0].dtype == torch.int64,
    ),
    "a map for a convolution of no class": (
        source(
            "self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))",
            "x",
            "return torch.conv2d(x, self.weight).flatten(2).mT.softmax(-1)",
        ),
        lambda run: run.all[0].dim() == 4 and run.shapes[0][1] == 3,
    ),
    "a clip, frames first": (
        source(
            CLIP,
            "x",
            "b, f, c, h, w = x.shape\nreturn self.patch(x.reshape(b * f, c, h, w)).reshape(-1, f, 2048) + self.time",
        ),
        lambda run: len(run.shapes[0]) == 5 and run.shapes[0][2] == 4,
    ),
    "a clip, channels first": (
        source(
            CLIP,
            "x",
            "b, c, t, h, w = x.shape\n"
            "return self.patch(x.transpose(1, 2).reshape(b * t, c, h, w)).reshape(-1, t, 2048) + self.time",
        ),
        lambda run: len(run.shapes[0]) == 5 and run.shapes[0][1] == 4,
    ),
    "whole numbers for a small table": (
        source(
            "self.tokens, self.kinds = nn.Embedding(50, 16), nn.Embedding(2, 16)",
            "tokens, types",
            "return self.tokens(tokens) + self.kinds(types)",
        ),
        lambda run: int(run.all[1].max()) < 2,
    ),
    "an optional argument that an error names": (
        source(
            "self.layer = nn.Linear(16, 16)",
            "x, strength=None",
            "if strength is None:\n    raise ValueError('no strength was given')\n"
            "return self.layer(x) * strength.mean()",
        ),
        lambda run: isinstance(run["strength"], Tensor),
    ),
    "one of two that exclude each other": (
        source(
            "self.table, self.layer = nn.Embedding(9, 6), nn.Linear(6, 6)",
            "ids, embeds=None, mask=None, memory=None",
            "if ids is not None and embeds is not None:\n    raise ValueError('ids and embeds cannot both be given')\n"
            "assert memory is not None, 'memory must be given'\n"
            "return self.table(ids) @ self.layer(memory).transpose(-1, -2)",
        ),
        lambda run: "embeds" not in run.inputs.kwargs and run["memory"].shape[-1] == 6,
    ),
    "an argument that may be None": (
        source(
            "self.layer, self.offsets = nn.Linear(6, 6), None",
            "numbers, kinds",
            "return self.layer(numbers if kinds is None else numbers + self.offsets[kinds])",
        ),
        lambda run: run.all[1] is None,
    ),
    "a latent of which only errors tell": (
        source(
            "self.layer, self.places = nn.Linear(5, 2), nn.Parameter(torch.zeros(1, 36, 2))",
            "x",
            "b, c, h, w = x.shape\nreturn self.layer(x.reshape(b, c, h * w).permute(0, 2, 1)) + self.places",
        ),
        lambda run: run.shapes == [[1, 5, 6, 6]],
    ),
    "nodes and an adjacency": (
        source(
            "self.weight = nn.Parameter(torch.randn(5, 3))",
            "x, adj",
            "inner = torch.mm(x, self.weight)\nreturn torch.where(adj > 0, inner @ inner.T, -9e15).softmax(-1) @ inner",
        ),
        lambda run: run.shapes[0][1] == 5,
    ),
    "values for three layers": (
        source(
            "self.time, self.state, self.reward = nn.Embedding(50, 8), nn.Linear(17, 8), nn.Linear(1, 8)",
            "timesteps, states, rewards",
            "b, n, _ = states.shape\n"
            "return (self.state(states) + self.reward(rewards) + self.time(timesteps)).view(b, n, 8)",
        ),
        lambda run: run.shapes[1][-1] == 17 and run.shapes[2][-1] == 1,
    ),
}


@pytest.mark.parametrize(("text", "holds"), BY_NAMES_AND_LAYERS.values(), ids=BY_NAMES_AND_LAYERS)
def test_by_names_and_layers(write: Write, text: str, holds: Callable[[Run], object]) -> None:
    run = run_in(write(text))
    assert holds(run), run.inputs


@pytest.mark.parametrize(("text", "holds"), AS_ERRORS_ASK.values(), ids=AS_ERRORS_ASK)
def test_as_errors_ask(write: Write, text: str, holds: Callable[[Run], object]) -> None:
    run = run_in(write(text))
    assert holds(run), run.inputs


LAYER = source("self.layer = nn.Linear(6, 6)", "x, targets=None", "return self.layer(x)")


class TestWhatTheUserAsks:
    @pytest.mark.parametrize("text", [LAYER, source(TOKENS, "ids", READ, "positions=5000, vocab=11")])
    def test_a_length_and_a_batch(self, write: Write, text: str) -> None:
        assert run_in(write(text), length=1500, batch=3).shapes[0][:2] == [3, 1500]

    def test_a_batch_of_everything(self, write: Write) -> None:
        assert run_in(write(BY_NAMES_AND_LAYERS["a time and a label beside a picture"][0]), batch=2).shapes == [
            [2, 4, 64, 64],
            [2],
            [2],
        ]

    def test_targets(self, write: Write) -> None:
        text = source(TOKENS, "ids, targets=None", READ, "positions=128, vocab=11")
        run = run_in(write(text), train=True)
        assert list(run["targets"].shape) == run.shapes[0] and run["targets"].dtype == torch.int64

    def test_no_other_length_than_that(self, write: Write) -> None:
        text = source(
            "self.layer = nn.Linear(6, 6)", "x", "assert x.dim() == 3 and x.shape[1] == 20\nreturn self.layer(x)"
        )
        with pytest.raises(ExplainError):
            run_in(write(text), length=37)


class TestEnds:
    def test_a_model_that_always_raises(self, write: Write) -> None:
        path = write(source("self.layer = nn.Linear(6, 6)", "x", "raise ValueError('not today')"))
        message = r"no inputs found that Net runs on \(with float32\[1, 64, 6\]: ValueError: not today .*pass them with"
        with pytest.raises(ExplainError, match=message) as raised:
            run_in(path)
        assert "\n" not in str(raised.value)

    def test_the_example_can_be_evaluated(self, write: Write) -> None:
        with pytest.raises(ExplainError) as raised:
            run_in(write(source("self.layer = nn.Linear(6, 6)", "x, ids, memory", "raise ValueError(x)")))
        given = eval(str(raised.value).partition("--inputs '")[2].rpartition("'")[0], {"torch": torch})
        assert given.keys() == {"x", "ids", "memory"} and given["x"].shape[-1] == 6

    def test_at_its_time(self, write: Write) -> None:
        text = "import time\n" + source(
            "self.layer, self.n = nn.Linear(6, 6), 0",
            "x",
            "time.sleep(0.2)\nself.n += 1\nassert x.shape[-1] == 6 + self.n",
        )
        path, start = write(text), now()
        with pytest.raises(ExplainError):
            run_in(path, seconds=2.0)
        assert now() - start < 15

    def test_at_its_number_of_tries(self, write: Write) -> None:
        text = "TRIES = []\n" + source(
            "self.layer = nn.Linear(6, 6)",
            "x",
            "TRIES.append(x)\nfor _ in TRIES:\n    x = x + 0\nassert x.shape[-1] == 9 + len(TRIES)",
        )
        with imported(write(text)) as module:
            model = module.Net()
            with pytest.raises(ExplainError):
                fed(model, {}, Wish(), now() + 500)
            assert len(module.TRIES) < 2000

    @pytest.mark.parametrize("run, seconds", [(0.3, 3.0), (20.0, 1.5)], ids=["in its own time", "in the search's"])
    def test_what_runs_long_without_an_error_is_taken_where_nothing_else_runs(
        self, write: Write, monkeypatch: pytest.MonkeyPatch, run: float, seconds: float
    ) -> None:
        monkeypatch.setattr("attn_fuse.explain.feeding.RUN_SECONDS", run)
        monkeypatch.setattr("attn_fuse.explain.feeding.LONG_SECONDS", 0.3)
        path = write(source("self.layer = nn.Linear(6, 6)", "x", "assert x.shape[-1] == 6\nwhile True: pass"))
        with imported(path) as module:
            assert fed(module.Net(), {}, Wish(), now() + seconds).inputs.args[0].shape == (1, 64, 6)

    def test_what_was_cut_short_says_nothing(self, write: Write) -> None:
        path = write(source("self.layer = nn.Linear(6, 6)", "x", "while True: pass"))
        with imported(path) as module, pytest.raises(ExplainError, match="no inputs found"):
            fed(module.Net(), {}, Wish(), now() + 1)

    def test_what_computes_nothing_has_not_run(self, write: Write) -> None:
        text = source(
            "self.layer = nn.Linear(6, 6)", "x", "if self.mode == 'long':\n    return self.layer(x)", "mode=None"
        )
        with pytest.raises(ExplainError, match="Net computes nothing"):
            run_in(write(text.replace("self.layer =", "self.mode, self.layer = mode,")))

    def test_no_guess_takes_all_memory(self, write: Write) -> None:
        text = source("self.layer = nn.Linear(6, 6)", "x", "assert x.shape == (16000, 16000, 16000)")
        with pytest.raises(ExplainError, match="no inputs found"):
            run_in(write(text), seconds=20)

    def test_no_guessed_mask_takes_all_memory(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[int] = []
        ones = torch.ones

        def noted(*shape: Any, **options: Any) -> Tensor:
            tensor = ones(*shape, **options)
            made.append(tensor.nbytes)
            return tensor

        monkeypatch.setattr(torch, "ones", noted)
        body = "assert x.shape[1] == 30000 and 0 < mask.sum() < 9"
        with pytest.raises(ExplainError, match="no inputs found"):
            run_in(write(source("self.layer = nn.Linear(6, 6)", "x, mask=None", body)), seconds=20)
        assert made and max(made) < 2 << 30

    def test_an_embedding_without_rows(self, write: Write) -> None:
        with pytest.raises(ExplainError, match="no inputs found that Net runs on"):
            run_in(
                write(source("self.table = nn.Embedding(0, 4)", "numbers", "return self.table(numbers)")), seconds=20
            )


class TestTheModelStays:
    def test_in_its_mode_without_gradients_and_hooks(self, write: Write) -> None:
        with imported(write(LAYER)) as module:
            model = module.Net()
            fed(model, {}, Wish(), now() + 30)
        assert model.training and all(p.grad is None for p in model.parameters()) and torch.is_grad_enabled()
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    def test_uncompiled_where_it_compiles_itself(self) -> None:
        class Compiled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.count = nn.Linear(6, 6), 0

                def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
                    self.count += 1
                    return graph.forward

                self.part = torch.compile(torch.sin, backend=backend)

            def forward(self, x: Tensor) -> Tensor:
                return self.part(self.layer(x))

        model = Compiled()
        fed(model, {}, Wish(), now() + 30)
        assert model.count == 0
        model(torch.randn(1, 6))
        assert model.count == 1

    @pytest.mark.parametrize(
        ("body", "attends"), [("return self.layer(x).softmax(-1)", True), ("return self.layer(x)", False)]
    )
    def test_whether_it_attends_is_told(self, write: Write, body: str, attends: bool) -> None:
        assert run_in(write(source("self.layer = nn.Linear(6, 6)", "x", body))).attends is attends
