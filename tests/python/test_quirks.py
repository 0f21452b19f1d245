"""pathways/quirks.py is the one table of what platforms do differently: no other code asks for a platform's name."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import jax
import pytest

from pathways.quirks import quirks_of

PLATFORMS = {"cpu", "gpu", "cuda", "rocm", "tpu"}
ELSEWHERE = {
    "pathways/process/environment.py",  # finds a machine's devices before JAX is there
    "pathways/cluster/ray_agent.py",  # the same for what Ray assigned
    "pathways/host/main.py",  # registers the benchmarks' stand-in, which is built for CPU
}


def comparisons(text: str) -> Iterator[int]:
    """The lines that compare something with the name of a platform."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
            if any(isinstance(each, ast.Constant) and each.value in PLATFORMS for each in compared):
                yield node.lineno


def test_nobody_else_asks_for_the_name_of_a_platform(root: pathlib.Path) -> None:
    faults = []
    for path in sorted((root / "pathways").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name not in ELSEWHERE and not name.startswith("pathways/bench/"):
            faults += [f"{name}:{line}" for line in comparisons(path.read_text(encoding="utf-8"))]
    assert not faults, f"a quirk belongs into pathways/quirks.py: {faults}"


@pytest.mark.parametrize(
    ("text", "lines"), [("x = p == 'cpu'\n", [1]), ("\nif 'tpu' != p: pass\n", [2]), ("p = 'cpu'", [])]
)
def test_a_comparison_is_found(text: str, lines: list[int]) -> None:
    assert list(comparisons(text)) == lines


def test_one_platform_has_one_row_by_any_of_its_names() -> None:
    assert quirks_of("cuda") is quirks_of("rocm")
    assert quirks_of("gpu").lowered_as == "cuda"
    assert not quirks_of("a new one").is_host_memory
    assert quirks_of("cpu").is_host_memory and not quirks_of("cpu").copies_scalars
    assert quirks_of("tpu").callback_target is None


def test_jax_names_its_devices_as_the_table_does() -> None:
    assert jax.devices()[0].platform in PLATFORMS
