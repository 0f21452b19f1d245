"""`pathways drain`: lets a machine leave a cluster."""

from __future__ import annotations

import click

from pathways.cli.clients import only_cluster
from pathways.cli.text import DURATION


@click.command(short_help="Let a machine go without losing a buffer.")
@click.argument("machine")
@click.argument("address", required=False)
@click.option(
    "--timeout", type=DURATION, default="60s", show_default=True, help="How long to wait until no slice lies there."
)
@click.option("--force", is_flag=True, help="Let it go then, whatever lies there; its arrays are lost.")
def drain(machine: str, address: str | None, timeout: float, force: bool) -> None:
    """Give MACHINE no new slices, wait until none lies there, and let it leave the cluster at ADDRESS.

    ADDRESS is what `pathways up` printed; this user's cluster on this machine when it is not given. `pathways status`
    shows the machines. A slice's client can move it (`cluster.remap`) or release it. When the time is over, the machine
    stays, and the message says whose slices lie there.
    """
    from pathways.cluster.operator import drain as drain_machine

    island = drain_machine(address or only_cluster(), machine, timeout, force)
    click.echo(f"machine {machine} leaves; the place of island {island} is free")
