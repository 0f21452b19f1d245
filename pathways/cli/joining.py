"""What `pathways up` says and does so that other machines can join."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

import click

from pathways import errors
from pathways.process.config import MAX_DEVICES_PER_HOST, MAX_MACHINES
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


def shape_of(
    given: tuple[int | None, int | None, int | None], bounds: tuple[int | None, int | None], listen: str | None
) -> dict[str, int]:
    """The shape that `up` gives a cluster, for `start_local_cluster`: a fixed one, unless machines bring it.

    Args:
        given: --islands, --hosts-per-island, --devices-per-host.
        bounds: --max-machines, --max-devices-per-host.
        listen: --listen.

    Raises:
        OptionError: they contradict each other.
    """
    is_fixed = listen is None or any(given)
    if is_fixed and any(bounds):
        raise errors.OptionError(
            "--max-machines and --max-devices-per-host go with --listen HOST:PORT, and without --islands, "
            "--hosts-per-island and --devices-per-host: they are of a cluster whose machines bring islands of any shape"
        )
    if is_fixed:
        return dict(
            zip(("islands", "hosts_per_island", "devices_per_host"), (each or 1 for each in given), strict=True)
        )
    return {"max_machines": bounds[0] or MAX_MACHINES, "devices_per_host": bounds[1] or MAX_DEVICES_PER_HOST}


def tell_how_to_join(where: Listening, handle: LocalClusterHandle) -> None:
    """Prints the line by which the first machine joins, to standard error."""
    from pathways.trust import Address, Role, Tokens

    port = handle.port
    if (listens := Address.parse(port)).is_everywhere:
        port = str(Address(socket.gethostname(), listens.port))
    if not sys.stderr.isatty():  # what is printed may go to a journal, where a token is no secret
        click.echo(f"machines join at {port}; `pathways token --role host` makes a token for each", err=True)
        return
    token = Tokens(authority_folder(handle.directory)).make(Role.HOST, FIRST_TOKEN_S)
    options = handle.options
    shape = f"--hosts {options.hosts_per_island} --devices-per-host {options.devices_per_host}"
    if options.max_machines:
        shape = f"--hosts N --devices-per-host N (up to {options.devices_per_host})"
    if where.insecure_plaintext:
        click.echo("NOTHING is encrypted between machines: who is on the network can read and change it.", err=True)
    click.echo(
        "On another machine, within the hour (the token serves one machine; `pathways token` makes more):", err=True
    )
    if where.insecure_plaintext:
        shape += " --insecure-plaintext"
    click.echo(f"  PATHWAYS_TOKEN={token} \\\n    pathways agent {port} {shape}", err=True)
