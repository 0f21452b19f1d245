"""What the dashboard shows of two looks at a cluster, as plain data for JSON. Pure.

Lists are bounded, so that the page of a large cluster stays small; `more` says how much was left out. The names are
those that `page/dashboard.js` reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pathways.cluster.operator import describe
from pathways.cluster.snapshots import Snapshot, client_names, device_use, memory_of_clients
from pathways.protocol import control_pb2 as pb

MOST_ROWS, MOST_LISTED, MOST_CLIENTS = 64, 256, 100
#: So many clients of a row of the timeline have a color each; the others are client 0.
MOST_PARTS = 8

_Item = TypeVar("_Item")


def point(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """One point of the timeline: `use` has for each row [client, part of the time] of the clients that used it.

    A row is a device; in a large cluster a host, or else an island.
    """
    stats = after.stats
    use = device_use(before.stats, stats, after.at - before.at)
    names = client_names(stats)
    used: dict[int, str] = {}
    rows = []
    for _, devices in timeline_rows(stats):
        sums: dict[int, float] = {}
        for device in devices:
            for client, part in use.get(device, {}).items():
                sums[client] = sums.get(client, 0.0) + part / len(devices)
        biggest = sorted(sums, key=lambda client: -sums[client])
        parts = [[client, round(sums[client], 4)] for client in sorted(biggest[:MOST_PARTS])]
        used.update({client: names.get(client, f"client {client}") for client in biggest[:MOST_PARTS]})
        if rest := sum(sums[client] for client in biggest[MOST_PARTS:]):
            parts.append([0, round(rest, 4)])
        rows.append(parts)
    return {"t": round(time.time() - (time.monotonic() - after.at), 2), "s": round(after.at - before.at, 2),
            "use": rows, "names": used}  # fmt: skip


def timeline_rows(stats: pb.StatsReply) -> list[tuple[str, Sequence[int]]]:
    """The rows of the timeline: the name of each, and its devices."""
    devices = [device for host in stats.hosts for device in host.devices]
    if len(devices) <= MOST_ROWS:
        return [(f"device {device}", [device]) for device in devices]
    if len(stats.hosts) <= MOST_ROWS:
        return [(f"host {host.host}", list(host.devices)) for host in stats.hosts]
    islands: dict[int, list[int]] = {}
    for host in stats.hosts:
        islands.setdefault(host.island, []).extend(host.devices)
    return [(f"island {island}", each) for island, each in list(islands.items())[:MOST_ROWS]]


def view(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """How the cluster is now."""
    old, stats = before.stats, after.stats
    seconds = after.at - before.at
    use = device_use(old, stats, seconds)
    shares: dict[int, float] = {}  # of all devices' time, by client
    count = max(1, sum(len(host.devices) for host in stats.hosts))
    for parts in use.values():
        for client, part in parts.items():
            shares[client] = shares.get(client, 0.0) + part / count
    controller, topology, rows = stats.controller, stats.topology, timeline_rows(stats)
    missing = {device for host in stats.hosts if host.state != "up" for device in host.devices}
    more: dict[str, int] = {}

    def first(what: str, items: Iterable[_Item], most: int = MOST_LISTED) -> list[_Item]:
        listed = list(items)
        if len(listed) > most:
            more[what] = len(listed) - most
        return listed[:most]

    memory = {
        device: room
        for host in stats.hosts
        for device, room in zip(host.devices, host.counts.memory.devices, strict=False)
    }
    held = memory_of_clients(stats)
    clients = sorted(stats.clients, key=lambda each: (-shares.get(each.client, 0.0), each.client))
    on_machine = {host.island: host.machine_name for host in stats.hosts}
    return {
        "cluster": {
            "is": describe(stats),
            "address": stats.address,
            "port": stats.port,
            "jax": topology.jax_version,
            "uptime": stats.uptime_s,
            "controller": [controller.pid, controller.resident_bytes],
        },
        "rows": [name for name, _ in rows],
        "down": [index for index, (_, devices) in enumerate(rows) if missing.intersection(devices)],
        "busy": sum(shares.values()),
        "runs": max(0, controller.runs - old.controller.runs) / seconds,
        "queues": {
            "order": controller.waiting,
            "memory": controller.held,
            "hosts": sum(host.counts.live_runs for host in stats.hosts),
            "unread": controller.unread,
        },
        "late": controller.late,
        "refused": controller.refused,
        "devices": first("devices", [
            _device(stats, host, device, memory.get(device), sum(use.get(device, {}).values()))
            for host in stats.hosts for device in host.devices
        ]),
        "hosts": first("hosts", map(_host, stats.hosts)),
        "clients": first("clients", [_client(each, shares, held) for each in clients], MOST_CLIENTS),
        "slices": first("slices", [_slice(each, memory) for each in stats.slices], MOST_CLIENTS),
        "machines": first("machines", [_machine(each, old.machines, seconds) for each in stats.machines]),
        "several": any(on_machine.values()),
        "losses": {
            "hosts": stats.losses.hosts,
            "machines": stats.losses.machines,
            "last": [{"at": time.time() - each.age_s, "what": each.what, "why": each.why}
                     for each in reversed(stats.losses.last)],
        },
        "more": more,
    }  # fmt: skip


def _device(
    stats: pb.StatsReply, host: pb.HostStats, device: int, room: pb.HostCounts.Memory.Device | None, busy: float
) -> dict[str, Any]:
    return {
        "device": device,
        "host": host.host,
        "island": host.island,
        "state": host.state,
        "busy": busy,
        "bytes": None if room is None else room.bytes,
        "high": None if room is None else room.high_water,
        "limit": room.limit if room is not None and room.HasField("limit") else None,
        "slices": stats.device_load[device] if device < len(stats.device_load) else 0,
    }


def _host(host: pb.HostStats) -> dict[str, Any]:
    done, of = host.counts.compiling or (0, 0)
    return {
        "host": host.host,
        "island": host.island,
        "machine": host.machine_name,
        "pid": host.pid,
        "state": "drained" if host.state == "up" and host.is_drained else host.state,
        "restarts": host.restarts,
        "resident": host.resident_bytes,
        "shared": host.counts.arena_bytes,
        "runs": host.counts.live_runs,
        "compiles": host.counts.compiles,
        "compile_seconds": host.counts.compile_seconds,
        "compiling": f"{done} of {of}" if of else "",
    }


def _client(client: pb.ClientStats, shares: dict[int, float], held: dict[int, int]) -> dict[str, Any]:
    state = "suspended" if client.suspended else "waits for memory" if client.held else ""
    return {
        "client": client.client,
        "name": client.name or f"client {client.client}",
        "pid": client.pid,
        "weight": client.weight,
        "priority": client.priority,
        "share": shares.get(client.client, 0.0),
        "memory": held.get(client.client, 0),
        "quota": client.limits.memory,
        "runs": client.runs,
        "held": client.held,
        "slices": client.slices,
        "programs": client.programs,
        "state": state or ("waits for its turn" if client.is_waiting else ""),
    }


def _slice(each: pb.SliceStats, memory: dict[int, Any]) -> dict[str, Any]:
    devices = sorted(each.devices)
    is_run = devices and devices[-1] - devices[0] == len(devices) - 1 and len(devices) > 1
    named = f"{devices[0]}-{devices[-1]}" if is_run else ", ".join(map(str, devices[:16]))
    axes = [f"{name}={size}" for name, size in zip(each.axis_names, each.shape, strict=False)]
    return {
        "slice": each.slice,
        "client": each.client,
        "shape": " ".join(axes) or " x ".join(map(str, each.shape)),
        "island": each.island,
        "devices": named + (" ..." if not is_run and len(devices) > 16 else ""),
        "bytes": sum(memory[device].bytes for device in devices if device in memory),
    }


def _machine(machine: pb.MachineStats, before: Iterable[pb.MachineStats], seconds: float) -> dict[str, Any]:
    old = next((each for each in before if each.name == machine.name), machine)
    return {
        "machine": machine.name,
        "island": machine.island_name,
        "address": machine.address,
        "encrypted": machine.is_encrypted,
        "via": machine.via,
        "fabric": machine.fabric,
        "out": max(0, machine.bytes_out - old.bytes_out) / seconds,
        "in": max(0, machine.bytes_in - old.bytes_in) / seconds,
        "waiting": machine.kept_bytes,
        "most": machine.most_kept_bytes,
        "round_trip": machine.round_trip_ns / 1e9,
        "connected": machine.connected_s,
    }
