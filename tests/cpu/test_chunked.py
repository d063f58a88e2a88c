"""chunked end to end: every feature that it takes, alone and together, in programs as people write them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_fuse.report import collecting
from tests.harness import Outcome, check, compiled, tensors

pytestmark = pytest.mark.thorough

S, HEADS, KV_HEADS, WIDTH = 7, 4, 2, 16
INF = math.inf
ONLY = {"kernels": ["chunked"]}
DTYPES = (torch.float32, torch.bfloat16)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def positions(q: Tensor, k: Tensor) -> Tensor:
    """How far each key stands before each query."""
    return torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])


def softcap(q, k, v):
    return (5 * torch.tanh(scores(q, k) / 5)).softmax(-1) @ v


def softcap_then_causal(q, k, v):
    s = 5 * torch.tanh(scores(q, k) / 5)
    return s.masked_fill(positions(q, k) < 0, torch.finfo(s.dtype).min).softmax(-1) @ v


def sink(q, k, v, logits):
    s = scores(q, k)
    with_sink = torch.cat([s, logits.to(s.dtype).view(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)], -1)
    return with_sink.softmax(-1)[..., :-1] @ v


def causal_sink(q, k, v, logits):
    s = scores(q, k).masked_fill(positions(q, k) < 0, -INF)
    largest = torch.maximum(s.amax(-1, keepdim=True), logits.view(-1, 1, 1))
    e = (s - largest).exp()
    return (e / (e.sum(-1, keepdim=True) + (logits.view(-1, 1, 1) - largest).exp())) @ v


def softmax_plus_one(q, k, v):
    e = scores(q, k).exp()
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


def head_mask(q, k, v, gates):
    return (scores(q, k).softmax(-1) * gates.view(-1, 1, 1)) @ v


def key_gates(q, k, v, gates):
    return (scores(q, k).masked_fill(positions(q, k) < 0, -INF).softmax(-1) * gates) @ v


def mask_after_the_softmax(q, k, v):
    return (scores(q, k).softmax(-1) * (positions(q, k) >= 0)) @ v


def bias(q, k, v, added):
    return (scores(q, k) + added).softmax(-1) @ v


def bias_under_a_cap(q, k, v, added):
    return torch.tanh(scores(q, k) + added).softmax(-1) @ v


def relative_bias(q, k, v, table):
    return (scores(q, k) + table[:, positions(q, k) + S - 1]).softmax(-1) @ v


def segmented_buckets(q, k, v, table, ids):
    apart = positions(q, k).int()
    far = (2 + torch.log(apart.abs().clamp(min=1).float() / 2) * 1.3).to(torch.int32)
    bucket = torch.where(apart.abs() < 2, apart.abs(), torch.min(far, torch.full_like(far, 4))) + (apart < 0) * 5
    same = ids[:, :, None] == ids[:, None, :]
    bucket = torch.where(same, bucket, 10 + ids[:, :, None] * 2 + ids[:, None, :])
    return (scores(q, k) + F.embedding(bucket, table).permute(0, 3, 1, 2)).softmax(-1) @ v


def looked_up_bias(q, k, v, content):
    apart = positions(q, k)
    near = (torch.log1p(apart.abs().float()) * apart.sign() + 3).long().clamp(0, 5)
    of_position = torch.gather(content, -1, near.expand(*content.shape[:2], *near.shape))
    return (scores(q, k) + of_position).softmax(-1) @ v


def learned_alibi(q, k, v, slopes):
    return (scores(q, k) - slopes.view(-1, 1, 1).exp() * positions(q, k).abs()).softmax(-1) @ v


def window(q, k, v):
    apart = positions(q, k)
    return scores(q, k).masked_fill((apart < 0) | (apart > 2), -INF).softmax(-1) @ v


def window_ahead(q, k, v):
    apart = positions(q, k)
    return scores(q, k).masked_fill((apart < -3) | (apart > 1), -INF).softmax(-1) @ v


def documents(q, k, v, ids):
    return scores(q, k).masked_fill((ids[:, :, None] != ids[:, None, :])[:, None], -INF).softmax(-1) @ v


def causal_documents(q, k, v, ids):
    same = (ids[:, :, None] == ids[:, None, :])[:, None]
    return scores(q, k).masked_fill(~(same & (positions(q, k) >= 0)), -INF).softmax(-1) @ v


def padding(q, k, v, lengths):
    return scores(q, k).masked_fill(torch.arange(S) >= lengths[:, None, None, None], -1e9).softmax(-1) @ v


def prefix(q, k, v, lengths):
    seen = (positions(q, k) >= 0) | (torch.arange(S) < lengths[:, None, None, None])
    return scores(q, k).masked_fill(~seen, -INF).softmax(-1) @ v


def head_gates():
    return torch.randn(HEADS)


def ids():
    return torch.tensor([[0, 0, 1, 1, 1, 2, 2], [5, 5, 5, 5, 3, 3, 3]])


def lengths():
    return torch.tensor([3, S])


FEATURES = [
    (softcap, None), (softcap_then_causal, None), (sink, head_gates), (causal_sink, head_gates),
    (softmax_plus_one, None), (head_mask, head_gates), (key_gates, lambda: torch.randn(2, 1, 1, S)),
    (mask_after_the_softmax, None), (bias, lambda: torch.randn(1, HEADS, S, S)),
    (bias, lambda: torch.randn(2, 1, 1, S)), (bias, lambda: torch.randn(HEADS, S, 1)),
    (bias_under_a_cap, lambda: torch.randn(HEADS, S, S)), (relative_bias, lambda: torch.randn(HEADS, 2 * S - 1)),
    (learned_alibi, head_gates), (window, None), (window_ahead, None), (documents, ids), (causal_documents, ids),
    (padding, lengths), (prefix, lengths),
]  # fmt: skip
NAMES = [f"{n}-{written.__name__}" for n, (written, _) in enumerate(FEATURES)]


def grouped(written):
    """`written` with keys and values that query heads share, and a value_dim of its own."""

    def program(q, k, v, *extra):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return written(q, k, v, *extra)

    return program


def checked(program, *args, **how) -> Outcome:
    """`check`, and chunked ran all of it."""
    outcome = check(program, *args, **(ONLY | how))
    assert outcome.sites and all(site.kernel == "chunked" for site in outcome.sites), str(outcome)
    return outcome


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("written", "extra"), FEATURES, ids=NAMES)
def test_features(written, extra, dtype: torch.dtype) -> None:
    made = () if extra is None else (extra(),)
    made = tuple(t.to(dtype) if t.is_floating_point() else t for t in made)
    checked(written, *tensors(2, HEADS, S, WIDTH, dtype=dtype), *made)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("written", "extra"), FEATURES, ids=NAMES)
def test_features_with_grouped_queries_and_another_value_dim(written, extra, dynamic: bool) -> None:
    made = () if extra is None else (extra(),)
    q, k, v = torch.randn(2, HEADS, S, 24), torch.randn(2, KV_HEADS, S, 24), torch.randn(2, KV_HEADS, S, 5)
    # With the numbers of heads symbolic too, an unfused site is allowed and a wrong answer is not.
    outcome = (check if dynamic else checked)(grouped(written), q, k, v, *made, dynamic=dynamic, **ONLY)
    if not dynamic:
        assert outcome.site.attention["kv_heads"] == str(KV_HEADS) and outcome.site.attention["value_dim"] == "5"


@pytest.mark.parametrize(
    ("written", "extra"),
    [
        (segmented_buckets, lambda: (torch.randn(28, HEADS), ids())),
        (looked_up_bias, lambda: (torch.randn(2, HEADS, S, 6),)),
    ],
    ids=lambda x: x.__name__,
)
def test_tables_read_at_computed_places(written, extra) -> None:
    """The gradient of the table goes where the program read it: CPM-Ant's and DeBERTa's biases."""
    checked(written, *tensors(2, HEADS, S, WIDTH), *extra())


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 5), (5, 1), (3, 700), (600, 13), (521, 521)])
def test_lengths(q_len: int, kv_len: int) -> None:
    def written(q, k, v):
        s = 5 * torch.tanh(scores(q, k) / 5)
        return s.masked_fill(positions(q, k) < q_len - kv_len - 3, -INF).softmax(-1) @ v

    (q,), (k, v) = tensors(1, 2, q_len, 8, count=1), tensors(1, 2, kv_len, 8, count=2)
    # A single key is no axis of its own any more.
    (check if kv_len == 1 else checked)(written, q, k, v, **ONLY)


def test_lengths_that_change_from_call_to_call() -> None:
    def written(q, k, v, table):
        apart = positions(q, k).clamp(-3, 3) + 3
        return torch.tanh(scores(q, k) + table[:, apart]).masked_fill(positions(q, k) < 0, -INF).softmax(-1) @ v

    calls = [(*tensors(2, 3, length, 16), torch.randn(3, 7)) for length in (9, 5, 12, 530)]
    outcome = checked(written, *calls[0], more=calls[1:], dynamic=True)
    assert len(outcome.graphs) == 1 and outcome.site.attention["mask"].startswith("causal")


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_everything_at_once(inner: str) -> None:
    def written(q, k, v, added, logits, gates, ids):
        s = 5 * torch.tanh(scores(q, k) / 5) + added
        same = (ids[:, :, None] == ids[:, None, :])[:, None]
        s = s.masked_fill(~(same & (positions(q, k) >= 0)), -INF)
        s = torch.cat([s, logits.view(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)], -1)
        return (s.softmax(-1)[..., :-1] * gates) @ v

    q, k, v = torch.randn(2, HEADS, S, 24), torch.randn(2, KV_HEADS, S, 24), torch.randn(2, KV_HEADS, S, 5)
    extra = (torch.randn(1, HEADS, S, S), torch.randn(HEADS), torch.randn(HEADS, 1, S), ids())
    outcome = checked(grouped(written), q, k, v, *extra, inner=inner)
    assert outcome.site.attention["mask"].startswith("documents & causal")
    assert {"takes no sink", "takes no factor on the weights that differs from key to key"} <= {
        *check(grouped(written), q, k, v, *extra).site.why_not["cpu_flash"]
    }


def test_a_model_trains_the_same() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
            self.table, self.sinks = nn.Parameter(torch.randn(3, 2 * S - 1)), nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            batch, length, _ = x.shape
            q, k, v = self.qkv(x).view(batch, length, 3, 3, 8).permute(2, 0, 3, 1, 4)
            s = 8 * torch.tanh((scores(q, k) + self.table[:, positions(q, k) + S - 1]) / 8)
            s = s.masked_fill(positions(q, k) < 0, -INF)
            s = torch.cat([s, self.sinks.view(1, 3, 1, 1).expand(batch, 3, length, 1)], -1)
            return self.out((s.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    checked(Net(), torch.randn(2, S, 24))


# ---- dropout


def dropped(q: Tensor, k: Tensor, v: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return F.dropout(scores(q, k).softmax(-1), p, training) @ v


def inputs(length: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """With these values the output is the weights themselves."""
    q, k = torch.randn(2, 4, HEADS, length, 8).unbind(0)
    return q, k, torch.eye(length).expand(4, HEADS, length, length).clone()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_dropout_keeps_its_distribution(inner: str) -> None:
    run = compiled(dropped, inner=inner)
    q, k, v = inputs()
    weights, out = scores(q, k).softmax(-1), run(q, k, v)
    kept = out != 0
    torch.testing.assert_close(out[kept], 2 * weights[kept], rtol=1e-4, atol=1e-6)
    count = kept.numel()
    assert abs(kept.double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(count)
    # Neighbours along each axis are dropped independently of each other.
    for dim in range(4):
        both = kept.narrow(dim, 1, kept.shape[dim] - 1) & kept.narrow(dim, 0, kept.shape[dim] - 1)
        assert abs(both.double().mean().item() - 0.25) < 5 * math.sqrt(0.1875 / both.numel()) * 2
    assert abs(out.sum(-1).mean().item() - 1) < 0.02


def test_dropout_follows_the_seed() -> None:
    run = compiled(dropped)
    q, k, v = inputs(16)
    torch.manual_seed(5)
    first, second = run(q, k, v), run(q, k, v)
    torch.manual_seed(5)
    assert torch.equal(run(q, k, v), first) and torch.equal(run(q, k, v), second)
    assert not torch.equal(first, second)


def test_dropout_gives_the_gradient_of_what_it_dropped() -> None:
    run = compiled(dropped, inner="aot_eager")
    q, k, v = (t.requires_grad_() for t in inputs(16))
    out = run(q, k, v)
    pull = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), pull)
    # Values are centred and restored: what was dropped is 0 up to rounding.
    factor = 2.0 * (out.detach() > 1e-6)
    again = scores(q, k).softmax(-1) * factor @ v
    for name, mine, wanted in zip("qkv", got, torch.autograd.grad(again, (q, k, v), pull), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5, msg=name)


def test_dropout_is_active_in_training_only() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.3)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.drop(scores(q, k).softmax(-1)) @ v

    model, (q, k, v) = Net(), tensors(2, HEADS, S, WIDTH)
    run = compiled(model)
    with collecting() as graphs:
        assert not torch.allclose(run(q, k, v), scores(q, k).softmax(-1) @ v)
        model.eval()
        torch.testing.assert_close(run(q, k, v), scores(q, k).softmax(-1) @ v)
    first, second = (graph.sites[0] for graph in graphs)
    assert (first.kernel, first.attention["dropout"]) == ("chunked", "0.3")
    assert (second.kernel, second.attention["dropout"]) == ("cpu_flash", "none")


def test_dropout_with_a_probability_known_when_it_runs() -> None:
    q, k, v = inputs()
    with torch._dynamo.config.patch(specialize_float=False), collecting() as graphs:
        run = compiled(dropped)
        for p in (0.25, 0.5, 0.8, 0.0, 1.0):
            kept = run(q, k, v, p) != 0
            assert abs(kept.double().mean().item() - (1 - p)) < 5 * 0.5 / math.sqrt(kept.numel())
    said = [graph.sites[0].attention.get("dropout") for graph in graphs]
    assert "a probability known when the program runs" in said


def test_each_layer_drops_anew() -> None:
    def twice(q, k, v):
        return dropped(q, k, v), dropped(q, k, v)

    one, other = compiled(twice)(*inputs(16))
    assert not torch.equal(one, other)


@pytest.mark.parametrize(("p", "grouped_heads"), [*itertools.product([0.1, 0.9], [1, 2])])
def test_dropout_with_everything_else(p: float, grouped_heads: int) -> None:
    def written(q, k, v, logits):
        k, v = (t.repeat_interleave(grouped_heads, 1) for t in (k, v))
        s = scores(q, k).masked_fill(positions(q, k) < 0, -INF)
        s = torch.cat([5 * torch.tanh(s / 5), logits.view(1, -1, 1, 1).expand(4, -1, s.shape[2], 1)], -1)
        return F.dropout(s.softmax(-1)[..., :-1], p) @ v, s.softmax(-1)[..., :-1]

    q, k, v = inputs(32)
    out, weights = compiled(written)(q, k[:, ::grouped_heads], v[:, ::grouped_heads], torch.randn(HEADS))
    kept = out != 0
    torch.testing.assert_close(out[kept], weights[kept] / (1 - p), rtol=1e-4, atol=1e-6)
    assert abs(kept[weights > 0].double().mean().item() - (1 - p)) < 0.03


def itself_hidden(q, k, v):
    """Locality self-attention of small vision transformers; torch.eye counts to 256 in uint8 and then in uint16."""
    s = scores(q, k)
    return s.masked_fill(torch.eye(s.shape[-1], dtype=torch.bool), torch.finfo(s.dtype).min).softmax(-1) @ v


def hashes_that_wrap(q, k, v, hashes):
    hidden = hashes[:, None, :, None] + hashes[:, None, None, :] <= 0
    return scores(q, k).masked_fill(hidden, -1e9).softmax(-1) @ v


def test_masks_of_narrow_integers() -> None:
    operands = tensors(1, 2, 300, 8)
    checked(itself_hidden, *operands)
    checked(hashes_that_wrap, *operands, torch.randint(-(2**31), 2**31 - 1, (1, 300)).int())
