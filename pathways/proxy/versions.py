"""Which version of the protocol a client and the proxy speak.

There are two numbers: one of the protocol, one of what is serialized within it. Each side names a range. The proxy
answers with the highest numbers of both ranges. A client ends its process when an answer lies outside its range, so one
without a number in common gets an error.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pathways._jaxlib.proxy_messages import PROTOCOLS, serdes
from pathways.proxy.errors import Code, Refused


@dataclasses.dataclass(frozen=True)
class Version:
    """What a session speaks."""

    protocol: int
    serdes: int


def negotiate(oldest: Any, newest: Any) -> Version:
    """The version for a client that speaks from one IfrtProxyVersion to another. Raises `Refused` if there is none."""
    protocol = _common((oldest.protocol_version, newest.protocol_version), PROTOCOLS)
    serialized = _common((oldest.ifrt_serdes_version_number, newest.ifrt_serdes_version_number), serdes())
    if protocol is None or serialized is None:
        raise _none_in_common(_text(oldest), _text(newest))
    return Version(protocol, serialized)


def check(version: Any) -> Version:
    """The version that a session begins with. Raises `Refused` for one that `negotiate` would not give."""
    return negotiate(version, version)


def _common(theirs: tuple[int, int], ours: tuple[int, int]) -> int | None:
    highest = min(theirs[1], ours[1])
    return highest if highest >= max(theirs[0], ours[0]) else None


def _text(version: Any) -> str:
    return f"{version.protocol_version}/{version.ifrt_serdes_version_number}"


def _none_in_common(oldest: str, newest: str) -> Refused:
    ours = " to ".join(f"{protocol}/{serdes}" for protocol, serdes in zip(PROTOCOLS, serdes(), strict=True))
    return Refused(
        Code.FAILED_PRECONDITION,
        f"this proxy speaks the IFRT proxy protocol in the versions {ours}, but the client {oldest} to {newest}; "
        "install JAX 0.10.2 to 0.12 in the client (pip install 'jax>=0.10.2,<0.13'), or another release of the proxy",
    )
