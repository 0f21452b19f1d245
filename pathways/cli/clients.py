"""What an operator does with a cluster's clients: `clients`, `limit`, `suspend` and `resume`."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import click

from pathways import errors
from pathways.cli.text import SIZE, Seconds, bytes_text, of_others

#: The quotas that `limit` takes away when it is given this word.
NONE = "none"


class _OrNone(click.ParamType[Any]):
    """What another type takes, or the word "none"."""

    def __init__(self, inner: click.ParamType[Any]) -> None:
        self._inner = inner
        self.name = f"{inner.name}|{NONE}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """0 for "none"."""
        return 0 if value == NONE else self._inner.convert(value, param, ctx)


@click.command(short_help="Show a cluster's clients.")
@click.argument("address", required=False)
@click.option("--watch", is_flag=True, help="Show them again after each --seconds, until Ctrl-C.")
@click.option("--seconds", type=Seconds(0.05, 3600), default=1.0, show_default=True, help="To measure over.")
@click.option("--json", "as_json", is_flag=True, help="For programs; with --watch an object per line.")
def clients(address: str | None, watch: bool, seconds: float, as_json: bool) -> None:
    """Show what each client of a cluster may have, and what it has and does.

    ADDRESS is what `pathways up` printed; this user's cluster on this machine when it is not given. A client's share is
    its part of the device time that all clients used in the last seconds.
    """
    from pathways.process.console import standard_output

    where = address or only_cluster()
    before = _sample(where)
    console = standard_output()
    if not watch or as_json or not console.is_terminal:
        while True:
            time.sleep(seconds)
            before, rows = _measured(where, before)
            if as_json:
                click.echo(json.dumps({"address": where, "seconds": seconds, "clients": rows}))
            else:
                console.print(_table(rows))
            if not watch:
                return
    from rich.live import Live

    with Live(_table([]), console=console, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(seconds)
                before, rows = _measured(where, before)
                live.update(_table(rows), refresh=True)
        except KeyboardInterrupt:
            pass


def named_clusters() -> list[str]:
    """PATHWAYS_ADDRESS alone if it is set, as in `pw.connect`; else this user's clusters on this machine."""
    from pathways.process.run_directory import live_clusters

    address = os.environ.get("PATHWAYS_ADDRESS")
    return [address] if address else live_clusters()


def only_cluster() -> str:
    """PATHWAYS_ADDRESS, or else the address of this user's cluster on this machine, if there is one and no more."""
    found = named_clusters()
    if len(found) != 1:
        there = "no cluster" if not found else f"{len(found)} clusters"
        raise click.ClickException(
            f"{there} of yours on this machine: name one by ADDRESS; `pathways status` lists them"
        )
    return str(found[0])


_USAGE = "CLIENT [ADDRESS]"
_client_and_address = click.argument("what", nargs=-1, required=True, metavar=_USAGE)


def _parsed(words: tuple[str, ...]) -> tuple[int, str]:
    """The number of a client and the address of its cluster, in any order: an address is no number."""
    numbers = [word for word in words if word.isascii() and word.isdecimal()]
    addresses = [word for word in words if word not in numbers]
    if len(numbers) != 1 or len(addresses) > 1:
        raise click.UsageError(f"expected {_USAGE}, with the client's number, got {' '.join(words)!r}")
    return int(numbers[0]), addresses[0] if addresses else only_cluster()


_Sample = dict[int, dict[str, Any]]


def _sample(address: str) -> _Sample:
    from pathways.cluster.operator import inspect

    return {client["client"]: client for client in inspect(address)["clients"]}


def _measured(address: str, before: _Sample) -> tuple[_Sample, list[dict[str, Any]]]:
    """The clients now, and a row of each: what it used since `before`."""
    now = _sample(address)
    used = {number: each["device_ns"] - before.get(number, {}).get("device_ns", 0) for number, each in now.items()}
    everything = sum(used.values())
    rows = []
    for number, each in sorted(now.items()):
        keep = ("client", "name", "pid", "owner", "suspended", "limits", "runs", "held", "has_unread", "is_waiting")
        rows.append(
            {
                **{what: each[what] for what in keep},
                "share": used[number] / everything if everything else None,
                "device_s": used[number] / 1e9,
                "memory": each["memory"],
            }
        )
    return now, rows


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    # Where the terminal is narrow, the name is cut first.
    table = Table(box=None, pad_edge=False)
    table.add_column("client", no_wrap=True)
    table.add_column("name", overflow="ellipsis", min_width=4)
    table.add_column("pid", no_wrap=True)
    for title in ("weight", "priority", "share", "device time", "runs", "waiting", "memory", "quota"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        limits = row["limits"]
        table.add_row(
            str(row["client"]),
            of_others(row["name"]),
            str(row["pid"]),
            f"{limits['weight']:g}",
            str(limits["priority"]),
            "-" if row["share"] is None else f"{row['share']:.1%}",
            f"{row['device_s']:.3f} s",
            str(row["runs"]) + (f" of {limits['runs']}" if limits["runs"] else ""),
            _waiting(row),
            bytes_text(row["memory"]),
            bytes_text(limits["memory"]) if limits["memory"] else "none",
            "suspended" if row["suspended"] else "",
        )
    return table


def _waiting(row: dict[str, Any]) -> str:
    """How many records wait for memory; "+": more wait in the client's ring, which the controller has not read."""
    if row["held"]:
        return f"{row['held']}{'+' if row['has_unread'] else ''} for memory"
    if row["is_waiting"]:
        return "for its turn"
    return "some" if row["has_unread"] else "0"


@click.command(short_help="Change what a client may have.")
@_client_and_address
@click.option("--weight", type=float, help="Its share of device time, against the other clients' weights.")
@click.option("--priority", type=int, help="A higher one goes first (policy priority).")
@click.option("--memory", type=_OrNone(SIZE), help="What it may use of each device, as 1GiB.")
@click.option("--runs", type=_OrNone(click.IntRange(1)), help="Runs that it may have under way.")
@click.option("--bytes", "nbytes", type=_OrNone(SIZE), help="Bytes of records that it may have under way.")
def limit(what: tuple[str, ...], nbytes: int | None, **given: Any) -> None:
    """Change what CLIENT may have, while it runs. What is not given stays as it is.

    CLIENT is its number, as `pathways clients` shows it. ADDRESS is what `pathways up` printed; PATHWAYS_ADDRESS, or
    this user's cluster on this machine when it is not given.

    A weight or priority acts on its next run. A quota below what the client has takes nothing away from it: its next
    runs and arrays wait, or fail, as it has asked when it connected. "none" takes a quota away.
    """
    from pathways.cluster.operator import limit as limit_client

    client, address = _parsed(what)
    changes = {name: value for name, value in {**given, "bytes": nbytes}.items() if value is not None}
    if not changes:
        raise errors.OptionError("nothing to change: give some of --weight, --priority, --memory, --runs, --bytes")
    now = limit_client(address, client, changes)
    memory, count = (bytes_text(now[name]) if now[name] else NONE for name in ("memory", "bytes"))
    click.echo(
        f"client {client} has weight {now['weight']:g}, priority {now['priority']}; "
        f"quotas: memory {memory}, runs {now['runs'] or NONE}, bytes {count}"
    )


@click.command(short_help="Take a client off the devices.")
@_client_and_address
@click.option("--to", type=click.Choice(["memory", "disk"]), default="memory", show_default=True, help="Where to.")
def suspend(what: tuple[str, ...], to: str) -> None:
    """Let CLIENT's runs end, move its buffers off the devices, and let its later work wait for `pathways resume`.

    CLIENT is its number, as `pathways clients` shows it; ADDRESS as there. The client notices only the delay.
    """
    from pathways.cluster.operator import suspend as suspend_client

    client, address = _parsed(what)
    left = suspend_client(address, client, to_disk=to == "disk")
    click.echo(
        f"client {client} is suspended; {bytes_text(left)} left the devices\n"
        f"`pathways resume {client} {address}` brings it back"
    )


@click.command(short_help="Bring a suspended client back.")
@_client_and_address
def resume(what: tuple[str, ...]) -> None:
    """Bring the buffers of a suspended CLIENT back to its devices, then take its work again.

    CLIENT is its number, as `pathways clients` shows it; ADDRESS as there.
    """
    from pathways.cluster.operator import resume as resume_client

    client, address = _parsed(what)
    came = resume_client(address, client)
    click.echo(f"client {client} is not suspended any more; {bytes_text(came)} came back to the devices")
