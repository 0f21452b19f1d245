"""A socket that listens at an address, or an error that says what is in the way."""

from __future__ import annotations

import errno
import socket

from pathways import errors
from pathways.trust.address import Address

_BACKLOG = 512


def listen(address: Address) -> socket.socket:
    """Port 0 is any free one. Raises `ConnectError`."""
    where = address.endpoint
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise errors.ConnectError(f"cannot listen at {where}: the name has no address here ({error})") from None
    family, _, _, _, name = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # [::] takes IPv4, too.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address.host == "::" else 1)
        listener.bind(name)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        what = {
            errno.EADDRINUSE: f"another process has this port: choose another, or {Address(address.host, 0).endpoint} "
            "for any free one",
            errno.EADDRNOTAVAIL: "this machine has no such address: `ip addr` lists those that it has",
            errno.EACCES: "ports below 1024 need more rights: choose a higher one",
        }.get(error.errno or 0, error.strerror or str(error))
        raise errors.ConnectError(f"cannot listen at {where}: {what}") from None
    return listener
