"""Which client of the cluster a program of the proxy is: the operator's terms, and within them what it asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pathways import errors
from pathways.process.client_terms import ClientTerms
from pathways.proxy.service import Client

#: Of `pw.connect`; what a program may say of itself by `initialization_data`, and an operator of all programs.
TERMS = ("name", "weight", "priority", "memory", "runs", "at_limit")
#: A program may ask for less of these, not for more.
_BOUNDED = ("weight", "priority", "memory", "runs")


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What the operator allows programs beside computing."""

    function_s: float | None = None  # so long may a call of a Python function on hosts take; None: they call none
    files: bool = False  # whether hosts write and read files for them
    checkpoint_root: str | None = None  # the folder where those lie; None: anywhere


def terms_of(client: Client, offered: Mapping[str, Any]) -> ClientTerms:
    """The terms of a program: what it asks for, else what is offered, else the defaults of `pw.connect`. All programs
    have the name that is offered.

    Args:
        client: the program.
        offered: by `TERMS`: what the operator has said.

    Raises:
        OptionError: it asks for what makes no sense, or for more than is offered.
    """
    asked = {what: client.initialization_data[what] for what in TERMS if what in client.initialization_data}
    terms = ClientTerms.checked(**{"name": f"JAX at {client.peer}", **offered, **asked, **_name(offered)})
    for what in _BOUNDED:
        if what in offered and getattr(terms, what) > offered[what]:
            raise errors.OptionError(
                f"this proxy's operator gives a program {what}={offered[what]} at most, and it asks for {what}="
                f"{getattr(terms, what)}"
            )
    return terms


def _name(offered: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": offered["name"]} if "name" in offered else {}
