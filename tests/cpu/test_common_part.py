"""Gradients as good as eager's where the values have a large common part, and what torch's own kernels make of it."""

from __future__ import annotations

import pytest
import torch

from attn_fuse.report import collecting
from tests.common_part import assert_as_good_as_eager, written


@pytest.mark.parametrize("mean", [0.0, 5.0, 500.0])
@pytest.mark.parametrize("tokens", [49, 300], ids=["one block of keys", "two blocks of keys"])
def test_chunked(tokens: int, mean: float) -> None:
    options = {"kernels": ["chunked"], "inner_backend": "eager"}
    with collecting() as graphs:
        assert_as_good_as_eager(torch.compile(written, backend="attn_fuse", options=options), mean, tokens)
    assert {site.kernel for graph in graphs for site in graph.sites} == {"chunked"}
