"""The options of the commands that start processes with logs: --log-level and --log-format."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from pathways.process.log_lines import FORMAT_VARIABLE, FORMATS, LEVEL_VARIABLE, LEVELS

_F = TypeVar("_F", bound=Callable[..., Any])


def _into_environment(variable: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    def put(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
        if value is not None and not ctx.resilient_parsing:
            os.environ[variable] = value

    return put


def log_options(command: _F) -> _F:
    """Adds the options. What they choose becomes the environment of this process, which its children inherit."""
    for name, variable, choices, what in (
        ("--log-format", FORMAT_VARIABLE, FORMATS, "The lines of logs; json is an object per line"),
        ("--log-level", LEVEL_VARIABLE, LEVELS, "What logs have"),
    ):
        command = click.option(
            name,
            type=click.Choice(choices),
            default=None,
            expose_value=False,
            callback=_into_environment(variable),
            help=f"{what}. Or the variable {variable}.",
        )(command)
    return command
