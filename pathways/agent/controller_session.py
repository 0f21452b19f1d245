"""A session of this process with a controller on another machine, as a client or as an operator.

The controller gives the session a secret, by which it knows the caller of a gRPC call; and calls go to a Unix socket of
this machine, which tunnels lead to the controller's (`tunnel.py`). The session lives as long as its connection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping
from typing import Any

from pathways import errors
from pathways.process.run_directory import state_folder
from pathways.transport.connection import send_again_soon
from pathways.transport.loop import Loop
from pathways.transport.tunnels import TunnelServer
from pathways.trust import (
    Address,
    Credentials,
    Renewal,
    certificate_in,
    check_name,
    dial_answered,
    given_token,
    renewed_at,
)

SCHEME = "pathways://"
PLAINTEXT_SCHEME = "pathways+plaintext://"


def is_far(address: str) -> bool:
    """Whether this is the address of a port of another machine."""
    return address.startswith((SCHEME, PLAINTEXT_SCHEME))


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """How this process comes in at a controller's port: a value, which another process can use as well."""

    address: str  # HOST:PORT
    name: str  # of this client, for people
    credentials: str = ""  # the file of its certificate; empty: nothing is encrypted, and `token` says who calls
    token: str = ""  # empty: that of the environment

    def without_token(self) -> dict[str, str]:
        """What may stand on the command line of a process, which gets the token by its environment."""
        return {"address": self.address, "name": self.name, "credentials": self.credentials}

    @classmethod
    def find(cls, address: str, environment: Mapping[str, str], role: str) -> Endpoint:
        """The endpoint at a port: with the certificate it got before, or with the token that the environment names.

        Args:
            address: `pathways://HOST:PORT`; `pathways+plaintext://HOST:PORT` for a cluster without encryption.
            environment: PATHWAYS_TOKEN, or PATHWAYS_TOKEN_FILE with the name of a file.
            role: what a token should be for, for people.

        Raises:
            ConnectError: the address is none, or nothing answers there.
            OptionError: the file of the token cannot be read.
            PermissionDeniedError: there is no token and no certificate, or they are no good.
        """
        token, name = given_token(None, environment), _own_name()
        if address.startswith(PLAINTEXT_SCHEME):
            where = Address.parse(SCHEME + address.removeprefix(PLAINTEXT_SCHEME))
            if not token:
                raise errors.PermissionDeniedError(
                    "a cluster without encryption asks for a token each time: set PATHWAYS_TOKEN_FILE to a file "
                    f"with what `pathways token --role {role}` printed on the controller's machine"
                )
            return cls(where.endpoint, name, token=token)
        where = Address.parse(address)
        kept = os.path.join(state_folder(), re.sub(r"[^A-Za-z0-9.]+", "-", f"{role}-{where.endpoint}") + ".pem")
        certificate_in(kept, where, token, name, role)
        return cls(where.endpoint, name, credentials=kept)


class ControllerSession:
    """Opened when it is made. A context manager, which closes it. Any thread may call any method."""

    def __init__(self, endpoint: Endpoint, directory: str | None = None) -> None:
        """Opens the session.

        Args:
            endpoint: how this process comes in.
            directory: where `control.sock` is made; its own when not given.

        Raises:
            ConnectError: there is no connection to be had; the message says why.
            PermissionDeniedError: the certificate or the token is no good, or its role may not do this.
        """
        if not endpoint.credentials and not endpoint.token:
            endpoint = dataclasses.replace(endpoint, token=given_token(None, os.environ))
        self._endpoint = endpoint
        self._credentials: Renewal | None = None
        if endpoint.credentials:
            own = Credentials.load(endpoint.credentials)
            self._credentials = Renewal(own, lambda old: renewed_at(endpoint.address, old), endpoint.credentials)
        self._connection, welcome = self.dial("session")
        send_again_soon(self._connection)
        self.loop = Loop()
        self.token = str(welcome["session"])
        self._own_directory = "" if directory else tempfile.mkdtemp(prefix="pathways-session-")
        self.control = os.path.join(directory or self._own_directory, "control.sock")
        self._tunnels = TunnelServer(self.loop, self.control, lambda: self.dial("console")[0])

    def dial(self, purpose: str, **fields: Any) -> tuple[socket.socket, dict[str, Any]]:
        """One more connection to the controller's port. Raises as the constructor does."""
        if self._credentials is None:
            fields |= {"token": self._endpoint.token, "name": self._endpoint.name}
        return dial_answered(self._endpoint.address, self._credentials, purpose, **fields)

    def close(self) -> None:
        """Ends the session: the controller frees all that it owned."""
        self._tunnels.close()
        self.loop.close()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        with contextlib.suppress(OSError):
            os.unlink(self.control)
        if self._own_directory:
            shutil.rmtree(self._own_directory, ignore_errors=True)

    def __enter__(self) -> ControllerSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _own_name() -> str:
    user = os.environ.get("USER") or str(os.getuid())
    machine = socket.gethostname().split(".")[0]
    return check_name(re.sub(r"[^A-Za-z0-9._-]", "-", f"{user}-{machine}")[:64])
