"""Callbacks that a client's programs make: their order, and what is still to come of them.

Each computation that calls this process back gives, beside its results, a value that comes when its calls are over.
Where JAX promises an order (`ordered=True`), a program also takes such a value: that of the last program before it. So
the order is a chain of data through all programs of a client, whatever slices they run on, and nothing waits for it
here. A call that fails breaks the chain for what was submitted behind it, as an exception would have; what is submitted
once that is known begins a new one. So does what is submitted when all before it is over.

Nobody reads these values, so they are let go of soon after they have come (`settle`). Then a call's failure is one that
nobody has read, and is told as such (UNREAD-1). `jax.effects_barrier` raises it all the same.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from pathways import _core, _jaxlib, errors
from pathways.api.arrays.array import Array
from pathways.compiler.ir import LogicalProgram

_BEGIN = np.bool_(False)
_PENDING, _FAILED = "pending", "failed"  # of `Client.state`
_all: weakref.WeakSet[Effects] = weakref.WeakSet()


@dataclasses.dataclass(eq=False)
class _Run:
    """A run that calls this process back, and what comes when its calls are over."""

    program: LogicalProgram  # keeps who is called
    ends: list[Array]
    unheard: list[Array]  # of these, those with effects, until a barrier has heard how they ended

    def is_over(self) -> bool:
        return all(map(_is_over, self.ends))


def _is_over(end: Array) -> bool:
    return bool(end.client.closed) or end.is_ready()


class Effects:
    """The callbacks of one cluster's programs."""

    def __init__(self) -> None:
        #: Who is called, by number: alive as long as a program that can call it, or a run of one.
        self.callbacks: weakref.WeakValueDictionary[int, _jaxlib.Callback] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        self._last: Array | None = None  # of what has an order; guarded by _lock
        self._open: collections.deque[_Run] = collections.deque()  # guarded by _lock
        self._failure: tuple[Any, str] | None = None  # the first that no barrier has raised, and its client
        self._waits_at_exit = False  # guarded by _lock
        _all.add(self)

    def run(
        self,
        program: LogicalProgram,
        layouts: tuple[_core.Layout, ...],
        submit: Callable[..., Any],
        move: Callable[[Array, Any, Any], Array],
    ) -> Any:
        """Submits a run by `submit(what it comes after, if that matters)`; gives its results without those that are
        not the user's. `move` is `compiled.move`."""
        calls = program.calls
        with self._lock if calls.last >= 0 else contextlib.nullcontext():  # two runs must not come after the same one
            out = submit(self._before(layouts[-1], move)) if calls.last >= 0 else submit()
            ends = out[len(out) - calls.count :]
            if calls.last >= 0:
                self._last = ends[calls.last]
            self._remember(ends, program)
        return out[: len(out) - calls.count]

    def _before(self, layout: _core.Layout, move: Callable[[Array, Any, Any], Array]) -> Any:
        last = self._last
        if last is None or last.client.state(last) != _PENDING:
            return _BEGIN
        if last.layout is layout:
            return last
        return move(last, layout.slice, ())

    def _remember(self, ends: list[Array], program: LogicalProgram) -> None:
        with self._lock:
            while self._open and self._open[0].is_over():
                self._let_go(self._open.popleft())
            self._open.append(_Run(program, ends, ends[: program.calls.effects]))
            if not self._waits_at_exit:
                self._waits_at_exit = True
                atexit.unregister(finish_all)
                atexit.register(finish_all, os.getpid())  # last, so it comes before the cluster ends

    def _let_go(self, run: _Run) -> None:
        """`_lock` is held. Keeps the failure for a barrier, but not the array that has it."""
        for end in run.unheard:
            if self._failure is None and not end.client.closed and end.client.state(end) == _FAILED:
                self._failure = end.client, end.client.unread_error_text(end.raw_handle)

    def settle(self) -> None:
        """Lets go of what is over."""
        with self._lock:
            runs = list(self._open)
        over = {run for run in runs if run.is_over()}  # without the lock: embedded, a look at them runs what is ready
        with self._lock:
            for run in self._open:
                if run in over:
                    self._let_go(run)
            self._open = collections.deque(run for run in self._open if run not in over)
            if self._last is not None and _is_over(self._last):
                self._last = None

    def wait(self) -> None:
        """Waits until every callback with effects, of what was submitted so far, is over.

        Raises:
            CallbackFailedError: one failed; the first that did since the last wait.
        """
        with self._lock:
            runs = list(self._open)
        first: Exception | None = None
        for end in itertools.chain.from_iterable(run.unheard for run in runs):
            try:
                if not end.client.closed:
                    end.block_until_ready()
            except Exception as problem:
                first = first or problem
        with self._lock:
            for run in runs:
                run.unheard = []
            self._open = collections.deque(run for run in self._open if run.unheard or not run.is_over())
            known, self._failure = self._failure, None
        if known is not None and not known[0].closed:
            client, text = known
            client.mark_read(text)
            raise errors.from_text(text, errors.ComputationError)
        if first is not None:
            raise first

    def finish(self) -> None:
        """Waits as `wait` does, but leaves failures to be told (UNREAD-1)."""
        with self._lock:
            runs = list(self._open)
        for end in itertools.chain.from_iterable(run.unheard for run in runs):
            with contextlib.suppress(errors.PathwaysError):  # the cluster is lost
                if not end.client.closed:
                    end.client.wait(end)
        with self._lock:
            for run in runs:
                run.unheard = []
            self._failure = None


def finish_all(pid: int) -> None:
    """At the end of the process that submitted them, waits for the callbacks with effects, as JAX does for its own."""
    if pid == os.getpid():
        for effects in list(_all):
            effects.finish()


def wait_for_all() -> None:
    """What `jax.effects_barrier` waits for beside JAX's own."""
    for effects in list(_all):
        effects.wait()
