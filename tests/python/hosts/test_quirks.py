"""pathways/quirks.py is the one table of what platforms do differently: no other code asks for a platform's name.

Map: CTL-1 with scalars that are read from host memory (`test_branches_read_copies_of_scalars_...`).
"""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
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


#: A process of its own, because all that connect to this process's devices have one embedded cluster.
COPIES = """
import dataclasses
import jax
import jax.numpy as jnp
import numpy as np
import pathways as pw
from pathways import quirks
from pathways.host import memory_moves

quirks._TABLE["cpu"] = dataclasses.replace(quirks.quirks_of("cpu"), copies_scalars=True)
seen, copied = [], memory_moves.scalar_to_host

def spied(scalar):
    seen.append(copied(scalar))
    return seen[-1]

memory_moves.scalar_to_host = spied
with pw.connect() as cluster:
    here = pw.make_virtual_device_set(cluster).add_slice(devices=1)
    step = pw.jit(lambda x, n: (x + 1, n + 1), devices=here)
    double, half = (pw.jit(lambda x, k=k: x * k, devices=here) for k in (2.0, 0.5))

    def turned(x, most):
        return jax.lax.while_loop(lambda c: c[1] < most, lambda c: step(*c), (x, jnp.int32(0)))[0]

    loop = pw.program(turned)
    branch = pw.program(lambda x, n: jax.lax.switch(n, [double, half], x))
    assert float(np.asarray(loop(np.float32(1), np.int32(7)))) == 8
    assert [float(np.asarray(branch(np.float32(8), np.int32(n)))) for n in (0, 1)] == [16, 4]
assert len(seen) >= 10, seen
assert {copy.sharding.memory_kind for copy in seen} == {memory_moves.HOST_MEMORY}, seen
"""


@pytest.mark.slow
def test_branches_read_copies_of_scalars_where_the_table_says_so() -> None:
    """CTL-1 as on a GPU, whose scalars are read from host memory: a CPU host is told to do the same."""
    subprocess.run([sys.executable, "-c", COPIES], check=True, timeout=120)
