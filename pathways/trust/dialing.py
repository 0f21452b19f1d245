"""Calls a port of the cluster: `dial` for a connection, `ask` for one answer. Any thread may call.

An error says what to do: nothing listens, the name has no address, another cluster answers, a certificate has expired.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from typing import Any

from pathways import errors
from pathways.trust.address import Address
from pathways.trust.credentials import HasCredentials
from pathways.trust.first_line import hello, read_answer
from pathways.trust.handshakes import fault_of_listener
from pathways.trust.identity import Role, identity_of, server_name

_TIMEOUT_S = 10.0
_RETRY_S = 0.05


def dial(
    address: Address | str,
    credentials: HasCredentials | None,
    purpose: str,
    *,
    expects: Role = Role.CONTROLLER,
    timeout_s: float = _TIMEOUT_S,
    **fields: Any,
) -> socket.socket:
    """A connection to a port that lets this caller in for a purpose. The socket is blocking, without a timeout.

    Args:
        address: of the port.
        credentials: what this end shows. None: no encryption; then `token=` and `name=` say who calls.
        purpose: what the caller wants to do.
        expects: the role that the port's owner must have.
        timeout_s: seconds for all of it together.
        fields: more of the first line; values of JSON.

    Raises:
        ConnectError: there is no connection to be had; the message says why.
        PermissionDeniedError: the certificate or the token is no good, or its role may not do this.
        PathwaysError: what else the port refuses.
    """
    return dial_answered(address, credentials, purpose, expects=expects, timeout_s=timeout_s, **fields)[0]


def dial_answered(
    address: Address | str,
    credentials: HasCredentials | None,
    purpose: str,
    *,
    expects: Role = Role.CONTROLLER,
    machine: str = "",
    timeout_s: float = _TIMEOUT_S,
    **fields: Any,
) -> tuple[socket.socket, dict[str, Any]]:
    """As `dial`; returns the port's answer as well. `machine`: the name that the port's owner must have; empty: any."""
    context = None
    if credentials is not None:
        own = credentials.current()
        if own.is_expired:
            raise errors.PermissionDeniedError(
                f"this certificate ({own.identity}) has expired {time.time() - own.expires:.0f} s ago: join again with "
                "a new token (`pathways token`)"
            )
        context = own.client_context()
    return call(Address.parse(address), context, expects, hello(purpose, fields), timeout_s, machine)


def ask(
    address: Address | str,
    credentials: HasCredentials | None,
    purpose: str,
    *,
    expects: Role = Role.CONTROLLER,
    timeout_s: float = _TIMEOUT_S,
    **fields: Any,
) -> dict[str, Any]:
    """The port's answer to one line; the connection is closed. Raises as `dial`."""
    sock, answer = dial_answered(address, credentials, purpose, expects=expects, timeout_s=timeout_s, **fields)
    sock.close()
    return answer


def call(
    address: Address, context: ssl.SSLContext | None, expects: Role, line: bytes, timeout_s: float, machine: str = ""
) -> tuple[socket.socket, dict[str, Any]]:
    """Connects, sends a first line and reads the answer. Raises as `dial`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock = _shake_hands(address, context, expects, deadline)
            break
        except _ClosedEarlyError as early:
            # The port may have too many callers. Nothing was said yet, so it does no harm to begin again.
            if time.monotonic() + _RETRY_S >= deadline:
                raise early.error from None
            time.sleep(_RETRY_S)
    try:
        if machine:
            check_machine(sock, machine, address.endpoint)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sent = _send(sock, line)
        answer = read_answer(sock, deadline)
        if not sent:
            raise errors.ConnectError(f"{address.endpoint} did not read this caller's first line; try again")
    except errors.PathwaysError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise fault_of_listener(error, address.endpoint) from None
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return sock, answer


def closed_by_port(connection: socket.socket, timeout_s: float) -> None:
    """Waits until the port's owner closes a connection, for so long at most, and closes it here."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(timeout_s)
        connection.recv(1)


def check_machine(connection: socket.socket, machine: str, where: str) -> None:
    """CERT-1: any machine with hosts has a certificate for its role; so who calls one of them looks at the name, before
    it says anything.

    Raises:
        PermissionDeniedError: another machine answers at `where`.
    """
    shown = connection.getpeercert(True) if isinstance(connection, ssl.SSLSocket) else None
    found = identity_of(shown or b"")
    if found.name != machine:
        raise errors.PermissionDeniedError(
            f"machine {machine} is expected at {where}, and {found} answers there: look at the addresses of both "
            "machines, and who listens there"
        )


def _send(sock: socket.socket, line: bytes) -> bool:
    """Sends a line. False: the port has closed, perhaps after it said why; so the answer is read even so."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
        sock.sendall(line)
        return True
    return False


class _ClosedEarlyError(Exception):
    def __init__(self, error: errors.PathwaysError) -> None:
        self.error = error


def _shake_hands(address: Address, context: ssl.SSLContext | None, expects: Role, deadline: float) -> socket.socket:
    sock = _connect(address, deadline)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if context is None:
            return sock
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        return context.wrap_socket(sock, server_hostname=server_name(expects))
    except OSError as error:
        sock.close()
        fault = fault_of_listener(error, address.endpoint)
        if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError):
            raise _ClosedEarlyError(fault) from None
        raise fault from None
    except BaseException:
        sock.close()
        raise


def _connect(address: Address, deadline: float) -> socket.socket:
    where = address.endpoint
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise errors.ConnectError(
            f"the name {address.host!r} has no address: look at its spelling and at this machine's resolver ({error})"
        ) from None
    last: OSError = TimeoutError()
    for family, kind, protocol, _, name in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.connect(name)
            return sock
        except OSError as error:
            sock.close()
            last = error
    if isinstance(last, ConnectionRefusedError):
        raise errors.ConnectError(
            f"nothing listens at {where}: is the cluster up (`pathways up --listen`), and is this its address?"
        )
    if isinstance(last, TimeoutError):
        raise errors.ConnectError(
            f"{where} does not answer: is the machine up, and does a firewall let both directions through?"
        )
    raise errors.ConnectError(f"no way to {where}: {last.strerror or last}")
