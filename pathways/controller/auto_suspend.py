"""Suspends clients for others: when arrays of a client keep another client's work out of device memory.

With `when_full="suspend"` a run or put that only live buffers keep out does not fail. The client that holds them is
suspended (its buffers go to the memory of the hosts, see suspend.py), and is brought back by itself when it has work.

Who is suspended, of those that hold memory where it is needed, and not the one that needs it:
    1. an idle client: it has had nothing under way, and nothing that waits, for `IDLE_S`;
    2. else, of equal or lower priority, one that has had its turn: `TURN_S` since it came back, or since it got the
       memory that it waited for. So clients that all work, and do not fit together, take turns.
Of several, one of the lowest priority; then the oldest.

SUSP-2: who waits for memory gets it, or fails: when no other client holds memory there, or none could be suspended, the
native controller refuses the work, as it does with `when_full="refuse"` (MEM-3). While busy clients of higher priority
hold it, it waits.

What an operator, or the client itself, suspends is brought back on request only (`ClientRecord.stays_away`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from pathways import errors
from pathways.controller.records import ClientRecord
from pathways.controller.suspend import Suspension

LOOK_S = 0.02
TURN_S = 1.0
IDLE_S = 0.2
#: A client that could not be suspended, for example because a host has no memory for its buffers, is not asked again
#: for so long.
RETRY_S = 5.0
#: Seconds that the runs of a client have to end, when it is suspended for others.
MOST_QUIET_S = 10.0


class AutoSuspension:
    """Owned by the controller's event loop thread; `run` is its task."""

    def __init__(self, controller: Any, suspension: Suspension, clients: Mapping[int, ClientRecord]) -> None:
        """`controller`: the native one. `clients`: those that there are now, by number."""
        self._controller = controller
        self._suspension = suspension
        self._clients = clients
        self._turn_ends: dict[int, float] = {}  # by client
        self._not_before: dict[int, float] = {}  # by client that could not be suspended
        self._asking: dict[int, float] = {}  # by client that asked for room at the last look: since when
        self._left_for: dict[int, int] = {}  # by client that is away: who asked; it stays away while that one asks
        self._quiet: dict[int, tuple[int, float]] = {}  # by client without work: its device time, and since when
        self._saving: set[int] = set()  # clients with saves or restores under way
        self._moves: dict[int, asyncio.Task[None]] = {}  # by client that leaves or comes back

    async def run(self) -> None:
        """Looks for clients that wait for room, again and again."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                try:
                    self._look(time.monotonic())
                except Exception:  # who asks would wait for ever if nobody looked again
                    logging.exception("looking for clients that wait for memory")
        finally:
            for move in self._moves.values():
                move.cancel()

    def _look(self, now: float) -> None:
        there = self._clients.keys()
        away = {each.number for each in self._clients.values() if each.suspended and not each.stays_away}
        self._turn_ends = {each: end for each, end in self._turn_ends.items() if each in there and end > now}
        self._not_before = {each: end for each, end in self._not_before.items() if each in there and end > now}
        requests = self._controller.room_requests(sorted(away - self._moves.keys()))
        asking = {client: self._asking.get(client, now) for client, _, _ in requests if client in there}
        for client in self._asking.keys() - asking.keys():
            self._turn_ends[client] = now + TURN_S  # it has its room now
        self._asking = asking
        leaving = away | self._moves.keys()
        self._left_for = {each: other for each, other in self._left_for.items() if each in leaving and other in asking}
        if not asking:
            self._quiet = {}  # what was seen then says nothing later
            return
        idle = self._idle(now)
        # Who has asked longest is first. When one comes back, the answers about the others are not true any more: they
        # wait for the next look.
        for client, has_room, holders in sorted(requests, key=lambda request: asking.get(request[0], now)):
            if client not in there or client in self._moves or client in self._left_for:
                continue
            if client in away and client in self._not_before:
                continue
            if has_room:
                self._begin(client, self._bring_back(self._clients[client]))
                break
            others = set(holders) & there - {client}
            if not self._make_room(client, others, idle, now) and client not in away:
                self._controller.refuse_room(client)

    def _idle(self, now: float) -> set[int]:
        """Clients that had no run, save or restore, under way or waiting, at each look of the last `IDLE_S`."""
        quiet: dict[int, tuple[int, float]] = {}
        self._saving.clear()
        for each in self._controller.clients():
            if each["tasks"]:
                self._saving.add(each["client"])
            if not any(each[name] for name in ("in_flight", "held", "has_unread", "is_waiting", "tasks")):
                before, since = self._quiet.get(each["client"], (-1, now))
                # Device time tells of runs that came and went between two looks.
                quiet[each["client"]] = each["device_ns"], since if before == each["device_ns"] else now
        self._quiet = quiet
        return {client for client, (_, since) in quiet.items() if now - since >= IDLE_S}

    def _make_room(self, client: int, holders: set[int], idle: set[int], now: float) -> bool:
        """Suspends one of `holders`, who hold memory where the client needs it, if it is time. False: it never will."""
        if holders & self._moves.keys():
            return True  # room is being made
        rank = self._priority(client)
        # What is kept for a save stays on the devices, and the save goes on only while its client is read.
        away = {each.number for each in self._clients.values() if each.suspended}
        able = holders - self._not_before.keys() - self._saving - away
        busy = {each for each in able - idle if self._priority(each) <= rank and each not in self._turn_ends}
        if now - self._asking[client] < IDLE_S + LOOK_S:
            return True  # it is not known yet who is idle
        due = able & idle or busy
        if due:
            victim = min(due, key=lambda each: (self._priority(each), each))
            self._left_for[victim] = client
            self._left_for.pop(client, None)
            self._begin(victim, self._take_away(self._clients[victim]))
        return bool(able)

    def _priority(self, client: int) -> int:
        return self._clients[client].terms.priority

    def _begin(self, client: int, steps: Coroutine[Any, Any, None]) -> None:
        move = asyncio.get_running_loop().create_task(steps)
        self._moves[client] = move
        move.add_done_callback(lambda _: self._moves.pop(client, None))

    async def _take_away(self, client: ClientRecord) -> None:
        try:
            nbytes = await self._suspension.suspend(client, to_disk=False, most_s=MOST_QUIET_S)
            logging.info("client %d is suspended for others: %d bytes left the devices", client.number, nbytes)
        except errors.PathwaysError as error:
            self._not_before[client.number] = time.monotonic() + RETRY_S
            logging.warning("client %d could not be suspended for others: %s", client.number, error)

    async def _bring_back(self, client: ClientRecord) -> None:
        if client.stays_away:
            return
        try:
            await self._suspension.resume(client)
            self._turn_ends[client.number] = time.monotonic() + TURN_S
        except errors.ResourceExhaustedError:  # there is no room any more
            pass
        except errors.PathwaysError as error:
            self._not_before[client.number] = time.monotonic() + RETRY_S
            logging.warning("client %d could not be brought back: %s", client.number, error)
