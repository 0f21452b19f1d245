"""What the tests of `pw.Variable` share: a value, and a comparison."""

from __future__ import annotations

from typing import Any

import numpy as np

ONES = np.ones(4, np.float32)


def same(got: Any, expected: Any) -> None:
    """`got` has exactly the values `expected`, as float32."""
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected, np.float32))
