"""Where a cluster listens, and how a connection to it begins."""

from __future__ import annotations

import dataclasses
import os
import socket
import stat

from pathways import errors
from pathways.process import fd_passing

HELLO_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True)
class Address:
    """The two sockets of a cluster."""

    control: str
    descriptors: str

    @classmethod
    def parse(cls, address: str) -> Address:
        """From `unix:/path/control.sock` or `unix:/path`.

        Raises:
            ConnectError: the address is invalid, or no cluster listens there; the message says what to do.
            PermissionDeniedError: this user may not go there.
        """
        scheme, _, path = address.partition(":")
        if scheme != "unix" or not path:
            raise errors.ConnectError(
                f"expected an address like unix:/path/control.sock, got {address!r}; a cluster on another machine "
                "has an address like pathways://HOST:PORT"
            )
        path = os.path.abspath("/" + path.lstrip("/") if path.startswith("//") else path)
        if os.path.isdir(path):
            path = os.path.join(path, "control.sock")
        try:
            is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
        except PermissionError:
            raise _of_another_user(address) from None
        except OSError as error:
            raise errors.ConnectError(
                f"no cluster listens at {address}: {error.strerror}. `pathways up` starts one and prints its address"
            ) from error
        if not is_socket:
            raise errors.ConnectError(f"{path} is no socket, so no cluster listens at {address}")
        return cls(f"unix:{path}", os.path.join(os.path.dirname(path), "fds.sock"))


def open_connection(address: str, where: Address) -> socket.socket:
    """A connection on the descriptor socket of the cluster at `address`.

    Raises:
        ConnectError: no cluster listens there.
        PermissionDeniedError: this user may not connect there.
    """
    try:
        return fd_passing.connect(where.descriptors)
    except PermissionError:
        raise _of_another_user(address) from None
    except OSError as error:
        raise errors.ConnectError(f"no cluster listens at {address}: {error.strerror}") from error


def _of_another_user(address: str) -> errors.PermissionDeniedError:
    return errors.PermissionDeniedError(
        f"permission denied: only the user who started the cluster at {address} may connect there. Others need a "
        "cluster that listens (`pathways up --listen`), and a token"
    )


def first_message(address: str, connection: socket.socket) -> tuple[fd_passing.Message, list[int]]:
    """The controller's first message on a new connection: the connection's secret, and descriptors."""
    try:
        return fd_passing.receive(connection, HELLO_TIMEOUT_S)
    except (fd_passing.Closed, TimeoutError) as error:
        raise errors.ConnectError(f"the controller at {address} closed the connection: {error}") from error
