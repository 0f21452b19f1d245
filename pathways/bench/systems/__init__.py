"""The systems that `pathways bench dispatch` compares, by name. Loading one imports only what it needs."""

from __future__ import annotations

import importlib
import importlib.util

from pathways.bench.systems.base import System

SYSTEMS = {
    "pathways": "pathways.bench.systems.pathways_cluster:PathwaysCluster",
    "pathways-embedded": "pathways.bench.systems.pathways_cluster:PathwaysEmbedded",
    "jax": "pathways.bench.systems.jax_processes:JaxProcesses",
    "ray": "benchmarks.rivals.ray_actors:RayActors",
    "ray-graph": "benchmarks.rivals.ray_graph:RayGraph",
}


def load(name: str) -> type[System]:
    """The class of a system. Raises ValueError for an unknown name."""
    if name not in SYSTEMS:
        raise ValueError(f"unknown system {name!r}: expected one of {', '.join(SYSTEMS)}")
    module, _, attribute = SYSTEMS[name].partition(":")
    found: type[System] = getattr(importlib.import_module(module), attribute)
    return found


def missing(name: str) -> str | None:
    """None when the system can run here, else what to install."""
    absent = [package for package in load(name).packages if importlib.util.find_spec(package) is None]
    return f"{name} is not measured: install it with  pip install {' '.join(absent)}" if absent else None


def fits(name: str, hosts: int) -> bool:
    """Whether the system can have this many hosts at all."""
    return hosts <= load(name).max_hosts
