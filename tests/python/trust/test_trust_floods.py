"""More callers than a port has places, descriptors or patience for, beside an innocent one that is served.

CERT-4  all
"""

from __future__ import annotations

import contextlib
import errno
import json
import resource
import socket
import threading
import time
from typing import Any

import pytest
from trust_cases import HELLO, Controller, at_once, lines, read_all, read_exactly, until, waiting

from pathways import errors
from pathways.transport import callers
from pathways.transport.loop import Listener, Loop
from pathways.trust import Role, ask, dial, join, port


def test_silent_callers_keep_nobody_out(
    controller: Controller, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "PLACES", 128)
    most = 0
    silent = [controller.plain() for _ in range(150)]
    half = [controller.plain() for _ in range(50)]
    for sock in half:
        with contextlib.suppress(OSError):  # it was refused
            sock.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a TLS handshake
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, waiting(controller))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        controller.innocent()
    finally:
        done.set()
        watcher.join()
    assert 0 < most <= 64  # half of the places, because all have one address
    until(lambda: controller.port.refused >= 200, "all are refused")
    assert all(read_all(sock) == b"" for sock in silent + half)
    assert "64 others wait, and it said nothing for 1 s" in caplog.text
    assert len(lines(caplog)) < 200  # and a line counts those without one
    for sock in silent + half:
        sock.close()
    until(lambda: not waiting(controller), "all places are free")


def test_callers_of_one_address_leave_room_for_others(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "PLACES", 16)
    monkeypatch.setattr(callers, "_SAFE_S", 1e9)  # nobody loses a place, however long it is silent
    there = controller.port.address.host, controller.port.address.port
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(there, source_address=("127.0.0.2", 0)))
        until(lambda: controller.port.refused == 32, "eight of them have places")
        controller.innocent()
    assert [callers._shown((host, 1))[1] for host in ("::ffff:1.2.3.4", "2001:db8::1", "2001:db8::ffff:2")] == [
        "1.2.3.4",
        "2001:db8::/64",
        "2001:db8::/64",
    ]


def test_callers_that_were_heard_and_stay_keep_nobody_out(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have their answer, and the port waits a moment for them to leave."""
    monkeypatch.setattr(callers, "PLACES", 8)
    monkeypatch.setattr(port, "_LINGER_S", 1e9)
    with contextlib.ExitStack() as stack:
        for purpose in ("authority", "nonsense") * 8:
            sock = stack.enter_context(controller.secure())
            sock.sendall(json.dumps({**HELLO, "purpose": purpose}).encode() + b"\n")
            assert sock.recv(1) == b"{"
        controller.innocent()


def test_the_last_descriptors_are_for_those_who_are_in(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = controller.credentials(Role.HOST)
    with dial(controller.address, own, "link") as inside:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (8, 8))
        with controller.plain() as sock:
            assert read_all(sock) == b""
        assert "few of the 8 descriptors of this process are left" in lines(caplog)[0]
        inside.sendall(b"x")
        assert read_exactly(inside, 1) == b"x"
    monkeypatch.undo()
    controller.innocent()


def test_one_peer_has_a_bounded_number_of_connections(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "_MOST_OF_ONE", 3)
    greedy, modest = controller.credentials(Role.CLIENT, "greedy"), controller.credentials(Role.CLIENT, "modest")
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            last = stack.enter_context(dial(controller.address, greedy, "run"))
        with pytest.raises(errors.ResourceExhaustedError, match="client greedy has 3 connections, which is the most"):
            dial(controller.address, greedy, "run")
        ask(controller.address, modest, "run")
        last.close()
        until(lambda: len(controller.port.peers()) == 2, "the port knows that it has left")
        ask(controller.address, greedy, "run")


def test_who_has_one_token_has_a_bounded_number_of_connections(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under whatever names."""
    monkeypatch.setattr(port, "_PART_OF_TOKEN", resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 6)
    token = controller.tokens.make(Role.CLIENT, 600)
    with contextlib.ExitStack() as stack:
        for number in range(6):
            one = join(controller.address, token, f"many{number}")
            stack.enter_context(dial(controller.address, one, "run"))
        with pytest.raises(errors.ResourceExhaustedError, match="by token 1 has 6 connections, which is the most"):
            dial(controller.address, join(controller.address, token, "more"), "run")
        modest = join(controller.address, controller.tokens.make(Role.CLIENT, 600), "modest")
        ask(controller.address, modest, "run")


def test_many_innocent_callers_at_once_are_all_served(controller: Controller) -> None:
    own = [controller.credentials(Role.HOST, f"m{number}") for number in range(4)]  # one alone has a bound
    assert at_once(100, lambda n: ask(controller.address, own[n % 4], "link", timeout_s=120)["ok"]) == [True] * 100
    assert controller.port.refused == 0


def test_a_loop_that_is_busy_takes_new_callers_all_the_same() -> None:
    """A turn of the loop takes long when many handshakes go on; so it takes more than one caller."""
    gate, taken, turns = threading.Event(), [], []

    class Counted(Listener):
        def turn(self, events: int) -> None:
            turns.append(events)
            super().turn(events)

    def take(sock: socket.socket, name: object) -> None:
        gate.wait(30)
        taken.append(sock)

    loop, listening = Loop(), socket.create_server(("127.0.0.1", 0))
    listener = Counted(loop, listening, take)
    calling = [socket.create_connection(listening.getsockname()) for _ in range(20)]
    gate.set()
    until(lambda: len(taken) == 20, "all are taken")
    assert len(turns) <= 2
    for sock in calling + taken:
        sock.close()
    listener.close()
    loop.close()


class Exhausted(socket.socket):
    """A socket that listens in a process that has no descriptors for a second."""

    def __init__(self) -> None:
        super().__init__(socket.AF_INET)
        self.until = time.monotonic() + 1.0
        self.refusals = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if time.monotonic() < self.until:
            self.refusals += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_listener_waits_until_there_are_descriptors() -> None:
    """It neither ends nor spins while there are none."""
    loop, listening = Loop(), Exhausted()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    callers: list[socket.socket] = []
    listener = Listener(loop, listening, lambda caller, name: callers.append(caller))
    with socket.create_connection(listening.getsockname()):
        until(lambda: bool(callers), "it is taken")
    assert 1 <= listening.refusals <= 5
    callers[0].close()
    listener.close()
    loop.close()
