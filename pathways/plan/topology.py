"""The parts of a cluster as plain data: its hosts and devices, and where a slice lies on them.

Devices have global numbers: `host * devices_per_host + local index`. Hosts are numbered island after island, in the
order in which islands open; a number never changes. So `devices_per_host` is the most that a host may have. Where a
host has fewer, the numbers behind its devices are nobody's. The resource manager, the processes and the clients use
this module; it imports none of them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

#: Platforms by what people call their devices.
_KINDS = {"cuda": "gpu", "rocm": "gpu"}


@dataclasses.dataclass(frozen=True)
class Topology:
    """The physical cluster: the hosts of each island, their devices, and the platform and versions they run."""

    islands: tuple[tuple[int, ...], ...]
    devices_per_host: int  # the most that a host may have
    platform: str = "cpu"  # of islands that do not say another one
    jax_version: str = ""
    jaxlib_version: str = ""
    device_bytes: int = 0  # budget of each device; 0: not known
    machines: tuple[int, ...] = ()  # the machine of each host; empty: all on one
    #: By device number, as far as hosts have said: see `pathways.plan.torus`. Empty: no host has.
    coordinates: tuple[tuple[int, ...], ...] = ()
    device_counts: tuple[int, ...] = ()  # the devices of each host; empty: `devices_per_host` each
    platforms: tuple[str, ...] = ()  # of each island; empty: `platform`
    most_hosts: int = 0  # that it may have one day; 0: those that it has

    @classmethod
    def grid(cls, islands: int, hosts_per_island: int, devices_per_host: int, **what: Any) -> Topology:
        """A topology of islands of equal size. `what` sets the other fields."""
        for name, value in (
            ("islands", islands),
            ("hosts_per_island", hosts_per_island),
            ("devices_per_host", devices_per_host),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        hosts = tuple(tuple(range(i * hosts_per_island, (i + 1) * hosts_per_island)) for i in range(islands))
        return cls(hosts, devices_per_host, **what)

    @functools.cached_property
    def hosts(self) -> int:
        """Number of hosts."""
        return sum(len(hosts) for hosts in self.islands)

    @functools.cached_property
    def devices(self) -> int:
        """Number of devices."""
        return sum(self.device_counts) if self.device_counts else self.hosts * self.devices_per_host

    @property
    def room(self) -> int:
        """How many hosts it may have. By this the native controller numbers what belongs to hosts."""
        return self.most_hosts or self.hosts

    @property
    def may_grow(self) -> bool:
        """Whether islands may be added."""
        return self.room > self.hosts

    @property
    def is_spread(self) -> bool:
        """Whether hosts are, or may come to be, on several machines."""
        return self.may_grow or any(self.machines)

    def opened(self, hosts: int, devices: int, platform: str, machine: int) -> Topology:
        """The same with one island more, of so many hosts with so many devices each."""
        new = tuple(range(self.hosts, self.hosts + hosts))
        return dataclasses.replace(
            self,
            islands=(*self.islands, new),
            machines=(*self.machines, *[machine] * hosts),
            device_counts=(*map(self.count_of, range(self.hosts)), *[devices] * hosts),
            platforms=(*map(self.platform_of, range(len(self.islands))), platform),
        )

    def count_of(self, host: int) -> int:
        """How many devices a host has."""
        return self.device_counts[host] if self.device_counts else self.devices_per_host

    def devices_of(self, host: int) -> range:
        """The numbers of a host's devices."""
        first = host * self.devices_per_host
        return range(first, first + self.count_of(host))

    def has_device(self, number: int) -> bool:
        """Whether a device has this number."""
        host, local = divmod(number, self.devices_per_host)
        return 0 <= host < self.hosts and local < self.count_of(host)

    @property
    def device_numbers(self) -> tuple[int, ...]:
        """The numbers of all devices, ascending."""
        return tuple(number for host in range(self.hosts) for number in self.devices_of(host))

    def say_devices(self) -> str:
        """Which device numbers there are, for messages."""
        if not self.hosts:
            return "no devices as yet"
        last = self.devices_of(self.hosts - 1)[-1]
        return f"devices 0..{last}" if last + 1 == self.devices else f"the {self.devices} devices of cluster.devices"

    def say_hosts(self) -> str:
        """Which hosts there are, for messages."""
        return f"hosts 0..{self.hosts - 1}" if self.hosts else "no hosts as yet"

    def say_islands(self) -> str:
        """Which islands there are, for messages."""
        return f"islands 0..{len(self.islands) - 1}" if self.islands else "no islands as yet"

    def transfer_space(self, host: int) -> int:
        """The memory space of a host's memory for transfers. The spaces of devices, which have their numbers, are
        before those of hosts.
        """
        return self.room * self.devices_per_host + host

    def platform_of(self, island: int) -> str:
        """What the devices of an island are."""
        return self.platforms[island] if self.platforms else self.platform

    def kinds(self) -> tuple[str, ...]:
        """What there are devices of."""
        return tuple(dict.fromkeys(map(self.platform_of, range(len(self.islands)))))

    def is_of_kind(self, island: int, kind: str | None) -> bool:
        """Whether the devices of an island are of a kind: a platform, or "gpu" for whatever maker's; None: any."""
        platform = self.platform_of(island)
        return kind in (None, platform, _KINDS.get(platform))

    def island_of(self, host: int) -> int:
        """The island that `host` belongs to."""
        if not 0 <= host < self.hosts:
            raise ValueError(f"no host {host}: the cluster has {self.say_hosts()}")
        return self.island_of_hosts[host]

    @functools.cached_property
    def island_of_hosts(self) -> tuple[int, ...]:
        """The island of each host."""
        return tuple(island for island, hosts in enumerate(self.islands) for _ in hosts)

    def machine_of(self, host: int) -> int:
        """The machine that `host` is a process of; the controller is on machine 0."""
        return self.machines[host] if self.machines else 0

    def island_devices(self, island: int) -> tuple[int, ...]:
        """Global numbers of an island's devices, host after host: its mesh of hosts x devices, row-major."""
        return tuple(number for host in self.islands[island] for number in self.devices_of(host))

    def hosts_of(self, devices: tuple[int, ...]) -> tuple[int, ...]:
        """The hosts that drive these devices, ascending, each once."""
        return tuple(sorted({device // self.devices_per_host for device in devices}))

    def describe(self) -> str:
        """For example `2 islands x 2 hosts x 4 cpu devices`. Islands that differ are told one kind after the other."""
        kinds = collections.Counter(
            (len(hosts), self.count_of(hosts[0]), self.platform_of(island)) for island, hosts in enumerate(self.islands)
        )
        said = [grid_text(count, hosts, devices, platform) for (hosts, devices, platform), count in kinds.items()]
        # Of an island that agents bring, nobody knows here how many they are: all its hosts have one number, not 0.
        machines = len(set(self.machines)) if 0 in self.machines else 1
        spread = f", on {machines} machines" if machines > 1 else ""
        return (" and ".join(said) or "no islands as yet") + spread


def grid_text(islands: int, hosts: int, devices: int, platform: str) -> str:
    """For example `2 islands x 1 host x 4 cpu devices`."""
    return " x ".join((counted(islands, "island"), counted(hosts, "host"), counted(devices, f"{platform} device")))


def counted(count: int, noun: str) -> str:
    """For example `1 host`, `2 hosts`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclasses.dataclass(frozen=True)
class SliceBinding:
    """Where a slice lies now: `devices[i]` is the physical device of the slice's virtual device i.

    Virtual devices are counted in C order of `shape`. `group` is the controller's number for the group of exactly these
    `hosts`. `space_set` is the controller's number for exactly these `devices`, by which it counts memory.
    """

    slice_id: int
    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    island: int
    devices: tuple[int, ...]
    hosts: tuple[int, ...]
    group: int
    space_set: int = 0
