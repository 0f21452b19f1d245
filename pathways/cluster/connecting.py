"""Connects to a running cluster by its address."""

from __future__ import annotations

from pathways.cluster.remote import RemoteControl, connect_unix
from pathways.process.client_terms import ClientTerms


def connect_to(address: str, terms: ClientTerms) -> RemoteControl:
    """Becomes a client of the cluster at `unix:/…`, on this machine, or `pathways://HOST:PORT`, on another one.

    Raises:
        ConnectError: no cluster listens there.
        PermissionDeniedError: a cluster on another machine does not let this process in.
        UnsupportedVersionError: the cluster runs another release, jax or jaxlib.
    """
    # What is needed for other machines takes a while to import.
    if address.startswith("pathways"):
        from pathways.agent.controller_session import is_far
        from pathways.cluster.far_client import connect_far

        if is_far(address):
            return connect_far(address, terms=terms)
    return connect_unix(address, terms=terms)
