"""Results as people and machines read them: a terminal table, Markdown, JSON. Knows nothing of what was measured.

A `Table` is a title, columns and rows of plain values; a `Report` is tables, the machine, the method and any data
for machines.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.table

from pathways.bench import machine as machines


def number(value: Any) -> str:
    """Three significant digits for floats, thousands separated; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value != 0.0 and abs(value) < 1e-3:
            return f"{value:.2e}"
        digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
        return f"{value:,.{digits}f}"
    return str(value)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of equal length under `columns`."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: expected {len(self.columns)} values in a row, got {len(row)}: {row}")

    @classmethod
    def of(cls, title: str, rows: Sequence[dict[str, Any]], columns: str = "") -> list[Table]:
        """The table of rows that name their values alike; none of no rows.

        `columns`: those that are shown, with commas, all by default; "min=us_min" shows "us_min" as "min".
        """
        if not rows:
            return []
        pairs = (
            [each.strip().rpartition("=") for each in columns.split(",")] if columns else [("", "", n) for n in rows[0]]
        )
        shown = tuple(name or key for name, _, key in pairs)
        return [cls(title, shown, [tuple(row[key] for _, _, key in pairs) for row in rows])]

    def terminal(self) -> rich.table.Table:
        """For rich to print."""
        table = rich.table.Table(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            left = all(row[index] is None or isinstance(row[index], str) for row in self.rows)
            table.add_column(column, justify="left" if left else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*map(number, row))
        return table

    def markdown(self) -> str:
        """A heading and a table."""
        lines = [f"## {self.title}", "", f"| {' | '.join(self.columns)} |", "|" + " --- |" * len(self.columns)]
        lines += [f"| {' | '.join(number(value).replace('|', '/') for value in row)} |" for row in self.rows]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything about one run of one instrument (`what`: dispatch, transfer, micro)."""

    what: str
    method: str
    tables: Sequence[Table]
    data: dict[str, Any]
    notes: Sequence[str] = ()
    machine: dict[str, Any] = dataclasses.field(default_factory=machines.describe)

    def as_json(self) -> str:
        """For machines: the data, with machine, method and notes."""
        head = {"what": self.what, "method": self.method, "machine": self.machine, "notes": list(self.notes)}
        return json.dumps({**head, **self.data}, indent=1) + "\n"

    def as_markdown(self) -> str:
        """A page for people."""
        m = self.machine
        versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
        where = (
            f"{m['cpu']}, {m['cores']} cores, {m['system']}, Python {m['python']}, {versions}; "
            f"commit {m['commit']}, {m['time']}, load {m['load_average']} at the end."
        )
        notes = [f"- {note}" for note in self.notes]
        parts = [f"# {self.what}", where, self.method, *(table.markdown() for table in self.tables)]
        return "\n\n".join([*parts, "\n".join(notes)] if notes else parts) + "\n"

    def show(self, console: rich.console.Console) -> None:
        """Prints tables and notes."""
        for table in self.tables:
            console.print(table.terminal())
        for note in self.notes:
            console.print(f"- {note}", markup=False)

    def save(self, folder: Path) -> list[Path]:
        """Writes ``<what>-<commit>-<cpu>.json`` and ``.md`` into `folder` and says where."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = machines.result_name(self.what, self.machine)
        paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
        paths[0].write_text(self.as_json())
        paths[1].write_text(self.as_markdown())
        return paths
