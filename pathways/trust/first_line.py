"""What two ends say to each other first: one line of JSON from the caller, and one line back. Any thread may call.

The caller sends `{"purpose": ..., "protocol": ..., ...}` and nothing behind it until the answer has come, which is
`{"ok": true, ...}` or `{"error": CLASS, "message": TEXT}`. What comes after the answer is the purpose's own.

CERT-4 (bounded): until a peer has shown who it is, it gets bounded bytes, and a bounded time for all that it sends
together, so that a byte now and then does not help.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from pathways import errors
from pathways.process.config import PROTOCOL_VERSION
from pathways.transport.callers import Steps, received
from pathways.trust.identity import printable

#: Bytes of a first line, or of the answer, with its end.
LONGEST_LINE = 64 << 10
_MOST_OF_MESSAGE = 4000


def encode(content: Mapping[str, Any]) -> bytes:
    """A line. Raises `OptionError` when it would be too long, or is no JSON."""
    try:
        line = json.dumps(content, allow_nan=False).encode("ascii") + b"\n"
    except (TypeError, ValueError) as error:
        raise errors.OptionError(f"a first line takes values of JSON only: {error}") from None
    if len(line) > LONGEST_LINE:
        raise errors.OptionError(f"a first line has at most {LONGEST_LINE} bytes, and this one would have {len(line)}")
    return line


def hello(purpose: str, fields: Mapping[str, Any]) -> bytes:
    """The line with which a caller begins."""
    return encode({**fields, "purpose": purpose, "protocol": PROTOCOL_VERSION})


def refusal(error: errors.PathwaysError) -> bytes:
    """The line that says why a caller is refused."""
    return encode({"error": type(error).__name__, "message": str(error)[:_MOST_OF_MESSAGE]})


def read_hello(sock: socket.socket) -> Steps[dict[str, Any]]:
    """The line of a caller, checked for its form.

    Raises:
        OSError: the caller went away.
        ConnectError, UnsupportedVersionError: it is not as a caller of this version sends it.
    """
    line = bytearray()
    while b"\n" not in line:
        if len(line) >= LONGEST_LINE:
            raise errors.ConnectError(f"a first line has at most {LONGEST_LINE} bytes; this one has no end by then")
        line += yield from received(sock, min(4096, LONGEST_LINE - len(line)))
    text, _, rest = bytes(line).partition(b"\n")
    if rest:
        raise errors.ConnectError("a caller waits for the answer to its first line before it sends more")
    content = parse(text)
    purpose, protocol = content.get("purpose"), content.get("protocol")
    if not isinstance(purpose, str) or isinstance(protocol, bool) or not isinstance(protocol, int):
        raise errors.ConnectError('a first line has "purpose", a text, and "protocol", an integer')
    if protocol != PROTOCOL_VERSION:
        theirs = protocol if abs(protocol) < 1 << 31 else "without a sensible number"
        raise errors.UnsupportedVersionError(
            f"the caller speaks protocol {theirs}, and the other end {PROTOCOL_VERSION}: install the same version of "
            "pathways on all machines"
        )
    return content


def parse(text: bytes) -> dict[str, Any]:
    """The object in a line. Raises `ConnectError` when there is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise errors.ConnectError("a first line is JSON in UTF-8, and this one is not") from None
    if not isinstance(content, dict):
        raise errors.ConnectError("a first line is a JSON object, and this one is another value")
    return content


def read_answer(sock: socket.socket, deadline: float) -> dict[str, Any]:
    """The answer to a caller's line. Reads no byte behind it: these belong to the purpose.

    Raises:
        TimeoutError: it did not come by `deadline` (monotonic).
        ConnectionResetError: the peer closed the connection.
        ConnectError: the answer makes no sense.
        PathwaysError: the peer refuses; the class and the message are the peer's.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        if len(line) >= LONGEST_LINE:
            raise errors.ConnectError(f"the answer has no end within {LONGEST_LINE} bytes")
        sock.settimeout(_left(deadline))
        byte = sock.recv(1)
        if not byte:
            raise ConnectionResetError("it closed the connection instead of an answer")
        line += byte
        if len(line) == 1 and byte != b"{":
            raise errors.ConnectError(
                "what answers there is no port of Pathways, or it speaks TLS and this end does not"
            )
    try:
        answer = parse(bytes(line))
    except errors.ConnectError:
        raise errors.ConnectError("what answers there is no port of Pathways: its answer is not as expected") from None
    if answer.get("ok") is True:
        return answer
    kind, message = answer.get("error"), answer.get("message")
    if not isinstance(kind, str) or not isinstance(message, str):
        raise errors.ConnectError("what answers there is no port of Pathways: its answer is not as expected")
    plain = "".join(letter if letter.isprintable() else " " for letter in message[:_MOST_OF_MESSAGE])
    raise errors.from_text(f"{kind}: {plain}", errors.ConnectError)


def field(content: Mapping[str, Any], name: str) -> str:
    """A text in a caller's line. Raises `OptionError` when it is not there."""
    value = content.get(name)
    if not isinstance(value, str):
        raise errors.OptionError(f'the first line needs "{name}", a text; got {printable(value)}')
    return value


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
