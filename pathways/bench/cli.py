"""The command `pathways bench`: the benches that an operator runs on a machine of their own."""

from __future__ import annotations

import click

from pathways.bench import dispatch, micro, proxy, transfer
from pathways.bench.command import as_command


@click.group()
def bench() -> None:
    """Measure the runtime beside plain JAX."""


bench.add_command(as_command("dispatch", dispatch.Settings, dispatch.run, dispatch.picture))
bench.add_command(as_command("micro", micro.Settings, micro.run))
bench.add_command(as_command("proxy", proxy.Settings, proxy.run))
bench.add_command(as_command("transfer", transfer.Settings, transfer.run, transfer.picture))
