"""The living variables of one connection, and how others who look at the cluster come to know of them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from pathways import errors
from pathways.protocol import control_pb2 as pb
from pathways.protocol import wire

#: Changes are collected for so long, and told together.
_COLLECT_S = 0.1


class VariableList:
    """Tells the controller which variables a client has, for `pathways status`.

    The list is sent as a whole: by a thread a moment after it has changed, and by `tell`. So the making of a variable
    waits for nothing, and a finalizer only leaves a note.
    """

    def __init__(self, send: Callable[[pb.VariablesRequest], None]) -> None:
        """`send` tells the controller."""
        self._send = send
        self._living: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()  # of additions to `_living`, and of `_has_thread`
        self._notes: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: no more
        self._references: set[Any] = set()
        self._has_thread = False

    def add(self, variable: Any) -> None:
        """A variable is made."""
        with self._lock:
            self._living.add(variable)
            self._references.add(weakref.ref(variable, self._gone))
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._work, name="pw-variables", daemon=True).start()
        self._notes.put(True)

    def changed(self) -> None:
        """What is to be told of the variables is another now."""
        self._notes.put(True)

    def living(self) -> list[Any]:
        """The variables that there are."""
        with self._lock:
            return list(self._living)

    def tell(self) -> None:
        """Sends the list."""
        found = self.now()
        self._send(pb.VariablesRequest(variables=found[: wire.MOST_VARIABLES], variable_count=len(found)))

    def now(self) -> list[pb.Variable]:
        """The living variables, the biggest first."""
        return sorted(map(_described, self.living()), key=lambda each: (-each.device_bytes, each.name))

    def stop(self) -> None:
        """Ends the thread."""
        self._notes.put(False)

    def _gone(self, reference: Any) -> None:  # perhaps in the middle of anything: it takes no lock
        self._references.discard(reference)
        self._notes.put(True)

    def _work(self) -> None:
        goes_on = self._notes.get()
        while goes_on:
            time.sleep(_COLLECT_S)
            with contextlib.suppress(queue.Empty):
                while goes_on:
                    goes_on = self._notes.get_nowait()
            try:
                self.tell()
            except errors.PathwaysError:  # the connection is over
                return
            goes_on = goes_on and self._notes.get()


def _described(variable: Any) -> pb.Variable:
    dims = ",".join(map(str, variable.shape))
    return pb.Variable(
        name=variable.name,
        type=f"{variable.dtype}[{dims}]",
        slice=variable.slice.mesh_spec.name,
        device_bytes=variable.device_bytes,
    )
