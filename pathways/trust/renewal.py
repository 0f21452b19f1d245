"""Credentials that stay valid: a thread renews them after two thirds of their life. Any thread may call.

Ports and `dial` ask for the current ones at each connection. A connection that is open stays open.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from pathways import errors
from pathways.trust.credentials import SKEW_S, Credentials

_LONGEST_WAIT_S = 60.0  # so that a machine that slept sees it soon: the clock of waits stands still meanwhile
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 600.0

_log = logging.getLogger(__name__)


class Renewal:
    """Keeps credentials valid, until `close`.

    Args:
        credentials: the first ones.
        renew: gives new ones for the old ones, as `Authority.renewed`, or
            `lambda old: pathways.trust.renewed_at(address, old)`.
        path: where they are saved each time, if given.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        credentials: Credentials,
        renew: Callable[[Credentials], Credentials],
        path: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._current = credentials  # replaced as a whole
        self._renew = renew
        self._path = path
        self._clock = clock
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="pathways-renewal", daemon=True)
        self._thread.start()

    def current(self) -> Credentials:
        """Those that are valid now, unless nobody could be reached for a third of their life."""
        return self._current

    def close(self) -> None:
        """Renews no more."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Renewal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loop(self) -> None:
        retry_s = 0.0
        while True:
            current = self._current
            due = current.issued + current.life_s * 2 / 3
            if self._clock() < current.issued - SKEW_S:
                due = 0.0  # it is not valid yet: the clock was wrong when it was made
            wait_s = max(due - self._clock(), retry_s)
            if self._closed.wait(min(max(wait_s, 0.0), _LONGEST_WAIT_S)):
                return
            if wait_s > _LONGEST_WAIT_S and self._clock() < due:
                continue
            retry_s = self._once(current, retry_s)

    def _once(self, current: Credentials, retry_s: float) -> float:
        """Renews once. Returns after how many seconds to try again, 0 when it went well."""
        try:
            renewed = self._renew(current)
            self._current = renewed
            if self._path is not None:
                renewed.save(self._path)
            return 0.0
        except (errors.PathwaysError, OSError) as error:
            left = current.expires - self._clock()
            _log.warning(
                "the certificate of %s is not renewed yet, and has %.0f s left: %s", current.identity, left, error
            )
        except Exception:
            _log.exception("the certificate of %s is not renewed yet", current.identity)
        return min(max(2 * retry_s, _FIRST_RETRY_S), _LAST_RETRY_S)
