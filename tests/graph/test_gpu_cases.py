"""benchmarks/gpu_cases.py: each case's program has what its name says, and the picker knows it by that case."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

# Before the tests, which have a `harness`, too.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_cases
from attn_fuse.attention.attention import Attention
from attn_fuse.bench.workloads import program, tensors
from attn_fuse.expression.nodes import Gather, Load, walk
from attn_fuse.picker import regression
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import Row
from features import RelativeBias
from tests.graph.h200_cases import Biased, computed_alibi
from tests.h200 import Picked, h200
from tests.models.vision import Swin

CASES = dict(gpu_cases.cases())
# Other cases have more queries than that.
MOST_IN_A_GROUP = 32
META, CPU = torch.device("meta"), torch.device("cpu")


def recognised(written: Callable[..., Any], values: tuple[Any, ...], training: bool) -> Picked:
    """The one attention of a program, of which nothing runs."""
    with h200() as picked:
        (site,) = picked(written, *values, training=training)
    return site


def of(case: Case) -> Picked:
    # The program's index is made from its own elements, of which a tensor without memory has none.
    device = CPU if case.bias == "indexed" else META
    return recognised(program(case), tensors(case, device), case.training)


# ---- what is there, by the recognised attention alone


def read(attention: Attention, kind: type) -> list[set[Any]]:
    """The index symbols of each tensor that is added to the scores, read as `kind`."""
    found = [x for term in attention.biases for x in walk(term) if isinstance(x, kind)]
    return [{s for place in x.index for s in getattr(place, "free_symbols", ())} for x in found]


def extent(attention: Attention) -> str:
    """Along which of batch, head, query and key a tensor extends that is added element by element; "" for none."""
    axes = attention.axes
    roles = {"b": {*axes.batch}, "h": {*attention.head_axes}, "q": {*axes.query}, "k": {*axes.key}}
    found = ["".join(role for role, of_role in roles.items() if symbols & of_role) for symbols in read(attention, Load)]
    return max((letters for letters in found if "q" in letters and "k" in letters), key=len, default="")


def properties(site: Picked) -> set[str]:
    """What names may speak of, as far as `site` has it."""
    attention, facts = site.attention, site.facts
    kinds, extends, learns = {part.kind for part in attention.mask.parts}, extent(attention), facts.bias_needs_grad
    looked_up = bool(read(attention, Gather))
    added = not looked_up and bool(extends)
    by_positions = bool(attention.biases) and not looked_up and not any(read(attention, Load))
    found = {
        "looked up by positions": looked_up and learns and not extends,
        "looked up by a stored index": looked_up and learns and extends == "qk",
        "a bias for each head, query and key, with gradient": added and learns and extends == "hqk",
        "a bias for each batch entry, head, query and key, with gradient": added and learns and extends == "bhqk",
        "a bias for each head, query and key, without gradient": added and not learns and extends == "hqk",
        "a bias by positions and heads alone": by_positions,
        "a softcap": attention.softcap is not None,
        "a sink": attention.sink is not None,
        "a window": "window" in kinds,
        "documents": "documents" in kinds,
        "padding": "padding" in kinds,
        "a mask for each query and key": "dense" in kinds,
        "dropout": attention.dropout_p is not None,
        # With one query, the heads that share a key head are read as its queries.
        "grouped heads": facts.heads > facts.kv_heads or 1 < facts.q_len <= MOST_IN_A_GROUP,
        "one key head": facts.kv_heads == 1,
        "one query": facts.q_len <= MOST_IN_A_GROUP,
        "no gradient": not (facts.training or learns),
        "float32": facts.dtype == torch.float32,
        "D 256": facts.head_dim == 256,
        "head_dim 80": facts.head_dim == 80,
    }
    return {name for name, there in found.items() if there}


# The words in a name by which it says that a property is there; without one of them it is not.
WORDS = {
    "looked up by positions": ["T5's table"],
    "looked up by a stored index": ["Swin's stored index"],
    "a bias for each head, query and key, with gradient": ["Evoformer's pair bias", "dense bias with its gradient"],
    "a bias for each batch entry, head, query and key, with gradient": ["Graphormer's bias"],
    "a bias for each head, query and key, without gradient": ["constant bias"],
    "a bias by positions and heads alone": ["ALiBi"],
    "a softcap": ["softcap"],
    "a sink": ["sinks"],
    "a window": ["window"],
    "documents": ["documents"],
    "padding": ["padded", "padding"],
    "a mask for each query and key": ["dense mask"],
    "dropout": ["dropout"],
    "grouped heads": ["grouped", "one key head"],
    "one key head": ["one key head"],
    "one query": ["decode"],
    "no gradient": ["inference", "decode"],
    "float32": ["float32"],
    "D 256": ["D 256"],
    "head_dim 80": ["head_dim 80"],
}
# What more the words mean, which other names may have as well.
MEANING: dict[str, Callable[[Picked], bool]] = {
    "causal": lambda site: any(part.kind == "causal" for part in site.attention.mask.parts),
    "no mask": lambda site: not site.attention.mask.parts,
    "without a mask": lambda site: not site.attention.mask.parts,
    "D 128": lambda site: site.facts.head_dim == 128,
    "one sequence": lambda site: site.facts.batch == 1,
    "T5's table": lambda site: not site.attention.mask.parts,
    "Swin": lambda site: site.facts.q_len == site.facts.kv_len == 49,
    "Evoformer": lambda site: (
        (site.facts.batch, site.facts.heads, site.facts.kv_len, site.facts.head_dim) == (128, 8, 256, 32)
    ),
}


def unlike(name: str, site: Picked) -> set[str]:
    """The properties that `name` says and `site` has not, or `site` has and `name` does not say."""
    said = {of for of, words in WORDS.items() if any(word in name for word in words)}
    return said ^ properties(site) | {word for word, holds in MEANING.items() if word in name and not holds(site)}


@pytest.mark.parametrize("name", CASES)
def test_a_program_has_what_its_name_says_and_is_known_by_its_case(name: str) -> None:
    case, site = CASES[name], of(CASES[name])
    assert not unlike(name, site), site.attention
    if case.q_len == 1 and case.heads > case.kv_heads:
        # Read with the heads that share a key head as queries, which the picker knows to be the same.
        group = case.heads // case.kv_heads
        assert (site.case.q_len, site.case.heads, site.case.kv_heads) == (group, case.kv_heads, case.kv_heads)
        assert regression.distance(site.case, case, "cuda") == 0
    else:
        assert site.case == case


def test_a_name_for_something_else_is_seen() -> None:
    """The evidence once had a softcap under the name of T5's table, and a stored bias under that of ALiBi."""
    former = of(dataclasses.replace(CASES["T5's table"], table=False))
    assert unlike("T5's table", former) == {"looked up by positions", "a softcap"}
    former = of(dataclasses.replace(CASES["ALiBi"], bias="constant"))
    assert unlike("ALiBi", former) == {
        "a bias by positions and heads alone", "a bias for each head, query and key, without gradient",
    }  # fmt: skip
    shared = of(dataclasses.replace(CASES["Graphormer's bias"], bias_by_entry=False))
    assert len(unlike("Graphormer's bias", shared)) == 2
    assert "Swin" in unlike("Swin's stored index", of(dataclasses.replace(CASES["Swin's stored index"], kv_len=64)))


# ---- models as people write them


def qkv(heads: int, length: int, dim: int, batch: int = 2, q_len: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((heads, q_len or length), (heads, length), (heads, length))
    query, key, value = (torch.zeros(batch, *size, dim, requires_grad=not q_len) for size in sizes)
    return query, key, value


def graphormer(q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor) -> Tensor:
    """A layer of it: the heads are folded into the batch, and all layers are given one bias (arXiv 2106.05234)."""
    batch, heads, length, dim = q.shape
    q, k, v = (x.reshape(batch * heads, length, dim) for x in (q * dim**-0.5, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)).view(batch, heads, length, length) + attn_bias
    weights = F.softmax(weights.view(batch * heads, length, length).float(), dim=-1).type_as(q)
    return torch.bmm(weights, v)


def decoding_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As MPT adds it: the distance to the last key."""
    slopes = torch.exp2(-8 * torch.arange(1, 5) / 4).view(1, 4, 1, 1)
    bias = torch.arange(1 - k.shape[2], 1).view(1, 1, 1, -1) * slopes
    return ((q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v


def decoding_softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return (torch.tanh((q @ k.transpose(-2, -1)) / 50.0) * 50.0).softmax(-1) @ v


def shared_keys() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = qkv(4, 64, 16, q_len=1)
    return query, key[:, :2], value[:, :2]


MODELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "T5's table": (RelativeBias(64), qkv(8, 64, 16)),
    "Swin's stored index": (Swin(), (torch.zeros(2, 6, 6, 24),)),
    "Evoformer's pair bias": (Biased(4, 32, torch.float32), qkv(4, 32, 16)),
    "Graphormer's bias": (graphormer, (*qkv(4, 32, 16), torch.zeros(2, 4, 32, 32, requires_grad=True))),
    "ALiBi": (computed_alibi, qkv(4, 32, 16)),
    "ALiBi, decode": (decoding_alibi, qkv(4, 64, 16, q_len=1)),
    "softcap, grouped decode": (decoding_softcap, shared_keys()),
}  # fmt: skip
SIZES = ("dtype", "batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim", "visible")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_known_by_the_case_of_the_evidence(name: str) -> None:
    written, inputs = MODELS[name]
    case, site = CASES[name], recognised(written, inputs, CASES[name].training)
    assert dataclasses.replace(site.case, **{size: getattr(case, size) for size in SIZES}) == case


def test_on_a_gpu_a_table_is_no_softcap_and_alibi_no_stored_bias() -> None:
    for one, other in (
        (CASES["T5's table"], CASES["softcap without a mask"]),
        (CASES["ALiBi"], CASES["constant bias, causal"]),
        (CASES["Graphormer's bias"], dataclasses.replace(CASES["Graphormer's bias"], bias_by_entry=False)),
    ):
        assert regression.distance(one, other, "cuda") == pytest.approx(0.2) and str(one) != str(other)
        # No row of a CPU has both.
        assert regression.distance(one, other, "cpu") == 0
        assert Row.from_json(Row(one, {"flex": 1.0}).as_json()).case == one
