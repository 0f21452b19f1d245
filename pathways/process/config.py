"""The configuration of a local cluster. Its processes receive it as JSON on their command lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

# Increase it with every change that an older client or host would misread.
PROTOCOL_VERSION = 18


#: How a cluster decides which client's run is next, and what that means.
POLICIES = {
    "share": "clients share device time by weight",
    "priority": "a higher priority goes first; clients of equal priority share by weight",
    "fifo": "what comes first runs first",
}


#: What becomes of work that other clients' arrays leave no device memory for.
WHEN_FULL = {
    "refuse": "it fails",
    "suspend": "those clients are suspended, idle ones first, and brought back when they have work",
}


def check_rules(policy: str, when_full: str) -> None:
    """Raises:
    ValueError: there is no such policy, or no such answer to full memory.
    """
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"policy is one of {', '.join(map(repr, POLICIES))}, got {policy!r}")
    if not isinstance(when_full, str) or when_full not in WHEN_FULL:
        raise ValueError(f"when_full is one of {', '.join(map(repr, WHEN_FULL))}, got {when_full!r}")


#: Stands for a client's name in `ClusterOptions.checkpoint_root`.
BY_CLIENT = "{client}"

#: In a cluster without a fixed shape there is room for so many hosts for each machine that may join.
HOSTS_PER_MACHINE = 4
#: Of any cluster, and of any host: see csrc/messages/ready_bitmap.h and csrc/plan/plan.h.
MOST_HOSTS, MOST_DEVICES = 1 << 16, 64
#: In a cluster without a fixed shape: machines that may join, and devices that a host may have, unless it says others.
MAX_MACHINES, MAX_DEVICES_PER_HOST = 4096, 16

#: The function that starts the JAX backend of a host.
JAX_DRIVER = "pathways.host.main:start_jax_driver"


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """Shape, platform and sizes of a local cluster.

    A cluster without a fixed shape (`max_machines`) begins with no islands: agents open them. Then `devices_per_host`
    is the most that a host may have.

    A segment is as large as the most it may ever hold; the kernel gives memory only to the pages that are touched.
    `device_memory` is the budget of each device in bytes; None: the memory that the device reports, on CPU its share of
    the machine's memory. `transfer_memory` is the budget of each host's arena, which holds the receive buffers of
    transfers. `native` and `driver` name the code that the processes run (`module` and `module:function`); tests name
    doubles.
    """

    islands: int = 1
    hosts_per_island: int = 1
    devices_per_host: int = 1
    platform: str | None = None
    start_timeout_s: float = 180.0
    host_ring_bytes: int = 1 << 20
    device_memory: int | None = None
    transfer_memory: int | None = None
    machines: int = 1  # over which the hosts are spread, the same number on each
    max_machines: int = 0  # so many may join, with islands of their own; 0: the shape is fixed
    policy: str = "share"  # a key of POLICIES
    when_full: str = "refuse"  # a key of WHEN_FULL
    #: The folder where checkpoints lie, with "{client}" for the client's name; None: anywhere.
    checkpoint_root: str | None = None
    #: What the operator allows every client: see pathways.process.client_terms. None: no bound.
    client_memory: int | None = None
    client_runs: int | None = None
    max_weight: float | None = None
    max_priority: int | None = None
    distance_us: int = 0  # for measurement: added delay of each record between controller and hosts
    native: str = "pathways._native"
    driver: str = JAX_DRIVER

    @property
    def transfer_bytes(self) -> int:
        """The budget of a host's memory for transfers."""
        return self.transfer_memory or 1 << 30

    @property
    def host_arena_bytes(self) -> int:
        """The size of a host's arena: twice the budget, so that free memory is found in one block. Untouched pages cost
        nothing.
        """
        return 2 * self.transfer_bytes + (1 << 20)

    @property
    def host_modules(self) -> list[str]:
        """What every host process imports."""
        modules = ["pathways.host.main", self.native, self.driver.partition(":")[0]]
        return [*modules, "pathways.host.jax_host"] if self.driver == JAX_DRIVER else modules

    @property
    def hosts(self) -> int:
        """Number of host processes that the shape says."""
        return self.islands * self.hosts_per_island

    @property
    def room(self) -> int:
        """How many hosts the cluster may ever have."""
        return min(MOST_HOSTS, HOSTS_PER_MACHINE * self.max_machines) if self.max_machines else self.hosts

    @property
    def machine_of_hosts(self) -> tuple[int, ...]:
        """The machine of each host.

        Raises:
            ValueError: the hosts do not divide among the machines, or a number is no positive int.
        """
        for name in ("islands", "hosts_per_island", "machines"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} must be a positive int, got {count!r}")
        if self.hosts % self.machines:
            raise ValueError(f"{self.hosts} hosts cannot be spread over {self.machines} machines, as many on each")
        return tuple(host * self.machines // self.hosts for host in range(self.hosts))


@dataclasses.dataclass(frozen=True)
class ClientSizes:
    """The sizes of a client's own segment, which the client makes itself."""

    futures: int = 1 << 16
    ring_bytes: int = 1 << 20
    arena_bytes: int = 1 << 30


@dataclasses.dataclass(frozen=True)
class ControllerConfig:
    """The configuration of the controller process. It inherits the descriptors."""

    options: ClusterOptions
    platform: str
    directory: str
    owner_pid: int
    owner_fd: int
    report_fd: int
    listen: str = ""  # where agents of other machines may join, `HOST:PORT`; empty: nowhere, all hosts are here
    authority: str = ""  # the folder of the cluster's authority; empty: in the cluster's directory
    insecure_plaintext: bool = False  # nothing between machines is encrypted


@dataclasses.dataclass(frozen=True)
class HostConfig:
    """The configuration of a host process, which gets the descriptors under other numbers: see `with_fds`.

    `options` are those of the cluster. `island`: the hosts of its island, ascending, each of which has `device_count`
    devices. `coordinator` is empty on an island of one host. `segment_fds` has -1 for a host that is lost now; an agent
    that starts the host sets them. `segment_fds`, `streams` and `epochs` may end before the last host that the cluster
    has room for: then the others are not there. For the successor of a
    lost host, `predecessor_failure` is the failure reason of the loss, and `predecessor_client` is the number of the
    youngest client at the loss.
    """

    host: int
    options: ClusterOptions
    platform: str = ""
    address: str = ""
    coordinator: str = ""
    island: tuple[int, ...] = ()
    device_count: int = 1
    fabric: str = "127.0.0.1"  # the address of this machine that collectives of its hosts use
    #: The agent's Unix socket where it says at which ports those of its island listen; empty: nobody needs to know.
    tell_ports: str = ""
    parent: int = 0
    controller_fd: int = -1
    segment_fds: tuple[int, ...] = ()
    socket_fd: int = -1
    incarnation: int = 0
    predecessor_failure: str = ""
    predecessor_client: int = 0
    machine: int = 0
    stream: str = ""  # address where it receives network transfers; empty: there is only one machine
    #: That address of each host, behind `MACHINE@` if machines are real; None: on this machine; empty: lost now.
    streams: tuple[str | None, ...] = ()
    #: The incarnation of each host, which records between hosts name; -1: it is not there now.
    epochs: tuple[int, ...] = ()
    is_linked: bool = False  # its machine has an agent, and a link to the controller's
    credentials: str = ""  # the folder of the credentials for network transfers; empty: they are not encrypted

    @property
    def rank(self) -> int:
        """The host's place in its island."""
        return self.island.index(self.host)

    @property
    def hosts_here(self) -> int:
        """How many hosts share its machine's memory: on a machine with an agent, the agent's; else all."""
        return self.streams.count(None) if self.is_linked else self.options.hosts

    @property
    def devices(self) -> range:
        """Global numbers of this host's devices."""
        first = self.host * self.options.devices_per_host
        return range(first, first + self.device_count)

    @property
    def fds(self) -> tuple[int, ...]:
        """Every descriptor that the host process gets."""
        return (self.socket_fd, self.controller_fd, *(fd for fd in self.segment_fds if fd >= 0))

    def with_fds(self, fds: Sequence[int]) -> HostConfig:
        """The same for a process in which the descriptors of `self.fds` have the numbers `fds`."""
        number_of = dict(zip(self.fds, fds, strict=True))
        return dataclasses.replace(
            self,
            socket_fd=number_of[self.socket_fd],
            controller_fd=number_of[self.controller_fd],
            segment_fds=tuple(number_of.get(fd, -1) for fd in self.segment_fds),
        )


def dump(config: ControllerConfig | HostConfig) -> str:
    """The configuration as one line of JSON."""
    return json.dumps(dataclasses.asdict(config))


def load_controller(text: str) -> ControllerConfig:
    """What `dump` wrote."""
    fields: dict[str, Any] = json.loads(text)
    return ControllerConfig(**{**fields, "options": ClusterOptions(**fields["options"])})


def load_host(text: str) -> HostConfig:
    """What `dump` wrote."""
    fields: dict[str, Any] = json.loads(text)
    lists = {name: tuple(fields[name]) for name in ("island", "segment_fds", "streams", "epochs")}
    return HostConfig(**{**fields, **lists, "options": ClusterOptions(**fields["options"])})
