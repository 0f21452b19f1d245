"""A short run of `python -m benchmarks.machines.transfer` and `.dispatch` with all rivals, beside three clusters."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import click.testing
import pytest

from benchmarks.machines import dispatch, systems, transfer


@pytest.mark.watchdog(600)
@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("what", ["transfer", "dispatch"])
def test_a_short_run(what: str, tmp_path: pathlib.Path) -> None:
    sizes = ("--kib", "4") if what == "transfer" else ()
    results = tmp_path / "results"
    command = {"transfer": transfer, "dispatch": dispatch}[what].command
    arguments = (*sizes, "--repeats", "1", "--seconds", "0.05", "--results", str(results))
    result = click.testing.CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    (written,) = results.glob("*.json")
    assert written.name.startswith(f"{what}-machines-")
    report: dict[str, Any] = json.loads(written.read_text())
    rows = report["rows" if what == "transfer" else "round_trips"]
    expected = systems.TRANSFERS if what == "transfer" else systems.CALLS
    assert {row["system"] for row in rows} == set(expected), report["notes"]
    assert report["goals"]
    (page,) = results.glob("*.md")
    assert "machines tls" in page.read_text()
