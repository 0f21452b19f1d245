"""A port that other machines can call: it lets in who shows a certificate of the cluster, or trades a token for one.

The controller has one, and each machine agent. A thread takes connections, and each connection has a thread of its own,
in which its purpose's handler runs. Any thread may call the methods.

CERT-1 (role): a handler runs only for a peer whose certificate has a role that the purpose is for.
CERT-4 (bounded): before that, a peer has 5 s, 64 KiB, and one of 64 places. When all places are taken, who has had its
place for a second or longer loses it to the next caller; so a flood of silent callers keeps nobody out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pathways import errors
from pathways.trust.address import Address
from pathways.trust.authority import Authority, holder_of
from pathways.trust.credentials import Credentials, HasCredentials
from pathways.trust.first_line import encode, field, read_hello, refusal
from pathways.trust.handshakes import describe_handshake_error
from pathways.trust.identity import Identity, Role, check_name, identity_of, printable
from pathways.trust.listening import listen
from pathways.trust.refusals import RefusalLog
from pathways.trust.tokens import Taken, Tokens

Handler = Callable[[socket.socket, Identity, dict[str, Any]], bool | None]
Admission = Callable[[Identity, dict[str, Any]], Mapping[str, Any]]

_FIRST_LINE_S = 5.0
_MOST_UNAUTHENTICATED = 64
_SAFE_S = 1.0  # how long a caller keeps its place, however many want it
_LINGER_S = 1.0
_TLS_HANDSHAKE = 0x16  # the first byte of a TLS connection
_HTTP = (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"CONN", b"PRI ")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Purpose:
    roles: frozenset[Role]
    handler: Handler
    admit: Admission | None


@dataclasses.dataclass(eq=False)
class _Connection:
    """One peer. `sock` is replaced under the port's lock; the rest belongs to the connection's thread, except that the
    port's lock guards the flags.
    """

    sock: socket.socket
    peer: str
    since: float
    is_evicted: bool = False
    is_heard: bool = False  # its first line has come
    is_kept: bool = False  # its handler has returned, and somebody else uses it
    is_let_go: bool = False
    identity: Identity | None = None
    purpose: str = ""

    def shut(self) -> None:
        """Ends the connection; its thread sees it. (`SSLSocket.shutdown` would take the thread's TLS state away.)"""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class Port:
    """Listens when it is made; takes connections after `start`. A context manager, which closes it."""

    def __init__(
        self,
        address: Address | str,
        credentials: HasCredentials | None,
        authority: Authority | None = None,
        tokens: Tokens | None = None,
        *,
        first_line_s: float = _FIRST_LINE_S,
        most_unauthenticated: int = _MOST_UNAUTHENTICATED,
    ) -> None:
        """A port at `address`, where port 0 is any free one.

        Args:
            address: where to listen.
            credentials: what the port shows. None: no encryption, and peers send their token (--insecure-plaintext).
            authority: trades tokens for certificates and renews these. None: this port does neither.
            tokens: those of the authority.
            first_line_s: seconds for a peer's handshake and first line.
            most_unauthenticated: places of peers that have not shown who they are.

        Raises:
            ConnectError: it cannot listen there.
            OptionError: the address is none, or neither credentials nor tokens are given.
        """
        if credentials is None and tokens is None:
            raise errors.OptionError("a port without encryption needs tokens, to know who calls")
        self._credentials = credentials
        self._authority = authority
        self._tokens = tokens
        self._first_line_s = first_line_s
        self._most_unauthenticated = most_unauthenticated
        self._purposes: dict[str, _Purpose] = {}
        self._refusals = RefusalLog(_log)
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._unknown: set[_Connection] = set()  # peers that have not shown who they are
        self._known: set[_Connection] = set()
        self._context: tuple[Credentials, ssl.SSLContext] | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        where = Address.parse(address, listens=True)
        self._listener = listen(where)
        self.address = Address(where.host, self._listener.getsockname()[1])
        if credentials is None:
            _log.warning(
                "%s takes connections WITHOUT ENCRYPTION (--insecure-plaintext): who can read the network reads tokens "
                "and data, and can change them",
                self.address,
            )

    @property
    def is_encrypted(self) -> bool:
        """False with --insecure-plaintext."""
        return self._credentials is not None

    @property
    def refused(self) -> int:
        """How many connections were refused."""
        return self._refusals.count

    def on(self, purpose: str, roles: Iterable[Role], handler: Handler, admit: Admission | None = None) -> None:
        """Says who may call for a purpose, and what then runs.

        Args:
            purpose: the "purpose" of a caller's first line.
            roles: those that may; another one is refused.
            handler: `handler(sock, identity, hello)` runs in the connection's thread, after the caller was told that it
                is let in. The socket is blocking, without a timeout; it is closed when the handler returns or raises.
                But if the handler returns True, the connection stays until `let_go`, without a thread.
            admit: `admit(identity, hello)` runs before. What it returns is sent with the answer; a `PathwaysError` that
                it raises is sent instead, and the caller is refused.
        """
        self._purposes[purpose] = _Purpose(frozenset(roles), handler, admit)

    def start(self) -> Port:
        """Takes connections, from now on. The purposes should be there by then."""
        with self._changed:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._accept_all, name="pathways-port", daemon=True)
                self._thread.start()
        return self

    def peers(self) -> list[tuple[Identity, str]]:
        """Who is connected, and for which purpose; sorted by name."""
        with self._changed:
            found = [(each.identity, each.purpose) for each in self._known if each.identity is not None]
        return sorted(found, key=lambda pair: (pair[0].role, pair[0].name, pair[1], pair[0].peer))

    def let_go(self, sock: socket.socket) -> None:
        """Closes a connection that its handler has kept, or is about to keep. Nobody may use it any more."""
        with self._changed:
            found = next((each for each in self._known if each.sock is sock), None)
            if found is None:
                return
            found.is_let_go = True
            if found.is_kept:
                self._forget(found)

    def close(self) -> None:
        """Listens no more, and ends all connections: their handlers see the end of the stream."""
        with self._changed:
            self._is_closed = True
            connections = [*self._unknown, *self._known]
            thread = self._thread
            self._changed.notify_all()
            for each in connections:
                each.shut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._listener.close()

    def __enter__(self) -> Port:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # Taking connections: the port's thread.

    def _accept_all(self) -> None:
        while True:
            try:
                sock, name = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                if error.errno not in (errno.ECONNABORTED, errno.EINTR):
                    # Out of descriptors or memory: what is there goes on, and a place gets free sometime.
                    self._refusals.add("connections cannot be taken at %s: %s", self.address, error.strerror)
                    with self._changed:
                        self._changed.wait(0.1)
                continue
            connection = _Connection(sock, Address(name[0], name[1]).endpoint, time.monotonic())
            if not self._take_place(connection):
                sock.close()
                return
            try:
                threading.Thread(
                    target=self._serve, args=(connection,), name="pathways-connection", daemon=True
                ).start()
            except RuntimeError as error:
                self._refusals.add("%s is refused: %s", connection.peer, error)
                self._leave(connection)

    def _take_place(self, connection: _Connection) -> bool:
        """Waits for a place for it. False: the port is closed."""
        with self._changed:
            while len(self._unknown) >= self._most_unauthenticated and not self._is_closed:
                leaving = sum(each.is_evicted for each in self._unknown)
                waiting = [each for each in self._unknown if not each.is_evicted and not each.is_heard]
                oldest = min(waiting, key=lambda each: each.since, default=None)
                safe_s = oldest.since + _SAFE_S - time.monotonic() if oldest else _SAFE_S
                if oldest is not None and safe_s <= 0 and not leaving:
                    oldest.is_evicted = True
                    oldest.shut()
                self._changed.wait(max(safe_s, 0.05))
            connection.since = time.monotonic()
            if not self._is_closed:
                self._unknown.add(connection)
            return not self._is_closed

    def _leave(self, connection: _Connection) -> None:
        with self._changed:
            if not connection.is_kept or connection.is_let_go:
                self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        self._unknown.discard(connection)
        self._known.discard(connection)
        self._changed.notify_all()
        connection.sock.close()

    # A connection: its own thread.

    def _serve(self, connection: _Connection) -> None:
        try:
            self._introduce(connection)
        except _Silent:
            if connection.is_evicted:
                self._refusals.add("%s", self._broken(connection, ConnectionResetError()))
            else:
                _log.debug("%s connected and left", connection.peer)
        except errors.PathwaysError as error:
            self._refusals.add("%s is refused: %s", self._who(connection), error)
            self._answer_and_linger(connection, refusal(error))
        except OSError as error:
            if not self._is_closed:
                self._refusals.add("%s", self._broken(connection, error))
            self._answer_and_linger(connection, b"")
        except Exception:
            _log.exception("%s is refused, because of a fault here", self._who(connection))
            self._answer_and_linger(connection, refusal(errors.ConnectError("a fault of the cluster: see its log")))
        finally:
            self._leave(connection)

    def _introduce(self, connection: _Connection) -> None:
        """Finds who the peer is, then does what it came for."""
        deadline = connection.since + self._first_line_s
        sock = connection.sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._check_first_bytes(sock, deadline)
        identity = None
        if self._credentials is not None:
            context = self._server_context(self._credentials.current())
            with self._changed:
                sock.settimeout(max(deadline - time.monotonic(), 0.001))
                secure = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                connection.sock = sock = secure
            secure.do_handshake()
            certificate = secure.getpeercert(binary_form=True)
            identity = identity_of(certificate, connection.peer) if certificate else None
        hello = read_hello(sock, deadline)
        with self._changed:
            connection.is_heard, connection.purpose = True, hello["purpose"]
        token = hello.pop("token", None)
        if self._answer_here(connection, identity, hello, token):
            return
        if self._credentials is None:
            identity = self._identity_by_token(hello, token, connection.peer)
        self._hand_over(connection, identity, hello)

    def _hand_over(self, connection: _Connection, identity: Identity | None, hello: dict[str, Any]) -> None:
        purpose = self._purposes.get(connection.purpose)
        if identity is None:
            raise errors.PermissionDeniedError("no certificate was shown: join with a token first (`pathways token`)")
        connection.identity = identity
        self._check_still_good(identity)
        if purpose is None:
            raise errors.OptionError(f"this port serves no purpose {printable(connection.purpose)}")
        if identity.role not in purpose.roles:
            allowed = " or ".join(sorted(purpose.roles))
            raise errors.PermissionDeniedError(
                f"{identity.name} has the role {identity.role}, and {connection.purpose!r} is for {allowed}: make a "
                "token of that role with `pathways token`"
            )
        with self._changed:
            if self._is_closed or connection.is_evicted:
                raise ConnectionResetError
            self._unknown.discard(connection)
            self._known.add(connection)
            self._changed.notify_all()
        answer = dict(purpose.admit(identity, hello)) if purpose.admit is not None else {}
        sock = connection.sock
        sock.settimeout(self._first_line_s)
        sock.sendall(encode({**answer, "ok": True}))
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            is_kept = purpose.handler(sock, identity, hello) is True
            with self._changed:
                connection.is_kept = is_kept
        except (OSError, errors.PathwaysError) as error:
            if not self._is_closed:
                _log.info("the connection %r of %s at %s ended: %s", connection.purpose, identity, identity.peer, error)
        except Exception:
            _log.exception("the connection %r of %s at %s failed", connection.purpose, identity, identity.peer)

    def _check_first_bytes(self, sock: socket.socket, deadline: float) -> None:
        """Tells a caller of another kind what this port is, in words that it can read."""
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        first = sock.recv(4, socket.MSG_PEEK)
        if not first:
            raise _Silent
        if first in _HTTP:
            text = b"This is a port of a Pathways cluster, not of a web server.\n"
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n" + text)
            raise _Answered("it speaks HTTP, and this is a port of Pathways")
        is_tls = first[0] == _TLS_HANDSHAKE
        if self._credentials is not None and not is_tls:
            raise errors.ConnectError(
                "this port speaks TLS 1.3, and the caller does not: leave out --insecure-plaintext"
            )
        if self._credentials is None and is_tls:
            raise errors.ConnectError("this port has --insecure-plaintext, and the caller speaks TLS")

    def _answer_here(
        self, connection: _Connection, identity: Identity | None, hello: dict[str, Any], token: Any
    ) -> bool:
        """Serves the purposes of the port itself. False: it is another purpose."""
        authority, purpose = self._authority, connection.purpose
        if purpose not in ("authority", "join", "renew"):
            return False
        if authority is None or self._credentials is None:
            raise errors.PermissionDeniedError("this port makes no certificates: call the controller's, with TLS")
        if purpose == "authority":
            answer = {"authority": authority.pem}
        elif purpose == "join":
            answer = {"certificate": self._join(authority, hello, token)}
        else:
            if identity is None:
                raise errors.PermissionDeniedError("only who shows a certificate can renew it")
            self._check_still_good(identity)
            connection.identity = identity
            request = field(hello, "request")
            if self._tokens is not None:
                with self._tokens_at_hand():
                    self._tokens.renew(identity, holder_of(request))
            answer = {"certificate": authority.renew(identity, request)}
            _log.info("%s at %s has renewed its certificate", identity, connection.peer)
        connection.sock.settimeout(self._first_line_s)
        connection.sock.sendall(encode({**answer, "ok": True}))
        self._linger(connection)
        return True

    def _join(self, authority: Authority, hello: dict[str, Any], token: Any) -> str:
        # What may be wrong comes first, so that no use of the token is spent on it.
        name, request = check_name(hello.get("name")), field(hello, "request")
        key = holder_of(request)
        taken = self._take(token, key, name, key)
        chain = authority.issue(taken.role, taken.name, request, token=taken.number)
        _log.info("%s %s has joined with token %d", taken.role, taken.name, taken.number)
        return chain

    def _identity_by_token(self, hello: dict[str, Any], token: Any, peer: str) -> Identity:
        """Who a peer without encryption says to be. Its token proves the role only."""
        name = check_name(hello.get("name"))
        taken = self._take(token, f"plaintext {name}", name)
        return Identity(taken.role, name, taken.number, None, peer)

    def _take(self, token: Any, holder: str, name: str, key: str = "") -> Taken:
        if self._tokens is None:
            raise errors.PermissionDeniedError("this port takes no tokens")
        with self._tokens_at_hand():
            return self._tokens.take_for(token, holder, name, key)

    @contextlib.contextmanager
    def _tokens_at_hand(self) -> Iterator[None]:
        """A full disk or a damaged file is no business of the peer's."""
        try:
            yield
        except errors.PermissionDeniedError:
            raise
        except (OSError, errors.OptionError) as error:
            _log.error("tokens cannot be taken: %s", error)
            raise errors.ConnectError("the cluster cannot take tokens now: see the controller's log") from None

    def _check_still_good(self, identity: Identity) -> None:
        if self._tokens is None:
            return
        with self._tokens_at_hand():
            is_revoked, is_owner = self._tokens.is_revoked(identity.token), self._tokens.belongs(identity)
        if is_revoked:
            raise errors.PermissionDeniedError(
                f"token {identity.token}, by which {identity.name} came in, was revoked: join again with a new one"
            )
        if not is_owner and identity.expires is not None:
            raise errors.PermissionDeniedError(
                f"the name {identity.name!r} belongs to another {identity.role} now: join again with another name"
            )

    def _server_context(self, credentials: Credentials) -> ssl.SSLContext:
        with self._changed:
            if self._context is None or self._context[0] is not credentials:
                self._context = (credentials, credentials.server_context(wants_peer=False))
            return self._context[1]

    # Refusing.

    def _who(self, connection: _Connection) -> str:
        return f"{connection.identity} at {connection.peer}" if connection.identity else connection.peer

    def _broken(self, connection: _Connection, error: OSError) -> str:
        who = self._who(connection)
        if connection.is_evicted:
            return f"{who} is refused: {self._most_unauthenticated} others wait, and it said nothing for {_SAFE_S:g} s"
        if isinstance(error, _Answered):
            return f"{who} is refused: {error}"
        if connection.purpose:
            return f"{who} went away before it had its answer: {error.strerror or error}"
        if isinstance(error, ConnectionResetError) and error.errno is None:
            return f"{who}: {error}"
        return f"{who} {describe_handshake_error(error)}"

    def _answer_and_linger(self, connection: _Connection, line: bytes) -> None:
        if connection.is_evicted or self._is_closed:
            return
        with contextlib.suppress(OSError, ValueError):
            connection.sock.settimeout(_LINGER_S)
            if line:
                connection.sock.sendall(line)
            self._linger(connection)

    def _linger(self, connection: _Connection) -> None:
        """Lets the peer read what was sent. To close at once while bytes of the peer wait would make its kernel forget
        the answer.
        """
        sock, deadline = connection.sock, time.monotonic() + _LINGER_S
        with contextlib.suppress(OSError, ValueError):
            socket.socket.shutdown(sock, socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0:
                sock.settimeout(left)
                if not socket.socket.recv(sock, 4096):  # the bytes as they come, encrypted or not
                    return


class _Silent(Exception):
    """A peer connected and left without a byte, as probes of a load balancer do."""


class _Answered(OSError):
    """The peer is refused, and knows why."""
