"""What the hosts and the controller of a cluster have counted of their memory, for tests with budgets."""

from __future__ import annotations

from typing import Any

MiB = 1 << 20


def device(cluster: Any) -> list[dict[str, int]]:
    """Ledger of every device: bytes, high water, limit."""
    return [each for host in cluster.stats()["hosts"] for each in host["memory"]["devices"]]


def bytes_of(client: int, stats: dict[str, Any]) -> int:
    """What a client holds on all devices."""
    accounts = (account for host in stats["hosts"] for account in host["memory"]["accounts"])
    return sum(account["bytes"] for account in accounts if account["client"] == client)


def assert_within_budgets(cluster: Any, device_memory: int, transfer_memory: int) -> dict[str, list[int]]:
    """MEM-1: no high-water mark above its budget, as the hosts counted and as the order did; gives the marks."""
    stats = cluster.stats()
    marks = {"devices": [each["high_water"] for each in device(cluster)], "arenas": []}
    assert all(0 < mark <= device_memory for mark in marks["devices"]), marks
    for host in stats["hosts"]:
        assert host["overfull"] == 0
        marks["arenas"].append(host["arena_high_water"])
    assert all(mark <= transfer_memory for mark in marks["arenas"]), marks
    order = stats["controller"]["high_water"]
    count = len(marks["devices"])
    assert all(mark <= device_memory for mark in order[:count]), order
    assert all(mark <= transfer_memory for mark in order[count:]), order
    return marks
