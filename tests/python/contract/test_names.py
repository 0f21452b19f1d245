"""Functions and programs of any name: the name of a Python function may have any letter."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import pathways as pw

NAMES = ["größe", "日本", "é.0", "🚀", 'q"x', "a\\b", "a\tb", "[red]x", "a::b{c}", "@x", "x" * 300]


@pytest.mark.one_island
@pytest.mark.parametrize("name", NAMES)
def test_a_function_of_any_name(cluster: Any, add: Any, name: str) -> None:
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(np.asarray(pw.jit(lambda x: x + 1, devices=add(1), name=name)(x)), x + 1)


def test_a_program_of_functions_with_letters_that_are_not_ascii(cluster: Any, add: Any) -> None:
    def größe(x: Any) -> Any:
        return x * 2

    def 加(x: Any) -> Any:
        return x + 1

    first, second = pw.jit(größe, devices=add(1)), pw.jit(加, devices=add(1))

    @pw.program
    def 訓練(x: Any) -> Any:
        return jax.value_and_grad(lambda x: second(first(x)))(x)

    assert [float(np.asarray(each)) for each in 訓練(np.float32(3))] == [7.0, 2.0]
    plan = 訓練.lower(np.float32(3)).as_text("plan")
    assert all(name in plan for name in ("größe.0", "加.1", "訓練"))
