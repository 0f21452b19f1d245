"""`pathways top`: use of each device by client, queues and memory, live."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from pathways.cli.clients import only_cluster
from pathways.cli.text import Seconds, bytes_text, duration_text

if TYPE_CHECKING:
    from pathways.cluster.snapshots import Snapshot
    from pathways.protocol.control_pb2 import StatsReply

_BAR = 24  # characters that mean all of a device's time


@click.command(short_help="Watch a cluster: devices, clients, queues, memory.")
@click.argument("address", required=False)
@click.option(
    "--interval",
    type=Seconds(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks; shares are of this time.",
)
@click.option("--once", is_flag=True, help="Print one look and end, as when the output is no terminal.")
def top(address: str | None, interval: float, once: bool) -> None:
    """Show live what a cluster does. q or Ctrl-C ends it.

    ADDRESS is what `pathways up` printed; PATHWAYS_ADDRESS, or this user's cluster on this machine when it is not
    given.

    A computation counts when its end is noticed; one that takes longer than the interval shows as 0 % and then as more
    than it had.
    """
    from rich.live import Live

    from pathways.cluster.snapshots import Snapshots
    from pathways.process.console import standard_output

    console = standard_output()
    with Snapshots(address or only_cluster()) as snapshots:
        before = snapshots.look()
        if once or not console.is_terminal:
            time.sleep(interval)
            console.print(_look(before, snapshots.look()))
            return
        with contextlib.suppress(KeyboardInterrupt), _keys() as pressed, Live(console=console, screen=True) as live:
            while "q" not in pressed(interval):
                after = snapshots.look()
                live.update(_look(before, after), refresh=True)
                before = after


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so many seconds for a key, and returns what was pressed. Keys are not shown meanwhile."""
    if not sys.stdin.isatty():

        def no_key(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield no_key
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    old = termios.tcgetattr(terminal)

    def pressed(seconds: float) -> str:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([terminal], [], [], left)[0]:
                return sys.stdin.read(1)
        return ""

    tty.setcbreak(terminal)
    try:
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, old)


def _look(past: Snapshot, present: Snapshot) -> Any:
    """What is shown: the cluster at present, and what it did since then."""
    from rich.console import Group
    from rich.text import Text

    from pathways.cluster.operator import describe
    from pathways.cluster.snapshots import client_names, device_use

    before, after, seconds = past.stats, present.stats, present.at - past.at
    use = device_use(before, after, seconds)
    controller, clients = after.controller, after.clients
    names = client_names(after)
    runs = controller.runs - before.controller.runs
    noun = "client" if len(clients) == 1 else "clients"
    head = Text.assemble(
        (describe(after), "bold"),
        f"  up {duration_text(after.uptime_s)}  {len(clients)} {noun}  {runs / seconds:,.0f} runs/s",
    )
    queues = Text(
        f"in the order {controller.waiting}, held back {controller.held}, on hosts "
        f"{sum(host.counts.live_runs for host in after.hosts)}; clients with too much under way {controller.unread}"
    )
    return Group(head, queues, "", _devices(after, use, names), "", _clients(after, use))


def _devices(stats: StatsReply, use: Mapping[int, Mapping[int, float]], names: Mapping[int, str]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("device", "host", "", box=None)
    for title in ("busy", "in use", "budget"):
        table.add_column(title, justify="right")
    table.add_column("by client")
    colors = {client: _color(position) for position, client in enumerate(sorted(names))}
    for host in stats.hosts:
        memory = host.counts.memory.devices
        for position, number in enumerate(host.devices):
            parts = sorted(use.get(number, {}).items())
            bar, left = Text(), _BAR
            for client, part in parts:
                width = min(left, round(part * _BAR))
                bar.append("█" * width, colors.get(client, "white"))
                left -= width
            bar.append("·" * left, "dim")
            words = Text(", ").join(
                Text(f"{names.get(client, f'client {client}')} {part:.0%}", colors.get(client, "white"))
                for client, part in parts
            )
            room = memory[position] if position < len(memory) else None
            table.add_row(
                str(number),
                str(host.host) if host.state == "up" else f"{host.host} ({host.state})",
                bar,
                f"{sum(part for _, part in parts):.0%}",
                bytes_text(room.bytes) if room else "",
                "none" if room and not room.HasField("limit") else bytes_text(room.limit) if room else "",
                words,
            )
    return table


def _clients(stats: StatsReply, use: Mapping[int, Mapping[int, float]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    from pathways.cluster.snapshots import memory_of_clients

    table = Table("client", "name", "pid", box=None)
    for title in ("weight", "priority", "devices' time", "memory"):
        table.add_column(title, justify="right")
    table.add_column("")
    count = sum(len(host.devices) for host in stats.hosts)
    held = memory_of_clients(stats)
    for position, each in enumerate(sorted(stats.clients, key=lambda each: each.client)):
        number = each.client
        time_share = sum(parts.get(number, 0.0) for parts in use.values()) / max(count, 1)
        table.add_row(
            Text(str(number), _color(position)),
            Text(each.name),
            str(each.pid),
            f"{each.weight:g}",
            str(each.priority),
            f"{time_share:.1%}",
            bytes_text(held.get(number, 0)),
            "suspended" if each.suspended else "",
        )
    return table


def _color(position: int) -> str:
    return ("cyan", "yellow", "green", "magenta", "blue", "red")[position % 6]
