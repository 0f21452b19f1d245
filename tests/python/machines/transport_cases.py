"""What the tests of links and of tunnels share: a loop, its threads, and waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from pathways.transport.loop import Loop

DEADLINE_S = 20.0


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def threads_named(begin: str) -> list[threading.Thread]:
    """Those of this process with such a name: others come and go as other tests' clusters please."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(begin)]


def cpu_s(thread: threading.Thread) -> float:
    """The processor's time that the thread has taken."""
    (found,) = (each for each in psutil.Process().threads() if each.id == thread.native_id)
    return float(found.user_time + found.system_time)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop("pw-test")
    yield made
    made.close()
    wait_for(lambda: not threads_named("pw-test"))
