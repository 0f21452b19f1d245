"""Callbacks that a client's programs make: their order, and what is still to come of them.

Each computation that calls this process back gives, beside its results, a value that comes when its calls are over.
Where JAX promises an order (`ordered=True`), a program also takes such a value: that of the last program before it. So
the order is a chain of data through all programs of a client, whatever slices they run on, and nothing waits for it
here. A call that fails breaks the chain for what was submitted behind it, as an exception would have; what is submitted
once that is known begins a new one.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from pathways import _core, _jaxlib
from pathways.api.array import Array
from pathways.compiler.ir import LogicalProgram

_BEGIN = np.bool_(False)
_all: weakref.WeakSet[Effects] = weakref.WeakSet()


class Effects:
    """The callbacks of one cluster's programs."""

    def __init__(self) -> None:
        #: Who is called, by number: alive as long as a program that can call it, or a run of one.
        self.callbacks: weakref.WeakValueDictionary[int, _jaxlib.Callback] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        self._last: Array | None = None  # of what has an order; guarded by _lock
        self._open: collections.deque[tuple[list[Array], LogicalProgram]] = collections.deque()  # guarded by _lock
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
        if last is None or last.client.state(last) == "failed":
            return _BEGIN
        if last.layout is layout:
            return last
        return move(last, layout.slice, ())

    def _remember(self, ends: list[Array], program: LogicalProgram) -> None:
        with self._lock:
            while self._open and all(each.is_ready() for each in self._open[0][0]):
                self._open.popleft()
            self._open.append((ends, program))

    def forget(self) -> None:
        """What comes now comes after nothing."""
        with self._lock:
            self._last = None

    def wait(self) -> None:
        """Waits until every callback with effects, of what was submitted so far, is over.

        Raises:
            CallbackFailedError: one failed; the first that did.
        """
        with self._lock:
            waiting = [end for ends, program in self._open for end in ends[: program.calls.effects]]
        first: Exception | None = None
        for end in waiting:
            try:
                if not end.client.closed:
                    end.block_until_ready()
            except Exception as problem:
                first = first or problem
        with self._lock:
            while self._open and all(end.client.closed or end.is_ready() for end in self._open[0][0]):
                self._open.popleft()
        if first is not None:
            raise first


def wait_for_all() -> None:
    """What `jax.effects_barrier` waits for beside JAX's own."""
    for effects in list(_all):
        effects.wait()
