"""Which hosts' places an agent gets when it joins: see `machines.py` for what a place is.

An island has a number, and the name that its first agent gave it, if any. It keeps the name when its machines are lost,
so that they find it again, until another name needs an island.

A cluster with a fixed shape has all its islands from the start. Without one, an agent opens an island when no free one
is as it needs it: the first agent says how many hosts the island has, how many devices each of them has, and what they
are. The island keeps this shape, because slices may lie there. A free one of the same shape is taken again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

from pathways import errors
from pathways.controller.machines import Placement
from pathways.plan.topology import Topology
from pathways.process.config import MOST_HOSTS, ClusterOptions
from pathways.process.environment import PLATFORMS
from pathways.trust.identity import printable

_MOST_NAME = 64  # letters


class Holder(Protocol):
    """An agent that has places, or is about to."""

    name: str
    hosts: tuple[int, ...]


class Shape(Protocol):
    """The islands of a cluster."""

    @property
    def topology(self) -> Topology:
        """Those of now."""

    def open_island(self, hosts: int, devices: int, platform: str) -> int:
        """Opens one more, and returns its number."""


@dataclasses.dataclass(frozen=True)
class _Brought:
    """What an agent brings."""

    hosts: int
    devices: int  # of each host
    platform: str
    island_hosts: int | None  # what it says of its island; None: nothing


class Places:
    """Owned by the controller's event loop thread."""

    def __init__(self, shape: Shape, placement: Placement, options: ClusterOptions) -> None:
        self._shape = shape
        self._placement = placement
        self._options = options
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
        _check_release(hello, self._shape.topology)
        brought = self._checked(hello)
        if 0 < self._options.max_machines <= len(holders):
            raise errors.ConnectError(
                f"{len(holders)} machines have joined, which is the most that the cluster takes: start it with a "
                "greater --max-machines"
            )
        asked = self._asked(hello.get("island"))
        named = None if asked is None else self._number_of(asked)
        size = brought.hosts if named is None else len(self._shape.topology.islands[named])
        size = self._size(brought, size)
        if brought.hosts < size and (not hello.get("fabric") or asked is None):
            raise errors.ConnectError(
                f"the agent brings {brought.hosts} of the {size} hosts of an island: start it with --island NAME, the "
                "same for all of the island's machines, and --fabric, the network of their collectives; or with "
                f"--hosts {size}, for an island of its own"
            )
        taken = {host: holder.name for holder in holders for host in holder.hosts}
        island = self._new(asked, size, brought, taken) if named is None else self._known(named, brought, taken)
        return island, tuple(self._free(island, taken)[: brought.hosts])

    # -- what the agent says -----------------------------------------------------------------------------------------

    def _checked(self, hello: Mapping[str, Any]) -> _Brought:
        count: Any = hello.get("hosts")
        each: Any = hello.get("devices_per_host")
        ports = hello.get("ports")
        platform, island_hosts = hello.get("platform"), hello.get("island_hosts")
        options = self._options
        if not isinstance(ports, list) or not all(isinstance(port, int) and 0 < port < 1 << 16 for port in ports):
            raise errors.ConnectError(f"the agent's ports make no sense: {printable(ports)}")
        said = f"the agent brings {_number(count)} hosts of {_number(each)} devices"
        makes_sense = all(map(_is_count, (count, each, island_hosts or 1)))
        if options.max_machines and platform not in PLATFORMS:
            raise errors.ConnectError(
                f"the agent's platform is {printable(platform)}, not one of {', '.join(PLATFORMS)}"
            )
        if options.max_machines and not makes_sense:
            raise errors.ConnectError(f"{said}, of an island of {_number(island_hosts)} hosts: that makes no sense")
        if options.max_machines and each > options.devices_per_host:
            raise errors.ConnectError(
                f"{said}, but a host of this cluster has {options.devices_per_host} at most: start more hosts with "
                "fewer devices, or the cluster with a greater --max-devices-per-host"
            )
        if not options.max_machines and not (
            makes_sense and count <= options.hosts_per_island and each == options.devices_per_host
        ):
            shape = f"--hosts {options.hosts_per_island} --devices-per-host {options.devices_per_host}"
            raise errors.ConnectError(
                f"{said}, but an island of this cluster has {options.hosts_per_island} hosts of "
                f"{options.devices_per_host} devices: start the agent with {shape}"
            )
        if len(ports) != count:
            raise errors.ConnectError(f"the agent has {len(ports)} ports for {count} hosts")
        return _Brought(count, each, str(platform), island_hosts)

    def _asked(self, asked: Any) -> str | None:
        """The number or the name of the island that it wants; None: any."""
        if asked is not None and (not isinstance(asked, str) or len(asked) > _MOST_NAME):
            raise errors.ConnectError(f"the island {printable(asked)} is no name")
        return asked

    def _number_of(self, asked: str) -> int | None:
        """The island of that number or name; None: there is none of that name."""
        count = len(self._shape.topology.islands)
        if asked.isdecimal() and asked.isascii():
            if int(asked) >= count:
                raise errors.ConnectError(f"no island {asked}: the cluster has {self._shape.topology.say_islands()}")
            return int(asked)
        return next((number for number, name in self._names.items() if name == asked), None)

    def _size(self, brought: _Brought, size: int) -> int:
        """How many hosts the island has, if it has `size` when the agent says nothing."""
        fixed = 0 if self._options.max_machines else self._options.hosts_per_island
        said = brought.island_hosts
        if said is not None and said < brought.hosts:
            raise errors.ConnectError(
                f"the agent brings {brought.hosts} hosts, and says --island-hosts {said}, which counts the island's "
                "hosts on all of its machines"
            )
        if fixed and said not in (None, fixed):
            raise errors.ConnectError(
                f"the agent says --island-hosts {said}, but an island of this cluster has {fixed} hosts: leave it out"
            )
        return said or fixed or size

    # -- islands -----------------------------------------------------------------------------------------------------

    def _free(self, island: int, taken: Mapping[int, str]) -> list[int]:
        hosts = self._shape.topology.islands[island]
        return [host for host in hosts if host not in taken and not self._placement.are_filled([host])]

    def _known(self, island: int, brought: _Brought, taken: Mapping[int, str]) -> int:
        """An island that the agent has named, if it fits there."""
        topology, name = self._shape.topology, printable(self.name_of(island))
        hosts = topology.islands[island]
        kind, theirs = topology.platform_of(island), topology.count_of(hosts[0])
        if (brought.devices, brought.platform) != (theirs, kind):
            raise errors.ConnectError(
                f"the agent brings hosts of {brought.devices} {printable(brought.platform)} devices, but the hosts of "
                f"island {name} have {theirs} {kind} devices, as its first agent said"
            )
        if brought.island_hosts not in (None, len(hosts)):
            raise errors.ConnectError(
                f"the agent says --island-hosts {brought.island_hosts}, but island {name} has {len(hosts)} hosts, as "
                "its first agent said"
            )
        if brought.hosts > len(hosts):
            raise errors.ConnectError(
                f"the agent brings {brought.hosts} hosts, but island {name} has {len(hosts)}, as its first agent said"
            )
        free = len(self._free(island, taken))
        if free < brought.hosts:
            raise errors.ConnectError(
                f"island {name} has places for {free} hosts, and the agent brings {brought.hosts}: the others are "
                f"taken by {self._told(taken, island)}"
            )
        return island

    def _new(self, name: str | None, size: int, brought: _Brought, taken: Mapping[int, str]) -> int:
        """A whole island: a free one of this shape, of those without a name first, or one that is opened."""
        topology, wanted = self._shape.topology, (size, brought.devices, brought.platform)
        whole = [
            number
            for number, hosts in enumerate(topology.islands)
            if (len(hosts), topology.count_of(hosts[0]), topology.platform_of(number)) == wanted
            and len(self._free(number, taken)) == size
        ]
        unnamed = [number for number in whole if number not in self._names]
        has_room = topology.hosts + size <= topology.room
        if unnamed or (whole and not has_room):
            island = (unnamed or whole)[0]
        elif has_room:
            island = self._shape.open_island(*wanted)
        else:
            self._refuse(name, size, taken)
        self._names.pop(island, None)
        if name is not None:
            self._names[island] = name
        return island

    def _refuse(self, name: str | None, size: int, taken: Mapping[int, str]) -> NoReturn:
        topology, what = self._shape.topology, "the agent" if name is None else f"an island {printable(name)}"
        if self._options.max_machines:
            raise errors.ConnectError(
                f"no room for {what} with {size} hosts: the cluster has opened places for {topology.hosts} of at most "
                f"{topology.room} hosts, and free ones have another shape. Start it with a greater --max-machines"
            )
        raise errors.ConnectError(
            f"no place is free for {what}: the cluster has {len(topology.islands)} islands, taken by "
            f"{self._told(taken)}"
        )

    def _told(self, taken: Mapping[int, str], island: int | None = None) -> str:
        """Who has places, for people."""
        every = self._shape.topology.islands
        found = {
            self.name_of(number): sorted({taken[host] for host in every[number] if host in taken})
            for number in (range(len(every)) if island is None else [island])
        }
        return "; ".join(f"{name}: {', '.join(names) or 'nobody'}" for name, names in found.items())


def _check_release(hello: Mapping[str, Any], topology: Topology) -> None:
    fixed = () if topology.most_hosts else (("platform", topology.platform),)
    for what, ours in (("jax", topology.jax_version), ("jaxlib", topology.jaxlib_version), *fixed):
        if hello.get(what) != ours:
            raise errors.UnsupportedVersionError(
                f"the agent has {what} {printable(hello.get(what))}, the cluster {ours!r}: use the same on both sides"
            )


def _is_count(said: Any) -> bool:
    return isinstance(said, int) and not isinstance(said, bool) and 0 < said <= MOST_HOSTS


def _number(said: Any) -> str:
    """For a message: what should be a small number, and may be anything."""
    return str(said) if isinstance(said, int) and abs(said) < 1 << 31 else printable(said)
