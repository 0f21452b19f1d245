"""The parts of a cluster as plain data: its hosts and devices, and where a slice lies on them.

Devices have global numbers: `host * devices_per_host + local index`. Hosts are numbered island after island. The
resource manager, the processes and the clients use this module; it imports none of them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


@dataclasses.dataclass(frozen=True)
class Topology:
    """The physical cluster: the hosts of each island, the devices per host, and the platform and versions they run."""

    islands: tuple[tuple[int, ...], ...]
    devices_per_host: int
    platform: str = "cpu"
    jax_version: str = ""
    jaxlib_version: str = ""
    device_bytes: int = 0  # budget of each device; 0: not known
    machines: tuple[int, ...] = ()  # the machine of each host; empty: all on one
    #: Of each device, as far as hosts have said: see `pathways.plan.torus`. Empty: no host has.
    coordinates: tuple[tuple[int, ...], ...] = ()

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

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.hosts * self.devices_per_host

    def island_of(self, host: int) -> int:
        """The island that `host` belongs to."""
        if not 0 <= host < self.hosts:
            raise ValueError(f"no host {host}: the cluster has hosts 0..{self.hosts - 1}")
        return self.island_of_hosts[host]

    @functools.cached_property
    def island_of_hosts(self) -> tuple[int, ...]:
        """The island of each host."""
        return tuple(island for island, hosts in enumerate(self.islands) for _ in hosts)

    def machine_of(self, host: int) -> int:
        """The machine that `host` is a process of; the controller is on machine 0."""
        return self.machines[host] if self.machines else 0

    def island_devices(self, island: int) -> tuple[int, ...]:
        """Global numbers of an island's devices, host after host: its mesh of hosts x devices per host, row-major."""
        each = self.devices_per_host
        return tuple(host * each + local for host in self.islands[island] for local in range(each))

    def hosts_of(self, devices: tuple[int, ...]) -> tuple[int, ...]:
        """The hosts that drive these devices, ascending, each once."""
        return tuple(sorted({device // self.devices_per_host for device in devices}))

    def describe(self) -> str:
        """For example `2 islands x 2 hosts x 4 cpu devices`."""
        sizes = sorted({len(hosts) for hosts in self.islands})
        span = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"
        machines = max(self.machines, default=0) + 1
        spread = f", on {machines} machines" if machines > 1 else ""
        return f"{len(self.islands)} islands x {span} hosts x {self.devices_per_host} {self.platform} devices{spread}"


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
