"""What a machine sends its hosts arrives whole, and the machine waits for none of them."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
from collections.abc import Awaitable, Callable

from pathways.process.outgoing import Outgoing, incoming

LONG = 8 << 20  # far more than a socket keeps


def played(play: Callable[[Outgoing, socket.socket], Awaitable[None]]) -> None:
    ours, theirs = socket.socketpair()

    async def run() -> None:
        outgoing = Outgoing(ours)
        try:
            await play(outgoing, theirs)
        finally:
            outgoing.close()

    with theirs:
        asyncio.run(run())
    assert ours.fileno() == -1


def test_messages_of_any_length_arrive_whole_and_in_their_order() -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    drawn = random.Random(seed)
    messages = [drawn.randbytes(drawn.choice((0, 1, 7, 300, 70_000, LONG))) for _ in range(20)]

    async def play(outgoing: Outgoing, theirs: socket.socket) -> None:
        for message in messages:
            outgoing.send(message)  # nobody reads yet
        came: list[bytes] = []
        reader = threading.Thread(target=lambda: came.extend(incoming(theirs)))
        reader.start()
        while outgoing._kept:
            await asyncio.sleep(0.001)
        outgoing._connection.shutdown(socket.SHUT_WR)
        await asyncio.to_thread(reader.join)
        assert came == messages

    played(play)


def test_the_loop_goes_on_while_a_long_message_is_sent() -> None:
    async def play(outgoing: Outgoing, theirs: socket.socket) -> None:
        outgoing.send(bytes(4 * LONG))
        reader = threading.Thread(target=lambda: next(incoming(theirs)))
        reader.start()
        turns = 0
        while outgoing._kept:
            await asyncio.sleep(0)
            turns += 1
        await asyncio.to_thread(reader.join)
        assert turns > 10

    played(play)


def test_nothing_is_kept_for_who_is_gone() -> None:
    async def play(outgoing: Outgoing, theirs: socket.socket) -> None:
        outgoing.send(bytes(LONG))
        theirs.close()
        while outgoing._kept:
            await asyncio.sleep(0.001)
        outgoing.send(bytes(LONG))
        assert not outgoing._kept

    played(play)


def test_a_message_that_is_cut_by_the_end_of_its_sender_is_none() -> None:
    ours, theirs = socket.socketpair()

    async def run() -> None:
        outgoing = Outgoing(ours)
        outgoing.send(b"whole")
        outgoing.send(bytes(LONG))
        outgoing.close()

    with theirs:
        asyncio.run(run())
        assert list(incoming(theirs)) == [b"whole"]
