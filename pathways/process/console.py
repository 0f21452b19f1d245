"""Where commands print: a terminal, in its width; or a pipe or file, which has none, so nothing is cut or wrapped."""

from __future__ import annotations

import sys

from rich.console import Console

#: Wider than any table here; tables take what they need.
_UNBOUNDED = 10_000


def standard_output() -> Console:
    """A console on standard output."""
    console = Console()
    if not sys.stdout.isatty():  # whatever the environment says of colors
        console.width = _UNBOUNDED
    return console
