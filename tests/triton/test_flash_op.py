"""triton_flash as an operator, interpreted on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from tests.dropout import seeded
from tests.graph.chunked_cases import CASE, drawn
from tests.operator_contract import SMALL, OperatorTests
from tests.triton.flash_operator import small_tiles, use_tiles  # noqa: F401
from tests.triton.interpreted import INTERPRETED, interpreted

pytestmark = pytest.mark.thorough

if INTERPRETED:
    from attn_fuse.kernels.triton.flash.configs import Config
    from attn_fuse.kernels.triton.flash.op import triton_flash, triton_flash_backward


@interpreted
class TestFlash(OperatorTests):
    op = staticmethod(triton_flash) if INTERPRETED else None
    more = {"of_queries": None, "of_keys": None}  # noqa: RUF012
    unit = math.log2(math.e)

    def use_other_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use_tiles(monkeypatch, Config(32, 16, 4, 1))


@interpreted
def test_opcheck_of_the_backward() -> None:
    case, s = CASE["everything"], SMALL
    query, key, value, *inputs = drawn(case, s, torch.float32)
    how = (query, key, value, inputs, case.numbers(s), seeded(1), None, None, 0.2)
    program = case.program.dumps()
    outputs = triton_flash(*how, program, False)
    args = (torch.randn(outputs[0].shape), *how, *outputs, program, [True, False, True])
    torch.library.opcheck(triton_flash_backward, args)


@interpreted
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"value": torch.ones(1, 2, 5, 4, dtype=torch.float64)}, "not computed in"),
        ({"value": torch.ones(1, 2, 5, 257)}, "too large"),
    ],
)
def test_what_does_not_fit_a_kernel_is_said(change: dict[str, torch.Tensor], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        triton_flash(**TestFlash().given(CASE["plain"].program, *torch.ones(3, 1, 2, 5, 4)) | change)
