"""A bench as a command: the fields of its settings are the options, and its report is shown, written and drawn.

    @dataclasses.dataclass(frozen=True)
    class Settings:
        only: tuple[str, ...] = option(PARTS, "What to measure.")
        repeats: int = option(5, "How often each is measured.")

    command = as_command("mpmd", Settings, run, picture)

`run(settings, say)` measures, and returns a report; `say` hears what is done meanwhile. It raises ValueError for what
cannot be measured, and `NotHere` for what this machine lacks. Its docstring is the command's help.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import rich.console

from pathways.bench import machine, processes
from pathways.bench.report import Report
from pathways.process.console import standard_output

Say = Callable[[str], object]
#: Draws the data of a report to a path, and to others beside it; returns the files that it has written.
Picture = Callable[[dict[str, Any], Path], list[Path]]
"""Draws a report's data into a file. False: there was nothing to draw."""


class NotHere(RuntimeError):
    """This machine lacks what the bench needs; the message says what to do."""


class _List(click.ParamType[tuple[Any, ...]]):
    """Integers from `least` on, or names if that is None, with commas between them."""

    def __init__(self, least: int | None) -> None:
        self._least = least
        self.name = "name,..." if least is None else "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",") if part.strip()]
        if self._least is None:
            return tuple(parts)
        try:
            numbers = tuple(int(part) for part in parts)
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < self._least:
            what = "positive integers" if self._least == 1 else f"integers from {self._least} on"
            self.fail(f"expected {what} with commas between them, got {value!r}", param, ctx)
        return numbers


def option(default: Any, text: str, least: float = 1, choices: Sequence[str] = ()) -> Any:
    """A field of settings that is an option. Its default says what it is: a number, or several, or names.

    Args:
        default: its value where it is not given.
        text: its help.
        least: of numbers; 0 of a float is not allowed itself.
        choices: of a word; without them it may be any text.
    """
    kind: click.ParamType[Any]
    if isinstance(default, tuple):
        kind = _List(int(least) if default and isinstance(default[0], int) else None)
    elif isinstance(default, str):
        kind = click.Choice(choices) if choices else click.STRING
    elif isinstance(default, float):
        kind = click.FloatRange(least, min_open=least == 0)
    else:
        kind = click.IntRange(int(least))
    return dataclasses.field(default=default, metadata={"kind": kind, "help": text})


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for a name that is not known."""
    names = list(known)
    if unknown := [name for name in given if name not in names]:
        raise ValueError(f"unknown {what} {unknown[0]!r}: expected some of {', '.join(names)}")


def _shown(default: Any) -> Any:
    return ",".join(map(str, default)) if isinstance(default, tuple) else default


def as_command(
    name: str,
    settings: type[Any],
    run: Callable[[Any, Say], Report],
    picture: Picture | None = None,
    text: str | None = None,
) -> click.Command:
    """The command of a bench; `text` is its help, if `run` has none of its own."""

    def measure(json_path: Path | None, results: Path | None, plot_path: Path | None = None, **given: Any) -> None:
        console = rich.console.Console(stderr=True)

        def say(words: str) -> None:
            console.print(words, markup=False, highlight=False)

        draw = picture if plot_path or results else None
        if draw and importlib.util.find_spec("matplotlib") is None:
            if plot_path:
                raise click.UsageError("--plot needs matplotlib: pip install 'pathways-jax[bench]'")
            say("no picture will be drawn: matplotlib is not installed")
            draw = None
        try:
            with processes.orphans_come_home():
                report = run(settings(**given), say)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        except NotHere as error:
            raise click.ClickException(str(error)) from None
        _publish(report, json_path, results, plot_path, draw)

    command = click.Command(name, callback=measure, help=text or run.__doc__)
    for field in dataclasses.fields(settings):
        if field.metadata:
            command.params.append(
                click.Option(
                    [f"--{field.name.replace('_', '-')}"],
                    type=field.metadata["kind"],
                    default=_shown(field.default),
                    show_default=field.default not in ((), ""),
                    help=field.metadata["help"],
                )
            )
    file = click.Path(dir_okay=False, path_type=Path)
    if picture:
        command.params.append(click.Option(["--plot", "plot_path"], type=file, help="Write a picture here."))
    folder = click.Path(file_okay=False, path_type=Path)
    files = ".json, .md and .png" if picture else ".json and .md"
    also = f"Also write <what>-<commit>-<cpu>{files} into this folder."
    command.params += [
        click.Option(["--json", "json_path"], type=file, help="Write JSON here."),
        click.Option(["--results"], type=folder, help=also),
    ]
    return command


def _publish(
    report: Report, json_path: Path | None, results: Path | None, plot_path: Path | None, draw: Picture | None
) -> None:
    console = standard_output()
    report.show(console)
    written = report.save(results) if results else []
    if json_path:
        json_path.write_text(report.as_json())
        written.append(json_path)
    if draw:
        place = plot_path or (results or Path()) / f"{machine.result_name(report.what, report.machine)}.png"
        drawn = draw(report.data, place)
        written += drawn
        if not drawn:
            console.print("there is nothing to draw")
    for path in written:
        console.print(f"wrote {path}", highlight=False)
