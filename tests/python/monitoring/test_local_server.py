"""The port of metrics and the dashboard: who gets an answer, and what nobody can take.

TRUST-1: another user of the machine, and another site in the same browser, learn nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import pathlib
import socket
import stat
import threading
from collections.abc import Iterator

import pytest
from control_clusters import eventually

from pathways import errors
from pathways.monitoring import local_server
from pathways.monitoring.local_server import Answer, LocalServer, Request, Resource
from pathways.monitoring.secret import new_secret, secret_in

SECRET = "0123456789abcdef"
KNOWS = {"Authorization": f"Bearer {SECRET}"}


def told(request: Request) -> Answer:
    if "wrong" in request.query:
        raise ValueError("wrong")
    if "refused" in request.query:
        raise errors.ConnectError("no cluster")
    return Answer(b"told")


@contextlib.contextmanager
def serving(**more: Resource) -> Iterator[LocalServer]:
    resources = {"/told": Resource(told), "/open": Resource(told, is_open=True)}
    with LocalServer("0", SECRET, resources | {f"/{name}": each for name, each in more.items()}) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with serving() as made:
        yield made


def ask(server: LocalServer, path: str, headers: dict[str, str], method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        assert answer.headers["Cache-Control"] == "no-store" or answer.status == 501
        return answer.status, answer.read()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/told", KNOWS, 200),
        ("/told?x=1", KNOWS, 200),
        ("/told", {}, 401),
        ("/told", {"Authorization": "Bearer"}, 401),
        ("/told", {"Authorization": f"Bearer {SECRET[:-1]}"}, 401),
        ("/told", {"Authorization": f"Basic {SECRET}"}, 401),
        ("/told", {"Authorization": "Bearer é\x7f"}, 401),
        ("/told", {"Cookie": f"secret={SECRET}"}, 401),
        (f"/told?secret={SECRET}", {}, 401),
        ("/told", {**KNOWS, "Host": "evil.example:80"}, 421),
        ("/told", {**KNOWS, "Host": "127.0.0.1.evil.example"}, 421),
        ("/told", {**KNOWS, "Host": "localhost:12345"}, 200),  # a tunnel
        ("/told", {**KNOWS, "Host": "[::1]:80"}, 200),
        ("/told", {**KNOWS, "Origin": "http://evil.example"}, 403),
        ("/told", {**KNOWS, "Origin": "null"}, 403),
        ("/told", {**KNOWS, "Sec-Fetch-Site": "cross-site"}, 403),
        ("/told", {**KNOWS, "Sec-Fetch-Site": "same-site"}, 403),  # another port of this machine
        ("/told", {**KNOWS, "Sec-Fetch-Site": "same-origin"}, 200),
        ("/open", {}, 200),
        ("/open", {"Sec-Fetch-Site": "cross-site"}, 200),  # a link that was clicked
        ("/open", {"Host": "evil.example"}, 421),
        ("/elsewhere", {}, 404),
        ("/../../etc/passwd", KNOWS, 404),
        ("/told?wrong", KNOWS, 400),
        ("/told?refused", KNOWS, 503),
        ("/told?" + "&".join("abcdefghij"), KNOWS, 400),
    ],
)
def test_who_gets_an_answer(server: LocalServer, path: str, headers: dict[str, str], status: int) -> None:
    got, body = ask(server, path, headers)
    assert got == status
    assert (body == b"told") == (status == 200)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT"])
def test_it_changes_nothing(server: LocalServer, method: str) -> None:
    """OPTIONS: so another site never gets leave to send the secret."""
    assert ask(server, "/open", KNOWS, method)[0] == 501


def test_a_head_has_no_body(server: LocalServer) -> None:
    assert ask(server, "/told", KNOWS, "HEAD") == (200, b"")


@pytest.mark.parametrize("where", ["0.0.0.0:0", "[::]:0", "10.0.0.1:80", "example.com:80", ":80", "example.com:0"])
def test_other_machines_cannot_call(where: str) -> None:
    with pytest.raises(errors.OptionError, match="without TLS and without a role"):
        LocalServer(where, SECRET, {})


@pytest.mark.parametrize("where", ["", "x", "-1", "65536", "localhost:", "localhost:x"])
def test_what_is_no_port(where: str) -> None:
    with pytest.raises(errors.OptionError, match="expected PORT"):
        LocalServer(where, SECRET, {})


def test_a_port_in_use(server: LocalServer) -> None:
    with pytest.raises(errors.ConnectError, match=f"cannot listen at 127.0.0.1:{server.server_port}: Address already"):
        LocalServer(f"localhost:{server.server_port}", SECRET, {})


def test_strangers_take_no_place_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that say nothing, or go on and on saying a little, fill all places; then who knows the secret gets in."""
    monkeypatch.setattr(local_server, "MOST_CONNECTIONS", 3)
    monkeypatch.setattr(local_server, "PATIENCE_S", 1.0)
    over = threading.Event()
    with serving() as server, contextlib.ExitStack() as stack:

        def drip(caller: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while not over.wait(0.1):
                    caller.send(b"x")

        threads = []
        for _ in range(3):
            caller = stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port)))
            threads.append(threading.Thread(target=drip, args=(caller,)))
            threads[-1].start()
        eventually(lambda: server._connections == 3, "all places are taken")
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(server, "/told", KNOWS)

        def gets_in() -> bool:
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                return ask(server, "/told", KNOWS)[0] == 200
            return False

        eventually(gets_in, "who knows the secret gets in")
        over.set()
        for thread in threads:
            thread.join()
        eventually(lambda: server._connections == 0, "all have gone")


def test_long_answers_are_bounded_and_end_with_their_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "MOST_STREAMS", 2)
    monkeypatch.setattr(local_server, "STALL_S", 1.0)
    monkeypatch.setattr(local_server._Handler, "timeout", 1.0)
    over = threading.Event()

    def parts() -> Iterator[bytes]:
        while not over.wait(0.01):
            yield b"x" * 65536

    with serving(long=Resource(lambda _: Answer(parts()))) as server, contextlib.ExitStack() as stack:
        for _ in range(2):  # they read nothing
            caller = stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port)))
            caller.sendall(f"GET /long HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {SECRET}\r\n\r\n".encode())
        eventually(lambda: server._streams == 2, "both read")
        assert ask(server, "/long", KNOWS)[0] == 503
        eventually(lambda: server._streams == server._connections == 0, "who reads nothing is let go")
        over.set()


def test_a_secret_in_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "secret"
    made = secret_in(str(path))
    assert made == path.read_text() == secret_in(str(path)) and len(made) >= 32 and made != new_secret()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)  # Prometheus' group may read it
    assert secret_in(str(path)) == made
    for mode in (0o644, 0o660, 0o602):
        path.chmod(mode)
        with pytest.raises(errors.PermissionDeniedError, match="holds a secret"):
            secret_in(str(path))


@pytest.mark.parametrize("text", ["", "short", "two lines of\nsome length", "é" * 40])
def test_a_file_without_a_secret(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(errors.OptionError, match="holds no secret"):
        secret_in(str(path))
    with pytest.raises(errors.OptionError, match="cannot be kept"):
        secret_in(str(tmp_path / "no" / "folder"))
    assert os.listdir(tmp_path) == ["secret"]
