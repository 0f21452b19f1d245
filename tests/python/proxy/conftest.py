"""`door`: a proxy that the tests of a file share. `wire`: a session of it, by hand. `variables`: with them, a stock
client finds a proxy for the cluster of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from doors import Door, Wire
from stock_clients import serving


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


@pytest.fixture(scope="module")
def variables(cluster: Any) -> Iterator[dict[str, str]]:
    with serving(cluster.address) as made:
        yield made
