"""What `pathways up` says and does so that other machines can join."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from pathways import errors
from pathways.process.run_directory import authority_folder

if TYPE_CHECKING:
    from pathways.cluster.launcher import Listening, LocalClusterHandle

#: A token that `up` prints lives so long, in seconds. `pathways token` makes more.
FIRST_TOKEN_S = 3600.0


def listening(
    listen: str | None, authority: str | None, insecure_plaintext: bool, *, listens_always: bool = False
) -> Listening | None:
    """What the options of `up` ask for. `listens_always`: without `--listen`, the address is empty.

    Raises:
        OptionError: they contradict each other.
    """
    from pathways.cluster.launcher import Listening
    from pathways.trust import Address

    if listen is None:
        if listens_always:
            return Listening("", os.path.abspath(authority) if authority else "", insecure_plaintext)
        if authority is not None or insecure_plaintext:
            raise errors.OptionError("--authority and --insecure-plaintext go with --listen HOST:PORT")
        return None
    where = Address.parse(listen, listens=True).endpoint
    return Listening(where, os.path.abspath(authority) if authority else "", insecure_plaintext)


def tell_how_to_join(where: Listening, handle: LocalClusterHandle) -> None:
    """Prints the line by which the first machine joins, to standard error."""
    from pathways.trust import Role, Tokens

    if not sys.stderr.isatty():  # what is printed may go to a journal, where a token is no secret
        click.echo(f"machines join at {handle.port}; `pathways token --role host` makes a token for each", err=True)
        return
    token = Tokens(authority_folder(handle.directory)).make(Role.HOST, FIRST_TOKEN_S)
    shape = f"--hosts {handle.options.hosts_per_island} --devices-per-host {handle.options.devices_per_host}"
    if where.insecure_plaintext:
        click.echo("NOTHING is encrypted between machines: who is on the network can read and change it.", err=True)
    click.echo(
        "On another machine, within the hour (the token serves one machine; `pathways token` makes more):", err=True
    )
    if where.insecure_plaintext:
        shape += " --insecure-plaintext"
    click.echo(f"  PATHWAYS_TOKEN={token} \\\n    pathways agent {handle.port} {shape}", err=True)
