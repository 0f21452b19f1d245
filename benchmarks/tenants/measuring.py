"""`python -m benchmarks.tenants`: what several clients get of one cluster. The paper's Figures 8 and 9, and waits.

  rates     Figure 8: computations per second of 1 to 16 clients together, beside threads of one JAX process, in turns
  shares    Figure 9: four clients by weight on one device and on a gang of two hosts; shares of device time per second
  waits     what a run of 1 ms waits beside a flood of another client's, by policy
  dispatch  one client alone: the rate of runs of no length under the policy "share" beside "fifo", in turns

The clients are processes (`client`). Their steps take time and no core. This module measures and returns rows;
`report` makes tables and judges the goals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.tenants import shares as tenants_shares
from benchmarks.tenants.client import ahead_of
from pathways.bench import processes, stats
from pathways.bench.command import Say, option

PATIENCE = 300.0
AHEAD = 32  # runs of each client in a measurement of rates: few, so that the first ones are over within the warm-up
WARM_UP = 0.3  # seconds of a flood that are not counted
SLICE_OF_TIME = 1.0  # shares are those of each second

PARTS = ("rates", "shares", "waits", "dispatch")
CLIENT, JAX = "benchmarks.tenants.client:Client", "benchmarks.tenants.jax_threads:Process"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, and for how long."""

    only: tuple[str, ...] = option(PARTS, "What to measure.")
    rivals: tuple[str, ...] = option(("jax",), "For the rates; may be empty.")
    clients: tuple[int, ...] = option((1, 2, 4, 8, 16), "Client processes.")
    us: tuple[int, ...] = option((40, 330, 1040, 2400), "Of a computation.")
    repeats: int = option(5, "How often each is measured.")
    seconds: float = option(1.0, "Length of one measurement.", least=0.1)
    share_seconds: int = option(8, "In which shares are seen.", least=2)


def _hire(stack: contextlib.ExitStack, count: int, target: str = CLIENT) -> list[processes.Child]:
    """New processes, which end in the opposite order."""
    return [stack.enter_context(processes.Child(target)) for _ in range(count)]


def ask_all(children: Sequence[processes.Child], requests: Sequence[tuple[Any, ...]]) -> list[Any]:
    """One request to each, at once, and the answers."""
    for child, request in zip(children, requests, strict=True):
        child.send(*request)
    return [child.receive(PATIENCE) for child in children]


def _target(hosts: int, policy: str) -> Any:
    import pathways as pw

    return pw.LocalCluster(hosts_per_island=hosts, policy=policy)


def gather(
    children: Sequence[processes.Child], hosts: int, policy: str, terms: Sequence[tuple[str, float, int | None]]
) -> str:
    """The first child starts a cluster, the others join it: (name, weight, priority) of each. The address."""
    address = str(children[0].ask("start", _target(hosts, policy), *terms[0], timeout=PATIENCE))
    ask_all(children[1:], [("start", address, *each) for each in terms[1:]])
    return address


# ----------------------------------------------------------------------------------------------------------- rates


def _cpu_of(children: Sequence[processes.Child]) -> float:
    return processes.cpu_seconds([pid for child in children for pid in processes.tree(child.pid)])


def _rate(over: Sequence[Sequence[float]], begin: float, end: float) -> float:
    return sum(begin <= each < end for times in over for each in times) / (end - begin)


def rates(settings: Settings, say: Say) -> list[dict[str, Any]]:
    """A row for each (system, clients, length): runs per second of all clients together, and cores used."""
    samples: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        single, *many = _hire(stack, 1 + max(settings.clients))
        rivals = _hire(stack, int("jax" in settings.rivals), JAX)
        gather([single], 1, "share", [("alone", 1.0, None)])
        gather(many, 1, "share", [(f"client {i}", 1.0, None) for i in range(len(many))])
        everybody = [single, *many, *rivals]
        ask_all(everybody, [("load", tuple(settings.us))] * len(everybody))

        def measure(system: str, count: int, us: int) -> None:
            own = rivals if system == "jax" else [single] if count == 1 else many
            begin = time.monotonic() + 0.05
            end = begin + WARM_UP + settings.seconds
            ahead = min(AHEAD, ahead_of((us,)))
            cpu = _cpu_of(own)
            if system == "jax":
                over = own[0].ask("flood", count, begin, end, us, ahead, timeout=PATIENCE)
            else:
                answers = ask_all(own[:count], [("flood", begin, end, (us,), ahead)] * count)
                over = [[each for each, _ in answer] for answer in answers]
            cores = (_cpu_of(own) - cpu) / (time.monotonic() - begin)
            samples.setdefault((system, count, us), []).append((_rate(over, begin + WARM_UP, end), cores))

        systems = ["pathways", *(["jax"] if rivals else [])]
        for turn in range(settings.repeats):
            for us in settings.us:
                for count in settings.clients:
                    for system in systems:
                        measure(system, count, us)
            say(f"rates: repeat {turn + 1} of {settings.repeats}")
    return [_rate_row(key, found, samples) for key, found in samples.items()]


def _rate_row(
    key: tuple[str, int, int],
    found: Sequence[tuple[float, float]],
    samples: dict[tuple[str, int, int], list[tuple[float, float]]],
) -> dict[str, Any]:
    system, clients, us = key
    per_second = [rate for rate, _ in found]
    rate = stats.Spread.of(per_second)

    def over(other: tuple[str, int, int]) -> stats.Spread | None:
        return stats.paired_ratio(per_second, [rate for rate, _ in samples[other]]) if other in samples else None

    row = {
        "system": system,
        "length_ms": us / 1000,
        "clients": clients,
        "per_second": rate.median,
        "per_second_min": rate.low,
        "per_second_max": rate.high,
        "device_busy": rate.median * us / 1e6,
        "cores": stats.quantile([cores for _, cores in found], 0.5),
        "repeats": rate.n,
    }
    alone = samples.get((system, 1, us), ())
    row["best_of_single"] = max(per_second) / max(rate for rate, _ in alone) if alone else None
    for name, other in (("of_single", (system, 1, us)), ("of_jax", ("jax", clients, us))):
        ratio = over(other) if name == "of_single" or system != "jax" else None
        row |= {
            name: ratio.median if ratio else None,
            f"{name}_min": ratio.low if ratio else None,
            f"{name}_max": ratio.high if ratio else None,
        }
    return row


# ---------------------------------------------------------------------------------------------------------- shares

WEIGHTS = ((1, 1, 1, 1), (1, 2, 4, 8))
#: By name: the lengths of the steps that each of the four clients runs in turn.
MIXES: dict[str, tuple[tuple[int, ...], ...]] = {
    "each its own": ((100,), (1000,), (10_000,), (1000,)),
    "all three": ((100, 1000, 10_000),) * 4,
}


def shares(settings: Settings, say: Say) -> list[dict[str, Any]]:
    """A row for each (hosts, weights, mix): the shares of each second, and how far from the target they were."""
    rows = []
    with contextlib.ExitStack() as stack:
        owner, *four = _hire(stack, 5)
        for hosts in (1, 2):
            address = gather([owner], hosts, "share", [("owner", 1.0, None)])
            for weights in WEIGHTS:
                names = [f"client {i} of weight {weight}" for i, weight in enumerate(weights)]
                ask_all(four, [("start", address, *each) for each in zip(names, weights, strict=True)])
                for mix, lengths in MIXES.items():
                    ask_all(four, [("load", each) for each in lengths])
                    row = _shares_of(address, four, names, weights, lengths, float(settings.share_seconds))
                    rows.append({"hosts": hosts, "weights": list(weights), "mix": mix, **row})
                    say(f"shares: {hosts} hosts, {weights}, {mix}: off by {100 * row['worst']:.1f} points at most")
                ask_all(four, [("close",)] * 4)
            owner.ask("close", timeout=PATIENCE)
    return rows


def _shares_of(
    address: str,
    four: Sequence[processes.Child],
    names: Sequence[str],
    weights: Sequence[int],
    lengths: Sequence[Sequence[int]],
    seconds: float,
) -> dict[str, Any]:
    wanted = tenants_shares.targets(dict(zip(names, map(float, weights), strict=True)))
    sampler = tenants_shares.Sampler(address)
    begin = time.monotonic() + 0.1
    end = begin + 1.0 + seconds
    over = ask_all(four, [("flood", begin, end, each, ahead_of(each)) for each in lengths])
    windows = tenants_shares.windows(sampler.finish(), begin + 1.0, end + 0.1, names, SLICE_OF_TIME)
    if not windows:
        raise RuntimeError("the controller did not answer while the clients worked")
    first, last = windows[0].begin, windows[-1].end
    nominal = [sum(us for at, us in times if first <= at < last) for times in over]
    distances = [max(abs(window.shares[name] - target) for name, target in wanted.items()) for window in windows]
    worst = max(range(len(windows)), key=distances.__getitem__)
    return {
        "targets": list(wanted.values()),
        "seconds": [
            {"at": window.end - begin, "shares": [window.shares[name] for name in names]} for window in windows
        ],
        "worst": distances[worst],
        "median": stats.quantile(distances, 0.5),
        "one_run": max(us for each in lengths for us in each) / 1e6 / SLICE_OF_TIME,
        "worst_late_ms": 1000 * windows[worst].late,
        "nominal_worst": max(
            abs(part / sum(nominal) - target) for part, target in zip(nominal, wanted.values(), strict=True)
        ),
        "charged": stats.quantile([window.busy for window in windows], 0.5),
        "load": round(os.getloadavg()[0], 1),
    }


# ----------------------------------------------------------------------------------------------------------- waits

WAIT_US = 1000
#: (policy, weight and priority of the client that asks for little); the flood has weight 1 and priority 0.
WAITERS: tuple[tuple[str, float, int | None], ...] = (
    ("fifo", 1.0, None),
    ("share", 1.0, None),
    ("share", 4.0, None),
    ("priority", 1.0, 1),
)


def waits(settings: Settings, say: Say) -> list[dict[str, Any]]:
    """A row for each policy and weight: what a run of 1 ms waits beside a flood of such runs; milliseconds."""
    rows = []
    with contextlib.ExitStack() as stack:
        flood, asker = _hire(stack, 2)
        for policy, weight, priority in WAITERS:
            flood_priority = None if priority is None else 0
            gather([flood, asker], 1, policy, [("flood", 1.0, flood_priority), ("asker", weight, priority)])
            ask_all([flood, asker], [("load", (WAIT_US,))] * 2)
            begin = time.monotonic() + 0.1
            alone: list[float] = asker.ask("single", begin, begin + settings.seconds, WAIT_US, timeout=PATIENCE)
            begin = time.monotonic() + 0.1
            end = begin + max(5.0, settings.repeats * settings.seconds)
            flood.send("flood", begin, end + 0.3, (WAIT_US,), ahead_of((WAIT_US,)))
            taken: list[float] = asker.ask("single", begin + WARM_UP, end, WAIT_US, timeout=PATIENCE)
            flood.receive(PATIENCE)
            waited = [1000 * each - WAIT_US / 1000 for each in taken]
            rows.append(
                {
                    "policy": policy,
                    "weight": weight,
                    "priority": priority or 0,
                    "runs": len(waited),
                    "p50_ms": stats.quantile(waited, 0.5),
                    "p99_ms": stats.quantile(waited, 0.99),
                    "max_ms": max(waited),
                    "alone_p50_ms": 1000 * stats.quantile(alone, 0.5) - WAIT_US / 1000,
                    "load": round(os.getloadavg()[0], 1),
                }
            )
            ask_all([asker, flood], [("close",)] * 2)
            say(f"waits: {policy}, weight {weight:g}: p99 {rows[-1]['p99_ms']:.2f} ms")
    return rows


# -------------------------------------------------------------------------------------------------------- dispatch


def dispatch(settings: Settings, say: Say) -> dict[str, Any]:
    """Runs of no length per second, of one client alone, under "share" and under "fifo".

    Others on the machine only ever make a repeat slower. So `ratio` is that of the best repeats; `paired` is the median
    of the ratios by pairs.
    """
    found: dict[str, list[float]] = {"fifo": [], "share": []}
    with contextlib.ExitStack() as stack:
        alone = dict(zip(found, _hire(stack, len(found)), strict=True))
        for policy, child in alone.items():
            gather([child], 1, policy, [("alone", 1.0, None)])
            child.ask("load", (0,), timeout=PATIENCE)
        for turn in range(4 * settings.repeats):
            for policy in found if turn % 2 else reversed(found):  # each goes first as often
                begin = time.monotonic()
                end = begin + WARM_UP + settings.seconds / 2
                over = [at for at, _ in alone[policy].ask("flood", begin, end, (0,), 64, timeout=PATIENCE)]
                found[policy].append(_rate([over], begin + WARM_UP, end))
    best = max(found["share"]) / max(found["fifo"])
    paired = stats.paired_ratio(found["share"], found["fifo"])
    say(f"dispatch: share over fifo {best:.3f}")
    return {
        **{policy: stats.quantile(per_second, 0.5) for policy, per_second in found.items()},
        **{f"{policy}_best": max(per_second) for policy, per_second in found.items()},
        "ratio": best,
        "paired": paired.median,
        "paired_min": paired.low,
        "paired_max": paired.high,
        "repeats": paired.n,
        "load": round(os.getloadavg()[0], 1),
    }
