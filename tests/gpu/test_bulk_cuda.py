"""The forward kernel with bulk copies (hopper.py) beside the one without: every score program that it takes, in lengths
and widths that are no multiples of its blocks, with heads that share keys."""

from __future__ import annotations

import pytest
import torch

from attn_fuse.expression.nodes import Score
from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.kernels.score.simplify import inside
from tests.graph.chunked_cases import CASE
from tests.grid.features import Sizes

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
    Sizes(2, 2, 1, 250, 700, 192, 128),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASE)
def test_it_gives_what_the_other_gives(name: str, dtype: torch.dtype) -> None:
    from attn_fuse.kernels.triton.flash import facts, launch
    from attn_fuse.kernels.triton.flash.spans import spans

    case = CASE[name]
    for s in SIZES:
        torch.manual_seed(0)
        shapes = (s.q_len, s.heads, s.head_dim), (s.kv_len, s.kv_heads, s.head_dim), (s.kv_len, s.kv_heads, s.value_dim)
        q, k, v = (torch.randn(s.batch, *shape, device="cuda", dtype=dtype).transpose(1, 2) for shape in shapes)
        inputs, numbers = [x.cuda() for x in case.inputs(s)], case.numbers(s)
        program = case.program
        tables = [(None, None)]
        if program.visible is not None:
            only = program.hides_only_if_others_seen
            visible = program.visible if only else inside(program.visible, program)
            text = ScoreProgram(Score(), visible=visible, hides_only_if_others_seen=only).dumps()
            found = spans(inputs, numbers, s.batch, s.heads, s.q_len, s.kv_len, text, q.device, True)
            tables.append(found)
        for table in tables:
            how = q, k, v, inputs, numbers, None, *table, 0.0, program.dumps()
            known = facts.call_facts(q, k, v, inputs, numbers, None, 0.0, program.dumps(), table)
            if known.bulk is None:
                assert s is not SIZES[0] or name not in ("plain", "scaled", "causal", "window", "documents", "softcap")
                continue
            results = launch.attend(*how)
            assert known.bulk is not None, "it was given up"
            known.give_up_bulk(RuntimeError("the other is wanted"))
            for found, wanted in zip(results[:3], launch.attend(*how)[:3], strict=True):
                assert bool((found.isnan() == wanted.isnan()).all())
                found, wanted = (
                    found.nan_to_num(posinf=1e30, neginf=-1e30),
                    wanted.nan_to_num(posinf=1e30, neginf=-1e30),
                )
                precise = found.dtype == torch.float32
                torch.testing.assert_close(
                    found, wanted, rtol=1e-3 if precise else 2e-2, atol=1e-3 if precise else 1e-2
                )
            del facts._known[next(key for key, value in facts._known.items() if value is known)]


def test_a_tensor_that_it_does_not_copy() -> None:
    """An address that is no multiple of 16 bytes, and strides that are none: the other kernel computes them."""
    from attn_fuse.kernels.triton.flash import facts, launch

    program = CASE["scaled"].program.dumps()
    whole = torch.randn(3, 2, 4, 256, 130, device="cuda", dtype=torch.bfloat16)
    for first, there in ((1, False), (0, False)):
        q, k, v = (x[..., first : first + 128] for x in whole)
        known = facts.call_facts(q, k, v, [], [], None, 0.0, program)
        assert (known.bulk is not None) == there
        out, *_ = launch.attend(q, k, v, [], [], None, None, None, 0.0, program)
        assert bool(out.isfinite().all())
    flat = torch.randn(3 * (2 * 4 * 256 * 128) + 8, device="cuda", dtype=torch.bfloat16)
    results = []
    for first in (0, 4):
        part = flat[first : first + 3 * 2 * 4 * 256 * 128]
        part.copy_(torch.linspace(-1, 1, part.numel(), device="cuda").sin().to(part.dtype))
        q, k, v = part.view(3, 2, 4, 256, 128)
        results.append(launch.attend(q, k, v, [], [], None, None, None, 0.0, program)[0])
    torch.testing.assert_close(*results, rtol=2e-2, atol=1e-2)
