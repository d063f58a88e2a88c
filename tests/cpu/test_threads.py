"""Threads that call one compiled model for the first time at once, each of which Dynamo has compile it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_fuse.backend import attn_fuse as backend
from attn_fuse.kernels.chunked import steps
from attn_fuse.report import collecting
from tests.block import Block

THREADS = 4


def at_once(call: Callable[[], Any]) -> list[Any]:
    """What `call` gives in each of the threads, or the exception that it raises there."""
    together, found = threading.Barrier(THREADS), [None] * THREADS

    def run(number: int) -> None:
        together.wait()
        try:
            found[number] = call()
        except Exception as problem:
            found[number] = problem

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def results(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    out = run(x)
    return [out, *torch.autograd.grad(out.square().sum(), [*model.parameters()])]


@pytest.mark.parametrize("kernel", ["cpu_flash", "chunked"])
def test_cold_threads(kernel: str) -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 24, 32)
    wanted = results(model, model, x)
    options = {"kernels": [kernel], "inner_backend": "eager"}
    compiled = torch.compile(model, backend=backend, options=options)
    with collecting() as graphs:
        found = at_once(lambda: results(compiled, model, x))
    for got in found:
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert len(graphs) <= THREADS
    assert all([site.kernel for site in graph.sites] == [kernel] * 2 for graph in graphs)
    # Once it is compiled, every thread finds it.
    with collecting() as later:
        at_once(lambda: results(compiled, model, x))
    assert graphs and not later


def test_chunked_compiles_a_step_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_steps = []

    def slowly(
        step: Callable[..., Any], examples: Sequence[Tensor], _: object
    ) -> tuple[Callable[..., Any], Callable[..., bool]]:
        time.sleep(0.05)
        compiled_steps.append(step.__name__)
        return step, lambda tensors: True

    monkeypatch.setattr(steps, "compiled_for_any_size", slowly)
    monkeypatch.setattr("attn_fuse.kernels.chunked.plan.COMPILE_FROM", 1)
    q, k, v = torch.randn(3, 2, 4, 48, 16).unbind()

    def attention() -> Tensor:
        return torch.softmax((q @ k.transpose(-2, -1)).tanh(), -1) @ v

    compiled = torch.compile(attention, backend=backend, options={"kernels": ["chunked"], "inner_backend": "eager"})
    compiled()  # Dynamo holds the threads back one by one while it compiles
    compiled_steps.clear()
    monkeypatch.setattr(steps, "_compiled", {})
    monkeypatch.setattr(steps, "_chosen", {})
    for got in at_once(compiled):
        torch.testing.assert_close(got, attention())
    assert compiled_steps == ["forward"]
