"""The configuration of a local cluster. Its processes receive it as JSON on their command lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

# Increase it with every change that an older client or host would misread.
PROTOCOL_VERSION = 17


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

#: The function that starts the JAX backend of a host.
JAX_DRIVER = "pathways.host.main:start_jax_driver"


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """Shape, platform and sizes of a local cluster.

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
        """Number of host processes."""
        return self.islands * self.hosts_per_island

    @property
    def island_of_hosts(self) -> tuple[int, ...]:
        """The island of each host."""
        return tuple(host // self.hosts_per_island for host in range(self.hosts))

    def island_hosts(self, host: int) -> tuple[int, ...]:
        """The hosts of a host's island."""
        first = host - host % self.hosts_per_island
        return tuple(range(first, first + self.hosts_per_island))

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

    `options` are those of the cluster. `coordinator` is empty on an island of one host.
    `segment_fds` has -1 for a host that is lost now; an agent that starts the host sets them. For the successor of a
    lost host, `predecessor_failure` is the failure reason of the loss, and `predecessor_client` is the number of the
    youngest client at the loss.
    """

    host: int
    options: ClusterOptions
    platform: str = ""
    address: str = ""
    coordinator: str = ""
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
        return self.host % self.options.hosts_per_island

    @property
    def devices(self) -> range:
        """Global numbers of this host's devices."""
        each = self.options.devices_per_host
        return range(self.host * each, (self.host + 1) * each)

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
    lists = {name: tuple(fields[name]) for name in ("segment_fds", "streams", "epochs")}
    return HostConfig(**{**fields, **lists, "options": ClusterOptions(**fields["options"])})
