"""The architectures that BetterTransformer used to convert, as `transformers` writes them, unmodified.

Small and random, nothing is downloaded. With `pick="fused"` every attention of each is on a fused kernel, outputs and
gradients equal eager ones; by default the report tells what was chosen for each and why. `make test-models` runs them.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: `make test-models` does it")

from attn_fuse.report import SiteReport, collecting  # noqa: E402
from tests.harness import Outcome, assert_fused, compiled  # noqa: E402

pytestmark = pytest.mark.models

LAYERS, HIDDEN, HEADS, WORDS = 2, 32, 4, 64
SOURCE, TARGET = 11, 7


@dataclass(frozen=True)
class Architecture:
    """One kind of model. sizes, dropouts: its configuration's names for them.

    target: whether it has a decoder beside its encoder, which then attends to itself and to the encoder.
    """

    name: str
    model: str
    sizes: dict[str, Any]
    dropouts: tuple[str, ...]
    target: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def sites(self) -> int:
        return LAYERS * (3 if self.target else 1)

    def program(self, dropout: float = 0.0) -> Program:
        """A random model with this probability for every dropout."""
        kind = getattr(transformers, self.model)
        settings = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
        config = kind.config_class(**settings | self.sizes | self.more | dict.fromkeys(self.dropouts, dropout))
        return Program(kind._from_config(config, attn_implementation="eager"), self.target)

    def inputs(self, source_length: int = SOURCE, target_length: int = TARGET) -> tuple[Tensor, ...]:
        """Token ids and their padding mask, of the source and, where there is one, of the target."""
        source, target = _padded(source_length), _padded(target_length)
        return source + target if self.target else source


def _padded(length: int) -> tuple[Tensor, Tensor]:
    """Three sentences, padded on the left, on the right and not at all."""
    mask = torch.ones(3, length, dtype=torch.long)
    mask[0, :3] = 0
    mask[1, -2:] = 0
    return torch.randint(3, WORDS, mask.shape) * mask, mask


class Program(nn.Module):
    """The model's last hidden states, and in training its weight decay; weights so large that scores differ.

    A key's bias shifts all scores of a query alike, so its gradient is rounding and nothing else. Weight decay gives
    it a size to be compared at.
    """

    def __init__(self, model: nn.Module, target: bool) -> None:
        super().__init__()
        # Pegasus and Blenderbot freeze their positions; the harness asks for the gradient of every parameter.
        self.model, self.target, self.wide = model.requires_grad_(), target, False
        for name, weight in self.named_parameters():
            of_a_norm = weight.dim() == 1 and name.endswith("weight")
            nn.init.normal_(weight, 1.0 if of_a_norm else 0.0, 0.3)

    def forward(self, *args: Tensor | None) -> tuple[Tensor, ...]:
        with InFloat64() if self.wide else contextlib.nullcontext():
            hidden = self.hidden(*args)
        if not self.training:
            return (hidden,)
        return hidden, torch.stack([weight.square().sum() for weight in self.parameters()]).sum()

    def hidden(
        self, ids: Tensor, mask: Tensor | None, target: Tensor | None = None, target_mask: Tensor | None = None
    ) -> Tensor:
        if self.target:
            return self.model(ids, mask, decoder_input_ids=target, decoder_attention_mask=target_mask)[0]
        return self.model(ids, attention_mask=mask)[0]

    def double(self) -> Program:
        self.wide = True
        return super().double()


class InFloat64(TorchFunctionMode):
    """What is written as float32 is float64.

    Most of these models compute their softmax in float32 whatever their dtype. In float64 the fill of a mask is
    float64's lowest number, which float32 makes minus infinity: a query that sees no key, as padding on the left does
    not, would then get NaN where in float32 it gets a mean.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            return args[0].double()
        wider = {torch.float32: torch.float64}
        args, kwargs = pytree.tree_map(
            lambda v: wider.get(v, v) if isinstance(v, torch.dtype) else v, (args, kwargs or {})
        )
        return function(*args, **kwargs)


_BART = {
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
_BART_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
_GPT = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32}
_GPT_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_LLAMA = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": 32,
}

ARCHITECTURES = (
    Architecture("gpt2", "GPT2Model", _GPT, _GPT_DROPOUTS),
    Architecture(
        "gpt_neo",
        "GPTNeoModel",
        {"hidden_size": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS, "max_position_embeddings": 32},
        ("resid_dropout", "embed_dropout", "attention_dropout"),
        more={"attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    Architecture("gpt_neox", "GPTNeoXModel", _LLAMA, ("attention_dropout", "hidden_dropout")),
    Architecture("gptj", "GPTJModel", _GPT, _GPT_DROPOUTS, more={"rotary_dim": 4}),
    Architecture(
        "t5",
        "T5Model",
        {"d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": 2 * HIDDEN, "num_layers": LAYERS, "num_heads": HEADS},
        ("dropout_rate",),
        target=True,
        more={"decoder_start_token_id": 0},
    ),
    Architecture("bart", "BartModel", _BART, _BART_DROPOUTS, target=True),
    Architecture("codegen", "CodeGenModel", _GPT | {"n_ctx": 32}, _GPT_DROPOUTS, more={"rotary_dim": 4}),
    Architecture("pegasus", "PegasusModel", _BART, _BART_DROPOUTS, target=True),
    Architecture(
        "opt",
        "OPTModel",
        {
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "ffn_dim": 2 * HIDDEN,
            "word_embed_proj_dim": HIDDEN,
            "max_position_embeddings": 32,
        },
        ("dropout", "attention_dropout"),
    ),
    Architecture("llama", "LlamaModel", _LLAMA, ("attention_dropout",)),
    Architecture("llama_grouped", "LlamaModel", _LLAMA, ("attention_dropout",), more={"num_key_value_heads": 2}),
    Architecture("blenderbot", "BlenderbotModel", _BART, _BART_DROPOUTS, target=True),
    Architecture("m2m_100", "M2M100Model", _BART, _BART_DROPOUTS, target=True),
)

each = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)


@each
def test_inference(architecture: Architecture) -> None:
    outcome = assert_fused(architecture.program().eval(), *architecture.inputs(), backward=False)
    assert_all_seen(architecture, outcome)


@each
def test_inference_without_padding(architecture: Architecture) -> None:
    ids = [None if n % 2 else value for n, value in enumerate(architecture.inputs())]
    outcome = assert_fused(architecture.program().eval(), *ids, backward=False)
    assert_all_seen(architecture, outcome)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@each
def test_another_length(architecture: Architecture, training: bool) -> None:
    """The second one makes the sizes symbols."""
    program, more = architecture.program().train(training), architecture.inputs(SOURCE + 2, TARGET + 2)
    outcome = assert_fused(program, *architecture.inputs(), more=[more], backward=training)
    assert len(outcome.sites) == architecture.sites, str(outcome)


@each
def test_training(architecture: Architecture) -> None:
    outcome = assert_fused(architecture.program().train(), *architecture.inputs())
    assert_all_seen(architecture, outcome)


@each
def test_dropout(architecture: Architecture) -> None:
    program, args = architecture.program(dropout=0.1).train(), architecture.inputs()
    with collecting() as graphs:
        run = compiled(program)
        (first, _), (second, _) = run(*args), run(*args)
    assert not torch.equal(first, second)
    second.sum().backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in program.parameters())
    outcome = Outcome({}, tuple(graphs))
    assert_all_seen(architecture, outcome)
    assert all(site.fused for site in outcome.sites), str(outcome)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@each
def test_the_report_by_default(architecture: Architecture, training: bool) -> None:
    program = architecture.program(dropout=0.1).train(training)
    with collecting() as graphs, torch.set_grad_enabled(training):
        compiled(program, pick="fastest")(*architecture.inputs())
    outcome = Outcome({}, tuple(graphs))
    assert_all_seen(architecture, outcome)
    for site in outcome.sites:
        assert_explained(site)


@each
def test_float64_says_something_of_everything(architecture: Architecture) -> None:
    """Where it does not, the harness has nothing to compare with, and every other test here is empty."""
    program, args = architecture.program().train().double(), architecture.inputs()
    out = program(*args)[0]
    assert out.dtype == torch.float64
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in program.parameters())


def test_with_inductor() -> None:
    (t5,) = (architecture for architecture in ARCHITECTURES if architecture.name == "t5")
    outcome = assert_fused(t5.program().eval(), *t5.inputs(), inner="inductor", backward=False)
    assert_all_seen(t5, outcome)


def assert_all_seen(architecture: Architecture, outcome: Outcome) -> None:
    """Every attention is in the report, and none twice."""
    assert len(outcome.sites) == architecture.sites, str(outcome)
    assert sum(len(graph.sites) for graph in outcome.graphs) == architecture.sites, str(outcome)


def assert_explained(site: SiteReport) -> None:
    """What became of the attention and why: a kernel, or one cause at a line of the model's source."""
    assert all(reasons and all(reasons) for reasons in site.why_not.values())
    if site.fused:
        assert site.kernel and site.attention["picked"]
        return
    assert site.status in ("as written", "refused")
    assert site.blocker is not None and site.blocker.reason and site.blocker.op
    where = site.blocker.location
    assert where is not None and "transformers" in where.file
    assert Path(where.file).read_text().splitlines()[where.line - 1].strip() == where.code
