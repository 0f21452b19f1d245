"""What an operator does with a cluster's clients: `suspend` and `resume`."""

from __future__ import annotations

import click

from pathways.cli.text import bytes_text


@click.command(short_help="Take a client off the devices.")
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
        f"client {client} is suspended; {bytes_text(left)} left the devices\n"
        f"`pathways resume {address} {client}` brings it back"
    )


@click.command(short_help="Bring a suspended client back.")
@click.argument("address")
@click.argument("client", type=click.IntRange(0))
def resume(address: str, client: int) -> None:
    """Bring the buffers of a suspended CLIENT back to its devices, then take its work again."""
    from pathways.cluster.remote import resume as resume_client

    came = resume_client(address, client)
    click.echo(f"client {client} is not suspended any more; {bytes_text(came)} came back to the devices")
