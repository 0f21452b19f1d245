"""`pathways bench transfer|dispatch --machines 2`: arguments, tables, goals and bare connections.

A real run, which starts three clusters, is in `tests/stress/test_bench_machines_run.py`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import click.testing
import pytest

from benchmarks.machines import dispatch as far_dispatch
from benchmarks.machines import systems as far_systems
from benchmarks.machines import transfer as far_transfer
from benchmarks.machines.dispatch import Samples
from benchmarks.rivals import bare
from pathways.bench import cli, processes

MIB64 = 64 << 20


def bench(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(cli.bench, arguments)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("transfer", "--machines", "3"), "transfers are measured between 2 machines"),
        (("transfer", "--machines", "2", "--rivals", "scp"), "unknown rival 'scp': expected some of tls, tcp"),
        (("transfer", "--machines", "2", "--rivals", "memcpy"), "unknown rival 'memcpy'"),
        (("transfer", "--rivals", "tls"), "unknown rival 'tls': expected some of memcpy"),
        (("dispatch", "--machines", "1"), "expected at least 2"),
        (("dispatch", "--machines", "2", "--rivals", "jax"), "unknown rival 'jax'"),
        (("dispatch", "--machines", "two"), "not a valid integer"),
    ],
)
def test_arguments(arguments: tuple[str, ...], why: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert why in " ".join(result.output.split())


def test_systems_of_rivals() -> None:
    ours = ["one machine", "machines tls", "machines tcp"]
    assert far_transfer.systems_of([]) == ours
    assert far_transfer.systems_of(["tcp", "grpc"]) == [*ours, "tcp 1", "tcp 2", "tcp 3", "tcp 4", "grpc 1"]
    assert set(far_transfer.systems_of(far_transfer.RIVALS)) == set(far_systems.TRANSFERS)


def test_transfers_are_compared_with_the_best_of_the_streams() -> None:
    def repeats(*many: float) -> list[dict[str, float]]:
        return [{"one": 2 * each, "many": each} for each in many]

    samples = {
        (MIB64, "one machine"): repeats(0.01, 0.01, 0.01),
        (MIB64, "machines tls"): repeats(0.04, 0.08, 0.05),
        (MIB64, "machines tcp"): repeats(0.05, 0.05, 0.05),
        (MIB64, "tls 1"): repeats(0.036, 0.060, 0.045),  # 0.9, 0.75, 0.9 of ours
        (MIB64, "tls 2"): repeats(0.01, 0.20, 0.20),
        (MIB64, "tcp 1"): repeats(0.03, 0.03, 0.03),
        (MIB64, "jax_transfer"): repeats(0.06, 0.06),  # one repeat is missing: not compared
    }
    report = far_transfer.make(samples, ["a note"])
    rows = {row["system"]: row for row in report.data["rows"]}
    assert rows["tls 1"]["machines tls over it"] == pytest.approx(0.9)
    assert rows["tls 1"]["machines tcp over it"] == pytest.approx(0.9)
    assert rows["machines tls"]["machines tls over it"] is None
    assert rows["machines tls"]["GB/s"] == pytest.approx(MIB64 / 0.05 / 1e9)
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
    report = far_dispatch.make(samples, [])
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
    with processes.orphans_come_home(), far_systems.started("call", ["tcp", "nobody"], 2, notes) as children:
        assert list(children) == ["tcp"]
    (note,) = notes
    assert note.startswith("nobody is not measured: ")
