"""`pathways bench transfer`: bytes between two host processes of one machine, beside memcpy and JAX's own transfers.

Every system has a process tree of its own; for each size they take turns, repeat by repeat, and whoever is not on turn
is stopped by signal, or has nothing to do. Ratios compare repeats that ran next to each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from pathways.bench import processes, stats
from pathways.bench.report import Report, Table
from pathways.bench.stats import Spread
from pathways.bench.transfer_systems import SYSTEMS

RIVALS = ("memcpy", "jax_transfer")
SIZES = tuple(4096 * 4**n for n in range(8))  # 4 KiB to 64 MiB
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
OURS = ("pathways", "machines")
#: What 64 MiB per device must reach, over which rival.
GOALS = {("memcpy", "pathways"): 0.7, ("jax_transfer", "pathways"): 4.0, ("jax_transfer", "machines"): 1.0}
TIMEOUT = 300.0
#: Whom nobody stops: its hosts would be taken for lost. Without work they wake once a second.
_NEVER_STOPPED = ("machines",)


@contextlib.contextmanager
def _started(names: Sequence[str], devices: int, notes: list[str]) -> Iterator[dict[str, processes.Child]]:
    """A child at rest per system that starts; why others do not is a note."""
    children: dict[str, processes.Child] = {}
    try:
        for name in names:
            child = processes.Child("pathways.bench.transfer_systems", [name])
            try:
                child.ask("start", devices, timeout=TIMEOUT)
            except processes.ChildError as error:
                child.kill()
                notes.append(f"{name}, {devices} devices per host, is not measured: {error}")
                continue
            children[name] = child
            _rest(name, child)
        yield children
    finally:
        for child in children.values():
            child.thaw()
            child.end()


def _rest(name: str, child: processes.Child) -> None:
    if name not in _NEVER_STOPPED:
        child.freeze()


def _turn(name: str, child: processes.Child, *request: Any) -> dict[str, float]:
    child.thaw()
    try:
        answer: dict[str, float] = child.ask(*request, timeout=TIMEOUT)
    finally:
        _rest(name, child)
    return answer


def measure(
    names: Sequence[str], devices: Sequence[int], sizes: Sequence[int], repeats: int, seconds: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """(samples, dispatch samples, notes). A sample is one repeat of one system, in seconds per transfer."""
    samples: list[dict[str, Any]] = []
    dispatch: list[dict[str, Any]] = []
    notes: list[str] = []
    for count in devices:
        with _started(names, count, notes) as children:
            for reshards in (False, True) if count > 1 else (False,):
                for nbytes in sizes:
                    for _ in range(repeats):
                        for name, child in list(children.items()):
                            try:
                                taken = _turn(name, child, "measure", nbytes, count, reshards, seconds)
                            except processes.ChildError as error:
                                notes.append(f"{name}, {count} devices, {nbytes} bytes: {error}")
                                children.pop(name).kill()
                                continue
                            samples.append(
                                {"system": name, "devices": count, "columns": reshards, "bytes": nbytes, **taken}
                            )
            if "pathways" in children:
                for _ in range(repeats):
                    taken = _turn("pathways", children["pathways"], "dispatch", sizes[0], count, seconds)
                    dispatch.append({"devices": count, "bytes": sizes[0], **taken})
    return samples, dispatch, notes


def rows_of(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per system and point: microseconds, GB/s, and Pathways' rate over the system's."""
    grouped: dict[Any, dict[str, list[dict[str, Any]]]] = {}
    for sample in samples:
        point = (sample["devices"], sample["columns"], sample["bytes"])
        grouped.setdefault(point, {}).setdefault(sample["system"], []).append(sample)
    rows = []
    for (devices, columns, nbytes), systems in grouped.items():
        ours = {kind: [sample["many"] for sample in systems.get(kind, [])] for kind in OURS}
        for name, repeats in systems.items():
            one, many = (Spread.of([sample[kind] for sample in repeats]) for kind in ("one", "many"))
            fresh = [sample["fresh"] for sample in repeats if "fresh" in sample]
            theirs = [sample["many"] for sample in repeats]
            ratios = {
                f"{kind} over it": stats.paired_ratio(theirs, mine).median
                if name not in OURS and len(mine) == len(theirs)
                else None
                for kind, mine in ours.items()
            }
            total = nbytes * devices
            rows.append(
                {
                    "devices": devices,
                    "to": "columns" if columns else "rows",
                    "KiB per device": nbytes / 1024,
                    "system": name,
                    "one, us": one.median * 1e6,
                    "many, us": many.median * 1e6,
                    "GB/s": total / many.median / 1e9,
                    "min": total / many.high / 1e9,
                    "max": total / many.low / 1e9,
                    "fresh GB/s": total / stats.quantile(fresh, 0.5) / 1e9 if fresh else None,
                    **ratios,
                }
            )
    return rows


def judge(rows: Sequence[dict[str, Any]], added: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals that this instrument decides, of what was measured."""
    judged: list[dict[str, Any]] = []
    for row in rows:
        for (system, kind), goal in GOALS.items():
            value = row[f"{kind} over it"]
            if row["system"] != system or row["KiB per device"] != 64 * 1024 or value is None:
                continue
            between = ", between machines" if kind == "machines" else ""
            what = f"64 MiB to {row['to']}{between}, {row['devices']} devices per host, over {system}"
            judged.append({"goal": what, "bound": f">= {goal:g}", "value": value, "reached": value >= goal})
    for row in added:
        what = f"{row['KiB']:g} KiB transfer, added to the dispatch, {row['devices']} devices per host, us"
        judged.append({"goal": what, "bound": "<= 20", "value": row["added, us"], "reached": row["added, us"] <= 20.0})
    return judged


def make(samples: Sequence[dict[str, Any]], dispatch: Sequence[dict[str, Any]], notes: Sequence[str]) -> Report:
    """The report of all repeats."""
    rows = rows_of(samples)
    added = []
    for devices in dict.fromkeys(sample["devices"] for sample in dispatch):
        mine = [sample for sample in dispatch if sample["devices"] == devices]
        alone, moved = (Spread.of([sample[kind] * 1e6 for sample in mine]) for kind in ("alone", "moved"))
        more = Spread.of([(sample["moved"] - sample["alone"]) * 1e6 for sample in mine])
        kib = mine[0]["bytes"] / 1024
        cpu = Spread.of([(sample["moved_cpu"] - sample["alone_cpu"]) * 1e6 for sample in mine])
        values = (devices, kib, alone.median, moved.median, more.median, more.low, more.high, cpu.median)
        columns = ("devices", "KiB", "call, us", "with transfer, us", "added, us", "min", "max", "added CPU, us")
        added.append(dict(zip(columns, values, strict=True)))
    judged = judge(rows, added)
    tables = [
        Table(title, tuple(found[0]), [tuple(row.values()) for row in found])
        for title, found in (("Transfers", rows), ("Added to the dispatch", added), ("Goals", judged))
        if found
    ]
    data = {"rows": rows, "dispatch": added, "goals": judged, "samples": [*samples, *dispatch]}
    return Report("transfer", METHOD, tables, data, notes)


def run(rivals: Sequence[str], devices: Sequence[int], sizes: Sequence[int], repeats: int, seconds: float) -> Report:
    """Measures Pathways and `rivals`, interleaved. Raises ValueError for an unknown rival."""
    if unknown := [name for name in rivals if name not in RIVALS]:
        raise ValueError(f"unknown rival {unknown[0]!r}: expected some of {', '.join(RIVALS)}")
    assert {*OURS, *RIVALS} <= set(SYSTEMS)
    with processes.orphans_come_home():
        return make(*measure([*OURS, *rivals], devices, sizes, repeats, seconds))
