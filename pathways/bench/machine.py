"""Where and with what a benchmark ran: the head of every results file, and the file's name."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from pathways.process import installation

_PACKAGES = ("jax", "jaxlib", "numpy", "ray")


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    found = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


def commit() -> str:
    """The short commit of the source, with "-dirty" when the runtime's own files differ; "unknown" outside git."""
    try:
        head = _git("rev-parse", "--short=9", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/pathways", ":/csrc")
    except OSError:
        return "unknown"
    return (f"{head}-dirty" if changed else head) or "unknown"


def describe() -> dict[str, Any]:
    """CPU, memory, software, commit, time and load, ready for JSON."""
    versions = {"pathways": installation.version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_average": round(os.getloadavg()[0], 2),
    }


def busy() -> list[str]:
    """A note, if the machine has other work now."""
    load = os.getloadavg()[0]
    return [f"The machine was busy at the start (load {load:.1f}): the figures are rough."] if load > 0.5 else []


def result_name(what: str, machine: dict[str, Any]) -> str:
    """``<what>-<commit>-<cpu>``, fit for a file name."""
    cpu = re.sub(r"[^a-z0-9]+", "-", machine["cpu"].lower()).strip("-")
    return f"{what}-{machine['commit']}-{cpu}"
