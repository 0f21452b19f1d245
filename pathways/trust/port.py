"""A port that other machines can call: it lets in who shows a certificate of the cluster, or trades a token for one.

The controller has one, and so have agents. A loop of its own takes connections and finds out who calls
(`pathways/transport/callers.py`); its thread also waits where a token is counted on disk, and where the controller's
thread decides who comes in. Then the purpose's handler has the connection. Any thread may call the methods.

CERT-1 (role): a handler runs only for a peer whose certificate has a role that the purpose is for.
CERT-4 (bounded): before that, a peer has 5 s, 64 KiB, and one of 1,024 places. After that, one peer has a bounded
number of connections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pathways import errors
from pathways.transport.callers import Caller, Callers, Steps, end, patiently, sent
from pathways.trust.address import Address
from pathways.trust.authority import Authority, holder_of
from pathways.trust.credentials import Credentials, HasCredentials
from pathways.trust.first_line import encode, field, read_hello, refusal
from pathways.trust.handshakes import describe_handshake_error
from pathways.trust.identity import Identity, Role, check_name, identity_of, printable
from pathways.trust.listening import listen
from pathways.trust.refusals import RefusalLog
from pathways.trust.tokens import Taken, Tokens

Handler = Callable[[socket.socket, Identity, dict[str, Any]], object]
Admission = Callable[[Identity, dict[str, Any]], Mapping[str, Any]]

_FIRST_LINE_S = 5.0
_LINGER_S = 1.0
_MOST_OF_ONE = 256  # connections of one peer, if there are descriptors: a connection may take three of these
_PART_OF_TOKEN = 8  # of the descriptors: so many connections of all names that came in by one token
_TLS_HANDSHAKE = 0x16  # the first byte of a TLS connection
_HTTP = (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"CONN", b"PRI ")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Purpose:
    roles: frozenset[Role]
    handler: Handler
    admit: Admission | None


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
        most_of_one: int | None = None,
    ) -> None:
        """A port at `address`, where port 0 is any free one.

        Args:
            address: where to listen.
            credentials: what the port shows. None: no encryption, and peers send their token (--insecure-plaintext).
            authority: trades tokens for certificates and renews these. None: this port does neither.
            tokens: those of the authority.
            first_line_s: seconds for a peer's handshake and first line.
            most_of_one: connections of one peer, if there are descriptors; None: 256.

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
        self._most_of_one = most_of_one
        self._purposes: dict[str, _Purpose] = {}
        self._refusals = RefusalLog(_log)
        self._context: tuple[Credentials, ssl.SSLContext] | None = None  # of the callers' thread
        self._lock = threading.Lock()  # guards the fields below
        self._known: dict[socket.socket, tuple[Identity, str]] = {}  # with their purposes
        self._is_closed = False
        self._callers: Callers | None = None
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
    def refused(self) -> int:
        """How many connections were refused."""
        return self._refusals.count

    def on(self, purpose: str, roles: Iterable[Role], handler: Handler, admit: Admission | None = None) -> None:
        """Says who may call for a purpose, and what then runs.

        Args:
            purpose: the "purpose" of a caller's first line.
            roles: those that may; another one is refused.
            handler: `handler(sock, identity, hello)` runs after the caller was told that it is let in, and waits for no
                caller. The socket, which is non-blocking, is for others from then on, until `let_go`; it is closed if
                the handler raises.
            admit: `admit(identity, hello)` runs before. What it returns is sent with the answer; a `PathwaysError` that
                it raises is sent instead, and the caller is refused.
        """
        self._purposes[purpose] = _Purpose(frozenset(roles), handler, admit)

    def start(self) -> Port:
        """Takes connections, from now on. The purposes should be there by then."""
        with self._lock:
            if self._callers is None and not self._is_closed:
                refused = functools.partial(self._refusals.add, "%s is refused: %s")
                self._callers = Callers("pathways-port", self._listener, self._serve, refused, self._first_line_s)
        return self

    def peers(self) -> list[tuple[Identity, str]]:
        """Who is connected, and for which purpose; sorted by name."""
        with self._lock:
            found = list(self._known.values())
        return sorted(found, key=lambda pair: (pair[0].role, pair[0].name, pair[1], pair[0].peer))

    def let_go(self, sock: socket.socket) -> None:
        """Closes a connection that its handler has got. Nobody may use it any more. A second call does nothing."""
        with self._lock:
            found = self._known.pop(sock, None)
        if found is not None:
            sock.close()

    def close(self) -> None:
        """Listens no more, and ends all connections: who uses them sees the end of the stream."""
        with self._lock:
            self._is_closed = True
            for sock in self._known:
                end(sock)
            callers = self._callers
        if callers is not None:
            callers.close()
        self._listener.close()

    def __enter__(self) -> Port:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # One caller: by the callers' thread.

    def _serve(self, caller: Caller) -> Steps[None]:
        line = b""
        try:
            if (yield from self._let_in(caller)):
                return
        except _SilentError:
            _log.debug("%s connected and left", caller.peer)
        except errors.PathwaysError as error:
            self._refusals.add("%s is refused: %s", caller.who, error)
            line = refusal(error)
        except OSError as error:
            if not self._is_closed:
                self._refusals.add("%s", _broken(caller, error))
        except Exception:
            _log.exception("%s is refused, because of a fault here", caller.who)
            line = refusal(errors.ConnectError("a fault of the cluster: see its log"))
        if not self._is_closed and not caller.is_turned_away:
            with contextlib.suppress(OSError, ValueError):
                yield from _last_words(caller, line)
        caller.leave()
        caller.sock.close()

    def _let_in(self, caller: Caller) -> Steps[bool]:
        """Finds who the peer is, then does what it came for. False: it has been told all that it wanted."""
        caller.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield from self._check_first_bytes(caller.sock)
        identity = None
        if self._credentials is not None:
            yield from caller.shake_hands(self._server_context(self._credentials.current()))
            certificate = caller.sock.getpeercert(binary_form=True)  # type: ignore[attr-defined]
            identity = identity_of(certificate, caller.peer) if certificate else None
        hello = yield from read_hello(caller.sock)
        caller.is_heard = True
        token = hello.pop("token", None)
        answer = self._answer_here(caller, identity, hello, token)
        if answer is not None:
            yield from sent(caller.sock, encode({**answer, "ok": True}))
            return False
        if self._credentials is None:
            identity = self._identity_by_token(hello, token, caller.peer)
        if identity is None:
            raise errors.PermissionDeniedError("no certificate was shown: join with a token first (`pathways token`)")
        yield from self._hand_over(caller, identity, hello)
        return True

    def _hand_over(self, caller: Caller, identity: Identity, hello: dict[str, Any]) -> Steps[None]:
        caller.who, sock, name = f"{identity} at {caller.peer}", caller.sock, hello["purpose"]
        self._check_still_good(identity)
        purpose = self._purposes.get(name)
        if purpose is None:
            raise errors.OptionError(f"this port serves no purpose {printable(name)}")
        if identity.role not in purpose.roles:
            allowed = " or ".join(sorted(purpose.roles))
            raise errors.PermissionDeniedError(
                f"{identity.name} has the role {identity.role}, and {name!r} is for {allowed}: make a token of that "
                "role with `pathways token`"
            )
        self._add(sock, identity, name)
        try:
            answer = dict(purpose.admit(identity, hello)) if purpose.admit is not None else {}
            caller.deadline = time.monotonic() + self._first_line_s
            yield from sent(sock, encode({**answer, "ok": True}))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except BaseException:
            with self._lock:
                self._known.pop(sock)
            raise
        caller.leave()
        try:
            purpose.handler(sock, identity, hello)
            return
        except (OSError, errors.PathwaysError) as error:
            if not self._is_closed:
                _log.info("the connection %r of %s ended: %s", name, caller.who, error)
        except Exception:
            _log.exception("the connection %r of %s failed", name, caller.who)
        self.let_go(sock)

    def _add(self, sock: socket.socket, identity: Identity, purpose: str) -> None:
        """Counts a connection of a peer, which has a bounded number of them."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = min(self._most_of_one or _MOST_OF_ONE, descriptors // 16)
        with self._lock:
            if self._is_closed:
                raise ConnectionResetError
            there = [each for each, _ in self._known.values()]
            if sum((each.role, each.name) == (identity.role, identity.name) for each in there) >= most:
                raise errors.ResourceExhaustedError(f"{identity} has {most} connections, which is the most for one")
            # One token of clients serves any number of names, so it has a bound, too.
            most = descriptors // _PART_OF_TOKEN
            if identity.role is not Role.HOST and sum(each.token == identity.token for each in there) >= most:
                raise errors.ResourceExhaustedError(
                    f"who came in by token {identity.token} has {most} connections, which is the most for one token: "
                    "others need another one (`pathways token`), or the controller more descriptors (ulimit -n)"
                )
            self._known[sock] = identity, purpose

    def _check_first_bytes(self, sock: socket.socket) -> Steps[None]:
        """Tells a caller of another kind what this port is, in words that it can read."""
        first = yield from patiently(functools.partial(sock.recv, 4, socket.MSG_PEEK))
        if not first:
            raise _SilentError
        if first in _HTTP:
            text = b"This is a port of a Pathways cluster, not of a web server.\n"
            sock.send(b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n" + text)
            raise OSError("it speaks HTTP, and this is a port of Pathways")
        is_tls = first[0] == _TLS_HANDSHAKE
        if self._credentials is not None and not is_tls:
            raise errors.ConnectError(
                "this port speaks TLS 1.3, and the caller does not: leave out --insecure-plaintext"
            )
        if self._credentials is None and is_tls:
            raise errors.ConnectError("this port has --insecure-plaintext, and the caller speaks TLS")

    def _answer_here(
        self, caller: Caller, identity: Identity | None, hello: dict[str, Any], token: Any
    ) -> dict[str, Any] | None:
        """Serves the purposes of the port itself. None: it is another purpose."""
        authority, purpose = self._authority, hello["purpose"]
        if purpose not in ("authority", "join", "renew"):
            return None
        if authority is None or self._credentials is None:
            raise errors.PermissionDeniedError("this port makes no certificates: call the controller's, with TLS")
        if purpose == "authority":
            return {"authority": authority.pem}
        if purpose == "join":
            return {"certificate": self._join(authority, hello, token)}
        if identity is None:
            raise errors.PermissionDeniedError("only who shows a certificate can renew it")
        self._check_still_good(identity)
        caller.who, request = f"{identity} at {caller.peer}", field(hello, "request")
        if self._tokens is not None:
            with self._tokens_at_hand():
                self._tokens.renew(identity, holder_of(request))
        _log.info("%s renews its certificate", caller.who)
        return {"certificate": authority.renew(identity, request)}

    def _join(self, authority: Authority, hello: dict[str, Any], token: Any) -> str:
        # What may be wrong comes first, so that no use of the token is spent on it.
        name, request = check_name(hello.get("name")), field(hello, "request")
        key = holder_of(request)
        taken = self._take(token, f"{key} {name}", name, key)  # who has one key for many names is many holders
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
        if self._context is None or self._context[0] is not credentials:
            self._context = (credentials, credentials.server_context(wants_peer=False))
        return self._context[1]


def _broken(caller: Caller, error: OSError) -> str:
    """How a caller's connection ended too early, for the log."""
    if caller.is_turned_away or (error.errno is None and type(error) is OSError):
        return f"{caller.who} is refused: {error}"
    if caller.is_heard:
        return f"{caller.who} went away before it had its answer: {error.strerror or error}"
    if isinstance(error, ConnectionResetError) and error.errno is None:
        return f"{caller.who}: {error}"
    return f"{caller.who} {describe_handshake_error(error)}"


def _last_words(caller: Caller, line: bytes) -> Steps[None]:
    """Lets the peer read what was sent. To close at once while bytes of the peer wait would make its kernel forget the
    answer.
    """
    caller.deadline = time.monotonic() + _LINGER_S
    caller.gives_way()
    yield from sent(caller.sock, line)
    socket.socket.shutdown(caller.sock, socket.SHUT_WR)
    while (yield from patiently(functools.partial(socket.socket.recv, caller.sock, 4096))):  # encrypted or not
        pass


class _SilentError(Exception):
    """A peer connected and left without a byte, as probes of a load balancer do."""
