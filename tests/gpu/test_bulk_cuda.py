"""The kernels with bulk copies (hopper.py, hopper_backward.py) beside those without: every score program that they
take, in lengths and widths that are no multiples of their blocks, with heads that share keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_fuse.expression.nodes import Score
from attn_fuse.kernels.operands import Operands
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.score.simplify import inside
from tests.graph.chunked_cases import CASE, Case
from tests.grid.features import Sizes
from tests.triton.bulk_calls import SPANNED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
# batch, heads, key heads, queries, keys, width of query and key, width of value
SIZES = (
    Sizes(2, 4, 4, 512, 512, 128, 128),
    Sizes(2, 4, 2, 300, 333, 128, 128),
    Sizes(1, 6, 1, 1024, 1000, 96, 80),
    Sizes(3, 2, 2, 129, 65, 128, 72),
    Sizes(1, 2, 2, 640, 640, 256, 256),
)
# Programs that are taken in the first sizes.
SURE = ("plain", "scaled", "causal", "window", "documents", "softcap")


def spans_of(program: ScoreProgram, inputs: list[Tensor], numbers: Sequence[int], s: Sizes, device: Any) -> Any:
    from attn_fuse.kernels.triton.flash.spans import spans

    only = program.hides_only_if_others_seen
    visible = program.visible if only else inside(program.visible, program)
    text = ScoreProgram(Score(), visible=visible, hides_only_if_others_seen=only).dumps()
    return spans(inputs, numbers, s.batch, s.heads, s.q_len, s.kv_len, text, device, True)


def results(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, inputs: list[Tensor], numbers: Sequence[int], table: Any, program: str
) -> list[Tensor]:
    """out, max and sum, and the gradients of query, key and value."""
    from attn_fuse.kernels.triton.flash import launch

    given = Operands(q, k, v, inputs, numbers, None, 0.0, program)
    made = launch.attend(given, table)
    back = launch.attend_backward(given, table, made, do, [False] * len(inputs))
    return [*made[:3], *back[:3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*CASE.values(), *SPANNED], ids=lambda case: case.name)
def test_they_give_what_the_others_give(case: Case, dtype: torch.dtype) -> None:
    from attn_fuse.kernels.triton.flash import facts

    for s in SIZES:
        torch.manual_seed(0)
        shapes = (s.q_len, s.heads, s.head_dim), (s.kv_len, s.kv_heads, s.head_dim), (s.kv_len, s.kv_heads, s.value_dim)
        shapes = *shapes, (s.q_len, s.heads, s.value_dim)
        q, k, v, do = (torch.randn(s.batch, *x, device="cuda", dtype=dtype).transpose(1, 2) for x in shapes)
        inputs, numbers, program = [x.cuda() for x in case.inputs(s)], case.numbers(s), case.program
        tables: list[Any] = [(None, None)]
        if program.visible is not None:
            tables.append(spans_of(program, inputs, numbers, s, q.device))
        for table in tables:
            facts._known.clear()
            known = facts.call_facts(Operands(q, k, v, inputs, numbers, None, 0.0, program.dumps()), table)
            taken = [*known.bulk]
            assert taken or s is not SIZES[0] or case.name not in SURE
            if not taken:
                continue
            how = q, k, v, do, inputs, numbers, table, program.dumps()
            found = results(*how)
            assert [*known.bulk] == taken, "Triton did not compile one"
            for kernel in taken:
                known.give_up(kernel, RuntimeError("the others are wanted"))
            for what, x, y in zip(("out", "max", "sum", "dq", "dk", "dv"), found, results(*how), strict=True):
                assert bool((x.isfinite() == y.isfinite()).all()), (what, s)
                x, y = (z.double().nan_to_num(0.0, 0.0, 0.0) for z in (x, y))
                limit = 1e-3 if what in ("max", "sum") else 4e-3 if dtype == torch.float16 else 2e-2
                assert float((x - y).norm()) <= limit * float(y.norm()) + 1e-6, (what, s)
                assert float((x - y).abs().max()) <= 4 * limit * float(y.abs().max()) + 1e-6, (what, s)


def test_tensors_that_the_engine_does_not_copy() -> None:
    """An address that is no multiple of 16 bytes, strides that are none, a gradient that is one number: the other
    kernels compute these."""
    from attn_fuse.kernels.triton.flash import facts

    program = CASE["scaled"].program.dumps()
    whole = torch.randn(4, 2, 4, 256, 130, device="cuda", dtype=torch.bfloat16)
    for first in (0, 1):
        q, k, v, do = (x[..., first : first + 128] for x in whole)
        assert not facts.call_facts(Operands(q, k, v, [], [], None, 0.0, program)).bulk
        assert all(bool(x.isfinite().all()) for x in results(q, k, v, do, [], [], (None, None), program))
    count = 4 * 2 * 4 * 256 * 128
    flat = torch.randn(count + 8, device="cuda", dtype=torch.bfloat16)
    wanted, shifted = ([*x.view(4, 2, 4, 256, 128)] for x in (flat[:count].clone(), flat[4 : 4 + count]))
    flat[4 : 4 + count].copy_(torch.stack(wanted).flatten())
    one = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(2, 4, 256, 128)
    wanted_of_one, found_of_one = (results(*x[:3], one, [], [], (None, None), program) for x in (wanted, shifted))
    found, found_shifted = (results(*x, [], [], (None, None), program) for x in (wanted, shifted))
    for x, y in zip(found, found_shifted, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    for x, y in zip(wanted_of_one, found_of_one, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
