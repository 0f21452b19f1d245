"""The fabric of a machine's hosts: the network by which the devices of an island run collectives (FAB-1).

JAX's collectives neither encrypt nor authenticate what goes between hosts. So an island lies on several machines only
where the operator names the network, and the hosts listen there and nowhere else.
"""

from __future__ import annotations

import array
import fcntl
import hmac
import ipaddress
import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from pathways import errors
from pathways.protocol import agent_pb2 as pb
from pathways.trust import Identity, Renewal, Role, dial_answered

_SIOCGIFCONF = 0x8912  # linux/sockios.h
_IFREQ_BYTES = 40
_MOST_ADDRESSES = 1024


class Fabric(NamedTuple):
    """A network that hosts use."""

    address: str  # of this machine
    interface: str

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


#: No network: what collectives send to other machines goes between their agents, in TLS (collective_tunnels.py).
LINK = Fabric("", "link")


def find_fabric(wanted: str, is_trusted: bool) -> Fabric:
    """This machine's place on a fabric.

    Args:
        wanted: an address of this machine, the name of an interface, a network such as `10.1.0.0/16`, or `link`.
        is_trusted: an address that the internet can reach is meant, because that network is private all the same.

    Raises:
        OptionError: this machine has no such address, or several, or the internet can reach it.
    """
    if wanted == str(LINK):
        return LINK
    there = own_addresses()
    shown = "; ".join(map(str, there))
    if any(fabric.interface == wanted for fabric in there):
        found = [fabric for fabric in there if fabric.interface == wanted]
    else:
        try:
            network = ipaddress.IPv4Network(wanted, strict=False)
        except ValueError:
            raise errors.OptionError(
                f"--fabric takes an IPv4 address of this machine, an interface, a network such as 10.1.0.0/16, or "
                f"link, not {wanted!r}; this machine has {shown}"
            ) from None
        found = [fabric for fabric in there if ipaddress.ip_address(fabric.address) in network]
        if not found and network.is_loopback and network.num_addresses == 1:  # all of them are this machine's
            found = [Fabric(wanted, "lo")]
    if len(found) != 1:
        what = "no address" if not found else f"{len(found)} addresses"
        raise errors.OptionError(
            f"this machine has {what} on the fabric {wanted}: name one of its addresses; it has {shown}"
        )
    fabric = found[0]
    if ipaddress.ip_address(fabric.address).is_global and not is_trusted:
        raise errors.OptionError(
            f"{fabric.address} is a public address, and what goes over the fabric is not encrypted: name a private "
            "network, or say by --trusted-fabric that nobody else is on this one"
        )
    return fabric


def everywhere() -> str:
    """Where to listen for all other machines."""
    return "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"


def own_addresses() -> list[Fabric]:
    """The IPv4 addresses of this machine, with their interfaces. (gloo's own choice is an IPv4 address, too.)"""
    room = array.array("B", bytes(_IFREQ_BYTES * _MOST_ADDRESSES))
    where, length = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        filled = struct.unpack("iL", fcntl.ioctl(asks, _SIOCGIFCONF, struct.pack("iL", length, where)))[0]
    found = []
    for at in range(0, filled, _IFREQ_BYTES):
        entry = bytes(room[at : at + _IFREQ_BYTES])
        interface = entry[:16].partition(b"\0")[0].decode().partition(":")[0]
        found.append(Fabric(socket.inet_ntoa(entry[20:24]), interface))
    return found


def check_neighbour(identity: Identity, hello: Mapping[str, Any], secret: str) -> None:
    """Raises `PermissionDeniedError`: the caller does not know the secret of this island; empty: there is none now."""
    if not secret or not hmac.compare_digest(str(hello.get("secret", "")).encode(), secret.encode()):
        raise errors.PermissionDeniedError(f"{identity.name} is no machine of this island")


def dial_neighbour(
    machine: pb.Neighbours.Machine, credentials: Renewal | None, purpose: str, secret: str, **more: Any
) -> socket.socket:
    """Calls the agent of another machine of this island; `check_neighbour` is its other end. `more`, and what it
    raises: see `dial_answered`.
    """
    connection, _ = dial_answered(
        machine.fabric, credentials, purpose, expects=Role.HOST, machine=machine.name, secret=secret, **more
    )
    return connection
