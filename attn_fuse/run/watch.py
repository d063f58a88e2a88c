"""Watch: capture every outermost module of a program, and fuse its attention or only analyse it.

A module is outermost if no other module is running when it is called. Dynamo captures it at its first call in each
mode; without attention it runs as written from then on. Code that the author compiles goes through the door of
`install`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from attn_fuse.backend import Attempt
from attn_fuse.doors.install import install
from attn_fuse.errors import named
from attn_fuse.explain import compiled_call, in_words
from attn_fuse.explain.explanation import Explanation
from attn_fuse.explain.inputs import Inputs
from attn_fuse.explain.torchs_own import torch_code_left
from attn_fuse.graph.breaks import functions_left_alone
from attn_fuse.graph.scopes import copied
from attn_fuse.options import Fuel, parse_options
from attn_fuse.report import GraphReport, listening, log
from attn_fuse.run.first_runs import FirstRuns, uncompiled_after_all
from attn_fuse.run.outermost import cannot_attend, is_sharded, is_wrapper
from attn_fuse.run.steps import Steps
from attn_fuse.torch_internals import (
    RestartsDynamo,
    as_written,
    compile_with,
    compiled_by_author,
    eagerly,
    given_to_compile,
    going_on_where_compiling_fails,
    graph_break,
    in_backward,
    inductor_door,
    left_by_dynamo,
    looking_at_module_calls,
    open_inductor_door,
)

Run = Callable[..., Any]
# Max inputs to name with the same outcome for the same code.
_MOST_NAMED = 3
_FUSES, _LOOKS = "compiled at its first call", "not compiled by the program; run without --explain compiles it"


@dataclass
class _Known:
    """A module that was called.

    is_left: whether it is not to be captured. may_attend: whether it attends or Dynamo cannot tell. modes: (training,
    recording) of its calls. calls: the number of calls with possible attention.
    """

    is_left: bool
    compiled: Run | None = None
    attends: bool = False
    may_attend: bool = False
    modes: set[tuple[bool, bool]] = field(default_factory=set)
    calls: int = 0


@dataclass
class _Call:
    """A call of an outermost module, and the graphs compiled in it.

    by: the module called. module: the same, or the module that the author gave to torch.compile. said: lines for the
    report. left: sentences on functions that are not compiled.
    """

    by: nn.Module
    module: nn.Module
    inputs: Inputs
    started: float = field(default_factory=time.time)
    recording: bool = field(default_factory=torch.is_grad_enabled)
    said: list[str] = field(default_factory=list)
    reports: list[GraphReport] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class _Here(threading.local):
    call: _Call | None = None


class Watch:
    """A watch over a program. steps: analyse only, and stop after some steps; None fuses attention.

    only_compiled: leave modules alone that the program does not compile. options: those of the backend. draws: draw
    masks. codes: write the code for each attention. Raises OptionError for a bad option.
    """

    def __init__(
        self,
        steps: Steps | None,
        only_compiled: bool,
        options: Mapping[str, Any],
        draws: bool = False,
        codes: bool = False,
    ) -> None:
        self.steps = steps
        self.only_compiled = only_compiled
        self._options, self._draws, self._codes = options, draws, codes
        parsed = replace(parse_options(options), compiles=steps is None)
        self._attempt = Attempt(
            parsed, Fuel(None), draws=draws, codes=codes, plain=eagerly, only_looks=steps is not None
        )
        self._installed = contextlib.ExitStack()
        self._here = _Here()
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # Groups of similar explanations, each with the id of its module.
        self._found: dict[Any, list[tuple[Explanation, int]]] = {}
        self._outside: list[GraphReport] = []
        self._function_calls = 0
        self._uncompiled: list[GraphReport] = []

    def begin(self) -> None:
        """Watch all calls of modules and every torch.compile from now on."""
        with contextlib.ExitStack() as installed:
            installed.enter_context(listening(self._record))
            installed.enter_context(looking_at_module_calls(self._look))
            if self.steps is None:
                installed.enter_context(install(self._options))
                open_inductor_door(replace(inductor_door(), draws=self._draws, codes=self._codes))
            else:
                installed.callback(open_inductor_door, inductor_door())
                open_inductor_door(self._look_and_compile)
                installed.enter_context(self.steps.counting())
            self._installed = installed.pop_all()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._installed.close)

    def end(self) -> None:
        """Undo `begin`, in any thread; a second call does nothing."""
        self._installed.close()

    @property
    def explanations(self) -> tuple[Explanation, ...]:
        """The explanation of each module in each mode, and of the functions that the program compiles."""
        found = [_in_one(told) for told in self._found.values()]
        if outside := tuple(report for report in self._outside if report.sites):
            found.append(Explanation("functions that the program compiles", outside))
        uncompiled = {id(report) for report in self._uncompiled}
        return tuple(
            replace(one, reports=tuple(uncompiled_after_all(r) if id(r) in uncompiled else r for r in one.reports))
            for one in found
        )

    # ---- calls

    def _look(self, module: nn.Module, own: Run | None) -> Run | None:
        if self._here.call is not None or isinstance(module, (GraphModule, torch.jit.ScriptModule)):
            return None
        known = self._known.get(module)
        if known is None:
            try:
                is_left = cannot_attend(module) or is_wrapper(module)
            except Exception:  # a module that breaks nn.Module's promises runs as it is
                is_left = True
            known = self._known[module] = _Known(is_left)
        if known.is_left and not compiled_by_author(module):
            return None
        # In the backward, a checkpoint must repeat the way it ran before.
        if in_backward() and (self.steps is not None or not known.attends):
            return None
        return functools.partial(self._called, module, own, known)

    def _called(self, module: nn.Module, own: Run | None, known: _Known, /, *args: Any, **kwargs: Any) -> Any:
        if self.steps is not None:
            self.steps.before_call()
        call = _Call(module, given_to_compile(module), Inputs(args, kwargs))
        mode = call.module.training, call.recording
        is_new = mode not in known.modes
        run = as_written(module)
        if compiled_by_author(module):
            run = own or run
            call.said.append("compiled by the program")
        elif not self.only_compiled and (is_new or (self.steps is None and known.attends)):
            known.compiled = known.compiled or _captured(self._attn_fuse, is_sharded(module))
            run = functools.partial(known.compiled, module)
            call.said.append(_FUSES if self.steps is None else _LOOKS)
        self._here.call = call
        try:
            out = run(*args, **kwargs)
            known.modes.add(mode)
        finally:
            self._here.call = None
            if is_new or call.reports:
                self._note(call, mode, known)
        if self.steps is not None and known.may_attend:
            known.calls += 1
            self.steps.after_call(call.module, known.calls, call.recording, self._known)
        return out

    def _note(self, call: _Call, mode: tuple[bool, bool], known: _Known) -> None:
        try:
            left = (*functions_left_alone(left_by_dynamo(call.started)), *dict.fromkeys(call.left))
            attends = any(report.sites for report in call.reports)
            known.attends |= attends
            # Backends other than ours and Inductor report nothing.
            tells_nothing = compiled_by_author(call.by) and not call.reports
            known.may_attend = known.attends or bool(left) or len(call.said) > 1 or tells_nothing
            if attends or left or len(call.said) > 1:
                subject = in_words(call.module, call.inputs, call.recording)
                told = Explanation(subject, tuple(call.reports), tuple(dict.fromkeys(call.said)), left)
                outcome = ((site.location, site.status, site.kernel) for site in told.sites)
                key = (type(call.module), mode, told.said, *outcome)
                self._found.setdefault(key, []).append((told, id(call.module)))
        except Exception:  # a report must not break a program
            log.warning("a call is missing from the report", exc_info=True)

    # ---- what is compiled

    def _attn_fuse(self, graph: GraphModule, inputs: Sequence[Any]) -> Run:
        """The backend for modules that the program does not compile. On a failure the graph runs as written."""
        call = self._here.call
        if call is None:
            return eagerly(graph)
        try:
            call.left.extend(torch_code_left(graph))
            trains = self.steps is None and torch.is_grad_enabled()
            plain = eagerly(copied(graph)) if trains else graph
            before = len(call.reports)
            compiled = self._attempt.compiled(graph, inputs)
            if not trains:
                return compiled
            kept = functools.partial(self._uncompiled.extend, call.reports[before:])
            return FirstRuns(plain, compiled, call.module.training, kept)
        except RestartsDynamo:
            raise
        except Exception as problem:
            log.warning("a graph runs as written because compiling it failed", exc_info=True)
            call.said.append(f"compiling it failed, and a part of it runs as written: {named(problem)}")
            return eagerly(graph)

    def _look_and_compile(self, graph: GraphModule, inputs: Sequence[Any], inductor: Mapping[str, Any]) -> Run:
        """Analyse a graph that the program compiles, and let Inductor compile it unchanged."""
        plain = functools.partial(compile_with, "inductor", None, inductor=inductor)
        before = len(self._outside)
        compiled = replace(self._attempt, plain=plain).compiled(graph, inputs)
        if graph_break(graph) or not any(report.sites for report in self._outside[before:]):
            return compiled

        def run(*values: Any) -> Any:
            out = compiled(*values)
            assert self.steps is not None
            self._function_calls += 1
            self.steps.after_call(None, self._function_calls, torch.is_grad_enabled())
            return out

        return run

    def _record(self, report: GraphReport) -> None:
        call = self._here.call
        (self._outside if call is None else call.reports).append(report)


def _captured(backend: Run, calls_within_hooks: bool) -> Run:
    """The compiled call of a module, which is an argument because a stored function must not keep the module alive.

    calls_within_hooks: compile only the module's `forward`, because Dynamo must not trace FSDP's hooks.
    """
    compiled = compiled_call(backend, None, calls_forward=calls_within_hooks)

    def run(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        with going_on_where_compiling_fails():
            if not calls_within_hooks:
                return compiled(module, *args, **kwargs)
            module.__dict__["forward"] = functools.partial(compiled, module)
            try:
                return as_written(module)(*args, **kwargs)
            finally:
                del module.__dict__["forward"]

    return run


def _in_one(told: Sequence[tuple[Explanation, int]]) -> Explanation:
    """Explanations that differ only in their inputs as the first of them, with lines on the others.

    told: explanations, each with the id of its module.
    """
    first, others = told[0][0], [*dict.fromkeys(one.subject for one, _ in told)][1:]
    said = [f"the same for {subject}" for subject in others[:_MOST_NAMED]]
    if len(others) > _MOST_NAMED:
        said.append(f"the same for {len(others) - _MOST_NAMED} other inputs")
    if (modules := len({module for _, module in told})) > 1:
        said.append(f"the same for {modules - 1} more modules of this class")
    return replace(first, said=(*first.said, *said))
