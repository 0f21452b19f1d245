"""ERR-2 in the control plane, with doubles for the native core and the driver: an island is lost and comes back.

What is proved here: who is told what and in which order, whatever else happens meanwhile. With real hosts:
`contract/test_lost_hosts.py` and `tests/stress/test_kill_matrix.py`; the native half:
`tests/cpp/controller/test_controller_loss.cc`.
"""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from control_clusters import SIZES, SMALL, assert_gone, eventually, is_running, program, stats_with_notes
from control_doubles import GARBLED

from pathways import errors
from pathways.cluster.launcher import LocalClusterHandle, start_local_cluster
from pathways.cluster.remote import RemoteControl, connect_unix
from pathways.process import supervised

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture
def start() -> Iterator[Callable[..., LocalClusterHandle]]:
    """Starts clusters of doubles; they are closed, and have left nothing, when the test is over."""
    handles: list[LocalClusterHandle] = []

    def one(islands: int, hosts: int) -> LocalClusterHandle:
        handles.append(start_local_cluster(islands, hosts, 1, **SMALL))
        return handles[-1]

    yield one
    for handle in handles:
        handle.close()
        assert_gone(handle)


def hosts(control: RemoteControl) -> list[dict[str, Any]]:
    return list(stats_with_notes(control)["hosts"])


def back(control: RemoteControl, restarts: list[int]) -> list[dict[str, Any]]:
    """The hosts' numbers, once all are up and were started so often."""

    def look() -> list[dict[str, Any]] | None:
        found = hosts(control)
        is_back = all(host["state"] == "up" for host in found) and [host["restarts"] for host in found] == restarts
        has_answered = all("segments" in host for host in found)  # a busy machine's may be late
        return found if is_back and has_answered else None

    return list(eventually(look, f"all hosts are up, restarts {restarts}"))


def calls(control: RemoteControl, *names: str) -> list[str]:
    return [call for call in stats_with_notes(control)["controller"]["calls"] if call.split()[0] in names]


def kill(host: dict[str, Any]) -> int:
    os.kill(host["pid"], signal.SIGKILL)
    return int(host["pid"])


def guest(handle: LocalClusterHandle) -> RemoteControl:
    return connect_unix(handle.address, native="control_doubles", sizes=SIZES)


def test_an_island_is_lost_and_comes_back(start: Callable[..., LocalClusterHandle]) -> None:
    handle = start(2, 2)
    other = guest(handle)
    number = handle.control.register_program(program("good"), ((0, 1),))
    elsewhere = other.register_program(program("good"), ((2, 3),))
    before = hosts(handle.control)
    pid = kill(before[1])
    after = back(handle.control, [1, 1, 0, 0])
    assert [now["pid"] == then["pid"] for now, then in zip(after, before, strict=True)] == [False, False, True, True]
    assert not is_running(before[0]["pid"])
    lost, *restored = calls(handle.control, "lose_hosts", "restore_host")
    words = f"HostLostError: host 1 (pid {pid}) was killed by SIGKILL"
    assert lost.startswith(f"lose_hosts [0, 1] {words}") and "fake host 1 starts" in lost
    assert restored == ["restore_host 0 []", "restore_host 1 []"]
    for host in after[:2]:
        assert set(host["attached"]) == {str(handle.control.client_id), str(other.client_id)}
        assert host["registered"] == {str(number): "good ((0, 1),)"}
        assert host["predecessor_failure"][0].startswith(words) and host["predecessor_failure"][1] == other.client_id
        assert all(host["segments"])
    for host in after[2:]:
        assert host["replaced"] == ["host 0 loss 1", "host 1 loss 1"]
        assert list(host["registered"]) == [str(elsewhere)]
    assert handle.control.alive() and other.alive()
    # What comes later comes as ever.
    late = guest(handle)
    again = late.register_program(program("good"), ((0, 2),))
    late.wait_compiled(again, 10.0)
    assert all(str(late.client_id) in host["attached"] for host in hosts(late))
    assert [str(again) in host["registered"] for host in hosts(late)] == [True, False, True, False]
    late.close()
    other.close()


def test_everything_else_goes_on_meanwhile(
    start: Callable[..., LocalClusterHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HOST_0", "again-slow")
    handle = start(2, 1)
    leaver = guest(handle)
    leaver.register_program(program("good"), ((0, 1),))
    compiled: list[BaseException | None] = []
    waiting = handle.control.register_program(program("slow"), ((0,),))
    waiter = threading.Thread(target=lambda: compiled.append(_caught(handle.control.wait_compiled, waiting, 30.0)))
    waiter.start()
    eventually(lambda: str(waiting) in hosts(handle.control)[0]["registered"], "it waits for the compiler")
    pid = kill(hosts(handle.control)[0])
    waiter.join(20)
    assert isinstance(compiled[0], errors.HostLostError), "END-1: who waits for a lost host is told"
    assert f"host 0 (pid {pid}) was killed by SIGKILL" in str(compiled[0]) and "'slow'" in str(compiled[0])
    eventually(lambda: hosts(handle.control)[0]["state"] == "starting", "it starts")
    # A client joins, gets a slice there, and compiles for the other island; one leaves.
    joined = guest(handle)
    assert joined.allocate_slice((1,), ("x",), 0).hosts == (0,)
    joined.wait_compiled(joined.register_program(program("good"), ((1,),)), 10.0)
    leaver.close()
    assert hosts(handle.control)[0]["state"] == "starting", "it took too little time to disturb anything"
    # A program for the island itself is stored when it is back.
    number = joined.register_program(program("good"), ((0, 1),))
    joined.wait_compiled(number, 10.0)
    after = back(handle.control, [1, 0])
    assert sorted(after[0]["registered"]) == sorted([str(waiting), str(number)])
    assert set(after[0]["attached"]) == {str(handle.control.client_id), str(joined.client_id)}
    with pytest.raises(TimeoutError):  # it compiles anew, and takes as long
        handle.control.wait_compiled(waiting, 0.1)
    joined.close()


def test_a_successor_knows_what_waiting_runs_may_name(
    start: Callable[..., LocalClusterHandle], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A client has forgotten a program, but the order has not passed its command: runs before it may wait for the
    host.
    """
    passed = tmp_path / "forgotten"
    passed.write_text("")
    monkeypatch.setenv("FAKE_FORGOTTEN", str(passed))
    handle = start(2, 1)
    number = handle.control.register_program(program("good"), ((0, 1),))
    handle.control.forget_programs([number])
    assert handle.control.cluster_stats()["clients"][0]["programs"] == 0
    kill(hosts(handle.control)[0])
    assert list(back(handle.control, [1, 0])[0]["registered"]) == [str(number)]
    passed.write_text(str(number))
    kill(hosts(handle.control)[0])
    assert list(back(handle.control, [2, 0])[0]["registered"]) == []


def _caught(function: Callable[..., Any], *arguments: Any) -> BaseException | None:
    try:
        function(*arguments)
    except BaseException as error:
        return error
    return None


def test_killed_again_while_it_starts(
    start: Callable[..., LocalClusterHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HOST_1", "again-slow")
    handle = start(2, 2)
    first = kill(hosts(handle.control)[0])
    starting = eventually(
        lambda: next((host for host in hosts(handle.control) if host["state"] == "starting"), None), "it starts"
    )
    kill(starting)
    after = back(handle.control, [2, 2, 0, 0])
    # The native controller heard of one loss: what the first cost was lost then.
    assert len(calls(handle.control, "lose_hosts")) == 1 and f"pid {first}" in after[0]["predecessor_failure"][0]
    assert len(calls(handle.control, "restore_host")) == 2
    assert after[2]["replaced"] == ["host 0 loss 1", "host 1 loss 1"] * 2
    # And once more, whole.
    second = kill(after[1])
    after = back(handle.control, [3, 3, 0, 0])
    assert f"pid {second}" in after[0]["predecessor_failure"][0]
    assert len(calls(handle.control, "lose_hosts")) == 2
    assert after[2]["replaced"][-2:] == ["host 0 loss 2", "host 1 loss 2"]


def test_two_islands_at_once(start: Callable[..., LocalClusterHandle]) -> None:
    handle = start(3, 2)
    before = hosts(handle.control)
    kill(before[0])
    kill(before[3])
    after = back(handle.control, [1, 1, 1, 1, 0, 0])
    assert len(calls(handle.control, "lose_hosts")) == 2
    assert sorted(calls(handle.control, "restore_host")) == [f"restore_host {number} []" for number in range(4)]
    # Whoever was started while the others were away has heard of them since.
    for host in after:
        known = {peer for peer, nbytes in enumerate(host["segments"]) if nbytes}
        known |= {int(line.split()[1]) for line in host["replaced"]}
        assert known == set(range(6)), host
    assert sorted(after[4]["replaced"])[0::1] == sorted(
        f"host {peer} loss {1 if peer in lost else 2}" for lost in [first_lost_of(handle.control)] for peer in range(4)
    )


def first_lost_of(control: RemoteControl) -> list[int]:
    """The hosts of the loss that was seen first."""
    first = calls(control, "lose_hosts")[0]
    return [0, 1] if "[0, 1]" in first else [2, 3]


def test_a_client_that_garbles_its_memory_keeps_no_island_away(start: Callable[..., LocalClusterHandle]) -> None:
    """TRUST-1: the successor refuses the client's memory. The client is evicted; the island and the others go on."""
    handle = start(2, 1)
    hostile, good = guest(handle), guest(handle)
    os.pwrite(hostile.client_segment.fd, GARBLED, 0)
    kill(hosts(handle.control)[1])
    found = back(handle.control, [0, 1])
    assert [set(host["attached"]) for host in found] == [{"1", "2", "3"}, {"1", "3"}]
    assert [client["client"] for client in handle.control.cluster_stats()["clients"]] == [1, 3]
    good.check()
    hostile.close()
    good.close()


def test_an_island_that_does_not_come_back_ends_the_cluster(
    start: Callable[..., LocalClusterHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HOST_1", "again-raise")
    handle = start(2, 1)
    other = guest(handle)
    kill(hosts(handle.control)[1])
    failure = eventually(other.failure, "the cluster fails")
    assert isinstance(failure, errors.HostLostError)
    for word in ("host 1 (pid ", "RuntimeError: no devices today", "could not be started again, 3 times in a row"):
        assert word in str(failure)
    with pytest.raises(errors.HostLostError):
        handle.control.check()
    other.close()


def test_the_cluster_is_closed_while_an_island_starts(
    start: Callable[..., LocalClusterHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_HOST_0", "again-hang")
    handle = start(1, 2)
    kill(hosts(handle.control)[0])
    eventually(lambda: hosts(handle.control)[0]["state"] == "starting", "it starts")
    monkeypatch.setattr(supervised, "CLOSE_GRACE_S", 60.0)
    started = time.monotonic()
    handle.close()
    assert time.monotonic() - started < 50.0, "not at the second try"
