"""Options of torch's own beside ours: a mode, Inductor's options, and custom passes of either kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import attn_fuse
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.options import parse_options
from attn_fuse.report import collecting


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / 4, -1) @ v


QKV = torch.randn(3, 1, 2, 32, 16).unbind()


def run(**options: Any) -> None:
    torch.compiler.reset()
    with collecting() as graphs:
        out = torch.compile(plain, backend="attn_fuse", options={"pick": "fused", **options})(*QKV)
    assert [site.status for graph in graphs for site in graph.sites] == ["fused"]
    torch.testing.assert_close(out, plain(*QKV))


@pytest.fixture
def seen(monkeypatch) -> list[dict[str, Any]]:
    """What Inductor is asked for, in place of compiling."""
    patches: list[dict[str, Any]] = []

    def compile_fx(graph, inputs, config_patches=None, **_):
        patches.append(config_patches)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return patches


def test_a_mode_and_options_reach_inductor_together(seen) -> None:
    run(mode="reduce-overhead", inductor={"epilogue-fusion": False})
    assert seen[0]["triton.cudagraphs"] is True and seen[0]["epilogue_fusion"] is False


def test_an_option_goes_before_the_mode(seen) -> None:
    run(mode="max-autotune-no-cudagraphs", inductor={"max_autotune": False})
    assert seen[-1]["max_autotune"] is False and seen[-1]["coordinate_descent_tuning"] is True


def test_a_measuring_mode_measures_unless_a_pick_is_given() -> None:
    assert parse_options({"mode": "max-autotune"}).pick == "measured"
    assert parse_options({"mode": "max-autotune", "pick": "fused"}).pick == "fused"
    assert parse_options({"mode": "default"}) == parse_options({})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "reduce"}, "Inductor has no mode 'reduce'. Did you mean 'reduce-overhead'?"),
        ({"mode": 3}, "mode=3: it must be a name or None"),
        ({"inductor": {"max_autotun": True}}, "Inductor has no option 'max_autotun'. Did you mean 'max_autotune'?"),
        ({"inductor": {"qqqqqq": 1}}, "Inductor has no option 'qqqqqq'. torch._inductor.list_options() names all."),
        ({"inductor": {"max_autotune": "yes"}}, "max_autotune='yes': it must be of type bool"),
        ({"inductor": ["max_autotune"]}, "it must be a dictionary of Inductor's options"),
        ({"max_autotune": True}, "Inductor's options go into options={'inductor': {'max_autotune': ...}}"),
        ({"inner_backend": "eager", "inductor": {"max_autotune": True}}, "the inner backend is 'eager', not Inductor"),
        ({"inner_backend": backend}, "inner_backend='attn_fuse': the inner backend compiles"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(attn_fuse.OptionError) as raised:
        run(**options)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_two_modes_contradict_each_other() -> None:
    with pytest.raises(attn_fuse.OptionError, match="contradict each other"):
        parse_options({"mode": "max-autotune"}, mode="reduce-overhead")


class Counting(CustomGraphPass):
    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.runs += 1

    def uuid(self) -> str:
        return "counts its runs"


def test_a_plain_callable_as_custom_pass_runs_whenever_a_graph_is_compiled() -> None:
    """Inductor cannot know what a plain callable does, so a cached graph must not stand for its result."""
    counting = Counting()

    def count(graph: torch.fx.Graph) -> None:
        counting(graph)

    run(inductor={"joint_custom_post_pass": count})
    run(inductor={"joint_custom_post_pass": count})
    assert counting.runs == 2
    with config.patch(joint_custom_post_pass=[count, counting]):
        run()
        run()
    assert counting.runs == 6


def test_a_custom_pass_with_a_key_is_cached() -> None:
    counting = Counting()
    with torch._inductor.utils.fresh_cache():
        run(inductor={"joint_custom_post_pass": counting})
        run(inductor={"joint_custom_post_pass": counting})
    assert counting.runs == 1
