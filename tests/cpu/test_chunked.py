"""chunked end to end: what tests/grid has no axis for, in programs as people write them."""

from __future__ import annotations

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


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def positions(q: Tensor, k: Tensor) -> Tensor:
    """How far each key stands before each query."""
    return torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])


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


def ids():
    return torch.tensor([[0, 0, 1, 1, 1, 2, 2], [5, 5, 5, 5, 3, 3, 3]])


def checked(program, *args, **how) -> Outcome:
    """`check`, and chunked ran all of it."""
    outcome = check(program, *args, **(ONLY | how))
    assert outcome.sites and all(site.kernel == "chunked" for site in outcome.sites), str(outcome)
    return outcome


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


@pytest.mark.parametrize(("inner", "dynamic"), [("aot_eager", None), ("inductor", None), ("eager", True)])
def test_everything_at_once(inner: str, dynamic: bool | None) -> None:
    def written(q, k, v, added, logits, gates, ids):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        s = 5 * torch.tanh(scores(q, k) / 5) + added
        same = (ids[:, :, None] == ids[:, None, :])[:, None]
        s = s.masked_fill(~(same & (positions(q, k) >= 0)), -INF)
        s = torch.cat([s, logits.view(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)], -1)
        return (s.softmax(-1)[..., :-1] * gates) @ v

    q, k, v = torch.randn(2, HEADS, S, 24), torch.randn(2, KV_HEADS, S, 24), torch.randn(2, KV_HEADS, S, 5)
    extra = (torch.randn(1, HEADS, S, S), torch.randn(HEADS), torch.randn(HEADS, 1, S), ids())
    outcome = check(written, q, k, v, *extra, inner=inner, dynamic=dynamic)
    if dynamic:  # with the numbers of heads symbolic too, an unfused site is allowed and a wrong answer is not
        return
    assert outcome.site.kernel == "chunked" and outcome.site.attention["mask"].startswith("documents & causal")
    assert outcome.site.attention["kv_heads"] == str(KV_HEADS) and outcome.site.attention["value_dim"] == "5"
    assert {"takes no sink", "takes no factor on the weights that differs from key to key"} <= {
        *outcome.site.why_not["cpu_flash"]
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


def test_dropout_with_a_probability_known_when_it_runs() -> None:
    q, k, v = inputs()
    with torch._dynamo.config.patch(specialize_float=False), collecting() as graphs:
        run = compiled(dropped)
        for p in (0.25, 0.5, 0.8, 0.0, 1.0):
            kept = run(q, k, v, p) != 0
            assert abs(kept.double().mean().item() - (1 - p)) < 5 * 0.5 / math.sqrt(kept.numel())
    said = [graph.sites[0].attention.get("dropout") for graph in graphs]
    assert "a probability known only at run time" in said


def test_each_layer_drops_anew() -> None:
    def twice(q, k, v):
        return dropped(q, k, v), dropped(q, k, v)

    one, other = compiled(twice)(*inputs(16))
    assert not torch.equal(one, other)


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
