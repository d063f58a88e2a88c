"""One evaluator: what chunked computes of any score program, and the gradient of all that it reads, is torch's."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attn_fuse.kernels.chunked import plan as chunked_plan
from attn_fuse.kernels.chunked.op import chunked
from tests.graph.chunked_cases import Sizes, drawn, naive, results
from tests.graph.random_cases import random_case

SEVERAL = (Sizes(2, 4, 2, 37, 29, 8, 4), Sizes(1, 2, 2, 19, 45, 4, 8), Sizes(3, 3, 3, 24, 24, 4, 4))


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("QUERY_BLOCK", "MOST_QUERIES", "KEY_BLOCK"):
            patch.setattr(chunked_plan, name, 16)
        patch.setattr(chunked_plan, "COMPILE_FROM", math.inf)
        yield


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32), st.sampled_from(SEVERAL))
@example(63715, SEVERAL[0]).via("reads a table at i - i")
def test_values_and_gradients_are_those_of_torch(seed: int, s: Sizes) -> None:
    case = random_case(seed)
    torch.manual_seed(seed)
    tensors = drawn(case, s, torch.float64)
    grad = torch.randn(s.batch, s.heads, s.q_len, s.value_dim, dtype=torch.float64)
    program = case.program.dumps()
    got = results(lambda q, k, v, *inputs: chunked(q, k, v, inputs, [], None, 0.0, program, False)[0], tensors, grad)
    exact = results(partial(naive, case), tensors, grad)
    assert got.keys() == exact.keys()
    for name, reference in exact.items():
        # Logarithms are taken in float32, and a vector of them is rounded otherwise than one alone.
        off = (got[name] - reference).abs().max().item()
        assert off <= 1e-5 * max(1.0, reference.abs().max().item()), name
