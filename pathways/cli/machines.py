"""`pathways drain` and `pathways undrain`: take machines, islands and hosts out of use, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from pathways.cli.clients import only_cluster
from pathways.cli.text import DURATION

if TYPE_CHECKING:
    from pathways.cluster.drain_target import DrainTarget

_USAGE = "{machine NAME | island NUMBER | host NUMBER} [ADDRESS]"


def _parsed(words: Sequence[str]) -> tuple[DrainTarget, str]:
    """What is named, and the address of the cluster. The word `machine` may be left out."""
    from pathways.cluster.drain_target import KINDS, DrainTarget

    kind, *rest = words if words[0] in KINDS else ("machine", *words)
    if not 1 <= len(rest) <= 2:
        raise click.UsageError(f"expected {_USAGE}, got {' '.join(words)!r}")
    which, *address = rest
    if kind != "machine" and not (which.isascii() and which.isdecimal()):
        raise click.UsageError(f"expected the number of {'an island' if kind == 'island' else 'a host'}, got {which!r}")
    target = DrainTarget.of(**{kind: which if kind == "machine" else int(which)})
    return target, address[0] if address else only_cluster()


@click.command(short_help="Take hosts out of use without losing a buffer.")
@click.argument("what", nargs=-1, required=True, metavar=_USAGE)
@click.option(
    "--timeout", type=DURATION, default="60s", show_default=True, help="How long to wait until everything has moved."
)
@click.option("--force", is_flag=True, help="Drain it then, whatever lies there; a machine's arrays are lost.")
def drain(what: tuple[str, ...], timeout: float, force: bool) -> None:
    """Take a machine, an island or a host out of use: it gets no new slices, and the clients' libraries move the slices
    that lie there to other hosts. A machine then leaves the cluster. An island or a host stays, and gets no slices
    until `pathways undrain`.

    ADDRESS is what `pathways up` printed; this user's cluster on this machine when it is not given. `pathways status`
    shows machines, islands and hosts. When slices have no room elsewhere, or their clients do not answer in time,
    nothing is drained, and the message names them.
    """
    from pathways.cluster.operator import drain as drain_target

    target, address = _parsed(what)
    island = drain_target(address, target, timeout, force)
    if target.kind == "machine":
        click.echo(f"{target} has left; the place of island {island} is free")
    else:
        click.echo(f"{target} is drained; `pathways undrain {target}` lets slices lie there again")


@click.command(short_help="Let slices lie on drained hosts again.")
@click.argument("what", nargs=-1, required=True, metavar=_USAGE)
def undrain(what: tuple[str, ...]) -> None:
    """Let slices lie on a machine, an island or a host again that `pathways drain` has drained."""
    from pathways.cluster.operator import undrain as undrain_target

    target, address = _parsed(what)
    undrain_target(address, target)
    click.echo(f"{target} takes slices again")
