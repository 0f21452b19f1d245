"""Every metric of a cluster: its name, type, labels and meaning, and how it is read from a cluster's statistics.

Names follow Prometheus' conventions: base units, `_total` for what only grows. Labels are bounded: there is no number
of a client or a run in any, and clients are told apart by their names (`client_labels.py`). docs/observing.md shows
this table; a test compares the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

from pathways.monitoring.client_labels import ClientLabels
from pathways.protocol import control_pb2 as pb


@dataclasses.dataclass(frozen=True)
class Look:
    """What metrics are read from: a cluster's statistics, and how its clients are called."""

    stats: pb.StatsReply
    clients: ClientLabels


Sample = tuple[tuple[str, ...], float]  # the values of the labels, and the value
Samples = Iterator[Sample]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric. `read` gives its samples; those with the same labels are summed up."""

    name: str
    kind: Literal["counter", "gauge"]
    meaning: str
    labels: tuple[str, ...]
    read: Callable[[Look], Samples]

    @property
    def unit(self) -> str:
        """The base unit that the name has, for people and for OpenTelemetry; empty: it counts something."""
        words = self.name.split("_")
        return next((unit for unit in ("seconds", "bytes") if unit in words), "")


_HOST = ("host", "island", "machine")
_DEVICE = ("device", "host", "island")
_MACHINE = ("machine", "island")


def _of_cluster(
    name: str, kind: Literal["counter", "gauge"], meaning: str, of: Callable[[pb.StatsReply], float]
) -> Metric:
    return Metric(name, kind, meaning, (), lambda look: iter([((), of(look.stats))]))


def _of_hosts(
    name: str, kind: Literal["counter", "gauge"], meaning: str, of: Callable[[pb.HostStats], float]
) -> Metric:
    def read(look: Look) -> Samples:
        for host in look.stats.hosts:
            yield (str(host.host), str(host.island), host.machine_name), of(host)

    return Metric(name, kind, meaning, _HOST, read)


def _of_counts(
    name: str, kind: Literal["counter", "gauge"], meaning: str, of: Callable[[pb.HostCounts], float]
) -> Metric:
    """Of hosts that have answered."""

    def read(look: Look) -> Samples:
        for host in look.stats.hosts:
            if host.HasField("counts"):
                yield (str(host.host), str(host.island), host.machine_name), of(host.counts)

    return Metric(name, kind, meaning, _HOST, read)


def _of_devices(name: str, meaning: str, of: Callable[[pb.HostCounts.Memory.Device], float | None]) -> Metric:
    def read(look: Look) -> Samples:
        for host in look.stats.hosts:
            for device, memory in zip(host.devices, host.counts.memory.devices, strict=False):
                if (value := of(memory)) is not None:
                    yield (str(device), str(host.host), str(host.island)), value

    return Metric(name, "gauge", meaning, _DEVICE, read)


def _of_clients(name: str, meaning: str, of: Callable[[pb.ClientStats], float]) -> Metric:
    def read(look: Look) -> Samples:
        for client in look.stats.clients:
            yield (look.clients.label(client.client),), of(client)

    return Metric(name, "gauge", meaning, ("client",), read)


def _of_machines(
    name: str, kind: Literal["counter", "gauge"], meaning: str, of: Callable[[pb.MachineStats], float | None]
) -> Metric:
    def read(look: Look) -> Samples:
        for machine in look.stats.machines:
            if (value := of(machine)) is not None:
                yield (machine.name, machine.island_name), value

    return Metric(name, kind, meaning, _MACHINE, read)


def _info(look: Look) -> Samples:
    topology = look.stats.topology
    yield (topology.jax_version, topology.jaxlib_version, topology.platform), 1.0


def _busy(look: Look) -> Samples:
    where = {device: (str(host.host), str(host.island)) for host in look.stats.hosts for device in host.devices}
    for (label, device), seconds in look.clients.busy_seconds():
        if device in where:
            yield (str(device), *where[device], label), seconds


def _slices(look: Look) -> Samples:
    for host in look.stats.hosts:
        for device in host.devices:
            if device < len(look.stats.device_load):
                yield (str(device), str(host.host), str(host.island)), look.stats.device_load[device]


def _hosts(look: Look) -> Samples:
    for state in ("up", "starting", "lost"):
        yield (state,), sum(host.state == state for host in look.stats.hosts)


def _memory_of_clients(look: Look) -> Samples:
    for host in look.stats.hosts:
        for account in host.counts.memory.accounts:
            yield (look.clients.label(account.client), str(host.host), str(host.island)), account.bytes


def _queues(look: Look) -> Samples:
    controller = look.stats.controller
    yield ("order",), controller.waiting
    yield ("memory",), controller.held
    yield ("hosts",), sum(host.counts.live_runs for host in look.stats.hosts)


def _compiling(counts: pb.HostCounts) -> float:
    done, of = counts.compiling or (0, 0)
    return of - done


METRICS = (
    Metric(
        "pathways_cluster_info",
        "gauge",
        "Always 1; the labels say what the cluster runs.",
        ("jax", "jaxlib", "platform"),
        _info,
    ),
    _of_cluster("pathways_uptime_seconds", "gauge", "Time since the cluster's start.", lambda s: s.uptime_s),
    # Devices.
    Metric(
        "pathways_device_busy_seconds_total",
        "counter",
        "Time in which a device computed for a client, from the end of each computation on.",
        (*_DEVICE, "client"),
        _busy,
    ),
    _of_devices("pathways_device_memory_bytes", "Memory of a device in use.", lambda d: d.bytes),
    _of_devices(
        "pathways_device_memory_high_water_bytes",
        "The most that was in use since the host's start.",
        lambda d: d.high_water,
    ),
    _of_devices(
        "pathways_device_memory_limit_bytes",
        "The budget of a device; missing: it has none.",
        lambda d: d.limit if d.HasField("limit") else None,
    ),
    Metric("pathways_device_slices", "gauge", "Slices that lie on a device.", _DEVICE, _slices),
    # Clients.
    Metric(
        "pathways_client_memory_bytes",
        "gauge",
        "Memory that a client has on the devices of a host.",
        ("client", "host", "island"),
        _memory_of_clients,
    ),
    _of_clients("pathways_client_connections", "Connected clients of this name.", lambda c: 1),
    _of_clients(
        "pathways_client_memory_quota_bytes",
        "What a client may have on each device; 0: no limit.",
        lambda c: c.limits.memory,
    ),
    _of_clients(
        "pathways_client_runs_under_way", "Runs that a client has submitted and that are not over.", lambda c: c.runs
    ),
    _of_clients(
        "pathways_client_records_held",
        "Records of a client that wait for memory, or behind one that does.",
        lambda c: c.held,
    ),
    _of_clients("pathways_client_waiting", "1: the client's next run waits for its turn.", lambda c: c.is_waiting),
    _of_clients("pathways_client_suspended", "1: the client is suspended.", lambda c: c.suspended),
    _of_clients("pathways_client_slices", "Slices of a client.", lambda c: c.slices),
    _of_clients("pathways_client_programs", "Programs of a client.", lambda c: c.programs),
    _of_clients("pathways_client_weight", "Weight of a client, against the others' weights.", lambda c: c.weight),
    # The order.
    Metric(
        "pathways_queue_runs",
        "gauge",
        "Runs and commands by where they wait: in the order, held back for memory, or on hosts.",
        ("queue",),
        _queues,
    ),
    _of_cluster(
        "pathways_clients_unread", "gauge", "Clients with too much under way to be read.", lambda s: s.controller.unread
    ),
    _of_cluster("pathways_runs_total", "counter", "Runs that clients have submitted.", lambda s: s.controller.runs),
    _of_cluster(
        "pathways_runs_granted_total", "counter", "Runs that went to their hosts.", lambda s: s.controller.granted
    ),
    _of_cluster("pathways_runs_retired_total", "counter", "Runs that are over.", lambda s: s.controller.retired),
    _of_cluster(
        "pathways_runs_dropped_total",
        "counter",
        "Runs that were cancelled, or too late, before their hosts got them.",
        lambda s: s.controller.dropped,
    ),
    _of_cluster(
        "pathways_runs_late_total",
        "counter",
        "Runs that were not over when their deadline passed.",
        lambda s: s.controller.late,
    ),
    _of_cluster(
        "pathways_runs_refused_total",
        "counter",
        "Runs and puts that failed because there was no memory for them.",
        lambda s: s.controller.refused,
    ),
    _of_cluster(
        "pathways_commands_total",
        "counter",
        "Puts, fetches, releases and tasks in the order.",
        lambda s: s.controller.commands,
    ),
    _of_cluster(
        "pathways_controller_resident_bytes",
        "gauge",
        "Resident memory of the controller's process.",
        lambda s: s.controller.resident_bytes,
    ),
    # Hosts.
    Metric("pathways_hosts", "gauge", "Hosts by state.", ("state",), _hosts),
    _of_hosts("pathways_host_up", "gauge", "1: the host is in the order.", lambda h: h.state == "up"),
    _of_hosts("pathways_host_restarts_total", "counter", "How often the host was started again.", lambda h: h.restarts),
    _of_hosts("pathways_host_drained", "gauge", "1: the host takes no slices.", lambda h: h.is_drained),
    _of_hosts(
        "pathways_host_resident_bytes", "gauge", "Resident memory of the host's process.", lambda h: h.resident_bytes
    ),
    _of_counts(
        "pathways_host_shared_memory_bytes",
        "gauge",
        "Shared memory in use for transfers and results.",
        lambda c: c.arena_bytes,
    ),
    _of_counts("pathways_host_launches_total", "counter", "Computations that the host launched.", lambda c: c.launches),
    _of_counts("pathways_host_transfers_total", "counter", "Transfers that the host sent.", lambda c: c.transfers),
    _of_counts(
        "pathways_host_sent_bytes_total", "counter", "Bytes that the host sent to other hosts.", lambda c: c.bytes_sent
    ),
    _of_counts("pathways_host_programs", "gauge", "Programs that the host knows.", lambda c: c.programs),
    _of_counts("pathways_compilations_total", "counter", "Computations that the host compiled.", lambda c: c.compiles),
    _of_counts(
        "pathways_compile_seconds_total", "counter", "Time for which the host compiled.", lambda c: c.compile_seconds
    ),
    _of_counts(
        "pathways_compile_cache_hits_total",
        "counter",
        "Executables that were kept, and not compiled again.",
        lambda c: c.compile_cache_hits,
    ),
    _of_counts(
        "pathways_compilations_pending", "gauge", "Computations that the host compiles, or is about to.", _compiling
    ),
    _of_counts(
        "pathways_checkpoint_written_bytes_total",
        "counter",
        "Bytes of checkpoints that the host wrote.",
        lambda c: c.checkpoint_bytes_written,
    ),
    _of_counts(
        "pathways_checkpoint_read_bytes_total",
        "counter",
        "Bytes of checkpoints that the host read.",
        lambda c: c.checkpoint_bytes_read,
    ),
    # Losses, and links to other machines.
    _of_cluster(
        "pathways_hosts_lost_total",
        "counter",
        "Hosts that were lost; all of an island are lost together.",
        lambda s: s.losses.hosts,
    ),
    _of_cluster(
        "pathways_machines_lost_total",
        "counter",
        "Machines that were lost. One that was drained was not.",
        lambda s: s.losses.machines,
    ),
    _of_cluster("pathways_machines", "gauge", "Machines that have joined.", lambda s: len(s.machines)),
    _of_machines(
        "pathways_link_sent_bytes_total",
        "counter",
        "Bytes from the controller's machine to this one.",
        lambda m: m.bytes_out,
    ),
    _of_machines(
        "pathways_link_received_bytes_total",
        "counter",
        "Bytes from this machine to the controller's.",
        lambda m: m.bytes_in,
    ),
    _of_machines(
        "pathways_link_waiting_bytes",
        "gauge",
        "Bytes that wait at the controller for this machine.",
        lambda m: m.kept_bytes,
    ),
    _of_machines(
        "pathways_link_waiting_limit_bytes", "gauge", "The most that may wait there.", lambda m: m.most_kept_bytes
    ),
    _of_machines(
        "pathways_link_round_trip_seconds",
        "gauge",
        "Round trip of the last ping; missing: none yet.",
        lambda m: m.round_trip_ns / 1e9 if m.round_trip_ns else None,
    ),
    _of_machines("pathways_link_connected_seconds", "gauge", "Time since the machine joined.", lambda m: m.connected_s),
    _of_machines("pathways_link_encrypted", "gauge", "1: the link is encrypted.", lambda m: m.is_encrypted),
)
