"""The group of all commands, and those that have no module of their own: `up` and `bench`."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from pathways import errors
from pathways.cli.agent import agent
from pathways.cli.clients import clients, limit, resume, suspend
from pathways.cli.log_options import log_options
from pathways.cli.logs import logs
from pathways.cli.machines import drain, undrain
from pathways.cli.monitoring import dashboard, metrics
from pathways.cli.on_ray import ray_options, start_on_ray, taken_ray_options
from pathways.cli.proxy import proxy
from pathways.cli.status import status
from pathways.cli.text import SIZE
from pathways.cli.tokens import token
from pathways.cli.top import top
from pathways.cli.traces import trace
from pathways.process import installation
from pathways.process.config import (
    BY_CLIENT,
    MAX_DEVICES_PER_HOST,
    MAX_MACHINES,
    MOST_DEVICES,
    MOST_HOSTS,
    POLICIES,
    WHEN_FULL,
)


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
        jax, jaxlib = (importlib.metadata.version(name) for name in ("jax", "jaxlib"))
        click.echo(f"pathways {installation.version()} (jax {jax}, jaxlib {jaxlib})")
        if problem := installation.problem():
            click.echo(f"warning: {problem}", err=True)
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def main() -> None:
    """Pathways for JAX: one program drives many accelerators."""


@main.command(short_help="Start a cluster on this machine, or on Ray.")
@click.option(
    "--on",
    type=click.Choice(["here", "ray"]),
    default="here",
    show_default=True,
    help="Where the hosts are; on Ray, with the options below.",
)
@click.option("--islands", type=click.IntRange(1), default=None, help="Number of islands; 1 if not given.")
@click.option(
    "--hosts-per-island", type=click.IntRange(1), default=None, help="Host processes of each island; 1 if not given."
)
@click.option("--devices-per-host", type=click.IntRange(1), default=None, help="Devices of each host; 1 if not given.")
@click.option(
    "--max-machines",
    type=click.IntRange(1, MOST_HOSTS),
    default=None,
    help="With --listen and none of the three above, machines bring islands of any shape: so many may join "
    f"[default: {MAX_MACHINES}].",
)
@click.option(
    "--max-devices-per-host",
    type=click.IntRange(1, MOST_DEVICES),
    default=None,
    help=f"And a host has so many devices at most [default: {MAX_DEVICES_PER_HOST}].",
)
@click.option("--platform", default=None, help="cpu, cuda, rocm or tpu; what this machine has if not given.")
@click.option("--device-memory", type=SIZE, default=None, help="What programs may use of each device, as 1GiB.")
@click.option("--transfer-memory", type=SIZE, default=None, help="What transfers may land in, of each host.")
@click.option(
    "--policy",
    type=click.Choice(list(POLICIES)),
    default="share",
    show_default=True,
    help="Whose run is next: " + "; ".join(f"{name}: {what}" for name, what in POLICIES.items()) + ".",
)
@click.option(
    "--when-full",
    type=click.Choice(list(WHEN_FULL)),
    default="refuse",
    show_default=True,
    help="Work that other clients' arrays leave no memory for: "
    + "; ".join(f"{name}: {what}" for name, what in WHEN_FULL.items())
    + ".",
)
@click.option(
    "--checkpoint-root",
    type=click.Path(),
    default=None,
    help="The folder where clients' checkpoints must lie, with {client} for the client's name; anywhere if not given.",
)
@click.option("--client-memory", type=SIZE, default=None, help="What one client may use of each device, as 1GiB.")
@click.option("--client-runs", type=click.IntRange(1), default=None, help="Runs that one client may have under way.")
@click.option("--max-weight", type=float, default=None, help="The greatest weight that a client may ask for.")
@click.option("--max-priority", type=int, default=None, help="The greatest priority that a client may ask for.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=None,
    help="Where agents of other machines join. They bring the hosts; none runs here.",
)
@click.option(
    "--authority",
    type=click.Path(file_okay=False),
    default=None,
    help="The folder of the keys by which machines trust each other; made if it is not there.",
)
@click.option("--insecure-plaintext", is_flag=True, help="Encrypt nothing between machines.")
@click.option(
    "--proxy",
    "proxied",
    metavar="WHERE",
    default=None,
    help="Serve unmodified JAX of this machine, too, as `pathways proxy`: a port, HOST:PORT, or unix:PATH.",
)
@click.option(
    "--metrics",
    "metrics_port",
    metavar="PORT",
    default=None,
    help="Serve metrics for Prometheus, too, as `pathways metrics`, at 127.0.0.1:PORT.",
)
@click.option(
    "--dashboard",
    "dashboard_port",
    metavar="PORT",
    default=None,
    help="Serve a page for browsers, too, as `pathways dashboard`, at 127.0.0.1:PORT.",
)
@log_options
@ray_options
def up(
    on: str,
    islands: int | None,
    hosts_per_island: int | None,
    devices_per_host: int | None,
    max_machines: int | None,
    max_devices_per_host: int | None,
    platform: str | None,
    device_memory: int | None,
    transfer_memory: int | None,
    policy: str,
    listen: str | None,
    authority: str | None,
    insecure_plaintext: bool,
    proxied: str | None,
    metrics_port: str | None,
    dashboard_port: str | None,
    **allowance: Any,
) -> None:
    """Start a cluster on this machine and keep it in the foreground.

    Prints its address on standard output, for pathways.connect(ADDRESS). Ctrl-C, or SIGTERM, ends it.

    With --listen, agents of other machines bring the hosts: of the shape that is given here, or, if none is, of any.

    With --proxy, what is printed next are the variables for programs that do not know of Pathways. With --metrics, it
    is where Prometheus finds them; with --dashboard, the address that a browser opens.

    With --on ray, only the controller is on this machine. The hosts of each island run in an actor of a Ray cluster.
    """
    from pathways.cli.joining import listening, shape_of, tell_how_to_join
    from pathways.cluster.beside_process import BesideProcess
    from pathways.cluster.launcher import start_local_cluster
    from pathways.cluster.proxy_process import ProxyProcess
    from pathways.process.client_terms import ClientTerms

    asked_of_ray = taken_ray_options(allowance, on)
    where = listening(listen, authority, insecure_plaintext, listens_always=on == "ray")
    start: Callable[..., Any] = functools.partial(start_local_cluster, listen=where)
    if on == "ray":
        start = functools.partial(start_on_ray, asked_of_ray, where)

    shape = shape_of(
        (islands, hosts_per_island, devices_per_host),
        (max_machines, max_devices_per_host),
        listen if on == "here" else None,
    )

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    try:
        handle = start(
            **shape,
            platform=platform,
            device_memory=device_memory,
            transfer_memory=transfer_memory,
            policy=policy,
            terms=ClientTerms(name="pathways-up"),
            **allowance,
        )
    except KeyboardInterrupt:
        sys.exit(130)
    beside: list[BesideProcess] = []
    try:
        click.echo(handle.address)
        sys.stdout.flush()
        if proxied is not None:
            root = str(allowance["checkpoint_root"] or "").partition(BY_CLIENT)[0]  # the hosts look at the rest
            listen = f"127.0.0.1:{proxied}" if proxied.isdecimal() else proxied
            served = ProxyProcess(handle.address, listen, checkpoint_root=root and os.path.abspath(root))
            beside.append(served)
            click.echo(" ".join(f"{name}={value}" for name, value in served.variables.items()))
            sys.stdout.flush()
        for name, port in (("metrics", metrics_port), ("dashboard", dashboard_port)):
            if port is not None:
                beside.append(BesideProcess(name, [handle.address, "--port", port], 1))
                click.echo(beside[-1].lines[0])
                sys.stdout.flush()
        if where is not None and on == "here":
            tell_how_to_join(where, handle)
        click.echo("Ctrl-C ends it.", err=True)
        while (failure := handle.control.failure()) is None:
            time.sleep(0.1)
            for each in [each for each in beside if each.failure()]:
                beside.remove(each)
                told = f"{each.failure()}; the cluster goes on, and `pathways {each.name}` starts another one"
                click.echo(told, err=True)
    except KeyboardInterrupt:
        click.echo("ending the cluster ...", err=True)
    else:
        # A cluster that was closed on request ends without an error, as with Ctrl-C.
        if not isinstance(failure, errors.ClusterClosedError):
            raise failure
    finally:
        for each in beside:
            each.close()
        handle.close()


@main.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def bench(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Measure Pathways and its rivals."""
    from pathways.bench import cli

    names = ctx.help_option_names
    ctx.exit(cli.bench.main(list(arguments), ctx.command_path, standalone_mode=False, help_option_names=names) or 0)


_watching = (status, top, clients, logs, trace, metrics, dashboard)
for each in (agent, *_watching, drain, undrain, limit, proxy, suspend, resume, token):
    main.add_command(each)
