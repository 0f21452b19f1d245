"""The systems that `pathways bench dispatch` compares, by name. Loading one imports only what it needs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping

from pathways.bench.systems.base import System

SYSTEMS = {
    "pathways": "pathways.bench.systems.pathways_cluster:PathwaysCluster",
    "pathways-embedded": "pathways.bench.systems.pathways_cluster:PathwaysEmbedded",
    "jax": "pathways.bench.systems.jax_processes:JaxProcesses",
}
"""``module:Class`` of each, for `processes.Child`."""


def load(name: str, known: Mapping[str, str] = SYSTEMS) -> type[System]:
    """The class of a system. Raises ValueError for an unknown name."""
    if name not in known:
        raise ValueError(f"unknown system {name!r}: expected one of {', '.join(known)}")
    module, _, attribute = known[name].partition(":")
    found: type[System] = getattr(importlib.import_module(module), attribute)
    return found


def missing(system: type[System]) -> str | None:
    """None when the system can run here, else what to install."""
    absent = [package for package in system.packages if importlib.util.find_spec(package) is None]
    return f"{system.name} is not measured: install it with  pip install {' '.join(absent)}" if absent else None
