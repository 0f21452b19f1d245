"""Takes the buffers of a client off the devices, and brings them back; on all hosts, or on none (SUSP-1).

Both kinds of cluster use this: the controller process on its event loop's thread, the embedded cluster on the calling
thread.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pathways import errors
from pathways.protocol import payloads

#: Seconds between two checks whether a client's runs are over.
QUIET_LOOK_S = 0.002
#: Seconds that a client's saves and restores have to end before it leaves: they keep memory, and go on only while the
#: controller reads the client.
MOST_SAVE_S = 60.0
#: Asks every host to move a client's buffers: `OFFLOAD` or `RESTORE`, to disk. Of each host: error text and bytes.
Ask = Callable[[int, bool], Awaitable[Sequence[tuple[str, int]]]]


async def leave_devices(
    native: Any,
    client: int,
    ask: Ask,
    pause: Callable[[float], Awaitable[None]],
    to_disk: bool,
    most_s: float | None = None,
) -> int:
    """Takes a client of the native controller off the devices. Returns the bytes that left them.

    `pause(seconds)` lets others run meanwhile. `most_s`: seconds that its runs have to end; None: any time.

    Raises:
        CheckpointError: a save or a restore of the client does not end.
        ResourceExhaustedError: its runs do not end; it stays.
    """
    deadline = time.monotonic() + MOST_SAVE_S
    while True:
        while _has_tasks(native, client):
            if time.monotonic() > deadline:
                raise errors.CheckpointError(
                    f"client {client} cannot leave the devices: a save or a restore has not ended in {MOST_SAVE_S:g} s"
                )
            await pause(10 * QUIET_LOOK_S)
        native.suspend(client)
        try:
            since = time.monotonic()
            while not native.is_quiet(client):
                if most_s is not None and time.monotonic() > since + most_s:
                    raise errors.ResourceExhaustedError(
                        f"client {client} cannot leave the devices: its runs have not ended in {most_s:g} s"
                    )
                await pause(QUIET_LOOK_S)
        except BaseException:
            native.resume(client)
            raise
        if not _has_tasks(native, client):
            break
        native.resume(client)  # a task that it had begun was read meanwhile
    try:
        nbytes = await _everywhere(ask, payloads.OFFLOAD, payloads.RESTORE, to_disk)
    except BaseException:
        native.resume(client)
        raise
    native.offload(client)
    return nbytes


async def return_to_devices(native: Any, client: int, ask: Ask) -> int:
    """Brings a client of the native controller back. Returns the bytes that came back to the devices."""
    if refused := native.restore(client):
        raise errors.from_text(refused, errors.ResourceExhaustedError)
    try:
        nbytes = await _everywhere(ask, payloads.RESTORE, payloads.OFFLOAD, False)
    except BaseException:
        native.offload(client)
        raise
    native.resume(client)
    return nbytes


def _has_tasks(native: Any, client: int) -> bool:
    return any(each["client"] == client and each["tasks"] for each in native.clients())


async def _everywhere(ask: Ask, kind: int, undo: int, to_disk: bool) -> int:
    answers = await ask(kind, to_disk)
    if failures := [error for error, _ in answers if error]:
        await ask(undo, False)
        raise errors.from_text(failures[0], errors.ComputationError)
    return sum(nbytes for _, nbytes in answers)
