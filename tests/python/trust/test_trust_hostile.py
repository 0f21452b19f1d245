"""Callers that mean harm or know no better, beside an innocent one that is served all the same; and ports that are not
what a caller expects. Each refusal is an error at who did it, and a line in the port's log.

CERT-2  test_what_a_caller_writes_does_not_get_into_the_log, and the fixture `controller` in every test
CERT-4  test_a_slow_writer_is_refused, test_a_first_line_is_bounded; floods: test_trust_floods.py
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable

import pytest
from trust_cases import HELLO, Controller, lines, read_all, read_exactly, until, waiting

from pathways import errors
from pathways.process.config import PROTOCOL_VERSION
from pathways.trust import Port, Role, ask, dial, first_line, join
from pathways.trust.refusals import RefusalLog


@pytest.fixture
def hasty(tmp_path: pathlib.Path) -> Controller:
    """A port whose patience is short."""
    return Controller(tmp_path / "hasty", first_line_s=0.3)


# Slow writers.


def drip(sock: socket.socket, text: bytes) -> bytes:
    """Sends a byte now and then until the other end has had enough; what it answered."""
    try:
        for byte in text:
            sock.sendall(bytes([byte]))
            time.sleep(0.01)
    except OSError:
        pass
    return read_all(sock)


@pytest.mark.parametrize("stage", ["nothing", "handshake", "silence", "line"])
def test_a_slow_writer_is_refused(hasty: Controller, stage: str, caplog: pytest.LogCaptureFixture) -> None:
    with hasty.port:
        if stage == "nothing":
            sock: socket.socket = hasty.plain()
            answer = read_all(sock)
        elif stage == "handshake":
            sock = hasty.plain()
            answer = drip(sock, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500)
        else:
            sock = hasty.secure(hasty.credentials(Role.HOST))
            answer = drip(sock, b'{"purpose": "' + b"x" * 5000) if stage == "line" else read_all(sock)
        with sock:
            assert b"ok" not in answer
            until(lambda: len(lines(caplog)) == 1, "the line of the port")
        assert "did not finish the handshake and its first line in time" in lines(caplog)[0]
        assert hasty.seen == []
        hasty.innocent()


# Garbage.


def broken_lines() -> dict[str, tuple[bytes, str]]:
    good = json.dumps(HELLO).encode()
    return {
        "garbage": (b"\x00\xff garbage \x80\n", "is JSON in UTF-8"),
        "empty": (b"\n", "is JSON in UTF-8"),
        "list": (b"[1, 2]\n", "is a JSON object"),
        "deep": (b"[" * 60000 + b"\n", "is JSON in UTF-8"),
        "deep object": (b'{"a":' * 10000 + b"\n", "is JSON in UTF-8"),
        "number": (b'{"purpose": "link", "protocol": ' + b"9" * 5000 + b"}\n", "is JSON in UTF-8"),
        "no purpose": (b'{"protocol": 7}\n', 'has "purpose", a text'),
        "purpose": (b'{"purpose": {}, "protocol": 7}\n', 'has "purpose", a text'),
        "protocol": (b'{"purpose": "link", "protocol": true}\n', '"protocol", an integer'),
        "float": (b'{"purpose": "link", "protocol": NaN}\n', '"protocol", an integer'),
        "more": (good + b"\nmore", "waits for the answer"),
        "two": (good + b"\n" + good + b"\n", "waits for the answer"),
        "surrogate": (b'{"purpose": "\\ud800", "protocol": %d}\n' % PROTOCOL_VERSION, "serves no purpose"),
        "unknown": (b'{"purpose": "rule the world", "protocol": %d}\n' % PROTOCOL_VERSION, "serves no purpose"),
    }


@pytest.mark.parametrize("kind", list(broken_lines()))
def test_a_broken_first_line_is_refused(controller: Controller, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    text, expected = broken_lines()[kind]
    with controller.secure(controller.credentials(Role.HOST)) as sock:
        sock.sendall(text)
        answer = json.loads(read_all(sock))
    assert set(answer) == {"error", "message"} and expected in answer["message"]
    (line,) = lines(caplog)
    assert expected in line and "127.0.0.1:" in line
    controller.innocent()


@pytest.mark.parametrize("count", [first_line.LONGEST_LINE, first_line.LONGEST_LINE + 1, 4 << 20])
def test_a_first_line_is_bounded(controller: Controller, count: int, caplog: pytest.LogCaptureFixture) -> None:
    with controller.secure(controller.credentials(Role.HOST)) as sock:
        try:
            sock.sendall(b"x" * count)
        except OSError:
            assert count > 1 << 20  # the port has closed meanwhile
        answer = read_all(sock)
    if count <= first_line.LONGEST_LINE + 1:
        assert f"at most {first_line.LONGEST_LINE} bytes" in json.loads(answer)["message"]
    until(lambda: f"at most {first_line.LONGEST_LINE} bytes" in "".join(lines(caplog)), "the line of the port")
    controller.innocent()


def test_a_caller_s_own_line_is_bounded(controller: Controller) -> None:
    own = controller.credentials(Role.HOST)
    with pytest.raises(errors.OptionError, match="has at most 65536 bytes, and this one would have"):
        dial(controller.address, own, "link", text="x" * 65536)
    with pytest.raises(errors.OptionError, match="values of JSON only"):
        dial(controller.address, own, "link", text=object())
    ask(controller.address, own, "link", text="x" * 65000)


@pytest.mark.parametrize("stage", ["nothing", "handshake", "line"])
def test_a_caller_that_leaves_is_nobody_s_trouble(
    controller: Controller, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    if stage == "line":
        sock: socket.socket = controller.secure(controller.credentials(Role.HOST))
        sock.sendall(b'{"purpose": ')
    else:
        sock = controller.plain()
        sock.sendall(b"\x16\x03\x01\x02\x00\x01" if stage == "handshake" else b"")
    sock.close()
    expected = {"nothing": "connected and left", "handshake": "broke off during the handshake", "line": "closed the"}
    until(lambda: expected[stage] in caplog.text, "the line of the port")
    assert len(lines(caplog)) == (0 if stage == "nothing" else 1)  # probes of load balancers only connect
    controller.innocent()


def test_a_web_browser_is_told_what_this_is(controller: Controller, caplog: pytest.LogCaptureFixture) -> None:
    with controller.plain() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"a port of a Pathways cluster" in answer
    assert "it speaks HTTP" in lines(caplog)[0]


def test_tls_1_2_is_refused(controller: Controller, caplog: pytest.LogCaptureFixture) -> None:
    context = controller.credentials(Role.HOST).client_context()
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with controller.plain() as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock)
    until(lambda: "does not speak TLS 1.3" in caplog.text, "the line of the port")


def test_mutated_bytes_harm_nobody(controller: Controller, caplog: pytest.LogCaptureFixture) -> None:
    """Beginnings of all kinds, changed at random; PATHWAYS_SEED repeats a run."""
    seed = int(os.environ.get("PATHWAYS_SEED", random.SystemRandom().getrandbits(32)))
    print(f"PATHWAYS_SEED={seed}")
    generator = random.Random(seed)
    context = controller.credentials(Role.HOST).client_context()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="controller.pathways").do_handshake()
    raw = [outgoing.read(), b"GET / HTTP/1.1\r\n\r\n", json.dumps(HELLO).encode() + b"\n"]
    inner = [
        json.dumps(HELLO).encode() + b"\n",
        first_line.hello(
            "join", {"token": "pathways1.host.1." + "x" * 43 + "." + "0" * 64, "name": "a", "request": "x"}
        ),
        first_line.hello("renew", {"request": "x"}),
        first_line.hello("authority", {}),
    ]

    def changed(text: bytes) -> bytes:
        made = bytearray(text)
        for _ in range(generator.randrange(1, 6)):
            at = generator.randrange(len(made))
            match generator.randrange(4):
                case 0:
                    made[at] = generator.randrange(256)
                case 1:
                    del made[at : at + generator.randrange(1, 20)]
                    made = made or bytearray(b"x")
                case 2:
                    made[at:at] = generator.randbytes(generator.randrange(1, 20))
                case 3:
                    made[at:at] = made[at : at + generator.randrange(1, 100)]
        return bytes(made)

    count = 0
    for _ in range(200):
        is_inner = generator.random() < 0.7
        text = changed(generator.choice(inner if is_inner else raw))
        own = controller.credentials(Role.HOST) if generator.random() < 0.5 else None
        with controller.secure(own) if is_inner else controller.plain() as sock:
            try:
                sock.sendall(text)
                socket.socket.shutdown(sock, socket.SHUT_WR)
            except OSError:
                pass
            read_all(sock)
        count += 1
    assert count == 200 and "Traceback" not in caplog.text
    until(lambda: not waiting(controller), "all places are free")
    controller.innocent()


def test_what_a_caller_writes_does_not_get_into_the_log(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    own, token = controller.credentials(Role.HOST), controller.tokens.make("host", 60)
    for purpose in (token, "a\nWARNING forged line", "\x1b[2J", "x" * 5000, "‮"):
        with pytest.raises(errors.OptionError, match="serves no purpose") as caught:
            dial(controller.address, own, purpose)
        assert token not in str(caught.value)
    for name in (token, "a\nb", token[:60]):
        with pytest.raises(errors.OptionError):
            ask(controller.address, own, "join", token=token, name=name, request="x")
    with pytest.raises(errors.PermissionDeniedError):
        ask(controller.address, own, "join", token=token.upper(), name="a", request=_request())
    assert token not in caplog.text and token.split(".")[3] not in caplog.text
    for line in lines(caplog):
        assert line.isprintable() and line.isascii() and len(line) < 400


def _request() -> str:
    from pathways.trust.credentials import new_key, new_request

    return new_request(new_key())


def test_a_flood_of_refusals_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    now = [0.0]
    log = RefusalLog(logging.getLogger("pathways.trust.test"), lambda: now[0])
    for n in range(1000):
        log.add("refused %d", n)
    assert log.count == 1000 and lines(caplog) == [f"refused {n}" for n in range(20)]
    caplog.clear()
    now[0] = 1.5
    log.add("refused again")
    assert lines(caplog) == ["980 more connections were refused, without a line each", "refused again"]


# What is not a port of this cluster, seen by a caller.


def test_addresses_where_nobody_answers(controller: Controller) -> None:
    own = controller.credentials(Role.HOST)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with pytest.raises(errors.ConnectError, match=r"nothing listens at 127.0.0.1:\d+: is the cluster up"):
        dial(f"127.0.0.1:{free}", own, "link")
    with pytest.raises(errors.ConnectError, match=r"'nowhere.invalid' has no address: look at its spelling"):
        dial("pathways://nowhere.invalid:7400", own, "link")
    with pytest.raises(errors.OptionError, match="expected pathways://"):
        dial("nowhere", own, "link")


def serve(answer: Callable[[socket.socket], None]) -> tuple[str, threading.Thread]:
    """A server of another kind, for one connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener, listener.accept()[0] as sock:
            sock.settimeout(30)
            answer(sock)

    thread = threading.Thread(target=run)
    thread.start()
    return f"127.0.0.1:{listener.getsockname()[1]}", thread


@pytest.mark.parametrize(
    ("greeting", "expected"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak TLS"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak TLS"),
        (b"\x00" * 100, "does not speak TLS"),
        (None, "took the connection and then said nothing"),
    ],
)
def test_another_kind_of_server_is_told(controller: Controller, greeting: bytes | None, expected: str) -> None:
    done = threading.Event()

    def answer(sock: socket.socket) -> None:
        if greeting is not None:
            sock.recv(100)
            sock.sendall(greeting)
            with contextlib.suppress(OSError):  # the caller has gone already
                sock.shutdown(socket.SHUT_WR)
                read_all(sock)
        done.wait(30)

    where, thread = serve(answer)
    try:
        with pytest.raises(errors.ConnectError, match=expected):
            dial(where, controller.credentials(Role.HOST), "link", timeout_s=30 if greeting else 0.3)
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no port of Pathways"),
        (b"{}\n", "no port of Pathways"),
        (b"{" * 100 + b"\n", "no port of Pathways"),
        (b'{"ok": 1}\n', "no port of Pathways"),
        (b'{"error": "ConnectError", "message": 7}\n', "no port of Pathways"),
        (b'{"error": "KeyboardInterrupt", "message": "x\\u001b[2J"}\n', r"^KeyboardInterrupt: x \[2J$"),
        (b"{" + b"x" * 70000, "has no end within 65536 bytes"),
        (b'{"ok": true', "closed the connection before it answered"),
        (b"", "closed the connection before it answered"),
    ],
)
def test_answers_that_make_no_sense(reply: bytes, expected: str) -> None:
    def answer(sock: socket.socket) -> None:
        sock.recv(65536)
        sock.sendall(reply)
        with contextlib.suppress(OSError):  # the caller may have closed already
            sock.shutdown(socket.SHUT_WR)
            read_all(sock)

    where, thread = serve(answer)
    try:
        with pytest.raises(errors.ConnectError, match=expected):
            dial(where, None, "link", token="x", name="a")
    finally:
        thread.join()


def test_ports_that_cannot_be(controller: Controller) -> None:
    taken = controller.port.address.port
    with pytest.raises(errors.ConnectError, match=f"cannot listen at 127.0.0.1:{taken}: another process has this port"):
        Port(f"127.0.0.1:{taken}", controller.own)
    with pytest.raises(errors.ConnectError, match="no such address"):
        Port("192.0.2.1:0", controller.own)
    with pytest.raises(errors.ConnectError, match="the name has no address here"):
        Port("nowhere.invalid:0", controller.own)
    with pytest.raises(errors.OptionError, match="needs tokens"):
        Port("127.0.0.1:0", None)


def test_ipv6(tmp_path: pathlib.Path) -> None:
    made = Controller(tmp_path / "a", "[::1]:0")
    with made.port:
        assert made.address.startswith("pathways://[::1]:")
        own = join(made.address, made.tokens.make("host", 60), "m")
        with dial(made.address, own, "link") as sock:
            sock.sendall(b"x")
            assert read_exactly(sock, 1) == b"x"
        assert made.seen[0][0].peer.startswith("[::1]:")
    with Port("localhost:0", made.own) as port:
        assert port.address.port != 0


def test_a_port_that_closes_ends_what_is_open(controller: Controller) -> None:
    own = controller.credentials(Role.HOST)
    socks = [dial(controller.address, own, "link"), controller.plain(), controller.secure()]
    until(lambda: waiting(controller) == 2, "two callers have said nothing")
    controller.port.close()
    controller.port.close()
    assert [read_all(sock) for sock in socks] == [b""] * 3
    for sock in socks:
        sock.close()
    with pytest.raises(errors.ConnectError, match="nothing listens"):
        dial(controller.address, own, "link")
    again = Port(controller.address, controller.own)  # at once, at the same address
    again.close()


# Without encryption.


@pytest.fixture
def plaintext(controller: Controller, caplog: pytest.LogCaptureFixture) -> Controller:
    port = controller.serve(Port("127.0.0.1:0", None, controller.authority, controller.tokens))
    controller.port.close()
    controller.port = port
    assert "WITHOUT ENCRYPTION (--insecure-plaintext)" in caplog.text
    caplog.clear()
    return controller


def test_without_encryption_the_token_says_who_calls(plaintext: Controller, caplog: pytest.LogCaptureFixture) -> None:
    token = plaintext.tokens.make("host", 60)
    for _ in range(2):
        with dial(plaintext.address, None, "link", token=token, name="m") as sock:
            sock.sendall(b"x")
            assert read_exactly(sock, 1) == b"x"
    identity, hello = plaintext.seen[0]
    assert str(identity) == "host m" and not identity.is_encrypted and "token" not in hello
    for expected, fields in (
        ("used 1 of 1 times", {"token": token, "name": "other"}),
        ("is for client", {"token": token, "name": "m", "role": "client"}),
        ("this is no token", {"name": "m"}),
        ("a name is", {"token": token}),
    ):
        purpose = "run" if "role" in fields else "link"
        with pytest.raises(errors.PathwaysError, match=expected):
            dial(plaintext.address, None, purpose, **fields)
    assert len(lines(caplog)) == 4
    plaintext.tokens.revoke(1)
    with pytest.raises(errors.PermissionDeniedError, match="was revoked"):
        dial(plaintext.address, None, "link", token=token, name="m")
    with pytest.raises(errors.PermissionDeniedError, match="makes no certificates"):
        ask(plaintext.address, None, "join", token=token, name="m", request="x")


def test_encryption_must_be_on_at_both_ends_or_at_none(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(errors.ConnectError, match=r"speaks TLS 1.3, and the caller does not: leave out --insecure"):
        dial(controller.address, None, "link", token=controller.tokens.make("host", 60), name="m")
    port = controller.serve(Port("127.0.0.1:0", None, controller.authority, controller.tokens))
    with port:
        with pytest.raises(errors.ConnectError, match=r"does not speak TLS: .*or one with --insecure-plaintext"):
            dial(port.address, controller.credentials(Role.HOST), "link")
        until(lambda: "and the caller speaks TLS" in caplog.text, "the line of the port")
