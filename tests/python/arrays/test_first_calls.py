"""First calls: their stages in `cluster.stats()`, and the line that a long one shows on a terminal."""

from __future__ import annotations

import importlib.machinery
import os
import pty
import select
import subprocess
import sys
import threading
import time
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pathways as pw
from pathways.api.programs import first_calls


def test_stages_of_the_newest_first_calls_are_in_the_statistics(embedded_cluster: Any) -> None:
    slice_ = pw.make_virtual_device_set(embedded_cluster).add_slice(devices=2)
    double = pw.jit(lambda x: x * 2, devices=slice_, name="double")

    @pw.program
    def twice(x: Any) -> Any:
        return double(double(x))

    @pw.program
    def slowly(x: Any) -> Any:
        time.sleep(0.2)
        return double(x)

    for _ in range(2):  # a second call is no first call
        for call in (double, twice, slowly):
            np.asarray(call(np.ones(3, np.float32)))
    with pytest.raises(TypeError):
        double(np.ones(3, np.float32), np.ones(3, np.float32))
    calls = embedded_cluster.stats()["first_calls"][-3:]  # those of other tests come before
    assert [call["program"] for call in calls] == ["double", "twice", "slowly"]
    for call in calls:
        assert list(call) == ["program", "trace", "partition", "compile"]
        assert all(call[stage] >= 0 for stage in ("trace", "partition", "compile"))
    assert calls[2]["trace"] >= 0.2
    assert sum(host["compile_seconds"] for host in embedded_cluster.stats()["hosts"]) > 0


PROGRAM = """
import sys, time
import numpy as np
import pathways as pw
from pathways.api.programs import first_calls

first_calls.PATIENCE_S = 0.1
with pw.connect():
    slice_ = pw.make_virtual_device_set().add_slice(devices=1)

    @pw.program
    def slow(x):
        time.sleep(1)
        return pw.jit(lambda x: x + 1, devices=slice_)(x)

    print("result", slow(np.float32(1)))
    print("again", slow(np.float32(1)))
"""


def on_a_terminal(**environment: str) -> str:
    """What the program prints where stdout and stderr are a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **environment},
    ) as process:
        os.close(theirs)
        said, deadline = b"", time.monotonic() + 120
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 1)[0]:
                continue
            try:
                said += os.read(ours, 4096)
            except OSError:  # its end
                break
        process.kill()
    os.close(ours)
    return said.decode()


def test_a_long_first_call_says_on_a_terminal_what_it_is_doing() -> None:
    said = on_a_terminal()
    assert "first call of slow: trace 0." in said
    assert said.count("\x1b[2K") >= 2  # the line is written again, and erased in the end
    assert "result 2.0" in said and "first call" not in said[said.index("again") :]


def test_no_line_where_it_is_turned_off_or_stderr_is_a_file() -> None:
    assert "first call" not in on_a_terminal(PATHWAYS_PROGRESS="0")
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert (ran.stdout, ran.stderr) == ("result 2.0\nagain 2.0\n", "")


def while_calling(work: Any, ask: Any) -> list[Any]:
    """What `ask` said while `work` ran in another thread; each answer once."""
    thread, said = threading.Thread(target=work), []
    thread.start()
    while thread.is_alive():
        said += [each for each in ask() if each not in said]
        time.sleep(0.005)
    thread.join()
    return said


@pytest.mark.one_island
def test_hosts_say_how_far_they_are_with_a_program(cluster: Any) -> None:
    devices = pw.make_virtual_device_set(cluster).add_slice(devices=1)
    seen: list[Any] = []
    for attempt in range(20):  # a small program may be compiled between two questions
        steps = [pw.jit(lambda x, k=k, a=attempt: jnp.sort(x * k + a), devices=devices, name=f"{k}") for k in range(8)]

        @pw.program
        def chain(x: Any, steps: Any = tuple(steps)) -> Any:
            for step in steps:
                x = step(x)
            return x

        seen += while_calling(lambda call=chain: np.asarray(call(np.ones(3, np.float32))), cluster.control().compiling)
        if len(seen) > 2:
            break
    (host,) = {device.host for device in devices.devices}
    assert {(at, count) for at, _, count in seen} == {(host, 8)}
    assert {done for _, done, _ in seen} <= set(range(8))
    assert cluster.control().compiling() == []


def test_the_line_has_the_hosts_and_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    from pathways.api.programs.first_calls import FirstCalls

    def ask() -> list[tuple[int, int, int]]:
        asked.append(threading.current_thread())
        return [(host, host, 9) for host in range(7)]

    asked: list[threading.Thread] = []
    call = FirstCalls(ask).begin("big")
    call.stage("compile")
    call._show()
    deadline = time.monotonic() + 10
    while "host 0: 0 of 9, host 1: 1 of 9, host 2: 2 of 9, 4 more)" not in str(call._text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    call._timer = type("Ended", (), {"cancel": lambda self: None})()  # type: ignore[assignment]
    call.__exit__(None, None, None)
    asked[0].join(10)
    assert not asked[0].is_alive()


def test_two_threads_show_one_line(embedded_cluster: Any) -> None:
    """rich shows one line per console; a second one would write over it."""
    from pathways.api.programs.first_calls import FirstCalls, _line_in_use

    calls = FirstCalls()
    one, two = calls.begin("one"), calls.begin("two")
    for each in (one, two):
        each.stage("trace")
        each._show()
    assert one._line is not None and two._line is None
    for each in (two, one):
        each._timer = type("Ended", (), {"cancel": lambda self: None})()
        each.__exit__(None, None, None)
    assert not _line_in_use.locked()
    assert [call["program"] for call in calls.now()] == ["two", "one"]


@pytest.mark.parametrize("has_widgets", [True, False])
def test_a_notebook_shows_a_line_if_it_has_widgets(has_widgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them rich would warn at each refresh, where a user reads the results of a cell."""
    widgets = types.ModuleType("ipywidgets")
    widgets.__spec__ = importlib.machinery.ModuleSpec("ipywidgets", None)
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "ipywidgets", widgets if has_widgets else None)
    monkeypatch.delenv("PATHWAYS_PROGRESS", raising=False)
    assert first_calls._is_shown() is has_widgets
