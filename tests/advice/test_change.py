"""The statement to change for an attention that is left: the program so changed is fused."""

from __future__ import annotations

import functools
import linecache
import re
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from attn_fuse.backend import analyze_only
from attn_fuse.report import Code, GraphReport, SiteReport, as_text, collecting
from tests.models import lookalikes
from tests.models.spelling import Spelling, square

REFUSED = [one for one in lookalikes.LOOKALIKES if one.reason]


def name(spelling: Spelling) -> str:
    return spelling.name


def sites_of(program: Any, *args: Any, pick: str = "fused") -> list[SiteReport]:
    torch._dynamo.reset()
    with collecting() as graphs:
        torch.compile(program, backend=functools.partial(analyze_only, options={"pick": pick}))(*args)
    return [site for graph in graphs for site in graph.sites]


def changed(code: Code, module: ModuleType) -> ModuleType:
    """`module` executed anew with `code` in it."""
    assert module.__file__ is not None
    lines = list(linecache.getlines(module.__file__))
    ((first, last),) = code.lines
    indent = re.match(r"\s*", lines[first - 1])
    assert indent is not None
    lines[first - 1 : last] = [f"{indent[0]}{line}\n" for line in code.text]
    again = ModuleType(module.__name__)
    again.__dict__["__file__"] = module.__file__
    exec(compile("".join(lines), f"{module.__file__} changed", "exec"), again.__dict__)
    return again


def softmaxes(text: str) -> int:
    return len(re.findall(r"soft(max|min)\(", text))


@pytest.mark.parametrize("spelling", REFUSED, ids=name)
def test_a_program_changed_as_said_is_fused(spelling: Spelling) -> None:
    sites = sites_of(spelling.program(), *spelling.inputs(spelling.dtype))
    changes = [site.blocker.change for site in sites if site.blocker is not None and site.blocker.change is not None]
    if not changes:
        pytest.skip("no change is known")
    for change in changes:
        assert change.notes[0].startswith("it is then fused on "), change
        before = "".join(linecache.getlines(change.file)[change.lines[0][0] - 1 : change.lines[0][1]])
        assert softmaxes(before) == softmaxes("\n".join(change.text)), "the softmax stays"
        module = changed(change, lookalikes)
        (again,) = [one for one in module.LOOKALIKES if one.name == spelling.name]
        after = sites_of(again.program(), *again.inputs(again.dtype))
        assert sum(site.fused for site in after) > sum(site.fused for site in sites), (change, after)


@pytest.mark.thorough
def test_many_look_alikes_have_a_change() -> None:
    sites = [site for one in REFUSED for site in sites_of(one.program(), *one.inputs(one.dtype))]
    blockers = [site.blocker for site in sites if site.blocker is not None]
    # The rest differ from an attention in more than one operation, or in its products.
    assert sum(blocker.change is not None for blocker in blockers) > 0.4 * len(blockers)


# ---- the text


def said(program: Any, *args: Any, pick: str = "fused") -> str:
    (site,) = sites_of(program, *args, pick=pick)
    text = as_text(GraphReport((site,), 0.0), plain=True).partition("next:")[2]
    return "\n".join(line.strip() for line in re.sub(r"lines? [\d-]+ of \S+,", "line N,", text).strip().splitlines())


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        w = F.softmax(q @ k.transpose(-2, -1) / 4.0, dim=-1)
        w = self.drop(w)
        return w @ v, w


def test_weights_that_are_returned_after_dropout() -> None:
    assert_expected_inline(
        said(Returns(), *square()(torch.float32)),
        """\
write in place of line N, in forward:
return w @ v, None
# it is then fused on chunked, without 1.1 KiB of scores; the weights are no longer returned""",
    )


def test_weights_that_are_returned() -> None:
    program, args = Returns().eval(), [torch.randn(1, 8, 1024, 64) for _ in range(3)]
    assert_expected_inline(
        said(program, *args, pick="fastest"),
        """\
write in place of line N, in forward:
return w @ v, None
# it is then fused on cpu_flash, without 32.0 MiB of scores; the weights are no longer returned""",
    )


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / 4.0).softmax(dim=2) @ v


def test_a_softmax_over_another_axis() -> None:
    assert_expected_inline(
        said(over_queries, *square()(torch.float32)),
        """\
write in place of line N, in over_queries:
return (q @ k.transpose(-2, -1) / 4.0).softmax(dim=-1) @ v
# it is then fused on cpu_flash, without 1.1 KiB of scores; the result differs""",
    )


def guarded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (q @ k.transpose(-2, -1) / 4.0).exp()
    total = torch.clamp(
        e.sum(-1, keepdim=True),  # of the keys
        min=0.5,
    )
    return e / total @ v


def test_an_expression_of_several_lines() -> None:
    assert_expected_inline(
        said(guarded, *square()(torch.float32)),
        """\
write in place of line N, in guarded:
total = e.sum(-1, keepdim=True)
# it is then fused on cpu_flash, without 1.1 KiB of scores; the result differs""",
    )


def in_two_layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return rolled(rolled(q, k, v), k, v)


def rolled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = 2 * (q @ k.transpose(-2, -1)).roll(1, -1)
    return s.softmax(-1) @ v


def test_a_line_that_runs_twice() -> None:
    sites = sites_of(in_two_layers, *square()(torch.float32))
    first, second = [site.blocker and site.blocker.change for site in sites]
    assert first == second and first is not None and first.text == ("s = 2 * (q @ k.transpose(-2, -1))",)


def rolled_and_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The second call has fewer queries and keys."""
    return rolled(q, k, v)[:, :, :3] + rolled(q[:, :, :3], k[:, :, :5].cumsum(-1), v[:, :, :5])


def test_calls_of_other_sizes_have_their_own_outcome() -> None:
    notes = {site.blocker.change.notes for site in sites_of(rolled_and_more, *square()(torch.float32))
             if site.blocker is not None and site.blocker.change is not None}  # fmt: skip
    assert len(notes) == 2, notes


def detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / 4.0).softmax(-1).detach() @ v


def test_nothing_is_said_where_nothing_helps() -> None:
    """Neither the softmax nor another operation is named on suspicion."""
    assert said(lambda q, k, v: (q @ k.transpose(-2, -1)).softmax(-1).softmax(-1) @ v, *square()(torch.float32)) == ""
    assert said(detached, *(x.requires_grad_() for x in square()(torch.float32))) == ""
