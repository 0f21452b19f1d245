"""`pathways metrics`: what a cluster does, for Prometheus and OpenTelemetry. `pathways dashboard`: in a browser."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import click

from pathways.cli.clients import only_cluster
from pathways.cli.running import until_told_to_end


def _port_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What both commands take."""
    for option in (
        click.argument("address", required=False),
        click.option(
            "--port",
            "where",
            metavar="PORT",
            required=True,
            help="Where to listen at 127.0.0.1; 0 takes any free port. Or HOST:PORT, of the loopback interface.",
        ),
        click.option(
            "--secret-file",
            type=click.Path(dir_okay=False),
            envvar="PATHWAYS_SECRET_FILE",
            default=None,
            help="The file of the secret that callers must know; it is made if it is not there. "
            "A new secret with each start if not given.",
        ),
        click.option("--until-input-ends", is_flag=True, hidden=True, help="End with standard input."),
    ):
        command = option(command)
    return command


@click.command(short_help="Serve a cluster's metrics for Prometheus.")
@_port_options
@click.option("--otlp", is_flag=True, help="Export them by OpenTelemetry as well, as the variables OTEL_* say.")
def metrics(address: str | None, where: str, secret_file: str | None, otlp: bool, until_input_ends: bool) -> None:
    """Serve the metrics of the cluster at ADDRESS, in the foreground, until Ctrl-C or SIGTERM.

    /metrics is for Prometheus. It wants the secret, which is printed, or lies in --secret-file: Prometheus takes the
    file as `authorization: {credentials_file: FILE}`. /healthz says 200 or 503 with the reason, to whoever asks.

    ADDRESS is what `pathways up` printed; PATHWAYS_ADDRESS, or this user's cluster on this machine when it is not
    given. One on another machine is looked at with this user's certificate or token, as `pathways top` does.
    """
    from pathways.cluster.snapshots import Snapshots
    from pathways.monitoring.local_server import LocalServer
    from pathways.monitoring.metrics import ClusterMetrics, check_installed, resources

    check_installed()
    secret = _secret(secret_file)
    with contextlib.ExitStack() as stack:
        snapshots = stack.enter_context(Snapshots(address or only_cluster(), timeout_s=5.0))
        snapshots.look()  # a wrong address is told at once
        values = ClusterMetrics(snapshots)
        if otlp:
            from pathways.monitoring.telemetry import exporting

            stack.enter_context(exporting(values))
        server = stack.enter_context(LocalServer(where, secret, resources(snapshots, values)))
        over = until_told_to_end(until_input_ends)
        click.echo(f"{server.origin}/metrics  Authorization: Bearer {f'(in {secret_file})' if secret_file else secret}")
        over.wait()


@click.command(short_help="Watch a cluster in a browser.")
@_port_options
def dashboard(address: str | None, where: str, secret_file: str | None, until_input_ends: bool) -> None:
    """Show live in a browser what the cluster at ADDRESS does, until Ctrl-C or SIGTERM.

    Open the address that is printed. What is behind # in it is a secret: whoever knows it sees, on this machine, what
    you may see. Devices by client over time, clients, memory, slices, hosts, machines, losses and logs.

    ADDRESS is what `pathways up` printed; PATHWAYS_ADDRESS, or this user's cluster on this machine when it is not
    given. One on another machine is looked at with this user's certificate or token, as `pathways top` does.
    """
    from pathways.cluster.snapshots import Snapshots
    from pathways.monitoring.dashboard import resources
    from pathways.monitoring.feed import Feed
    from pathways.monitoring.local_server import LocalServer

    secret = _secret(secret_file)
    with contextlib.ExitStack() as stack:
        snapshots = stack.enter_context(Snapshots(address or only_cluster()))
        snapshots.look()
        feed = stack.enter_context(Feed(snapshots))
        server = stack.enter_context(LocalServer(where, secret, resources(feed)))
        over = until_told_to_end(until_input_ends)
        click.echo(f"{server.origin}/#{quote(secret)}")
        over.wait()


def _secret(path: str | None) -> str:
    from pathways.monitoring.secret import new_secret, secret_in

    return secret_in(path) if path else new_secret()
