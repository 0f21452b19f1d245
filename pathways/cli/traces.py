"""`pathways trace`: what a cluster does, in a file that Perfetto opens."""

from __future__ import annotations

import os
import signal
import time

import click

from pathways import errors
from pathways.cli.clients import only_cluster


@click.command(short_help="Record what a cluster does, for Perfetto.")
@click.argument("address", required=False)
@click.option(
    "--seconds", type=float, default=5.0, show_default=True, help="How long; Ctrl-C or SIGTERM ends it earlier."
)
@click.option("--out", type=click.Path(), default="trace.json.gz", show_default=True, help="The file.")
@click.option("--plot", type=click.Path(), default=None, help="A picture too: its file, like trace.png.")
def trace(address: str | None, seconds: float, out: str, plot: str | None) -> None:
    """Record what a cluster does, and write a file that https://ui.perfetto.dev opens.

    ADDRESS is what `pathways up` printed; PATHWAYS_ADDRESS, or this user's cluster on this machine when it is not
    given.

    It has a track per device, coloured by client, with programs, computations, transfers and waits, and each client's
    runs. All clients are recorded; they notice nothing but a little time per run.
    """
    from pathways.cluster.operator import record
    from pathways.cluster.trace_file import TraceFile
    from pathways.cluster.trace_timeline import Timeline

    if not 0 < seconds < float("inf"):  # NaN too
        raise click.BadParameter(f"expected a positive number of seconds, got {seconds:g}", param_hint="--seconds")
    draw = _picture(plot) if plot is not None else None
    if plot is not None and os.path.realpath(plot) == os.path.realpath(out):
        raise errors.TraceFileError(f"--out and --plot name one file, {out}: give the picture a name of its own")
    file = TraceFile(out)
    # `timeout`, or a service manager: as Ctrl-C.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with record(address or only_cluster()) as recording:
            try:
                click.echo(f"recording for {seconds:g} s ...", err=True)
                until = time.monotonic() + seconds
                while recording.is_on and (left := until - time.monotonic()) > 0:
                    time.sleep(min(left, 0.05))
            except KeyboardInterrupt:
                click.echo("ended early", err=True)
            recorded = recording.finish()
        timeline = Timeline(recorded)
        file.write(timeline)
    finally:
        signal.signal(signal.SIGTERM, before)
        file.discard()
    for remark in timeline.remarks:
        click.echo(f"remark: {remark}", err=True)
    click.echo(
        f"{out}: {len(timeline.runs)} runs, {len(timeline.computations)} computations, "
        f"{len(timeline.transfers)} transfers; open it at https://ui.perfetto.dev"
    )
    if draw is not None:
        draw(timeline)
        click.echo(str(plot))
    if recorded.failure is not None:
        raise recorded.failure


def _picture(path: str):  # type: ignore[no-untyped-def]
    """A function that draws a timeline; it is checked before the trace that it can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise click.ClickException(
            "--plot needs matplotlib, which is not installed: pip install matplotlib, or leave --plot out"
        ) from error
    from pathways.cli.trace_plot import check_path, draw

    check_path(path)
    return lambda timeline: draw(timeline, path)
