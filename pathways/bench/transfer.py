"""`pathways bench transfer`: bytes between two host processes of one machine, beside memcpy and JAX's own transfers.

Every system has a process tree of its own; for each size they take turns, repeat by repeat. Ratios compare repeats that
ran next to each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pathways.bench import plot, stats
from pathways.bench.command import Say, check_names, option
from pathways.bench.goals import at_least, at_most, judged
from pathways.bench.processes import Child
from pathways.bench.report import Report, Table
from pathways.bench.stats import Spread
from pathways.bench.turns import Turns

_MODULE = "pathways.bench.transfer_systems"
#: Of ours; `machines` as if each host were on a machine of its own.
OURS = {"pathways": f"{_MODULE}:Pathways", "machines": f"{_MODULE}:Machines"}
RIVALS = {"memcpy": f"{_MODULE}:Memcpy", "jax_transfer": f"{_MODULE}:JaxTransfer"}
METHOD = (
    "One array of the given bytes per device goes from the device or devices of one host process to those of another "
    "on the same machine; 'columns' reshards it on the way, from rows to columns. `one`: each awaited before the next, "
    "median; `many`: several in flight (at most 256 MiB, 32 transfers), wall time over their number. memcpy is NumPy's "
    "copy of as many bytes within one process (mapped memory; 'fresh': memory that was never touched, page faults "
    "included; columns: strided copies); machines is Pathways as if each host were on a machine of its own, over Unix "
    "sockets; jax_transfer is jax.experimental.transfer over loopback, resharded by "
    "jax.device_put. Dispatch: calls per second of x + 1 with and without a transfer of its result behind it, many "
    "in flight; what the transfer adds per call is the difference, in wall time and in processor time of all processes."
)
#: What 64 MiB per device must reach, over which rival.
GOALS = {("memcpy", "pathways"): 0.7, ("jax_transfer", "pathways"): 4.0, ("jax_transfer", "machines"): 1.0}

Sample = dict[str, float]
"""One repeat of one system, in seconds per transfer: `one`, and `many`."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, and for how long."""

    rivals: tuple[str, ...] = option(tuple(RIVALS), "Whom to measure beside it; may be empty.")
    devices: tuple[int, ...] = option((1, 2), "CPU devices per host.")
    kib: tuple[int, ...] = option(tuple(4 * 4**n for n in range(8)), "Sizes per device.")
    repeats: int = option(5, "How often each is measured.")
    seconds: float = option(0.3, "Length of one run.", least=0.01)


def measure(settings: Settings, say: Say) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """(samples, dispatch samples, notes)."""
    samples: list[dict[str, Any]] = []
    dispatch: list[dict[str, Any]] = []
    notes: list[str] = []
    systems = OURS | {name: RIVALS[name] for name in settings.rivals}
    repeats, seconds, names = settings.repeats, settings.seconds, list(systems)
    for count in settings.devices:
        # Nobody stops `machines`: its hosts would be taken for lost. Without work they wake once a second.
        with Turns(lambda name: Child(systems[name]), 0.0, lambda name: name != "machines") as turns:
            turns.start_all(names, count, notes=notes, where=f", {count} devices per host,")
            for reshards in (False, True) if count > 1 else (False,):
                for kib in settings.kib:
                    request = ("measure", kib * 1024, count, reshards, seconds)
                    what = f", {count} devices, {kib * 1024} bytes"
                    for name, taken in turns.rounds(names, repeats, *request, notes=notes, what=what):
                        point = {"system": name, "devices": count, "columns": reshards, "bytes": kib * 1024}
                        samples.append({**point, **taken})
                    say(f"{count} devices per host, to {'columns' if reshards else 'rows'}, {kib:,} KiB: done")
            nbytes = settings.kib[0] * 1024
            for _, taken in turns.rounds(
                ["pathways"], repeats, "dispatch", nbytes, count, seconds, notes=notes, what=", dispatch"
            ):
                dispatch.append({"devices": count, "bytes": nbytes, **taken})
    return samples, dispatch, notes


def compared(
    head: dict[str, Any], systems: dict[str, list[Sample]], nbytes: int, ours: dict[str, str], among_ours: bool
) -> list[dict[str, Any]]:
    """A row per system at one point: microseconds, GB/s, and the rate of each of `ours` over it, repeat by repeat.

    Args:
        head: the point.
        systems: all repeats, by system.
        nbytes: of one transfer.
        ours: those that are compared with the others, by the name that they have in the row.
        among_ours: whether they are compared with each other, too.
    """
    rows = []
    for name, repeats in systems.items():
        one, many = (Spread.of([each[kind] for each in repeats]) for kind in ("one", "many"))
        row = {
            **head,
            "system": name,
            "one, us": one.median * 1e6,
            "many, us": many.median * 1e6,
            "GB/s": nbytes / many.median / 1e9,
            "min": nbytes / many.high / 1e9,
            "max": nbytes / many.low / 1e9,
        }
        if any("fresh" in each for found in systems.values() for each in found):
            fresh = [each["fresh"] for each in repeats if "fresh" in each]
            row["fresh GB/s"] = nbytes / stats.quantile(fresh, 0.5) / 1e9 if fresh else None
        for label, mine in ours.items():
            other = name != mine and (among_ours or name not in ours.values())
            found = rate_over(systems.get(mine, []), repeats) if other else None
            row[f"{label} over it"] = found.median if found else None
        rows.append(row)
    return rows


def rate_over(ours: Sequence[Sample], theirs: Sequence[Sample]) -> Spread | None:
    """Our rate over another system's, paired by repeat; None where repeats are missing."""
    if not ours or len(ours) != len(theirs):
        return None
    return stats.paired_ratio([each["many"] for each in theirs], [each["many"] for each in ours])


def rows_of(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per system and point: microseconds, GB/s, and Pathways' rate over the system's."""
    grouped: dict[Any, dict[str, list[Sample]]] = {}
    for sample in samples:
        point = (sample["devices"], sample["columns"], sample["bytes"])
        grouped.setdefault(point, {}).setdefault(sample["system"], []).append(sample)
    rows = []
    for (devices, columns, nbytes), systems in grouped.items():
        head = {"devices": devices, "to": "columns" if columns else "rows", "KiB per device": nbytes / 1024}
        rows += compared(head, systems, nbytes * devices, {name: name for name in OURS}, among_ours=False)
    return rows


def added_to_dispatch(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a transfer adds to a call, by devices."""
    rows = []
    for devices in dict.fromkeys(sample["devices"] for sample in samples):
        mine = [sample for sample in samples if sample["devices"] == devices]
        more = Spread.of([(sample["moved"] - sample["alone"]) * 1e6 for sample in mine])
        rows.append(
            {
                "devices": devices,
                "KiB": mine[0]["bytes"] / 1024,
                "call, us": stats.quantile([sample["alone"] * 1e6 for sample in mine], 0.5),
                "with transfer, us": stats.quantile([sample["moved"] * 1e6 for sample in mine], 0.5),
                "added, us": more.median,
                "min": more.low,
                "max": more.high,
                "added CPU, us": stats.quantile([(s["moved_cpu"] - s["alone_cpu"]) * 1e6 for s in mine], 0.5),
            }
        )
    return rows


def judge(rows: Sequence[dict[str, Any]], added: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals that this instrument decides, of what was measured."""
    found: list[dict[str, Any]] = []
    for row in rows:
        for (system, kind), least in GOALS.items():
            value = row[f"{kind} over it"]
            if row["system"] == system and row["KiB per device"] == 64 * 1024 and value is not None:
                between = ", between machines" if kind == "machines" else ""
                what = f"64 MiB to {row['to']}{between}, {row['devices']} devices per host, over {system}"
                found.append(judged(what, at_least(least), value))
    for row in added:
        what = f"{row['KiB']:g} KiB transfer, added to the dispatch, {row['devices']} devices per host, us"
        found.append(judged(what, at_most(20.0), row["added, us"]))
    return found


def make(samples: Sequence[dict[str, Any]], dispatch: Sequence[dict[str, Any]], notes: Sequence[str]) -> Report:
    """The report of all repeats."""
    rows, added = rows_of(samples), added_to_dispatch(dispatch)
    goals = judge(rows, added)
    tables = [
        *Table.of("Transfers", rows),
        *Table.of("Added to the dispatch", added),
        *Table.of("Goals", goals),
    ]
    data = {"rows": rows, "dispatch": added, "goals": goals, "samples": [*samples, *dispatch]}
    return Report("transfer", METHOD, tables, data, notes)


def run(settings: Settings, say: Say = lambda words: None) -> Report:
    """Bytes between two host processes of one machine, rows to rows and rows to columns, beside rivals."""
    check_names("rival", settings.rivals, RIVALS)
    return make(*measure(settings, say))


def picture(data: dict[str, Any], path: Path) -> list[Path]:
    """Draws GB/s over the size, one panel per devices and sharding."""
    rows = data["rows"]
    names = list(dict.fromkeys(row["system"] for row in rows))
    return plot.panels(
        path,
        rows,
        lambda row: f"rows to {row['to']}\nhosts of {row['devices']} CPU device{'s' * (row['devices'] > 1)}",
        lambda row: (row["system"], {"color": f"C{names.index(row['system'])}"}),
        ("KiB per device", "GB/s", "min", "max"),
        ("bytes per device", "GB/s, several in flight"),
        lambda kib: f"{kib / 1024:g}M" if kib >= 1024 else f"{kib:g}K",
    )
