"""A save or restore, as its client asks hosts for it: commands in the order, and what comes of them.

`orbax_handler` has such jobs for `pw.Array`s, and a proxy for programs of unmodified JAX
(`pathways.proxy.cluster_files`). The hosts' side is `pathways.host.checkpoint_io`. This file knows no orbax.

One thread at a time uses a job; it runs an event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

from pathways import errors
from pathways.api.arrays.array import Array
from pathways.api.session import Session
from pathways.protocol import payloads

_TASK, _BACKEND = 5, 4  # kinds of commands
#: Bytes of one command that asks for steps of several arrays, about.
_COMMAND_BYTES = 16 << 10
#: Between two looks at what is under way: the first, and the longest.
_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_jobs = itertools.count(1)

Group = tuple[Session, int]


def _nothing() -> None:
    pass


class Job:
    """One save or restore: what was asked of which hosts, and what came of it."""

    def __init__(self, look: Callable[[], None] = _nothing) -> None:
        """`look` is called again and again while the job waits; it raises when nothing comes any more."""
        self.number = next(_jobs)
        self.look = look
        self._groups: dict[Group, int] = {}  # how many hosts each has
        self._tokens: list[tuple[Any, int, Array | None]] = []  # each with the array that it reads

    def groups(self) -> Iterable[Group]:
        """The groups of hosts that have a part in it."""
        return list(self._groups)

    def join(self, array: Array) -> Group:
        """The group of an array's hosts, from now on one of the job's."""
        layout = array.layout
        group = (layout.slice.cluster, layout.group)
        self._groups[group] = layout.parts
        return group

    def stage(self, array: Array, number: int) -> Group:
        """Has the hosts keep an array's value for the job, by a command in the order; returns its group."""
        array.client.enter()  # a slice that moves changes who holds it
        try:
            group = self.join(array)
            array._pin()
            self.ask(group, payloads.task("stage", self.number, number=number), array)
            return group
        finally:
            array.client.leave()

    def ask(self, group: Group, payload: bytes, array: Array | None = None) -> int:
        """Asks a group's hosts for a task, with a buffer or without; `settle` waits for all that was asked."""
        client = group[0].native
        token = client.new_token(self._groups[group])
        self._tokens.append((client, token, array))
        client.command(_TASK, group[1], 0 if array is None else array.raw_handle, token, payload)
        return token

    def ask_for(self, op: str, arrays: Iterable[tuple[Array, list[Any]]], **fields: Any) -> None:
        """Asks for a step of several arrays, each with what is to be said of it: one command per group for as many as
        fit well. The host `lead` of a group does what one host is to do alone.
        """
        pending: dict[Group, list[Any]] = {}
        sizes: dict[Group, int] = {}
        leads: dict[Group, int] = {}

        def send(group: Group) -> None:
            sizes.pop(group)
            entries = pending.pop(group)
            self.ask(group, payloads.task(op, self.number, lead=leads[group], arrays=entries, **fields))

        for array, entry in arrays:
            group = self.join(array)
            leads[group] = min(array.layout.slice.binding.hosts)
            size = len(json.dumps(entry))
            if sizes.get(group, 0) + size > _COMMAND_BYTES and group in pending:
                send(group)
            pending.setdefault(group, []).append(entry)
            sizes[group] = sizes.get(group, 0) + size
        for group in list(pending):
            send(group)

    async def settle(self) -> None:
        """Waits until all is done that was asked; then raises the first error."""
        failed: errors.PathwaysError | None = None
        try:
            for client, token, array in self._tokens:
                if await settled(client, token, array, self.look) == "failed" and failed is None:
                    failed = _why(client, token, array)
        finally:
            array = None
            for client, token, _ in self._tokens:
                client.forget_token(token)
            self._tokens = []
        if failed is not None:
            try:
                raise failed
            finally:
                failed = None  # the error knows this frame, and by it the arrays

    async def give_up(self) -> None:
        """After an error: has the hosts drop it all, and waits until nothing of it is under way (JOB-1)."""
        for group in self.groups():
            try:
                if not group[0].native.closed:
                    self.ask(group, payloads.task("end", self.number))
                    await self.settle()
            except errors.PathwaysError:  # the cluster or the hosts are lost, and the job with them
                continue

    def end(self, early: bool) -> None:
        """Nothing more will be asked; `early`: although something may still be under way."""
        for cluster, group in self._groups:
            if not cluster.native.closed:
                try:
                    cluster.native.command(_BACKEND, group, 0, 0, payloads.end(self.number, early))
                except errors.PathwaysError:  # the cluster is lost, and the job with it
                    continue


def _why(client: Any, token: int, array: Array | None) -> errors.PathwaysError:
    if array is not None and not array.is_deleted() and client.state(array) == "failed":
        failure = array._failure()
        # orbax takes a TimeoutError for one of its own bounds, and would say so.
        return errors.CheckpointError(str(failure)) if isinstance(failure, TimeoutError) else failure
    return errors.from_text(client.error_text(token), errors.CheckpointError)


async def settled(client: Any, raw: int, array: Array | None = None, look: Callable[[], None] = _nothing) -> str:
    """Waits for a future, which may read an array (END-1), without holding up the loop, nor a Ctrl-C: "ready" or
    "failed". `look`: see `Job`.
    """
    pause = _PAUSE_S
    source = 0 if array is None else array.raw_handle
    while (state := client.wait_raw(raw, 0.0, source)) == "pending":
        client.check_alive()
        look()
        if not client.pump():
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
    return str(state)
