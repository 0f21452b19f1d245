"""What one client, and all clients of a proxy, may have at most."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of a proxy, against clients that ask for more than they can use."""

    sessions: int = 256
    #: Per session: bytes of arrays that came and are not put yet, or that were read and not fetched.
    host_bytes: int = 4 << 30
    #: Per session: requests that wait for something; past that, the proxy reads no more of them.
    requests: int = 1 << 14
    #: Per session: bytes of replies that the client does not take; past that, none of its requests is handled. Likewise
    #: of what was read, beyond which the rest waits.
    unread_bytes: int = 4 << 20
    #: Per session: arrays; likewise executables and futures.
    handles: int = 1 << 20
    #: One request. The longest brings a program with its constants.
    request_bytes: int = 1 << 30
