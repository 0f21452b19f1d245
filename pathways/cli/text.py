"""Sizes, times and names as the command reads and prints them."""

from __future__ import annotations

import fractions
import math
import re
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pathways.protocol.control_pb2 import HostStats

_UNITS = {"": 1, "B": 1, **{f"{letter}{rest}": base**power for power, letter in enumerate("KMGT", 1)
          for rest, base in (("", 1024), ("iB", 1024), ("B", 1000))}}  # fmt: skip


class _Size(click.ParamType[int]):
    """A number of bytes: 1073741824, 1GiB, 1.5G, 2GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes that a text means."""
        if isinstance(value, int):
            return value
        units = {unit.upper(): factor for unit, factor in _UNITS.items()}
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        count = int(fractions.Fraction(match[1]) * units.get(match[2].upper(), 0)) if match else 0
        if count < 1:
            self.fail(f"expected a size like 1073741824, 1GiB or 1.5GB, got {value!r}", param, ctx)
        return count


SIZE = _Size()


class _Duration(click.ParamType[float]):
    """A time with a unit: 90s, 30m, 1h, 7d; without one in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number of seconds that a text means."""
        if isinstance(value, int | float):
            return float(value)
        match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhd]?)\s*", str(value))
        seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]] if match else 0.0
        if seconds <= 0:
            self.fail(f"expected a time like 90s, 30m, 1h or 7d, got {value!r}", param, ctx)
        return seconds


DURATION = _Duration()


class Seconds(click.FloatRange):
    """A time in seconds between two bounds. click's own type lets NaN pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number of seconds."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"expected seconds {self._describe_range()}, got {value!r}", param, ctx)
        return seconds


def of_others(text: str) -> str:
    """A text of a client or a host as a table shows it: a terminal obeys nothing of it, nor does rich."""
    import rich.markup

    return rich.markup.escape("".join(each if each.isprintable() else "?" for each in text))


def bytes_text(count: float) -> str:
    """A number of bytes in the unit that fits: 3 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def counted(count: int, noun: str) -> str:
    """For example `1 client`, `2 clients`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration_text(seconds: float) -> str:
    """A time as 1:05 (minutes) or 2:01:05 (hours)."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def is_free(host: HostStats) -> bool:
    """Whether no machine has the place of a host: its machine has left, or none has come yet."""
    return host.machine_name == "-"


def machine_text(host: HostStats) -> str:
    """The machine of a host, by the one name that all commands and errors use; of those that have none, a number."""
    return host.machine_name or str(host.machine)
