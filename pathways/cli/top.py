"""`pathways top`: use of each device by client, queues and memory, live."""

from __future__ import annotations

import contextlib
import math
import select
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from pathways.cli.clients import only_cluster
from pathways.cli.text import Seconds, bytes_text, counted, duration_text, is_free, machine_text

if TYPE_CHECKING:
    from pathways.cluster.snapshots import Snapshot
    from pathways.protocol.control_pb2 import StatsReply

_BAR = 24  # characters that mean all of a device's time, on a wide terminal
_WIDE, _NARROW = 100, 70  # columns: from the first on all is shown in full; below the second only what matters most
_LEAST_DEVICES = 3  # that are shown, however many clients there are


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
            console.print(_look(before, snapshots.look(), console.width, None))
            return
        with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
            if console.is_dumb_terminal:  # it has no cursor that can be moved: one look behind the other
                while True:
                    time.sleep(interval)
                    after = snapshots.look()
                    console.print(_look(before, after, console.width, None), "")
                    before = after
            pressed, live = stack.enter_context(_keys()), stack.enter_context(Live(console=console, screen=True))
            while "q" not in pressed(interval):
                after = snapshots.look()
                live.update(_look(before, after, *console.size), refresh=True)
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


def _look(past: Snapshot, present: Snapshot, width: int, height: int | None) -> Any:
    """What is shown: the cluster at present, and what it did since then. It has `width` columns and `height` lines;
    None: as many as it needs.
    """
    from rich.console import Group
    from rich.text import Text

    from pathways.cluster.operator import describe
    from pathways.cluster.snapshots import client_names, device_use

    before, after, seconds = past.stats, present.stats, present.at - past.at
    use = device_use(before, after, seconds)
    controller, clients = after.controller, after.clients
    names = client_names(after)
    runs = controller.runs - before.controller.runs
    head = Text.assemble(
        (describe(after), "bold"),
        f"  up {duration_text(after.uptime_s)}  {counted(len(clients), 'client')}  {runs / seconds:,.0f} runs/s",
    )
    queues = Text(
        f"in the order {controller.waiting}, held back {controller.held}, on hosts "
        f"{sum(host.counts.live_runs for host in after.hosts)}; clients with too much under way {controller.unread}"
    )
    # Beside the devices: two paragraphs, two empty lines, two heads of tables, a line that says what is left out.
    others = sum(math.ceil(len(text.plain) / width) for text in (head, queues)) + 5 + len(clients)
    most = sys.maxsize if height is None else max(_LEAST_DEVICES, height - others)
    return Group(head, queues, "", _devices(after, use, names, width, most), "", _clients(after, use, width))


def _devices(
    stats: StatsReply, use: Mapping[int, Mapping[int, float]], names: Mapping[int, str], width: int, most: int
) -> Any:
    """A table of the devices, `most` of them at most. What does not fit into `width` columns is left out, the least
    important first.
    """
    from rich.table import Table
    from rich.text import Text

    hosts = [host for host in stats.hosts if not is_free(host)]
    has_machines = max(stats.topology.machines, default=0) > 0 and width >= _NARROW
    bar_width = _BAR if width >= _WIDE else _BAR // 2 if width >= _NARROW else _BAR // 4
    table = Table(box=None)
    table.add_column("device" if width >= _NARROW else "dev", no_wrap=True)
    if has_machines:
        table.add_column("machine", max_width=max(8, width // 6))
    table.add_column("host", no_wrap=True)
    table.add_column("", no_wrap=True)
    for title in ("busy", "in use", "budget") if width >= _NARROW else ("busy", "in use"):
        table.add_column(title, justify="right", no_wrap=True)
    if width >= _NARROW:
        table.add_column("by client", min_width=8)
    colors = {client: _color(position) for position, client in enumerate(sorted(names))}
    count = 0
    for host in hosts:
        memory = host.counts.memory.devices
        for position, number in enumerate(host.devices):
            count += 1
            if count > most:
                continue
            parts = sorted(use.get(number, {}).items())
            bar, left = Text(), bar_width
            for client, part in parts:
                columns = min(left, round(part * bar_width))
                bar.append("█" * columns, colors.get(client, "white"))
                left -= columns
            bar.append("·" * left, "dim")
            words = _cut(", ").join(
                Text(f"{part:.0%} {names.get(client, f'client {client}')}", colors.get(client, "white"))
                for client, part in parts
            )
            room = memory[position] if position < len(memory) else None
            cells = [
                str(number),
                *([_cut(machine_text(host))] if has_machines else []),
                str(host.host) if host.state == "up" else f"{host.host} ({host.state})",
                bar,
                f"{sum(part for _, part in parts):.0%}",
                bytes_text(room.bytes) if room else "",
                "none" if room and not room.HasField("limit") else bytes_text(room.limit) if room else "",
                words,
            ]
            table.add_row(*cells[: len(table.columns)])
    if count <= most:
        return table
    from rich.console import Group

    return Group(table, f" and {counted(count - most, 'more device')}: a higher terminal, or --once, shows all")


def _cut(text: str) -> Any:
    """A text that stays on one line. A column of such texts gets narrower first."""
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ellipsis")


def _clients(stats: StatsReply, use: Mapping[int, Mapping[int, float]], width: int) -> Any:
    from rich.table import Table
    from rich.text import Text

    from pathways.cluster.snapshots import memory_of_clients

    is_narrow = width < _NARROW
    table = Table(box=None)
    table.add_column("client" if not is_narrow else "", no_wrap=True)
    table.add_column("name", max_width=max(8, width // 3))
    for title in ("time", "memory") if is_narrow else ("pid", "weight", "priority", "devices' time", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    count = sum(len(host.devices) for host in stats.hosts if not is_free(host))
    held = memory_of_clients(stats)
    for position, each in enumerate(sorted(stats.clients, key=lambda each: each.client)):
        number = each.client
        time_share = sum(parts.get(number, 0.0) for parts in use.values()) / max(count, 1)
        table.add_row(
            Text(str(number), _color(position)),
            _cut(each.name),
            *([] if is_narrow else [str(each.pid), f"{each.weight:g}", str(each.priority)]),
            f"{time_share:.1%}",
            bytes_text(held.get(number, 0)),
            _cut("suspended" if each.suspended else ""),
        )
    return table


def _color(position: int) -> str:
    return ("cyan", "yellow", "green", "magenta", "blue", "red")[position % 6]
