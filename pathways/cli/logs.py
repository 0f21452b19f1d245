"""`pathways logs`: the end of the log of one of a cluster's processes."""

from __future__ import annotations

import re
import sys

import click

from pathways.cli.clients import only_cluster

#: What a terminal would obey: all control characters but tab, line feed, and carriage return.
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")


@click.command(short_help="Show the log of a host, a machine's agent, or the controller.")
@click.argument("what")
@click.argument("address", required=False)
@click.option("--lines", type=click.IntRange(0), default=100, show_default=True, help="How many of the last lines.")
@click.option("--follow", "-f", is_flag=True, help="Show what is written from then on, too, until Ctrl-C.")
@click.option(
    "--restart",
    type=click.IntRange(0),
    default=None,
    help="The log of a host after so many restarts: 0 is its first start; the last one if not given.",
)
def logs(what: str, address: str | None, lines: int, follow: bool, restart: int | None) -> None:
    """Show the end of a log of the cluster at ADDRESS.

    WHAT is the number of a host, "controller", or the name of a machine for its agent (`agent:NAME` for one that is
    called like a number). ADDRESS is what `pathways up` printed; this user's cluster on this machine when it is not
    given. The log of a host that was lost is there as long as its machine's agent runs.
    """
    from pathways.cluster.operator import logs as read_logs

    whose = _meant(what)
    if restart is not None and not isinstance(whose, int):
        raise click.BadParameter("only a host is started again", param_hint="--restart")
    last = restart
    output, is_terminal = sys.stdout.buffer, sys.stdout.isatty()
    try:
        for part in read_logs(address or only_cluster(), whose, lines=lines, follow=follow, restart=restart):
            if isinstance(whose, int) and last is not None and part.restart != last:
                click.echo(f"host {whose} was started again: restart {part.restart}", err=True)
            last = part.restart
            output.write(_CONTROL.sub(b"?", part.text) if is_terminal else part.text)
            output.flush()
    except KeyboardInterrupt:
        if not follow:
            raise


def _meant(what: str) -> int | str | None:
    """A host's number, the name of a machine, or None for the controller."""
    if what == "controller":
        return None
    return int(what) if what.isascii() and what.isdigit() and len(what) < 10 else what.removeprefix("agent:")
