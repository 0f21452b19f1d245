"""How a client leaves the devices: behind its saves and its runs, or not at all (SUSP-1). With a double of the native
controller, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from pathways import errors
from pathways.controller import offloading

CLIENT = 3


class Native:
    """Says what it was asked. `tasks` and `quiet` are what it answers, in turn; the last answer stays."""

    def __init__(self, tasks: Sequence[int], quiet: Sequence[bool]) -> None:
        self._tasks, self._quiet = list(tasks), list(quiet)
        self.asked: list[str] = []

    def clients(self) -> list[dict[str, Any]]:
        tasks = self._tasks.pop(0) if len(self._tasks) > 1 else self._tasks[0]
        return [{"client": CLIENT + 1, "tasks": 9}, {"client": CLIENT, "tasks": tasks}]

    def is_quiet(self, client: int) -> bool:
        assert client == CLIENT
        return self._quiet.pop(0) if len(self._quiet) > 1 else self._quiet[0]

    def __getattr__(self, name: str) -> Any:
        return lambda client: self.asked.append(name)


def leave(native: Native, **options: Any) -> int:
    async def ask(kind: int, to_disk: bool) -> list[tuple[str, int]]:
        native.asked.append("ask")
        return [("", 5), ("", 7)]

    async def pause(seconds: float) -> None:
        native.asked.append("pause")
        await asyncio.sleep(seconds / 10)

    return asyncio.run(offloading.leave_devices(native, CLIENT, ask, pause, False, **options))


def test_it_waits_for_saves_and_for_runs() -> None:
    native = Native([1, 0], [False, True])
    assert leave(native) == 12
    assert native.asked == ["pause", "suspend", "pause", "ask", "offload"]


def test_a_save_that_was_read_just_before_is_waited_for_too() -> None:
    """Else what it keeps would stay on the devices, and it would wait for the client's return."""
    native = Native([0, 1, 1, 0, 0], [True])
    assert leave(native) == 12
    assert native.asked == ["suspend", "resume", "pause", "suspend", "ask", "offload"]


def test_runs_that_do_not_end_are_waited_for_as_long_as_is_said() -> None:
    native = Native([0], [False])
    with pytest.raises(errors.ResourceExhaustedError, match=r"client 3 .* its runs have not ended in 0\.05 s"):
        leave(native, most_s=0.05)
    assert native.asked[0] == "suspend" and native.asked[-1] == "resume" and "ask" not in native.asked
