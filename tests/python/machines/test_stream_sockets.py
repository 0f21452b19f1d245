"""The connections of streams between hosts: who is let in (CERT-1), what is no stream, frames in any cuts."""

from __future__ import annotations

import contextlib
import os
import pathlib
import queue
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from stream_cases import BlockingFrames, framed, hello
from trust_cases import at_once

from pathways import errors
from pathways.host import stream_sockets
from pathways.host.stream_sockets import FrameBuffer, Sender, StreamAddress, StreamListener, connect
from pathways.transport.connection import Connection
from pathways.transport.loop import Loop
from pathways.trust import Authority, Credentials, Identity, Role, server_name


class Listener:
    """A listener at a TCP port that echoes each message as the answer, and keeps what went wrong."""

    def __init__(self, credentials: str, secret: str = "") -> None:
        self.senders: list[str] = []
        with socket.create_server(("127.0.0.1", 0), reuse_port=True) as reserved:
            self.address = f"127.0.0.1:{reserved.getsockname()[1]}"
            self.there = StreamAddress("me" if credentials else "", self.address, secret)
            self._listener = StreamListener(self.address, credentials, self._knows, self._serve)
        self.ends: queue.Queue[BaseException | None] = queue.Queue()

    def _knows(self, sender: Sender) -> bool:
        return sender.is_at(self.there)

    def _serve(self, *stream: Any) -> None:
        threading.Thread(target=self._echo, args=stream, daemon=True).start()

    def _echo(self, sender: Sender, answers: socket.socket, messages: socket.socket) -> None:
        self.senders.append(str(sender))
        with answers, messages:
            answers.setblocking(True)
            messages.setblocking(True)
            try:
                BlockingFrames(messages).each(answers.sendall)
                self.ends.put(None)
            except OSError as error:
                self.ends.put(error)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, pathlib.Path]:
    folder = tmp_path_factory.mktemp("trust")
    return Authority.create(str(folder / "authority")), folder


@pytest.fixture
def files(authority: tuple[Authority, pathlib.Path]) -> dict[str, str]:
    """A file of credentials for each role, and one of another cluster."""
    made, folder = authority
    found = {}
    for role in Role:
        found[str(role)] = str(folder / f"{role}.pem")
        made.credentials(role, "me").save(found[str(role)])
    other = folder / "other"
    found["other"] = str(folder / "other.pem")
    Authority.open_or_create(str(other)).credentials(Role.HOST, "me").save(found["other"])
    return found


@pytest.fixture(params=["tls", "plain"])
def ends(request: pytest.FixtureRequest, files: dict[str, str]) -> Iterator[tuple[Listener, str]]:
    credentials = files["host"] if request.param == "tls" else ""
    listener = Listener(credentials)
    yield listener, credentials
    listener.close()


def test_messages_and_answers(ends: tuple[Listener, str]) -> None:
    listener, credentials = ends
    texts = [os.urandom(size) for size in (1, 0, 15, 70_000, 3 << 20, 2, 1 << 20)]
    answers, messages = connect(listener.there, "", Credentials.load(credentials) if credentials else None)
    with answers, messages:
        buffer = FrameBuffer()

        sent = threading.Event()
        loop = Loop()
        connection = Connection(loop, messages, print, on_room=sent.set)
        connection.start()

        def send() -> None:
            for text in texts:
                buffer.room(len(text))[:] = text
                sent.clear()
                buffer.send(connection, len(text))
                if connection.kept_bytes:
                    sent.wait(30)

        sender = threading.Thread(target=send)
        sender.start()
        for text in filter(None, texts):
            found = memoryview(bytearray(len(text)))
            assert stream_sockets.read_all(answers, found)
            assert found == text
        sender.join()
        connection.end()
        loop.close()
    assert listener.ends.get(timeout=30) is None
    assert listener.senders == ["machine me" if credentials else "a host"]


@pytest.mark.parametrize("role", ["client", "operator", "controller", "other", ""])
def test_only_hosts_of_the_cluster_come_in(files: dict[str, str], role: str, caplog: pytest.LogCaptureFixture) -> None:
    """CERT-1: of the certificates that the authority made, only those of hosts will do; and none without one."""
    listener = Listener(files["host"])
    with contextlib.closing(listener):
        own = Credentials.load(files[role]) if role else None
        with pytest.raises(errors.PermissionDeniedError if role in set(Role) else OSError) as told:
            connect(listener.there, "", own)
        if role in set(Role):
            assert str(told.value) == f"only hosts send transfers, and {role} me is none"
        for stream in connect(listener.there, "", Credentials.load(files["host"])):
            stream.close()
        assert listener.ends.get(timeout=30) is None
    assert re.search("a stream from 127.0.0.1:[0-9]+ is refused: ", caplog.text)


def test_a_secret_says_that_the_controller_has_introduced_a_machine(files: dict[str, str]) -> None:
    """CERT-1: with a certificate and without."""
    for credentials in ("", files["host"]):
        own = Credentials.load(credentials) if credentials else None
        listener = Listener(credentials, "5" * 32)
        with contextlib.closing(listener):
            for wrong in ("", "6" * 32, "5" * 31, "5" * 31 + "\xff"):
                with pytest.raises(errors.PermissionDeniedError, match="only hosts that the controller has introduced"):
                    connect(listener.there, wrong, own)
            for stream in connect(listener.there, "5" * 32, own):
                stream.close()
            assert listener.ends.get(timeout=30) is None


def test_who_is_at_an_address(files: dict[str, str]) -> None:
    """CERT-1: a host that is lost is nowhere, though its address has no secret."""
    there = StreamAddress.parse("m1@[::1]:7000#s3cret")
    assert there == ("m1", "[::1]:7000", "s3cret")
    assert StreamAddress.parse("unix:/a/b.sock") == ("", "unix:/a/b.sock", "")
    named = [Identity(Role.HOST, name, expires=1.0) for name in ("m1", "m2")]
    assert [Sender(each, "s3cret").is_at(there) for each in [None, *named]] == [True, True, False]
    assert not any(Sender(each, secret).is_at(there) for each in [None, *named] for secret in ("", "s3cre", "\xff"))
    assert not Sender(None, "").is_at(StreamAddress.parse(""))


def test_a_host_calls_only_hosts(files: dict[str, str]) -> None:
    for role in ("client", "other"):
        with contextlib.closing(Listener(files[role])) as listener, pytest.raises(OSError):
            connect(listener.there, "", Credentials.load(files["host"]))


def test_a_host_sends_only_to_the_machine_that_it_was_introduced_to(files: dict[str, str]) -> None:
    """CERT-1: another machine that has joined may listen at the address, but it hears nothing, not even the secret."""
    with contextlib.closing(Listener(files["host"], "5" * 32)) as listener:
        there = listener.there._replace(machine="m1")
        with pytest.raises(errors.PermissionDeniedError, match=f"m1 is expected at {there.address}, and host me answ"):
            connect(there, "5" * 32, Credentials.load(files["host"]))
        assert listener.senders == []


def test_frames_however_they_are_cut() -> None:
    texts = [bytes(at % 251 for at in range(size)) for size in (0, 1, 16, 1000, 5)]
    whole = b"".join(map(framed, texts))
    for cut in range(1, len(whole)):
        one, other = socket.socketpair()
        with one, other:
            blocking = BlockingFrames(one)
            frames, read = blocking.frames, blocking.read
            other.sendall(whole[:cut])
            other.settimeout(30)
            found = []
            rest = threading.Timer(0, lambda other=other, cut=cut: (other.sendall(whole[cut:]), other.close()))
            rest.start()
            while (length := read(frames.begin())) is not None:
                if len(found) % 2 == 0:
                    found.append(bytes(read(frames.whole()) or b""))
                    continue
                head = bytes(read(frames.peek(5)) or b"")
                assert len(head) == min(5, length)
                rest_of_it = bytearray(length - len(head) // 2)
                read(frames.rest_into(len(head) // 2, memoryview(rest_of_it)))
                found.append(head[: len(head) // 2] + bytes(rest_of_it))
            rest.join()
        assert found == texts


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (framed(b"12345678")[:-1], "cut off"),
        (framed(b"")[:7], "cut off"),
        (struct.pack("<QQ", 1 << 40, 0), "longer than"),
    ],
)
def test_what_is_no_frame_ends_the_stream(sent: bytes, why: str) -> None:
    one, other = socket.socketpair()
    with one, other:
        other.sendall(sent)
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match=why):
            BlockingFrames(one).each(print)


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", hello(bytes(16), 7), hello(bytes(16), 1), b"pw"],
)
def test_what_is_no_host_ends_alone(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Neither another protocol, nor messages of a stream that nobody opened, nor half a line disturbs the others."""
    listener = Listener("")
    with contextlib.closing(listener):
        host, port = listener.address.split(":")
        with socket.create_connection((host, int(port))) as caller:
            caller.sendall(said)
            with contextlib.suppress(OSError):  # it may have hung up already
                caller.shutdown(socket.SHUT_WR)
                assert caller.recv(1) == b""
        for stream in connect(listener.there, "", None):
            stream.close()
        assert listener.ends.get(timeout=30) is None
    assert re.search("a stream from 127.0.0.1:[0-9]+ is refused: ", caplog.text)


def test_silent_callers_do_not_keep_hosts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_sockets, "_HELLO_S", 0.2)
    listener = Listener("")
    host, port = listener.address.split(":")
    with contextlib.closing(listener), contextlib.ExitStack() as stack:
        for _ in range(2 * stream_sockets._MOST_ARRIVING):
            stack.enter_context(socket.create_connection((host, int(port))))
        for attempt in range(100):
            try:
                opened = connect(listener.there, "", None)
                break
            except OSError:
                assert attempt < 99
                time.sleep(0.05)
        for stream in opened:
            stream.close()
        assert listener.ends.get(timeout=30) is None


def shown(listener: Listener, own: Credentials) -> bytes:
    """The certificate that a caller sees."""
    host, port = listener.address.split(":")
    with (
        socket.create_connection((host, int(port)), 30) as sock,
        own.client_context().wrap_socket(sock, server_hostname=server_name(Role.HOST)) as secure,
    ):
        return secure.getpeercert(binary_form=True) or b""


def test_a_renewed_certificate_is_shown(authority: tuple[Authority, pathlib.Path], files: dict[str, str]) -> None:
    own = Credentials.load(files["host"])
    with contextlib.closing(Listener(files["host"])) as listener:
        first = shown(listener, own)
        assert first == shown(listener, own)
        authority[0].credentials(Role.HOST, "me").save(files["host"])
        second = shown(listener, own)
        assert first != second == shown(listener, own)


def test_many_handshakes_at_once(files: dict[str, str]) -> None:
    own = Credentials.load(files["host"])
    with contextlib.closing(Listener(files["host"])) as listener:
        assert at_once(8, lambda _: sum(shown(listener, own) != b"" for _ in range(50))) == [50] * 8
