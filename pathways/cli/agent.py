"""`pathways agent`: joins a cluster with this machine."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import click

from pathways import errors
from pathways.cli.log_options import log_options
from pathways.process.run_directory import state_folder


@click.command(short_help="Join a cluster with this machine.")
@click.argument("address")
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False),
    envvar="PATHWAYS_TOKEN_FILE",
    default=None,
    help="The file with the token; or give it in PATHWAYS_TOKEN_FILE.",
)
@click.option("--hosts", type=click.IntRange(1), default=1, show_default=True, help="Host processes to run.")
@click.option("--devices-per-host", type=click.IntRange(1), default=1, show_default=True, help="Devices of each host.")
@click.option("--platform", default=None, help="cpu, cuda, rocm or tpu; what this machine has if not given.")
@click.option(
    "--island",
    metavar="NAME",
    default=None,
    help="The island, by a number or a name, which machines with a fabric share; any free one if not given.",
)
@click.option(
    "--island-hosts",
    metavar="N",
    type=click.IntRange(1),
    default=None,
    help="Hosts of the island on all its machines, which the first of them says; those of this machine if not given.",
)
@click.option(
    "--fabric",
    metavar="WHERE",
    default=None,
    help="For an island on several machines: the network of its collectives, which encrypt nothing. An address or an "
    "interface of this machine, or a network such as 10.1.0.0/16. Or link: between the agents, encrypted, slower.",
)
@click.option("--trusted-fabric", is_flag=True, help="The fabric is private, although its address is a public one.")
@click.option(
    "--relay",
    metavar="HOST:PORT",
    default=None,
    help="Listen here for other machines, and carry their links to the controller.",
)
@click.option(
    "--via",
    metavar="ADDRESS",
    default=None,
    help="The relay that carries this machine's link, pathways://HOST:PORT; the controller says which if not given.",
)
@click.option("--name", default=None, help="The name of this machine, for people; its host name if not given.")
@click.option(
    "--credentials",
    type=click.Path(dir_okay=False),
    default=None,
    help="The file in which this machine keeps its certificate.",
)
@click.option("--insecure-plaintext", is_flag=True, help="The cluster was started with the same.")
@log_options
def agent(address: str, token_file: str | None, credentials: str | None, insecure_plaintext: bool, **what: Any) -> None:
    """Join the cluster at ADDRESS, run hosts for it, and stay in the foreground.

    ADDRESS is what `pathways up --listen` printed, pathways://HOST:PORT. The token comes from --token-file, or from the
    variable PATHWAYS_TOKEN. It is traded for a certificate, which later calls of this command use. Ctrl-C, or SIGTERM,
    ends it.
    """
    from pathways.cluster.agent_launcher import AgentHandle
    from pathways.trust import Address, given_token

    Address.parse(address)  # what is wrong with it is said before anything about tokens
    name = what.pop("name") or socket.gethostname().split(".")[0]
    token = given_token(token_file, os.environ)
    kept = None if insecure_plaintext else credentials or os.path.join(state_folder(), f"agent-{name}.pem")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    handle = None
    try:
        handle = AgentHandle(address, token, kept, name=name, **what)
        handle.wait_joined()
        via = f" over the relay {handle.via}" if handle.via else ""
        click.echo(f"joined island {handle.island}{via}. Ctrl-C ends it.", err=True)
        if handle.relay:
            click.echo(f"carries machines that join with --via {handle.relay}", err=True)
        handle.wait()
    except KeyboardInterrupt:
        click.echo("ending the hosts ...", err=True)
    except errors.ClusterClosedError as left:
        click.echo(str(left), err=True)
    finally:
        if handle is not None:
            handle.close()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
