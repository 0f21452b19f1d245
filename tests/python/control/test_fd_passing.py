"""The descriptor socket: messages with descriptors beside them (pathways/process/fd_passing.py)."""

from __future__ import annotations

import os
import pathlib
import socket

import pytest

from pathways.process import fd_passing


def test_descriptors_are_passed_and_closed_on_exec(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "s")
    server = fd_passing.listen(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    client = fd_passing.connect(path)
    accepted, _ = server.accept()
    assert fd_passing.peer(accepted) == (os.getpid(), os.getuid())
    file = os.memfd_create("x")
    os.write(file, b"hello")
    fd_passing.send(accepted, {"kind": "a"}, [file, file])
    fd_passing.send(accepted, {"kind": "b"})
    message, fds = fd_passing.receive(client, 1.0)
    assert message == {"kind": "a"} and len(fds) == 2
    assert os.pread(fds[0], 9, 0) == b"hello" and not os.get_inheritable(fds[0])
    assert fd_passing.receive(client, 1.0) == ({"kind": "b"}, [])
    with pytest.raises(TimeoutError):
        fd_passing.receive(client, 0.01)
    accepted.close()
    with pytest.raises(fd_passing.Closed):
        fd_passing.receive(client, 1.0)
    for fd in (file, *fds):
        os.close(fd)
    client.close()
    server.close()
    with pytest.raises(OSError, match="refused"):
        fd_passing.connect(path)


def test_a_last_message_is_read_after_its_sender_died() -> None:
    ours, theirs = fd_passing.pair()
    fd_passing.send(theirs, {"kind": "failed", "message": "x" * 200_000})
    theirs.close()
    message, _ = fd_passing.receive(ours, 1.0)
    assert message["kind"] == "failed" and message["message"].endswith("x ...")
    with pytest.raises(fd_passing.Closed):
        fd_passing.receive(ours, 1.0)
    with pytest.raises(fd_passing.Closed):
        fd_passing.send(ours, {"kind": "late"})
    ours.close()


def test_a_message_that_makes_no_sense_leaves_no_descriptors() -> None:
    ours, theirs = fd_passing.pair()
    before = sorted(os.listdir("/proc/self/fd"))
    for packet in (b"{", b"\xff"):
        socket.send_fds(theirs, [packet], [0, 1])
        with pytest.raises(ValueError):
            fd_passing.receive(ours, 1.0)
    socket.send_fds(theirs, [b"x" * fd_passing.MAX_MESSAGE_BYTES * 2], [0])
    with pytest.raises(ValueError, match="cut short"):
        fd_passing.receive(ours, 1.0)
    socket.send_fds(theirs, [b""], [0])
    with pytest.raises(fd_passing.Closed):
        fd_passing.receive(ours, 1.0)
    assert sorted(os.listdir("/proc/self/fd")) == before
    ours.close()
    theirs.close()
