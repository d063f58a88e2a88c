"""attn_fuse.install, and Inductor's own options: what plain torch.compile and Inductor get of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import attn_fuse
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.doors import install as door
from attn_fuse.options import Fuel, Options, parse_options
from attn_fuse.report import collecting
from tests.block import Block

ORIGINAL = torch._TorchCompileInductorWrapper.__init__


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / 4, -1) @ v


QKV = torch.randn(3, 1, 2, 32, 16).unbind()


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    torch.compiler.reset()
    yield
    attn_fuse.uninstall()
    assert torch._TorchCompileInductorWrapper.__init__ is ORIGINAL


@pytest.fixture
def seen(monkeypatch) -> list[dict[str, Any]]:
    """What Inductor is asked for, in place of compiling."""
    patches: list[dict[str, Any]] = []

    def compile_fx(graph, inputs, config_patches=None, **_):
        patches.append(config_patches)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return patches


def statuses(run: Any, *args: Any) -> list[str]:
    """What became of the attentions that are compiled while `run` runs."""
    with collecting() as graphs:
        torch.testing.assert_close(run(*(args or QKV)), plain(*QKV) if not args else args[0])
    return [site.status for graph in graphs for site in graph.sites]


def test_a_model_trains_through_inductor() -> None:
    attn_fuse.install(options={"pick": "fused", "strict": True})
    block, x = Block(), torch.randn(2, 24, 32)
    expected = block(x)
    wanted = torch.autograd.grad(expected.square().sum(), [*block.parameters()])
    with collecting() as graphs:
        block.compile()
        out = block(x)
    assert [site.kernel for graph in graphs for site in graph.sites] == ["cpu_flash"]
    torch.testing.assert_close(out, expected)
    got = torch.autograd.grad(out.square().sum(), [*block.parameters()])
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({}, {}),
        ({"backend": "inductor"}, {}),
        ({"backend": "inductor", "mode": "default"}, {}),
        ({"backend": "inductor", "mode": "reduce-overhead"}, {"triton.cudagraphs": True}),
        ({"options": {"epilogue_fusion": False, "max-autotune-gemm": True}}, {"epilogue_fusion": False}),
        ({"dynamic": True, "fullgraph": True}, {}),
    ],
)
def test_callers_of_inductor_fuse_and_keep_their_settings(seen, how: dict[str, Any], wanted: dict[str, Any]) -> None:
    with attn_fuse.install(options={"pick": "fused", "inductor": {"size_asserts": False}}):
        assert statuses(torch.compile(plain, **how)) == ["fused"]
    (patches,) = seen
    assert patches.items() >= wanted.items() and patches["size_asserts"] is False


def test_a_setting_of_the_caller_goes_before_the_installed_one(seen) -> None:
    with attn_fuse.install(options={"inductor": {"epilogue_fusion": True}, "mode": "reduce-overhead"}):
        torch.compile(plain, options={"epilogue_fusion": False})(*QKV)
    assert seen[0]["epilogue_fusion"] is False and seen[0]["triton.cudagraphs"] is True


@pytest.mark.parametrize("options", [None, {"pick": "fused"}])
def test_max_autotune_measures_unless_a_pick_was_installed(seen, options, monkeypatch) -> None:
    picks = []
    original = door.Attempt

    def attempt(options: Options, fuel: Fuel, **more: Any) -> Any:
        picks.append(options.pick)
        return original(replace(options, pick="fused"), fuel, **more)

    monkeypatch.setattr("attn_fuse.doors.install.Attempt", attempt)
    with attn_fuse.install(options):
        torch.compile(plain, mode="max-autotune-no-cudagraphs")(*QKV)
    assert picks == ["fused" if options else "measured"]


def test_installing_twice_is_installing_once(seen) -> None:
    attn_fuse.install()
    attn_fuse.install(options={"pick": "fused"})
    assert statuses(torch.compile(plain)) == ["fused"] and len(seen) == 1
    attn_fuse.uninstall()
    assert torch._TorchCompileInductorWrapper.__init__ is ORIGINAL
    attn_fuse.uninstall()


def test_a_block_brings_back_what_was_before(seen) -> None:
    attn_fuse.install(options={"pick": "fused"})
    with attn_fuse.install(options={"pick": "fused", "kernels": ["cudnn"]}):
        assert statuses(torch.compile(plain)) == ["as written"]
    assert statuses(torch.compile(plain)) == ["fused"]
    with pytest.raises(ZeroDivisionError), attn_fuse.install():
        raise ZeroDivisionError
    assert statuses(torch.compile(plain, mode="reduce-overhead")) == ["fused"]


def test_plain_and_fused_code_of_one_function_stay_apart(seen) -> None:
    """Dynamo keeps the compiled code at the function's own code, for whichever backend is equal."""
    before = torch.compile(plain)
    assert statuses(before) == []
    attn_fuse.install(options={"pick": "fused"})
    during = torch.compile(plain)
    assert statuses(during) == ["fused"]
    assert statuses(before) == []
    attn_fuse.uninstall()
    after = torch.compile(plain)
    assert statuses(after) == []
    assert len(seen) == 2


def test_other_backends_are_left_alone() -> None:
    with attn_fuse.install(options={"pick": "fused", "strict": True}):
        for backend in ("eager", "aot_eager", lambda graph, inputs: graph):
            assert statuses(torch.compile(plain, backend=backend)) == []
        assert not torch.export.export(Block(), (torch.randn(1, 8, 32),)).graph.find_nodes(
            op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
        )
        aoti = torch._TorchCompileAOTInductorWrapper("default", None, False)
        assert type(aoti) is torch._TorchCompileAOTInductorWrapper


def test_the_backend_by_name_goes_through_once(seen) -> None:
    with attn_fuse.install(options={"pick": "fused"}):
        assert statuses(torch.compile(plain, backend="attn_fuse", options={"pick": "fused"})) == ["fused"]
    assert len(seen) == 1


def test_our_own_kernels_compile_past_the_door() -> None:
    """chunked compiles its steps by Inductor while the model's graph is compiled."""
    with attn_fuse.install(options={"kernels": ["chunked"]}):
        assert statuses(torch.compile(plain)) == ["fused"]


def test_what_is_stored_is_compiled_plainly() -> None:
    """Our guards around the code of a graph cannot be written to a file."""
    with attn_fuse.install(options={"pick": "fused"}):
        stored = torch.compile(plain, fullgraph=True)
        with torch._functorch.config.patch(bundled_autograd_cache=True):
            assert statuses(stored) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [({"pik": 1}, "no option 'pik'"), ({"inner_backend": "eager"}, "attn_fuse.install: inner_backend='eager'")],
)
def test_bad_options_are_refused_and_nothing_is_installed(options: dict[str, Any], said: str) -> None:
    with pytest.raises(attn_fuse.OptionError, match=said):
        attn_fuse.install(options)
    assert torch._TorchCompileInductorWrapper.__init__ is ORIGINAL


# ---- options of torch's own beside ours


def run(**options: Any) -> None:
    torch.compiler.reset()
    with collecting() as graphs:
        out = torch.compile(plain, backend="attn_fuse", options={"pick": "fused", **options})(*QKV)
    assert [site.status for graph in graphs for site in graph.sites] == ["fused"]
    torch.testing.assert_close(out, plain(*QKV))


def test_a_mode_and_options_reach_inductor_together(seen) -> None:
    run(mode="reduce-overhead", inductor={"epilogue-fusion": False})
    assert seen[0]["triton.cudagraphs"] is True and seen[0]["epilogue_fusion"] is False


def test_an_option_goes_before_the_mode(seen) -> None:
    run(mode="max-autotune-no-cudagraphs", inductor={"max_autotune": False})
    assert seen[-1]["max_autotune"] is False and seen[-1]["coordinate_descent_tuning"] is True


def test_a_measuring_mode_measures_unless_a_pick_is_given() -> None:
    for mode in ("max-autotune", "max-autotune-no-cudagraphs"):
        assert parse_options({"mode": mode}).pick == parse_options({}, mode).pick == "measured"
        for given in (parse_options({"mode": mode, "pick": "fused"}), parse_options({"pick": "fused"}, mode)):
            assert given.pick == "fused"
    assert parse_options({}, "reduce-overhead").pick == "fastest"
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
