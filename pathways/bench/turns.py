"""Systems that take turns: one works, and the others are stopped by signal with all their processes.

So what the machine does meanwhile falls on all alike, and a system that uses a core although nobody asks anything of it
does not slow its rivals. Owned by the main thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from pathways.bench.processes import ChildError

START_S, ANSWER_S = 300.0, 300.0


class Conversation(Protocol):
    """What the turns need of a system's process: a `processes.Child`, or a test's double."""

    def ask(self, *request: Any, timeout: float) -> Any:
        """Sends a request and returns its answer, or raises ChildError."""

    def freeze(self) -> None:
        """Stops its processes until `thaw`."""

    def thaw(self) -> None:
        """Lets them go on."""

    def end(self) -> None:
        """Ends it in good order."""

    def kill(self) -> None:
        """Ends it at once, with its tree."""


class Turns:
    """Systems by name. At its end all of them end in good order; when the block fails, at once.

    Args:
        open_child: the process of a name.
        settle: seconds between a system's waking and its work, in which timers that ran out meanwhile have their say.
        is_stopped: whether a system may be stopped; a stopped agent, for one, would be taken for lost.
    """

    def __init__(
        self,
        open_child: Callable[[str], Conversation],
        settle: float = 0.1,
        is_stopped: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._open = open_child
        self._settle = settle
        self._is_stopped = is_stopped
        self._children: dict[str, Conversation] = {}
        self._awake: str | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._children

    def start(self, name: str, *arguments: Any, timeout: float = START_S) -> None:
        """Starts a system. Raises ChildError when it does not start."""
        self._rest()
        self._children[name], self._awake = self._open(name), name
        self.ask(name, "start", *arguments, timeout=timeout)

    def start_all(self, names: Sequence[str], *arguments: Any, notes: list[str], where: str = "") -> None:
        """Starts them; why one does not start is a note."""
        for name in names:
            try:
                self.start(name, *arguments)
            except ChildError as error:
                notes.append(f"{name}{where} is not measured: {error}")

    def ask(self, name: str, *request: Any, timeout: float = ANSWER_S) -> Any:
        """One request to a system, while the others rest. One that fails is killed: it raises ChildError."""
        if name != self._awake:
            self._rest()
            self._awake = name
            if self._is_stopped(name):
                self._children[name].thaw()
                time.sleep(self._settle)
        try:
            return self._children[name].ask(*request, timeout=timeout)
        except ChildError:
            self.drop(name)
            raise

    def rounds(
        self, names: Sequence[str], repeats: int, *request: Any, notes: list[str], what: str
    ) -> Iterator[tuple[str, Any]]:
        """The answers of those that are there, A B C, A B C, ...; one that fails is a note and takes no more turns."""
        for _ in range(repeats):
            for name in names:
                if name in self:
                    try:
                        answer = self.ask(name, *request)
                    except ChildError as error:
                        notes.append(f"{name}{what}: {error}")
                    else:
                        yield name, answer

    def drop(self, name: str) -> None:
        """Kills a system."""
        self._children.pop(name).kill()
        self._awake = None if self._awake == name else self._awake

    def _rest(self) -> None:
        if self._awake is not None and self._is_stopped(self._awake):
            self._children[self._awake].freeze()
        self._awake = None

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for child in self._children.values():
            if kind is None:
                child.thaw()
                child.end()
            else:
                child.kill()
        self._children.clear()
