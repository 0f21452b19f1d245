"""`python -m benchmarks.machines.transfer` and `.dispatch`: arguments, tables, goals and bare connections.

A real run, which starts three clusters, is in `tests/stress/test_bench_machines_run.py`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import click.testing
import pytest

from benchmarks.machines import dispatch, systems, transfer
from benchmarks.machines.dispatch import Samples
from benchmarks.rivals import bare
from pathways.bench import cli, processes

KIB64M = 64 << 10


@pytest.mark.parametrize(
    ("command", "arguments", "why"),
    [
        (transfer.command, ("--rivals", "scp"), "unknown rival 'scp': expected some of tls, tcp"),
        (transfer.command, ("--rivals", "memcpy"), "unknown rival 'memcpy'"),
        (cli.bench, ("transfer", "--rivals", "tls"), "unknown rival 'tls': expected some of memcpy"),
        (dispatch.command, ("--machines", "1"), "1 is not in the range x>=2"),
        (dispatch.command, ("--rivals", "jax"), "unknown rival 'jax'"),
        (dispatch.command, ("--machines", "two"), "not a valid integer"),
    ],
)
def test_arguments(command: click.Command, arguments: tuple[str, ...], why: str) -> None:
    result = click.testing.CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert why in " ".join(result.output.split())


def test_systems_of_rivals() -> None:
    ours = ["one machine", "machines tls", "machines tcp"]
    assert transfer.systems_of([]) == ours
    assert transfer.systems_of(["tcp", "grpc"]) == [*ours, "tcp 1", "tcp 2", "tcp 3", "tcp 4", "grpc 1"]
    assert set(transfer.systems_of(transfer.RIVALS)) == set(systems.TRANSFERS)


def test_transfers_are_compared_with_the_best_of_the_streams() -> None:
    def repeats(*many: float) -> list[dict[str, float]]:
        return [{"one": 2 * each, "many": each} for each in many]

    samples = {
        "one machine": repeats(0.01, 0.01, 0.01),
        "machines tls": repeats(0.04, 0.08, 0.05),
        "machines tcp": repeats(0.05, 0.05, 0.05),
        "tls 1": repeats(0.036, 0.060, 0.045),  # 0.9, 0.75, 0.9 of ours
        "tls 2": repeats(0.01, 0.20, 0.20),
        "tcp 1": repeats(0.03, 0.03, 0.03),
        "jax_transfer": repeats(0.06, 0.06),  # one repeat is missing: not compared
    }
    report = transfer.make({KIB64M: samples}, ["a note"])
    rows = {row["system"]: row for row in report.data["rows"]}
    assert rows["tls 1"]["machines tls over it"] == pytest.approx(0.9)
    assert rows["tls 1"]["machines tcp over it"] == pytest.approx(0.9)
    assert rows["machines tls"]["machines tls over it"] is None
    assert rows["machines tls"]["GB/s"] == pytest.approx((KIB64M << 10) / 0.05 / 1e9)
    assert rows["machines tls"]["one, us"] == pytest.approx(100_000)
    assert rows["jax_transfer"]["machines tls over it"] is None
    goals = {row["goal"]: (row["rival"], row["value"], row["reached"]) for row in report.data["goals"]}
    assert goals == {
        "65536 KiB between machines, over the best of 1 to 4 bare TLS streams": ("tls 1", pytest.approx(0.9), True),
        "65536 KiB between machines, not encrypted, over the best of 1 to 4 bare TCP streams": (
            "tcp 1",
            pytest.approx(0.6),
            False,
        ),
    }
    assert "a note" in report.as_markdown()


def test_calls_are_compared_repeat_by_repeat() -> None:
    samples = Samples(
        {
            "one machine": [[9_000, 10_000, 11_000], [12_000]],
            "machines tls": [[70_000, 80_000, 90_000], [75_000]],
            "tls": [[20_000], [30_000]],
        },
        {"one machine": [5e-6, 4e-6], "machines tls": [1e-5, 5e-6]},
        (90, 112),
    )
    report = dispatch.make(samples, [])
    rows = {row["system"]: row for row in report.data["round_trips"]}
    assert (rows["machines tls"]["p50, us"], rows["machines tls"]["added, us"]) == (77.5, (70 + 63) / 2)
    assert rows["tls"]["added, us"] is rows["one machine"]["added, us"] is None
    rates = {row["system"]: row["over one machine"] for row in report.data["rates"]}
    assert rates == {"one machine": None, "machines tls": pytest.approx(0.65)}
    goals: dict[str, Any] = {row["goal"]: (pytest.approx(row["value"]), row["reached"]) for row in report.data["goals"]}
    assert goals == {
        "tls: a call and its completion, beyond a bare round trip, us": (52.5, False),
        "tls: what the link adds to it, beyond a bare round trip, us": (41.5, True),
        "tls: OpByOp on machines, over one machine": (0.65, False),
    }
    assert any("90 bytes" in note and "112 bytes" in note for note in report.notes)


@pytest.mark.parametrize("kind", bare.KINDS)
@pytest.mark.parametrize(("nbytes", "back", "streams"), [(1, 7, 1), (3 << 20, 1, 1), (100_001, 3, 3)])
def test_bare_streams_carry_whole_messages(kind: str, nbytes: int, back: int, streams: int) -> None:
    """A message that arrived in part would not be answered, and one that was answered twice would be read as two."""
    with processes.orphans_come_home(), contextlib.ExitStack() as stack:
        made = bare.Bare(kind)
        stack.callback(made.stop)
        made.start()
        for count in (1, 5):
            with made.streams(streams, nbytes, back) as move:
                move(count)


def test_a_system_that_does_not_start_is_a_note() -> None:
    notes: list[str] = []
    names = ["tcp", "nobody"]
    with processes.orphans_come_home(), systems.turns_of({**systems.CALLS, "nobody": ("nowhere:Nobody",)}) as turns:
        turns.start_all(names, 2, notes=notes)
        assert [name for name in names if name in turns] == ["tcp"]
    (note,) = notes
    assert note.startswith("nobody is not measured: ") and "No module named 'nowhere'" in note
