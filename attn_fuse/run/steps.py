"""Steps: when to stop a program that is only analysed, and how.

A training step ends when an optimizer steps, or when a module is called again and its weights have new gradients. A
program without an optimizer infers, and stops after a call, unless other models in its memory are still to be called.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
import weakref
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from attn_fuse.run.outermost import optimizer_exists, others_wait

# Max calls of one module while others are still to be called.
_PATIENCE = 3
Gradients = list[tuple[int, int] | None]


class Stopped(BaseException):
    """Ends the program. Not an Exception, because a training loop may catch those."""


class Steps:
    """Counts the steps of a program and stops it after `most`. ended: after what, in words; "" before."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.ended = ""
        self._counts = self._optimizes = False
        self._steps = 0
        # The module called in training since the last step (None for a function), and its gradients at that call.
        self._training: tuple[weakref.ref[nn.Module] | None, Gradients] | None = None

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """A block in which steps count; outside it nothing is stopped."""
        hook = register_optimizer_step_post_hook(self._optimized)
        self._counts = True
        try:
            yield
        finally:
            self._counts = False
            hook.remove()

    def before_call(self) -> None:
        """Before a call of an outermost module, see whether a step is over. Raises Stopped after the last step."""
        if self._counts and self.ended and _in_main_thread():  # the program caught the first one
            raise Stopped
        if self._training is not None:
            module, before = self._training
            now = [] if module is None or (model := module()) is None else _gradients(model)
            if any(one is not None and one != other for one, other in zip(now, before, strict=False)):
                self._count()

    def after_call(
        self, module: nn.Module | None, calls: int, recording: bool, called: Container[nn.Module] = ()
    ) -> None:
        """Note a call of an outermost module with attention, or of a function (None). Raises Stopped in inference.

        calls: its calls so far. recording: whether gradients were recorded. called: all outermost modules called.
        """
        trains = recording and (module is None or any(weight.requires_grad for weight in module.parameters()))
        if trains and self._training is None:
            self._training = (None, []) if module is None else (weakref.ref(module), _gradients(module))
        self._optimizes = self._optimizes or optimizer_exists()
        if self._optimizes or calls < self.most:
            return
        waits = module is not None and ((trains and module.training) or others_wait(called))
        if calls >= _PATIENCE or not waits:
            what = "a function that attends" if module is None else type(module).__name__
            self._stop("the first inference" if calls == 1 else f"{calls} calls of {what}")

    def _optimized(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self._training is not None:
            self._count()

    def _count(self) -> None:
        self._training = None
        self._steps += 1
        if self._steps >= self.most:
            self._stop("the first training step" if self._steps == 1 else f"{self._steps} training steps")

    def _stop(self, when: str) -> None:
        if not self._counts:
            return
        self.ended = when
        # A background job ignores SIGINT: then this thread ends now, and the main thread at its next call.
        if _in_main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            raise Stopped
        # Like Ctrl-C, this interrupts a main thread that waits for this one.
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            _thread.interrupt_main()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _gradients(module: nn.Module) -> Gradients:
    return [None if (g := weight.grad) is None else (id(g), g._version) for weight in module.parameters()]
