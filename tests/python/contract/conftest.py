"""Slices for contract tests: `add` gives one on the cluster under test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import pathways as pw


@pytest.fixture
def add(cluster: Any) -> Callable[..., Any]:
    """`add(4)` or `add((2, 2))`: a slice of so many devices, or of a mesh of that shape with axes "x" and "y"."""
    devices = pw.make_virtual_device_set(cluster)

    def one(shape: int | tuple[int, ...], island: int | None = None) -> Any:
        sizes = (shape,) if isinstance(shape, int) else shape
        return devices.add_slice(shape=sizes, axis_names=("x", "y", "z")[:len(sizes)], island=island)

    return one
