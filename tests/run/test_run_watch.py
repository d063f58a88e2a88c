"""The watch over a program: what it fuses, what it leaves, when it stops, and that looking changes nothing."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from attn_fuse.explain.explanation import Explanation
from attn_fuse.run.steps import Stopped
from attn_fuse.run.watch import Watch
from tests.run.watched import (
    LENGTH,
    RUNS,
    WIDTH,
    Block,
    Causal,
    Holder,
    Looping,
    Model,
    Perceptron,
    Wrapper,
    inputs,
    outcome,
    watching,
)

pytestmark = pytest.mark.usefixtures("compiled")
FIRST, AUTHOR = ("compiled at its first call",), ("compiled by the program",)


class TestFuses:
    def test_an_outermost_module_that_attends_is_compiled_and_no_other(self, compiled: list[str]) -> None:
        model, other, loss, x = Model().eval(), Perceptron(), nn.MSELoss(), inputs()
        wanted = copy.deepcopy(model).blocks[0](x)
        with watching() as watch, torch.no_grad():
            for _ in range(2):
                loss(other(model.blocks[0](x)), x)
            torch.testing.assert_close(model.blocks[0](x), wanted)
            model(x)
        assert outcome(watch) == [("Block", 1, FIRST), ("Model", 2, FIRST)]
        assert len(compiled) == 2 and all("scaled_dot_product" in code or "attn_fuse" in code for code in compiled)

    def test_training_and_inference_are_told_apart(self) -> None:
        model = Model()
        with watching() as watch:
            model(inputs()).sum().backward()
            with torch.no_grad():
                model.eval()(inputs())
        assert [one.subject.split(", ")[-2] for one in watch.explanations] == ["training", "inference"]
        assert model.calls == 2 and all(weight.grad is not None for weight in model.parameters())

    @pytest.mark.parametrize(
        "compile",
        [torch.compile, lambda model: model.compile() or model, lambda model: torch.compile(lambda x: model(x))],
        ids=["torch.compile", "in place", "a function"],
    )
    @pytest.mark.parametrize("only_compiled", [False, True])
    def test_what_the_program_compiles_goes_through_the_door(self, compile: Any, only_compiled: bool) -> None:
        with watching(only_compiled=only_compiled) as watch, torch.no_grad():
            compile(Block())(inputs())
        (found,) = watch.explanations
        assert found.fused == 1 and found.said in (AUTHOR, ())

    @pytest.mark.parametrize("compile", [lambda model: model, torch.compile])
    @pytest.mark.parametrize("draws", [False, True])
    def test_masks_are_drawn_for_a_page(self, compile: Any, draws: bool) -> None:
        watch = Watch(None, False, {"pick": "fused"}, draws)
        watch.begin()
        try:
            compile(Causal())(inputs())
        finally:
            watch.end()
        assert (watch.explanations[0].sites[0].picture != ()) is draws

    def test_only_compiled_leaves_the_others(self, compiled: list[str]) -> None:
        with watching(only_compiled=True) as watch:
            Model()(inputs())
        assert not compiled and not watch.explanations

    @pytest.mark.parametrize(
        ("module", "wanted"),
        [
            (lambda: Wrapper(Wrapper(Block())), [("Block", 1, FIRST)]),
            (Holder, [("Block", 1, AUTHOR), ("Block", 1, FIRST)]),
        ],
        ids=["wraps", "holds a compiled part"],
    )
    def test_the_modules_within_are_outermost_in_what_only_holds_them(self, module: Any, wanted: Any) -> None:
        with watching() as watch, torch.no_grad():
            module()(inputs())
        assert outcome(watch) == wanted

    def test_alike_modules_and_other_sizes_are_told_once(self) -> None:
        blocks = [Block() for _ in range(3)]
        with watching() as watch, torch.no_grad():
            for block in blocks:
                for length in (24, 25, 26):
                    block(torch.randn(2, length, WIDTH))
        (found,) = watch.explanations
        assert found.said[1] == "the same for Block(float32[2, 25, 16]), train() without gradients, float32 on cpu"
        assert found.said[-1] == "the same for 2 more modules of this class"

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_blocks_under_an_eager_checkpoint_get_their_gradients(self, reentrant: bool) -> None:
        blocks, x = [Block() for _ in range(2)], inputs().requires_grad_()
        wanted = torch.autograd.grad(blocks[1](blocks[0](x)).square().sum(), x)
        with watching() as watch:
            for _ in range(2):
                y = x
                for block in blocks:
                    y = checkpoint(block, y, use_reentrant=reentrant)
                y.square().sum().backward()
        torch.testing.assert_close(x.grad, 2 * wanted[0])
        assert all(one.fused for one in watch.explanations)

    @pytest.mark.parametrize(("keeps", "runs"), [({}, 2), ({"retain_graph": True}, 0), ({"create_graph": True}, 0)])
    def test_a_graph_that_is_kept_for_another_backward_runs_as_written(self, keeps: Any, runs: int) -> None:
        model, x = Block(), inputs().requires_grad_()
        with watching() as watch:
            for _ in range(3):
                loss = model(x).square().sum()
                (slope,) = torch.autograd.grad(loss, x, **keeps)
                if keeps:
                    (slope.square().sum() if "create_graph" in keeps else loss).backward()
        (site,) = watch.explanations[0].sites
        assert len(RUNS) == runs and site.fused is (runs > 0)
        assert runs or (site.blocker is not None and "another backward pass" in site.blocker.reason)

    @pytest.mark.parametrize(("trains", "runs"), [(True, 2), (False, 9)])
    def test_what_infers_with_gradients_on_is_compiled_too(self, trains: bool, runs: int) -> None:
        model = Block().train(trains)
        with watching():
            for _ in range(10):
                model(inputs())
        assert len(RUNS) == runs

    @pytest.mark.parametrize("fails", ["Inductor", "Dynamo"])
    def test_a_failure_to_compile_leaves_the_program(self, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no compiler here")

        place = "torch._inductor.compile_fx.compile_fx" if fails == "Inductor" else "attn_fuse.run.watch.eagerly"
        monkeypatch.setattr(place, fail)
        model, x = Perceptron() if fails == "Dynamo" else Block(), inputs()
        wanted = model(x)
        with watching() as watch:
            torch.testing.assert_close(model(x), wanted)
            model(x).sum().backward()
        assert fails == "Dynamo" or "compiling it failed" in watch.explanations[0].said[-1]

    def test_what_dynamo_leaves_as_written_is_named(self) -> None:
        model, x = Looping(), inputs()
        wanted = model(x)
        with watching() as watch:
            torch.testing.assert_close(model(x), wanted)
        assert any("leaves the function forward" in note for one in watch.explanations for note in one.notes)

    def test_a_modules_own_error_is_raised_as_it_is(self) -> None:
        with watching(), pytest.raises(RuntimeError, match="mat1 and mat2"):
            Block()(torch.randn(2, LENGTH, WIDTH + 1))

    def test_hooks_run_once_a_call(self) -> None:
        model, seen = Block(), list[str]()
        model.register_forward_pre_hook(lambda *_: seen.append("before"))
        model.register_forward_hook(lambda *_: seen.append("after"))
        with watching(), torch.no_grad():
            model(inputs())
            model(inputs())
        assert seen == ["before", "after"] * 2

    def test_a_program_may_look_into_transform_and_copy_its_modules(self) -> None:
        model, x = Block(), inputs()
        with watching(), torch.no_grad():
            model(x)
            assert model._compiled_call_impl is None
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                torch.testing.assert_close(other(x), model(x))
            with FlopCounterMode(display=False) as counter:
                model(x)
            assert counter.get_total_flops() > 0
            weights = {name: weight[None] for name, weight in model.named_parameters()}
            vmap(lambda w: functional_call(model, w, (x,)))(weights)
            torch.jit.trace(model, x)(x)
            torch.export.export(model, (x,)).module()(x)

    def test_a_module_is_not_kept_alive(self) -> None:
        model = Block()
        gone = weakref.ref(model)
        with watching(), torch.no_grad():
            model(inputs())
            del model
            gc.collect()
            assert gone() is None


class Drawing(Model):
    """Draws from every generator, and checkpoints a block with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        if np.random.uniform() < 2 and random.random() < 2:
            x = checkpoint(self.blocks[0], x, use_reentrant=False)
        return super().forward(x)


def trained(model: nn.Module, steps: int = 3) -> list[Any]:
    """All that a program could see: outputs and gradients of some steps, buffers, and what the generators give next."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[Any] = []
    for _ in range(steps):
        out = model(inputs())
        optimizer.zero_grad()
        out.square().sum().backward()
        seen += [out.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]
        optimizer.step()
    return [*seen, *model.buffers(), torch.rand(1), random.random(), np.random.rand()]


class TestLooks:
    @pytest.mark.parametrize("made", [lambda: Model(0.2), lambda: Drawing(0.2)], ids=["plain", "drawing"])
    def test_nothing_is_changed(self, made: Callable[[], Model], compiled: list[str]) -> None:
        torch.manual_seed(0)
        model = made()
        other = copy.deepcopy(model)
        wanted = trained(other)
        with watching(steps=100) as watch:
            got = trained(model)
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(got, wanted, strict=True))
        assert model.calls == other.calls and not compiled
        assert any(one.sites for one in watch.explanations) or type(model) is Drawing

    def test_what_the_program_compiles_is_compiled_as_it_would_be(self, compiled: list[str]) -> None:
        with watching(steps=100) as watch:
            trained(torch.compile(Block()))
        assert outcome(watch) == [("Block", 1, AUTHOR)]
        assert "softmax" in compiled[0] and "attn_fuse" not in compiled[0]

    def test_a_program_that_trains_is_stopped_after_its_first_step(self) -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = copy.deepcopy(model.state_dict())
        with watching(steps=1) as watch, pytest.raises(Stopped):
            with torch.no_grad():
                for _ in range(5):
                    model.eval()(inputs())
            model.train()
            for _ in range(3):
                model(inputs()).square().sum().backward()
                optimizer.step()
        assert watch.steps is not None and watch.steps.ended == "the first training step"
        assert [one.subject.split(", ")[-2] for one in watch.explanations] == ["inference", "training"]
        assert model.calls == 6 and any((before[name] != now).any() for name, now in model.state_dict().items())

    @pytest.mark.parametrize("steps", [1, 2])
    def test_gradients_are_a_step_where_no_optimizer_steps(self, steps: int) -> None:
        model, optimizer = Model(), torch.optim.SGD([torch.zeros(1)], 0.1)
        with watching(steps=steps), pytest.raises(Stopped):
            for _ in range(9):
                model(inputs()).square().sum().backward()
        assert model.calls == steps and optimizer is not None

    def test_a_step_counts_where_dynamo_cannot_tell_whether_something_attends(self) -> None:
        model = Looping()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with watching(steps=1), pytest.raises(Stopped):
            model(inputs()).sum().backward()
            optimizer.step()

    def test_a_step_counts_of_what_another_backend_compiles(self) -> None:
        model = torch.compile(Block(), backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with watching(steps=1), pytest.raises(Stopped):
            model(inputs()).sum().backward()
            optimizer.step()

    def test_other_optimizers_steps_do_not_count(self) -> None:
        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)
        with watching(steps=1):
            weight.sum().backward()
            optimizer.step()

    @pytest.mark.parametrize(("steps", "calls"), [(1, 1), (4, 4)])
    def test_a_program_that_infers_is_stopped_after_its_calls(self, steps: int, calls: int) -> None:
        model = Model().eval()
        with watching(steps=steps) as watch, pytest.raises(Stopped), torch.no_grad():
            for _ in range(9):
                model(inputs())
        assert model.calls == calls and watch.steps is not None and watch.steps.ended

    def test_other_models_in_memory_are_waited_for(self) -> None:
        first, second = Block(), Model()
        with watching(steps=1) as watch, pytest.raises(Stopped), torch.no_grad():
            first(inputs())
            second(inputs())
            raise AssertionError("it is not stopped")
        assert [one.subject.partition("(")[0] for one in watch.explanations] == ["Block", "Model"]

    def test_a_function_that_the_program_compiles_is_stopped_after_its_call(self) -> None:
        block = Block()
        attend = torch.compile(lambda x: block(x))
        with watching(steps=1) as watch, pytest.raises(Stopped), torch.no_grad():
            torch.compile(lambda x: block(x))(inputs())
            attend(inputs())
        assert len(watch.explanations) == 1

    def test_what_catches_the_end_is_stopped_again(self) -> None:
        model = Model().eval()
        with watching(steps=1), pytest.raises(Stopped), torch.no_grad():
            for _ in range(3):
                try:
                    model(inputs())
                except Exception:
                    raise AssertionError("an Exception") from None
                except BaseException:
                    continue
            model(inputs())
        assert model.calls == 1

    @pytest.mark.parametrize("ignored", [False, True])
    def test_a_thread_stops_the_main_thread(self, ignored: bool) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
        model, ends = Model().eval(), list[BaseException]()

        def run() -> None:
            try:
                model(inputs())
            except BaseException as error:
                ends.append(error)

        thread = threading.Thread(target=run)
        with watching(steps=1) as watch, pytest.raises(Stopped if ignored else KeyboardInterrupt):
            thread.start()
            if ignored:
                thread.join()
                model(inputs())
            threading.Event().wait(60)
        signal.signal(signal.SIGINT, before)
        thread.join()
        assert watch.steps is not None and watch.steps.ended and model.calls == 1
        assert [type(end) for end in ends] == [Stopped] * ignored


def test_explanations_are_those_of_explain() -> None:
    with watching(steps=100) as watch, torch.no_grad():
        Block().eval()(inputs())
    (found,) = watch.explanations
    assert isinstance(found, Explanation) and found.sites[0].location.module == ""
    assert found.subject == "Block(float32[2, 24, 16]), inference, float32 on cpu"
