"""The commands of clients that are neither puts nor fetches: placements, the ends of programs, checkpoints, offloads.

The enqueue thread calls all of it, when the order has come to the command.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pathways.host import offload
from pathways.host.checkpoint_io import Tasks
from pathways.host.devices import HostDevices
from pathways.host.own_settings import own_settings
from pathways.host.placements import Placements
from pathways.host.programs import Programs
from pathways.protocol import payloads


class Commands:
    """Does the commands of one host's clients, or starts a task that does it."""

    def __init__(
        self,
        devices: HostDevices,
        placements: Placements,
        programs: Programs,
        tasks: Tasks,
        directory: str | None,
        on_offloaded: Callable[[int, str | None, int], None],
    ) -> None:
        """`directory`: where files of offloaded buffers lie. `on_offloaded(request, error or None, bytes)` is called
        after each offload or restore.
        """
        self._devices = devices
        self._placements = placements
        self._programs = programs
        self._tasks = tasks
        self._directory = directory
        self._on_offloaded = on_offloaded

    def command(self, client: int, plan: int, payload: bytes) -> None:
        """Does a client's command: drops the program `plan`, which the controller has dropped, too; or, if that is 0,
        stores a placement's description, or ends a save or a restore.
        """
        if plan:
            self._programs.remove(client, plan)
        elif payload[:1] == b"E":
            self._tasks.drop(client, *payloads.parse_end(payload))
        else:
            self._placements.define(client, *payloads.parse_define(payload))

    def start_task(
        self, client: int, task: int, value: jax.Array | None, payload: bytes, booked_mask: int, booked_bytes: int
    ) -> None:
        """Starts a step of a save or restore; `core.task_done` is called at its end.

        For a step that makes an array, the order has booked `booked_bytes` on each local device of `booked_mask`; a
        bigger array is refused (MEM-6).
        """
        fields = payloads.parse_task(payload)
        try:
            if fields["op"] == "stage":
                if value is None:
                    raise ValueError("a save stages an array, got none")
                self._tasks.stage(client, task, fields, value)
            elif fields["op"] == "read":
                target = self._placements.of(client, fields["placement"])
                if not target.fits(booked_mask, booked_bytes):
                    raise ValueError(target.too_big(booked_mask, booked_bytes))
                self._tasks.read(client, task, fields, target)
            elif fields["op"] == "end":
                self._tasks.end(client, task, fields)
            else:
                self._tasks.submit(client, task, fields)
        except Exception as problem:
            self._tasks.refuse(task, problem)

    @own_settings
    def offload(self, client: int, values: list[Any], payload: bytes, away: bool) -> list[Any] | None:
        """Offloads a client's values from the devices (`away`), or restores them.

        Returns what replaces each value, or None: it failed, and the values stay as they are. Calls `on_offloaded` in
        both cases.
        """
        request, to_disk = payloads.parse_offload(payload)
        try:
            if away:
                moved, nbytes = offload.offload(values, self._directory if to_disk else None, to_disk)
            else:
                moved, nbytes = offload.restore(values)
        except Exception as problem:
            doing = f"move client {client}'s buffers " + ("off the devices" if away else "back to the devices")
            kind = "ResourceExhaustedError" if isinstance(problem, OSError | MemoryError) else "ComputationError"
            self._on_offloaded(request, f"{kind}: host {self._devices.host} could not {doing}: {problem}", 0)
            return None
        self._on_offloaded(request, None, nbytes)
        return moved
