"""Shows the start of a cluster on a terminal: a bar that grows as the hosts pass the stages of their start."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from pathways.cluster.remote import StartupEvent
from pathways.plan.topology import counted, grid_text
from pathways.process.config import ClusterOptions
from pathways.protocol import control_pb2 as pb

_STAGES = {
    pb.StartupEvent.HOST_STARTED: "starting hosts",
    pb.StartupEvent.HOST_CONNECTED: "connecting hosts",
    pb.StartupEvent.HOST_JOINED: "joining islands",
    pb.StartupEvent.HOST_READY: "starting devices",
}


@contextlib.contextmanager
def shown(
    progress: Callable[[StartupEvent], None] | bool | None, options: ClusterOptions, platform: str, are_here: bool
) -> Iterator[Callable[[StartupEvent], None] | None]:
    """Yields the function to call with each event: the given function, one that draws a bar on stderr, or None.
    `are_here`: the hosts start here; else machines bring them.
    """
    if callable(progress):
        yield progress
        return
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting the controller", total=options.hosts * len(_STAGES))

        def tell(event: StartupEvent) -> None:
            if event.stage in _STAGES:
                bar.update(task, advance=1, description=_STAGES[event.stage])

        yield tell
    what = grid_text(options.islands, options.hosts_per_island, options.devices_per_host, platform)
    if options.max_machines:
        what = f"no hosts as yet: up to {counted(options.max_machines, 'machine')} bring them"
    elif not are_here:
        what = f"no hosts as yet: machines bring {what}"
    console.print(f"[green]✓[/green] {what}", highlight=False)
