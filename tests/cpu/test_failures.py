"""Failures of our stages, and of the inner backend on our kernels, never break a model; under `strict` they raise."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from attn_fuse.backend import attn_fuse as backend
from attn_fuse.report import as_text, collecting
from tests.block import Block

FUSED = {"inner_backend": "eager", "pick": "fused"}


def test_a_failure_in_the_pass_never_breaks_a_model(monkeypatch, caplog) -> None:
    def fails(*args: object) -> None:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr("attn_fuse.analysis.recognize", fails)
    model, x = Block(), torch.randn(2, 9, 32)
    with collecting() as graphs:
        torch.testing.assert_close(torch.compile(model, backend=backend, options=FUSED)(x), model(x))
    assert graphs[0].sites[0].blocker.reason == "analysing it failed: ZeroDivisionError: by design"
    assert "block.py" in caplog.text


@pytest.mark.parametrize("stage", ["backend.functionalize", "backend.expand", "site.find_sites"])
def test_a_failure_on_the_whole_graph_never_breaks_a_model(stage: str, monkeypatch, caplog) -> None:
    def fails(*args: object) -> None:
        raise ZeroDivisionError("by design")

    module, name = stage.split(".")
    monkeypatch.setattr(importlib.import_module(f"attn_fuse.{module}"), name, fails)
    model, x = Block(), torch.randn(2, 9, 32)
    with collecting() as graphs:
        torch.testing.assert_close(torch.compile(model, backend=backend, options=FUSED)(x), model(x))
    assert not graphs[0].sites and "failed: ZeroDivisionError: by design. Please" in graphs[0].notes[-1]
    assert "test_failures.py" in caplog.text
    torch.compiler.reset()
    with pytest.raises(Exception, match="by design"):
        torch.compile(model, backend=backend, options={**FUSED, "strict": True})(x)


def takes_no_kernel(graph: GraphModule, inputs: list[Any]) -> GraphModule:
    if any("attn_fuse" in str(node.target) for node in graph.graph.nodes):
        raise NotImplementedError("no such operator")
    return graph


@pytest.mark.parametrize("strict", [False, True])
def test_an_inner_backend_that_fails_on_a_kernel_gets_the_graph_as_written(strict: bool, caplog) -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 9, 32)
    options = {**FUSED, "kernels": ["chunked"], "inner_backend": takes_no_kernel, "strict": strict}
    run = torch.compile(model, backend=backend, options=options)
    with collecting() as graphs:
        if strict:
            with pytest.raises(Exception, match="no such operator"):
                run(x)
            return
        torch.testing.assert_close(run(x), model(x))
    (graph,) = graphs
    assert [(site.status, site.kernel) for site in graph.sites] == [("as written", None)] * 2
    assert "the inner backend failed on the graph with its attention fused: NotImplementedError" in as_text(graph)
    assert "takes_no_kernel" in caplog.text


def test_an_inner_backend_that_fails_on_the_graph_as_written_too_raises() -> None:
    def fails(graph: GraphModule, inputs: list[Any]) -> GraphModule:
        raise NotImplementedError("nothing at all")

    with pytest.raises(Exception, match="nothing at all"):
        torch.compile(Block(), backend=backend, options={**FUSED, "inner_backend": fails})(torch.randn(2, 9, 32))


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "then"), [(["chunked"], None), (["chunked", "cpu_flash"], "cpu_flash")])
def test_inductor_fails_on_the_backward_of_a_template(kernels: list[str], then: str | None, monkeypatch) -> None:
    """The next kernel is tried; were the backward compiled when it is first called, the model would break there."""
    lowering = importlib.import_module("torch._inductor.graph").GraphLowering
    call_function = lowering.call_function

    def fails(self: Any, target: Any, *args: Any) -> Any:
        if "attn_fuse" in str(target) and self.is_backward:
            raise ValueError("not comparable, by design")
        return call_function(self, target, *args)

    monkeypatch.setattr(lowering, "call_function", fails)
    monkeypatch.setattr(importlib.import_module("attn_fuse.backend"), "_TEMPLATED", frozenset({"chunked"}))
    torch.compiler.reset()
    model, x = Block().train(), torch.randn(2, 9, 32)
    options = {"kernels": kernels, "inductor": {"fx_graph_cache": False}}
    with collecting() as graphs:
        got, expected = torch.compile(model, backend=backend, options=options)(x), model(x)
    gradients = [torch.autograd.grad(out.sum(), model.qkv.weight)[0] for out in (got, expected)]
    torch.testing.assert_close(*gradients)
    (site,) = [site for graph in graphs for site in graph.sites]
    assert site.kernel == then
    assert "the inner backend failed on it: " in str(site.why_not["chunked"])
    assert "not comparable, by design" in str(site.why_not["chunked"])


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_inductor_fails_on_a_kernel(train: bool, monkeypatch) -> None:
    lowering = importlib.import_module("torch._inductor.graph").GraphLowering
    call_function = lowering.call_function

    def fails(self: Any, target: Any, *args: Any) -> Any:
        if "attn_fuse" in str(target):
            raise NotImplementedError("no lowering, by design")
        return call_function(self, target, *args)

    monkeypatch.setattr(lowering, "call_function", fails)
    torch.compiler.reset()
    model, x = Block().train(train), torch.randn(2, 9, 32)
    options = {"pick": "fused", "kernels": ["chunked"], "inductor": {"fx_graph_cache": False}}
    with collecting() as graphs, torch.set_grad_enabled(train):
        got, expected = torch.compile(model, backend=backend, options=options)(x), model(x)
        torch.testing.assert_close(got, expected)
        if train:
            weight = model.qkv.weight
            gradients = [torch.autograd.grad(out.sum(), weight)[0] for out in (got, expected)]
            torch.testing.assert_close(*gradients)
    assert [site.status for graph in graphs for site in graph.sites] == ["as written"]
