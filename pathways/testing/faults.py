"""Faults that a test asks for in the environment of its cluster's processes."""

from __future__ import annotations

import os
import threading
import time
from typing import Any


def swap_every(host: int) -> int:
    """PATHWAYS_TEST_SWAP: with "h:n", host h breaks the order (ORD-1) at each n-th pair of runs. Returns n; else 0."""
    which, _, every = os.environ.get("PATHWAYS_TEST_SWAP", "").partition(":")
    return int(every) if which == str(host) else 0


def install(driver: Any) -> None:
    """Installs what the environment asks for on a host (a `JaxHost`). Call it before the host's loop begins.

    PATHWAYS_TEST_SLOW_COPIES: slow channels; each copy to another host, and each transfer to a host on another machine,
    takes so many seconds longer.
    PATHWAYS_TEST_SLOW_COMPILE: with "name:s", the compilation of each program of this name takes s seconds longer.
    PATHWAYS_TEST_SLOW_WRITES: what a host writes of a checkpoint takes so many seconds longer.
    """
    if slow := os.environ.get("PATHWAYS_TEST_SLOW_COPIES"):
        driver.core.slow_copies_for_testing(float(slow))
        _slow_streams(driver.transfers, float(slow))
    if slow := os.environ.get("PATHWAYS_TEST_SLOW_COMPILE"):
        name, _, seconds = slow.partition(":")
        slow_compile(driver, name, float(seconds))
    if slow := os.environ.get("PATHWAYS_TEST_SLOW_WRITES"):
        _slow_writes(driver._tasks, float(slow))


def _slow_streams(transfers: Any, seconds: float) -> None:
    """Each transfer to a host on another machine leaves so many seconds later."""
    send = transfers.send_remote

    def later(outgoing: Any) -> None:
        timer = threading.Timer(seconds, send, (outgoing,))
        timer.daemon = True
        timer.start()

    transfers.send_remote = later


def slow_compile(driver: Any, name: str, seconds: float) -> None:
    """The compilation of each program of this name takes so many seconds longer on a host (a `JaxHost`)."""
    load = driver.programs._load

    def slowly(registered: Any, **options: Any) -> Any:
        if registered.bound.program.name == name:
            time.sleep(seconds)
        return load(registered, **options)

    driver.programs._load = slowly


def _slow_writes(tasks: Any, seconds: float) -> None:
    """Each write of a part of a checkpoint takes so many seconds longer."""
    write = tasks._write

    def slowly(*arguments: Any) -> None:
        time.sleep(seconds)
        write(*arguments)

    tasks._write = slowly
