"""The option that every example has: where to run. Two lines of Pathways, and what they need around them."""

from __future__ import annotations

import argparse
from typing import Any

import jax

import pathways as pw


def add_cluster_option(parser: argparse.ArgumentParser, default: str = "embedded") -> None:
    """Give `parser` the option --cluster."""
    text = "embedded: this process's devices; local: host processes on this machine; else the address of a cluster"
    parser.add_argument("--cluster", default=default, help=f"{text} (default: {default})")


def cluster_target(where: str, *, islands: int = 1, hosts_per_island: int = 2, devices_per_host: int = 2) -> Any:
    """What to give to `pw.connect` for the option's value. The sizes are those of a local cluster."""
    if where == "embedded":
        # On a machine with accelerators this changes nothing; without, the CPU passes for eight devices.
        jax.config.update("jax_num_cpu_devices", 8)
        return None
    if where == "local":
        return pw.LocalCluster(islands=islands, hosts_per_island=hosts_per_island, devices_per_host=devices_per_host)
    return where
