"""A short run of `pathways bench transfer|dispatch --machines 2` with all rivals, beside three clusters."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import click.testing
import pytest

from benchmarks.machines import systems as far_systems
from pathways.bench import cli


@pytest.mark.watchdog(600)
@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("what", ["transfer", "dispatch"])
def test_a_short_run(what: str, tmp_path: pathlib.Path) -> None:
    sizes = ("--kib", "4") if what == "transfer" else ()
    results = tmp_path / "results"
    arguments = (what, "--machines", "2", *sizes, "--repeats", "1", "--seconds", "0.05", "--results", str(results))
    result = click.testing.CliRunner().invoke(cli.bench, arguments)
    assert result.exit_code == 0, result.output
    (written,) = results.glob("*.json")
    assert written.name.startswith(f"{what}-machines-")
    report: dict[str, Any] = json.loads(written.read_text())
    rows = report["rows" if what == "transfer" else "round_trips"]
    expected = far_systems.TRANSFERS if what == "transfer" else far_systems.CALLS
    assert {row["system"] for row in rows} == set(expected), report["notes"]
    assert report["goals"]
    (page,) = results.glob("*.md")
    assert "machines tls" in page.read_text()
