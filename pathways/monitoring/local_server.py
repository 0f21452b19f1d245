"""The HTTP server of metrics and the dashboard, on the loopback interface of this machine. Threads call its resources.

It is the standard library's `ThreadingHTTPServer`: a few pages and one long answer per browser need no framework, and a
package less is one less to keep safe. What that server lacks is here:

    who may call   Every user of the machine can, and every page in a browser of it. So a resource that tells of the
                   cluster wants the secret (`secret.py`) in the header `Authorization`, which no page of another site
                   can send without leave (CORS), and none gets it. There is no cookie: browsers send these to all ports
                   of a machine. A name that is not this machine's in the header `Host` is refused: DNS rebinding.
    bounds         `MOST_CONNECTIONS` at a time, of which `MOST_STREAMS` are long answers. Who has not shown the secret
                   has `PATIENCE_S` seconds. A reader that takes nothing for `STALL_S` seconds is let go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import http.server
import ipaddress
import re
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Generator, Mapping
from typing import Any

from pathways import errors

MOST_CONNECTIONS, MOST_STREAMS = 64, 16
PATIENCE_S, STALL_S = 10.0, 20.0

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclasses.dataclass(frozen=True)
class Request:
    """What a caller asked for: the parameters of the query, each once, and the header `Accept`."""

    query: Mapping[str, str]
    accept: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a caller gets. A body that is a generator is sent part by part, until it ends or the caller leaves."""

    body: bytes | Generator[bytes, None, None]
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


@dataclasses.dataclass(frozen=True)
class Resource:
    """What makes the answers of one path. `is_open`: who does not know the secret gets them, too."""

    answer: Callable[[Request], Answer]
    is_open: bool = False


class LocalServer(http.server.ThreadingHTTPServer):
    """A server of these resources, by path. A context manager: it serves in the background until the block ends."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, where: str, secret: str, resources: Mapping[str, Resource]) -> None:
        """`where`: PORT, or HOST:PORT with an address of the loopback interface; port 0 is any free one.

        Raises:
            OptionError: other machines could call there, or that is no address.
            ConnectError: it cannot listen there.
        """
        host, port = _parsed(where)
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.resources = resources
        self._secret = secret.encode()
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, float] = {}  # since when; guarded by _lock, as is what follows
        self._connections = self._streams = 0
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise errors.ConnectError(
                f"cannot listen at {host}:{port}: {error.strerror}. Give another port; with 0 any free one is taken"
            ) from None
        shown = f"[{host}]" if ":" in host else host
        self.origin = f"http://{shown}:{self.server_address[1]}"

    def server_bind(self) -> None:
        """Binds the socket. The base class would ask the resolver for the machine's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    # -- who is there ------------------------------------------------------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        """Takes a connection if there is room."""
        with self._lock:
            if self._connections >= MOST_CONNECTIONS:
                self.shutdown_request(request)
                return
            self._connections += 1
            self._strangers[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread is to be had
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _ended(self, request: Any) -> None:
        with self._lock:
            self._connections -= 1
            self._strangers.pop(request, None)

    def service_actions(self) -> None:
        """Lets go of who has not shown the secret in time. The thread of `serve_forever` calls it now and then."""
        limit = time.monotonic() - PATIENCE_S
        with self._lock:
            for connection, since in self._strangers.items():
                if since < limit:
                    with contextlib.suppress(OSError):  # it has gone
                        connection.shutdown(socket.SHUT_RDWR)

    def knows(self, connection: socket.socket, authorization: str) -> bool:
        """Whether a caller has shown the secret."""
        if not hmac.compare_digest(authorization.encode("latin-1", "replace"), b"Bearer " + self._secret):
            return False
        with self._lock:
            self._strangers.pop(connection, None)
        return True

    def begin_stream(self) -> bool:
        """Whether there is room for one more long answer; `end_stream` gives it back."""
        with self._lock:
            is_room = self._streams < MOST_STREAMS
            self._streams += is_room
            return is_room

    def end_stream(self) -> None:
        """A long answer is over."""
        with self._lock:
            self._streams -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that leaves is no error of this process."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    # -- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> LocalServer:
        threading.Thread(target=self.serve_forever, args=(1.0,), name="pw-web", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def server_close(self) -> None:
        """Closes the port. Connections end with their threads, which end with the process."""
        self.socket.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request of one connection, which then ends."""

    server: LocalServer
    timeout = STALL_S
    server_version, sys_version = "pathways", ""

    def do_GET(self) -> None:
        """Answers a GET."""
        path, _, query = self.path.partition("?")
        resource = self.server.resources.get(path)
        if not _is_this_machine(self.headers.get("Host", "")):
            self._send(_refusal(421, "call this port by an address of this machine, as 127.0.0.1 or localhost"))
        elif resource is None:
            self._send(_refusal(404, f"nothing is here; there are: {', '.join(self.server.resources)}"))
        elif self._is_of_another_site() and not resource.is_open:
            self._send(_refusal(403, "another site may not call here"))
        elif not (self.server.knows(self.connection, self.headers.get("Authorization", "")) or resource.is_open):
            self._send(_refusal(401, "the header `Authorization: Bearer SECRET` is wrong or missing"))
        else:
            try:
                pairs = urllib.parse.parse_qsl(query, keep_blank_values=True, max_num_fields=8)
                asked = Request(dict(pairs), self.headers.get("Accept", ""))
                answer = resource.answer(asked)
            except ValueError as error:
                answer = _refusal(400, str(error))
            except errors.PathwaysError as error:
                answer = _refusal(503, str(error))
            self._send(answer)

    do_HEAD = do_GET

    def _is_of_another_site(self) -> bool:
        """What the browser says; other programs say nothing."""
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site", "none")
        is_ours = origin is None or origin == f"http://{self.headers.get('Host')}"
        return not is_ours or site not in ("none", "same-origin")

    def _send(self, answer: Answer) -> None:
        if isinstance(answer.body, bytes):
            self._send_head(answer, {"Content-Length": str(len(answer.body))})
            if self.command != "HEAD":
                self.wfile.write(answer.body)
        elif not self.server.begin_stream():
            self._send(_refusal(503, f"{MOST_STREAMS} pages are open, and no more can be: close one"))
        else:
            try:
                self._send_head(answer, {"X-Accel-Buffering": "no"})
                for part in answer.body:
                    self.wfile.write(part)
            finally:
                answer.body.close()
                self.server.end_stream()

    def _send_head(self, answer: Answer, more: Mapping[str, str]) -> None:
        self.send_response(answer.status)
        headers = {**_HEADERS, "Content-Type": answer.content_type, **more}
        if answer.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a caller writes no lines to the terminal of who started this."""


def _refusal(status: int, why: str) -> Answer:
    return Answer(f"{why}\n".encode(errors="replace"), status=status)


def _parsed(where: str) -> tuple[str, int]:
    """The loopback address and the port.

    Raises:
        OptionError: it is no address, or one that other machines can call.
    """
    host, colon, port = where.rpartition(":")
    host = host.strip("[]") if colon else "127.0.0.1"
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise errors.OptionError(f"expected PORT or HOST:PORT, with a port from 0 to 65535, got {where!r:.100}")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = False
    if not is_here:
        raise errors.OptionError(
            f"{where}: other machines could call there, without TLS and without a role. This port listens at "
            "127.0.0.1 alone. From another machine use a tunnel (`ssh -L PORT:127.0.0.1:PORT HOST`); or start "
            "this command there, with ADDRESS pathways://HOST:PORT and a token of the role operator or client"
        )
    return host, int(port)


def _is_this_machine(host: str) -> bool:
    """Whether a header `Host` names this machine, at any port: a tunnel may have another one."""
    name = re.sub(r":[0-9]{1,5}$", "", host).strip("[]").lower()
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
