"""What `import pathways` imports, and when: a controller's process does without JAX."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pathways as pw


def test_every_public_name_is_there() -> None:
    assert set(pw.__all__) <= set(dir(pw))
    assert all(getattr(pw, name) is not None for name in pw.__all__)
    assert pw.jit is pw.jit and pw.connect.__module__ == "pathways.api.connect"
    with pytest.raises(AttributeError, match="module 'pathways' has no attribute 'jitt'"):
        pw.jitt  # noqa: B018


@pytest.mark.parametrize(
    "module",
    ["pathways", "pathways.controller.main", "pathways._jaxlib.coordination", "pathways.host.main"],
)
def test_jax_is_imported_when_it_is_used(module: str) -> None:
    code = f"import sys; import {module}; assert 'jax' not in sys.modules; import pathways; pathways.jit; import jax"
    done = subprocess.run([sys.executable, "-P", "-c", code], text=True, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr


def test_a_star_import_brings_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from pathways import *", names)
    assert set(pw.__all__) <= set(names)
