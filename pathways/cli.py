"""The `pathways` command: `up` starts a cluster, `status` shows one, `bench` measures; `suspend` and `resume` take a
client off the devices and back.

This module only reads arguments and prints tables; `pathways.cluster` does the work. An error of Pathways ends the
command with status 1 and its message.
"""

from __future__ import annotations

import dataclasses
import fractions
import importlib.metadata
import json
import re
import signal
import sys
import time
from typing import Any

import click

from pathways import errors
from pathways.process.config import POLICIES

_UNITS = {"": 1, "B": 1, **{f"{letter}{rest}": base**power for power, letter in enumerate("KMGT", 1)
          for rest, base in (("", 1024), ("iB", 1024), ("B", 1000))}}  # fmt: skip


class _Size(click.ParamType[int]):
    """A number of bytes: 1073741824, 1GiB, 1.5G, 2GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes that a text means."""
        if isinstance(value, int):
            return value
        units = {unit.upper(): factor for unit, factor in _UNITS.items()}
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        count = int(fractions.Fraction(match[1]) * units.get(match[2].upper(), 0)) if match else 0
        if count < 1:
            self.fail(f"expected a size like 1073741824, 1GiB or 1.5GB, got {value!r}", param, ctx)
        return count


_SIZE = _Size()
_HOLDERS_SHOWN = 20  # the biggest of the clients' programs


class _Commands(click.Group):
    """The command group: an error of Pathways becomes a message."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command."""
        try:
            return super().invoke(ctx)
        except errors.PathwaysError as error:
            raise click.ClickException(str(error)) from error


def _print_version(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        jax, jaxlib, own = (importlib.metadata.version(name) for name in ("jax", "jaxlib", "pathways"))
        click.echo(f"pathways {own} (jax {jax}, jaxlib {jaxlib})")
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def main() -> None:
    """Pathways for JAX: one program drives many accelerators."""


@main.command(short_help="Start a cluster on this machine.")
@click.option("--islands", type=click.IntRange(1), default=1, show_default=True, help="Number of islands.")
@click.option(
    "--hosts-per-island", type=click.IntRange(1), default=1, show_default=True, help="Host processes of each island."
)
@click.option("--devices-per-host", type=click.IntRange(1), default=1, show_default=True, help="Devices of each host.")
@click.option("--platform", default=None, help="cpu, cuda, rocm or tpu; what this machine has if not given.")
@click.option("--device-memory", type=_SIZE, default=None, help="What programs may use of each device, as 1GiB.")
@click.option("--transfer-memory", type=_SIZE, default=None, help="What transfers may land in, of each host.")
@click.option(
    "--policy",
    type=click.Choice(list(POLICIES)),
    default="fifo",
    show_default=True,
    help="Whose run is next: " + "; ".join(f"{name}: {what}" for name, what in POLICIES.items()) + ".",
)
def up(
    islands: int,
    hosts_per_island: int,
    devices_per_host: int,
    platform: str | None,
    device_memory: int | None,
    transfer_memory: int | None,
    policy: str,
) -> None:
    """Start a cluster on this machine and keep it in the foreground.

    Prints its address on standard output, for pathways.connect(ADDRESS). Ctrl-C, or SIGTERM, ends it.
    """
    from pathways.cluster.launcher import start_local_cluster

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    try:
        handle = start_local_cluster(
            islands,
            hosts_per_island,
            devices_per_host,
            platform=platform,
            device_memory=device_memory,
            transfer_memory=transfer_memory,
            policy=policy,
        )
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        click.echo(handle.address)
        sys.stdout.flush()
        click.echo("Ctrl-C ends it.", err=True)
        while (failure := handle.control.failure()) is None:
            time.sleep(0.1)
    except KeyboardInterrupt:
        click.echo("ending the cluster ...", err=True)
    else:
        # A cluster that was closed on request ends without an error, as with Ctrl-C.
        if not isinstance(failure, errors.ClusterClosedError):
            raise failure
    finally:
        handle.close()


@main.command(short_help="Show a cluster.")
@click.argument("address", required=False)
@click.option("--json", "as_json", is_flag=True, help='For programs: {"clusters": [...]}, with all numbers.')
def status(address: str | None, as_json: bool) -> None:
    """Show a cluster: islands, hosts, devices, clients, memory.

    ADDRESS is what `pathways up` printed. When it is not given, this user's cluster on this machine; if there are
    several, a list of them.
    """
    from pathways.cluster.remote import inspect
    from pathways.process.run_directory import live_clusters

    addresses = [address] if address is not None else live_clusters()
    if as_json:
        found = [inspect(each) for each in addresses]
        click.echo(json.dumps({"clusters": [_as_data(stats) for stats in found]}, indent=1))
    elif not addresses:
        raise click.ClickException("no cluster of yours runs on this machine; `pathways up` starts one")
    elif len(addresses) == 1:
        _show(inspect(addresses[0]))
    else:
        _list(addresses)


@main.command(short_help="Take a client off the devices.")
@click.argument("address")
@click.argument("client", type=click.IntRange(0))
@click.option("--to", type=click.Choice(["memory", "disk"]), default="memory", show_default=True, help="Where to.")
def suspend(address: str, client: int, to: str) -> None:
    """Let CLIENT's runs end, move its buffers off the devices, and let its later work wait for `pathways resume`.

    `pathways status` shows the clients' numbers. The client notices only the delay.
    """
    from pathways.cluster.remote import suspend as suspend_client

    left = suspend_client(address, client, to_disk=to == "disk")
    click.echo(
        f"client {client} is suspended; {_bytes(left)} left the devices\n"
        f"`pathways resume {address} {client}` brings it back"
    )


@main.command(short_help="Bring a suspended client back.")
@click.argument("address")
@click.argument("client", type=click.IntRange(0))
def resume(address: str, client: int) -> None:
    """Bring the buffers of a suspended CLIENT back to its devices, then take its work again."""
    from pathways.cluster.remote import resume as resume_client

    came = resume_client(address, client)
    click.echo(f"client {client} is not suspended any more; {_bytes(came)} came back to the devices")


@main.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def bench(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Measure Pathways and its rivals."""
    from pathways.bench import cli

    names = ctx.help_option_names
    ctx.exit(cli.bench.main(list(arguments), ctx.command_path, standalone_mode=False, help_option_names=names) or 0)


def _as_data(stats: dict[str, Any]) -> dict[str, Any]:
    """A cluster's numbers as JSON has them."""
    return {**stats, "topology": dataclasses.asdict(stats["topology"])}


def _list(addresses: list[str]) -> None:
    """Several clusters, one line each, the newest first."""
    from rich.table import Table

    from pathways.cluster.remote import inspect
    from pathways.process.console import standard_output

    table = Table("address", "cluster", "up", "clients", box=None)
    table.columns[0].overflow = "fold"  # an address that is cut cannot be used
    for address in addresses:
        try:
            stats = inspect(address)
        except errors.ConnectError:
            table.add_row(address, "does not answer", "", "")
            continue
        up, clients = _duration(stats["uptime_s"]), str(len(stats["clients"]))
        table.add_row(address, stats["topology"].describe(), up, clients)
    console = standard_output()
    console.print(table)
    console.print("`pathways status ADDRESS` shows one of them", markup=False, highlight=False)


def _show(stats: dict[str, Any]) -> None:
    from rich.table import Table

    from pathways.process.console import standard_output

    console = standard_output()
    topology, controller = stats["topology"], stats["controller"]
    console.print(f"[bold]{topology.describe()}[/bold]  jax {topology.jax_version}, jaxlib {topology.jaxlib_version}")
    console.print(stats["address"], soft_wrap=True, highlight=False)
    console.print(
        f"up {_duration(stats['uptime_s'])}, controller pid {controller['pid']}, "
        f"{_bytes(controller['resident_bytes'])} resident"
    )
    columns = ("pid", "devices", "slices on each", "resident", "shared buffers", "restarts")
    several = max(topology.machines, default=0) > 0
    hosts = Table(*(["machine"] if several else []), "island", "host", *columns, box=None)
    for host in stats["hosts"]:
        devices, load = host["devices"], stats["device_load"]
        span = f"{devices[0]}-{devices[-1]}" if len(devices) > 1 else str(devices[0])
        hosts.add_row(
            *([str(host["machine"])] if several else []),
            str(host["island"]),
            str(host["host"]),
            str(host["pid"]),
            span,
            " ".join(str(load[device]) for device in devices),
            _bytes(host["resident_bytes"]),
            _bytes(host.get("arena_bytes", 0)),
            f"{host['restarts']}{'' if host['state'] == 'up' else ', ' + host['state']}",
        )
    console.print(hosts)
    _show_devices(console, stats["hosts"])
    if not stats["clients"]:
        console.print("no clients")
        return
    clients = Table("client", "pid", "slices", "programs", "resident", "", box=None)
    for client in stats["clients"]:
        clients.add_row(
            str(client["client"]),
            str(client["pid"]),
            str(client["slices"]),
            str(client["programs"]),
            _bytes(client["resident_bytes"]),
            ", ".join(_what_is_special(client)),
        )
    console.print(clients)
    _show_holders(console, stats["hosts"])


def _what_is_special(client: dict[str, Any]) -> list[str]:
    import rich.markup

    words = {
        rich.markup.escape(repr(client["name"])): client["name"],
        f"weight {client['weight']:g}": client["weight"] != 1,
        f"priority {client['priority']}": client["priority"],
        "started the cluster": client["owner"],
        "suspended": client["suspended"],
    }
    return [word for word, holds in words.items() if holds]


def _show_devices(console: Any, hosts: list[dict[str, Any]]) -> None:
    """MEM-1: the memory in use on each device. A host that is lost, or has not answered, has no numbers."""
    from rich.table import Table

    table = Table("device", "host", box=None)
    for title in ("in use", "high water", "budget"):
        table.add_column(title, justify="right")
    for host in hosts:
        known = host.get("memory", {}).get("devices", [])
        for number, device in zip(host["devices"], known, strict=False):
            budget = "none" if device["limit"] is None else _bytes(device["limit"])
            in_use, high_water = _bytes(device["bytes"]), _bytes(device["high_water"])
            table.add_row(str(number), str(host["host"]), in_use, high_water, budget)
    if table.row_count:
        console.print(table)


def _show_holders(console: Any, hosts: list[dict[str, Any]]) -> None:
    """The holders of device memory, the biggest first: by client and program, over all hosts."""
    from rich.table import Table

    held: dict[tuple[int, str], list[int]] = {}
    for host in hosts:
        for account in host.get("memory", {}).get("accounts", []):
            what = "put there" if account["plan"] is None else account["program"] or "a program that is gone"
            sums = held.setdefault((account["client"], what), [0, 0])
            sums[0] += account["bytes"]
            sums[1] += account["high_water"]
    rows = sorted(held.items(), key=lambda row: (-row[1][0], -row[1][1], row[0]))
    rows = [row for row in rows if row[1][1]]
    if not rows:
        return
    table = Table("client", "program", box=None)
    for title in ("in use", "high water"):
        table.add_column(title, justify="right")
    for (client, what), (count, most) in rows[:_HOLDERS_SHOWN]:
        table.add_row(str(client), what, _bytes(count), _bytes(most))
    console.print(table)
    if len(rows) > _HOLDERS_SHOWN:
        console.print(
            f"and {len(rows) - _HOLDERS_SHOWN} more with {_bytes(sum(c for _, (c, _) in rows[_HOLDERS_SHOWN:]))}"
        )


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
