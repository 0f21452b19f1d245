"""`door`: a proxy that the tests of a file share. `wire`: a session of it, by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from doors import Door, Wire


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.close()


@pytest.fixture
def wire(door: Door) -> Iterator[Wire]:
    made = Wire(door).begin()
    yield made
    made.close()
