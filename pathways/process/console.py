"""The console of the commands. A terminal has a width; a pipe or file has none, so its output is not cut or wrapped.
What the output's encoding does not have, such as a client's name in an ASCII locale, is shown as "?".
"""

from __future__ import annotations

import io
import sys

from rich.console import Console

#: Columns; wider than any table here. A table takes only the width that it needs.
_UNBOUNDED = 10_000


def standard_output() -> Console:
    """A console on standard output."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    console = Console()
    if not sys.stdout.isatty():  # also when the environment asks for colors
        console.width = _UNBOUNDED
    return console
