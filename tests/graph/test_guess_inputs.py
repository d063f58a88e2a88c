"""Inputs that a model runs on, guessed from what it declares and from its layers."""

from __future__ import annotations

import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from attn_fuse.errors import ExplainError
from attn_fuse.explain.running.declared import LONGEST, SHORT, USUAL
from attn_fuse.explain.running.guess_inputs import inputs_for
from tests.subjects import found_in


class Tokens(nn.Module):
    """Token and position embeddings; refuses sequences longer than its positions."""

    def __init__(self, positions: int = 32, vocab: int = 11) -> None:
        super().__init__()
        self.position = nn.Embedding(positions, 4)
        self.token = nn.Embedding(vocab, 4)
        self.out = nn.Linear(4, vocab)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.out(self.token(ids) + self.position(torch.arange(ids.shape[1])))
        if targets is None:
            return x
        return nn.functional.cross_entropy(x.view(-1, x.shape[-1]), targets.view(-1))


class Floats(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Config:
    block_size = 20


class Compiled(Floats):
    """Compiles a part of itself, and counts how often that is done."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

        def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
            self.count += 1
            return graph.forward

        self.part = torch.compile(torch.sin, backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.layer(x))


class TestInputs:
    def test_a_model_that_compiles_itself_is_not_compiled_for_a_guess(self) -> None:
        model = Compiled()
        assert inputs_for(model).args[0].shape[-1] == 6 and model.count == 0
        model(torch.randn(1, 6))
        assert model.count == 1

    def test_tokens_as_long_as_the_config_says(self) -> None:
        (ids,) = inputs_for(Tokens(), [Config()]).args
        assert ids.dtype == torch.int64 and ids.shape == (1, 20) and int(ids.max()) < 11

    @pytest.mark.parametrize("holder", [Config(), {"n_positions": 9}, types.SimpleNamespace(max_seq_len=9)])
    def test_the_length_may_stand_in_the_models_config(self, holder: object) -> None:
        model: Any = Floats()
        model.config = holder
        assert inputs_for(model).args[0].shape[1] == (20 if isinstance(holder, Config) else 9)

    def test_tokens_as_long_as_the_positions(self) -> None:
        assert inputs_for(Tokens(positions=30)).args[0].shape == (1, 30)

    def test_tokens_of_the_embedding_that_takes_them(self) -> None:
        (ids,) = inputs_for(Tokens(positions=1000, vocab=2)).args
        assert ids.shape == (1, 1000) and set(ids.flatten().tolist()) == {0, 1}

    def test_a_guess_that_cannot_be_made_is_none(self) -> None:
        class Empty(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(0, 4)

            def forward(self, numbers: torch.Tensor) -> torch.Tensor:
                return self.table(numbers)

        with pytest.raises(ExplainError, match="no inputs found that Empty runs on"):
            inputs_for(Empty())

    def test_another_input_of_an_embedding_without_rows(self) -> None:
        class Beside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.table = nn.Linear(6, 4), nn.Embedding(0, 4)

            def forward(self, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
                return self.layer(x) + self.table(kinds)

        with pytest.raises(ExplainError, match="no inputs found that Beside runs on"):
            inputs_for(Beside())

    def test_no_longer_than_is_cheap(self) -> None:
        model: Any = Floats()
        model.max_position_embeddings = 131072
        assert inputs_for(model).args[0].shape == (1, LONGEST, 6)

    def test_the_short_run_stands_where_the_long_one_fails(self) -> None:
        model = Tokens(positions=SHORT)
        assert inputs_for(model, [types.SimpleNamespace(block_size=100)]).args[0].shape == (1, SHORT)

    def test_one_token_where_a_model_takes_no_more(self) -> None:
        class Decoder(Tokens):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                assert x.shape[1] == 1
                return super().forward(x)

        assert inputs_for(Decoder()).args[0].shape == (1, 1)

    def test_what_runs_long_without_an_error_is_taken_where_nothing_else_runs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Slow(Floats):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if x.shape[1] == SHORT:
                    raise ValueError("too short")
                while True:
                    time.sleep(0.01)

        monkeypatch.setattr("attn_fuse.explain.running.try_inputs.RUN_SECONDS", 0.05)
        assert inputs_for(Slow()).args[0].shape == (1, USUAL, 6)

    def test_a_model_of_one_length_only(self) -> None:
        class Fixed(Floats):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                assert x.shape[1] == 20
                return self.layer(x)

        assert inputs_for(Fixed(), [Config()]).args[0].shape == (1, 20, 6)

    def test_floats_as_wide_as_the_first_linear(self) -> None:
        (x,) = inputs_for(Floats(width=10).to(torch.bfloat16)).args
        assert x.shape == (1, USUAL, 10) and x.dtype == torch.bfloat16

    def test_an_embedding_that_does_not_take_the_argument_makes_no_tokens(self) -> None:
        class Positions(Floats):
            def __init__(self) -> None:
                super().__init__(width=SHORT)
                self.position = nn.Embedding(64, SHORT)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x + self.position(torch.arange(x.shape[1])))

        assert inputs_for(Positions()).args[0].shape == (1, 64, SHORT)

    def test_pictures(self) -> None:
        class Picture(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.img_size = (32, 32)
                self.patches = nn.Conv2d(3, 8, 16, 16)
                self.head = nn.Linear(8, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.head(self.patches(x).flatten(2).transpose(1, 2))

        assert inputs_for(Picture()).args[0].shape == (1, 3, 32, 32)

    def test_pictures_for_a_backbone_that_is_made_after_its_projection(self) -> None:
        class Picture(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.projection = nn.Conv2d(1024, 4, 1)
                self.backbone = nn.Conv2d(3, 1024, 16, 16)

            def forward(self, pictures: list[torch.Tensor] | torch.Tensor) -> torch.Tensor:
                if isinstance(pictures, list):
                    pictures = torch.stack(pictures)
                # Too many numbers for as many channels as the projection takes.
                assert pictures.shape[-2:] == (256, 512)
                return self.projection(self.backbone(pictures))

        assert inputs_for(Picture()).args[0].shape == (1, 3, 256, 512)

    def test_volumes_of_the_sides_that_are_declared(self) -> None:
        class Volume(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.img_shape = (16, 24, 32)
                self.patches = nn.Conv3d(2, 8, 8, 8)
                self.positions = nn.Parameter(torch.zeros(1, 24, 8))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.patches(x).flatten(2).mT + self.positions

        assert inputs_for(Volume()).args[0].shape == (1, 2, 16, 24, 32)

    def test_optional_parameters_are_left_out(self) -> None:
        assert inputs_for(Tokens()).kwargs == {}

    def test_targets(self) -> None:
        inputs = inputs_for(Tokens(), targets=True)
        assert inputs.kwargs["targets"].shape == inputs.args[0].shape
        assert str(inputs) == "int64[1, 32], targets=int64[1, 32]"

    def test_targets_that_the_model_does_not_take_in_this_shape(self) -> None:
        class Classifier(Tokens):
            def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
                assert labels is None or labels.dim() == 1
                return self.token(ids)

        assert inputs_for(Classifier(), targets=True).kwargs == {}

    def test_other_required_parameters(self) -> None:
        class Decoder(Floats):
            def forward(  # type: ignore[override]
                self, x: torch.Tensor, memory: torch.Tensor, start_pos: int, mask: torch.Tensor, *, scale: int
            ) -> torch.Tensor:
                assert start_pos == 0 and scale == 0 and mask.shape == (x.shape[1], x.shape[1])
                return self.layer(x + memory)

        inputs = inputs_for(Decoder())
        assert [type(value) for value in inputs.args] == [torch.Tensor, torch.Tensor, int, torch.Tensor]
        assert inputs.kwargs == {"scale": 0}

    @pytest.mark.parametrize("hint", [Any, int])
    def test_the_longest_length_is_a_number(self, hint: Any) -> None:
        class Padded(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(6, 6)

            def forward(self, x: torch.Tensor, src_lens: torch.Tensor, max_src_len: Any) -> torch.Tensor:
                hidden = torch.arange(0, max_src_len)[None] >= src_lens[:, None]
                return self.layer(x.masked_fill(hidden[..., None], 0))

        Padded.forward.__annotations__["max_src_len"] = hint
        x, lengths, longest = inputs_for(Padded()).args
        assert lengths.tolist() == [x.shape[1]] and longest == x.shape[1]

    def test_a_forward_of_no_arguments(self) -> None:
        class Alone(Floats):
            def forward(self) -> torch.Tensor:  # type: ignore[override]
                return self.layer.weight

        assert inputs_for(Alone()).args == ()

    def test_hooks_are_gone_afterwards(self) -> None:
        model = Tokens()
        inputs_for(model)
        assert not any(module._forward_pre_hooks for module in model.modules())

    def test_a_model_that_always_raises(self) -> None:
        class Broken(Floats):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                raise ValueError("not today")

        message = r"no inputs found that Broken runs on \(with float32\[1, 8, 6\]: ValueError: not today .*--inputs"
        with pytest.raises(ExplainError, match=message):
            inputs_for(Broken())

    def test_a_model_with_nothing_to_go_by(self) -> None:
        class Bare(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

        with pytest.raises(ExplainError, match=r"\(it has no embedding, convolution or linear layer\); pass them with"):
            inputs_for(Bare())


class TestOtherArguments:
    """Further parameters of forward, by their names and by what errors call for."""

    def test_a_time_and_a_label_beside_a_picture(self) -> None:
        class Diffusion(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.patches = nn.Conv2d(4, 8, 8, 8)
                self.classes = nn.Embedding(5, 8)

            def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                assert t.shape == y.shape == x.shape[:1]
                return self.patches(x) + (self.classes(y) * t[:, None])[..., None, None]

        assert str(inputs_for(Diffusion(), batch=2)) == "float32[2, 4, 64, 64], int64[2], int64[2]"

    def test_a_context_as_wide_as_a_layer_wants_it(self) -> None:
        class Cross(Floats):
            def __init__(self) -> None:
                super().__init__(width=6)
                self.others = nn.ModuleList(nn.Linear(width, 1) for width in range(20, 32))
                self.weight = nn.Parameter(torch.ones(40, 6))

            def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                return self.layer(x) + (context @ self.weight).mean(1, keepdim=True)

        assert inputs_for(Cross()).args[1].shape[-1] == 40

    def test_tokens_of_the_one_length_that_learned_positions_have(self) -> None:
        class Fixed(Tokens):
            def __init__(self) -> None:
                super().__init__()
                self.learned = nn.Parameter(torch.zeros(23, 4))

            def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                return self.token(ids) + self.learned

        assert inputs_for(Fixed()).args[0].shape == (1, 23)

    def test_sound_and_text(self) -> None:
        class Speech(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.front, self.words = nn.Conv1d(80, 4, 3, padding=1), nn.Embedding(11, 4)

            def forward(self, mel: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
                assert mel.shape[1] == 80 and not tokens.is_floating_point()
                return self.front(mel).mean(-1)[:, None] + self.words(tokens)

        assert [value.dtype for value in inputs_for(Speech()).args] == [torch.float32, torch.int64]

    @pytest.mark.parametrize("model", [Tokens(positions=5000), Floats()])
    def test_a_length_and_a_batch_that_the_user_asks_for(self, model: nn.Module) -> None:
        assert inputs_for(model, length=1500, batch=3).args[0].shape[:2] == (3, 1500)


class Unbatched(nn.Module):
    """Takes tokens without a batch, as [length]."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.out = nn.Embedding(11, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.token(x)
        _length, _width = x.shape
        return self.out(x)


def test_tokens_without_a_batch() -> None:
    (tokens,) = inputs_for(Unbatched()).args
    assert tokens.dim() == 1 and tokens.dtype is torch.int64 and len(tokens) > 1


class Detector(nn.Module):
    """Takes a list of dicts: of each picture its numbers, its size, and points, which it may do without."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.points = nn.Conv2d(3, 4, 8, 8), nn.Linear(2, 4)

    def forward(self, batched_input: list[dict[str, Any]], several: bool) -> list[torch.Tensor]:
        pictures = torch.stack([one["image"] - torch.zeros(3, 1, 1) for one in batched_input])
        found = self.patches(pictures)
        for one in batched_input:
            if "points" in one:
                found = found + self.points(one["points"])[None, :, None]
        return [
            nn.functional.interpolate(f[None], one["original_size"])
            for f, one in zip(found, batched_input, strict=True)
        ]


def test_a_list_of_pictures_with_their_sizes() -> None:
    (given, *_) = inputs_for(Detector()).args
    assert given[0]["image"].dim() == 3 and given[0]["original_size"] == tuple(given[0]["image"].shape[1:])
    assert "points" not in given[0]


class Matched(nn.Module):
    """Concatenates its input with rows of a width that nothing declares; Conv takes channels instead."""

    def __init__(self, by_channels: bool) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(1, 2, 7))
        self.layer = nn.Conv1d(7, 3, 1) if by_channels else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, _, _ = x.shape
        copy = x.clone()
        if isinstance(self.layer, nn.Conv1d):
            return self.layer(copy.permute(0, 2, 1))
        return torch.cat([self.rows, copy], dim=1)


@pytest.mark.parametrize("by_channels", [False, True])
def test_a_width_that_an_error_tells(by_channels: bool) -> None:
    (x,) = inputs_for(Matched(by_channels)).args
    assert x.shape[-1] == 7


def test_a_model_whose_train_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(6, 6)\n    def forward(self, x):\n        return self.layer(x)\n"
        "    def train(self, mode=True):\n        super().train(mode)\n"
    )
    for flags in ([], ["--train"]):
        assert found_in(tmp_path / "model.py", *flags).model.training == bool(flags)


class Overridden(nn.Module):
    """Asks as torch's own functions do whether an argument overrides them; what would run then is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if has_torch_function((x,)):
            return handle_torch_function(gone, (x,), x)  # noqa: F821
        return self.layer(x).softmax(-1)


def test_a_model_that_asks_for_overrides() -> None:
    assert inputs_for(Overridden()).args[0].shape[-1] == 6
