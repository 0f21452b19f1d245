"""What clients may have: the terms that a new client asks for, checked against what the operator allows, and their
changes while the client runs.

The operator allows every client of a cluster the same (`ClusterOptions.client_memory` and its neighbours). A client may
ask for less; one that asks for more is refused. Who asks for nothing gets what is allowed. What the operator changes
later, for one client, is not bounded by that: it is the operator's own decision.

MEM-5, FLOW-1, SHARE-1: the native controller enforces the limits (csrc/ledger/client_limits.h).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pathways import errors
from pathways.process.client_terms import ClientTerms
from pathways.process.config import BY_CLIENT, ClusterOptions
from pathways.protocol import control_pb2 as pb

_CHANGEABLE = ("weight", "priority", "memory", "runs", "bytes")
_NEVER_NONE = ("weight", "priority")

MOST_BYTES = 4 << 20  # messages/credits.h: kMostWaitingBytes; an operator may allow one client more


def granted(request: pb.JoinRequest, options: ClusterOptions) -> ClientTerms:
    """The terms of a new client.

    Raises:
        OptionError: a term is out of range, above what the operator allows, or unknown to the cluster's policy.
    """
    asked = request.limits
    terms = ClientTerms.checked(
        request.name,
        request.weight or 1.0,
        request.priority,
        asked.memory or None,
        asked.runs or None,
        asked.bytes or None,
        "wait" if asked.waits else "error",
    )
    _check_policy(terms, options)
    for what, value, most in (
        ("weight", terms.weight, options.max_weight),
        ("priority", terms.priority, options.max_priority),
        ("memory", terms.memory, options.client_memory),
        ("runs", terms.runs, options.client_runs),
        ("bytes", terms.bytes, MOST_BYTES),
    ):
        if most is not None and value > most:
            raise errors.OptionError(
                f"the operator of this cluster allows a client {what}={most} at most, got {what}={value}. Ask for "
                f"less, or ask the operator to change it: `pathways limit ADDRESS CLIENT --{what}`"
            )
    return dataclasses.replace(
        terms, memory=terms.memory or options.client_memory or 0, runs=terms.runs or options.client_runs or 0
    )


def checkpoint_root(name: str, options: ClusterOptions) -> str:
    """The folder where the checkpoints of a client of this name must lie; empty: anywhere.

    Raises:
        OptionError: each client has a folder of its name, and the client has none that is a folder's name.
    """
    root = options.checkpoint_root or ""
    if BY_CLIENT not in root:
        return root
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise errors.OptionError(
            f"on this cluster each client's checkpoints lie in a folder of its name, {root}. Expected a client's name= "
            f"that may be the name of a folder, got {name!r}"
        )
    return root.replace(BY_CLIENT, name)


def changed(terms: ClientTerms, request: pb.LimitRequest, options: ClusterOptions) -> ClientTerms:
    """The terms of a client after the operator's change.

    Raises:
        OptionError: a term is out of range, unknown to the cluster's policy, or none is given.
    """
    made = with_changes(terms, {what: getattr(request, what) for what in _CHANGEABLE if request.HasField(what)})
    _check_policy(made, options)
    return made


def with_changes(terms: ClientTerms, changes: Mapping[str, Any]) -> ClientTerms:
    """The terms with other values of some of them; 0 takes a quota away.

    Raises:
        OptionError: one is out of range, or none is given.
    """
    if not changes:
        raise errors.OptionError(f"no limit to change was given: expected some of {', '.join(_CHANGEABLE)}")
    values = {what: value for what, value in changes.items() if value != 0 or what in _NEVER_NONE}
    checked = ClientTerms.checked(**values)
    return dataclasses.replace(terms, **{what: getattr(checked, what) for what in changes})


def native(code: Any, terms: ClientTerms) -> Any:
    """The limits as the native controller takes them."""
    return code.ClientLimits(
        terms.weight, terms.priority, terms.memory, terms.at_limit == "wait", terms.runs, terms.bytes
    )


def message(terms: ClientTerms) -> pb.ClientLimits:
    """The limits as other processes get them."""
    return pb.ClientLimits(**as_data(terms))


def as_data(terms: ClientTerms) -> dict[str, Any]:
    """The limits as plain data: the fields of the message `ClientLimits`."""
    return {**{what: getattr(terms, what) for what in _CHANGEABLE}, "waits": terms.at_limit == "wait"}


def _check_policy(terms: ClientTerms, options: ClusterOptions) -> None:
    policy = options.policy
    if policy == "fifo" and terms.weight != 1.0:
        raise errors.OptionError(
            "the cluster's policy is 'fifo': what comes first runs first, whatever its weight. Got "
            f"weight={terms.weight:g}. Start the cluster with policy='share'"
        )
    if policy != "priority" and terms.priority != 0:
        raise errors.OptionError(
            f"the cluster's policy is {policy!r}, which knows no priorities. Got priority={terms.priority}. "
            "Start the cluster with policy='priority'"
        )
