"""Threads for jobs: owners take turns, jobs of one owner keep their order, nothing is lost at the end."""

from __future__ import annotations

import threading
import time

from pathways.process.worker_threads import WorkerThreads


def test_owners_take_turns() -> None:
    threads, began, done = WorkerThreads("pw-test", most=1), threading.Event(), threading.Event()
    order: list[tuple[int, int]] = []
    threads.do(lambda: (began.wait(10), None)[1])  # so that the next ones wait together
    for number in range(50):
        threads.do(lambda number=number: order.append((1, number)), 1)  # type: ignore[misc]
    for number in range(3):
        threads.do(lambda number=number: order.append((2, number)), 2)  # type: ignore[misc]
    threads.do(lambda: done.set(), 1)
    began.set()
    assert done.wait(10)
    assert order[:6] == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)]
    assert order[6:] == [(1, number) for number in range(3, 50)]
    threads.stop()


def test_without_a_bound_no_job_waits_for_another() -> None:
    threads, barrier = WorkerThreads("pw-test"), threading.Barrier(9)
    for _ in range(8):
        threads.do(lambda: (barrier.wait(10), None)[1])
    barrier.wait(10)
    threads.stop()


def test_jobs_of_many_threads_are_all_done_before_the_end() -> None:
    threads, lock, done = WorkerThreads("pw-end", most=3), threading.Lock(), [0] * 5

    def count(owner: int) -> None:
        with lock:
            done[owner] += 1

    def give(owner: int) -> None:
        for _ in range(400):
            threads.do(lambda: count(owner), owner)

    givers = [threading.Thread(target=give, args=(owner,)) for owner in range(5)]
    for giver in givers:
        giver.start()
    for giver in givers:
        giver.join()
    threads.stop()
    deadline = time.monotonic() + 60
    while any(thread.name == "pw-end" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert done == [400] * 5
