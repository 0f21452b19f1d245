"""What an operator does with the tokens by which machines, clients and operators come in: `token` and its commands.

It works on the folder of a cluster's authority, on the controller's machine; the controller sees what changes there.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import click

from pathways import errors
from pathways.cli.text import DURATION, duration_text

_ROLES = ("client", "host", "operator")
_FOLDER = click.option(
    "--authority",
    "--folder",
    "folder",
    type=click.Path(),
    default=None,
    help="The authority's folder, as `pathways up --authority` has it; that of this user's only cluster, or of "
    "PATHWAYS_ADDRESS, if not given.",
)


class _Uses(click.ParamType[int | None]):
    """How often a token may be traded: a number, or "any"."""

    name = "number|any"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """None for "any"."""
        if value is None or value == "any":
            return None
        if isinstance(value, int) or (value.isascii() and value.isdecimal() and int(value) > 0):
            return int(value)
        self.fail(f"expected a positive number or any, got {value!r}", param, ctx)


@click.group(invoke_without_command=True, short_help="Make, list and revoke tokens for other machines.")
@click.option("--role", type=click.Choice(_ROLES), help="Who it is for: a machine that brings hosts, or people.")
@click.option(
    "--ttl", type=DURATION, default="1h", show_default=True, help="How long it may be used, as 90s, 1h or 7d."
)
@click.option("--uses", type=_Uses(), help="How many may come in with it. If not given: 1 for host, else any number.")
@click.option(
    "--name", default="", help="The only name that it is for, which is its holder's then; any free one if not given."
)
@click.option("--file", "path", type=click.Path(), help="Write it there, for this user only, instead of showing it.")
@_FOLDER
@click.pass_context
def token(
    ctx: click.Context,
    role: str | None,
    ttl: float,
    uses: int | None,
    name: str,
    path: str | None,
    folder: str | None,
) -> None:
    """Make a token, which lets a machine, client or operator join a cluster that listens (`pathways up --listen`).

    The token is printed on standard output, and cannot be shown again. Who has it can come in: keep it secret. What it
    is traded for, a certificate, is valid for a day, and renewed until the token is revoked.
    """
    ctx.obj = folder
    if ctx.invoked_subcommand is not None:
        if role is not None or path is not None:
            raise click.UsageError(f"--role and --file make a token; they are not for {ctx.invoked_subcommand!r}")
        return
    if role is None:
        raise click.UsageError(f"expected --role {'|'.join(_ROLES)}, or one of the commands list and revoke")
    from pathways.trust.files import write_private

    given = {} if ctx.get_parameter_source("uses") is click.core.ParameterSource.DEFAULT else {"uses": uses}
    text = _tokens(folder).make(role, ttl, name=name, **given)
    number = text.split(".")[2]
    if path is None:
        click.echo(text)
    else:
        try:
            write_private(path, f"{text}\n".encode("ascii"))
        except OSError as error:
            _tokens(folder).revoke(int(number))
            raise errors.OptionError(f"the token cannot be written to {path}: {error.strerror}") from None
    click.echo(f"token {number} for the role {role}, for {duration_text(ttl)}; keep it secret", err=True)


@token.command("list", short_help="Show a cluster's tokens.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@_FOLDER
@click.pass_obj
def list_tokens(outer: str | None, as_json: bool, folder: str | None) -> None:
    """Show the tokens of a cluster, without their secrets. Those that expired a week ago are left out."""
    now = time.time()
    records = _tokens(folder or outer).list()
    if as_json:
        rows = [
            {
                "number": each.number,
                "role": each.role.value,
                "state": each.state(now),
                "created": each.created,
                "expires": each.expires,
                "uses": each.uses,
                "used": each.used,
            }
            for each in records
        ]
        click.echo(json.dumps(rows))
        return
    from rich.table import Table

    from pathways.process.console import standard_output

    table = Table(box=None, pad_edge=False)
    for title in ("token", "role", "state", "expires in", "used"):
        table.add_column(title, no_wrap=True)
    for each in records:
        left = duration_text(each.expires - now) if each.expires > now else "-"
        used = f"{each.used}" if each.uses is None else f"{each.used} of {each.uses}"
        table.add_row(str(each.number), each.role.value, each.state(now), left, used)
    standard_output().print(table)


@token.command(short_help="Revoke tokens.")
@click.argument("numbers", type=click.IntRange(1), nargs=-1, required=True)
@_FOLDER
@click.pass_obj
def revoke(outer: str | None, numbers: tuple[int, ...], folder: str | None) -> None:
    """Revoke the tokens NUMBERS, as `pathways token list` shows them.

    Nobody comes in with them any more. Who has come in keeps its open connections, and gets no new one.
    """
    tokens = _tokens(folder or outer)
    for number in numbers:
        tokens.revoke(number)
        click.echo(f"token {number} is revoked")


def _tokens(folder: str | None) -> Any:
    from pathways.process.run_directory import authority_folders
    from pathways.trust import Tokens

    if folder is None:
        address = os.environ.get("PATHWAYS_ADDRESS")
        found = authority_folders(address)
        if address and not found:
            raise errors.OptionError(
                f"PATHWAYS_ADDRESS={address} is no cluster of yours on this machine that listens: name the authority's "
                "folder by --authority, on the cluster's machine"
            )
        if len(found) != 1:
            there = (
                "no cluster of yours on this machine listens"
                if not found
                else f"{len(found)} of your clusters listen, with {', '.join(found)}"
            )
            raise errors.OptionError(f"{there}: name the authority's folder by --authority")
        folder = found[0]
    return Tokens(folder)
