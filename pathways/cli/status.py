"""`pathways status`: a cluster's islands, hosts, devices, clients and memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from pathways import errors
from pathways.cli.clients import named_clusters
from pathways.cli.text import bytes_text, duration_text, is_free, machine_text, of_others

if TYPE_CHECKING:
    from pathways.protocol.control_pb2 import ClientStats, HostStats, StatsReply

_HOLDERS_SHOWN = 20  # the biggest of the clients' programs


@click.command(short_help="Show a cluster.")
@click.argument("address", required=False)
@click.option("--json", "as_json", is_flag=True, help='For programs: {"clusters": [...]}, with all numbers.')
def status(address: str | None, as_json: bool) -> None:
    """Show a cluster: islands, hosts, devices, clients, memory.

    ADDRESS is what `pathways up` printed. When it is not given, that in PATHWAYS_ADDRESS; else this user's cluster on
    this machine; if there are several, a list of them.
    """
    from pathways.cluster.operator import look
    from pathways.protocol.wire import load_stats

    addresses = [address] if address is not None else named_clusters()
    if as_json:
        found = [look(each) for each in addresses]
        click.echo(json.dumps({"clusters": list(map(load_stats, found))}, indent=1, default=dataclasses.asdict))
    elif not addresses:
        raise click.ClickException("no cluster of yours runs on this machine; `pathways up` starts one")
    elif len(addresses) == 1:
        _show(look(addresses[0]))
    else:
        _list(addresses)


def _list(addresses: list[str]) -> None:
    """Several clusters, one line each, the newest first."""
    from rich.table import Table

    from pathways.cluster.operator import describe, look
    from pathways.process.console import standard_output

    table = Table("address", "cluster", "up", "clients", box=None)
    table.columns[0].overflow = "fold"  # an address that is cut cannot be used
    for address in addresses:
        try:
            stats = look(address)
        except errors.ConnectError:
            table.add_row(address, "does not answer", "", "")
            continue
        table.add_row(address, describe(stats), duration_text(stats.uptime_s), str(len(stats.clients)))
    console = standard_output()
    console.print(table)
    console.print("`pathways status ADDRESS` shows one of them", markup=False, highlight=False)


def _show(stats: StatsReply) -> None:
    from rich.table import Column, Table

    from pathways.cluster.operator import describe
    from pathways.process.console import standard_output

    console = standard_output()
    topology, controller = stats.topology, stats.controller
    console.print(f"[bold]{describe(stats)}[/bold]  jax {topology.jax_version}, jaxlib {topology.jaxlib_version}")
    console.print(stats.address, soft_wrap=True, highlight=False)
    console.print(
        f"up {duration_text(stats.uptime_s)}, controller pid {controller.pid}, "
        f"{bytes_text(controller.resident_bytes)} resident"
    )
    columns = ("pid", "devices", "slices on each", "resident", "shared buffers", "restarts")
    several = max(topology.machines, default=0) > 0
    hosts = Table(*([Column("machine", overflow="fold")] if several else []), "island", "host", *columns, box=None)
    free = [host for host in stats.hosts if is_free(host)]
    for host in stats.hosts:
        if host in free:
            continue
        devices, load = host.devices, stats.device_load
        span = f"{devices[0]}-{devices[-1]}" if len(devices) > 1 else str(devices[0])
        hosts.add_row(
            *([machine_text(host)] if several else []),
            str(host.island),
            str(host.host),
            str(host.pid),
            span,
            " ".join(str(load[device]) for device in devices),
            bytes_text(host.resident_bytes),
            bytes_text(host.counts.arena_bytes),
            f"{host.restarts}{'' if host.state == 'up' else ', ' + host.state}{', drained' if host.is_drained else ''}",
        )
    console.print(hosts)
    if free:
        islands = sorted({host.island for host in free})
        console.print(f"no machine has the places of {'island' if len(islands) == 1 else 'islands'} {_ranges(islands)}")
    _show_machines(console, stats)
    _show_devices(console, stats.hosts)
    if not stats.clients:
        console.print("no clients")
        return
    clients = Table("client", "pid", "slices", "programs", "resident", "shared, at most", "", box=None)
    for client in stats.clients:
        clients.add_row(
            str(client.client),
            str(client.pid),
            str(client.slices),
            str(client.programs),
            bytes_text(client.resident_bytes),
            bytes_text(client.most_kept),
            ", ".join(_what_is_special(client)),
        )
    console.print(clients)
    _show_holders(console, stats.hosts)
    _show_variables(console, stats.clients)


def _show_machines(console: Any, stats: StatsReply) -> None:
    from rich.table import Table

    if not stats.port:
        return
    console.print(f"machines join at {stats.port}", highlight=False)
    if not stats.machines:
        return
    traffic = ("sent", "received", "waits here", "round trip")
    has_fabric = any(machine.fabric for machine in stats.machines)
    fabric = ["fabric"] if has_fabric else []
    via = ["via"] if any(machine.via for machine in stats.machines) else []
    table = Table("machine", "island", "address", "link", *via, *fabric, *traffic, "for", box=None)
    for position in (0, 2):
        table.columns[position].overflow = "fold"  # what is cut cannot be given to another command
    for machine in stats.machines:
        table.add_row(
            machine.name,
            machine.island_name,
            machine.address,
            "TLS 1.3" if machine.is_encrypted else "[bold red]not encrypted[/]",
            *([machine.via or "-"] if via else []),
            *([_fabric_text(machine.fabric)] if has_fabric else []),
            bytes_text(machine.bytes_out),
            bytes_text(machine.bytes_in),
            f"{bytes_text(machine.kept_bytes)} of {bytes_text(machine.most_kept_bytes)}",
            f"{machine.round_trip_ns / 1e3:.0f} us" if machine.round_trip_ns else "-",
            duration_text(machine.connected_s),
        )
    console.print(table)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers for people: `0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _fabric_text(fabric: str) -> str:
    """What the collectives of an island use between its machines."""
    if not fabric:
        return "-"
    return "link, TLS 1.3" if fabric == "link" else f"{fabric}, [bold red]not encrypted[/]"


def _what_is_special(client: ClientStats) -> list[str]:
    words = {
        of_others(repr(client.name)): client.name,
        f"weight {client.weight:g}": client.weight != 1,
        f"priority {client.priority}": client.priority,
        "started the cluster": client.owner,
        "suspended": client.suspended,
    }
    return [word for word, holds in words.items() if holds]


def _show_devices(console: Any, hosts: Sequence[HostStats]) -> None:
    """MEM-1: the memory in use on each device. A host that is lost, or has not answered, has no numbers."""
    from rich.table import Table

    table = Table("device", "host", box=None)
    for title in ("in use", "high water", "budget"):
        table.add_column(title, justify="right")
    for host in hosts:
        for number, device in zip(host.devices, host.counts.memory.devices, strict=False):
            budget = bytes_text(device.limit) if device.HasField("limit") else "none"
            in_use, high_water = bytes_text(device.bytes), bytes_text(device.high_water)
            table.add_row(str(number), str(host.host), in_use, high_water, budget)
    if table.row_count:
        console.print(table)


def _show_holders(console: Any, hosts: Sequence[HostStats]) -> None:
    """The holders of device memory, the biggest first: by client and program, over all hosts."""
    from rich.table import Table

    held: dict[tuple[int, str], list[int]] = {}
    for host in hosts:
        for account in host.counts.memory.accounts:
            what = account.program or "a program that is gone" if account.HasField("plan") else "put there"
            sums = held.setdefault((account.client, what), [0, 0])
            sums[0] += account.bytes
            sums[1] += account.high_water
    rows = sorted(held.items(), key=lambda row: (-row[1][0], -row[1][1], row[0]))
    rows = [row for row in rows if row[1][1]]
    if not rows:
        return
    table = Table("client", "program", box=None)
    for title in ("in use", "high water"):
        table.add_column(title, justify="right")
    for (client, what), (count, most) in rows[:_HOLDERS_SHOWN]:
        table.add_row(str(client), of_others(what), bytes_text(count), bytes_text(most))
    console.print(table)
    if len(rows) > _HOLDERS_SHOWN:
        console.print(
            f"and {len(rows) - _HOLDERS_SHOWN} more with {bytes_text(sum(c for _, (c, _) in rows[_HOLDERS_SHOWN:]))}"
        )


def _show_variables(console: Any, clients: Sequence[ClientStats]) -> None:
    """The clients' variables, the biggest first."""
    from rich.table import Table

    known = [(each, client.client) for client in clients for each in client.variables.variables]
    known.sort(key=lambda row: (-row[0].device_bytes, row[1]))
    if not known:
        return
    table = Table("client", "variable", "type", "slice", box=None)
    table.add_column("on each device", justify="right")
    for variable, client in known[:_HOLDERS_SHOWN]:
        texts = (variable.name, variable.type, variable.slice)
        table.add_row(str(client), *map(of_others, texts), bytes_text(variable.device_bytes))
    console.print(table)
    more = sum(client.variables.variable_count for client in clients) - min(len(known), _HOLDERS_SHOWN)
    if more > 0:
        console.print(f"and {more} more variables")
