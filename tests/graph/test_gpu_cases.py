"""benchmarks/gpu_cases.py: the picker knows each program, and models as people write them, by its case."""

from __future__ import annotations

import dataclasses
import json
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
from attn_fuse.bench.workloads import program, tensors
from attn_fuse.picker import regression
from attn_fuse.picker.case import Case
from attn_fuse.picker.evidence import AS_WRITTEN, Row
from features import RelativeBias
from tests.graph.h200_cases import Biased, computed_alibi
from tests.h200 import Picked, h200
from tests.models.vision import Swin

CASES = dict(gpu_cases.cases())
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


@pytest.mark.parametrize("name", CASES)
def test_a_program_is_known_by_its_case(name: str) -> None:
    case, site = CASES[name], of(CASES[name])
    if case.q_len == 1 and case.heads > case.kv_heads:
        # Read with the heads that share a key head as queries, which the picker knows to be the same.
        group = case.heads // case.kv_heads
        assert (site.case.q_len, site.case.heads, site.case.kv_heads) == (group, case.kv_heads, case.kv_heads)
        assert regression.distance(site.case, case, "cuda") == 0
    else:
        assert site.case == case


# ---- what is picked there, by --on

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu-4-evidence-h200.json"
SECTIONS = json.loads(RESULTS.read_text())["sections"]
CHOSEN = {row["what"]: row["picked"] for row in SECTIONS["choices"]["rows"] if "picked" in row}
TIMES = {row["what"]: row["us"] for row in SECTIONS["evidence"]["rows"] if "us" in row and AS_WRITTEN in row["us"]}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_pick_is_that_of_the_gpu_itself(name: str) -> None:
    assert (of(CASES[name]).kernel or AS_WRITTEN) == CHOSEN[name]


@pytest.mark.parametrize("name", TIMES)
def test_the_pick_was_fast_there(name: str) -> None:
    times = TIMES[name]
    assert times[of(CASES[name]).kernel or AS_WRITTEN] <= 1.03 * min(times.values())


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
