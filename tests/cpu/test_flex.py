"""flex end to end, compiled by Inductor: what it takes computes the same, and every reason why it says no."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.attention.attention import Attention
from attn_fuse.attention.facts import Facts
from attn_fuse.kernels.flex import kernel as flex
from attn_fuse.kernels.flex.blocks import VERSION
from attn_fuse.picker import pick as picker
from attn_fuse.report import collecting
from attn_fuse.torch_internals import flex_differentiates_what_it_reads
from tests.harness import Outcome, assert_refused, check, compiled, tensors

pytestmark = pytest.mark.thorough

INF = math.inf
ONLY = {"kernels": ["flex"], "inner": "inductor", "backward": False}


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def positions(q: Tensor, k: Tensor) -> Tensor:
    """How far each key stands before each query."""
    return torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


def on_flex(program, *args, **how) -> Outcome:
    """`check`, and flex ran all of it."""
    outcome = check(program, *args, **(ONLY | how))
    assert outcome.sites and all(site.kernel == "flex" for site in outcome.sites), str(outcome)
    return outcome


class Layer(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, 2, 32).transpose(1, 2) for t in self.qkv(x).split(64, 2))
        s = scores(q, k).masked_fill(self.mask[:length, :length] == 0, -INF)
        return x + self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, 64))


class TestModels:
    @pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
    def test_layers_share_their_block_mask(self, dynamic: bool) -> None:
        model = nn.Sequential(Layer(320), Layer(320))
        # Up to 128, one block, is another graph.
        lengths = [(torch.randn(3, 200, 64),), (torch.randn(2, 131, 64),)] if dynamic else []
        outcome = on_flex(model, torch.randn(2, 300, 64), dynamic=dynamic, more=lengths)
        assert len(outcome.sites) == 2 and outcome.after.count(f"flex_blocks_v{VERSION}.default(") == 1, outcome.after

    def test_parameters_that_require_a_gradient_under_inference_mode(self) -> None:
        model, x = Layer(150), torch.randn(1, 150, 64)
        with torch.inference_mode(), collecting() as graphs:
            got = compiled(model, inner="inductor", kernels=["flex"])(x)
            torch.testing.assert_close(got, model(x))
        assert graphs[0].sites[0].kernel == "flex"

    def test_autocast(self) -> None:
        model, x = Layer(150), torch.randn(1, 150, 64)

        def cast(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(x)

        with torch.no_grad(), collecting() as graphs:
            got = compiled(cast, inner="inductor", kernels=["flex"])(x)
            torch.testing.assert_close(got, model(x), rtol=0.05, atol=0.05)
        assert graphs[0].sites[0].kernel == "flex"


# On CUDA it trains. On a CPU Inductor has no backward of it, but torch computes both, with every score in memory.
ONLY_HERE = ("gives no gradients on CPU", "gives no log-sum-exp on CPU", "stores every score")


class TestTraining:
    @pytest.fixture(autouse=True)
    def as_on_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def limits(attention: Attention, facts: Facts) -> Iterator[str]:
            return (reason for reason in flex.limits(attention, facts) if not reason.startswith(ONLY_HERE))

        monkeypatch.setattr(picker, "KERNELS", (replace(flex.FLEX, limits=limits),))

    def trained(self, program, *more: Tensor, dtype: torch.dtype = torch.float32) -> None:
        on_flex(program, *tensors(2, 2, 130, 24, dtype=dtype), *more, inner="aot_eager", backward=True)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(
        "shown",
        [
            lambda apart: apart >= 0,
            lambda apart: (apart >= 0) & (apart < 30),
            lambda apart: (apart >= 0) | (apart < -90),
        ],
        ids=["causal", "window", "prefix"],
    )
    def test_masks(self, shown, dtype: torch.dtype) -> None:
        def program(q, k, v):
            return scores(q, k).masked_fill(~shown(positions(q, k)), -INF).softmax(-1) @ v

        self.trained(program, dtype=dtype)

    def test_softcap(self) -> None:
        self.trained(lambda q, k, v: (3 * torch.tanh(scores(q, k) / 3)).softmax(-1) @ v)

    def test_a_sink(self) -> None:
        """Its gradient is of the log-sum-exp, which every version gives."""

        def program(q, k, v, sink):
            s = scores(q, k).masked_fill(positions(q, k) < 0, -INF)
            beside = sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)
            return torch.cat([s, beside], -1).softmax(-1)[..., :-1] @ v

        self.trained(program, torch.randn(2))

    def test_documents(self) -> None:
        def program(q, k, v, ids):
            return scores(q, k).masked_fill((ids[:, :, None] != ids[:, None])[:, None], -INF).softmax(-1) @ v

        self.trained(program, (torch.arange(130) // 40).expand(2, -1).contiguous())

    @pytest.mark.parametrize(
        ("shape", "changed"),
        [
            ((1, 2, 130, 130), lambda s, apart, bias: s + bias),
            ((16, 2), lambda s, apart, table: s + table[apart.clamp(-7, 8) + 7].permute(2, 0, 1)),
            ((2, 1, 1), lambda s, apart, temperature: s * temperature),
            ((2, 1, 1), lambda s, apart, slopes: s - slopes * apart.abs()),
        ],
        ids=["bias", "table", "temperature", "slopes"],
    )
    def test_what_learns_in_the_scores(self, shape: tuple[int, ...], changed) -> None:
        class Learns(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.rand(shape))

            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return changed(scores(q, k), positions(q, k), self.weight).softmax(-1) @ v

        if flex_differentiates_what_it_reads():
            self.trained(Learns())
        else:
            reason = "gives no gradient to what a function of the scores reads before torch 2.15"
            how = ONLY | {"inner": "aot_eager", "backward": True}
            assert_refused(Learns(), *tensors(2, 2, 130, 24), reason=reason, **how)


class TestFeatures:
    def test_everything_at_once(self) -> None:
        def program(q, k, v, added, ids):
            k, v = (t.repeat_interleave(2, 1) for t in (k, v))
            s = 5 * torch.tanh(scores(q, k) / 5) + added
            same = (ids[:, :, None] == ids[:, None, :])[:, None]
            near = (positions(q, k) >= 0) & (positions(q, k) < 70)
            return s.masked_fill(~(same & near), -INF).softmax(-1) @ v

        q, (k,), (v,) = torch.randn(2, 4, 300, 24), tensors(2, 2, 300, 24, count=1), tensors(2, 2, 300, 40, count=1)
        ids = (torch.arange(300) // 90).expand(2, -1).contiguous()
        on_flex(program, q, k, v, torch.randn(1, 4, 300, 300), ids)

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision(self, dtype: torch.dtype) -> None:
        def program(q, k, v, slopes):
            s = scores(q, k) - slopes.view(-1, 1, 1) * positions(q, k).abs()
            return s.masked_fill(positions(q, k) < 0, -INF).softmax(-1) @ v

        on_flex(program, *tensors(1, 2, 200, 25, dtype=dtype), torch.rand(2).to(dtype))

    @pytest.mark.parametrize(("head_dim", "kv_len"), [(8, 8), (16, 136)])
    def test_few_dimensions_in_vectors_of_8(self, head_dim: int, kv_len: int) -> None:
        """With AVX2, torch's form for the last keys would write over the maxima of the softmax."""

        def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.tanh(scores(q, k)).softmax(-1) @ v

        (q,), (k, v) = tensors(1, 2, 40, head_dim, count=1), tensors(1, 2, kv_len, head_dim, count=2)
        with torch._inductor.config.patch({"cpp.simdlen": 256}):
            on_flex(program, q, k, v)
            on_flex(program, q[:, :, :1], k, v)

    def test_queries_that_see_no_key(self) -> None:
        def guarded(q, k, v, lengths):
            hidden = torch.arange(k.shape[2]) >= lengths.view(-1, 1, 1, 1)
            return scores(q, k).masked_fill(hidden, -INF).softmax(-1).nan_to_num() @ v

        def mean(q, k, v, lengths):
            hidden = torch.arange(k.shape[2]) >= lengths.view(-1, 1, 1, 1)
            return scores(q, k).masked_fill(hidden, -1e9).softmax(-1) @ v

        operands = (*tensors(3, 2, 150, 16), torch.tensor([0, 150, 70]))
        assert on_flex(guarded, *operands).site.attention["mask"]
        torch._dynamo.reset()
        on_flex(mean, *operands)

    def test_one_query_whose_scores_are_far_below_zero(self) -> None:
        # A part of the keys is hidden. torch's form for one query takes 0 for the greatest score of such a part.
        def program(q, k, v, slopes, length):
            s = scores(q, k) - 50 * slopes.view(-1, 1, 1) - 300
            return s.masked_fill(torch.arange(k.shape[2]) < length.view(-1, 1, 1, 1), -INF).softmax(-1) @ v

        (q,), (k, v) = tensors(2, 2, 1, 16, count=1), tensors(2, 2, 1100, 16, count=2)
        on_flex(program, q, k, v, torch.rand(2), torch.tensor([700, 130]), dynamic=False)


class TestOperandsThatShareMemory:
    """torch's template for the CPU goes by the buffer, and knows no offsets into it."""

    @pytest.mark.slow
    def test_one_tensor_for_all(self) -> None:
        on_flex(lambda x: plain(x, x, x), torch.randn(1, 2, 140, 16))

    def test_slices(self) -> None:
        def program(x, kv):
            return plain(x[:, 1:], kv[0], kv[1])

        on_flex(program, torch.randn(1, 3, 140, 16), torch.randn(2, 1, 2, 140, 16))

    @pytest.mark.slow
    def test_a_bias_beside_the_query(self) -> None:
        def program(x, k, v):
            return (scores(x[..., :16], k) + x[0, 0, :, 16:]).softmax(-1) @ v

        on_flex(program, torch.randn(1, 2, 140, 156), *tensors(1, 2, 140, 16, count=2))

    def test_what_is_computed_in_the_graph(self) -> None:
        def program(q, k, v, table):
            return (scores(q, k) + (table * 2)[:, (positions(q, k) + 139)]).softmax(-1) @ v

        on_flex(program, *tensors(1, 2, 140, 16), torch.randn(2, 279))


def test_tensors_of_symbolic_sizes() -> None:
    """torch's C++ template names sizes that it does not declare: a compiler's error when the model runs."""
    bias = torch.randn(64, 64)

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.view(t.shape[0], t.shape[1], 3, 24).transpose(1, 2) for t in (q, k, v))
        return (scores(q, k) + bias[: q.shape[-2], : k.shape[-2]]).softmax(-1) @ v

    args, how = tensors(2, 40, 72), ONLY | {"dynamic": True, "more": [tensors(3, 50, 72)]}
    reason = "takes no tensor of symbolic sizes in a function of the scores or a mask on CPU"
    blocker = check(program, *args, **how).sites[0].blocker
    assert blocker is not None and reason in blocker.reason
    torch._dynamo.reset()
    assert check(program, *args, **how | {"kernels": ["flex", "chunked"]}).sites[0].kernel == "chunked"


class TestWhatFollows:
    def test_point_wise_operations(self) -> None:
        on_flex(lambda q, k, v: (plain(q, k, v) * 2 + q).relu(), *tensors(2, 3, 40, 24))
