"""`pathways bench transfer --machines 2`: bytes from host to host of two machines, beside bare streams.

The machines are agents on this machine, so both ends share its cores, and the wire is the loopback. All systems take
turns, repeat by repeat. None is stopped while others are on turn: a stopped agent would be taken for lost, and who has
no work takes no core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.machines import systems as far_systems
from pathways.bench import processes, stats, transfer
from pathways.bench.report import Report, Table
from pathways.bench.stats import Spread

RIVALS = ("tls", "tcp", "grpc", "jax_transfer")
OURS = {"tls": "machines tls", "tcp": "machines tcp"}
MACHINES = 2
LARGE_BYTES = 64 << 20
METHOD = (
    "One array of the given bytes goes from the host of one machine to the host of another; machines are agents "
    "on this machine, over loopback addresses. 'machines tls' and 'machines tcp' are Pathways with encryption and "
    "without, 'one machine' is Pathways with both hosts on one machine, through shared memory. 'tls N' and 'tcp "
    "N' are N bare Python sockets from process to process that share each array (TLS 1.3 with mutual "
    "certificates), 'grpc 1' is a stream of gRPC with mutual certificates in messages of 1 MiB, jax_transfer is "
    "jax.experimental.transfer, not encrypted. `one`: each awaited before the next, median. `many`: several in "
    "flight (at most 256 MiB, 32 transfers), wall time over their number; bare streams are told that an array has "
    "arrived by a byte per stream. Ratios are of rates with many in flight, of repeats that ran next to each "
    "other."
)
#: (what, of ours, over which rival, at which sizes, at least)
_GOALS = (
    ("over the best of 1 to 4 bare TLS streams", "tls", "tls", (LARGE_BYTES,), 0.85),
    ("not encrypted, over the best of 1 to 4 bare TCP streams", "tcp", "tcp", (LARGE_BYTES,), 0.7),
    ("over jax.experimental.transfer", "tls", "jax_transfer", (4096, 1 << 20, LARGE_BYTES), 1.0),
    ("not encrypted, over jax.experimental.transfer", "tcp", "jax_transfer", (4096, 1 << 20, LARGE_BYTES), 1.0),
)

Samples = dict[tuple[int, str], list[dict[str, float]]]
"""Repeats by bytes and system."""


def systems_of(rivals: Sequence[str]) -> list[str]:
    """The systems that are measured beside these rivals. Raises ValueError for an unknown one."""
    if unknown := [name for name in rivals if name not in RIVALS]:
        raise ValueError(f"unknown rival {unknown[0]!r}: expected some of {', '.join(RIVALS)}")
    names = far_systems.TRANSFERS
    theirs = [name for name in names if name.partition(" ")[0] in rivals and name not in OURS.values()]
    return ["one machine", *OURS.values(), *theirs]


def check_machines(machines: int) -> None:
    """Raises ValueError unless so many machines are measured."""
    if machines != MACHINES:
        raise ValueError(f"--machines {machines}: transfers are measured between {MACHINES} machines")


def best(samples: Samples, nbytes: int, kind: str) -> str | None:
    """Of a rival's systems, the one that is the fastest at this size."""
    found = [name for size, name in samples if size == nbytes and name.partition(" ")[0] == kind]
    return min(found, key=lambda name: _median(samples[nbytes, name]), default=None)


def _median(repeats: Sequence[dict[str, float]]) -> float:
    return stats.quantile([each["many"] for each in repeats], 0.5)


def ratio(samples: Samples, nbytes: int, ours: str, theirs: str | None) -> Spread | None:
    """Our rate over another system's, paired by repeat; None where one of them is missing."""
    mine, other = samples.get((nbytes, ours), []), samples.get((nbytes, theirs or ""), [])
    if not mine or len(mine) != len(other):
        return None
    return stats.paired_ratio([each["many"] for each in other], [each["many"] for each in mine])


def rows_of(samples: Samples) -> list[dict[str, Any]]:
    """A row per size and system."""
    rows = []
    for (nbytes, name), repeats in samples.items():
        one, many = (Spread.of([each[kind] for each in repeats]) for kind in ("one", "many"))
        ratios = {kind: ratio(samples, nbytes, ours, name) for kind, ours in OURS.items()}
        rows.append(
            {
                "KiB": nbytes // 1024,
                "system": name,
                "one, us": one.median * 1e6,
                "many, us": many.median * 1e6,
                "GB/s": nbytes / many.median / 1e9,
                "min": nbytes / many.high / 1e9,
                "max": nbytes / many.low / 1e9,
                **{
                    f"{OURS[kind]} over it": None if found is None or name == OURS[kind] else found.median
                    for kind, found in ratios.items()
                },
            }
        )
    return rows


def judge(samples: Samples) -> list[dict[str, Any]]:
    """The goals that were measured."""
    judged = []
    for what, kind, rival, sizes, least in _GOALS:
        for nbytes in sizes:
            theirs = best(samples, nbytes, rival)
            found = ratio(samples, nbytes, OURS[kind], theirs)
            if found is None:
                continue
            judged.append(
                {
                    "goal": f"{nbytes // 1024} KiB between machines, {what}",
                    "rival": theirs,
                    "bound": f">= {least:g}",
                    "value": found.median,
                    "min": found.low,
                    "max": found.high,
                    "reached": found.median >= least,
                }
            )
    return judged


def make(samples: Samples, notes: Sequence[str]) -> Report:
    """The report of all repeats."""
    rows, judged = rows_of(samples), judge(samples)
    tables = [
        Table(title, tuple(found[0]), [tuple(row.values()) for row in found])
        for title, found in (("Transfers between machines", rows), ("Goals", judged))
        if found
    ]
    flat = [{"bytes": nbytes, "system": name, **each} for (nbytes, name), all_ in samples.items() for each in all_]
    return Report("transfer-machines", METHOD, tables, {"rows": rows, "goals": judged, "samples": flat}, notes)


def run(machines: int, rivals: Sequence[str], sizes: Sequence[int], repeats: int, seconds: float) -> Report:
    """Measures. Raises ValueError for what it cannot measure."""
    check_machines(machines)
    names = systems_of(rivals)
    notes: list[str] = []
    samples: Samples = {}
    with processes.orphans_come_home(), far_systems.started("transfer", names, 1, notes) as children:
        for nbytes in sizes:
            for _ in range(repeats):
                for name, child in list(children.items()):
                    try:
                        taken = child.ask("measure", nbytes, 1, False, seconds, timeout=transfer.TIMEOUT)
                    except processes.ChildError as error:
                        notes.append(f"{name}, {nbytes} bytes: {error}")
                        children.pop(name).kill()
                        continue
                    samples.setdefault((nbytes, name), []).append(taken)
    return make(samples, notes)
