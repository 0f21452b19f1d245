"""What hosts know of a program, and how a call waits until they have compiled it. `compiled.Lowering` makes it.

END-1: the wait ends with the deadline of the call, with a host that is lost meanwhile, with the cluster, and by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from pathways import _core
from pathways.api.session import Session
from pathways.compiler.ir import LogicalProgram
from pathways.plan.binding import BoundProgram
from pathways.plan.composite import composite_of


class Registration:
    """A program that hosts know; when it is settled, they have compiled it. They forget it, in the order, after the
    last who can call it."""

    number: int

    def __init__(self, cluster: Session, program: LogicalProgram, bound: BoundProgram) -> None:
        self._cluster = cluster
        control = cluster.control()
        if program.callbacks:
            cluster.effects.callbacks.update(program.callbacks)
            control.serve_callbacks(cluster.effects.callbacks)
        self.program = program
        self.group: int = control.group(bound.hosts())
        self.number = control.register_program(program, bound.bindings, self._forget_late)

    def settle(self) -> None:
        """Waits until the hosts have compiled it.

        Raises:
            DeadlineExceededError: they have not, at the call's deadline. They go on; this may be called again.
        """
        deadline = _core.deadline_here()
        try:
            self._cluster.control().wait_compiled(self.number, None if deadline is None else deadline.left())
        except TimeoutError:
            assert deadline is not None
            raise deadline.passed("being compiled by its hosts") from None

    def _forget_late(self, number: int) -> None:
        """The controller has registered it when nobody waited for that any more."""
        self._cluster.forgotten.append((number, self.group))
        threading.Thread(target=self._cluster.sweep_if_open, name="pathways-sweep", daemon=True).start()

    def drop(self) -> None:
        """Nobody can call it any more."""
        if hasattr(self, "number"):
            self._cluster.forgotten.append((self.number, self.group))  # `Cluster.sweep` sends it: here nothing may wait
            del self.number

    __del__ = drop


class CompositeRegistration(Registration):
    """A program with loops that the controller knows, and the hosts its plans."""

    def __init__(self, cluster: Session, program: LogicalProgram, bound: BoundProgram) -> None:
        self._cluster = cluster
        self._name = program.name
        self._composite = composite_of(bound)
        devices = dict(zip((mesh.name for mesh in program.meshes), bound.bindings, strict=True))
        self.plans: list[Registration] = []  # they are forgotten behind the composite, when this is dropped
        for plan in self._composite.plans:
            bindings = tuple(devices[mesh.name] for mesh in plan.meshes)
            self.plans.append(Registration(cluster, plan, BoundProgram(plan, bindings, bound.devices_per_host)))
        self.group = cluster.control().group(bound.hosts())

    def settle(self) -> None:
        """Waits until the hosts have compiled its plans, and gives the loops to the controller."""
        for plan in self.plans:
            plan.settle()
        self.number = self._cluster.control().register_composite(
            self._name, self._composite, [plan.number for plan in self.plans], self.group, self._forget_late
        )

    def drop(self) -> None:
        """Nobody can call it any more."""
        super().drop()
        for plan in self.plans:
            plan.drop()


@contextlib.contextmanager
def in_time(lock: Any) -> Iterator[None]:
    """Holds a lock under which another thread may wait for hosts.

    Raises:
        DeadlineExceededError: that thread still held it at the deadline of this thread's call.
    """
    deadline = _core.deadline_here()
    if deadline is None:
        lock.acquire()
    elif not lock.acquire(timeout=min(deadline.left(), threading.TIMEOUT_MAX)):
        raise deadline.passed("being compiled for another thread")
    try:
        yield
    finally:
        lock.release()
