"""How forward uses its arguments, and the inputs that follow from it."""

from __future__ import annotations

import math
import re
import types

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.errors import ExplainError
from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.reading.stages import staged
from attn_fuse.explain.reading.uses import Use, uses_of
from attn_fuse.explain.running.guess_inputs import inputs_for
from attn_fuse.explain.running.use_values import MOST_NUMBERS, Around, values_for


def shapes(inputs: Inputs) -> list[object]:
    return [list(v.shape) if isinstance(v, Tensor) else v for v in (*inputs.args, *inputs.kwargs.values())]


class Decisions(nn.Module):
    """One embedding and two linear layers, each for another argument."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.state, self.reward = nn.Embedding(50, 8), nn.Linear(17, 8), nn.Linear(1, 8)

    def forward(self, timesteps: Tensor, states: Tensor, rewards: Tensor) -> Tensor:
        batch, length, _ = states.shape
        times = self.time(timesteps)
        return (self.state(states) + self.reward(rewards) + times).view(batch, length, 8)


class Marked(nn.Module):
    """Values and marks of their times, as of hour, weekday, day and month, read one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Conv1d(3, 16, 3, padding=1)
        self.hours, self.days = nn.Embedding(24, 16), nn.Embedding(32, 16)
        self.out = nn.Linear(16, 7)

    def forward(self, x_enc, x_mark_enc):
        marks = x_mark_enc.long()
        x = self.values(x_enc.permute(0, 2, 1)).transpose(1, 2)
        return self.out(x + self.hours(marks[:, :, 3]) + self.days(marks[:, :, 1]))


class Maps(nn.Module):
    """A map of features, its mask, positions of the same shape, and queries without a batch."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layer = Inner(width)

    def forward(self, src: Tensor, mask: Tensor, query_embed: Tensor, pos_embed: Tensor) -> Tensor:
        bs, _, _, _ = src.shape
        src = src.flatten(2).permute(2, 0, 1)
        pos_embed = pos_embed.flatten(2).permute(2, 0, 1)
        query_embed = query_embed.unsqueeze(1).repeat(1, bs, 1)
        return self.layer(src + pos_embed, mask.flatten(1)).mean(0) + query_embed


class Inner(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.norm(x) * keep.T[..., None]


class Levels(nn.Module):
    """A list of maps, with queries that only an assert asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, srcs: list[Tensor], masks: list[Tensor], query_embed: Tensor | None = None) -> Tensor:
        assert query_embed is not None
        flat = []
        for src, mask in zip(srcs, masks, strict=True):
            _, _, _, _ = src.shape
            flat.append(src.flatten(2).transpose(1, 2) * (~mask).flatten(1)[..., None])
        width = torch.split(query_embed, 16, dim=1)[0]
        return self.norm(torch.cat(flat, 1)).mean(1) + width


class Clip(nn.Module):
    """Pictures in a row, of one number of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.time = nn.Conv2d(4, 8, 4, 4), nn.Parameter(torch.zeros(6, 1))

    def added(self, frames: Tensor, count: int) -> Tensor:
        return self.patch(frames).reshape(-1, count, 2048) + self.time


class FramesFirst(Clip):
    def forward(self, x: Tensor) -> Tensor:
        b, f, c, h, w = x.shape
        return self.added(x.reshape(b * f, c, h, w), f)


class ChannelsFirst(Clip):
    def forward(self, x: Tensor) -> Tensor:
        b, c, t, h, w = x.shape
        return self.added(x.transpose(1, 2).reshape(b * t, c, h, w), t)


class Reader(nn.Module):
    """Takes what is no tensor: an object with numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)

    def forward(self, tokenizer, ids: Tensor) -> Tensor:
        return self.table(ids) * (ids != tokenizer.pad_id)[..., None]


class Graph(nn.Module):
    """Weights without layers, and an adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = [Head(), Head()]
        for number, head in enumerate(self.heads):
            self.add_module(f"head_{number}", head)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        x = self.drop(x)
        return torch.cat([head(x, adj) for head in self.heads], dim=1)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, h: Tensor, adj: Tensor) -> Tensor:
        inner = torch.mm(h, self.weight)
        scores = torch.where(adj > 0, inner @ inner.T / math.sqrt(3), -9e15)
        return scores.softmax(-1) @ inner


class Noted(nn.Module):
    """Nothing but its documentation tells the shape of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """x: features of shape (batch, channels, height, width)"""
        assert len(x.shape) == 4
        return x * self.scale


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, x_lens = batch["x"], batch["x_lens"]
        return self.layer(x[:, : x_lens.max()])


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 8, 8)

    def forward(self, samples: types.SimpleNamespace) -> Tensor:
        x = self.layer(samples.tensors)
        return x.masked_fill(samples.mask[:, None, ::8, ::8], 0.0)


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.rest = nn.Embedding(11, 4), nn.Linear(6, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        words = batch["words"]
        return self.text(words) + self.rest(batch["points"])


class Cached(nn.Module):
    """As fast decoders are: caches first, and positions as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.max_seq_length = nn.Embedding(20, 4), 32
        self.cache: Tensor | None = None

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        self.cache = torch.zeros(max_batch_size, max_seq_length, 4)

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        assert self.cache is not None, "caches first"
        return self.embed(idx) + self.cache[:, input_pos]


class Translator(nn.Module):
    """As tutorials write it: no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(30, 8), nn.Linear(8, 30)

    def decode(self, encoder_output: Tensor, src_mask: Tensor | None, tgt: Tensor, tgt_mask: Tensor | None) -> Tensor:
        return self.words(tgt) + encoder_output.mean(1, keepdim=True)

    def encode(self, src: Tensor, src_mask: Tensor | None) -> Tensor:
        return self.words(src)

    def project(self, x: Tensor) -> Tensor:
        return self.out(x)


class TestUses:
    def test_layers_ranks_and_names(self) -> None:
        uses = uses_of(Decisions())
        assert isinstance(uses["timesteps"].layer, nn.Embedding)
        assert uses["states"].rank == 3 and uses["states"].names == ("batch", "length", "")
        assert uses["rewards"].layer is not None and not uses["timesteps"].is_vectors and uses["states"].is_vectors

    def test_through_views_and_modules(self) -> None:
        uses = uses_of(Maps())
        assert uses["src"].rank == 4 and uses["query_embed"].rank == 2 and uses["pos_embed"].least == 4
        assert uses["mask"].least == 3

    def test_a_name_that_is_bound_anew_says_no_more(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 7)

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x)
                _, _ = x.shape
                return self.second(x)

        model = Net()
        use = uses_of(model)["x"]
        assert use.layer is model.first and use.rank is None

    def test_a_branch_that_binds_it_anew_may_not_be_taken(self) -> None:
        class Padded(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.odd, self.layer = False, nn.Conv2d(4, 8, 2)

            def forward(self, x: Tensor) -> Tensor:
                if self.odd:
                    x = nn.functional.pad(x, (0, 1))
                return self.layer(x)

        model = Padded()
        assert uses_of(model)["x"].layer is model.layer and inputs_for(model).args[0].shape[1] == 4

    def test_a_sequence_with_a_forward_of_its_own(self) -> None:
        class Switch(nn.Sequential):
            def forward(self, x: Tensor, time: Tensor) -> Tensor:  # type: ignore[override]
                return self[0](x) + self[1](time)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.switch = Switch(nn.Conv2d(4, 8, 1), nn.Linear(6, 1))

            def forward(self, latent: Tensor, time: Tensor) -> Tensor:
                return self.switch(latent, time)

        uses = uses_of(Net())
        assert isinstance(uses["latent"].layer, nn.Conv2d) and isinstance(uses["time"].layer, nn.Linear)

    def test_a_layer_that_takes_one_dimension_more(self) -> None:
        class Sounds(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Conv2d(1, 8, 3)

            def forward(self, inputs: Tensor) -> Tensor:
                x = inputs.unsqueeze(1)
                return self.layer(x)

        use = uses_of(Sounds())["inputs"]
        assert use.layer is None and use.rank == 3

    def test_lists_and_dicts(self) -> None:
        srcs, masks = (uses_of(Levels())[name].items for name in ("srcs", "masks"))
        assert srcs is not None and srcs.rank == 4 and masks is not None and masks.is_truth
        assert set(uses_of(Keyed())["batch"].keys) == {"words", "points"}

    def test_a_note_in_the_docstring(self) -> None:
        assert uses_of(Noted())["x"].rank == 4


class TestInputs:
    def test_each_argument_for_its_own_layer(self) -> None:
        assert shapes(inputs_for(Decisions())) == [[1, 64], [1, 64, 17], [1, 64, 1]]

    def test_marks_of_times_are_as_wide_as_the_code_reads(self) -> None:
        x, marks = shapes(inputs_for(Marked()))
        assert x[-1] == 3 and marks[:2] == x[:2] and marks[-1] >= 4

    def test_maps_of_features(self) -> None:
        src, mask, queries, positions = shapes(inputs_for(Maps()))
        assert src == positions == [1, 16, 8, 8] and mask == [1, 8, 8]
        assert isinstance(queries, list) and queries[1] == 16

    def test_lists_and_what_an_assert_asks_for(self) -> None:
        found = inputs_for(Levels())
        srcs, masks, queries = (*found.args, *found.kwargs.values())
        assert [list(s.shape) for s in srcs] == [[1, 16, 8, 8]] * 4
        assert all(m.dtype == torch.bool for m in masks) and queries.shape[1] == 16

    def test_weights_without_layers(self) -> None:
        x, adjacency = inputs_for(Graph()).args
        assert x.shape[1] == 5 and adjacency.shape == (len(x), len(x)) and len(x) > 1

    @pytest.mark.parametrize(("model", "shape"), [(FramesFirst, [1, 6, 4, 64, 64]), (ChannelsFirst, [1, 4, 6, 64, 64])])
    def test_pictures_in_a_row(self, model: type[Clip], shape: list[int]) -> None:
        assert shapes(inputs_for(model())) == [shape]

    def test_an_object_whose_attributes_are_read(self) -> None:
        reader, ids = inputs_for(Reader()).args
        assert reader.pad_id == 0 and ids.dtype == torch.long

    def test_what_a_docstring_says(self) -> None:
        assert inputs_for(Noted()).args[0].dim() == 4

    def test_a_dict(self) -> None:
        (batch,) = inputs_for(Keyed()).args
        assert batch["words"].dtype == torch.long and batch["points"].shape[-1] == 6

    def test_lengths_in_a_dict(self) -> None:
        (batch,) = inputs_for(Lengths()).args
        assert batch["x_lens"].tolist() == [batch["x"].shape[1]]

    def test_pictures_with_the_mask_of_their_padding(self) -> None:
        (padded,) = inputs_for(Padded()).args
        assert padded.tensors.shape == (1, 3, 64, 64) and padded.mask.shape == (1, 64, 64)

    def test_caches_are_set_up(self) -> None:
        model = Cached()
        assert shapes(inputs_for(model)) == [[1, 32], [32]] and model.cache is not None

    def test_inputs_that_the_repository_spells_out_come_first(self) -> None:
        given = Inputs((torch.randn(20, 7),))
        assert inputs_for(nn.Linear(7, 7), spelled=[Inputs((torch.randn(20, 8),)), given]) is given

    @pytest.mark.thorough
    def test_the_example_has_the_shapes_that_the_code_asks_for(self) -> None:
        model = Decisions()

        def refuse(*_: object) -> None:
            raise ValueError("not these")

        model.register_forward_hook(refuse)
        given = (
            "dict(timesteps=torch.randint(50, (1, 64)), states=torch.randn(1, 64, 17), rewards=torch.randn(1, 64, 1))"
        )
        with pytest.raises(ExplainError, match=re.escape(given)):
            inputs_for(model)


class TestStaged:
    def test_encode_then_decode_then_project(self) -> None:
        model = staged(Translator())
        inputs = inputs_for(model)
        assert type(model).__name__ == "Translator"
        src, src_mask, tgt, tgt_mask = inputs.args
        assert model(src, src_mask, tgt, tgt_mask).shape == (1, tgt.shape[1], 30)
        torch.testing.assert_close(
            model(src, None, tgt, tgt_mask=None),
            model.model.project(model.model.decode(model.model.encode(src, None), None, tgt, None)),
        )

    def test_a_method_that_no_other_calls(self) -> None:
        class Base(nn.Module):
            def finetune(self, tokens: Tensor) -> Tensor:
                raise AssertionError

        class Model(Base):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(50, 8)

            def _places(self, tokens: Tensor) -> Tensor:
                return self.embed(tokens)

            def embedded(self, tokens: Tensor) -> Tensor:
                return self.embed(tokens) + self._places(tokens)

            def init_weights(self, module: nn.Module) -> None:
                self.embed.weight.data.zero_()

            def pretrain(self, tokens: Tensor) -> Tensor:
                return self.embedded(tokens)

            def several(self, tokens: Tensor, others: Tensor) -> Tensor:
                return self.embedded(tokens) + self.embedded(others)

            def finetune(self, tokens: Tensor) -> Tensor:
                return self.embedded(tokens)

            def describe(self, name: str) -> str:
                return name

        model = staged(Model())
        assert [stage for stage, _, _ in model.plan] == ["finetune"]
        assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 8)

    def test_nothing_stands_for_a_container(self) -> None:
        class Parts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 3)

            def describe(self, name: str) -> str:
                return name

        model = Parts()
        assert staged(model) is model

    def test_one_that_infers_among_several_forwards(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.time = nn.Embedding(50, 8)

            def forward_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
                raise AssertionError

            def forward_inference(self, tokens: Tensor, start: int) -> Tensor:
                return self.time(tokens)

        (tokens, start) = inputs_for(staged(Model())).args
        assert tokens.dim() == 2 and start == 0

    def test_a_model_with_a_forward_stays(self) -> None:
        model = Decisions()
        assert staged(model) is model


def test_no_guess_takes_all_memory() -> None:
    around = Around(1, 4096, 64, 3, 512, 100, torch.float32, torch.device("cpu"))
    for rank in (1, 2, 3, 4, 5):
        assert all(value.numel() <= MOST_NUMBERS for value in values_for(Use(rank=rank), "x", around))
