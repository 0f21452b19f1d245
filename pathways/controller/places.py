"""Which hosts' places an agent gets when it joins: see `machines.py` for what a place is.

An island has a number, and the name that its first agent gave it, if any. It keeps the name when its machines are lost,
so that they find it again, until another name needs an island.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pathways import errors
from pathways.controller.machines import Placement
from pathways.plan.topology import Topology
from pathways.trust.identity import printable

_MOST_NAME = 64  # letters


class Holder(Protocol):
    """An agent that has places, or is about to."""

    name: str
    hosts: tuple[int, ...]


class Places:
    """Owned by the controller's event loop thread."""

    def __init__(self, topology: Topology, placement: Placement) -> None:
        self._topology = topology
        self._placement = placement
        self._names: dict[int, str] = {}  # of islands that were given one

    def name_of(self, island: int) -> str:
        """The name of an island."""
        return self._names.get(island, str(island))

    def take(self, hello: Mapping[str, Any], holders: Sequence[Holder]) -> tuple[int, tuple[int, ...]]:
        """An island for an agent, and the hosts that it may be. `holders`: the agents that are there.

        Raises:
            UnsupportedVersionError: the agent runs another release.
            ConnectError: there is no such place.
        """
        topology = self._topology
        _check_release(hello, topology)
        count = self._checked_count(hello)
        taken = {host: holder.name for holder in holders for host in holder.hosts}
        free = [
            [host for host in hosts if host not in taken and not self._placement.are_filled([host])]
            for hosts in topology.islands
        ]
        size = len(topology.islands[0])
        if count < size and (not hello.get("fabric") or hello.get("island") is None):
            raise errors.ConnectError(
                f"the agent brings {count} of the {size} hosts of an island: start it with --island NAME, the same "
                "for all of the island's machines, and --fabric, the network of their collectives; or with --hosts "
                f"{size}, for an island of its own"
            )
        island = self._island(hello.get("island"), count, free, taken)
        return island, tuple(free[island][:count])

    def _checked_count(self, hello: Mapping[str, Any]) -> int:
        """How many hosts an agent brings."""
        size, each = len(self._topology.islands[0]), self._topology.devices_per_host
        count, ports = hello.get("hosts"), hello.get("ports")
        if not isinstance(ports, list) or not all(isinstance(port, int) and 0 < port < 1 << 16 for port in ports):
            raise errors.ConnectError(f"the agent's ports make no sense: {printable(ports)}")
        if not isinstance(count, int) or not 0 < count <= size or hello.get("devices_per_host") != each:
            raise errors.ConnectError(
                f"the agent brings {_number(count)} hosts of {_number(hello.get('devices_per_host'))} devices, but an "
                f"island of this cluster has {size} hosts of {each} devices: start the agent with --hosts {size} "
                f"--devices-per-host {each}"
            )
        if len(ports) != count:
            raise errors.ConnectError(f"the agent has {len(ports)} ports for {count} hosts")
        return count

    def _island(self, asked: Any, count: int, free: Sequence[Sequence[int]], taken: Mapping[int, str]) -> int:
        whole = [number for number, hosts in enumerate(self._topology.islands) if len(free[number]) == len(hosts)]
        unnamed = [number for number in whole if number not in self._names]
        number = None if asked is None else self._number_of(asked)
        if number is not None:
            if len(free[number]) >= count:
                return number
            raise errors.ConnectError(
                f"island {printable(asked)} has places for {len(free[number])} hosts, and the agent brings {count}: "
                f"the others are taken by {self._told(taken, number)}"
            )
        if unnamed or whole:
            return self._named(asked, (unnamed or whole)[0])
        raise errors.ConnectError(
            f"no place is free for {'the agent' if asked is None else f'an island {printable(asked)}'}: the cluster "
            f"has {len(free)} islands, taken by {self._told(taken)}"
        )

    def _number_of(self, asked: Any) -> int | None:
        """The island of that number or name; None: there is none of that name."""
        if not isinstance(asked, str) or len(asked) > _MOST_NAME:
            raise errors.ConnectError(f"the island {printable(asked)} is no name")
        if asked.isdecimal() and asked.isascii():
            if int(asked) >= len(self._topology.islands):
                raise errors.ConnectError(
                    f"no island {asked}: the cluster has islands 0..{len(self._topology.islands) - 1}"
                )
            return int(asked)
        return next((number for number, name in self._names.items() if name == asked), None)

    def _named(self, name: str | None, island: int) -> int:
        self._names.pop(island, None)
        if name is not None:
            self._names[island] = name
        return island

    def _told(self, taken: Mapping[int, str], island: int | None = None) -> str:
        """Who has places, for people."""
        islands = range(len(self._topology.islands)) if island is None else [island]
        found = {
            self.name_of(number): sorted({taken[host] for host in self._topology.islands[number] if host in taken})
            for number in islands
        }
        return "; ".join(f"{name}: {', '.join(names) or 'nobody'}" for name, names in found.items())


def _check_release(hello: Mapping[str, Any], topology: Topology) -> None:
    for what, ours in (
        ("jax", topology.jax_version),
        ("jaxlib", topology.jaxlib_version),
        ("platform", topology.platform),
    ):
        if hello.get(what) != ours:
            raise errors.UnsupportedVersionError(
                f"the agent has {what} {printable(hello.get(what))}, the cluster {ours!r}: use the same on both sides"
            )


def _number(said: Any) -> str:
    """For a message: what should be a small number, and may be anything."""
    return str(said) if isinstance(said, int) and abs(said) < 1 << 31 else printable(said)
